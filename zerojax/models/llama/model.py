"""Llama, a decoder-only language model, and its relatives. This module knows no meshes or stages. It names what a backward pass may keep in
place of matmuls (`ops.residuals`).

It has RMSNorm, rotary positions, grouped-query attention and SwiGLU. Relatives differ in parts of the config, whose defaults are
Llama's: biases, norms and where they are, sliding windows, other positions, multipliers, bounded scores and logits. Layers are a plain
unrolled list of named modules, and the train step decides where weights are gathered. Weights have the compute dtype. Norms and softmax
compute in float32.

Shapes: B batch, T length, D embed, H query heads, K key and value heads, N head dim, F mlp, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.errors import UserError
from zerojax.models import decoding, family, layers, rope
from zerojax.models.llama import altup, attention, layer_inputs, mla, mlp, text_lengths
from zerojax.models.llama.config import Branches, Keys, LlamaConfig
from zerojax.ops import residuals, softcap, tiles
from zerojax.ops import tokens as tokens_lib
from zerojax.tree import PyTree


class Layer(nn.Module):
    """One residual attention and one residual MLP."""

    calls_are_alike = True

    config: LlamaConfig
    window: int = 0
    rotation: rope.Rope | None = None
    has_experts: bool = False
    is_recurrent: bool = False
    branches: Branches = "both"
    chunk: int = 0
    keys: Keys = "own"

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        lengths_BT: jax.Array | None = None,
        input_BTP: jax.Array | None = None,
        shared: attention.Keys = None,
        chosen_BTK: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, attention.Keys]:
        """Returns float[B, T, D], or [B, T, S, D] of several streams, and, if there is a past, the layer's keys and values after these
        tokens, or without one those of these tokens if it gives them to others.

        Args:
          x_BTD: the tokens' states.
          mask_BT: False for tokens that no other sees.
          past: the tokens before these.
          segments_BT: the number of the text that a token belongs to, where a row holds several: it sees no other text. Without a mask.
          positions_BT: of the tokens in their rows; None: 0, 1, ...
          lengths_BT: int32[B, T] or [B, 1], the tokens of the text that a token belongs to, where rotations depend on it; None: of the
            row, or with a past of the text up to these tokens.
          input_BTP: of this layer (`layer_inputs`).
          shared: keys and values of another layer, where this one has none and there is no past.
          chosen_BTK: the experts of tokens, where they are chosen elsewhere.
        """
        c = self.config
        keys: attention.Keys = ()
        remembered: decoding.Past | None = None
        if past is not None and self.has_experts and c.mixture is not None and c.mixture.remembers_choices:
            past, remembered = decoding.Past(past.keys[:-1], past.step), decoding.Past(past.keys[-1:], past.step)
        if c.altup is not None:
            streams = altup.ResidualStreams(c.altup, c.embed_dim, c.norms.eps, name="altup")
            if x_BTD.ndim == 3:  # where it is initialised
                x_BTD = jnp.stack([x_BTD] * c.altup.streams, axis=2)
            predicted_BTSD = streams.predict(x_BTD)
            x_BTD = predicted_BTSD[:, :, c.altup.active]
        second = (mlp.Mixture if self.has_experts else mlp.MLP)(c, name="mlp") if self.branches != "alone" else None
        tile = 0 if self.is_initializing() else c.tile_tokens
        if self.branches != "mlp":
            before, after = self._norms("attention")
            given: dict[str, Any] = {"lengths_BT": lengths_BT, "shared": shared}
            given = {name: own for name, own in given.items() if own is not None and not self.is_recurrent}
            read_BTD = before(x_BTD)
            y_BTD, keys = self._attention()(read_BTD, mask_BT, past, segments_BT, positions_BT, **given)
            x_BTD = residuals.in_place(x_BTD + after(y_BTD))
            if c.altup is not None:
                beside_BTD = altup.LowRankResidual(c.altup.rank, c.norms.eps, name="laurel")(read_BTD)
                x_BTD = (x_BTD + beside_BTD) * jnp.asarray(2**-0.5, x_BTD.dtype)
            if c.norms.places == "shared":
                assert second is not None
                x_BTD += after(tiles.over_tiles(second, read_BTD, tile))
                return x_BTD if past is None else (x_BTD, keys)
        if second is not None:
            norm, mlp_after = self._norms("mlp")
            if self.has_experts and c.mixture is not None and c.mixture.is_beside_mlp:
                norm = lambda x_BTD: x_BTD  # noqa: E731  (the mixture has the norms of what it reads)
            branch = lambda x_BTD: x_BTD + mlp_after(second(norm(x_BTD)))  # noqa: E731
            if remembered is not None:
                mixture: Any = second
                y_BTD, new_BTK = mixture(norm(x_BTD), tells=True)
                x_BTD, keys = x_BTD + mlp_after(y_BTD), (*(keys or ()), *remembered.add(new_BTK))
            elif chosen_BTK is not None:
                mixture = second
                x_BTD += mlp_after(mixture(norm(x_BTD), chosen_BTK))
            else:
                x_BTD = tiles.over_tiles(branch, x_BTD, tile) if tile else branch(x_BTD)
        active_BTD = x_BTD
        if c.altup is not None:
            x_BTD, active_BTD = streams.correct(predicted_BTSD, x_BTD)
        if c.inputs is not None:
            added_BTD = self._of_input(active_BTD, input_BTP)
            x_BTD = x_BTD + added_BTD if c.altup is None else x_BTD.at[:, :, 1:].add(added_BTD[:, :, None])
        if c.has_layer_scale:
            x_BTD *= jax.lax.stop_gradient(self.param("layer_scale", nn.initializers.ones, (1,)))
        return x_BTD if past is None and self.keys != "given" else (x_BTD, keys)

    @nn.nowrap
    def _of_input(self, x_BTD: jax.Array, input_BTP: jax.Array | None) -> jax.Array:
        c = self.config
        assert c.inputs is not None and (input_BTP is not None or self.is_initializing()), "the input of a layer"
        if input_BTP is None:
            input_BTP = jnp.zeros((*x_BTD.shape[:2], c.inputs.width), x_BTD.dtype)
        branch = layer_inputs.InputBranch(
            c.inputs.width, c.mlp.activation, c.norms.eps, c.residual_stddev, name="inputs"
        )
        return branch(x_BTD, input_BTP)

    @nn.nowrap
    def _attention(self) -> nn.Module:
        c = self.config
        if self.is_recurrent:
            assert c.recurrent is not None
            return c.recurrent.branch(c.embed_dim, c.norms.eps, c.residual_stddev, c.way)
        if c.heads.latent is None:
            return attention.Attention(c, self.window, self.rotation, self.chunk, self.keys, name="attention")
        assert self.rotation is not None and not self.window, "latent attention is rotated and has no window"
        scale = c.heads.scale or c.head_dim**-0.5
        return mla.LatentAttention(
            c.heads.latent,
            c.embed_dim,
            c.num_heads,
            c.attention,
            self.rotation,
            scale,
            c.heads.o_bias,
            c.residual_stddev,
            c.way,
            name="attention",
        )

    @nn.nowrap
    def _norms(self, branch: str) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
        """Returns what a branch reads of the residual stream, and what is added to it of what the branch returns."""
        c = self.config
        same = lambda x_BTD: x_BTD  # noqa: E731
        before, after = (
            make_norm(c, f"{branch}{name}") if c.norms.places in places else same
            for places, name in ((("before", "both", "shared"), "_norm"), (("after", "both"), "_post_norm"))
        )
        if c.scales.residual == 1:
            return before, after
        return before, lambda y_BTD: after(y_BTD) * jnp.asarray(c.scales.residual, y_BTD.dtype)


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
        chosen_BTLK: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the normalised hidden states, the head's input: float[B, T, D]. For the other arguments see `Layer`; `chosen_BTLK` are
        the experts of tokens in the L layers that have some, int32[B, T, L, K]."""
        mixed = list(filter(self.config.has_experts, range(self.config.num_layers)))
        own_BT = _positions_in_texts(self.config, segments_BT, positions_BT)
        given = {
            "mask_BT": mask_BT,
            "segments_BT": segments_BT,
            "positions_BT": positions_BT if self.config.heads.growth is None else own_BT,
            "lengths_BT": lengths_BT,
        }
        seen = {name: array for name, array in given.items() if array is not None}
        x_BTD = self._embedded(tokens_BT, own_BT)
        given_by: dict[int, Any] = {}
        inputs, x_BTD = self._inputs(x_BTD, tokens_BT), self._spread(x_BTD)
        for number, (layer, own) in enumerate(zip(self.layer, inputs)):
            source = self.config.source_of(number)
            own |= {} if source is None else {"shared": given_by[source]}
            if chosen_BTLK is not None and number in mixed:
                own |= {"chosen_BTK": chosen_BTLK[:, :, mixed.index(number)]}
            x_BTD = layer(x_BTD, **seen, **own)
            if isinstance(x_BTD, tuple):
                x_BTD, given_by[number] = x_BTD
        return self.norm(self._joined(x_BTD))

    def __call__(self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Returns logits: float32[B, T, V] from tokens int32[B, T], or by `output` the value of each text, float32[B, 1], or the last
        states, float[B, T, D]. `mask_BT` is False for padding."""
        lengths_B1 = None
        if mask_BT is not None and self._reads_lengths(tokens_BT.shape[1]):
            lengths_B1 = jnp.sum(mask_BT, axis=1, keepdims=True)
        x_BTD = self.hidden(tokens_BT, mask_BT, lengths_BT=lengths_B1)
        if self.config.output == "states":
            return x_BTD
        if self.config.output == "value":
            return self._scored(x_BTD, _lengths(tokens_BT, mask_BT))
        return self._logits(x_BTD)

    def start(self, tokens_BT: jax.Array, lengths_B: jax.Array, slots: int) -> tuple[jax.Array, Any]:
        """Returns the logits after each row's first `lengths_B` tokens, float32[B, V], and every layer's keys and values."""
        c, (batch, length) = self.config, tokens_BT.shape
        step = decoding.first_step(batch, length, slots)
        if c.recurrent is not None:  # in whose state padding would leave a trace
            step = step._replace(counts_B=lengths_B)
        # Padding is not part of a text's length
        if c.by_length:
            step = step._replace(positions_BT=jnp.minimum(step.positions_BT, lengths_B[:, None] - 1))
        x_BTD = self._embedded(tokens_BT, step.positions_BT)
        x_BTD, after = self._through(tokens_BT, x_BTD, decoding.empty(caches(c), batch, slots, x_BTD.dtype), step)
        return self._logits(self.norm(decoding.at_last(x_BTD, lengths_B)))[:, 0], after

    def extend(self, caches: PyTree, step: decoding.Step, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the logits after one more token a row, int32[B], or several, int32[B, T]: float32[B, V], and every layer's keys and
        values."""
        tokens_BT = tokens.reshape(len(tokens), -1)
        x_BTD = self._embedded(tokens_BT, step.positions_BT)
        x_BTD, caches = self._through(tokens_BT, x_BTD, caches, step)
        return self._logits(self.norm(step.last(x_BTD)))[:, 0], caches

    @nn.nowrap
    def _through(
        self, tokens_BT: jax.Array, x_BTD: jax.Array, caches: PyTree, step: decoding.Step
    ) -> tuple[jax.Array, list]:
        after: list[Any] = []
        inputs, x_BTD = self._inputs(x_BTD, tokens_BT), self._spread(x_BTD)
        for number, (layer, keys, own) in enumerate(zip(self.layer, caches, inputs)):
            source = self.config.source_of(number)
            held = keys if source is None else after[source]
            x_BTD, held = layer(x_BTD, None, decoding.Past(held, step), **own)
            after.append(held if source is None else keys)
        return self._joined(x_BTD), after

    @nn.nowrap
    def _inputs(self, x_BTD: jax.Array, tokens_BT: jax.Array) -> list[dict[str, Any]]:
        """Returns for each layer the argument that is its input, if layers have one."""
        if self.config.inputs is None:
            return [{} for _ in self.layer]
        inputs_BTLP = self.layer_inputs(x_BTD, tokens_BT)
        return [{"input_BTP": inputs_BTLP[:, :, number]} for number in range(len(self.layer))]

    @nn.nowrap
    def _spread(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.config.altup is None else self.altup_in(x_BTD)

    @nn.nowrap
    def _joined(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.config.altup is None else self.altup_out(x_BTD)

    @nn.nowrap
    def _embedded(self, tokens_BT: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        """Returns the first layer's input, float[B, T, D]. Positions: by default 0, 1, ..."""
        c, x_BTD = self.config, self.embed(tokens_BT)
        if c.scales.embed != 1:
            x_BTD *= jnp.asarray(c.scales.embed, x_BTD.dtype)
        if not c.has_positions:
            return x_BTD
        return x_BTD + self.positions(jnp.arange(tokens_BT.shape[1])[None] if positions_BT is None else positions_BT)

    @nn.nowrap
    def _scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the head's input of which its output are the scaled logits."""
        scale = self.config.scales.logits
        return x_BTD if scale == 1 else x_BTD * jnp.asarray(scale, x_BTD.dtype)

    @nn.nowrap
    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        found_BTV = softcap.softcap(
            layers.next_logits(self._head(), self._scaled(x_BTD)), self.config.scales.logits_cap
        )
        bias_V = self._bias_of_logits()
        return found_BTV if bias_V is None else found_BTV + bias_V.astype(jnp.float32)

    @nn.nowrap
    def _scored(self, x_BTD: jax.Array, lengths_B1: jax.Array) -> jax.Array:
        """Returns the value of each row's text, read at its last token: float32[B, 1]."""
        return self.score(decoding.at_last(x_BTD, lengths_B1[:, 0]))[:, 0]

    @nn.nowrap
    def _bias_of_logits(self) -> jax.Array | None:
        return self.logits_bias() if self.config.has_logits_bias else None

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
        choices: jax.Array | None = None,
    ) -> Any:
        """Returns the mean next-token loss: float32[] from tokens int32[B, T + 1], or int32[B, T] with `labels_BT`.

        With `by_token` it returns the loss of each token, float32[B, T]; see `layers.next_loss`. `choices` are the experts of tokens, where
        routers chose them before, int32[B, T * layers with experts * experts of a token].

        By `output` it returns the value of each row's text up to its last label instead, float32[B], or the last states of all tokens.

        Rows may be padded at their ends. `segments` separates the texts of a row (see `Layer`). Labels with `labeled` 0 are not learned.
        Both have the shape of `tokens`.
        """
        if self.config.output != "tokens":
            lengths_B1 = _lengths(tokens, labeled)
            x_BTD = self.hidden(tokens, lengths_BT=lengths_B1 if self._reads_lengths(tokens.shape[1]) else None)
            return x_BTD if self.config.output == "states" else self._scored(x_BTD, lengths_B1)[:, 0]
        tokens_BT, labels_BT, ignored = layers.read_and_labels(tokens, labeled, labels_BT)
        segments_BT = None if segments is None else segments[:, : tokens_BT.shape[1]]
        c, lengths_BT = self.config, None
        if ignored is not None and self._reads_lengths(tokens_BT.shape[1]):
            lengths_BT = text_lengths.of_rows(labels_BT != ignored, segments_BT, positions_BT, c.way)
        chosen_BTLK = None
        if choices is not None and c.mixture is not None:
            chosen_BTLK = choices.reshape(*tokens_BT.shape, -1, c.mixture.per_token)
        x_BTD = self.hidden(tokens_BT, None, segments_BT, positions_BT, lengths_BT, chosen_BTLK)
        cap = c.scales.logits_cap
        bias_V = self._bias_of_logits()
        return layers.next_loss(self._head(), self._scaled(x_BTD), labels_BT, ignored, bias_V, cap, by_token)


def loss(
    config: LlamaConfig,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    by_token: bool | str = False,
) -> Any:
    """Returns the mean loss of the next tokens, or the loss of each. There is no dropout, for which `key` would be."""
    others = map(batch.get, ("segments", "labeled", "labels", "positions"))
    arrays = (batch["tokens"], *others, by_token, batch.get("choices"))
    return Llama(config).apply({"params": params}, *arrays, method="loss")


logits = functools.partial(decoding.logits, Llama)
start = functools.partial(decoding.start, Llama)
extend = functools.partial(decoding.extend, Llama)


def caches(config: LlamaConfig) -> PyTree:
    """Returns what every layer remembers: of each token keys and values, or what latent attention has in place of both; or a state."""
    c, latent = config, config.heads.latent
    recurrent = c.recurrent.caches() if c.recurrent is not None else ()

    def held(layer: int) -> tuple[decoding.Held, ...]:
        chosen = (decoding.Held((c.mixture.per_token,), has_heads=False, dtype=jnp.int32),) if c.mixture else ()
        return (*of_attention(layer), *(chosen if c.remembers_choices(layer) else ()))

    def of_attention(layer: int) -> tuple[decoding.Held, ...]:
        if c.is_recurrent(layer):
            return recurrent
        if not c.attends(layer) or c.source_of(layer) is not None:
            return ()
        own = c.of_layer(layer)
        keys: tuple[decoding.Held, ...] = (decoding.Held((own.num_kv_heads, own.head_dim)),) * 2
        return keys if latent is None else (decoding.Held((1, latent.rank + latent.rotary_dim)),)

    return list(map(held, range(c.num_layers)))


def make_norm(config: LlamaConfig, name: str | None = None) -> nn.Module:
    """Returns a norm of the residual stream."""
    return layers.norm(config.norms.kind, config.norms.eps, config.norms.offset, name)


def _lengths(tokens_BT: jax.Array, is_text_BT: jax.Array | None) -> jax.Array:
    return tokens_lib.lengths(jnp.ones(tokens_BT.shape, bool) if is_text_BT is None else is_text_BT > 0)


def _positions_in_texts(
    config: LlamaConfig, segments_BT: jax.Array | None, positions_BT: jax.Array | None
) -> jax.Array | None:
    """Returns the positions of tokens in their texts, where rows hold several and more than distances counts."""
    if not (config.has_positions or config.heads.growth) or segments_BT is None:
        return positions_BT
    if positions_BT is not None:
        raise UserError(
            "pack: texts whose positions have embeddings or multiply queries are in one row, which is sharded over `context`, so that a "
            "device does not know where they begin; set `pack=False` or `context=1`"
        )
    return tokens_lib.in_texts(segments_BT)


def parts(config: LlamaConfig) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),)
    states = (jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32),)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=layers.normal(0.02))
    found: family.Parts = {"embed": (embed, tokens)}
    if c.has_positions:
        found["positions"] = (layers.Embed(c.max_seq_len, c.embed_dim, embedding_init=embed.embedding_init), tokens)
    found |= {f"layer_{i}": (_layer(c, i), states) for i in range(c.num_layers)}
    if c.inputs is not None:
        found["layer_inputs"] = (layer_inputs.LayerInputs(c.inputs, c.num_layers, c.norms.eps), states)
    if c.altup is not None:
        found |= {
            "altup_in": (altup.Spread(c.altup.streams), states),
            "altup_out": (altup.Joined(c.altup.streams), states),
        }
    found["norm"] = (make_norm(c), states)
    if c.output == "states":
        return found
    if c.output == "value":
        return found | {"score": (layers.Head(c.embed_dim, 1), states)}
    if c.has_logits_bias:
        found["logits_bias"] = (layers.LogitsBias(c.vocab_size, is_trained=True), ())
    return found if c.tie_embeddings else found | {"head": (layers.Head(c.embed_dim, c.vocab_size), states)}


def _layer(config: LlamaConfig, i: int) -> Layer:
    c = config
    kind = c.has_experts(i), c.is_recurrent(i), c.branches_of(i), c.chunk_of(i), c.keys_of(i)
    return Layer(c.of_layer(i), c.window_of(i), c.rope_of(i), *kind)


def count_params(config: LlamaConfig) -> int:
    """Returns the number of weights."""
    return family.count_params(parts, config)


def flops_per_token(config: LlamaConfig, seq_len: int, per_weight: float = 6.0) -> float:
    """Returns the floating-point operations of training on one token: 6 per weight outside tables of embeddings (4 if it is frozen), and
    12 * heads * head_dim for each token that it sees in a layer, without recomputation: the lower half of seq_len, or of a window; and
    three times what a recurrence computes."""
    c = config
    used = count_params(c) - (0 if c.tie_embeddings else c.vocab_size * c.embed_dim)
    used -= c.max_seq_len * c.embed_dim if c.has_positions else 0
    used -= c.inputs.vocab_size * c.inputs.width * c.num_layers if c.inputs is not None else 0
    if (m := c.mixture) is not None:  # a token multiplies the weights of its experts alone
        skipped = sum(map(c.has_experts, range(c.num_layers))) * (m.experts - m.per_token)
        biases = 0 if m.clamp is None else 2 * m.width + c.embed_dim
        used -= skipped * ((3 if c.mlp.is_gated else 2) * (m.latent_dim or c.embed_dim) * m.width + biases)
    recurrent = [layer for layer in range(c.num_layers) if c.is_recurrent(layer)]
    attending = [layer for layer in range(c.num_layers) if c.attends(layer)]
    seen = 0.0
    for layer in attending:
        span = min(c.window_of(layer) or c.chunk_of(layer) or seq_len, seq_len)
        width = c.of_layer(layer).head_dim if c.heads.latent is None else (c.head_dim + c.heads.latent.value_dim) / 2
        seen += width * (2 * span - span**2 / seq_len)  # twice the mean over a row's tokens
    inside = 3.0 * len(recurrent) * c.recurrent.flops() if c.recurrent is not None else 0.0
    return per_weight * used + 6.0 * c.num_heads * seen + inside
