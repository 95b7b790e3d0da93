"""Checks attention to a cache against softmax over the slots with text. This module tests pallas_kernels.cached_attention."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cached_attention


@pytest.mark.parametrize("window", [0, 33])
def test_kernel_and_twin_attend_to_the_slots_with_text(window):
    random = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in ((3, 8, 16), (3, 200, 2, 16), (3, 200, 2, 16))
    )
    ends = np.array([5, 0, 190])
    for implementation in ("jnp", "interpret"):
        found = cached_attention.attend(
            q, k, v, jnp.asarray(ends), scale=0.25, window=window, implementation=implementation
        )
        for row, end in enumerate(ends):
            begin = max(0, end - window) if window else 0
            for head in range(8):
                keys, values = (np.asarray(x, np.float32)[row, begin:end, head // 4] for x in (k, v))
                p = np.exp(0.25 * keys @ np.asarray(q, np.float32)[row, head])
                wanted = (p / p.sum()) @ values if end else np.zeros(16)
                np.testing.assert_allclose(found[row, head], wanted, atol=0.01)


def test_the_last_program_of_a_row_joins_its_ranges_and_leaves_counters_at_0():
    random = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in ((3, 8, 16), (3, 200, 2, 16), (3, 200, 2, 16))
    )
    ends, counts = jnp.asarray([5, 0, 190]), jnp.zeros(8, jnp.int32)
    wanted = cached_attention.attend(q, k, v, ends, scale=0.25)
    for implementation in ("jnp", "interpret"):
        found, left = cached_attention.attend_counted(q, k, v, ends, counts, scale=0.25, implementation=implementation)
        assert found.dtype == q.dtype and not left.any()
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=0.02, err_msg=implementation)
