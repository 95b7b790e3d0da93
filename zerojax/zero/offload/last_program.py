"""The program that ends a step block by block: the norm, the verdict, and the update of what no group updates. This module
makes it.

The device waits for what the host does between two steps, so states are read and made by the numbers of their leaves.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax import tree
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.offload import updates as updates_lib
from zerojax.zero.update import update as update_lib

# finish(state, aux, grads, squares) -> (new state, metrics, factor, finite)
Finish = Callable[[Any, Any, Any, Any], tuple[Any, dict[str, jax.Array], Any, Any]]


class Mold:
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
class StateForm:
    """States of one structure. Numbers count the leaves of the state."""

    structure: Any  # of the state
    state: Mold  # f(leaves) -> the state
    rest: Mold  # f(leaves) -> `Rest.of(state)`
    params: Mapping[str, int]  # the number of each param, by path, from the state
    opt_state: Sequence[int]  # the numbers of the optimizer state's leaves
    finished: Sequence[int]  # the numbers of the leaves that `finish` updates
    # f(these leaves, aux, grads, squares) -> (the new ones, metrics, what the updates of groups read), compiled
    finish: Callable[..., tuple[list[jax.Array], dict[str, jax.Array], updates_lib.Handed]]


class LastProgram:
    """Makes the program for each form of a state.

    Args:
      updates: of the groups.
      finish: `update.finish`. Its params and gradients have `optax.MaskedNode()` in place of weights that it does not update.
      scale: f(state) -> the factor of the loss.
      donate: whether the old state's memory is reused.
    """

    def __init__(self, updates: updates_lib.Updates, finish: Finish, scale: Callable[[Any], Any], *, donate: bool):
        self._updates, self._finish, self._scale, self._donate = updates, finish, scale, donate
        partition = updates.rest.partition
        # `finish` leaves frozen weights as they are, and those that groups update are frozen in this partition.
        self._apart = partition.frozen.union(partition.on_host, updates.weights)
        self._form: StateForm | None = None

    def read(self, state: State) -> tuple[list[Any], StateForm]:
        """Returns a state's leaves, and their form, which is made once."""
        leaves, structure = jax.tree.flatten(state)
        if self._form is None or self._form.structure != structure:
            expected: Any = jax.tree.structure(self._updates.partition.abstract_state)
            if structure != expected:
                raise TypeError("the state is not like the partition's")  # `arguments.explaining` says how
            self._form = self._form_of(structure)
        return leaves, self._form

    def _form_of(self, structure: jax.tree_util.PyTreeDef) -> StateForm:
        """Returns the form of states of a structure."""
        numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
        rest = self._updates.rest.of(numbered)
        own = self._without(rest)
        paths = tree.map_with_path(lambda path, _: f"params/{path}", numbered.params)

        def finish(leaves: list[Any], aux: PyTree, grads: PyTree, squares: PyTree) -> tuple[Any, ...]:
            state = jax.tree.unflatten(jax.tree.structure(own), leaves)
            trained = self._updates.rest.partition.trainable_part(paths)
            own_grads = jax.tree.map(lambda path: grads.get(path, optax.MaskedNode()), trained)
            squares = squares | update_lib.squares(grads, 1.0 / self._scale(state))
            of_all = jax.tree.map(lambda path: squares.get(path, jnp.float32(0)), paths)
            new_state, metrics, factor, finite = self._finish(state, aux, own_grads, of_all)
            return jax.tree.leaves(new_state), metrics, self._updates.handed_to(state, {}, factor, finite)

        shardings = jax.tree.leaves(self._without(self._updates.rest.partition.shardings))
        handed = self._updates.handed_shardings._replace(grads={})
        return StateForm(
            structure,
            state=Mold(numbered),
            rest=Mold(rest),
            params=dict(zip(jax.tree.leaves(paths), jax.tree.leaves(numbered.params))),
            opt_state=jax.tree.leaves(numbered.opt_state),
            finished=jax.tree.leaves(own),
            # It takes and returns lists: to flatten the nodes of a state takes longer than the program.
            finish=jax.jit(
                finish,
                donate_argnums=(0,) if self._donate else (),
                out_shardings=(shardings, None, handed),
                keep_unused=True,  # as for an update: `updates.Updates.lower`
            ),
        )

    def _without(self, state: State) -> State:
        """Returns a state, or a tree like it, without the params that are frozen, updated by groups or in host memory."""
        keep = lambda path, leaf: optax.MaskedNode() if f"params/{path}" in self._apart else leaf  # noqa: E731
        return state.replace(params=tree.map_with_path(keep, state.params))
