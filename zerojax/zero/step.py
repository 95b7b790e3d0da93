"""One training step: gather, gradients, clip, update, metrics. This module builds it from a loss function and a partition.

With loss scaling a step whose gradients are not all finite is skipped: only the scale changes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from zerojax import jitted, xla_flags
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero import step_values
from zerojax.zero.blocks import block_settings, tensor_parallel
from zerojax.zero.fp8 import modules as fp8_modules
from zerojax.zero.gradients import by_compiler, explicit
from zerojax.zero.offload import last_program, late_norm, state_stream, step_by_block, streamed_step
from zerojax.zero.offload import updates as updates_lib
from zerojax.zero.pipeline import step as pipeline_step
from zerojax.zero.sharded_batch import arguments, inputs, outputs, parts
from zerojax.zero.step_programs import xla_options
from zerojax.zero.update import loss_scale as loss_scale_lib
from zerojax.zero.update import update as update_lib
from zerojax.zero.weights import gather
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import experts, packed, unsent


def make_train_step(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    *,
    clip_norm: float = 0.0,
    loss_scale: loss_scale_lib.LossScale | None = None,
    compute_dtype: DTypeLike | fp8_modules.Fp8 | None = None,
    blocks: str | block_settings.Blocks | None = None,
    sums: DTypeLike | step_values.Sums | None = None,
    batch: step_values.BatchLayout = step_values.BatchLayout(),
    wires: step_values.Wires = None,
    donate: bool = True,
    **fields: Any,
) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
    """Builds `train_step(state, batch) -> (state, metrics)`, compiled, from a loss function written for one device and unsharded weights.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> loss`, or `-> (loss, {"state": {field: value}, "metrics": {name: value}})`, both
        keys optional. The loss is a mean over the batch, or a `zerojax.Mean` or `zerojax.Sum`, which stay exact over devices and
        passes where a mean of means is not (masks, padding). `state` holds the other inputs of the forward pass (batch statistics,
        `step`, a random key). The returned fields replace the state's. What is averaged, added or refused: `sharded_batch.outputs`.
      partition: from `shard_train_state`. Weights that it freezes have no gradient and stay bitwise unchanged.
      clip_norm: the upper limit of the gradients' global norm, or of that of the step before (`offload.late_norm`); 0 for no limit.
      loss_scale: a `DynamicLossScale` or `StaticLossScale`, for float16; the state's field `loss_scale` then holds its state. The
        optimizer gets unscaled gradients in float32.
      compute_dtype: dtype of floating weights and of the batch (`cast_batch`) in the forward pass; None keeps them. Or a
        `zerojax.Fp8`: the Linen modules whose matmuls run in fp8, in the forward and the backward pass. The program is compiled for fp8
        then, also where the model brings `zerojax.fp8.dot_general` itself.
      blocks: a `zerojax.Blocks`, or its regex alone: the modules that gather their own weights. None: "", or those of a pipeline.
      sums: a `zerojax.Sums`, or its reduce_dtype alone: how gradients are added up over devices and passes.
      batch: a `zerojax.BatchLayout`: how the batch is sharded and cast.
      wires: ordered (regex, choice), where weights are sent in another form than as they are: `zerojax.ByColumns` by paths of modules,
        `zerojax.ToExperts` and `zerojax.PackedWires` by paths of weights. A `PackedWires` alone is that of all weights that no other row
        names. It is for links that are slower than NVLink, and needs stage 3 and reduce_dtype; its `error_feedback` needs the state and
        the partition of `zerojax.with_unsent`.
      donate: whether the step reuses the old state's memory; the old state is then deleted.
      **fields: single fields of these values by their own names: `heads`, `remat`, `recompute`, `offload`, `activations`, `programs` of
        `Blocks`; `reduce_dtype`, `accum_dtype`, `grad_accum` of `Sums`; `batch_specs`, `cast_batch`, `check_context` of `BatchLayout`;
        `fp8`, a `Fp8` beside a compute_dtype; and `by_columns`, a regex, `expert_load` and `expert_parts`, for such rows of `wires`.

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
    values = step_values.read(partition, compute_dtype, blocks, sums, batch, wires, fields)
    reduce_dtype, passes = values.sums.reduce_dtype, values.sums.grad_accum
    limit = arguments.checked(partition, clip_norm, is_explicit=reduce_dtype is not None)
    scaling = loss_scale_lib.in_step(loss_scale, partition.abstract_state)
    layout = inputs.Layout(
        partition.mesh, passes, values.batch.batch_specs, reduce_dtype is not None, values.batch.cast_batch
    )
    wrapped = _wrapped(loss_fn, partition, values, scaling, layout)
    how: dict[str, Any] = {"compute_dtype": values.compute_dtype, "in_16_bits": values.sums.in_16_bits}
    in_form = by_compiler.value_and_grad
    if reduce_dtype is not None:
        in_form = functools.partial(explicit.value_and_grad, reduce_dtype=reduce_dtype, feedback=wrapped.feedback)
    gradients = in_form(wrapped.loss_fn, wrapped.sent, wrapped.hooked, passes=passes, layout=layout, **how)
    clip = late_norm.clip(partition, limit, may_skip=loss_scale is not None)
    options = _options(partition, values)
    in_kinds = values.blocks.programs == block_settings.KINDS
    if partition.pipeline and in_kinds:
        raise UserError(
            "programs: is 'kinds', and the stages of `pipe` are programs of their own anyway; omit programs"
        )
    if partition.pipeline:
        return pipeline_step.of(
            wrapped.loss_fn, wrapped.named, wrapped.blocks, layout, scaling, clip, reduce_dtype,
            one_program=values.one_program, donate=donate, options=options, **how,
        )  # fmt: skip
    updates = updates_lib.of(partition, may_skip=clip.may_skip)
    if in_kinds:
        step_by_block.check_kinds(partition, wrapped.sent, reduce_dtype, wrapped.blocks, values.one_program)
        updates = updates_lib.of_blocks(partition, wrapped.blocks.pattern, may_skip=clip.may_skip)
    own = update_lib.Own(updates.rest.partition, updates.rest.numbers) if updates else None
    finish = update_lib.finish(partition, own, scaling, clip)

    def train_step(state: State, batch: PyTree) -> tuple[Any, ...]:
        batch = layout.place(batch, values.compute_dtype)
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
    if updates is None:
        return step
    stream = state_stream.StateStream(updates, donate=donate)
    if not in_kinds and not step_by_block.is_chosen(partition, wrapped.blocks, reduce_dtype, clip, values.one_program):
        return streamed_step.StreamedStep(step, stream)
    options = options if in_kinds else xla_options.for_blocks(partition.mesh, but=xla_flags.names())
    how |= {"reduce_dtype": reduce_dtype, "options": options, "ahead": in_kinds}
    of_blocks = step_by_block.passes_of(wrapped.loss_fn, wrapped.named, wrapped.blocks, layout, **how)
    last = last_program.LastProgram(updates, finish, scaling.scale, donate=donate)
    return step_by_block.BlockwiseStep(step, stream, of_blocks, last, clip, scaling.scale)


class Wrapped(NamedTuple):
    """A loss as a step differentiates it.

    Attributes:
      loss_fn: returns (loss, aux), scaled, its matmuls in fp8.
      named: the partition, with the wires of weights by name: those that steps of several programs have too.
      sent: the same, with a wire for each weight.
      blocks: with the hooks of tensor parallelism.
      hooked: the same, with the hooks that keep values of the state.
      feedback: what wires do not send of gradients.
    """

    loss_fn: Callable[..., Any]
    named: partition_lib.Partition
    sent: partition_lib.Partition
    blocks: block_settings.Blocks
    hooked: block_settings.Blocks
    feedback: gather.Feedback


def _wrapped(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    values: step_values.Values,
    scaling: update_lib.Unscaled,
    layout: inputs.Layout,
) -> Wrapped:
    """Returns the loss that a step differentiates: each line wraps what the one before made. This is the order, with its reasons."""
    pattern, reduce_dtype = values.blocks.pattern, values.sums.reduce_dtype
    block_settings.warn_of_missed(partition.placements, pattern)
    experts.check(partition, reduce_dtype)
    # Tensor parallelism reads the specs of weights as they are stored, so before any wire. Matmuls in fp8 have no ring.
    placements = {} if values.fp8 else partition.placements
    sharded = tensor_parallel.hooks_of(values.blocks.activations, partition.mesh, placements)
    blocks = dataclasses.replace(values.blocks, hooks=sharded)
    # Wires of weights by name: fp8 and packed wires leave these weights alone.
    named = values.marked(partition, rest=False)
    # The scale of the loss is innermost: whatever reads a gradient from here on reads a scaled one.
    plain = outputs.with_aux(loss_fn, scaling.scale)
    # Matmuls in fp8 are put into modules while the loss is traced, and have weights gathered in fp8, which cannot be packed too.
    in_fp8, sent, kept = fp8_modules.in_step(values.fp8, plain, named, pattern)
    # The rest of the weights. A pipeline sends no packed ones, which it refuses itself.
    sent = sent if partition.pipeline else values.marked(sent, rest=True)
    feedback = unsent.in_step(sent, scaling.scale)
    # The check is outermost: it traces `plain`, without fp8, where the loss meets its first batch.
    checked = parts.checked(in_fp8, plain, layout) if values.batch.check_context else in_fp8
    # Histories of fp8 are hooks of the gradient alone: programs of a pipeline, or of blocks, do not hand them on.
    hooked = dataclasses.replace(blocks, hooks=(*blocks.hooks, *kept))
    return Wrapped(checked, named, sent, blocks, hooked, feedback)


def _options(partition: partition_lib.Partition, values: step_values.Values) -> dict[str, Any]:
    """Returns XLA's options for a step that is one program."""
    exchanges = any(
        isinstance(choice, packed.PackedWires) and choice.gradients != packed.PLAIN for _, choice in values.wires
    )
    return xla_options.of_step(
        partition,
        values.blocks.pattern,
        compute_dtype=values.compute_dtype,
        reduce_dtype=values.sums.reduce_dtype,
        in_fp8=values.fp8 is not None,
        exchanges=exchanges,
    )
