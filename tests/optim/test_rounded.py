"""Checks that arrays are rounded without bias, and alike for one seed. This module tests zerojax.optim.rounded."""

import jax.numpy as jnp
import numpy as np

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
