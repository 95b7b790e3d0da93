"""What attention over sharded tokens sends and computes. This module counts it for each way of `ops.context_attention`."""

import dataclasses
import math

from zerojax.ops import attention_blocks, context_attention, ring_attention, token_order


@dataclasses.dataclass(frozen=True)
class Cost:
    """What attention of one layer costs a device.

    Attributes:
      forward, backward: bytes that it sends in a pass. Recomputation in the backward pass is not among them.
      pairs: of a query and a key, over all heads, whose score is computed in the forward pass: 4 x head dim FLOPs each.
    """

    forward: int
    backward: int
    pairs: int


def cost(
    name: str,
    order: token_order.Order,
    *,
    heads: int,
    kv_heads: int,
    ways: int,
    length: int,
    is_causal: bool,
    window: int = 0,
    head_dim: int = 128,
    batch: int = 1,
    itemsize: int = 2,
) -> Cost:
    """Returns what a way costs.

    Args:
      name: one of `context_attention.WAYS`, or "halo".
      order: of the tokens.
      heads, kv_heads: of a device along the axis over which heads are sharded.
      ways, length, is_causal, window, head_dim, batch: as of `context_attention.choose`.
      itemsize: bytes of an element of keys and values; their gradients are summed over devices in float32.
    """
    local, others = length // ways, ways - 1
    keys = 2 * batch * local * kv_heads * head_dim  # elements of keys and values
    if name == "ulysses":
        both = keys * (ways // math.gcd(kv_heads, ways)) + 2 * batch * local * heads * head_dim
        sent = both * itemsize * others // ways
        seen = length * window if window else length * length // (2 if is_causal else 1)
        return Cost(sent, sent, batch * seen * heads // ways)
    if name == "halo":
        chunks = token_order.CHUNKS[order]
        before = context_attention._before(window, local // chunks)
        sent = keys // local * chunks * before * itemsize
        return Cost(sent, sent, batch * (local + chunks * before) * window * heads)
    blocks = ring_attention.Ring(
        "", ways, order, attention_blocks.BlockForm("xla", 1.0, is_causal, window), name == "gather"
    ).blocks(local)
    halves = 2 * ways if not is_causal else ways if order == "zigzag" else 2 * blocks - 1
    pairs = batch * local * local * heads * halves // 2
    if name == "gather":
        return Cost(keys * itemsize * others, keys * (itemsize + 4) * others, pairs)
    return Cost(keys * itemsize * (blocks - 1), keys * (itemsize * (blocks - 1) + 4 * blocks), pairs)
