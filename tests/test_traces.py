"""Checks how traced programs are read. This module tests zerojax.traces."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import traces


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def nested(x, n):
    """Every kind of program inside a program."""
    y = jax.jit(jnp.sin)(doubled(x)) + jax.checkpoint(jnp.tanh)(x)
    y = jax.lax.cond(n > 2, jnp.cos, jnp.exp, y)
    y, _ = jax.lax.scan(lambda carry, row: (carry * row, None), y, jnp.arange(1.0, 3.0))
    return jax.lax.while_loop(lambda pair: pair[1] < 5, lambda pair: (pair[0] + x, pair[1] + 1), (y, n))[0]


def program(x, function=nested):
    return jax.make_jaxpr(function)(x, 3)


X = jnp.linspace(0.1, 0.9, 4)


def test_a_program_is_run_equation_by_equation():
    (found,) = traces.run(program(X), (X, 3), traces.bind)
    np.testing.assert_array_equal(found, nested(X, 3))


def test_each_equation_is_found_once_for_each_call_of_its_program():
    names = sorted(eqn.primitive.name for eqn in traces.equations(program(X)))
    assert names == sorted(eqn.primitive.name for _, eqn in traces.Frame(program(X)).equations())
    assert {"sin", "tanh", "cos", "exp", "scan", "while", "mul", "lt"} <= set(names)
    found = [eqn for _, eqn in traces.Frame(program(X)).equations() if eqn.primitive.name in traces.CALLS]
    assert all(traces.called(eqn) is not None for eqn in found) and len(found) >= 3


def test_a_program_is_rewritten_inside_and_out():
    def cosine(eqn):
        return eqn.replace(primitive=jax.lax.cos_p) if eqn.primitive is jax.lax.sin_p else eqn

    changed = traces.replaced(jax.make_jaxpr(lambda x: jnp.sin(x) + jax.jit(jnp.sin)(x))(X), cosine)
    names = [eqn.primitive.name for eqn in traces.equations(changed)]
    assert names.count("cos") == 2 and "sin" not in names


def test_a_value_is_followed_to_where_it_comes_from():
    def moved(x, n):
        return jax.jit(lambda x: jnp.reshape(jax.jit(jnp.sin)(x).T, -1)[None])(x)

    frame = traces.Frame(program(jnp.ones((2, 3)), moved))
    result = frame.jaxpr.outvars[0]
    place, atom = frame.origin(result, traces.MOVES)
    assert place.makers[atom].primitive.name == "sin"
    assert frame.origin(result)[0].caller is frame
    assert place.origin(place.makers[atom].invars[0]) == (frame, frame.jaxpr.invars[0])


def test_dims_of_one_program_for_two_shapes_are_compared_also_inside_its_calls():
    def function(x, n):
        return jax.jit(lambda a, b: a.sum() + b.sum())(x, jnp.ones((4, 3)) * n)

    frame = traces.Frame(program(jnp.ones((4, 3)), function), like=traces.Frame(program(jnp.ones((8, 3)), function)))
    sums = [(place, eqn) for place, eqn in frame.equations() if eqn.primitive.name == "reduce_sum"]
    assert [place.lengths(eqn.invars[0]) for place, eqn in sums] == [[(4, 8), (3, 3)], [(4, 4), (3, 3)]]
    other = traces.Frame(program(jnp.ones((4, 3)), nested))
    assert traces.Frame(frame.program, like=other).lengths(frame.jaxpr.eqns[-1].outvars[0]) is None
