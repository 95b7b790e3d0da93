"""Checks where a trace is cut, and which of its parts are told apart. This module tests zerojax.zero.offload.parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.zero.offload import blocks, parts

X = jnp.arange(4.0)


def of(function, apart=()):
    """Returns the parts of `function(x)`, whose variables in `apart` are numbered."""
    traced = jax.make_jaxpr(function)(X)
    return traced.jaxpr, parts.cut(traced.jaxpr, {traced.jaxpr.invars[number] for number in apart})


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
    (key, integers), (same, others) = first.described(), second.described()
    assert key == same
    differing = [place for place, pair in enumerate(zip(integers, others)) if len(set(pair)) > 1]
    assert [(integers[place], others[place]) for place in differing] == [(11, 23)]
    replaced = {place: np.uint32(others[place]) for place in differing}
    x = jnp.linspace(0.0, 9.0, 4)
    np.testing.assert_array_equal(first.run({jaxpr.invars[0]: x}, replaced)[0], salted(x, 23))
    np.testing.assert_array_equal(first.run({jaxpr.invars[0]: x}, {})[0], salted(x, 11))


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
    assert first.described()[0] != second.described()[0]


def test_constants_of_equal_values_are_alike_and_those_of_a_loop_are_not_overlooked():
    def step(table):
        return lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x * table, x)

    tables = [np.full(4, value, np.float32) for value in (2, 2, 3)]
    _, found = of(lambda x: block(block(block(x, step(tables[0])), step(tables[1])), step(tables[2])))
    first, second, third = (part.described()[0] for part in found)
    assert first == second != third


def test_few_operations_that_recur_before_blocks_run_in_the_blocks_programs():
    def step(x):
        for number in range(3):
            x = block(jnp.sin(x) if number else jnp.cos(x), lambda x: x * 2)
        return x

    jaxpr, found = of(step)
    assert [(part.name, len(part.calls)) for part in found] == [
        ("between", 1),
        ("forward", 1),
        ("forward", 2),
        ("forward", 2),
    ]
    values = {jaxpr.invars[0]: X}
    for part in found:
        values.update(zip(part.writes, part.run(values, {})))
    np.testing.assert_allclose(values[jaxpr.outvars[0]], step(X), rtol=1e-6)


def test_operations_that_read_a_weight_from_the_host_stay_apart():
    def step(x):
        for _ in range(3):
            x = block(jnp.sin(x), lambda x: x * 2)
        return x

    assert [part.name for part in of(step, apart=[0])[1]] == ["between", "forward", "forward", "forward"]
