"""Checks programs that move arrays between groups. This module tests zerojax.zero.pipeline.travel; tests/whole_runs has processes."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.zero.pipeline import travel


@pytest.fixture(scope="module")
def moving():
    """Returns what moves arrays as between processes, the mesh, its groups, and an array of the first."""
    mesh = mesh_lib.make_mesh(pipe=2, data=2, devices=jax.devices()[:4])
    groups = mesh_lib.groups(mesh)
    found = travel.Travel(mesh, groups)
    assert found.is_one
    found.is_one = False
    x = jax.device_put(np.arange(24.0, dtype=np.float32).reshape(4, 6), NamedSharding(groups[0], P("data")))
    return found, mesh, groups, x


def test_a_hop_is_a_device_put(moving):
    found, _, groups, x = moving
    count = jax.device_put(np.int32(7), NamedSharding(groups[0], P()))
    moved, number = found.hop([x, count], [x, count], 0, 1)
    assert moved.sharding == NamedSharding(groups[1], P("data")) and int(number) == 7
    np.testing.assert_array_equal(moved, x)


def test_small_arrays_of_any_group_are_on_all_devices_and_none_is_a_number_still(moving):
    found, mesh, groups, _ = moving
    values = [
        jax.device_put(np.float32(value), NamedSharding(group, P())) for value, group in zip((np.nan, 2.5), groups)
    ]
    shared = found.shared(values, values, [0, 1])
    assert [float(value) for value in shared] == pytest.approx([np.nan, 2.5], nan_ok=True)
    assert {value.sharding for value in shared} == {NamedSharding(mesh, P())}


def test_what_is_spread_over_groups_settles_where_it_was(moving):
    found, mesh, _, x = moving
    spread = found.spread(x, x, 0, NamedSharding(mesh, P((mesh_lib.PIPE, "data"))))
    assert len({str(shard.index) for shard in spread.addressable_shards}) == 4
    back = found.settled(spread, x, 0)
    assert back.sharding == x.sharding
    np.testing.assert_array_equal(back, x)


def test_a_group_that_is_elsewhere_has_no_shards_here(moving):
    *_, x = moving
    with pytest.raises(ValueError):
        travel.absent(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))  # it is here


def test_a_process_that_has_neither_end_of_a_hop_returns_at_once(moving, monkeypatch):
    _, mesh, groups, x = moving
    monkeypatch.setattr(travel, "is_here", lambda group: group is groups[1])
    found = travel.Travel(mesh, groups)
    assert found.here == [False, True] and not found.is_one
    assert found.hop([None], [x], 0, 0) == [None]
