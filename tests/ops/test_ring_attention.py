"""Checks what devices exchange for attention over sharded tokens, in programs for absent GPUs. This module tests ops.ring_attention.

It compares the other ways with it. Values and gradients of all are in test_context_attention.
"""

import functools

import compile_only
import context_costs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.hlo import collectives, flow, syntax
from zerojax.ops import context_attention
from zerojax.zero.blocks import remat

HEADS, KV_HEADS, WIDTH = 8, 4, 64


@functools.cache
def compiled(way, order, ways, length, window=0, under="", model=1):
    """Returns the collectives of a forward and backward pass in bfloat16 with cuDNN, the number of its kernels, and its temporary bytes."""
    gpus = np.asarray(compile_only.gpus(topology=f"1x{ways * model}")).reshape(ways, model)
    mesh, tokens = Mesh(gpus, ("context", "model")), P(None, "context")

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

    run = jax.shard_map(
        both, mesh=mesh, in_specs=tokens, out_specs=tokens, axis_names=mesh_lib.manual(mesh), check_vma=False
    )
    sharding = NamedSharding(mesh, P(*tokens, "model"))
    like = [
        jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.bfloat16, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    with compile_only.optimized():
        program = jax.jit(run).lower(*like).compile(compiler_options=compile_only.FAST)
    text = program.as_text()
    found = [*collectives.collectives(flow.flow(syntax.parse(text)), mesh)]
    return found, text.count('custom_call_target="__cudnn$fmha'), program.memory_analysis().temp_size_in_bytes


def sent(found, ways):
    """Returns the bytes that a device sends to others."""
    shares = {"collective-permute": 1, "all-gather": ways - 1}
    return sum(part.taken.nbytes * shares.get(one.kind, (ways - 1) / ways) for one in found for part in one.parts)


def cost(way, order, ways, length, **kwargs):
    """Returns the bytes that both passes should send."""
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH, "is_causal": True} | kwargs
    found = context_costs.cost(way, order, ways=ways, length=length, **shape)
    return found.forward + found.backward


LONG = [pytest.param(*case, marks=pytest.mark.long) for case in (("contiguous", "dots"), ("zigzag", "attention"))]


@pytest.mark.parametrize("order, policy", [("zigzag", "dots"), *LONG])
def test_each_hop_of_a_ring_runs_beside_one_block(order, policy):
    ways, length = 4, 1024
    found, kernels, _ = compiled("ring", order, ways, length, under=policy)
    assert kernels == 2 * ways, "a block runs again in the backward pass"
    assert {one.kind for one in found} == {"collective-permute"}
    *hops, _ = found  # the last brings gradients home, when no block is left
    assert len(hops) == 2 * ways - 1
    assert all(one.is_async and one.overlaps["attention"] == 1 for one in hops)
    assert sent(found, ways) == cost("ring", order, ways, length)


def test_ulysses_exchanges_seven_times_and_gather_three():
    ways, length = 4, 1024
    found, kernels, _ = compiled("ulysses", "contiguous", ways, length, under="dots")
    assert kernels == 2 and {one.kind for one in found} == {"all-to-all"} and len(found) == 7
    # The seventh sends the result again in the backward pass, which else would be kept twice.
    again = length // ways * HEADS * WIDTH * 2 * (ways - 1) // ways
    assert sent(found, ways) == cost("ulysses", "contiguous", ways, length) + again
    found, kernels, _ = compiled("gather", "zigzag", ways, length, under="dots")
    assert kernels == 2 * ways and [one.kind for one in found] == ["all-gather", "all-gather", "reduce-scatter"]
    assert sent(found, ways) == cost("gather", "zigzag", ways, length)


def test_a_window_is_sent_once_a_chunk():
    ways, length, window = 4, 2048, 100
    found, kernels, _ = compiled("gather", "zigzag", ways, length, window)
    assert kernels == 2 and len(found) == 4 and {one.kind for one in found} == {"collective-permute"}
    assert sent(found, ways) == cost("halo", "zigzag", ways, length, window=window)


@pytest.mark.parametrize(
    "way, order", [("ring", "zigzag"), pytest.param("ulysses", "contiguous", marks=pytest.mark.long)]
)
def test_heads_stay_sharded_over_model(way, order):
    found, _, _ = compiled(way, order, 2, 512, model=2)
    assert {one.axes for one in found} == {("context",)}
    assert sent(found, 2) == cost(way, order, 2, 512, heads=HEADS // 2, kv_heads=KV_HEADS // 2)


@pytest.mark.long
def test_at_131072_tokens_a_ring_needs_less_memory_than_gathered_keys_and_ulysses_least():
    ring, gather, ulysses = (
        compiled(way, order, 8, 131072)[2]
        for way, order in (("ring", "zigzag"), ("gather", "zigzag"), ("ulysses", "contiguous"))
    )
    assert ulysses < ring < gather / 1.5
