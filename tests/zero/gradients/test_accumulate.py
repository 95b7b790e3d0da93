"""Checks that several passes return the result of one. This module tests zerojax.zero.gradients.accumulate."""

import arrays
import chex
import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.zero.gradients import accumulate

ROUNDING = 2e-6  # the same float32 terms, summed in another order
# Each example compiles a program: a failure is reported as found, without minutes of shrinking.
COMPILES = hypothesis.settings(
    deadline=None, derandomize=True, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.arange(3.0)}


@flax.struct.dataclass
class State:
    total: jax.Array
    passes: jax.Array


def loss_fn(params, batch, state):
    predicted = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    loss = jnp.mean((predicted - batch["y"]) ** 2)
    fields = {"total": state.total + batch["x"].sum(), "passes": state.passes + 1}
    return loss, {"state": fields, "metrics": {"largest": jnp.max(predicted)}}


def make_batch(rows):
    return {"x": arrays.normal(rows, (rows, 4)), "y": arrays.normal(rows + 1, (rows, 3))}


def in_passes(batch, passes):
    return jax.tree.map(lambda leaf: leaf.reshape(passes, -1, *leaf.shape[1:]), batch)


@hypothesis.settings(COMPILES, max_examples=3)
@hypothesis.given(st.integers(2, 6), st.integers(1, 4))
def test_the_mean_over_passes_is_the_mean_over_the_batch(passes, rows):
    batch, state = make_batch(passes * rows), State(jnp.zeros(()), jnp.zeros((), jnp.int32))
    (loss, _), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(PARAMS, batch, state)
    run = jax.jit(accumulate.value_and_grad(loss_fn, passes))
    (found, aux), found_grads = run(PARAMS, in_passes(batch, passes), state)
    np.testing.assert_allclose(found, loss, rtol=ROUNDING)
    chex.assert_trees_all_close(found_grads, grads, atol=ROUNDING, rtol=1e-7)
    assert aux["state"]["passes"] == passes


def test_each_pass_sees_the_state_that_the_one_before_returned():
    batch, state = make_batch(6), State(jnp.zeros(()), jnp.zeros((), jnp.int32))
    (_, aux), _ = accumulate.value_and_grad(loss_fn, 3)(PARAMS, in_passes(batch, 3), state)
    np.testing.assert_allclose(aux["state"]["total"], batch["x"].sum(), atol=ROUNDING)


def test_metrics_are_averaged():
    batch, state = make_batch(6), State(jnp.zeros(()), jnp.zeros((), jnp.int32))
    (_, aux), _ = accumulate.value_and_grad(loss_fn, 2)(PARAMS, in_passes(batch, 2), state)
    halves = [loss_fn(PARAMS, jax.tree.map(lambda x, i=i: x[i], in_passes(batch, 2)), state)[1] for i in range(2)]
    expected = sum(half["metrics"]["largest"] for half in halves) / 2
    np.testing.assert_allclose(aux["metrics"]["largest"], expected, rtol=ROUNDING)


def test_a_loss_without_aux_needs_none():
    def plain(params, batch, state):
        return jnp.sum(params["w"]) * batch["x"].mean(), {}

    (_, aux), grads = accumulate.value_and_grad(plain, 2)(PARAMS, in_passes(make_batch(4), 2), None)
    assert aux == {"state": {}} and grads["b"].tolist() == [0, 0, 0]


def test_16_bit_gradients_add_up_in_float32():
    """256 passes of gradient 1 and then 1/256 each would be lost in bfloat16, whose integers end at 256."""
    params = {"w": jnp.ones((), jnp.bfloat16)}

    def linear(params, batch, state):
        return params["w"].astype(jnp.float32) * batch, {}

    batch = jnp.array([512.0] + [1.0] * 255)
    _, grads = accumulate.value_and_grad(linear, 256)(params, batch, None)
    assert grads["w"].dtype == jnp.float32
    assert float(grads["w"]) == (512 + 255) / 256


def test_sums_in_16_bits_are_unbiased_and_take_half_the_memory():
    """4,095 passes of 1/16 after one of 256: to nearest, each sum would stay 256, and the mean would be 1/16 instead of 1/8."""
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(3)}

    def linear(params, batch, state):
        return (params["w"].sum() + params["b"].sum()) * batch, {}

    batch = jnp.array([256.0] + [1 / 16] * 4095)
    _, grads = accumulate.value_and_grad(linear, 4096, in_16_bits=True)(params, batch, None)
    assert grads["w"].dtype == jnp.float32
    exact = (256 + 4095 / 16) / 4096
    assert abs(float(grads["w"].mean()) / exact - 1) < 0.01
    assert len(np.unique(grads["w"])) > 3, "each element draws its own bits"
    zeros = accumulate.zeros(jax.tree.map(lambda leaf: leaf, params), in_16_bits=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(zeros)} == {jnp.dtype(jnp.bfloat16)}


def test_sums_in_another_dtype_are_refused():
    with pytest.raises(UserError, match="accum_dtype: must be float32 or bfloat16, and is float16"):
        accumulate.checked_dtype(jnp.float16, 2)
    assert accumulate.checked_dtype("bfloat16", 2) and not accumulate.checked_dtype(None, 2)
    with pytest.warns(UserWarning, match="^accum_dtype: has no effect"):
        accumulate.checked_dtype(jnp.bfloat16, 1)
