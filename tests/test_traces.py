"""Checks how traced programs are read. This module tests zerojax.traces."""

import warnings

import flax.linen as nn
import jax
import jax.extend.core as jex
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

    def function(x):
        return jnp.sin(x) + jax.jit(jnp.sin)(x) + jax.lax.cond(x[0] > 0, jnp.sin, jnp.tan, x)

    changed = traces.replaced(jax.make_jaxpr(function)(X), cosine)
    names = [eqn.primitive.name for eqn in traces.equations(changed)]
    assert names.count("cos") == 3 and "sin" not in names


def test_bodies_are_given_as_many_atoms_as_they_take():
    found = [pair for eqn in traces.equations(program(X)) for pair in traces.bodies(eqn)]
    assert len(found) >= 8 and all(len(traces.opened(body)[0].invars) == len(given) for body, given in found)


def test_what_nobody_reads_is_dropped_unless_it_acts():
    def function(x, n):
        jax.debug.print("{}", n)
        jnp.cos(x)
        return jnp.sin(x)

    jaxpr = program(X, function).jaxpr
    kept = traces.live(jaxpr.eqns, jaxpr.outvars)
    assert len(kept) == 2 and traces.acts(kept[0]) and kept[1].primitive.name == "sin"
    assert traces.needs(jaxpr) == [{0, 1}]

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    local = jax.shard_map(
        lambda x: (jax.lax.psum(x, "i"), jnp.sin(x))[1], mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")
    )
    ((body, _),) = [found for eqn in traces.equations(jax.make_jaxpr(local)(X)) for found in traces.bodies(eqn)]
    body, _ = traces.opened(body)
    assert any("psum" in eqn.primitive.name for eqn in body.eqns)
    assert [eqn.primitive.name for eqn in traces.live(body.eqns, body.outvars)] == ["sin"]


def test_constants_of_programs_inside_are_found():
    table = np.arange(4.0, dtype=np.float32)
    inner = jax.make_jaxpr(lambda x: x * table)(X)
    outer = jax.make_jaxpr(jax.jit(jnp.sin))(X)
    (call,) = outer.jaxpr.eqns
    outer = outer.replace(jaxpr=outer.jaxpr.replace(eqns=[call.replace(params=call.params | {"jaxpr": inner})]))
    assert any(np.array_equal(constant, table) for constant in traces.constants(outer))


def test_an_equation_is_traced_again_under_its_own_names_and_those_around():
    def inside(x, _):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    (eqn,) = program(X, inside).jaxpr.eqns

    def again(x, _):
        with jax.named_scope("outer"), traces.scopes(eqn):
            return jnp.cos(x)

    assert str(program(X, again).jaxpr.eqns[0].source_info.name_stack) == "outer/inner"


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
    flat, square = (traces.Frame(jax.make_jaxpr(jnp.sin)(jnp.ones(shape))) for shape in ((4,), (4, 3)))
    assert traces.Frame(square.program, like=flat).lengths(square.jaxpr.outvars[0]) is None


def test_a_part_of_a_program_runs_alone_and_jax_finds_nothing_deprecated_in_it():
    whole = jax.make_jaxpr(lambda x, y: (jnp.sin(x) * 2, jnp.arange(4.0) + y))(X, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut = traces.trimmed(whole, whole.jaxpr.outvars[1:])
        assert len(cut.jaxpr.invars) == 1
        np.testing.assert_array_equal(*jax.jit(jex.jaxpr_as_fun(cut))(X), jnp.arange(4.0) + X)


def test_an_equation_comes_from_the_line_that_calls_a_library():
    x = jnp.ones((2, 3))
    program = jax.make_jaxpr(lambda x: nn.Dense(4).init_with_output(jax.random.key(0), jnp.sin(x))[0])(x)
    found = [traces.line(eqn) for eqn in traces.equations(program) if eqn.primitive.name in ("sin", "dot_general")]
    assert len(found) == 2 and all(line.startswith(f"{__file__}:") for line in found), found
