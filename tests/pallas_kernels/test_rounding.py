"""Checks that random rounding is right in the mean and its bits are random. This module tests pallas_kernels.rounding."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rounding


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(st.booleans(), st.integers(1, 253), st.integers(0, 2**23 - 1))
def test_all_bits_together_give_the_value_itself_in_the_mean(is_negative, exponent, mantissa):
    x = np.uint32(is_negative << 31 | exponent << 23 | mantissa).view(np.float32)
    bits = jnp.arange(2**16, dtype=jnp.uint32)
    found = np.asarray(rounding.stochastic_round(jnp.full(bits.shape, x, jnp.float32), bits), np.float64)
    assert len(np.unique(found)) <= 2
    np.testing.assert_allclose(found.mean(), x, rtol=1e-6)


def test_exact_and_not_finite_values_are_unchanged():
    x = jnp.asarray([0.0, -0.0, 1.5, -3.0, np.inf, -np.inf, np.nan], jnp.float32)
    for bits in (0, 1, 2**16 - 1):
        found = rounding.stochastic_round(x, jnp.full(x.shape, bits, jnp.uint32))
        np.testing.assert_array_equal(found.astype(jnp.float32), x)


def test_draws_are_uniform_and_unlike_each_other_and_those_of_other_seeds():
    index = jnp.arange(2**16, dtype=jnp.uint32)
    seeds = [rounding.fold(jnp.uint32(0), step) for step in range(3)]
    draws = np.asarray([draw for seed in seeds for draw in rounding.noise(index, seed)], np.float64) / 2**16
    assert draws.min() >= 0 and draws.max() < 1
    deviation = 1 / np.sqrt(index.size)
    np.testing.assert_allclose(draws.mean(axis=1), 0.5, atol=5 * deviation / np.sqrt(12))
    counts = np.stack([np.histogram(draw, 64, (0, 1))[0] for draw in draws])
    assert np.all(np.sum((counts - 1024.0) ** 2 / 1024, axis=1) < 63 + 6 * np.sqrt(126))  # chi-squared of 63 degrees
    correlations = np.corrcoef(np.concatenate([draws, np.roll(draws, 1, axis=1)])) - np.eye(18)
    assert np.abs(correlations).max() < 6 * deviation


def test_mix_is_a_permutation():
    some = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    assert len(np.unique(rounding.mix(jnp.asarray(some)))) == len(np.unique(some))
