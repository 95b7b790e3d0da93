"""Checks the orders of sharded tokens. This module tests zerojax.ops.token_order."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zerojax.ops import token_order


@pytest.mark.parametrize("order", token_order.CHUNKS)
def test_positions_on_devices_are_those_that_are_fed(order):
    fed = token_order.permutation(24, 4, order)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("context",))
    positions = jax.shard_map(
        lambda: token_order.positions(6, "context", order), mesh=mesh, in_specs=(), out_specs=P("context")
    )
    np.testing.assert_array_equal(jax.jit(positions)(), fed)
    np.testing.assert_array_equal(token_order.in_sequence(fed[None], 1, 4, order)[0], np.arange(24))
    np.testing.assert_array_equal(token_order.as_fed(np.arange(24)[None], 1, 4, order)[0], fed)


def test_zigzag_gives_causal_queries_of_all_devices_as_many_keys():
    seen = 1 + token_order.permutation(48, 8, "zigzag").reshape(8, -1)
    assert len(set(seen.sum(axis=1))) == 1
    assert len(set((1 + token_order.permutation(48, 8, "contiguous").reshape(8, -1)).sum(axis=1))) == 8
