"""Checks that a program's parameters are matched with their leaves. This module tests zerojax.hlo.parameters."""

import jax
import jax.numpy as jnp
import pytest

from zerojax import mesh
from zerojax.hlo import parameters, syntax


def named(function, *arguments):
    """Returns paths and shapes of the leaves that a program reads."""
    lowered = jax.jit(function).lower(*arguments)
    found = parameters.leaves(lowered, syntax.parse(lowered.compile().as_text()))
    return [(leaf.path, leaf.shape) for _, leaf in sorted(found.items())]


def test_arguments_that_are_never_read_shift_no_name():
    def some(state, scale):
        return {"b": state["b"] * scale["y"], "d": state["d"][0] + 1}

    arrays = {name: jax.ShapeDtypeStruct((n, 8), jnp.float32) for name, n in zip("abcd", (64, 64, 64, 2))}
    scales = {"x": arrays["a"], "y": arrays["b"]}
    assert named(some, arrays, scales) == [("state/b", (64, 8)), ("state/d", (2, 8)), ("scale/y", (64, 8))]


def test_leaves_of_the_same_name_in_two_arguments_keep_their_own_shapes():
    def some(state, other):
        return state["b"] * 2, other["b"] * 2

    def arrays(n):
        return {name: jax.ShapeDtypeStruct((n, 8), jnp.float32) for name in "ab"}

    assert named(some, arrays(2), arrays(4)) == [("state/b", (2, 8)), ("other/b", (4, 8))]


def test_a_sharded_leaf_has_its_global_shape_and_its_shards_shape():
    sharding = mesh.batch_sharding(mesh.make_mesh())
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=sharding))
    found = parameters.leaves(lowered, syntax.parse(lowered.compile().as_text()))
    assert found == {0: parameters.ArgumentLeaf("x", (16, 3), (2, 3))}


@pytest.mark.parametrize(
    "name, path",
    [
        ("state.opt_state[0].mu['layer_0']['kernel']", "state/opt_state/0/mu/layer_0/kernel"),
        ("params['a.b']['it\\'s']", "params/a.b/it\\'s"),
        ("x", "x"),
        ("", ""),
    ],
)
def test_a_name_is_read_as_a_path(name, path):
    assert parameters.path_of(name) == path
