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

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings
from zerojax.zero.host import memory_kind, selection, settings, storage
from zerojax.zero.offload import fetched_params, late_norm, streamed_step
from zerojax.zero.offload import updates as updates_lib
from zerojax.zero.sharded_batch import inputs
from zerojax.zero.step_programs import arrivals, blocks, cut, one_pass
from zerojax.zero.step_programs import passes as passes_lib
from zerojax.zero.update import update as update_lib
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step block by block takes of each device, in bytes."""

    fetched: int  # params that arrive from the host in a step
    passes: int  # the peak of the passes, without groups of the update
    params: int  # the params in host memory
    waiting: int  # gradients that wait for other passes or for the norm


LEAD = 3  # programs between the sending of a group's load and its update, where params are on the host

# finish(state, aux, grads, squares) -> (new state, metrics, factor, finite)
Finish = Callable[[Any, Any, Any, Any], tuple[Any, dict[str, jax.Array], Any, Any]]


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


class BlockwiseStep(streamed_step.StreamedStep):
    """`train_step(state, batch) -> (state, metrics)`, as a program for each pass of a block and for each update.

    Args:
      gradients: the step without its updates as one program, for `trace` and `lower`.
      updates: the updates of the offloaded weights.
      passes: the forward and backward passes.
      finish: `update.finish`. Its params and gradients have `optax.MaskedNode()` in place of weights that it does not update.
      scale: f(state) -> the factor of the loss.
      clip: limits the norm.
      donate: whether the old state's memory is reused.
    """

    def __init__(
        self,
        gradients: Callable[..., Any],
        updates: updates_lib.Updates,
        passes: passes_lib.Passes,
        finish: Finish,
        scale: Callable[[Any], Any],
        clip: update_lib.Clip,
        *,
        donate: bool,
    ):
        super().__init__(gradients, updates, donate=donate)
        self.passes, self.is_early, self.donate, self._scale = passes, clip.is_early, donate, scale
        self._late_factor = jax.jit(clip.factor_of) if isinstance(clip, late_norm.LateClip) else None
        self._norm: Any = None  # the field `last_norm` of the state that the last step returned
        self._squares = jax.jit(lambda grads, state: update_lib.squares(grads, 1.0 / scale(state)))
        partition = updates.rest.partition
        # `finish` leaves frozen weights as they are, and those that groups update are frozen in this partition.
        self._apart = _frozen(partition).union(partition.on_host, updates.weights)
        self._finish, replicated = finish, NamedSharding(partition.mesh, P())
        self._one = jax.device_put(np.float32(1), replicated) if self._is_real(partition) else None
        self._form: _Form | None = None
        self._has_params_on_host = selection.are_params_on_host(updates.rest.partition)

    def _run(self, state: State, batch: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        leaves, form = self._read(state)
        rest = form.rest(leaves)
        one_pass = self.passes.one_pass(rest, batch)
        last, over_at = len(one_pass.schedule.cut.programs), one_pass.over_at
        self.updates.set_grad_dtypes(dict.fromkeys(self.updates.weights, jnp.float32))
        if not self._is_loaded:  # XLA times kernels on arrays of their size, for which a pass leaves little room
            self.updates.compile()
        factor = self._known_factor(state)
        is_early = factor is not None
        due = [max(over_at[w] for w in group.weights) if is_early else last for group in self.updates.groups]
        old = [leaves[n] for n in form.opt_state]
        weights = {path: leaves[form.params[path]] for path in self.updates.weights}
        groups = _Groups(self, list(old), weights, due, is_early=is_early)
        # The first step of all builds attention's programs, and copies might begin meanwhile; see `streamed_step`.
        lead = LEAD if self._has_params_on_host or not self._is_loaded else last
        chunk = max([1, *(group.nbytes for group in self.updates.groups)])
        bare = rest.replace(params=(), opt_state=())
        squares: dict[str, jax.Array] = {}
        grads: dict[str, jax.Array] = {}
        early = updates_lib.Handed(groups.grads, [old[n] for n in self.updates.shared], factor, None)

        def ready(index: int, final: dict[str, jax.Array], weights: dict[str, jax.Array]) -> None:
            leaving = {path: grad for path, grad in final.items() if path in groups.uses}
            if leaving:  # those of the others are computed in `finish`: each program costs the host time
                squares.update(zip(leaving, self._squares(passes_lib.by_number(leaving), bare).values()))
            groups.grads.update(leaving)
            grads.update({path: grad for path, grad in final.items() if path not in leaving})
            if is_early:
                groups.weights.update({path: weight for path, weight in weights.items() if path in groups.uses})
                groups.update(index, early)
            sent(index)
            if is_early and lead == last:
                groups.further = min(one_pass.room[index] // chunk, self.in_flight)
            groups.load(index + lead, least=self.half if lead == LEAD else 0)

        def sent(index: int) -> None:
            # After half of a forward pass activations soon need the memory of the step before's further groups.
            if index == last // 4:
                self._make_room(0)
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
        return self.in_flight

    @property
    def half(self) -> int:
        """Returns the number of groups that arrive while as many leave."""
        return super().ahead

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
        waiting = itemsize * sum(one_pass.elements.values()) if self.holds_gradients else 0
        # Those of a single pass come as its activations go; sums of several passes are there from the second on.
        adds_up = num_passes > 1
        return Memory(
            fetched=num_passes * sum(cut.nbytes(number) for numbers in copies for number in numbers),
            passes=max(
                one_pass.schedule.peak(takes_results=adds_up or not self.holds_gradients, follows=what)
                for what in follows
            )
            + (waiting if adds_up else 0)
            + self.updates.resident_bytes,
            params=sum(map(cut.nbytes, on_host)),
            waiting=waiting,
        )

    def trace(self, state: State, batch: PyTree) -> jax.stages.Traced:
        """Traces the step without its updates as one program on the device, which never runs."""
        on_device = state.replace(params=jax.tree.map(memory_kind.as_on_device, tree.abstract(state.params)))
        return super().trace(on_device, batch)

    def _known_factor(self, state: State) -> Any:
        """Returns the factor of the gradients if it is known before them, else None."""
        if not self.is_early or self._late_factor is None:
            return self._one if self.is_early else None
        norm = getattr(state, late_norm.FIELD)
        is_known = norm is self._norm or late_norm.is_known(norm)  # the step does not wait for a norm of its own
        return self._late_factor(norm) if is_known else None

    def _read(self, state: State) -> tuple[list[Any], "_Form"]:
        """Returns a state's leaves, and their form, which is made once: the device waits for what the host does between two steps."""
        leaves, structure = jax.tree.flatten(state)
        if self._form is None or self._form.structure != structure:
            expected: Any = jax.tree.structure(self.updates.partition.abstract_state)
            if structure != expected:
                raise TypeError("the state is not like the partition's")  # `arguments.explaining` says how
            self._form = self._form_of(structure)
        return leaves, self._form

    def _form_of(self, structure: jax.tree_util.PyTreeDef) -> "_Form":
        """Returns the form of states of a structure."""
        numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
        rest = self.updates.rest.of(numbered)
        own = self._without(rest)
        paths = tree.map_with_path(lambda path, _: f"params/{path}", numbered.params)

        def finish(leaves: list[Any], aux: PyTree, grads: PyTree, squares: PyTree) -> tuple[Any, ...]:
            state = jax.tree.unflatten(jax.tree.structure(own), leaves)
            new_state, *others = self._finished(paths, state, aux, grads, squares)
            return jax.tree.leaves(new_state), *others

        shardings = jax.tree.leaves(self._without(self.updates.rest.partition.shardings))
        handed = self.updates.handed_shardings._replace(grads={})
        return _Form(
            structure,
            state=_Mold(numbered),
            rest=_Mold(rest),
            params=dict(zip(jax.tree.leaves(paths), jax.tree.leaves(numbered.params))),
            opt_state=jax.tree.leaves(numbered.opt_state),
            finished=jax.tree.leaves(own),
            # It takes and returns lists: to flatten the nodes of a state takes longer than the program.
            finish=jax.jit(
                finish,
                donate_argnums=(0,) if self.donate else (),
                out_shardings=(shardings, None, handed),
                keep_unused=True,  # as for an update: `updates.Updates.lower`
            ),
        )

    def _finished(self, paths: PyTree, state: State, aux: PyTree, grads: PyTree, squares: PyTree) -> tuple[Any, ...]:
        trained = self.updates.rest.partition.trainable_part(paths)
        own = jax.tree.map(lambda path: grads.get(path, optax.MaskedNode()), trained)
        squares = squares | update_lib.squares(grads, 1.0 / self._scale(state))
        of_all = jax.tree.map(lambda path: squares.get(path, jnp.float32(0)), paths)
        new_state, metrics, factor, finite = self._finish(state, aux, own, of_all)
        return new_state, metrics, self.updates.handed_to(state, {}, factor, finite)

    def _without(self, state: State) -> State:
        """Returns a state, or a tree like it, without the params that are frozen, updated by groups or in host memory."""
        keep = lambda path, leaf: optax.MaskedNode() if f"params/{path}" in self._apart else leaf  # noqa: E731
        return state.replace(params=tree.map_with_path(keep, state.params))

    @staticmethod
    def _is_real(partition: partition_lib.Partition) -> bool:
        return partition.mesh.devices.flat[0] in jax.devices()


class _Mold:
    """Makes trees like one from a list of leaves. Its own leaves are the numbers of theirs.

    A state of adapters holds thousands of `optax.MaskedNode()`. They are not made again for each tree, which takes milliseconds.

    Args:
      numbered: the tree; its leaves are numbers.
    """

    def __init__(self, numbered: PyTree):
        self._nodes, self._structure = jax.tree.flatten(numbered, is_leaf=_is_empty)
        self._places = [(place, node) for place, node in enumerate(self._nodes) if not _is_empty(node)]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        nodes = list(self._nodes)
        for place, number in self._places:
            nodes[place] = leaves[number]
        return jax.tree.unflatten(self._structure, nodes)


def _is_empty(node: PyTree) -> bool:
    return isinstance(node, tuple) and not jax.tree.leaves(node)


@dataclasses.dataclass(frozen=True)
class _Form:
    """States of one structure. Numbers count the leaves of the state."""

    structure: Any  # of the state
    state: _Mold  # f(leaves) -> the state
    rest: _Mold  # f(leaves) -> `Rest.of(state)`
    params: Mapping[str, int]  # the number of each param, by path, from the state
    opt_state: Sequence[int]  # the numbers of the optimizer state's leaves
    finished: Sequence[int]  # the numbers of the leaves that `finish` updates
    # f(these leaves, aux, grads, squares) -> (the new ones, metrics, what the updates of groups read), compiled
    finish: Callable[..., tuple[list[jax.Array], dict[str, jax.Array], updates_lib.Handed]]


class _Groups:
    """The groups of one step: what has arrived, what is updated and what has been sent back.

    Attributes:
      grads: final gradients that wait for their update, by path.
      weights: params on the device that wait for their update, by path.
      params: new params, by path, where they are stored.
      leaves: new leaves of the optimizer state, by position.
      uses: the number of updates to come of each weight.
      further: groups that the device has room for beyond those in flight.
    """

    def __init__(
        self,
        step: BlockwiseStep,
        old: list[Any],
        old_params: dict[str, jax.Array],
        due: Iterable[int],
        *,
        is_early: bool,
    ):
        self._step, self._updates, self._is_early = step, step.updates, is_early
        order = sorted(zip(due, range(len(step.updates.groups))))
        self._waiting = collections.deque((index, step.updates.groups[number]) for index, number in order)
        self._unsent = collections.deque(self._waiting)
        self._final = max((index for index, _ in order), default=0)
        self._arriving: collections.deque[list[jax.Array]] = collections.deque()
        self._old = old
        if self._updates.is_on_disk:
            self._updates.prefetch(self._old, [group for _, group in self._waiting])
        self.leaves: dict[int, jax.Array] = {}
        self._old_params = old_params
        self.uses = collections.Counter(weight for _, group in self._waiting for weight in group.weights)
        self.further = 0
        self.grads: dict[str, jax.Array] = {}
        self.weights: dict[str, jax.Array] = {}
        self.params: dict[str, jax.Array] = {}
        self._stored: collections.deque[tuple[list[Any], list[Any]]] = collections.deque()

    def load(self, until: int, *, least: int = 0) -> None:
        """Sends loads of the groups that are due by a program, as many as the device has room for. Waits for room if fewer than `least` of
        them arrive."""
        while self._unsent and self._unsent[0][0] <= until:
            arriving = len(self._arriving)
            if arriving + self._step._num_leaving() >= self._step.in_flight + self.further:
                if arriving >= least:
                    return
                self._step._make_room(arriving - self.further)
            self.give_up()
            group = self._unsent.popleft()[1]
            loading = self._updates.load(group, self._old)
            self._arriving.append(self._safe(loading))
            for weight in group.weights if not self._is_early else ():
                self._bring(weight)

    def update(self, index: int, handed: updates_lib.Handed) -> None:
        """Sends the updates and the stores of the groups that are due by a program."""
        while self._waiting and self._waiting[0][0] <= index:
            due, group = self._waiting.popleft()
            # A wait in the middle of the passes would keep programs from the device; after them only copies are left.
            self.load(due, least=self._step.half if due == self._final else 1)
            for weight in group.weights:
                self._bring(weight)
                (self.weights[weight],) = storage.arrived([self.weights[weight]])
            for position in () if self._step.donate else group.device:
                self._old[position] = self._old[position].copy()
            done = self._updates.update(group, self._arriving.popleft(), self._old, self.weights, handed)
            stored = self._updates.store(group, done.leaving, self._old)
            self._step._leaving.append(stored)
            self.leaves.update(done.device)
            self.leaves.update(zip(group.host, stored))
            self.weights.update(done.params)
            self._stored.append((stored, [self._old[position] for position in group.host if self._step.donate]))
            for weight in group.weights:
                self._finish(weight)

    def give_up(self, *, at_end: bool = False) -> None:
        """Deletes old leaves whose successors are stored; at the end all.

        The memory of an array that is deleted while a copy of it may run is freed some time later, and the host has little to spare.
        """
        while self._stored and (at_end or all(leaf.is_ready() for leaf in self._stored[0][0])):
            for leaf in self._stored.popleft()[1]:
                leaf.delete()

    def _bring(self, weight: str) -> None:
        """Begins to bring a param to the device."""
        old = self._old_params[weight]
        if weight not in self.weights:
            on_host = memory_kind.is_on_host(old)
            here = [old] if self._step.donate else [old.copy()]  # the update takes its memory
            loading = storage.load([old], [memory_kind.on_device(old.sharding)]) if on_host else here
            (self.weights[weight],) = self._safe(loading)

    def _safe(self, loading: storage.Loading) -> storage.Loading:
        """Waits for a load from a disk in the first step: cuDNN fails if copies begin while it builds its attention."""
        return loading if self._step._is_loaded else storage.arrived(loading)

    def _finish(self, weight: str) -> None:
        """Sends a param back after its last update."""
        self.uses[weight] -= 1
        if self.uses[weight]:
            return
        old, new = self._old_params[weight], self.weights.pop(weight)
        del self.grads[weight]
        if memory_kind.is_on_host(old):
            sharding = old.sharding
            if self._step.donate and not storage.is_on_disk(old):  # on a disk the new one is written over it
                old.delete()  # the new one may take its place
            (new,) = storage.leave([new], [old], [sharding])
        self.params[weight] = new


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
        layout=dataclasses.replace(batch, passes=1),
        runner=blocks.AheadBlocks if ahead else blocks.NestedBlocks,
        grad_dtype=jnp.bfloat16 if in_bf16 else jnp.float32,
    )
    return passes_lib.Passes(
        run,
        batch,
        compute_dtype,
        in_16_bits=in_16_bits,
        source=fetched_params.of(partition, _frozen(partition)),
        compiler_options=options,
        in_order=cut.ahead if ahead else list,
    )


def _frozen(partition: partition_lib.Partition) -> set[str]:
    """Returns the paths of the params that are not trained."""
    return {path for path, own in partition.placements.items() if not own.trainable}
