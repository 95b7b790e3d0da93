"""Checks rotary positions against their equations. This module tests zerojax.models.rope."""

import dataclasses

import arrays
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from zerojax.models import rope

ROUNDING = 2e-5  # float32 sums of some hundred terms in another order
SCALED = 1e-5  # relative: float32 powers of a base


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 10), st.sampled_from([1e4, 5e5]))
def test_rotated_scores_depend_only_on_distance(i, j, shift, theta):
    x = arrays.normal(0, (2, 16))
    rotated = np.asarray(rope.rotate(jnp.broadcast_to(x[:, None, None], (2, 31, 1, 16)), rope.frequencies(16, theta)))
    rotated = rotated[:, :, 0]
    np.testing.assert_allclose(rotated[0, i] @ rotated[1, j], rotated[0, i + shift] @ rotated[1, j + shift], atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(rotated[0], axis=-1), np.linalg.norm(x[0]), rtol=ROUNDING)
    np.testing.assert_allclose(rotated[:, 0], x, atol=0)


def test_rotation_turns_each_pair_by_its_angle():
    length, dim, theta = 7, 8, 100.0
    x = arrays.normal(3, (1, length, 1, dim))
    pairs = np.asarray(x[..., : dim // 2]) + 1j * np.asarray(x[..., dim // 2 :])
    angles = np.arange(length)[:, None] * theta ** (-2 * np.arange(dim // 2) / dim)
    turned = pairs * np.exp(1j * angles)[None, :, None, :]
    np.testing.assert_allclose(
        rope.rotate(x, rope.frequencies(dim, theta)), np.concatenate([turned.real, turned.imag], -1), atol=ROUNDING
    )


def test_positions_of_each_row_may_differ():
    x = arrays.normal(0, (1, 9, 2, 8))
    frequency = rope.frequencies(8, 100.0)
    full = rope.rotate(x, frequency)
    shifted = rope.rotate(x[:, 3:5], frequency, jnp.array([[3, 4]]))
    np.testing.assert_array_equal(shifted, full[:, 3:5])


def test_linear_scaling_is_that_of_positions_divided_by_the_factor():
    plain, scaled = rope.frequencies(16, 1e4), rope.frequencies(16, 1e4, rope.Scaling("linear", 4.0))
    np.testing.assert_allclose(scaled * 4, plain, rtol=SCALED)


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between():
    scaling = rope.Scaling("llama3", 8.0, low_factor=1.0, high_factor=4.0, original_length=8192)
    plain = np.asarray(rope.frequencies(128, 5e5), np.float64)
    found = np.asarray(rope.frequencies(128, 5e5, scaling))
    waves = 2 * np.pi / plain
    is_short, is_long = waves < 8192 / 4, waves > 8192 / 1
    is_between = ~is_short & ~is_long
    assert is_short.any() and is_long.any() and is_between.any()
    kept = (8192 / waves - 1) / (4 - 1)
    expected = np.select([is_short, is_long], [plain, plain / 8], (1 - kept) * plain / 8 + kept * plain)
    np.testing.assert_allclose(found, expected, rtol=SCALED)
    at_once = rope.frequencies(128, 5e5, dataclasses.replace(scaling, high_factor=1.0))
    np.testing.assert_allclose(at_once, np.where(is_long, plain / 8, plain), rtol=SCALED)
    assert (np.diff(found) < 0).all()


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_blends_between():
    scaling = rope.Scaling("yarn", 4.0, 1.0, 32.0, 4096)
    plain, found = (np.asarray(rope.frequencies(128, 1e4, s)) for s in (None, scaling))
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(found[turns > 40], plain[turns > 40], rtol=SCALED)
    np.testing.assert_allclose(found[turns < 0.8], plain[turns < 0.8] / 4, rtol=SCALED)
    assert ((found <= plain * (1 + SCALED)) & (found >= plain / 4 * (1 - SCALED))).all()


def test_scalings_that_read_the_length_change_longer_texts_alone():
    plain = np.asarray(rope.frequencies(8, 1e4))
    dynamic = rope.Scaling("dynamic", 2.0, original_length=16)
    longrope = rope.Scaling("longrope", 4.0, original_length=16, short=(1.0,) * 4, long=(2.0, 3.0, 4.0, 5.0))
    lengths = jnp.array([5, 16, 17, 32])
    by_text = np.asarray(rope.frequencies(8, 1e4, longrope, lengths))
    np.testing.assert_allclose(by_text, [plain, plain, *[plain / [2, 3, 4, 5]] * 2], rtol=SCALED)
    by_text = np.asarray(rope.frequencies(8, 1e4, dynamic, lengths))
    np.testing.assert_allclose(by_text[:2], [plain, plain], rtol=SCALED)
    np.testing.assert_allclose(by_text[3], rope.frequencies(8, 1e4 * 3 ** (8 / 6)), rtol=SCALED)


def test_a_part_of_a_head_is_rotated_and_the_rest_kept():
    x = arrays.normal(0, (1, 5, 2, 16))
    found = rope.rotate(x, rope.frequencies(6, 100.0), factor=2.0)
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])
    np.testing.assert_allclose(found[..., :6], 2 * rope.rotate(x[..., :6], rope.frequencies(6, 100.0)), atol=ROUNDING)
