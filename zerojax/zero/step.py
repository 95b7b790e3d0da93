"""One training step: gather, gradients, clip, update, metrics. This module builds it from a loss function and a partition.

With loss scaling a step whose gradients are not all finite is skipped: only the scale changes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from zerojax import jitted, precision, xla_flags
from zerojax.ops import expert_parallel
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings, tensor_parallel
from zerojax.zero.fp8 import modules as fp8_modules
from zerojax.zero.gradients import accumulate, by_compiler, explicit
from zerojax.zero.offload import late_norm, step_by_block, streamed_step
from zerojax.zero.pipeline import step as pipeline_step
from zerojax.zero.sharded_batch import arguments, inputs, outputs, parts
from zerojax.zero.step_programs import xla_options
from zerojax.zero.update import loss_scale as loss_scale_lib
from zerojax.zero.update import update as update_lib
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import columns, experts, packed, unsent


def make_train_step(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    *,
    clip_norm: float = 0.0,
    grad_accum: int = 1,
    compute_dtype: DTypeLike | None = None,
    loss_scale: loss_scale_lib.LossScale | None = None,
    blocks: str = "",
    heads: str = "",
    remat: str = "dots",
    recompute: str = "",
    offload: str = "",
    reduce_dtype: DTypeLike | None = None,
    accum_dtype: DTypeLike | None = None,
    batch_specs: PyTree = (),
    cast_batch: bool | str = True,
    check_context: bool = True,
    donate: bool = True,
    fp8: fp8_modules.Fp8 | None = None,
    by_columns: str = "",
    wires: packed.PackedWires | None = None,
    activations: tensor_parallel.Table = (),
    expert_load: float = expert_parallel.LOAD,
    expert_parts: int = 1,
) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
    """Builds `train_step(state, batch) -> (state, metrics)`, compiled, from a loss function written for one device and unsharded weights.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> loss`, or `-> (loss, {"state": {field: value}, "metrics": {name: value}})`, both
        keys optional. The loss is a mean over the batch, or a `zerojax.Mean` or `zerojax.Sum`, which stay exact over devices and
        passes where a mean of means is not (masks, padding). `state` holds the other inputs of the forward pass (batch statistics,
        `step`, a random key). The returned fields replace the state's. What is averaged, added or refused: `sharded_batch.outputs`.
      partition: from `shard_train_state`. Weights that it freezes have no gradient and stay bitwise unchanged.
      clip_norm: the upper limit of the gradients' global norm, or of that of the step before (`offload.late_norm`); 0 for no limit.
      grad_accum: forward and backward passes a step; above 1 the batch's leaves are [grad_accum, examples, ...].
      compute_dtype: dtype of floating weights and of the batch (`cast_batch`) in the forward pass; None keeps them.
      loss_scale: a `DynamicLossScale` or `StaticLossScale`, for float16; the state's field `loss_scale` then holds its state. The
        optimizer gets unscaled gradients in float32.
      blocks, heads, remat, recompute, offload: see `where_used.where_used`.
      reduce_dtype: the dtype in which gradients are summed over devices. The loss function then sees one device's examples, and its
        means are averaged, as in DDP, FSDP and DeepSpeed; `zerojax.compare_sums` tells whether a loss stays exact. Devices draw
        different random numbers. None: it sees the global batch, and the compiler sums in the matmuls' dtype.
      accum_dtype: the dtype in which the gradients of several passes add up: float32 (None), or bfloat16, which takes half the memory. Each
        sum is then rounded up or down at random, so that its expected value is exact.
      batch_specs: specs of batch leaves whose first dim does not count examples: ordered (path regex, PartitionSpec), or a tree like
        the batch. `PartitionSpec()`: the leaf is replicated and the same in all passes (class weights, a random key). On a mesh with
        `context` they name every leaf; `PartitionSpec(("replica", "data"), "context")` shards the tokens of [examples, tokens, ...].
      cast_batch: whether `compute_dtype` applies to floating leaves of the batch, or a regex over the paths of those that it casts.
      fp8: the Linen modules whose matmuls run in fp8, in the forward and the backward pass; None for none. The program is compiled for
        fp8 then, also where the model brings `zerojax.fp8.dot_general` itself.
      by_columns: a regex over paths of modules whose matrix no device gathers: each computes with some of its columns for all devices'
        examples, and activations are sent instead. For an output projection of `ops.losses.one_pass_cross_entropy`, in a loss that is a
        mean, and a table of `zerojax.embedding_lookup`. No device holds their unsharded gradients either. Needs stage 3 and
        reduce_dtype. Empty: none.
      wires: weights and gradients as blocks of 8 or 4 bits, for links that are slower than NVLink, and a second copy of the weights on
        each host; None sends them as they are. Needs stage 3 and reduce_dtype. Its `error_feedback` needs the state and the partition of
        `zerojax.with_unsent`.
      activations: for tensor parallelism by `overrides`: ordered (regex over full paths of Linen modules, PartitionSpec) of what these
        return, over the axis `model`: P(None, "model") shards the tokens of [batch, tokens, ...], and P("model", "model") the examples
        of a device if the axis divides them, else the tokens. With a second spec, that inside of the module, its floating positional
        arguments are gathered once, and its result is scattered: P("model", "model"), P(). A dim that the axis does not divide is left
        to the compiler. A fourth entry, a regex over paths of weights in the module, says that with these alone it treats each example
        on its own and returns a sum over its matmuls' shards: then examples travel along a ring, beside its matmuls (`ring_matmuls`). Needs
        reduce_dtype, examples that the axis divides, and no fp8.
      expert_load: where overrides shard experts over `expert`, the rows for which one exchange has room, over those of a balanced router.
        It decides memory and bytes; more rows take further rounds, and none is dropped (`ops.expert_parallel`).
      expert_parts: such tokens travel in as many parts, one beside the matmuls of another, where they divide; 1: all at once.
      check_context: whether a loss is read on a mesh with `context`, and refused, with the line of code, if a token reads others of its
        device alone, is counted from 0 there, or a result is no sum or mean over tokens. A sum or mean is then right whether what it
        reads has tokens or not. What the loss does over the axis `context` itself is not checked.
      donate: whether the step reuses the old state's memory; the old state is then deleted.

    Returns:
      The step: a compiled function, or a `streamed_step.StreamedStep` if the partition has offloaded leaves. Its metrics are scalars: loss,
      grad_norm and the metrics that the loss function returned. With a late norm there is also clipped_norm, the norm that the gradients
      were clipped by. With loss scaling there are also loss_scale (of this step), skipped_steps
      (so far), overflow_leaf (the index of the first gradient that was not finite, or -1) and is_exhausted. The state must have
      `params` and `apply_gradients(grads=...)`, as flax's TrainState and its subclasses do. If weights
      are frozen, `apply_gradients` gets params and gradients with `optax.MaskedNode()` in their place.

    Raises:
      UserError: settings that contradict each other or the state.

    >>> train_step = make_train_step(loss_fn, partition, clip_norm=1.0)
    >>> state, metrics = train_step(state, batch)
    """
    clip_norm = arguments.checked(partition, clip_norm, is_explicit=reduce_dtype is not None)
    compute_dtype = precision.floating("compute_dtype", compute_dtype)
    reduce_dtype = precision.floating("reduce_dtype", reduce_dtype)
    sums = accumulate.checked_dtype(accum_dtype, grad_accum)
    dtypes: dict[str, Any] = {"compute_dtype": compute_dtype, "in_16_bits": sums}
    scaling = loss_scale_lib.in_step(loss_scale, partition.abstract_state)
    sharded = tensor_parallel.hooks_of(activations, partition.mesh, {} if fp8 else partition.placements)
    how = block_settings.How(blocks, heads, remat, recompute, offload, sharded)
    block_settings.warn_of_missed(partition.placements, blocks)
    partition = experts.marked(partition, expert_load, reduce_dtype, expert_parts)
    sent = columns.marked(partition, by_columns, blocks, reduce_dtype)
    layout = inputs.Layout(partition.mesh, grad_accum, batch_specs, reduce_dtype is not None, cast_batch)
    plain = outputs.with_aux(loss_fn, scaling.scale)
    loss_fn, sent, kept = fp8_modules.in_step(fp8, plain, sent, blocks)
    if not partition.pipeline:
        sent = packed.marked(sent, wires, blocks, reduce_dtype)
    feedback = unsent.in_step(sent, scaling.scale)
    loss_fn = parts.checked(loss_fn, plain, layout) if check_context else loss_fn
    in_form = by_compiler.value_and_grad
    if reduce_dtype is not None:
        in_form = functools.partial(explicit.value_and_grad, reduce_dtype=reduce_dtype, feedback=feedback)
    hooked = dataclasses.replace(how, hooks=(*how.hooks, *kept))
    gradients = in_form(loss_fn, sent, hooked, passes=grad_accum, layout=layout, **dtypes)
    clip = late_norm.clip(partition, clip_norm, may_skip=loss_scale is not None)
    exchanges = wires is not None and wires.gradients != packed.PLAIN
    in_dtypes = {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype}
    options = xla_options.of_step(partition, blocks, **in_dtypes, in_fp8=fp8 is not None, exchanges=exchanges)
    if partition.pipeline:
        given: dict[str, Any] = {"by_columns": by_columns, "fp8": fp8, "wires": wires, "donate": donate}
        given |= {"options": options, **dtypes}
        return pipeline_step.of(loss_fn, partition, how, layout, scaling, clip, reduce_dtype, **given)
    updates = streamed_step.updates_of(partition, may_skip=clip.may_skip)
    own = update_lib.Own(updates.rest.partition, updates.rest.numbers) if updates else None
    finish = update_lib.finish(partition, own, scaling, clip)

    def train_step(state: State, batch: PyTree) -> tuple[Any, ...]:
        batch = layout.place(batch, compute_dtype)
        with jax.named_scope("gradients"):
            (_, aux), grads = gradients(state.params, batch, state)
        with jax.named_scope("clip"):
            grads = update_lib.constrain(partition, grads)
            squares = update_lib.squares(grads, 1.0 / scaling.scale(state))
        new_state, metrics, factor, finite = finish(state, aux, grads, squares)
        return new_state, metrics, *(updates.handed(state, grads, factor, finite) if updates else ())

    resident = updates.rest.on_device if updates else partition
    step = jitted.jit(
        train_step,
        options,
        **arguments.of_call(resident),
        donate_argnums=(0,) if donate else (),
        in_shardings=(resident.shardings, None),
        out_shardings=(resident.shardings, None, *([updates.handed_shardings] if updates else [])),
    )
    if updates is None or not step_by_block.is_chosen(partition, how, reduce_dtype, fp8, clip, by_columns, wires):
        return step if updates is None else streamed_step.StreamedStep(step, updates, donate=donate)
    options = xla_options.for_blocks(partition.mesh, but=xla_flags.names())
    passes = step_by_block.passes_of(
        loss_fn, partition, how, layout, reduce_dtype=reduce_dtype, options=options, **dtypes
    )
    return step_by_block.BlockwiseStep(step, updates, passes, finish, scaling.scale, clip, donate=donate)
