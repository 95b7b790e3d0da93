"""Checks that rows of any length are packed alone. This module tests zerojax.ops.packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import packed

ROWS = {(1, 4): (), (255, 8): (), (256, 4): (), (700, 8): ()}  # by default


@pytest.mark.parametrize(
    ("n", "bits"),
    [pytest.param(n, bits, marks=ROWS.get((n, bits), pytest.mark.long)) for n in (1, 255, 256, 700) for bits in (8, 4)],
)
def test_rows_of_any_length_come_back_and_count_their_elements(n, bits):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, n)), jnp.float32)
    pack, unpack = (jax.jit(function, static_argnums=(1, 2)) for function in (packed.pack, packed.unpack))
    found = pack(rows, bits, "cpu")
    assert found.codes.size + found.scales.size == 6 * packed.elements(n, bits)
    back = unpack(found, bits, n)
    assert back.shape == rows.shape
    np.testing.assert_allclose(back, rows, atol=0.02 if bits == 8 else 0.6)
    np.testing.assert_array_equal(back[1, 2], unpack(pack(rows[1, 2], bits, "cpu"), bits, n))
    np.testing.assert_allclose(
        jax.jit(packed.sum_of, static_argnums=(1, 2, 3))(found, bits, n, "cpu"), back[0] + back[1], atol=1e-5
    )
