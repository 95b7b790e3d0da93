"""Checks matrices that devices use by columns. This module tests zerojax.ops.columns."""

import jax
import jax.numpy as jnp
import pytest

from zerojax.errors import UserError
from zerojax.ops import columns


def add(path="params/head/kernel"):
    return columns.add(path, columns.Columns(jnp.ones((3, 2)), "data", 4), jnp.zeros((3, 2)))


def test_a_matrix_is_known_by_its_identity_while_it_is_used():
    with columns.used():
        seen = add()
        assert seen.shape == (3, 8) and jnp.isnan(seen).all()  # what computes with it is told by NaN
        assert columns.take(seen + 0) is None
        taken = columns.take(seen)
        assert taken.path == "params/head/kernel" and taken.columns.shard.shape == (3, 2)
    assert columns.take(seen) is None


def test_a_matrix_whose_columns_nothing_takes_is_refused():
    line = "by_columns: params/embed/table is read by no operation that can use columns"
    with pytest.raises(UserError, match=line), columns.used():
        columns.take(add())
        add("params/embed/table")


def test_a_matrix_that_is_also_computed_with_is_refused_where_its_gradient_would_be_lost():
    def loss(sink, penalty):
        with columns.used():
            seen = columns.add("params/head/kernel", columns.Columns(jnp.ones((3, 2)), "data", 4), sink)
            taken = columns.take(seen)
            return taken.sink.sum() + penalty * (seen**2).sum() if penalty else taken.sink.sum()

    assert (jax.grad(loss)(jnp.zeros((3, 2)), 0.0) == 1).all()
    with pytest.raises(
        UserError, match=r"by_columns: params/head/kernel is also computed with.*omit it from by_columns"
    ):
        jax.grad(loss)(jnp.zeros((3, 2)), 1e-4)
