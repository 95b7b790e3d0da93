"""Sends groups of optimizer state through the device. This module keeps as many copies in flight as the device has room for.

Copies in both directions run beside each other and beside the updates: on an H200 at 43 GB/s each way, against 26 within one program. A
copy takes device memory when it is sent. So the sender waits until a store has ended before it sends a load that would be too many.
"""

import collections
from collections.abc import Iterator
from typing import Any

import jax

from zerojax.errors import UserError
from zerojax.zero.host import storage
from zerojax.zero.offload import updates as updates_lib


class StateStream:
    """Sends groups of optimizer state through the device.

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

    def sent(
        self,
        arriving: collections.deque[storage.Loading],
        leaves: list[Any],
        params: dict[str, jax.Array],
        handed: updates_lib.Handed,
        new_leaves: dict[int, jax.Array],
    ) -> Iterator[None]:
        """Sends the updates of all groups, and yields after each.

        Args:
          arriving: the loads that were sent before, of `first_loads`.
          leaves: of the optimizer state.
          params: by path; replaced by the new ones.
          handed: what the updates read; the gradients of each group are dropped behind it.
          new_leaves: takes the new leaves of the optimizer state, by position.
        """
        groups, sent = self.updates.groups, len(arriving)
        for number, group in enumerate(groups):
            while sent < len(groups) and len(arriving) < self.ahead:
                self.make_room(len(arriving))
                arriving.append(self.updates.load(groups[sent], leaves))
                sent += 1
            done = self.updates.update(group, arriving.popleft(), leaves, params, handed)
            stored = self.updates.store(group, done.leaving, leaves)
            self.left(stored)
            params.update(done.params)
            new_leaves.update(done.device)
            new_leaves.update(zip(group.host, stored))
            following = groups[number + 1].weights if number + 1 < len(groups) else ()
            for weight in set(group.weights) - set(following):
                del handed.grads[weight]
            if self.donate:
                for position in group.host:
                    leaves[position].delete()
            del done, stored
            yield

    @property
    def ahead(self) -> int:
        """Returns the number of groups that are loaded before their update is sent."""
        return max(1, self.in_flight // 2)

    def first_loads(self, leaves: list[Any]) -> collections.deque[storage.Loading]:
        """Sends the loads of the first groups, as far as the device has room."""
        groups = self.updates.groups
        room = min(self.ahead, len(groups), self.in_flight - self.num_leaving())
        return collections.deque(self.updates.load(group, leaves) for group in groups[:room])

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
