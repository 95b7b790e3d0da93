"""Evaluates a function of the params on each device's own examples, forward only. This module differentiates nothing.

It is for held-out losses and for sampling; weights are gathered as in a train step.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.ops import tokens as tokens_lib
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import block_settings, overlap
from zerojax.zero.gradients import explicit
from zerojax.zero.sharded_batch import inputs, outputs
from zerojax.zero.weights import gather
from zerojax.zero.weights import partition as partition_lib


def mean(
    loss_fn: Callable[..., Any], partition: partition_lib.Partition, *, batch_specs: PyTree = (), **how: Any
) -> Callable[[Any, Any], jax.Array]:
    """Returns f(params, batch) -> the loss over devices, forward only; `loss_fn(params, batch)` is a mean, a `Mean` or a `Sum`.

    `batch_specs` are those of `make_train_step`, and `how` is that of `by_row`.
    """
    forward = _forward(loss_fn, partition, **how)

    def on_device(params: PyTree, batch: PyTree, _: Any) -> jax.Array:
        loss, tokens = forward(params, batch)
        ways = mesh_lib.size(partition.mesh, mesh_lib.SUMMED)
        loss, _ = outputs.objective(outputs.loss_over_devices(loss, ways), 1)
        return jax.lax.psum(explicit.with_tokens(tokens, loss), mesh_lib.SUMMED)

    def mean_loss(params: PyTree, batch: PyTree) -> jax.Array:
        layout = inputs.Layout(partition.mesh, batch_specs=batch_specs)
        return explicit.mapped(on_device, partition, params, layout.specs(batch), P())(params, batch, None)

    return mean_loss


def by_row(function: Callable[..., Any], partition: partition_lib.Partition, **how: Any) -> Callable[[Any, Any], Any]:
    """Returns f(params, arrays) -> `function(params, *arrays)`, forward only; each device computes it of its own rows, all tokens of these.

    All arrays of `arrays` and of the result count rows in their first dim. Scalars among `arrays` are the same for all rows.

    Args:
      function: takes gathered weights.
      partition: how the params are sharded.
      how: `compute_dtype`, `blocks` and `heads`, see `where_used.where_used`; and `runner`, which makes what runs the blocks and takes
        the arguments of `overlap.Chain`, the default.
    """
    forward = _forward(function, partition, **how)

    def on_device(params: PyTree, arrays: PyTree, _: Any) -> PyTree:
        with tokens_lib.whole_rows():
            return forward(params, *arrays)[0]

    def of_rows(params: PyTree, arrays: PyTree) -> PyTree:
        rows = mesh_lib.row_sharding(partition.mesh).spec
        array_specs = jax.tree.map(lambda leaf: rows if leaf.ndim else P(), arrays)
        return explicit.mapped(on_device, partition, params, array_specs, rows)(params, arrays, None)

    return of_rows


def _forward(
    function: Callable[..., Any],
    partition: partition_lib.Partition,
    *,
    compute_dtype: DTypeLike | None,
    blocks: str,
    heads: str,
    runner: Callable[..., Any] = overlap.Chain,
) -> Callable[..., tuple[Any, overlap.Tokens]]:
    """Returns f(params, *args) -> (`function(params, *args)` on one device, the tokens of its gathers). Nothing is differentiated."""
    reduction, find = gather.Reduction(jnp.float32), explicit.finder(partition)
    how = block_settings.Blocks(blocks, heads, "full")

    def sink(path: str, leaf: Leaf) -> gather.ShardAndSink:
        return gather.ShardAndSink(leaf, gather.sink(find(path, leaf), reduction))

    def forward(params: PyTree, *args: Any) -> tuple[Any, overlap.Tokens]:
        chain = runner(find, compute_dtype, reduction, overlap.no_tokens())
        run = explicit.device_loss(function, partition, how, chain)
        with contextlib.ExitStack() as around:
            for wire in {weight.wire for weight in partition.placements.values()}:
                around.enter_context(wire.around())
            result = run(tree.map_with_path(sink, params), *args)
        return result, chain.tokens

    return forward
