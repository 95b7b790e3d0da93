"""Checks what values are said to depend on. This module tests zerojax.zero.sharded_batch.dependence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.zero.sharded_batch import dependence

OLD, KEY = jnp.int32(5), jax.random.PRNGKey(0)
ROWS = 8
X = jnp.arange(ROWS * 3).reshape(ROWS, 3)


def in_scan(x, s):
    def body(carry, _):
        count, total, drawn = carry
        return (count + 1, total + x.sum(), drawn + jax.random.randint(s["key"], (), 0, 9)), None

    return jax.lax.scan(body, (s["n"], 0, s["n"]), length=2)[0]


# name -> (f(batch x, state), the kind)
CASES = {
    "a constant": (lambda x, s: jnp.int32(3), "same"),
    "the number of rows": (lambda x, s: s["n"] + x.shape[0], "same"),
    "a function of the old value": (lambda x, s: 2 * s["n"] + 1, "same"),
    "the old value": (lambda x, s: s["n"], "same"),
    "a split key": (lambda x, s: jax.random.split(s["key"])[0], "same"),
    "a call": (lambda x, s: jax.jit(lambda n, x: (n + 1, x.sum()))(s["n"], x)[0], "same"),
    "a checkpoint": (lambda x, s: jax.checkpoint(lambda n, x: (n + 1, x.sum()))(s["n"], x)[0], "same"),
    "a sum": (lambda x, s: (x > 2).sum(), "count"),
    "a sum of sums": (lambda x, s: (x > 2).sum(0).sum() - 3 * jnp.count_nonzero(x), "count"),
    "a histogram": (lambda x, s: jnp.bincount(x[:, 0], length=4), "count"),
    "a sum in a call": (lambda x, s: jax.jit(jnp.sum)(x), "count"),
    "a sum of a part of the features": (lambda x, s: x[:, 1:].sum(), "count"),
    "a product of columns": (lambda x, s: jnp.einsum("bi,bj->ij", x, x)[0, 1], "count"),
    "matches of the likeliest": (lambda x, s: (x.argmax(-1) == x[:, 0]).sum(), "count"),
    "a grown value": (lambda x, s: s["n"] + (x > 2).sum(), "grown"),
    "a grown value in a call": (lambda x, s: jax.jit(lambda n, x: n + x.sum())(s["n"], x), "grown"),
    "grown twice": (lambda x, s: s["n"] + x.sum() - (x > 2).sum(), "grown"),
    "a grown value and one more": (lambda x, s: s["n"] + 1 + x.sum(), "statistic"),
    "grown by a statistic": (lambda x, s: s["n"] + (x.sum(0) > 2).sum(), "other"),
    "a place told by a statistic": (lambda x, s: jnp.zeros(9, int).at[x.sum() % 9].add(1), "statistic"),
    "a sum and one more": (lambda x, s: x.sum() + 1, "statistic"),
    "features of large sums": (lambda x, s: (x.sum(0) > 30).sum(), "statistic"),
    "grown and doubled": (lambda x, s: 2 * (s["n"] + x.sum()), "other"),
    "the first row's sum": (lambda x, s: x.sum(1)[0], "other"),
    "above the largest": (lambda x, s: (x >= x.max()).sum(), "other"),
    "above a running sum": (lambda x, s: (jnp.cumsum(x, 0) > 9).sum(), "other"),
    "a running sum of features": (lambda x, s: (jnp.cumsum(x, 1) > 9).sum(), "count"),
    "neighbours": (lambda x, s: (x[1:] > x[:-1] + 1).sum(), "other"),
    "pairs": (lambda x, s: (x @ x.T > 9).sum(), "other"),
    "as many features as rows": (lambda x, s: (jnp.tile(x, 3)[:, :ROWS].sum(0) > 99).sum(), "statistic"),
    "normed rows": (lambda x, s: (x > x.mean(0)).sum(), "count"),
    "a maximum": (lambda x, s: x.max(), "other"),
    "a sum of maxima": (lambda x, s: x.max(0).sum(), "other"),
    "the first": (lambda x, s: x[0, 0], "other"),
    "a choice": (lambda x, s: jnp.where(x.max() > 3, s["n"] + 1, s["n"]), "other"),
    "drawn": (lambda x, s: jax.random.randint(s["key"], (), 0, 9), "statistic"),
    "a count beside a sum in a scan": (lambda x, s: in_scan(x, s)[0], "same"),
    "a sum beside a count in a scan": (lambda x, s: in_scan(x, s)[1], "other"),
    "a number drawn beside a count in a scan": (lambda x, s: in_scan(x, s)[2], "other"),
    "a loop": (lambda x, s: jax.lax.fori_loop(0, ROWS, lambda i, n: n + x[i, 0], s["n"]), "other"),
}


def program(function):
    state = {"n": OLD, "key": KEY, "words": jnp.zeros(2, jnp.uint32)}
    return dependence.TracedLoss.of(lambda _, x, s: {"n": function(x, s)}, {}, X, state, jnp.tile(X, (2, 1))), state


@pytest.mark.parametrize("name", CASES)
def test_values_are_told_apart_by_what_they_read(name):
    function, kind = CASES[name]
    traced, state = program(function)
    assert traced.kind("n", "n") == kind
    if kind == "same":
        np.testing.assert_array_equal(traced.evaluate("n", state), function(X, state))
    else:
        with pytest.raises(dependence.Depends):
            traced.evaluate("n", state)


def test_the_kinds_are_true_of_two_halves():
    """A count of the batch is the sum of its halves' counts, and what grows grows by them; the others are not."""
    state = {"n": OLD, "key": KEY}
    for name, (function, kind) in CASES.items():
        if kind in ("count", "grown") and name != "normed rows":
            whole, (first, second) = function(X, state), (function(half, state) for half in np.split(X, 2))
            np.testing.assert_array_equal(first + second - (OLD if kind == "grown" else 0), whole, err_msg=name)


def test_a_loss_may_have_more_operations_than_python_allows_calls():
    def many(x, state):
        y = jnp.float32(1) * x
        for _ in range(1500):
            y = y + 1
        return (y > 1502).sum()

    traced, _ = program(many)
    assert traced.kind("n") == "count" and traced.reads("n")


def test_raw_words_are_keys_where_the_loss_draws_with_them():
    def draws(x, state):
        def body(total, row):
            return total + jax.random.normal(jax.random.fold_in(state["key"], 1)), None

        return jax.lax.scan(body, 0.0, x)[0] + state["words"].sum()

    assert program(draws)[0].keys() == ({"key"}, set())
    assert program(lambda x, s: jax.jit(jax.random.split)(s["words"]))[0].keys() == ({"words"}, set())
    looped = program(lambda x, s: jax.lax.fori_loop(0, ROWS, lambda i, y: y + jax.random.normal(s["key"]), 0.0))[0]
    assert looped.keys() == ({"key"}, set())
    assert program(lambda x, s: s["key"].sum())[0].keys() == (set(), set())


def test_lines_that_draw_without_a_value_are_named():
    def draws(x, state):
        first = jax.random.normal(jax.random.fold_in(KEY, state["n"]))
        second = jax.lax.map(lambda row: jax.random.normal(KEY), x)
        return first + second.sum()

    lines = program(draws)[0].draws_without("n")
    assert len(lines) == 1 and f"test_dependence.py:{draws.__code__.co_firstlineno + 2}" in lines[0]
