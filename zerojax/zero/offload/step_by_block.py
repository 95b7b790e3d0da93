"""A train step that runs block by block, with optimizer state, and params, in host memory. This module orders its programs and copies.

    forward      the weights of block i + 2 arrive beside block i
    backward     the weights of block i - 2 arrive beside block i; the last pass hands over each gradient as it becomes final
    update       group by group; the state of the next groups arrives and that of the groups before leaves beside it

Where the factor of the gradients is known beforehand (no clip or one by a late norm, no loss scale), a group is updated as soon as its
gradients are there. Its copies then run beside the backward pass of the blocks before it, and no gradient outlives its block. Otherwise the
groups wait for the norm. Measured on an H100: copies of 220 ms in each direction beside programs of 364 ms take 380 ms in all.

Groups arrive in the order in which their gradients become final, the last block first. The last stores run beside the next step, which
needs the new params alone. Where params are on the device, nothing else uses the link: groups are sent from the beginning of the step, as
many as the device may hold, and wait there for the backward pass. In its course more are sent, into the memory of activations that are no
longer needed. Where params are on the host, their copies come first, and a group is sent `LEAD` programs ahead.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings
from zerojax.zero.host import memory_kind, selection, settings
from zerojax.zero.offload import fetched_params, last_program, late_norm, state_stream
from zerojax.zero.offload import updates as updates_lib
from zerojax.zero.sharded_batch import arguments, inputs
from zerojax.zero.step_programs import arrivals, blocks, cut, one_pass
from zerojax.zero.step_programs import passes as passes_lib
from zerojax.zero.update import update as update_lib
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step block by block takes of each device, in bytes."""

    fetched: int  # params that arrive from the host in a step
    used: tuple[int, ...]  # while each program of a pass runs, without groups of the update
    params: int  # the params in host memory
    waiting: int  # gradients that wait for other passes, for the norm or for the end

    @property
    def passes(self) -> int:
        """Returns the peak of the passes."""
        return max(self.used)


LEAD = 3  # programs between the sending of a group's load and its update, where params are on the host


def is_chosen(
    partition: partition_lib.Partition,
    how: block_settings.Blocks,
    reduce_dtype: DTypeLike | None,
    clip: update_lib.Clip,
    one_program: placement.OneProgram | None = None,
) -> bool:
    """Returns whether a step with offload runs block by block. Nothing else decides it.

    It must where params are in host memory, and where `offload.late_norm` or `offload.by_block="on"` asks for it. "auto" chooses it on one
    device, where groups need not wait for the norm. On several the gathers of a block would not hide beside its neighbours.

    Args:
      partition: with offloaded leaves.
      how: where weights are gathered.
      reduce_dtype: the dtype in which gradients are summed over devices; None leaves the sum to the compiler.
      clip: limits the norm.
      one_program: why the step cannot be several programs, or None.

    Raises:
      UserError: it must, and another setting does not allow it.
    """
    chosen = partition.offload
    asked = {
        "params": selection.are_params_on_host(partition),
        "late_norm": chosen.late_norm,
        "by_block": chosen.by_block == settings.ON,
    }
    lacking = {
        "blocks is not given; pass make_train_step(blocks=<regex of the model's repeated modules>)": not how.pattern,
        "reduce_dtype is not given; pass make_train_step(reduce_dtype=jnp.float32)": reduce_dtype is None,
        f"offload={how.offload!r} keeps activations in host memory within one program; set it to '', and remat to 'full'": how.offload,
    }
    if one_program is not None:
        lacking[str(one_program)] = True
    why_not = next((why for why, is_lacking in lacking.items() if is_lacking), "")
    for name, is_asked in asked.items():
        if is_asked and why_not:
            raise UserError(f"offload.{name}: each block is a program of its own, and {why_not}")
    is_free = chosen.by_block == settings.AUTO and chosen.optimizer == settings.HOST and partition.mesh.size == 1
    return any(asked.values()) or (is_free and clip.is_early and not why_not)


def check_kinds(
    partition: partition_lib.Partition,
    sent: partition_lib.Partition,
    reduce_dtype: DTypeLike | None,
    how: block_settings.Blocks,
    one_program: placement.OneProgram | None,
) -> None:
    """Raises a UserError if a step cannot be a program for each kind of block.

    Args:
      partition: of the train state.
      sent: the same with a wire for each weight.
      reduce_dtype: of the sums over devices.
      how: where weights are gathered.
      one_program: why the step cannot be several programs, or None.
    """
    others = [path for path, own in sent.placements.items() if not (own.is_experts or own.wire == gather.PLAIN)]
    wrong = {
        f"{one_program}, or omit programs": one_program,
        "the compiler sums gradients; pass reduce_dtype=jnp.float32": reduce_dtype is None,
        "the state is offloaded, and offload.by_block decides; omit programs": partition.on_host,
        f"offload={how.offload!r} keeps activations in host memory within one program; omit either": how.offload,
        f"{min(others, default='')} is gathered in another form than as it is; omit programs": others,
    }
    for line, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"programs: is 'kinds', and {line}")


class BlockwiseStep:
    """`train_step(state, batch) -> (state, metrics)`, as a program for each pass of a block and for each update.

    Attributes:
      passes: the forward and backward passes.
      stream: of the groups' state.
      updates: of the groups.
      donate: whether the old state's memory is reused.
      is_early: whether the factor of the gradients is known before them.

    Args:
      gradients: the step without its updates as one program, for `trace` and `lower`.
      stream, passes: as the attributes.
      last: the program that ends the step.
      clip: limits the norm.
      scale: f(state) -> the factor of the loss.
    """

    def __init__(
        self,
        gradients: Callable[..., Any],
        stream: state_stream.StateStream,
        passes: passes_lib.Passes,
        last: last_program.LastProgram,
        clip: update_lib.Clip,
        scale: Callable[[Any], Any],
    ):
        self.passes, self.stream, self.updates, self.donate = passes, stream, stream.updates, stream.donate
        self.is_early, self._gradients, self._last, self._is_loaded = clip.is_early, gradients, last, False
        self._late_factor = jax.jit(clip.factor_of) if isinstance(clip, late_norm.LateClip) else None
        self._norm: Any = None  # the field `last_norm` of the state that the last step returned
        self._squares = jax.jit(lambda grads, state: update_lib.squares(grads, 1.0 / scale(state)))
        mesh = self.updates.partition.mesh
        is_real = mesh.devices.flat[0] in jax.devices()
        self._one = jax.device_put(np.float32(1), NamedSharding(mesh, P())) if is_real else None
        self._has_params_on_host = selection.are_params_on_host(self.updates.partition)

    def __call__(self, state: State, batch: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        """Sends a step to the device. Returns before it ends, but not before its last stores have begun."""
        with arguments.explaining(self.updates.partition, state, batch):
            return self._run(state, batch)

    def _run(self, state: State, batch: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        leaves, form = self._last.read(state)
        rest = form.rest(leaves)
        one_pass = self.passes.one_pass(rest, batch)
        cut, over_at = one_pass.schedule.cut, one_pass.over_at
        last, is_serial = len(cut.programs), cut.is_serial
        self.updates.set_grad_dtypes(dict.fromkeys(self.updates.weights, jnp.float32))
        is_first = not self._is_loaded
        if is_first:  # XLA times kernels on arrays of their size, for which a pass leaves little room
            self.updates.compile()
        factor = self._known_factor(state)
        is_early = factor is not None
        due = [max(over_at[w] for w in group.weights) if is_early else last for group in self.updates.groups]
        old = [leaves[n] for n in form.opt_state]
        weights = {path: leaves[form.params[path]] for path in self.updates.weights}
        groups = state_stream.StepGroups(
            self.stream, list(old), weights, due, is_early=is_early, is_first=is_first, is_serial=is_serial
        )
        # The first step of all builds attention's programs, and copies might begin meanwhile; see `streamed_step`.
        lead = LEAD if self._has_params_on_host or is_first else last
        chunk = max([1, *(group.nbytes for group in self.updates.groups)])
        bare = rest.replace(params=(), opt_state=())
        squares: dict[str, jax.Array] = {}
        grads: dict[str, jax.Array] = {}
        early = updates_lib.Handed(groups.grads, [old[n] for n in self.updates.shared], factor, None)

        def ready(index: int, final: dict[str, jax.Array], weights: dict[str, jax.Array]) -> None:
            leaving = {path: grad for path, grad in final.items() if path in groups.uses}
            if leaving:  # those of the others are computed in `finish`: each program costs the host time
                squares.update(zip(leaving, self._squares(passes_lib.by_number(leaving), bare).values()))
                if is_serial:
                    jax.block_until_ready(squares)
            groups.grads.update(leaving)
            grads.update({path: grad for path, grad in final.items() if path not in leaving})
            if is_early:
                groups.weights.update({path: weight for path, weight in weights.items() if path in groups.uses})
                groups.update(index, early)
            sent(index)
            if is_early and lead == last:
                groups.further = min(one_pass.room[index] // chunk, self.stream.in_flight)
            groups.load(index + lead, least=self.stream.ahead if lead == LEAD else 0)

        def sent(index: int) -> None:
            # After half of a forward pass activations soon need the memory of the step before's further groups.
            if index == last // 4:
                self.stream.make_room(0)
            if lead == last:
                groups.load(last)

        sent(-1)
        aux = self.passes(rest, batch, ready, sent)
        if aux["state"] and self.donate:  # a field that the loss returns as it was is the array that `finish` donates
            donated = {id(leaves[n]) for n in form.finished}
            aux["state"] = jax.tree.map(lambda leaf: leaf.copy() if id(leaf) in donated else leaf, aux["state"])
        finished, metrics, handed = form.finish([leaves[n] for n in form.finished], aux, grads, squares)
        groups.update(last, handed._replace(grads=groups.grads))
        groups.give_up(at_end=True)
        for numbers, new in (
            (form.finished, finished),
            ([form.opt_state[position] for position in groups.leaves], groups.leaves.values()),
            ([form.params[path] for path in groups.params], groups.params.values()),
        ):
            for number, leaf in zip(numbers, new):
                leaves[number] = leaf  # frozen weights stay
        new_state = form.state(leaves)
        self._is_loaded, self._norm = True, getattr(new_state, late_norm.FIELD, None)
        return new_state, metrics

    @property
    def ahead(self) -> int:
        """Returns the number of groups that may arrive before the first update is sent. Nothing leaves before it."""
        return self.stream.in_flight

    def one_pass(
        self, state: State, batch: PyTree, compiler_options: Mapping[str, Any] | None = None
    ) -> passes_lib.PassPrograms:
        """Returns the programs of one pass, for a state and a batch that may be abstract; see `Passes.one_pass`."""
        return self.passes.one_pass(self.updates.rest.of(state), batch, compiler_options)

    @property
    def _waits(self) -> bool:
        """Returns whether gradients wait for the norm, as they do in the first step with a late one."""
        return not self.is_early or self._late_factor is not None

    @property
    def holds_gradients(self) -> bool:
        """Returns whether all gradients are on the device at once: those of the pass before, or those that wait for the norm or the end."""
        return self.passes.count > 1 or self._waits or not self.updates.groups

    def memory(self, state: State, batch: PyTree) -> "Memory":
        """Returns what a step takes of a device, for a state and a batch that may be abstract. Compiles its programs."""
        one_pass = self.one_pass(state, batch)
        self.updates.set_grad_dtypes(dict.fromkeys(self.updates.weights, jnp.float32))
        cut, on_host = one_pass.schedule.cut, one_pass.weights
        copies = [cut.arrivals.sent(index) for index in range(-1, len(cut.programs))]
        num_passes = self.passes.count
        follows = (arrivals.STEP,) if num_passes == 1 else (arrivals.PASS, arrivals.STEP)
        itemsize = 2 if self.passes.in_16_bits and not self._waits else 4  # those that wait for the norm are float32
        waits = {path for path in one_pass.elements if self.holds_gradients or path not in self.updates.weights}
        waiting = itemsize * sum(one_pass.elements[path] for path in waits)
        # Those of a single pass come as its activations go; sums of several passes are there from the second on.
        adds_up = num_passes > 1
        kept = set() if adds_up else {one_pass.grads[path] for path in waits if isinstance(one_pass.grads[path], int)}
        beside = (waiting if adds_up else 0) + self.updates.resident_bytes
        used = max((one_pass.schedule.used(taken=one_pass.results - kept, follows=what) for what in follows), key=max)
        return Memory(
            fetched=num_passes * sum(cut.nbytes(number) for numbers in copies for number in numbers),
            used=tuple(beside + nbytes for nbytes in used),
            params=sum(map(cut.nbytes, on_host)),
            waiting=waiting,
        )

    def trace(self, state: State, batch: PyTree) -> jax.stages.Traced:
        """Traces the step without its updates as one program on the device, which never runs."""
        on_device = state.replace(params=jax.tree.map(memory_kind.as_on_device, tree.abstract(state.params)))
        return self._gradients.trace(self.updates.rest.of(on_device), batch)  # type: ignore[attr-defined]

    def lower(self, state: State, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the same."""
        return self.trace(state, batch).lower()

    def _known_factor(self, state: State) -> Any:
        """Returns the factor of the gradients if it is known before them, else None."""
        if not self.is_early or self._late_factor is None:
            return self._one if self.is_early else None
        norm = getattr(state, late_norm.FIELD)
        is_known = norm is self._norm or late_norm.is_known(norm)  # the step does not wait for a norm of its own
        return self._late_factor(norm) if is_known else None


def passes_of(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    how: block_settings.Blocks,
    batch: inputs.Layout,
    *,
    reduce_dtype: DTypeLike | None,
    compute_dtype: DTypeLike | None,
    in_16_bits: bool = False,
    options: Mapping[str, Any] | None = None,
    ahead: bool = False,
) -> passes_lib.Passes:
    """Returns the passes of a step block by block; its arguments are those of `explicit.value_and_grad`.

    `options` are XLA's, for each program. `ahead`: each also gathers the next block's weights, see `cut.ahead`.
    """
    in_16_bits = in_16_bits and batch.passes > 1  # one pass adds nothing up, and hands its gradients on
    # A gradient that is summed over devices in bf16 and added to a sum in bf16 need not be float32 in between.
    in_bf16 = in_16_bits and jnp.dtype(reduce_dtype) == jnp.bfloat16
    run = one_pass.one_pass(
        loss_fn,
        partition,
        how,
        passes=batch.passes,
        reduce_dtype=reduce_dtype,
        compute_dtype=compute_dtype,
        layout=batch.of_one_pass,
        runner=blocks.AheadBlocks if ahead else blocks.NestedBlocks,
        grad_dtype=jnp.bfloat16 if in_bf16 else jnp.float32,
    )
    return passes_lib.Passes(
        run,
        batch,
        compute_dtype,
        in_16_bits=in_16_bits,
        source=fetched_params.of(partition, partition.frozen),
        compiler_options=options,
        in_order=cut.ahead if ahead else list,
    )
