"""What a model calls whose tokens may be sharded over devices. This module knows the mesh axis; `context_attention` has the exchange.

Shapes: B batch, T queries and S keys of this device, H query heads, K key and value heads, N head dim.
"""

import jax

from zerojax import mesh as mesh_lib
from zerojax import specs
from zerojax.ops import attention, context_attention

AXIS = specs.entry(mesh_lib.TOKENS)  # over which tokens are sharded, as collectives name it


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    kernel: attention.Kernel,
    *,
    way: context_attention.Way | None,
    is_causal: bool,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    scale: float | None = None,
    window: int = 0,
) -> jax.Array:
    """Returns attention of this device's queries over all keys of their rows: float[B, T, H, N].

    Args:
      q_BTHN, k_BSKN, v_BSKN, kernel, is_causal, scale, window: see `attention.attend`.
      way: how devices attend that each hold a part of every row, in the order of its tokens; None: a device has all tokens.
      bias: float[H, T, L] or float[B, H, T, L], added to the scores; L keys of all devices.
      mask: bool[B, S], False for this device's keys that no query sees.
      segments_BT: int32[B, T], the number of the text that a token belongs to: it sees no other. Without a mask.
    """
    if way is not None:
        return context_attention.attend(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            kernel,
            axis=AXIS,
            way=way,
            order=way.order,
            is_causal=is_causal,
            window=window,
            segments_BT=segments_BT,
            mask_BT=mask,
            scale=scale,
            bias=bias,
        )
    seen = mask if segments_BT is None else segments_BT[:, :, None] == segments_BT[:, None, :]
    return attention.attend(
        q_BTHN, k_BSKN, v_BSKN, kernel, is_causal=is_causal, bias=bias, mask=seen, scale=scale, window=window
    )


def of_all(local: int) -> int:
    """Returns the number of tokens of all devices where each has `local` of them, inside `jax.shard_map`."""
    return local * jax.lax.axis_size(AXIS)
