"""Checks what memory is said to hold. This module tests zerojax.hlo.buffer_roles."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from zerojax.hlo import buffer_roles, buffers
from zerojax.roles import ACTIVATION_GRADIENTS, GRADIENTS, MASTER, MOMENTS, PARAMS, REST


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(2, 9), min_size=2, max_size=4), st.data())
def test_a_weights_shape_is_known_with_dims_joined_and_turned(shape, data):
    cut = data.draw(st.integers(1, len(shape) - 1))
    joined = (math.prod(shape[:cut]), 1, math.prod(shape[cut:]))
    turned = data.draw(st.permutations(joined))
    known = {
        form
        for whole in buffer_roles.shapes([(PARAMS, tuple(shape), tuple(shape))])
        for form in buffer_roles._forms(whole)
    }
    assert buffer_roles._key(tuple(turned)) in known
    assert buffer_roles._key((*turned, 11)) not in known


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
def test_an_arguments_path_says_its_role(path, role):
    assert buffer_roles.argument_role(path) == role


WIDTH, HIDDEN = 256, 1024
ALIGNMENT = 0.01  # what rounding sizes up adds


def plain_step(params, x):
    """A step that nobody here wrote: no scopes, no state, no mesh."""

    def loss(params):
        y = x
        for name in ("first", "second"):
            y = y + jnp.tanh(y @ params[name]["up"]) @ params[name]["down"]
        return jnp.mean((y - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def most(examples):
    """Returns the most bytes of each role at a time."""
    block = {"up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32)}
    block["down"] = jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((examples, WIDTH), jnp.float32)
    lowered = jax.jit(plain_step, donate_argnums=0).lower({"first": block, "second": block}, x)
    return {role: max(column) for role, column in buffers.compile_with_buffers(lowered)[1].curve.by_role.items()}


def test_an_activation_with_a_weights_shape_is_no_gradient():
    # With as many examples as the width, every activation, and its gradient, has some weight's shape.
    same, other = most(WIDTH), most(WIDTH + 8)
    assert same[GRADIENTS] == pytest.approx(other[GRADIENTS], rel=ALIGNMENT)
    assert same[ACTIVATION_GRADIENTS] == pytest.approx(other[ACTIVATION_GRADIENTS] * WIDTH / (WIDTH + 8), rel=ALIGNMENT)
