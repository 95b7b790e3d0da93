"""A train step whose offloaded optimizer state streams through the device. This module runs its programs and copies in order.

    sent      loads of the first groups, the program of the gradients, then for each group k:
              the load of group k + a, the update of group k, the store of group k

The program of the gradients also computes the norm and the verdict, and updates what stays on the device. Copies in both directions run
beside each other and beside the updates: on an H200 at 43 GB/s each way, against 26 within one program. A copy takes device memory when it
is sent. So the sender waits until a store has ended before it sends a load that would be too many. A copy that is sent after a program
waits for it, since its memory may be the program's. So the first loads are sent before the gradients, and the last stores run beside the
next step. The first step of all waits for its gradients before it sends loads.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.host import selection, settings, storage
from zerojax.zero.offload import updates as updates_lib
from zerojax.zero.sharded_batch import arguments
from zerojax.zero.weights import partition as partition_lib


def updates_of(partition: partition_lib.Partition, *, may_skip: bool) -> updates_lib.Updates | None:
    """Returns the updates of a partition's offloaded weights, and of others in a step block by block; None if nothing is offloaded."""
    if not partition.on_host:
        return None
    return updates_lib.Updates(partition, may_skip=may_skip, has_all=selection.are_params_on_host(partition))


def of_all_on_device(partition: partition_lib.Partition, *, may_skip: bool) -> updates_lib.Updates:
    """Returns the updates of a partition of which nothing is offloaded: no group has any, and a step's own update has them all."""
    with_settings = dataclasses.replace(partition, offload=settings.Offload(), resident=partition)
    return updates_lib.Updates(with_settings, may_skip=may_skip)


class StateStream:
    """Sends groups of optimizer state through the device.

    Attributes:
      updates: of the groups.
      in_flight: groups that the device holds at once.
    """

    def __init__(self, updates: updates_lib.Updates, *, donate: bool):
        self.updates, self.in_flight = updates, updates.in_flight
        self._donate = donate
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
                self._make_room(len(arriving))
                arriving.append(self.updates.load(groups[sent], leaves))
                sent += 1
            done = self.updates.update(group, arriving.popleft(), leaves, params, handed)
            stored = self.updates.store(group, done.leaving, leaves)
            self._leaving.append(stored)
            params.update(done.params)
            new_leaves.update(done.device)
            new_leaves.update(zip(group.host, stored))
            following = groups[number + 1].weights if number + 1 < len(groups) else ()
            for weight in set(group.weights) - set(following):
                del handed.grads[weight]
            if self._donate:
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
        room = min(self.ahead, len(groups), self.in_flight - self._num_leaving())
        return collections.deque(self.updates.load(group, leaves) for group in groups[:room])

    def _num_leaving(self) -> int:
        """Returns the number of stores that have not ended, and forgets the others."""
        while self._leaving and all(leaf.is_deleted() or leaf.is_ready() for leaf in self._leaving[0]):
            self._leaving.popleft()
        return len(self._leaving)

    def _make_room(self, num_arriving: int) -> None:
        """Waits until one more group may be sent to the device."""
        while self._leaving and len(self._leaving) + num_arriving >= self.in_flight:
            jax.block_until_ready([leaf for leaf in self._leaving.popleft() if not leaf.is_deleted()])


class StreamedStep(StateStream):
    """`train_step(state, batch) -> (state, metrics)`, as several programs.

    Attributes:
      gradients: the first program: (the state without offloaded leaves, batch) -> (the same, metrics, what the updates read).
      updates: the updates of the offloaded weights.
    """

    def __init__(self, gradients: Callable[..., Any], updates: updates_lib.Updates, *, donate: bool):
        super().__init__(updates, donate=donate)
        self.gradients, self._is_loaded = gradients, False

    def __call__(self, state: State, batch: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        """Sends a step to the device. Returns before it ends, but not before its last stores have begun."""
        with arguments.explaining(self.updates.partition, state, batch):
            return self._run(state, batch)

    def _run(self, state: State, batch: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        self._check(state, batch)
        leaves, groups = jax.tree.leaves(state.opt_state), self.updates.groups
        self.updates.prefetch(leaves, groups)
        if self._is_loaded:
            arriving = self.first_loads(leaves)
            new_state, metrics, handed = self.gradients(self.updates.rest.of(state), batch)
        else:
            # cuDNN builds its attention in a CUDA graph when the program is first run, and fails if copies begin meanwhile.
            new_state, metrics, handed = jax.block_until_ready(self.gradients(self.updates.rest.of(state), batch))
            arriving = self.first_loads(leaves)
            self._is_loaded = True
        params = dict(zip(self.updates.names, jax.tree.leaves(new_state.params)))
        new_leaves: dict[int, jax.Array] = {}
        for _ in self.sent(arriving, leaves, params, handed, new_leaves):
            pass
        return self._joined(state, new_state, params, new_leaves), metrics

    def trace(self, state: State, batch: PyTree) -> jax.stages.Traced:
        """Traces the program of the gradients, for the whole train state, abstract or not."""
        traced = self.gradients.trace(self.updates.rest.of(state), batch)  # type: ignore[attr-defined]
        self.updates.set_grad_dtypes({weight: grad.dtype for weight, grad in traced.out_info[2].grads.items()})
        return traced

    def lower(self, state: State, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the program of the gradients."""
        return self.trace(state, batch).lower()

    def with_gradients(self, compiled: jax.stages.Compiled) -> "StreamedStep":
        """Returns the step with a compiled program of the gradients, from `trace`, and with its other programs compiled."""
        found = copy.copy(self)
        found.gradients, found._is_loaded = compiled, False
        found.updates.compile()
        return found

    def _check(self, state: State, batch: PyTree) -> None:
        if jax.tree.structure(state.opt_state) != self.updates.structure:
            raise UserError(
                "state: its optimizer state is not in the offloaded form of the partition; pass the state that shard_train_state returned "
                "with it, or what a checkpoint restored into partition.abstract_state"
            )
        if not self.updates.knows_dtypes:
            self.trace(tree.abstract(state), batch)

    def _joined(self, state: State, new_state: State, params: PyTree, new_leaves: dict[int, Any]) -> State:
        """Returns the new train state, of which `new_state` has all but the optimizer state of items and their params."""
        new_leaves.update(zip(self.updates.rest.positions, jax.tree.leaves(new_state.opt_state)))
        opt_state = jax.tree.unflatten(
            jax.tree.structure(state.opt_state), [new_leaves[n] for n in range(len(new_leaves))]
        )
        updated = jax.tree.unflatten(jax.tree.structure(state.params), [params[name] for name in self.updates.names])
        return new_state.replace(params=updated, opt_state=opt_state)
