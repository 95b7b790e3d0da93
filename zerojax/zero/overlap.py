"""Runs a model's blocks so that their collectives overlap the arithmetic of their neighbours. This module fixes the order of both.

    forward    gather(i + 1) beside block i       starts no earlier than block i
    backward   gather(i - 1) beside block i       likewise
               reduce(i)     beside block i - 1   ends before the backward pass of block i - 1

At any time about two blocks' weights are gathered and one block's gradients are unreduced. Without this order XLA's scheduler puts weight
gradients off to the end, and keeps everything that they read.

A head's backward pass may be short, because the head is not rematerialised. The block before it gathers beside the head's forward pass.

Arrays that a block keeps in host memory (`remat.for_host`) are copied to the host beside the next block. They are copied back beside the
backward pass of the next block, or of the one before it.

`jax.lax.optimization_barrier` sets the order, and XLA's scheduler honours it: each output of a barrier waits for all of its inputs.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import optax

from zerojax import mesh as mesh_lib
from zerojax.ops import columns as columns_lib
from zerojax.ops import fp8
from zerojax.zero import float32_grads, gather, placement, remat
from zerojax.zero.fp8 import gathered as fp8_gathered
from zerojax.zero.fp8 import history as fp8_history

Body = Callable[..., Any]
EMPTY: Mapping[str, jax.Array] = types.MappingProxyType({})


class Tokens(NamedTuple):
    """The tokens that pass through the blocks, see `Chain`: float32[], all 0."""

    start: jax.Array
    end: jax.Array
    sending: jax.Array
    sent: jax.Array


def no_tokens() -> Tokens:
    """Returns tokens that wait for nothing."""
    return Tokens(*[jnp.zeros((), jnp.float32)] * len(Tokens._fields))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCall:
    """One block's call: its body, and how its weights are gathered and reduced."""

    body: Body
    placements: Mapping[str, placement.Placement]
    dtype: Any
    reduction: gather.Reduction
    policy: Any

    def gather(self, stored: Mapping[str, jax.Array], scales: Mapping[str, jax.Array] = EMPTY) -> dict[str, Any]:
        """Returns the gathered weights; those with a scale in fp8 (`fp8.gathered`)."""
        return {path: self._gather(path, shard, scales.get(path)) for path, shard in stored.items()}

    def _gather(self, path: str, shard: jax.Array, scale: jax.Array | None) -> Any:
        with jax.named_scope(path):
            if scale is not None:
                return fp8_gathered.sent(shard, scale, self.placements[path])
            if self.placements[path].by_columns:
                return gather.to_columns(shard, self.placements[path], self.dtype)
            return gather.all_gather(shard, self.placements[path], self.dtype)

    def with_sinks(self, stored: Mapping[str, jax.Array], gathered: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the weights with respect to which the body is differentiated: sinks in place of those in fp8 or in columns."""

        def differentiated(path: str, weight: Any) -> jax.Array:
            if isinstance(weight, columns_lib.Columns):
                return jnp.zeros(weight.shard.shape, jnp.float32)
            return fp8_gathered.sink(weight, self.dtype or stored[path].dtype) if _is_in_fp8(weight) else weight

        return {path: differentiated(path, weight) for path, weight in gathered.items()}

    def run(self, weights: Any, others: Mapping[str, Any], histories: Mapping[str, Any], *arrays: jax.Array) -> Any:
        """Runs the body with weights of `with_sinks`, those in another form (`_others`), and histories (`fp8.history.inputs`)."""
        in_fp8 = {path: weight for path, weight in others.items() if _is_in_fp8(weight)}
        used = {**weights, **{path: fp8_gathered.widened(weight, weights[path]) for path, weight in in_fp8.items()}}
        by_columns = {path: weight for path, weight in others.items() if path not in in_fp8}
        used |= {path: columns_lib.add(path, weight, weights[path]) for path, weight in by_columns.items()}
        with fp8_gathered.known(in_fp8), fp8_history.known(histories):
            return self.body(used, *arrays)

    def divided(self, weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the weights that have gradients, and the frozen ones."""
        frozen = {path: weight for path, weight in weights.items() if not self.placements[path].trainable}
        return {path: weight for path, weight in weights.items() if path not in frozen}, frozen

    def reduce(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: self._sum(path, grad) for path, grad in grads.items()}

    def _sum(self, path: str, grad: jax.Array) -> jax.Array:
        with jax.named_scope(path):  # traces and ledgers name the weight of each collective
            if self.placements[path].by_columns:
                return gather.from_columns(grad, self.placements[path], self.reduction.dtype)
            return gather.reduce_pass(grad, self.placements[path], self.reduction)


class Chain:
    """Runs blocks so that each block's collectives overlap its neighbours' arithmetic in a fixed order.

    Tokens, scalar zeros, pass through the blocks in their order, and their cotangents in the reverse order. A block returns `start` once
    its input is there, and the next block's gather waits for it. A block returns the cotangent of `end` once its gradients are summed, and
    the end of the next block's backward pass waits for it. `sending` and `sent` do the same for copies to the host. The attribute `tokens`
    holds the last block's tokens. The order is lost unless the program reads them and their cotangents.
    """

    def __init__(
        self,
        find: Callable[[str, Any], placement.Placement],
        dtype: Any,
        reduction: gather.Reduction,
        tokens: Tokens,
        scales: Mapping[str, jax.Array] = EMPTY,
    ):
        self._find, self._dtype, self._reduction, self._scales = find, dtype, reduction, scales
        self.tokens, self._first, self._trace = tokens, tokens, _trace()

    def __call__(
        self, body: Body, weights: dict[str, gather.ShardAndSink], arrays: list[jax.Array], policy: Any
    ) -> Any:
        if _trace() != self._trace:
            return self._unordered(body, weights, arrays, policy)
        placements = {path: self._find(path, weight.stored) for path, weight in weights.items()}
        plan = BlockCall(body, placements, self._dtype, self._reduction, policy)
        scales = {path: self._scales[path] for path in weights if path in self._scales}
        given = (scales, fp8_history.of_block(weights))
        outputs, self.tokens = _block(plan, weights, given, self.tokens, tuple(arrays))
        return outputs

    def restart(self) -> None:
        """Forgets the blocks that ran, because the loss is traced again."""
        self.tokens = self._first

    def gather_leaf(self, path: str, weight: gather.ShardAndSink) -> jax.Array:
        """Returns one gathered weight, outside of the order."""
        placement = self._find(path, weight.stored)
        with jax.named_scope(path):
            if placement.by_columns:
                columns = gather.to_columns(weight.stored, placement, self._dtype)
                return columns_lib.add(
                    path, columns, gather.sink_of_columns(weight.sink, placement, self._reduction.dtype)
                )
            return gather.gather_shard(weight, placement, self._dtype, self._reduction)

    def _unordered(
        self, body: Body, weights: dict[str, gather.ShardAndSink], arrays: list[jax.Array], policy: Any
    ) -> Any:
        """Runs a block outside of the order, because tokens cannot pass through a transformation inside the model.

        The result can be differentiated twice, such as for the gradient of a gradient's norm.
        """

        def run(weights: dict[str, gather.ShardAndSink], *arrays: jax.Array) -> Any:
            return body({path: self.gather_leaf(path, weight) for path, weight in weights.items()}, *arrays)

        if policy is not None:
            run = jax.checkpoint(run, policy=remat.without_offload(policy))
        return run(weights, *arrays)


def _trace() -> Any:
    return jax.extend.core.get_opaque_trace_state(convention="zerojax")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(
    plan: BlockCall, weights: dict[str, gather.ShardAndSink], given: tuple[dict, dict], tokens: Tokens, arrays: tuple
) -> tuple[Any, Tokens]:
    """`given`: the scales of weights that are gathered in fp8, by path, and `fp8.history.inputs`."""
    scales, histories = given
    stored = {path: weight.stored for path, weight in weights.items()}
    gathered, tokens, arrays, _ = _begin(plan, stored, scales, tokens, arrays)
    return plan.run(plan.with_sinks(stored, gathered), _others(gathered), histories, *arrays), tokens


def _is_in_fp8(weight: Any) -> bool:
    return isinstance(weight, fp8.EightBits)


def _others(gathered: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights that are no plain arrays: in fp8, or a device's columns."""
    return {path: weight for path, weight in gathered.items() if not isinstance(weight, jax.Array)}


def _begin(
    plan: BlockCall, stored: dict[str, jax.Array], scales: dict, tokens: Tokens, arrived: Any, on_host: Any = None
) -> tuple[dict, Tokens, Any, Any]:
    """Gathers a block's weights once the block before it has begun; the next block's gather waits for them.

    The gathers of two blocks are thus never merged, and XLA merges those of one block into one collective (`xla_options`).

    Returns the gathered weights, the tokens, `arrived` and `on_host`. Arrays on the host may be fetched as early as the weights.
    """
    (stored, on_host), start = jax.lax.optimization_barrier(((stored, on_host), tokens.start))
    start, arrived, gathered = jax.lax.optimization_barrier((start, arrived, plan.gather(stored, scales)))
    return gathered, tokens._replace(start=start), arrived, on_host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """A block's residuals: the stored weights and scales, and the other leaves of the vjp function, on the device and on the host."""

    stored: dict[str, jax.Array]
    scales: dict[str, jax.Array]
    on_device: list[jax.Array | None]
    on_host: list[jax.Array | None]
    begun: jax.Array | None  # the token of a head's forward pass; None for other blocks
    paths: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})  # of the weight that a leaf is
    structure: Any = dataclasses.field(metadata={"static": True})


def _block_forward(
    plan: BlockCall, weights: dict[str, gather.ShardAndSink], given: tuple[dict, dict], tokens: Tokens, arrays: tuple
) -> tuple[Any, _Residuals]:
    scales, histories = given
    stored = {path: weight.stored for path, weight in weights.items()}
    gathered, tokens, arrays, _ = _begin(plan, stored, scales, tokens, arrays)
    # The barrier in `_begin` prevents CSE of the two passes; that of jax.checkpoint would also delay copies from the host.
    body = plan.run if plan.policy is None else jax.checkpoint(plan.run, policy=plan.policy, prevent_cse=False)
    trained, frozen = plan.divided(plan.with_sinks(stored, gathered))
    others = _others(gathered)
    outputs, pull = jax.vjp(
        lambda trained, histories, *arrays: body({**trained, **frozen}, others, histories, *arrays),
        trained,
        histories,
        *arrays,
    )
    leaves, structure = jax.tree.flatten(pull)
    path_of = {id(_values(weight)): path for path, weight in gathered.items()}
    paths = tuple(path_of.get(id(leaf)) for leaf in leaves)
    on_device = [leaf if path is None and not _is_on_host(leaf) else None for leaf, path in zip(leaves, paths)]
    on_host = [leaf if path is None and _is_on_host(leaf) else None for leaf, path in zip(leaves, paths)]
    # A copy to the host may take as long as a block's forward pass, so it ends two blocks later.
    outputs, _ = jax.lax.optimization_barrier((outputs, tokens.sent))
    on_host, sending = jax.lax.optimization_barrier((on_host, tokens.sending))
    tokens = tokens._replace(sent=tokens.sending, sending=sending)
    begun = tokens.start if plan.policy is None else None
    return (outputs, tokens), _Residuals(stored, scales, on_device, on_host, begun, paths, structure)


def _values(weight: Any) -> jax.Array:
    if isinstance(weight, columns_lib.Columns):
        return weight.shard
    return weight.values if _is_in_fp8(weight) else weight


def _is_on_host(leaf: jax.Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _block_backward(plan: BlockCall, residuals: _Residuals, cotangents: tuple[Any, Tokens]) -> tuple[Any, ...]:
    outputs, tokens = cotangents
    gathered, tokens, (arrived, on_device), on_host = _begin(
        plan, residuals.stored, residuals.scales, tokens, (outputs, residuals.on_device), residuals.on_host
    )
    if residuals.begun is not None:
        tokens = tokens._replace(start=residuals.begun)
    leaves = [
        _values(gathered[path]) if path is not None else near if far is None else far
        for path, near, far in zip(residuals.paths, on_device, on_host)
    ]
    pull = jax.tree.unflatten(residuals.structure, leaves)
    if jnp.dtype(plan.reduction.dtype) == jnp.float32 and plan.placements:
        mesh = next(iter(plan.placements.values())).stored.mesh
        pull = float32_grads.in_float32(pull, platform=mesh_lib.platform(mesh))
    grads, seen, *inputs = pull(arrived)
    inputs = [
        jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, tangent) for tangent in inputs
    ]
    # The previous block begins once all matmuls here are done and the next block's gradients are summed.
    grads, inputs, end = jax.lax.optimization_barrier((grads, inputs, tokens.end))
    sums, end = jax.lax.optimization_barrier((plan.reduce(grads), end))
    totals = {**dict.fromkeys(residuals.stored, optax.MaskedNode()), **sums}
    sinks = {path: gather.ShardAndSink(None, total) for path, total in totals.items()}  # type: ignore[arg-type]  # no gradient
    return sinks, (dict.fromkeys(residuals.scales), seen), tokens._replace(end=end), tuple(inputs)


_block.defvjp(_block_forward, _block_backward)
