import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from zerojax.hlo import replica_groups

NAMES = ("replica", "data", "model")


def mesh_of(shape):
    devices = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, NAMES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def spellings(shape, chosen):
    """Returns the groups of devices along some axes in every form that XLA prints."""
    grid = np.arange(np.prod(shape)).reshape(shape)
    rest = [axis for axis in range(len(shape)) if axis not in chosen]
    order = [*rest, *chosen]
    ways = int(np.prod([shape[axis] for axis in chosen], dtype=int))
    rows = grid.transpose(order).reshape(-1, ways)
    listed = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows.tolist()) + "}"
    counted = f"[{len(rows)},{ways}]<=[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    sizes = ",".join(f"'{NAMES[axis]}'={size}" for axis, size in enumerate(shape))
    named = f"mesh[{sizes}] {{{','.join(repr(NAMES[axis]) for axis in chosen)}}}"
    return listed, counted, named


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), shape=st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8, 1), (2, 4, 1)]))
def test_every_form_names_the_same_axes(data, shape):
    chosen = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    expected = tuple(NAMES[axis] for axis in chosen if shape[axis] > 1)
    for spelling in spellings(shape, chosen):
        attributes = f", channel_id=1, replica_groups={spelling}, dimensions={{0}}, to_apply=%add"
        groups = replica_groups.groups(attributes, 8)
        assert replica_groups.axes(groups, mesh_of(shape)) == expected, spelling
        assert max(map(len, groups)) == np.prod([shape[axis] for axis in chosen])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['data'=8] {'data':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_groups_of_one_form(text, expected):
    assert replica_groups.groups(f"replica_groups={text}, dimensions={{0}}", 8) == expected


def test_a_permutes_rings_count_as_groups():
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    groups = replica_groups.groups(pairs, 8)
    assert groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert replica_groups.axes(groups, mesh_of((2, 4))) == ("data",)


def test_groups_that_match_no_axes_are_unknown():
    assert replica_groups.axes(((0, 3), (1, 2), (4, 7), (5, 6)), mesh_of((2, 4))) == ("?",)
