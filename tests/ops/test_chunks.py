"""Checks chunks against the tokens that they hold. This module tests zerojax.ops.chunks."""

import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import chunks


@pytest.mark.parametrize("counts", [(1,), (4,), (5,), (2, 3)])
def test_chunks_are_equal_hold_all_tokens_in_order_and_padding_has_no_label(counts):
    hidden, labels = jnp.arange(60.0).reshape(2, 10, 3), jnp.arange(20).reshape(2, 10)
    cut_hidden, cut_labels = chunks.cut(hidden, labels, *counts)
    size = -(-20 // np.prod(counts))
    assert cut_hidden.shape == (*counts, size, 3) and cut_labels.shape == (*counts, size)
    np.testing.assert_array_equal(cut_hidden.reshape(-1, 3)[:20], hidden.reshape(-1, 3))
    found = cut_labels.reshape(-1)
    np.testing.assert_array_equal(found[:20], np.arange(20))
    assert (found[20:] == chunks.NO_LABEL).all()
