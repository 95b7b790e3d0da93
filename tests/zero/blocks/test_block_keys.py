"""Checks what blocks draw. This module tests zerojax.zero.blocks.block_keys."""

import flax.core
import jax
import numpy as np

from zerojax.zero.blocks import block_keys


def test_a_block_goes_on_where_its_scope_was_and_the_scope_where_the_block_ended():
    def drawn(scope):
        return jax.random.key_data(scope.make_rng("dropout"))

    whole, own = (flax.core.bind({}, rngs={"dropout": jax.random.key(0)}) for _ in range(2))
    expected = [drawn(whole) for _ in range(4)]
    found, other = [drawn(own)], flax.core.bind({})
    streams = block_keys.Streams(own)
    with streams.running(other, streams.words):
        found += [drawn(other), drawn(other)]
    np.testing.assert_array_equal([*found, drawn(own)], expected)
