"""Calls an encoder-decoder's module as a `Family` does. This module holds what families of encoder-decoders share.

`module` makes a Flax module of a config, with the methods `__call__`, `loss`, `start` and `extend`. A family binds it with
`functools.partial`. `family.Family` says what the other arguments and the results are.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax

from zerojax.models import decoding, layers
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree

Module = Callable[[Any], nn.Module]


def loss(
    module: Module,
    config: ModelConfig,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    by_token: bool = False,
) -> jax.Array:
    """Returns the mean loss of the targets after the first of each row, or the loss of each."""
    others = map(batch.get, ("mask", "labeled", "labels", "positions", "target_positions"))
    arrays = batch["inputs"], batch["targets"], *others, by_token
    rngs = None if key is None else {layers.DROPOUT: key}
    return cast(jax.Array, module(config).apply({"params": params}, *arrays, method="loss", rngs=rngs))


def logits(
    module: Module, config: ModelConfig, params: PyTree, inputs: Mapping[str, jax.Array], tokens: jax.Array
) -> jax.Array:
    """Returns the scores of the token after each of `tokens`."""
    return cast(jax.Array, module(config).apply({"params": params}, inputs["inputs"], tokens, inputs.get("mask")))


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


def extend(
    module: Module, config: ModelConfig, params: PyTree, caches: PyTree, step: decoding.Step, tokens: jax.Array
) -> PyTree:
    """Returns the scores after one more token, and the caches."""
    return module(config).apply({"params": params}, caches, step, tokens, method="extend")


def flops_per_token(
    flops_per_row: Callable[..., float], config: ModelConfig, lengths: Mapping[str, int], per_weight: float = 6.0
) -> float:
    """Returns the operations of training per token of the inputs. The last target is predicted and not read."""
    return flops_per_row(config, lengths["inputs"], lengths["targets"] - 1, per_weight) / lengths["inputs"]
