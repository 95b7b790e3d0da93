"""Checks how states are made of their leaves. This module tests zerojax.zero.offload.last_program; `test_step_by_block` its program."""

import jax
import optax

from zerojax.zero.offload import last_program


def test_a_mold_makes_a_tree_of_numbered_leaves_with_its_empty_nodes():
    masked, empty = optax.MaskedNode(), optax.EmptyState()
    numbered = {"a": 2, "b": (masked, {"c": 0}), "d": empty, "e": optax.TraceState(trace={"w": 1})}
    made = last_program.Mold(numbered)(["zero", "one", "two"])
    assert made == {"a": "two", "b": (masked, {"c": "zero"}), "d": empty, "e": optax.TraceState(trace={"w": "one"})}
    assert jax.tree.structure(made) == jax.tree.structure(numbered)
