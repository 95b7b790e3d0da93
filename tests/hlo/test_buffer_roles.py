"""Checks the roles of a step's memory. This module tests zerojax.hlo.buffer_roles."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from zerojax.hlo import buffer_roles, buffers
from zerojax.roles import ACTIVATION_GRADIENTS, ACTIVATIONS, GRADIENTS, MASTER, MOMENTS, PARAMS, REST


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(2, 9), min_size=2, max_size=4), st.data())
def test_a_weights_shape_is_known_with_dims_merged_and_transposed(shape, data):
    cut = data.draw(st.integers(1, len(shape) - 1))
    merged = (math.prod(shape[:cut]), 1, math.prod(shape[cut:]))
    transposed = data.draw(st.permutations(merged))
    known = {
        form
        for known_shape in buffer_roles.shapes([(PARAMS, tuple(shape), tuple(shape))])
        for form in buffer_roles._forms(known_shape)
    }
    assert buffer_roles._key(tuple(transposed)) in known
    assert buffer_roles._key((*transposed, 11)) not in known


@pytest.mark.parametrize(
    "path, role",
    [
        ("state/params/layer_0/kernel", PARAMS),
        ("params/kernel", PARAMS),
        ("state/opt_state/master/layer_0/kernel", MASTER),
        ("state/opt_state/inner/0/mu/params/kernel", MOMENTS),
        ("opt_state/0/nu/kernel", MOMENTS),
        ("state/model/layers/0/kernel", PARAMS),
        ("batch/tokens", REST),
        ("state/batch_stats/mean", REST),
    ],
)
def test_an_arguments_path_decides_its_role(path, role):
    assert buffer_roles.argument_role(path) == role


WIDTH, HIDDEN = 256, 1024
ALIGNMENT = 0.01  # of the size: XLA rounds sizes up


def plain_step(params, x, remat=False):
    """A step as another project may write it: no scopes, no state, no mesh.

    It returns the largest of the new weights, not the weights: XLA may put an activation of the same size into memory that is
    donated or returned, and then it is no temporary.
    """

    def block(y, params):
        return y + jnp.tanh(y @ params["up"]) @ params["down"]

    def loss(params):
        y = x
        for name in ("first", "second"):
            y = (jax.checkpoint(block) if remat else block)(y, params[name])
        return jnp.mean((y - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: jnp.max(p - 0.1 * g), params, grads), value


def most(examples, remat=False):
    """Returns the maximum bytes of each role."""
    block = {"up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32)}
    block["down"] = jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((examples, WIDTH), jnp.float32)
    step = functools.partial(plain_step, remat=remat)
    lowered = jax.jit(step).lower({"first": block, "second": block}, x)
    return {role: max(column) for role, column in buffers.compile_with_buffers(lowered)[1].curve.by_role.items()}


@pytest.mark.parametrize("remat", [False, True])
def test_an_activation_with_a_weights_shape_is_no_gradient(remat):
    # With as many examples as the width, every activation, and its gradient, has some weight's shape.
    same, other = most(WIDTH, remat), most(WIDTH + 8, remat)
    assert same[GRADIENTS] == pytest.approx(other[GRADIENTS], rel=ALIGNMENT)
    for role in (ACTIVATIONS, ACTIVATION_GRADIENTS):
        assert same[role] == pytest.approx(other[role] * WIDTH / (WIDTH + 8), rel=ALIGNMENT)
