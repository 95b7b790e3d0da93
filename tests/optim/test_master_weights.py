"""Checks master weights against float32 optax. This module tests zerojax.optim.master_weights."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax import precision
from zerojax.optim import fused, master_weights, registry

STEPS = 20
# A float32 run and the master of a bf16 run see the same gradients and do the same arithmetic; XLA may fuse it otherwise.
LAST_PLACE = 1e-6


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    params = {"kernel": jax.random.normal(keys[0], (16, 8)), "scale": jax.random.normal(keys[1], (8,))}
    return precision.cast_floating(params, dtype)


def grads_at(step):
    """16-bit gradients, as a bf16 backward pass gives them, that depend on the step alone."""
    keys = jax.random.split(jax.random.key(100 + step))
    grads = {"kernel": jax.random.normal(keys[0], (16, 8)), "scale": jax.random.normal(keys[1], (8,))}
    return precision.cast_floating(grads, jnp.bfloat16)


def run(tx, params, steps=STEPS):
    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for step in range(steps):
        grads = grads_at(step)
        if params["kernel"].dtype == jnp.float32:
            grads = precision.cast_floating(grads, jnp.float32)
        params, state = update(params, state, grads)
    return params, state


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb"])
def test_the_master_is_the_float32_run_and_params_are_the_master_rounded(name):
    inner = registry.make_optimizer(name, 1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    start = make_params(jnp.bfloat16)
    truth, _ = run(inner, precision.cast_floating(start, jnp.float32))
    params, state = run(master_weights.with_master_weights(inner), start)
    for key in params:
        np.testing.assert_allclose(state.master[key], truth[key], rtol=LAST_PLACE, atol=LAST_PLACE)
        assert params[key].dtype == jnp.bfloat16
        rounded = state.master[key].astype(jnp.bfloat16)
        differs = np.asarray(params[key] != rounded)
        # A tie: the master is within one float32 rounding of the middle between two 16-bit neighbours.
        gap = np.abs(np.asarray(params[key], np.float64) - np.asarray(state.master[key], np.float64))
        other = np.abs(np.asarray(rounded, np.float64) - np.asarray(state.master[key], np.float64))
        np.testing.assert_allclose(gap[differs], other[differs], rtol=1e-4)
        assert differs.mean() < 0.01


def test_updates_too_small_for_16_bits_are_not_lost():
    tx = master_weights.with_master_weights(optax.sgd(1.0))
    params = {"w": jnp.ones((), jnp.bfloat16)}
    state = tx.init(params)
    for _ in range(64):
        updates, state = tx.update({"w": jnp.asarray(-(2.0**-12), jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
    assert float(params["w"]) == 1 + 64 * 2.0**-12


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32))
def test_one_update_bridges_any_16_bit_weight_to_any_master(start, end):
    weight = np.asarray(start, jnp.bfloat16)
    bridge = np.float32(end) - weight.astype(np.float32)
    landed = (weight.astype(np.float32) + bridge).astype(jnp.bfloat16)
    rounded = np.float32(end).astype(jnp.bfloat16)
    eps32 = np.finfo(np.float32).eps * max(abs(end), abs(float(weight)))
    assert landed == rounded or abs(float(landed) - end) <= abs(float(rounded) - end) + 2 * eps32


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_in_one_pass_each_param_is_its_master_in_a_dtype_of_its_own(dtypes):
    tx = master_weights.with_master_weights(fused.fused_adamw(1e-2))
    before = {key: leaf.astype(dtype) for (key, leaf), dtype in zip(make_params().items(), dtypes)}
    params, state, _ = jax.jit(tx.apply)(grads_at(0), tx.init(before), before)
    for key, leaf in params.items():
        assert leaf.dtype == before[key].dtype and (leaf != before[key]).any()
        np.testing.assert_array_equal(leaf, state.master[key].astype(leaf.dtype))


def test_the_master_never_aliases_params():
    params = make_params()
    state = master_weights.with_master_weights(optax.adam(1e-3)).init(params)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state.master))]
    assert len(set(pointers)) == len(pointers)


def test_wide_and_integer_leaves_are_not_widened():
    params = {"w": jnp.ones(2, jnp.float16), "n": jnp.arange(2), "x": jnp.ones(2)}
    master = master_weights.with_master_weights(optax.identity()).init(params).master
    assert {key: leaf.dtype.name for key, leaf in master.items()} == {"w": "float32", "n": "int32", "x": "float32"}


def test_extra_arguments_reach_the_inner_transformation():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = master_weights.with_master_weights(inner)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    updates, _ = tx.update({"w": jnp.ones(2, jnp.bfloat16)}, tx.init(params), params, value=3.0)
    assert updates["w"].tolist() == [3.0, 3.0]
