"""Tests of zerojax.optim.pieces: a leaf in pieces keeps its shape, dtype, values and sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import tree
from zerojax.optim import pieces


@pytest.mark.parametrize(
    ("spec", "dim", "lengths"), [(P("data"), 1, (5, 5, 2)), (P(None, "data"), 0, (7, 9)), (P(), 1, (24,))]
)
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_split_and_join_are_inverse_on_every_sharding(spec, dim, lengths, kind):
    sharding = NamedSharding(zerojax.make_mesh(), spec, memory_kind=kind)
    values = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)[:, : sum(lengths) if dim == 1 else 24]
    array = jax.device_put(values, sharding)
    shapes = [tuple(n if d == dim else values.shape[d] for d in range(2)) for n in lengths]
    like = pieces.Pieces([jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes], dim)
    found = pieces.split(array, like)
    assert (found.shape, found.dtype, found.lengths, found.sharding) == (values.shape, values.dtype, lengths, sharding)
    assert [part.sharding for part in found.arrays] == [sharding] * len(lengths)
    np.testing.assert_array_equal(pieces.join(found), values)
    for part, expected in zip(found.arrays, pieces.slices(lengths, dim, values), strict=True):
        np.testing.assert_array_equal(part, expected)


def test_pieces_are_a_tree_whose_paths_are_numbered():
    leaf = pieces.Pieces([jnp.zeros((2, 3)), jnp.ones((4, 3))], 0)
    assert [path for path, _ in tree.flatten({"a": leaf})] == ["a/0", "a/1"]
    assert jax.tree.map(jnp.shape, leaf).arrays == ((2, 3), (4, 3))
    assert pieces.whole(jax.eval_shape(lambda: leaf)).shape == (6, 3)
    assert pieces.whole(leaf.arrays[0]) is pieces.join(leaf.arrays[0])
