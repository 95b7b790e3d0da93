"""Calls an encoder-decoder's module as a `Family` does. This module holds what families of encoder-decoders share.

`module` makes a Flax module of a config, with the methods `__call__`, `loss`, `start` and `extend`. A family binds it by
`calls`. `family.Family` says what the other arguments and the results are.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, layers
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree

Module = Callable[[Any], nn.Module]


class EncoderDecoder(nn.Module):
    """What an encoder-decoder computes. A subclass has a config, the modules `embed` and, unless embeddings are tied, `head`, the lists
    `encoder` and `decoder` of layers, and the methods below that are not implemented here.

    A layer of the decoder gets the targets' states, what `first_inputs` has beside them, the encoder's states float[B, S, D] and their
    mask bool[B, S], False for padding. With a past (`decoding.Past`, the targets before these) it returns its own keys and values and those
    of the encoder's states beside its result, and may be called with the latter in place of these states, as `keys`.

    Shapes: B batch, S encoder length (of a cache: slots), T decoder length, D embed, V vocabulary.
    """

    config: Any

    def first_inputs(self, side: str, tokens_BT: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, tuple]:
        """Returns the states float[B, T, D] that the first layer of "encoder" or "decoder" gets, and what each layer gets beside them.

        Positions are by default 0, 1, ...
        """
        raise NotImplementedError

    def next_inputs(self, targets_BT: jax.Array, step: decoding.Step) -> tuple[jax.Array, tuple]:
        """Returns the same of targets that a step adds to the decoder's caches."""
        raise NotImplementedError

    def final(self, side: str, x_BTD: jax.Array) -> jax.Array:
        """Returns the states after the last layer of "encoder" or "decoder" as what reads them gets them."""
        raise NotImplementedError

    def encode(
        self, inputs_BS: jax.Array, mask_BS: jax.Array | None = None, positions_BS: jax.Array | None = None
    ) -> jax.Array:
        """Returns the encoder's states: float[B, S, D]. `mask_BS` is False for padding. Positions: by default 0, 1, ..."""
        masks = () if mask_BS is None else (mask_BS,)
        x_BSD, beside = self.first_inputs("encoder", inputs_BS, positions_BS)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, *beside, *masks)
        return self.final("encoder", x_BSD)

    def hidden(
        self,
        inputs_BS: jax.Array,
        targets_BT: jax.Array,
        mask_BS: jax.Array | None = None,
        positions_BS: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the decoder's states, the head's input: float[B, T, D]. `mask_BS` is False for padding inputs."""
        encoded_BSD = self.encode(inputs_BS, mask_BS, positions_BS)
        masks = () if mask_BS is None else (mask_BS,)
        x_BTD, beside = self.first_inputs("decoder", targets_BT, positions_BT)
        for layer in self.decoder:
            x_BTD = layer(x_BTD, *beside, encoded_BSD, *masks)
        return self.final("decoder", x_BTD)

    def start(
        self, inputs_BS: jax.Array, mask_BS: jax.Array | None, targets_BT: jax.Array, lengths_B: jax.Array, slots: int
    ) -> tuple[jax.Array, Any]:
        """Returns the logits after each row's first `lengths_B` targets, float32[B, V], and what `extend` reads."""
        batch, length = targets_BT.shape
        step, encoded_BSD = decoding.first_step(batch, length, slots), self.encode(inputs_BS, mask_BS)
        x_BTD, beside = self.next_inputs(targets_BT, step)
        declared, after = [own for own, _ in caches(self.config)[0]], []
        for layer, empty in zip(self.decoder, decoding.empty(declared, batch, slots, x_BTD.dtype)):
            x_BTD, *keys = layer(x_BTD, *beside, encoded_BSD, mask_BS, decoding.Past(empty, step))
            after.append(keys)
        return self._logits(self.final("decoder", decoding.at_last(x_BTD, lengths_B)))[:, 0], (after, mask_BS)

    def extend(self, caches: PyTree, step: decoding.Step, targets_B: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the logits after one more target a row, float32[B, V], and the caches."""
        (before, mask_BS), after = caches, []
        x_B1D, beside = self.next_inputs(targets_B[:, None], step)
        for layer, (own, keys) in zip(self.decoder, before):
            x_B1D, *keys = layer(x_B1D, *beside, None, mask_BS, decoding.Past(own, step), keys)
            after.append(keys)
        return self._logits(self.final("decoder", x_B1D))[:, 0], (after, mask_BS)

    def __call__(self, inputs_BS: jax.Array, targets_BT: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        """Returns logits of the token after each target: float32[B, T, V] from int32[B, S] and int32[B, T]."""
        return self._logits(self.hidden(inputs_BS, targets_BT, mask_BS))

    def bias_of_logits(self) -> jax.Array | None:
        """Returns float[V], or None."""
        return None

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        logits_BTV, bias_V = layers.next_logits(self._head(), x_BTD), self.bias_of_logits()
        return logits_BTV if bias_V is None else logits_BTV + bias_V.astype(jnp.float32)

    def _head(self) -> nn.Module:
        return self.embed if self.config.tie_embeddings else self.head

    def loss(
        self,
        inputs_BS: jax.Array,
        targets: jax.Array,
        mask_BS: jax.Array | None = None,
        labeled: jax.Array | None = None,
        labels_BT: jax.Array | None = None,
        positions_BS: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        by_token: bool | str = False,
    ) -> Any:
        """Returns the mean next-target loss: float32[] from int32[B, S] and int32[B, T + 1], or int32[B, T] with `labels_BT`.

        With `by_token` it returns the loss of each target, float32[B, T]; see `layers.next_loss`.

        Inputs with `mask_BS` 0 are padding. Targets may be padded at their ends, and labels with `labeled` 0 are not learned.
        """
        mask_BS = None if mask_BS is None else mask_BS > 0
        targets_BT, labels_BT, ignored = layers.read_and_labels(targets, labeled, labels_BT)
        x_BTD = self.hidden(inputs_BS, targets_BT, mask_BS, positions_BS, positions_BT)
        return layers.next_loss(self._head(), x_BTD, labels_BT, ignored, self.bias_of_logits(), by_token=by_token)


def loss(
    module: Module,
    config: ModelConfig,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    by_token: bool | str = False,
) -> Any:
    """Returns the mean loss of the targets after the first of each row, or the loss of each."""
    others = map(batch.get, ("mask", "labeled", "labels", "positions", "target_positions"))
    arrays = batch["inputs"], batch["targets"], *others, by_token
    rngs = None if key is None else {layers.DROPOUT: key}
    return module(config).apply({"params": params}, *arrays, method="loss", rngs=rngs)


def logits(
    module: Module, config: ModelConfig, params: PyTree, inputs: Mapping[str, jax.Array], tokens: jax.Array
) -> jax.Array:
    """Returns the scores of the token after each of `tokens`."""
    return cast(jax.Array, module(config).apply({"params": params}, inputs["inputs"], tokens, inputs.get("mask")))


def caches(config: ModelConfig) -> PyTree:
    """Returns what a decoder remembers: each layer's keys and values of targets and of the encoder's states, and the mask of these."""
    layers, *shape = config.cached_shape
    keys, of_inputs = ((decoding.Held(tuple(shape), positions),) * 2 for positions in ("tokens", "inputs"))
    return [[keys, of_inputs]] * layers, decoding.Held((), "inputs", has_heads=False, dtype=bool)


def start(
    module: Module,
    config: ModelConfig,
    params: PyTree,
    inputs: Mapping[str, jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    slots: int,
) -> PyTree:
    """Returns the scores after the prompt, and the caches."""
    arrays = (inputs["inputs"], inputs.get("mask"), tokens, lengths)
    return module(config).apply({"params": params}, *arrays, slots, method="start")


def flops_per_token(
    flops_per_row: Callable[..., float], config: ModelConfig, lengths: Mapping[str, int], per_weight: float = 6.0
) -> float:
    """Returns the operations of training per token of the inputs. The last target is predicted and not read."""
    return flops_per_row(config, lengths["inputs"], lengths["targets"] - 1, per_weight) / lengths["inputs"]


def calls(module: Module, flops_per_row: Callable[..., float]) -> dict[str, Any]:
    """Returns the fields of a `Family` that all encoder-decoders have alike."""
    return {
        "objective": "span_corruption",
        "loss": functools.partial(loss, module),
        "logits": functools.partial(logits, module),
        "start": functools.partial(start, module),
        "extend": functools.partial(decoding.extend, module),
        "caches": caches,
        "is_encoder_decoder": True,
        "blocks": r"(encoder|decoder)_\d+",
        "heads": "head",
        "flops_per_token": functools.partial(flops_per_token, flops_per_row),
    }
