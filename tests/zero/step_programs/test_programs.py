"""Checks a step that is cut into programs against the same step as one program. This module tests zerojax.zero.step_programs.programs."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from block_nets import Net, abstract, parts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.zero.step_programs import blocks, cut, programs, schedule


@runs.LONG
@pytest.mark.parametrize(
    ("net", "mesh", "stage", "how"),
    [
        pytest.param(Net(), (1, 8), 3, {}, marks=runs.LONG),
        (Net(1), (2, 4), 2, {"remat": "full", "heads": ""}),
        pytest.param(Net(), (2, 4), 3, {"remat": "full", "heads": ""}, marks=runs.LONG),
        pytest.param(Net(dropout=True), (8, 1), 3, {"recompute": ".*/wide"}, marks=runs.LONG),
        pytest.param(Net(), (2, 2, 2), 3, {}, marks=runs.LONG),
        pytest.param(Net(1), (1, 8), 2, {}, marks=runs.LONG),
    ],
)
def test_programs_one_after_the_other_are_the_step(net, mesh, stage, how):
    plain, nested, *args = parts(net, mesh, stage, **how)
    expected = jax.jit(plain)(*args)
    found = schedule.Schedule(programs.cut(nested, *abstract(args)))(*args)
    for (path, have), (_, want) in zip(tree.flatten(found), tree.flatten(expected), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6, err_msg=path)
        assert have.sharding.is_equivalent_to(want.sharding, want.ndim), path
        assert have.dtype == want.dtype, path


@pytest.mark.parametrize("dropout", runs.cases([False, True], long=[False]))
def test_equal_layers_share_one_compiled_program_and_no_program_reads_what_it_does_not_need(dropout):
    _, nested, *args = parts(Net(layers=3, dropout=dropout))
    cut = programs.cut(nested, *abstract(args))
    passes = [program for program in cut.programs if program.name in ("forward", "backward")]
    assert len(passes) == 2 * (3 + 2 + 1)  # the layers, the shared block twice, the head
    # With dropout, the first block reads its key from the operations before all blocks, and the others make their own.
    assert len({id(program.run) for program in passes}) <= 8 + dropout, "layers of one shape are compiled once"
    read = {number for program in cut.programs for number in program.reads}
    written = [number for program in cut.programs for number in program.writes]
    assert len(set(written)) == len(written)
    results = {result for result in cut.results if isinstance(result, int)}
    assert set(written) <= read | results, "every value has a reader"
    weights = len(jax.tree.leaves(args[0]))
    for program in passes:
        assert len([number for number in program.reads if number < weights]) <= 4, "a block reads its own weights"
    assert bool(cut.constants) == dropout, "layers differ in the keys of their dropout alone"


def test_a_result_that_is_constant_is_returned():
    _, nested, *args = parts(Net(1))
    (_, aux), _ = schedule.Schedule(programs.cut(nested, *abstract(args)))(*args)
    assert float(aux["metrics"]["one"]) == 1 and int(aux["state"]["step"]) == 1


def test_arrays_that_the_loss_closes_over_are_given_to_the_programs():
    mesh = mesh_lib.make_mesh(8)
    table, rows = np.arange(16.0, dtype=np.float32) ** 2, np.arange(8) * 2
    run = jax.shard_map(lambda rows: jnp.asarray(table)[rows], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    placed = jax.device_put(rows, NamedSharding(mesh, P("data")))
    cut = programs.cut(run, *abstract([placed]))
    (given,) = cut.constants.values()
    np.testing.assert_array_equal(given, table)
    np.testing.assert_array_equal(schedule.Schedule(cut)(placed), table[rows])


def test_a_result_that_a_later_program_reads_is_read_as_it_was_written():
    mesh = mesh_lib.make_mesh(8)

    def block(x):
        return 2 * x

    block.__name__ = f"{blocks.NAME}_forward"

    def own(x):
        total = jax.lax.psum(x.sum(), "data")
        return total, jax.jit(block)(x) + total

    run = jax.shard_map(own, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")), check_vma=False)
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("data")))
    cut = programs.cut(run, *abstract([x]))
    total, rest = schedule.Schedule(cut)(x)
    assert len(cut.programs) == 3 and float(total) == 28
    np.testing.assert_array_equal(rest, 2 * np.arange(8) + 28)


def test_random_keys_that_the_loss_closes_over_are_given_to_the_programs():
    mesh, key = mesh_lib.make_mesh(8), jax.random.key(3)
    run = jax.shard_map(lambda x: x + jax.random.uniform(key), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    placed = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("data")))
    found = schedule.Schedule(programs.cut(run, *abstract([placed])))(placed)
    np.testing.assert_array_equal(found, np.full(8, jax.random.uniform(key)))


def test_bytes_are_those_on_one_device():
    _, nested, *args = parts(Net(1))
    cut = programs.cut(nested, *abstract(args))
    for number, leaf in enumerate(jax.tree.leaves(args)):
        assert cut.nbytes(number) == leaf.addressable_shards[0].data.nbytes


def test_an_array_without_elements_is_made_where_it_is_read():
    """The compiler of JAX 0.11 ends the process where a mapped function gets one that nothing reads."""
    mesh = mesh_lib.make_mesh(data=2, devices=jax.devices()[:2])
    mapped = jax.shard_map(
        lambda x, e: x * 2 + e.sum(), mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False
    )
    given = jnp.arange(6.0).reshape(2, 3), jnp.zeros((2, 0))
    [call] = jax.make_jaxpr(mapped)(*given).eqns
    inner = call.params["jaxpr"]
    closed = jex.ClosedJaxpr(inner, ())
    part = cut.StepPart("between", [cut.TraceCall(inner.invars, inner.outvars, closed)], inner.outvars)
    program = programs.Mapped(call).program(part, (), lambda *arrays: ())
    [own] = jax.make_jaxpr(program)(*given).eqns
    assert len(own.invars) == 1
    np.testing.assert_array_equal(jax.jit(program)(*given)[0], 2 * given[0])
