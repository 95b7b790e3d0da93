"""Grouped-query attention, as Llama and most of its relatives have it. This module holds its weights, and attends by a cache of keys and
values.

Shapes: B batch, T length, D embed, H query heads, K key and value heads, N head dim, F frequencies.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, layers, rope
from zerojax.models.llama import config as config_lib
from zerojax.models.llama.config import LlamaConfig
from zerojax.ops import attention_chunks, residuals, tiles
from zerojax.ops import tokens as tokens_lib

Keys = tuple[jax.Array, ...] | None


class Attention(nn.Module):
    """Causal grouped-query attention, with the rotation of a layer."""

    config: LlamaConfig
    window: int = 0
    rotation: rope.Rope | None = None
    chunk: int = 0
    keys: config_lib.Keys = "own"

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        lengths_BT: jax.Array | None = None,
        shared: Keys = None,
    ) -> tuple[jax.Array, Keys]:
        """Returns the result, and what is remembered, or without a past the keys and values that are given to others.

        `shared` are those of another layer, without a past; for the other arguments see `model.Layer`.
        """
        c, own = self.config, self.config.heads
        heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        if self.keys == "shared":
            heads = {"q": c.num_heads}
        elif own.values_are_keys and not self.window:
            del heads["v"]
        if own.is_fused:  # equal numbers of heads have a dim of their own, so that tensor parallelism shards each
            groups = 3 if c.num_heads == c.num_kv_heads else 1
            heads = {"qkv": sum(heads.values()) // groups}
        shape = (groups,) if own.is_fused else ()
        width = {"q": 2 * c.head_dim if own.is_gated else c.head_dim}
        of_x = [
            layers.Linear((*shape, n, width.get(name, c.head_dim)), use_bias=own.qkv_bias, name=name)
            for name, n in heads.items()
        ]
        # Their three gradients of x are added up in each tile.
        tile = 0 if self.is_initializing() else c.tile_tokens
        found = tiles.over_own_tiles(lambda x_BTD: [linear(x_BTD) for linear in of_x], x_BTD, tile)
        if own.is_fused:
            fused_BTXN = found[0].reshape(*x_BTD.shape[:2], -1, c.head_dim)
            found = jnp.split(fused_BTXN, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        q_BTHN, *of_keys = found
        k_BTKN, v_BTKN = self._shared(q_BTHN, past, shared) if self.keys == "shared" else (of_keys[0], of_keys[-1])
        if own.is_gated:
            q_BTHN, gate_BTHN = jnp.split(q_BTHN, 2, axis=-1)
        if own.norm in ("each", "joint"):
            dims = 2 if own.norm == "joint" else 1
            q_BTHN = layers.RMSNorm(c.norms.eps, c.norms.offset, dims, name="q_norm")(q_BTHN)
            if self.keys != "shared":
                k_BTKN = layers.RMSNorm(c.norms.eps, c.norms.offset, dims, name="k_norm")(k_BTKN)
        if own.has_value_norm and self.keys != "shared":
            v_BTKN = layers.rms_norm(v_BTKN, jnp.ones(c.head_dim, v_BTKN.dtype), c.norms.eps)
        # Distances alone count in rotary positions, so a text may begin at any position.
        positions_BT = positions_BT if past is None else past.step.positions_BT
        if self.rotation is not None:
            turn = self._turn(x_BTD.shape[1], positions_BT, past, lengths_BT)
            q_BTHN, k_BTKN = turn(q_BTHN), k_BTKN if self.keys == "shared" else turn(k_BTKN)
            if own.norm == "unit":
                ones_N = jnp.ones(c.head_dim, q_BTHN.dtype)
                q_BTHN, k_BTKN = (layers.rms_norm(each, ones_N, c.norms.eps) for each in (q_BTHN, k_BTKN))
        if own.growth is not None and not (own.grows_unrotated and self.rotation is not None):
            q_BTHN *= _growth(*own.growth, x_BTD.shape[1], positions_BT, first=own.grows_unrotated).astype(q_BTHN.dtype)
        if not own.norm:  # the norms' gradients read the matmuls' results
            q_BTHN, k_BTKN, v_BTKN = map(residuals.in_place, (q_BTHN, k_BTKN, v_BTKN))
        sinks_H = self.param("sinks", nn.initializers.normal(0.02), (c.num_heads,)) if own.has_sinks else None
        with jax.named_scope("attention"):
            given: dict[str, Any] = {
                "scale": own.scale or None,
                "window": self.window,
                "way": c.way,
                "cap": own.cap,
                "sinks_H": sinks_H,
            }
            keys: Keys = None
            arrays = q_BTHN, k_BTKN, v_BTKN
            if past is None and self.chunk:
                y_BTHN = attention_chunks.attend(
                    *arrays,
                    c.attention,
                    self.chunk,
                    mask_BT=mask_BT,
                    segments_BT=segments_BT,
                    scale=own.scale or None,
                    cap=own.cap,
                )
            elif past is None:
                given |= {"mask": mask_BT, "segments_BT": segments_BT}
                y_BTHN = tokens_lib.attend(*arrays, c.attention, is_causal=True, **given)
            else:
                y_BTHN, keys = decoding.attend(
                    *arrays, c.attention, past, chunk=self.chunk, adds=self.keys != "shared", **given
                )
            if past is None and self.keys == "given":
                keys = k_BTKN, v_BTKN
        if own.is_gated:
            y_BTHN *= nn.sigmoid(gate_BTHN)
        out = layers.Linear((c.embed_dim,), contracted=2, stddev=c.residual_stddev, use_bias=own.o_bias, name="o")
        return out(y_BTHN), keys

    @nn.nowrap
    def _shared(self, q_BTHN: jax.Array, past: decoding.Past | None, shared: Keys) -> tuple[jax.Array, ...]:
        """Returns the keys and values of another layer: the first slots of its cache are those of a first call."""
        if past is not None:
            return tuple(held[:, : q_BTHN.shape[1]] for held in past.keys)
        if shared is not None:
            return shared
        assert self.is_initializing(), "keys of another layer"
        return (jnp.zeros((*q_BTHN.shape[:2], self.config.num_kv_heads, self.config.head_dim), q_BTHN.dtype),) * 2

    @nn.nowrap
    def _turn(
        self, length: int, positions_BT: jax.Array | None, past: decoding.Past | None, lengths_BT: jax.Array | None
    ) -> Callable[[jax.Array], jax.Array]:
        """Returns (queries or keys) -> these, rotated. Texts have `lengths_BT` tokens, or end with this call's."""
        assert self.rotation is not None
        c, (theta, scaling) = self.config, self.rotation
        seen: Any = lengths_BT
        if scaling is not None and scaling.reads_length and seen is None:
            seen = length if c.way is None else tokens_lib.of_all(length)
            if past is not None and positions_BT is not None:
                held = jnp.where(past.step.is_text_BS, past.step.slot_positions_BS, 0)
                seen = 1 + jnp.minimum(jnp.max(positions_BT, axis=1), jnp.max(held, axis=1))
        dims = c.rotation.dims or c.head_dim
        frequency_F = rope.frequencies(dims, theta, scaling, seen)
        factor = 1.0 if scaling is None else scaling.attention_factor
        # Queries and keys have the same order, so scores are those of the order in files.
        ordered = (lambda x_BTXN: rope.halved(x_BTXN, dims)) if c.rotation.is_interleaved else lambda x_BTXN: x_BTXN
        return lambda x_BTXN: rope.rotate(ordered(x_BTXN), frequency_F, positions_BT, factor)


def _growth(slope: float, length: int, tokens: int, positions_BT: jax.Array | None, *, first: int) -> jax.Array:
    """Returns what multiplies the queries at positions of their texts (`Heads.growth`), which count from `first`: float32[B or 1, T, 1,
    1]."""
    if positions_BT is None:
        positions_BT = jnp.arange(tokens)[None]
    return (1 + slope * jnp.log(1.0 + (positions_BT + first) // length))[..., None, None]
