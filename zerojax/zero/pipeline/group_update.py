"""Updates the weights that live on one group of a pipeline. This module makes a train state of them alone, with the optimizer state that is
theirs, so that the update of a step without a pipeline serves each group. Where that state is in host memory or on a disk, it streams
through the group's devices after the update of what stays there (`offload.state_stream.StateStream`)."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax import tree
from zerojax.errors import UserError
from zerojax.optim import fused, locality, pieces
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.gradients import accumulate
from zerojax.zero.offload import state_stream
from zerojax.zero.offload import updates as updates_lib
from zerojax.zero.pipeline import state
from zerojax.zero.step_programs import one_pass
from zerojax.zero.update import one_pass_update
from zerojax.zero.update import update as update_lib
from zerojax.zero.weights import gather
from zerojax.zero.weights import partition as partition_lib


class GroupUpdate:
    """The update of one group.

    Attributes:
      trained: the paths of its weights that have a gradient, in the order of the params.
      reads: the paths of the leaves of the state that it reads.
      abstract: these leaves.
      stream: of its optimizer state in host memory or on a disk; None if it has none.

    Args:
      placed: the pipeline of the state.
      group: the number of the group.
      reduction: of its passes.
      scaling, clip: of the step.
      donate: whether the old state's memory is reused.
    """

    def __init__(
        self,
        placed: state.Placed,
        group: int,
        reduction: gather.Reduction,
        scaling: update_lib.Unscaled,
        clip: update_lib.Clip,
        *,
        donate: bool,
    ):
        whole = placed.groups[group]
        self._homes, self._mesh = placed.homes, whole.mesh
        known = dict(tree.flatten(whole.abstract_state))
        self._params = [f"params/{path}" for path, _ in tree.flatten(whole.abstract_state.params)]
        trained = [path for path in self._params if whole.placements[path].trainable]
        of_groups = [[path for path in trained if placed.homes[path] == g] for g in range(len(placed.groups))]
        self.trained = of_groups[group]
        self._structures: dict[str, Any] = {"params": jax.tree.structure(whole.abstract_state.params)}
        with fused.of_a_part():
            opt_state = jax.eval_shape(whole.abstract_state.tx.init, self._only(known))
        stored = dict(tree.flatten(whole.abstract_state.opt_state, is_leaf=pieces.is_pieces))
        opt_state = tree.map_with_path(lambda path, _: stored[path], opt_state)
        blank = tree.map_with_path(  # of arrays that mirror weights, those of its own
            lambda path, leaf: leaf if placed.homes[path] in (group, state.EVERYWHERE) else optax.MaskedNode(),
            whole.abstract_state.replace(params=(), opt_state=()),
        )
        self._names = {"opt_state": [f"opt_state/{path}" for path, _ in tree.flatten(opt_state)]}
        self._names["rest"] = [path for path, _ in tree.flatten(blank)]
        self._structures |= {"opt_state": jax.tree.structure(opt_state), "rest": jax.tree.structure(blank)}
        abstract = self._state(known)
        partition = dataclasses.replace(
            whole.training(self.trained),
            abstract_state=abstract,
            shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
            on_host=whole.on_host.intersection(path for path, _ in tree.flatten(abstract)),
        )
        own = update_lib.Own(partition, tuple(n for n, path in enumerate(trained) if path in self.trained))
        self.stream: state_stream.StateStream | None = None
        if partition.on_host:
            numbers = {path: number for number, path in enumerate(trained)}
            updates = updates_lib.Updates(partition, may_skip=clip.may_skip, numbers=numbers)
            updates.set_grad_dtypes(dict.fromkeys(updates.weights, jnp.float32))
            self.stream, self._is_loaded = state_stream.StateStream(updates, donate=donate), False
            self._positions = self._names["opt_state"]
            rest = updates.rest.partition.abstract_state.opt_state
            self._names["opt_state"] = [f"opt_state/{path}" for path, _ in tree.flatten(rest)]
            self._structures["opt_state"] = jax.tree.structure(rest)
            own = update_lib.Own(updates.rest.partition, updates.rest.numbers)
            abstract = self._state(known)
        self.reads = [path for path, _ in tree.flatten(abstract)]
        finish = update_lib.finish(partition, own, scaling, clip)

        # Gradients and squares are in the order of `trained` and have no names, so that groups of equal layers have equal programs.
        def squares(leaves: list[Any], sums: list[jax.Array], count: Any) -> Any:
            own = one_pass.reduced(dict(zip(self.trained, sums)), whole.placements, reduction)
            grads = accumulate.averaged(own, count)
            scale = scaling.scale(self._state(dict(zip(self.reads, leaves))))
            found = update_lib.squares(grads, 1.0 / scale)
            return [grads[path] for path in self.trained], [found[path] for path in self.trained]

        def apply(leaves: list[Any], grads: list[jax.Array], squares: list[list[jax.Array]]) -> Any:
            known = {path: own for paths, part in zip(of_groups, squares) for path, own in zip(paths, part)}
            of_all = [known[path] for path in trained]  # as one device would add them
            before = self._state(dict(zip(self.reads, leaves)))
            own = self._only(dict(zip(self.trained, grads)))
            new_state, metrics, factor, finite = finish(before, {"metrics": {}}, own, of_all)
            handed = self.stream and self.stream.updates.handed_to(before, {}, factor, finite)
            return jax.tree.leaves(new_state), metrics, handed

        self._grads = [
            jax.ShapeDtypeStruct(found.shape or (), jnp.float32, sharding=found.update)
            for found in (whole.placements[path] for path in self.trained)
        ]
        grad_shardings = [like.sharding for like in self._grads]
        self._squares = jax.jit(squares, donate_argnums=1, out_shardings=(grad_shardings, None))
        self.abstract = jax.tree.leaves(abstract)
        shardings = [leaf.sharding for leaf in self.abstract]
        handed = self.stream and self.stream.updates.handed_shardings._replace(grads={})
        # Old weights with masters are not read, but new ones take their memory.
        self._apply = jax.jit(
            apply, donate_argnums=(0,) if donate else (), out_shardings=(shardings, None, handed), keep_unused=True
        )

    def read(self, leaves: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Returns the leaves of a state, given by path, that the update reads."""
        return [
            state.view(leaves[path], self._mesh) if self._homes[path] == state.EVERYWHERE else leaves[path]
            for path in self.reads
        ]

    def lowered(
        self, sums: Mapping[str, Any], count: Any, squares: list[dict[str, Any]]
    ) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """Returns the programs of `squares` and `apply` for abstract arguments."""
        own, of_groups = [sums[path] for path in self.trained], [[*part.values()] for part in squares]
        return self._squares.lower(self.abstract, own, count), self._apply.lower(self.abstract, self._grads, of_groups)

    def begin(self, leaves: Mapping[str, Any]) -> state_stream.StepGroups | None:
        """Returns the groups of a step's state in host memory or on a disk, of which reading begins; `leaves` are given by path."""
        if self.stream is None:
            return None
        params = {path: leaves[path] for path in self.stream.updates.weights}
        held = [leaves[path] for path in self._positions]
        return state_stream.StepGroups(self.stream, held, params, most=self.stream.ahead)

    def squares(self, read: list[jax.Array], sums: Mapping[str, jax.Array], count: Any) -> Any:
        """Returns the mean gradients and their sums of squares, by path, from sums over passes; `count` as of `accumulate.averaged`."""
        grads, found = self._squares(read, [sums[path] for path in self.trained], count)
        return dict(zip(self.trained, grads)), dict(zip(self.trained, found))

    def apply(
        self, read: list[jax.Array], grads: PyTree, squares: PyTree
    ) -> tuple[dict[str, jax.Array], dict[str, Any], updates_lib.Handed | None]:
        """Returns the new leaves, by path, the metrics, and what `streamed` reads; `squares` are those of all groups, on this one."""
        own, of_groups = [grads[path] for path in self.trained], [[*part.values()] for part in squares]
        new, metrics, handed = self._apply(read, own, of_groups)
        return dict(zip(self.reads, new)), metrics, handed and handed._replace(grads=dict(grads))

    def streamed(
        self, leaves: dict[str, Any], groups: state_stream.StepGroups | None, handed: updates_lib.Handed | None
    ) -> Iterator[None]:
        """Sends the updates of the groups of `begin`, yields after each, and replaces the leaves, by path."""
        if groups is None or handed is None:
            return
        if not self._is_loaded:  # see `streamed_step`
            jax.block_until_ready(handed.factor)
            self._is_loaded = True
        yield from groups.finish(handed, {path: leaves[path] for path in handed.grads})
        leaves.update(groups.params)
        leaves.update({self._positions[position]: leaf for position, leaf in groups.leaves.items()})

    def _only(self, values: Mapping[str, Any]) -> PyTree:
        """Returns a tree like the params with the group's trained ones of `values`, and `optax.MaskedNode()` for the others."""
        own = set(self.trained)
        leaves = [values[path] if path in own else optax.MaskedNode() for path in self._params]
        return jax.tree.unflatten(self._structures["params"], leaves)

    def _state(self, values: Mapping[str, Any]) -> State:
        """Returns a train state of the group's own leaves."""
        made = {
            part: jax.tree.unflatten(self._structures[part], [values[path] for path in names])
            for part, names in self._names.items()
        }
        return made["rest"].replace(params=self._only(values), opt_state=made["opt_state"])


def check(partition: partition_lib.Partition) -> None:
    """Refuses a state whose groups cannot be updated by themselves.

    Raises:
      UserError: the state has no optimizer of optax, applies gradients in its own way, or its update of a weight depends on others.
    """
    held = partition.abstract_state
    lacking = [name for name in ("tx", "params", "opt_state", "replace") if not hasattr(held, name)]
    if lacking:
        raise UserError(
            f"pipe: the state is a {type(held).__name__} without {' and '.join(lacking)}, and each group of devices updates its own "
            "weights; use flax's TrainState, or set `pipe=1`"
        )
    if not one_pass_update.applies_as_flax(held):
        raise UserError(
            f"pipe: each group of devices updates its own weights, and the state is {type(held).__name__}, whose own apply_gradients may "
            "read leaves together; move what it does into `tx` or after the step, or set `pipe=1`"
        )
    local = locality.in_step(held.tx, partition.trainable_part(held.params))
    if local.kind == locality.GLOBAL:
        raise UserError(
            f"pipe: each group of devices updates its own weights, and with this optimizer {local.why}; where it clips by the global norm, "
            "remove that and pass make_train_step(clip_norm=...)"
        )
