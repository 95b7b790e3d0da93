"""Compares functions of whole matrices at their owners with the same on one device. This module tests zerojax.optim.owners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.optim import owners

# (shape, form, spec): rows, columns and batches, each sharded over each axis, or several.
LEAVES = [
    ((16, 4, 8), "rcc", P(("data", "context"), "model")),
    ((4, 8, 16), "rrc", P("model", None, "data")),
    ((4, 8, 16), "crc", P("model", "data")),
    ((16, 64), "rc", P("data", "model")),
    ((64, 16), "rc", P(("model", "data"))),
    ((64, 16), "rc", P()),
    ((8, 16, 32), "brc", P("data", None, "model")),
    ((3, 16, 24), "brc", P(None, "data")),
    ((5, 16, 24), "bcr", P()),
    ((6, 10), "rc", P()),
    ((16, 3, 4, 8), "rbcc", P("data")),
    ((8, 16, 8), "brc", P(("expert", "expert_context"), ("data", "context"))),
]
MESHES = [
    {"data": 8},
    {"replica": 2, "data": 2, "model": 2},
    {"data": 2, "context": 4},
    {"replica": 8},
    {"data": 4, "context": 2, "expert": 4},
]


def square(matrices):
    """A function of whole matrices that is no function of their parts."""
    return matrices @ jnp.swapaxes(matrices, -1, -2) @ matrices


def cost(rows, columns):
    return rows * columns * min(rows, columns)


def on_shards(arrays, shardings):
    layouts = {
        n: owners.layout(a.shape, form, s) for n, (a, (_, form, _), s) in enumerate(zip(arrays, LEAVES, shardings))
    }
    planned = owners.rounds(layouts, cost)

    def run(shards):
        found = owners.apply(square, planned, lambda number, after: owners.ordered([shards[number]], after)[0])
        return [found[number] for number in range(len(shards))]

    of = [sharding.spec for sharding in shardings]
    return jax.jit(jax.shard_map(run, mesh=shardings[0].mesh, in_specs=(of,), out_specs=of, check_vma=False))(
        arrays
    ), planned


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: " ".join(f"{k}{v}" for k, v in sizes.items()))
def test_every_form_on_every_mesh_gives_what_one_device_computes(sizes):
    mesh = zerojax.make_mesh(**{"data": 1, **sizes})
    arrays = [jax.random.normal(jax.random.key(n), shape) for n, (shape, _, _) in enumerate(LEAVES)]
    shardings = [NamedSharding(mesh, spec) for _, _, spec in LEAVES]
    found, planned = on_shards([jax.device_put(*pair) for pair in zip(arrays, shardings)], shardings)
    for array, (_, form, _), one in zip(arrays, LEAVES, found):
        plain = owners.layout(array.shape, form)
        split = plain.split(array)
        whole = plain.matrix.assemble(split[None])
        np.testing.assert_allclose(one, plain.join(plain.matrix.cut(square(whole))[0]), rtol=2e-5, atol=1e-4)
    for one in planned:
        costs = [unit.count * cost(unit.layout.rows, unit.layout.columns) for unit in one.units]
        assert costs == sorted(costs, reverse=True) and len(one.units) <= mesh.size


def test_a_round_takes_a_matrix_for_each_device_and_the_largest_first():
    mesh = zerojax.make_mesh(data=8)
    shapes = [(16, 64)] * 12 + [(16, 16)] * 9 + [(64, 16)] * 4
    layouts = {n: owners.layout(s, "rc", NamedSharding(mesh, P("data"))) for n, s in enumerate(shapes)}
    planned = owners.rounds(layouts, cost)
    assert [len(one.units) for one in planned] == [8, 8, 8, 1]
    first = [cost(one.units[0].layout.rows, one.units[0].layout.columns) for one in planned]
    assert first == sorted(first, reverse=True)
    total = sum(cost(*shape) for shape in shapes)
    assert sum(first) <= total / 8 + first[0]  # of the owner that computes longest, in all rounds
    # Of each matrix a device gets the other devices' tiles if it is its owner, and its own tile of seven results.
    assert planned[0].received == 2 * 7 * 16 * 64 // 8


def test_stacks_with_more_matrices_than_devices_are_computed_many_at_once():
    sharding = NamedSharding(zerojax.make_mesh(data=8), P(None, "data"))
    (one,) = owners.rounds({0: owners.layout((32, 16, 24), "brc", sharding)}, cost)
    assert [(unit.start, unit.count) for unit in one.units] == [(n, 4) for n in range(0, 32, 4)]
    # Matrices that are whole on their devices are not sent.
    here = owners.rounds({0: owners.layout((32, 16, 24), "brc", NamedSharding(sharding.mesh, P("data")))}, cost)
    assert [one.received for one in here] == [0]
