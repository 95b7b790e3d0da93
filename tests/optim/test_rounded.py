"""Checks that arrays are rounded without bias, and alike for one seed. This module tests zerojax.optim.rounded."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.optim import rounded


def test_the_mean_of_rounded_values_is_the_value():
    """Between 1 and the next bfloat16, 1 + 2**-7, lies a quarter of the way up."""
    array = jnp.full((256, 257), 1 + 2.0**-9)
    found = rounded.to_bfloat16(array, rounded.seed(3, 1)).astype(jnp.float32)
    assert set(np.unique(found)) == {1.0, 1 + 2.0**-7}
    np.testing.assert_allclose(found.mean(), 1 + 2.0**-9, atol=2.0**-7 * 4 * (3 / 16 / array.size) ** 0.5)


def test_a_seed_gives_its_own_bits_again_and_others_give_others():
    array = jnp.linspace(1, 2, 999)
    one, same, other = (rounded.to_bfloat16(array, rounded.seed(5, n)) for n in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.any(np.asarray(one != other))
    exact = jnp.array([1.0, -2.0, jnp.inf, 0.0])
    np.testing.assert_array_equal(rounded.to_bfloat16(exact, rounded.seed(0)), exact)


def test_shards_that_know_their_place_have_the_bits_of_the_array():
    array, mesh, spec = (
        jnp.linspace(1, 2, 8 * 3 * 6).reshape(8, 3, 6),
        zerojax.make_mesh(replica=2, data=4),
        P("data", None, "replica"),
    )
    shape = (2, 3, 3)

    def rounded_there(shard):
        start = (jax.lax.axis_index("data") * shape[0], 0, jax.lax.axis_index("replica") * shape[2])
        return rounded.to_bfloat16(shard, rounded.seed(5), rounded.Place(start, array.shape))

    found = jax.jit(jax.shard_map(rounded_there, mesh=mesh, in_specs=spec, out_specs=spec))(array)
    np.testing.assert_array_equal(found, rounded.to_bfloat16(array, rounded.seed(5)))
