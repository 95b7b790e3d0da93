"""Checks that an optimizer's one-pass form is used, and has the same result as the other. This module tests
zerojax.zero.update.one_pass_update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from small_states import GRADS, sharded

from zerojax import precision
from zerojax.optim import master_weights
from zerojax.optim import one_pass as one_pass_lib
from zerojax.zero.update import update

ROUNDING = 1e-6  # the same float32 matmuls and sums, fused differently


def sgd_in_one_pass(rate=0.5, decay=0.9):
    """Momentum, with the form that a fused optimizer has; `apply` records its arguments."""
    given = []

    def init(params):
        return {"mu": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)}

    def step(grads, state, params, scale, finite):
        mu = jax.tree.map(lambda m, g: decay * m + scale * g, state["mu"], grads)
        new = jax.tree.map(lambda p, m: (p - rate * m).astype(p.dtype), params, mu)
        if finite is not None:
            new, mu = jax.tree.map(lambda n, o: jnp.where(finite, n, o), (new, mu), (params, state["mu"]))
        return new, {"mu": mu}

    def apply(grads, state, params, *, scale, finite, shardings, copy_dtype=None):
        given.append({"shardings": shardings, "copy_dtype": copy_dtype})
        new, state = step(grads, state, params, scale, finite)
        copies = None if copy_dtype is None else precision.cast_floating(new, copy_dtype)
        return new, state, copies

    def plain(grads, state, params, **_):
        new, state = step(grads, state, params, 1.0, None)
        return jax.tree.map(lambda n, p: n - p, new, params), state

    tx = one_pass_lib.OnePass(init, plain)
    tx.apply, tx.kinds = apply, lambda params: [None] * len(jax.tree.leaves(params))
    return tx, given


@pytest.mark.parametrize("finite", [None, True, False])
@pytest.mark.parametrize("copies", [False, True])
def test_the_one_pass_form_gives_the_state_of_the_other(finite, copies):
    tx, given = sgd_in_one_pass()
    wrap = master_weights.with_master_weights if copies else lambda tx: tx
    dtype = jnp.bfloat16 if copies else jnp.float32
    state, part = sharded(wrap(tx), dtype=dtype)
    assert hasattr(state.tx, "apply")
    found = jax.jit(functools.partial(update.make(part), factor=0.25))(
        state, state, GRADS, finite=None if finite is None else jnp.asarray(finite)
    )
    assert given[0]["shardings"]["w"].spec == jax.P("data")
    plain = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    state, part = sharded(wrap(plain), dtype=dtype)
    assert not hasattr(state.tx, "apply")
    expected = jax.jit(functools.partial(update.make(part), factor=0.25))(
        state, state, GRADS, finite=None if finite is None else jnp.asarray(finite)
    )
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(expected.opt_state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=ROUNDING, atol=ROUNDING)
    is_taken = finite is not False
    assert int(found.step) == is_taken
    assert np.array_equal(found.params["w"], state.params["w"]) != is_taken


class Averaging(TrainState):
    def apply_gradients(self, *, grads, **kwargs):
        return super().apply_gradients(grads=jax.tree.map(lambda g: 2 * g, grads), **kwargs)


def test_a_state_that_applies_gradients_in_its_own_way_is_left_to_do_so():
    tx, given = sgd_in_one_pass()
    state, part = sharded(tx, state_class=Averaging)
    found = update.make(part)(state, state, GRADS, 1.0, None)
    assert not given
    np.testing.assert_allclose(found.params["w"], state.params["w"] - GRADS["w"], rtol=ROUNDING, atol=ROUNDING)
