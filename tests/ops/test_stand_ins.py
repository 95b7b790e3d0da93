"""Checks arrays that stand for others. This module tests zerojax.ops.stand_ins."""

import jax
import jax.numpy as jnp
import pytest

from zerojax.errors import UserError
from zerojax.ops import stand_ins

KINDS = [stand_ins.StandIns(f"{name}: {{}} is left", f"{name}: {{}} is computed with") for name in ("one", "other")]


def test_a_kind_finds_its_own_arrays_by_their_identity_and_tells_of_those_that_nothing_takes():
    one, other = KINDS
    with pytest.raises(UserError, match="other: b is left"), one.used(), other.used():
        first = one.add("a", "part", jnp.zeros(2), (4, 2), jnp.bfloat16)
        other.add("b", "part", jnp.zeros(2), (4, 2), jnp.float32)
        assert first.shape == (4, 2) and first.dtype == jnp.bfloat16 and jnp.isnan(first).all()
        assert one.take(first) == "part" and other.take(first) is None and one.take(first + 0) is None
    assert one.take(first) is None


def test_a_gradient_that_would_be_lost_is_refused():
    def loss(anchor):
        with KINDS[0].used():
            seen = KINDS[0].add("a", anchor, anchor, (4,), jnp.float32)
            return jnp.sum(KINDS[0].take(seen)) + jnp.sum(seen)

    with pytest.raises(UserError, match="one: a is computed with"):
        jax.grad(loss)(jnp.zeros(2))


def test_what_one_trace_takes_of_two_blocks_is_taken_for_both():
    one = KINDS[0]
    with one.used():
        own, _ = (one.add(path, "part", jnp.zeros(2), (4, 2), jnp.bfloat16) for path in ("a/w", "b/w"))
        one.take(own)
        one.take_as("a/w", "b/w")
    with pytest.raises(UserError, match=r"one: [ab]/w is left"), one.used():
        for path in ("a/w", "b/w"):
            one.add(path, "part", jnp.zeros(2), (4, 2), jnp.bfloat16)
        one.take_as("a/w", "b/w")
