"""Checks what devices exchange for attention over sharded tokens, in programs for absent GPUs. This module tests ops.ring_attention.

It compares the other ways with it. Values and gradients of all are in test_context_attention.
"""

import functools

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.hlo import collectives, flow, syntax
from zerojax.ops import context_attention
from zerojax.zero import remat

HEADS, KV_HEADS, WIDTH = 8, 4, 64


@functools.cache
def compiled(way, order, ways, length, window=0, under=""):
    """Returns the collectives of a forward and backward pass in bfloat16 with cuDNN, the number of its kernels, and its temporary bytes."""
    mesh = Mesh(np.asarray(compile_only.gpus(topology=f"1x{ways}")), ("context",))
    tokens = P(None, "context")

    def attend(q, k, v):
        way_ = context_attention.Way(way, order, "", halo=True)
        y = context_attention.attend(
            q, k, v, "cudnn", axis="context", way=way_, order=order, is_causal=True, window=window
        )
        return y * y

    def both(q, k, v, dy):
        function = jax.checkpoint(attend, policy=remat.policy(under)) if under else attend
        out, gradients = jax.vjp(function, q, k, v)
        return out, gradients(out * dy)

    run = jax.shard_map(both, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    like = [
        jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, tokens))
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    with compile_only.optimized():
        program = jax.jit(run).lower(*like).compile(compiler_options=compile_only.FAST)
    text = program.as_text()
    found = [*collectives.collectives(flow.flow(syntax.parse(text)), mesh)]
    return found, text.count('custom_call_target="__cudnn$fmha'), program.memory_analysis().temp_size_in_bytes


def sent(found):
    """Returns the bytes of the arrays that a device gives to collectives, by kind."""
    totals = {}
    for one in found:
        totals[one.kind] = totals.get(one.kind, 0) + sum(part.taken.nbytes for part in one.parts)
    return totals


@pytest.mark.parametrize("order", ["zigzag", pytest.param("contiguous", marks=pytest.mark.long)])
def test_each_hop_of_a_ring_runs_beside_one_block(order):
    ways, length = 4, 1024
    found, kernels, _ = compiled("ring", order, ways, length, under="dots")
    assert kernels == 2 * ways, "a block runs again in the backward pass"
    assert {one.kind for one in found} == {"collective-permute"}
    *hops, _ = found  # the last brings gradients home, when no block is left
    assert len(hops) == 2 * ways - 1
    assert all(one.is_async and one.overlaps["attention"] == 1 for one in hops)
    block = 2 * length // ways * KV_HEADS * WIDTH  # elements of keys and values
    # 16 bits of each hop of both passes, and 32 of each of gradients
    assert sent(found) == {"collective-permute": block * (2 * 2 * (ways - 1) + 4 * ways)}


def test_ulysses_exchanges_seven_times_and_gather_three():
    ways, length = 4, 1024
    found, kernels, _ = compiled("ulysses", "contiguous", ways, length, under="dots")
    own = length // ways * WIDTH * 2  # bytes of a head of this device's tokens
    assert kernels == 2 and {one.kind for one in found} == {"all-to-all"} and len(found) == 7
    # The seventh sends the result again in the backward pass, which else would be kept twice.
    assert sent(found) == {"all-to-all": own * (4 * (HEADS + KV_HEADS) + HEADS)}
    found, kernels, _ = compiled("gather", "zigzag", ways, length, under="dots")
    assert kernels == 2 * ways and len(found) == 3
    assert sent(found) == {"all-gather": own * 4 * KV_HEADS, "reduce-scatter": own * 4 * KV_HEADS * ways}


def test_a_window_is_sent_once_a_chunk():
    ways, length, window = 4, 2048, 100
    found, kernels, _ = compiled("gather", "zigzag", ways, length, window)
    assert kernels == 2 and len(found) == 4
    halo = 2 * 2 * 128 * KV_HEADS * WIDTH  # bytes of the keys and values of a window, in tiles
    assert sent(found) == {"collective-permute": 2 * 2 * halo}


@pytest.mark.long
def test_at_131072_tokens_a_ring_needs_less_memory_than_gathered_keys_and_ulysses_least():
    ring, gather, ulysses = (
        compiled(way, order, 8, 131072)[2]
        for way, order in (("ring", "zigzag"), ("gather", "zigzag"), ("ulysses", "contiguous"))
    )
    assert ulysses < ring < gather / 1.5
