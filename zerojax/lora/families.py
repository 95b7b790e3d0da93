"""Adapters in a model family. This module wraps the family's functions, so that they run the adapters among their weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from zerojax.lora import linen, targets
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree


def with_adapters(family: family_lib.Family, chosen: targets.Targets, share: float = 1.0) -> family_lib.Family:
    """Returns the family with functions that run the adapters among the weights that they are given, times `share`: 0 turns them off."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with linen.applied(lambda path: share * chosen.scale(path), chosen.lora.dropout):
                return function(*args, **kwargs)

        return run

    def loss(
        config: ModelConfig, params: PyTree, batch: PyTree, key: jax.Array | None = None, **how: bool
    ) -> jax.Array:
        with linen.dropout_key(key):
            return wrapped(family.loss)(config, params, batch, key, **how)

    functions = {name: wrapped(getattr(family, name)) for name in ("logits", "start", "extend")}
    return dataclasses.replace(family, loss=loss, **functions)  # type: ignore[arg-type]
