"""A train step whose offloaded optimizer state streams through the device. This module runs its programs and copies in order.

    sent      loads of the first groups, the program of the gradients, then for each group k:
              the load of group k + a, the update of group k, the store of group k

The program of the gradients also computes the norm and the verdict, and updates what stays on the device. A copy that is sent after a
program waits for it, since its memory may be the program's. So the first loads are sent before the gradients, and the last stores run
beside the next step. The first step of all waits for its gradients before it sends loads.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax

from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.offload import state_stream
from zerojax.zero.sharded_batch import arguments


class StreamedStep:
    """`train_step(state, batch) -> (state, metrics)`, as several programs.

    Attributes:
      gradients: the first program: (the state without offloaded leaves, batch) -> (the same, metrics, what the updates read).
      stream: of the offloaded state.
      updates: the updates of the offloaded weights.
    """

    def __init__(self, gradients: Callable[..., Any], stream: state_stream.StateStream):
        self.gradients, self.stream, self.updates, self._is_loaded = gradients, stream, stream.updates, False

    def __call__(self, state: State, batch: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        """Sends a step to the device. Returns before it ends, but not before its last stores have begun."""
        with arguments.explaining(self.updates.partition, state, batch):
            self._check(state, batch)
            old, by_name = (
                jax.tree.leaves(state.opt_state),
                lambda params: dict(zip(self.updates.names, jax.tree.leaves(params))),
            )
            groups = state_stream.StepGroups(self.stream, old, by_name(state.params), most=self.ahead)
            if self._is_loaded:
                groups.load()
            new_state, metrics, handed = self.gradients(self.updates.rest.of(state), batch)
            if not self._is_loaded:
                # cuDNN builds its attention in a CUDA graph when the program is first run, and fails if copies begin meanwhile.
                jax.block_until_ready((new_state, metrics, handed))
                self._is_loaded = True
            params = by_name(new_state.params)
            for _ in groups.finish(handed, {weight: params[weight] for weight in self.updates.weights}):
                pass
            return self._joined(state, new_state, params | groups.params, groups.leaves), metrics

    @property
    def ahead(self) -> int:
        """Returns the number of groups that may arrive before the program of the gradients ends."""
        return self.stream.ahead

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
