"""Checks weighted means and sums. This module tests zerojax.zero.sharded_batch.totals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.zero.sharded_batch import totals


def test_a_ratio_over_no_weight_is_0_and_so_is_its_gradient():
    assert totals.ratio(jnp.float32(0), 0) == 0 and totals.ratio(3.0, 2) == 1.5
    value, grad = jax.value_and_grad(lambda total: totals.ratio(total, jnp.zeros(())))(jnp.float32(2))
    assert value == 0 and grad == 0
    np.testing.assert_array_equal(totals.ratio(jnp.ones(2), jnp.array([0, 4])), [0, 0.25])


def test_the_objective_of_a_mean_is_the_mean_and_no_gradient_flows_through_its_weight():
    def objective(x):
        return totals.objective(totals.Mean(3 * x, x), 1)

    (value, weight), grad = jax.value_and_grad(objective, has_aux=True)(jnp.float32(2))
    assert (value, weight["weight"], grad) == (3, 2, 1.5)


def test_passes_of_a_sum_add_up():
    value, weight = totals.objective(totals.Sum(jnp.float32(3)), 4)
    assert value / 4 == 3 and not weight


def test_values_that_are_no_totals_pass():
    assert totals.value(5) == 5 and totals.value(totals.Sum(5)) == 5 and totals.value(totals.Mean(1, 4)) == 0.25


def test_a_loss_becomes_float32():
    assert totals.in_float32(jnp.bfloat16(2)).dtype == jnp.float32
    found = totals.times(totals.in_float32(totals.Mean(jnp.bfloat16(2), jnp.int32(4))), 8.0)
    assert found.total == 16 and found.total.dtype == jnp.float32 and found.weight == 4
    with pytest.raises(UserError, match=r"^loss_fn: returned float32\[2\] in zerojax.Sum as the loss"):
        totals.in_float32(totals.Sum(jnp.ones(2)))
