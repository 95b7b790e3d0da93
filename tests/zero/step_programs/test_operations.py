"""Checks which parts of a step are told apart, and that they run. This module tests zerojax.zero.step_programs.operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.zero.step_programs import blocks, cut, operations


def of(function):
    """Returns the trace of `function(x)` and its parts."""
    jaxpr = jax.make_jaxpr(function)(jnp.arange(4.0)).jaxpr
    return jaxpr, cut.cut(jaxpr, ())


def block(x, run):
    return blocks._nested("forward", run)(x)


def salted(x, salt, factor=2.0):
    """Draws a bit for each element in a nested function, as dropout does: only the integer `salt` tells two calls apart."""
    bits = jax.jit(lambda x: (x.astype(jnp.uint32) ^ jnp.uint32(salt)) % 7)(x)
    return jnp.where(bits > 3, x * factor, x)


def test_blocks_that_differ_in_integers_are_described_alike_and_run_with_either_integers():
    def step(x):
        for salt in (11, 23):
            x = block(x, lambda x, salt=salt: jax.checkpoint(salted, prevent_cse=False, static_argnums=1)(x, salt))
        return x

    jaxpr, (first, second) = of(step)
    (key, integers), (same, others) = operations.described(first), operations.described(second)
    assert key == same
    differing = [place for place, pair in enumerate(zip(integers, others)) if len(set(pair)) > 1]
    assert [(integers[place], others[place]) for place in differing] == [(11, 23)]
    replaced = {place: np.uint32(others[place]) for place in differing}
    x = jnp.linspace(0.0, 9.0, 4)
    np.testing.assert_array_equal(operations.run(first, {jaxpr.invars[0]: x}, replaced)[0], salted(x, 23))
    np.testing.assert_array_equal(operations.run(first, {jaxpr.invars[0]: x}, {})[0], salted(x, 11))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: salted(x, 11, factor=3.0),
        lambda x: salted(x, 11) + 1,
        lambda x: salted(x[::-1], 11),
        lambda x: salted(x, 11) + np.array([1.0, 2.0, 3.0, 4.0], np.float32),
    ],
)
def test_blocks_that_differ_in_anything_else_are_told_apart(other):
    _, (first, second) = of(lambda x: block(block(x, lambda x: salted(x, 11)), other))
    assert operations.described(first)[0] != operations.described(second)[0]


def test_constants_of_equal_values_are_alike_and_those_of_a_loop_are_not_overlooked():
    def step(table):
        return lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x * table, x)

    tables = [np.full(4, value, np.float32) for value in (2, 2, 3)]
    _, found = of(lambda x: block(block(block(x, step(tables[0])), step(tables[1])), step(tables[2])))
    first, second, third = (operations.described(part)[0] for part in found)
    assert first == second != third
