"""Llama, a decoder-only language model, and its relatives. This module knows no meshes or stages. It names what a backward pass may keep in
place of matmuls (`ops.residuals`).

It has RMSNorm, rotary positions, grouped-query attention and SwiGLU. Relatives differ in fields of the config, each of which is off by
default: biases, norms and where they are, sliding windows, other positions, multipliers, bounded scores and logits. Layers are a plain
unrolled list of named modules, and the train step decides where weights are gathered. Weights have the compute dtype. Norms and softmax
compute in float32.

Shapes: B batch, T length, D embed, H query heads, K key and value heads, N head dim, F mlp, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.models import decoding, experts, family, layers
from zerojax.models.llama import mla, rope, text_lengths
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention, residuals, softcap, tiles
from zerojax.ops import tokens as tokens_lib
from zerojax.tree import PyTree


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The model's shape (Llama 3, arXiv:2407.21783, table 3).

    Attributes:
      rope_scaling: stretches the rotary positions; None: as they are.
      window_rope: the rotation in layers with a window; None: that of the others.
      rotary_dim: the dims of a head that are rotated; 0: all.
      rotated: for each layer, whether its queries and keys are rotated; () for all layers True. Repeated as `windows` are.
      has_positions: each of the `max_seq_len` positions has an embedding, and nothing is rotated.
      qkv_bias, o_bias, mlp_bias: whether these projections have biases.
      qk_norm: whether queries and keys are normalised in each head before they are rotated.
      qk_norm_joint: whether that norm is over all heads at once.
      norm: "rms", or "layer" (with biases).
      norm_offset: is added to the scale of each RMSNorm.
      norm_places: each residual branch is normalised "before" it, "after" it, or both.
      is_fused: queries, keys and values are one projection, and gate and up are one.
      is_gated: the MLP is down(activation(gate) * up), and otherwise down(activation(up)).
      embed_scale, residual_scale: multiply the embeddings, and what each residual branch adds.
      score_scale: multiplies the scores of attention; 0: 1 / sqrt(head_dim).
      logits_scale: multiplies the logits.
      score_cap, logits_cap: bound scores and logits by a softcap; 0 for no bound.
      way: how devices attend that each hold a part of every sequence; None: a device has all tokens.
      windows: for each layer, the number of tokens that a query sees, with its own (0: all before it); () for all layers 0. Fewer
        than there are layers are repeated.
      tile_tokens: tokens for which each layer's MLP, with its norm and its residual, runs at a time (`ops.tiles`); 0: all.
      num_experts: of each layer's MLP, of which a token takes `experts_per_token`; 0: the MLP is no mixture.
      expert_dim: the width of an expert.
      shared_dim: the width of an expert that all tokens take, by a weight of its own; 0 for none.
      is_normalised: whether the weights of a token's experts have a sum of 1.
      dense_layers: the numbers of layers whose MLP is no mixture all the same.
      has_sinks: whether each head has a sink (`ops.sinks`).
      latent: the shape of latent attention (`mla`); None: attention is grouped. `head_dim` is then that of queries and keys.
      router_score, router_groups, router_scale: see `ops.experts.route`: the score, the number of groups and those of a token, and what
        multiplies weights.
      has_choice_bias: whether experts are chosen by scores with a bias, a weight without a gradient.
      counts_choices: whether its gradient is the load of each expert instead (`optim.balance`).
      is_shared_gated: whether the expert that all tokens take has a weight of its own.
      clamp: (limit, slope) of the activation of gpt-oss's experts (`experts.clamped_gate`), which have biases, as their router has; None:
        they are down(activation(gate) * up) without biases.
      model_type: the name of the row in Hugging Face's config.json.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_seq_len: int = 8192
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention: attention_lib.Kernel = "xla"
    rope_scaling: rope.Scaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    activation: str = "silu"
    tile_tokens: int = 0
    way: context_attention.Way | None = None
    model_type: str = "llama"
    window_rope: rope.Rope | None = None
    rotary_dim: int = 0
    rotated: tuple[bool, ...] = ()
    has_positions: bool = False
    qk_norm_joint: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_places: Literal["before", "after", "both"] = "before"
    is_fused: bool = False
    is_gated: bool = True
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    score_scale: float = 0.0
    logits_scale: float = 1.0
    score_cap: float = 0.0
    logits_cap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    shared_dim: int = 0
    is_normalised: bool = True
    dense_layers: tuple[int, ...] = ()
    has_sinks: bool = False
    latent: mla.Latent | None = None
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_groups: tuple[int, int] = (1, 1)
    router_scale: float = 1.0
    has_choice_bias: bool = False
    counts_choices: bool = False
    is_shared_gated: bool = True
    clamp: tuple[float, float] | None = None

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def window_of(self, layer: int) -> int:
        """Returns the window of a layer."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def rope_of(self, layer: int) -> rope.Rope | None:
        """Returns the rotation of a layer's queries and keys; None if they are not rotated."""
        if self.has_positions or (self.rotated and not self.rotated[layer % len(self.rotated)]):
            return None
        if self.window_rope is not None and self.window_of(layer):
            return self.window_rope
        return rope.Rope(self.rope_theta, self.rope_scaling)

    @property
    def by_length(self) -> list[rope.Scaling]:
        """Returns what stretches positions by the length of a text."""
        found = [self.rope_of(layer) for layer in range(self.num_layers)]
        return [
            one.scaling for one in found if one is not None and one.scaling is not None and one.scaling.reads_length
        ]

    def kind_of(self, layer: int) -> tuple[Any, ...]:
        """Returns what two layers have in common that take equal time."""
        return self.has_experts(layer), self.window_of(layer), self.rope_of(layer)


Keys = tuple[jax.Array, ...] | None


class Attention(nn.Module):
    """Causal grouped-query attention, with the rotation of a layer."""

    config: LlamaConfig
    window: int = 0
    rotation: rope.Rope | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        lengths_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Keys]:
        c = self.config
        heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        if c.is_fused:  # equal numbers of heads have a dim of their own, so that tensor parallelism shards each
            groups = 3 if c.num_heads == c.num_kv_heads else 1
            heads = {"qkv": sum(heads.values()) // groups}
        shape = (groups,) if c.is_fused else ()
        of_x = [layers.Linear((*shape, n, c.head_dim), use_bias=c.qkv_bias, name=name) for name, n in heads.items()]
        # Their three gradients of x are added up in each tile. Where the compiler shards, x is gathered here.
        if c.tile_tokens and not self.is_initializing() and not mesh_lib.rest():
            found = tiles.over_tiles(lambda x_BTD: [linear(x_BTD) for linear in of_x], x_BTD, c.tile_tokens)
        else:
            found = [linear(x_BTD) for linear in of_x]
        if c.is_fused:
            fused_BTXN = found[0].reshape(*x_BTD.shape[:2], -1, c.head_dim)
            found = jnp.split(fused_BTXN, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        q_BTHN, k_BTKN, v_BTKN = found
        if c.qk_norm:
            dims = 2 if c.qk_norm_joint else 1
            q_BTHN = layers.RMSNorm(c.norm_eps, c.norm_offset, dims, name="q_norm")(q_BTHN)
            k_BTKN = layers.RMSNorm(c.norm_eps, c.norm_offset, dims, name="k_norm")(k_BTKN)
        # Distances alone count in rotary positions, so a text may begin at any position.
        positions_BT = positions_BT if past is None else past.step.positions_BT
        if self.rotation is not None:
            turn = self._turn(x_BTD.shape[1], positions_BT, past, lengths_BT)
            q_BTHN, k_BTKN = turn(q_BTHN), turn(k_BTKN)
        if not c.qk_norm:  # the norms' gradients read the matmuls' results
            q_BTHN, k_BTKN, v_BTKN = map(residuals.in_place, (q_BTHN, k_BTKN, v_BTKN))
        sinks_H = self.param("sinks", nn.initializers.normal(0.02), (c.num_heads,)) if c.has_sinks else None
        with jax.named_scope("attention"):
            given: dict[str, Any] = {
                "scale": c.score_scale or None,
                "window": self.window,
                "way": c.way,
                "cap": c.score_cap,
                "sinks_H": sinks_H,
            }
            keys: Keys = None
            arrays = q_BTHN, k_BTKN, v_BTKN
            if past is None:
                given |= {"mask": mask_BT, "segments_BT": segments_BT}
                y_BTHN = tokens_lib.attend(*arrays, c.attention, is_causal=True, **given)
            else:
                y_BTHN, keys = decoding.attend(*arrays, c.attention, past, **given)
        out = layers.Linear((c.embed_dim,), contracted=2, stddev=_residual_stddev(c), use_bias=c.o_bias, name="o")
        return out(y_BTHN), keys

    @nn.nowrap
    def _turn(
        self,
        length: int,
        positions_BT: jax.Array | None,
        past: decoding.Past | None,
        lengths_BT: jax.Array | None,
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
        frequency_F = rope.frequencies(c.rotary_dim or c.head_dim, theta, scaling, seen)
        factor = 1.0 if scaling is None else scaling.attention_factor
        return lambda x_BTXN: rope.rotate(x_BTXN, frequency_F, positions_BT, factor)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202), with the config's activation; or down(activation(up(x)))."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        down = layers.Linear((c.embed_dim,), stddev=_residual_stddev(c), use_bias=c.mlp_bias, name="down")
        activation = layers.ACTIVATIONS[c.activation]
        if not c.is_gated:
            return down(activation(layers.Linear((c.mlp_dim,), use_bias=c.mlp_bias, name="up")(x_BTD)))
        if c.is_fused:
            both_BTXF = layers.Linear((2, c.mlp_dim), use_bias=c.mlp_bias, name="gate_up")(x_BTD)
            return down(activation(both_BTXF[:, :, 0]) * both_BTXF[:, :, 1])
        gate_BTF = layers.Linear((c.mlp_dim,), use_bias=c.mlp_bias, name="gate")(x_BTD)
        up_BTF = layers.Linear((c.mlp_dim,), use_bias=c.mlp_bias, name="up")(x_BTD)
        return down(activation(gate_BTF) * up_BTF)


class Mixture(nn.Module):
    """A mixture of experts, with the expert that all tokens take if there is one: its weight is sigmoid(shared_gate(x))."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        groups, top_groups = c.router_groups
        router = (
            ("normalised", c.is_normalised),
            ("score", c.router_score),
            ("groups", groups),
            ("top_groups", top_groups),
            ("scale", c.router_scale),
        )
        stddevs = (0.02, 0.02, _residual_stddev(c))
        y_BTD = experts.Experts(
            c.num_experts,
            c.experts_per_token,
            c.expert_dim,
            c.activation,
            router,
            has_fixed_bias=c.has_choice_bias,
            counts=c.counts_choices,
            has_router_bias=c.clamp is not None,
            clamp=c.clamp,
            stddevs=stddevs,
            name="experts",
        )(x_BTD)
        if not c.shared_dim:
            return y_BTD
        shared_BTD = MLP(dataclasses.replace(c, mlp_dim=c.shared_dim), name="shared")(x_BTD)
        if not c.is_shared_gated:
            return y_BTD + shared_BTD
        return y_BTD + nn.sigmoid(layers.Linear((1,), name="shared_gate")(x_BTD)) * shared_BTD


class Layer(nn.Module):
    """One residual attention and one residual MLP."""

    calls_are_alike = True

    config: LlamaConfig
    window: int = 0
    rotation: rope.Rope | None = None
    has_experts: bool = False

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        lengths_BT: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, Keys]:
        """Returns float[B, T, D] and, if there is a past, the layer's keys and values after these tokens.

        Args:
          x_BTD: the tokens' states.
          mask_BT: False for tokens that no other sees.
          past: the tokens before these.
          segments_BT: the number of the text that a token belongs to, where a row holds several: it sees no other text. Without a mask.
          positions_BT: of the tokens in their rows; None: 0, 1, ...
          lengths_BT: int32[B, T] or [B, 1], the tokens of the text that a token belongs to, where rotations depend on it; None: of the
            row, or with a past of the text up to these tokens.
        """
        c = self.config
        before, after = self._norms("attention")
        lengths = {} if lengths_BT is None else {"lengths_BT": lengths_BT}
        y_BTD, keys = self._attention()(before(x_BTD), mask_BT, past, segments_BT, positions_BT, **lengths)
        x_BTD = residuals.in_place(x_BTD + after(y_BTD))
        mlp, (norm, mlp_after) = (Mixture if self.has_experts else MLP)(c, name="mlp"), self._norms("mlp")
        tile = 0 if self.is_initializing() else c.tile_tokens
        branch = lambda x_BTD: x_BTD + mlp_after(mlp(norm(x_BTD)))  # noqa: E731
        x_BTD = tiles.over_tiles(branch, x_BTD, tile) if tile else branch(x_BTD)
        return x_BTD if past is None else (x_BTD, keys)

    @nn.nowrap
    def _attention(self) -> nn.Module:
        c = self.config
        if c.latent is None:
            return Attention(c, self.window, self.rotation, name="attention")
        assert self.rotation is not None and not self.window, "latent attention is rotated and has no window"
        scale, stddev = c.score_scale or c.head_dim**-0.5, _residual_stddev(c)
        return mla.LatentAttention(
            c.latent,
            c.embed_dim,
            c.num_heads,
            c.attention,
            self.rotation,
            scale,
            c.o_bias,
            stddev,
            c.way,
            name="attention",
        )

    @nn.nowrap
    def _norms(self, branch: str) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
        """Returns what a branch reads of the residual stream, and what is added to it of what the branch returns."""
        c = self.config
        same = lambda x_BTD: x_BTD  # noqa: E731
        before, after = (
            make_norm(c, f"{branch}{name}") if c.norm_places in (place, "both") else same
            for place, name in (("before", "_norm"), ("after", "_post_norm"))
        )
        if c.residual_scale == 1:
            return before, after
        return before, lambda y_BTD: after(y_BTD) * jnp.asarray(c.residual_scale, y_BTD.dtype)


class Llama(nn.Module):
    """The full model. Its weights are under embed, layer_0, layer_1, ..., norm and head."""

    config: LlamaConfig

    def setup(self) -> None:
        layers.own(self, parts(self.config))

    @nn.nowrap
    def hidden(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        lengths_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the normalised hidden states, the head's input: float[B, T, D]. For the other arguments see `Layer`."""
        given = {
            "mask_BT": mask_BT,
            "segments_BT": segments_BT,
            "positions_BT": positions_BT,
            "lengths_BT": lengths_BT,
        }
        seen = {name: array for name, array in given.items() if array is not None}
        x_BTD = self._embedded(tokens_BT, _positions_in_texts(self.config, segments_BT, positions_BT))
        for layer in self.layer:
            x_BTD = layer(x_BTD, **seen)
        return self.norm(x_BTD)

    def __call__(self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Returns logits: float32[B, T, V] from tokens int32[B, T]. `mask_BT` is False for padding."""
        lengths_B1 = None
        if mask_BT is not None and self._reads_lengths(tokens_BT.shape[1]):
            lengths_B1 = jnp.sum(mask_BT, axis=1, keepdims=True)
        return self._logits(self.hidden(tokens_BT, mask_BT, lengths_BT=lengths_B1))

    def start(self, tokens_BT: jax.Array, lengths_B: jax.Array, slots: int) -> tuple[jax.Array, Any]:
        """Returns the logits after each row's first `lengths_B` tokens, float32[B, V], and every layer's keys and values."""
        c, (batch, length) = self.config, tokens_BT.shape
        step = decoding.first_step(batch, length, slots)
        # Padding is not part of a text's length
        if c.by_length:
            step = step._replace(positions_BT=jnp.minimum(step.positions_BT, lengths_B[:, None] - 1))
        x_BTD = self._embedded(tokens_BT, step.positions_BT)
        empty: Any = decoding.empty(batch, slots, c.num_kv_heads, c.head_dim, x_BTD.dtype)
        if c.latent is not None:
            empty = c.latent.empty(batch, slots, x_BTD.dtype)
        x_BTD, caches = self._through(x_BTD, [empty] * c.num_layers, step)
        return self._logits(self.norm(layers.at_last(x_BTD, lengths_B)))[:, 0], caches

    def extend(self, caches: PyTree, step: decoding.Step, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the logits after one more token a row, int32[B], or several, int32[B, T]: float32[B, V], and every layer's keys and
        values."""
        x_BTD = self._embedded(tokens.reshape(len(tokens), -1), step.positions_BT)
        x_BTD, caches = self._through(x_BTD, caches, step)
        return self._logits(self.norm(step.last(x_BTD)))[:, 0], caches

    @nn.nowrap
    def _through(self, x_BTD: jax.Array, caches: PyTree, step: decoding.Step) -> tuple[jax.Array, list]:
        after = []
        for layer, keys in zip(self.layer, caches):
            x_BTD, keys = layer(x_BTD, None, decoding.Past(keys, step))
            after.append(keys)
        return x_BTD, after

    @nn.nowrap
    def _embedded(self, tokens_BT: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        """Returns the first layer's input, float[B, T, D]. Positions: by default 0, 1, ..."""
        c, x_BTD = self.config, self.embed(tokens_BT)
        if c.embed_scale != 1:
            x_BTD *= jnp.asarray(c.embed_scale, x_BTD.dtype)
        if not c.has_positions:
            return x_BTD
        return x_BTD + self.positions(jnp.arange(tokens_BT.shape[1])[None] if positions_BT is None else positions_BT)

    @nn.nowrap
    def _scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the head's input of which its output are the scaled logits."""
        scale = self.config.logits_scale
        return x_BTD if scale == 1 else x_BTD * jnp.asarray(scale, x_BTD.dtype)

    @nn.nowrap
    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        return softcap.softcap(layers.next_logits(self._head(), self._scaled(x_BTD)), self.config.logits_cap)

    @nn.nowrap
    def _reads_lengths(self, length: int) -> bool:
        """Returns whether texts in rows, of which this device has `length` tokens, may be rotated differently by their lengths."""
        c = self.config
        length = length if c.way is None else tokens_lib.of_all(length)
        return any(length > one.original_length for one in c.by_length)

    @nn.nowrap
    def _head(self) -> nn.Module:
        return self.embed if self.config.tie_embeddings else self.head

    def loss(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        labeled: jax.Array | None = None,
        labels_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        by_token: bool | str = False,
    ) -> Any:
        """Returns the mean next-token loss: float32[] from tokens int32[B, T + 1], or int32[B, T] with `labels_BT`.

        With `by_token` it returns the loss of each token, float32[B, T]; see `layers.next_loss`.

        Rows may be padded at their ends. `segments` separates the texts of a row (see `Layer`). Labels with `labeled` 0 are not learned.
        Both have the shape of `tokens`.
        """
        tokens_BT, labels_BT, ignored = layers.read_and_labels(tokens, labeled, labels_BT)
        segments_BT = None if segments is None else segments[:, : tokens_BT.shape[1]]
        c, lengths_BT = self.config, None
        if ignored is not None and self._reads_lengths(tokens_BT.shape[1]):
            lengths_BT = text_lengths.of_rows(labels_BT != ignored, segments_BT, positions_BT, c.way)
        x_BTD = self.hidden(tokens_BT, None, segments_BT, positions_BT, lengths_BT)
        cap = c.logits_cap
        return layers.next_loss(self._head(), self._scaled(x_BTD), labels_BT, ignored, cap=cap, by_token=by_token)


def loss(
    config: LlamaConfig,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    by_token: bool | str = False,
) -> Any:
    """Returns the mean loss of the next tokens, or the loss of each. There is no dropout, for which `key` would be."""
    arrays = (batch["tokens"], *map(batch.get, ("segments", "labeled", "labels", "positions")), by_token)
    return Llama(config).apply({"params": params}, *arrays, method="loss")


def logits(config: LlamaConfig, params: PyTree, inputs: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Returns the logits after each token, float32[B, T, V]; `inputs` may have a mask."""
    return cast(jax.Array, Llama(config).apply({"params": params}, tokens, inputs.get("mask")))


def start(
    config: LlamaConfig,
    params: PyTree,
    inputs: Mapping[str, jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    slots: int,
) -> PyTree:
    """Returns `Llama.start`."""
    assert not inputs, "a decoder's prompt has no other arrays than its tokens"
    return Llama(config).apply({"params": params}, tokens, lengths, slots, method="start")


def extend(config: LlamaConfig, params: PyTree, caches: PyTree, step: decoding.Step, tokens: jax.Array) -> PyTree:
    """Returns `Llama.extend`."""
    return Llama(config).apply({"params": params}, caches, step, tokens, method="extend")


def make_norm(config: LlamaConfig, name: str | None = None) -> nn.Module:
    """Returns a norm of the residual stream."""
    return layers.norm(config.norm, config.norm_eps, config.norm_offset, name)


def _positions_in_texts(
    config: LlamaConfig, segments_BT: jax.Array | None, positions_BT: jax.Array | None
) -> jax.Array | None:
    """Returns the positions of tokens in their texts, where rows hold several and positions have embeddings."""
    if not config.has_positions or segments_BT is None:
        return positions_BT
    if positions_BT is not None:
        raise UserError(
            "pack: texts whose positions have embeddings are in one row, which is sharded over `context`, so that a device does not know "
            "where they begin; set `pack=False` or `context=1`"
        )
    index_T = jnp.arange(segments_BT.shape[1])
    is_first = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    return index_T - jax.lax.cummax(jnp.where(is_first, index_T, 0), axis=1)


def parts(config: LlamaConfig) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),)
    states = (jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32),)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=layers.normal(0.02))
    found: family.Parts = {"embed": (embed, tokens)}
    if c.has_positions:
        found["positions"] = (layers.Embed(c.max_seq_len, c.embed_dim, embedding_init=embed.embedding_init), tokens)
    found |= {
        f"layer_{i}": (Layer(c, c.window_of(i), c.rope_of(i), c.has_experts(i)), states) for i in range(c.num_layers)
    }
    found["norm"] = (make_norm(c), states)
    return found if c.tie_embeddings else found | {"head": (layers.Head(c.embed_dim, c.vocab_size), states)}


def count_params(config: LlamaConfig) -> int:
    """Returns the number of weights."""
    return family.count_params(parts, config)


def flops_per_token(config: LlamaConfig, seq_len: int, per_weight: float = 6.0) -> float:
    """Returns the floating-point operations of training on one token: 6 per weight outside tables of embeddings (4 if it is frozen), and
    12 * heads * head_dim for each token that it sees in a layer, without recomputation: the lower half of seq_len, or of a window."""
    c = config
    used = count_params(c) - (0 if c.tie_embeddings else c.vocab_size * c.embed_dim)
    used -= c.max_seq_len * c.embed_dim if c.has_positions else 0
    skipped = sum(map(c.has_experts, range(c.num_layers))) * (c.num_experts - c.experts_per_token)
    biases = 0 if c.clamp is None else 2 * c.expert_dim + c.embed_dim
    used -= skipped * (3 * c.embed_dim * c.expert_dim + biases)  # a token multiplies the weights of its experts alone
    spans = [min(c.window_of(layer) or seq_len, seq_len) for layer in range(c.num_layers)]
    seen = sum(2 * span - span**2 / seq_len for span in spans)  # twice the mean over a row's tokens
    width = c.head_dim if c.latent is None else (c.head_dim + c.latent.value_dim) / 2
    return per_weight * used + 6.0 * c.num_heads * width * seen


def _residual_stddev(config: LlamaConfig) -> float:
    # Each layer adds two terms to the residual stream. This keeps the final variance near that of one term (GPT-2).
    return 0.02 / (2 * config.num_layers) ** 0.5
