"""Tests of zerojax.zero.host.memory_kind."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.zero.host import memory_kind

SPECS = [P(), P("data"), P(None, "data"), P("replica", "data"), P(("replica", "data"))]


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
@pytest.mark.parametrize("copy", [memory_kind.moved, memory_kind.by_shard])
def test_copies_have_the_values_the_sharding_and_the_memory_that_were_asked_for(copy, kind):
    mesh = zerojax.make_mesh(replica=2)
    values = [np.arange(64, dtype=np.float32).reshape(8, 8) + number for number in range(len(SPECS))]
    other = {"pinned_host": "device", "device": "pinned_host"}[kind]
    arrays = [jax.device_put(value, NamedSharding(mesh, spec, memory_kind=other)) for value, spec in zip(values, SPECS)]
    wanted = [array.sharding.with_memory_kind(kind) for array in arrays]
    copies = copy(arrays, wanted)
    for value, found, sharding in zip(values, copies, wanted):
        np.testing.assert_array_equal(np.asarray(found), value)
        assert found.sharding == sharding
        assert memory_kind.is_on_host(found) == (kind == "pinned_host")
    for array in arrays:
        array.delete()
    np.testing.assert_array_equal(np.asarray(copies[1]), values[1])  # copies are no views


def test_nothing_to_copy_gives_nothing():
    assert memory_kind.moved([], []) == []
