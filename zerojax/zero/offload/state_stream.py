"""Copies of groups of optimizer state through the device. This module keeps as many in flight as the device has room for.

Copies in both directions run beside each other and beside the updates: on an H200 at 43 GB/s each way, against 26 within one program. A
copy takes device memory when it is sent. So the sender waits until a store has ended before it sends a load that would be too many.
"""

import collections
from typing import Any

import jax

from zerojax.errors import UserError
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
