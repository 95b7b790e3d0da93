"""Copies of groups of optimizer state through the device. This module keeps as many in flight as the device has room for.

Copies in both directions run beside each other and beside the updates: on an H200 at 43 GB/s each way, against 26 within one program. A
copy takes device memory when it is sent. So the sender waits until a store has ended before it sends a load that would be too many.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zerojax.errors import UserError
from zerojax.zero.host import memory_kind, storage
from zerojax.zero.offload import updates as updates_lib


class StateStream:
    """What a device holds of groups of optimizer state, from one step to the next.

    Attributes:
      updates: of the groups.
      donate: whether the old state's memory is reused.
      in_flight: groups that the device holds at once.
    """

    def __init__(self, updates: updates_lib.Updates, *, donate: bool):
        self.updates, self.donate, self.in_flight = updates, donate, updates.in_flight
        self._leaving: collections.deque[list[Any]] = collections.deque()  # stores that may not have ended
        if (updates.is_on_disk or updates.params_on_disk) and not donate:
            raise UserError(
                "donate: is False, and what offload keeps on a disk ('nvme') is written over the old state; omit donate"
            )

    @property
    def ahead(self) -> int:
        """Returns the number of groups that are loaded before their update is sent."""
        return max(1, self.in_flight // 2)

    def left(self, stored: list[Any]) -> None:
        """Notes a store that was sent."""
        self._leaving.append(stored)

    def num_leaving(self) -> int:
        """Returns the number of stores that have not ended, and forgets the others."""
        while self._leaving and all(leaf.is_deleted() or leaf.is_ready() for leaf in self._leaving[0]):
            self._leaving.popleft()
        return len(self._leaving)

    def make_room(self, num_arriving: int) -> None:
        """Waits until one more group may be sent to the device."""
        while self._leaving and len(self._leaving) + num_arriving >= self.in_flight:
            jax.block_until_ready([leaf for leaf in self._leaving.popleft() if not leaf.is_deleted()])


class StepGroups:
    """The groups of one step.

    Args:
      stream: sends their state.
      old: the leaves of the optimizer state.
      old_params: the params that groups update, by path, where they are stored.
      due: for each group, the program after which it may be updated; omitted where all wait for the same.
      is_early: whether the programs hand over params that are no longer read; else they are brought with the state of their group.
      is_first: whether the step is the first of all.
      is_serial: whether each update ends before the next program is sent.
      most: the groups that arrive at once, at most; None: as many as the device has room for.

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
        stream: StateStream,
        old: list[Any],
        old_params: dict[str, jax.Array],
        due: Sequence[int] = (),
        *,
        is_early: bool = True,
        is_first: bool = False,
        is_serial: bool = False,
        most: int | None = None,
    ):
        self._is_serial, self._most = is_serial, most or len(stream.updates.groups)
        due = due or [0] * len(stream.updates.groups)
        self._stream, self._updates, self._is_early, self._is_first = stream, stream.updates, is_early, is_first
        order = sorted(zip(due, range(len(due))))
        self._waiting = collections.deque((index, stream.updates.groups[number]) for index, number in order)
        self._unsent = collections.deque(self._waiting)
        self._final = max((index for index, _ in order), default=0)
        self._arriving: collections.deque[list[jax.Array]] = collections.deque()
        self._old = old
        self._updates.prefetch(self._old, [group for _, group in self._waiting])
        self.leaves: dict[int, jax.Array] = {}
        self._old_params = old_params
        self.uses = collections.Counter(weight for _, group in self._waiting for weight in group.weights)
        self.further = 0
        self.grads: dict[str, jax.Array] = {}
        self.weights: dict[str, jax.Array] = {}
        self.params: dict[str, jax.Array] = {}
        self._stored: collections.deque[tuple[list[Any], list[Any]]] = collections.deque()

    def load(self, until: int = 0, *, least: int = 0) -> None:
        """Sends loads of the groups that are due by a program, as many as the device has room for. Waits for room if fewer than `least` of
        them arrive."""
        while self._unsent and self._unsent[0][0] <= until and len(self._arriving) < self._most:
            arriving = len(self._arriving)
            if arriving + self._stream.num_leaving() >= self._stream.in_flight + self.further:
                if arriving >= least:
                    return
                self._stream.make_room(arriving - self.further)
            self.give_up()
            group = self._unsent.popleft()[1]
            loading = self._updates.load(group, self._old)
            self._arriving.append(self._safe(loading))
            for weight in group.weights if not self._is_early else ():
                self._bring(weight)

    def update(self, index: int, handed: updates_lib.Handed) -> None:
        """Sends the updates and the stores of the groups that are due by a program."""
        while self._waiting and self._waiting[0][0] <= index:
            self.update_next(handed)

    def update_next(self, handed: updates_lib.Handed) -> None:
        """Sends the update and the store of the next group. Its gradients are dropped behind it."""
        due, group = self._waiting.popleft()
        # A wait in the middle of the passes would keep programs from the device; after them only copies are left.
        self.load(due, least=self._stream.ahead if due == self._final else 1)
        for weight in group.weights:
            self._bring(weight)
            (self.weights[weight],) = storage.arrived([self.weights[weight]])
        for position in () if self._stream.donate else group.device:  # the update takes their memory
            self._old[position] = self._old[position].copy()
        done = self._updates.update(group, self._arriving.popleft(), self._old, self.weights, handed)
        if self._is_serial:
            jax.block_until_ready(done.params)
        stored = self._updates.store(group, done.leaving, self._old)
        self._stream.left(stored)
        self.leaves.update(done.device)
        self.leaves.update(zip(group.host, stored))
        self.weights.update(done.params)
        self._stored.append((stored, [self._old[position] for position in group.host if self._stream.donate]))
        for weight in group.weights:
            self._finish(weight)

    def finish(self, handed: updates_lib.Handed, params: dict[str, jax.Array]) -> Iterator[None]:
        """Sends the updates of all groups, and yields after each. `params` are theirs, by path, on the device, which the updates delete."""
        self.grads, self.weights = handed.grads, params
        while self._waiting:
            self.update_next(handed)
            yield
        self.give_up(at_end=True)

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
            here = [old] if self._stream.donate else [old.copy()]  # the update takes its memory
            loading = storage.load([old], [memory_kind.on_device(old.sharding)]) if on_host else here
            (self.weights[weight],) = self._safe(loading)

    def _safe(self, loading: storage.Loading) -> storage.Loading:
        """Waits for a load from a disk in the first step: cuDNN fails if copies begin while it builds its attention."""
        return storage.arrived(loading) if self._is_first else loading

    def _finish(self, weight: str) -> None:
        """Sends a param back after its last update."""
        self.uses[weight] -= 1
        if self.uses[weight]:
            return
        old, new = self._old_params[weight], self.weights.pop(weight)
        del self.grads[weight]
        if memory_kind.is_on_host(old):
            sharding = old.sharding
            if self._stream.donate and not storage.is_on_disk(old):  # on a disk the new one is written over it
                old.delete()  # the new one may take its place
            (new,) = storage.leave([new], [old], [sharding])
        self.params[weight] = new
