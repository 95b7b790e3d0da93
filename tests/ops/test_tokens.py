"""Checks what models call whose tokens may be sharded. This module tests zerojax.ops.tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.ops import attention, context_attention, tokens

WAYS, LENGTH, HEADS, WIDTH = 4, 16, 4, 8


def drawn():
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, LENGTH, HEADS, WIDTH)), jnp.float32)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_attend_as_all_tokens_of_one_device_do(packed):
    x, mesh = drawn(), mesh_lib.make_mesh(data=2, context=WAYS)
    segments = jnp.asarray(np.arange(LENGTH) // 5)[None].repeat(2, axis=0) if packed else None
    way = context_attention.choose(heads=HEADS, kv_heads=HEADS, ways=WAYS, length=LENGTH, is_causal=True)

    def run(x, segments, way):
        assert way is None or tokens.of_all(x.shape[2]) == LENGTH
        return tokens.attend(*x, "xla", way=way, is_causal=True, segments_BT=segments, window=6)

    cut = jax.shard_map(
        lambda x, segments: run(x, segments, way),
        mesh=mesh,
        in_specs=(P(None, None, tokens.AXIS), P(None, tokens.AXIS)),
        out_specs=P(None, tokens.AXIS),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(cut)(x, segments), run(x, segments, None), rtol=1e-5, atol=1e-6)


def test_segments_are_a_mask_where_a_device_has_all_tokens():
    x, segments = drawn(), jnp.zeros((2, LENGTH), jnp.int32).at[:, 7:].set(1)
    mask = segments[:, :, None] == segments[:, None]
    found = tokens.attend(*x, "xla", way=None, is_causal=True, segments_BT=segments)
    np.testing.assert_array_equal(found, attention.attend(*x, "xla", is_causal=True, mask=mask))
