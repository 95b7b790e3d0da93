"""Checks where a trace is cut. This module tests zerojax.zero.step_programs.cut."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.zero.step_programs import blocks, cut, operations

X = jnp.arange(4.0)


def of(function, apart=()):
    """Returns the parts of `function(x)`, whose variables in `apart` are numbered."""
    traced = jax.make_jaxpr(function)(X)
    return traced.jaxpr, cut.cut(traced.jaxpr, {traced.jaxpr.invars[number] for number in apart})


def block(x, run):
    return blocks._nested("forward", run)(x)


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
        values.update(zip(part.writes, operations.run(part, values, {})))
    np.testing.assert_allclose(values[jaxpr.outvars[0]], step(X), rtol=1e-6)


def test_collectives_of_blocks_run_beside_their_neighbours():
    def step(stored):
        x = stored
        for number in range(3):
            weight = blocks._nested(blocks.GATHER, lambda x, n=number: x * (n + 2.0))(stored)
            x = block(x * weight, lambda x: jnp.sin(x))
        grads = []
        for number in reversed(range(3)):
            weight = blocks._nested(blocks.GATHER, lambda x, n=number: x * (n + 2.0))(stored)
            x = blocks._nested("backward", lambda x, w: x * w)(x, weight)
            grads.append(blocks._nested(blocks.REDUCE, lambda x: x[::-1] * 2)(x))
        return grads

    jaxpr, found = of(step)
    found = cut.ahead(found)
    assert [(part.name, tuple(sorted(part.also))) for part in found if part.name != "between"] == [
        ("gather", ()),
        ("forward", ("gather",)),
        ("forward", ("gather",)),
        ("forward", ()),  # the backward pass begins with what is gathered
        ("backward", ("gather",)),
        ("backward", ("gather", "reduce")),
        ("backward", ("reduce",)),
        ("reduce", ()),
    ]
    values = {jaxpr.invars[0]: X}
    for in_turn in (False, True):
        for part in found:
            values.update(zip(part.writes, operations.run(part, values, {}, in_turn=in_turn)))
        for var, grad in zip(jaxpr.outvars, step(X)):
            np.testing.assert_allclose(values[var], grad, rtol=1e-6)


def test_operations_that_read_an_argument_that_arrives_stay_apart():
    def step(x):
        for _ in range(3):
            x = block(jnp.sin(x), lambda x: x * 2)
        return x

    assert [part.name for part in of(step, apart=[0])[1]] == ["between", "forward", "forward", "forward"]
