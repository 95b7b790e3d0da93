"""Reads texts with a model whose weights stay sharded. This module computes a classifier's scores, and a decoder's vectors of texts.

All processes must call what it builds with the same arrays. Each shape of them is compiled once. `input_ids` are int[rows, length], and
`attention_mask` is 0 where a text is padded; rows are sharded over the mesh's replica and data axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from zerojax import errors
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.models import family as family_lib
from zerojax.ops import contrastive
from zerojax.tree import PyTree
from zerojax.zero.offload import fetched_params
from zerojax.zero.weights import partition as partition_lib


def make_classifier(
    family: family_lib.Family,
    config: Any,
    partition: partition_lib.Partition,
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[..., np.ndarray]:
    """Builds `classify(params, input_ids, attention_mask=None, token_type_ids=None) -> float32[rows, classes]`, the scores of classes.

    Args:
      family, config: the model.
      partition: the shardings of its params.
      compute_dtype: the dtype of floating weights in the model; None keeps the stored one.

    Raises:
      UserError: `classify` refuses ids that the model does not know, and texts longer than its positions.
    """

    def scores(params: PyTree, inputs: dict[str, jax.Array]) -> jax.Array:
        return family.logits(config, params, inputs, inputs["inputs"])

    return _make_reader(scores, family, config, partition, compute_dtype)


def make_embedder(
    family: family_lib.Family,
    config: Any,
    partition: partition_lib.Partition,
    *,
    pooling: str,
    compute_dtype: DTypeLike | None = None,
) -> Callable[..., np.ndarray]:
    """Builds `embed(params, input_ids, attention_mask=None) -> float32[rows, embed]`, the vectors of texts, of length 1.

    Texts may be padded at either end.

    Args:
      family, config: the model, with a head of any kind or none.
      pooling: how a vector is made of a text's states; one of `contrastive.OF_DECODERS`.
      partition, compute_dtype: as of `make_classifier`.

    Raises:
      UserError: the model has no states without a head. `embed` refuses what a classifier does.
    """
    errors.one_of("pooling", pooling, contrastive.OF_DECODERS)
    if not hasattr(config, "output"):
        raise UserError("embedder: the model is no decoder that gives states; choose another model")
    headless = dataclasses.replace(config, output=family_lib.STATES)

    def vectors(params: PyTree, inputs: dict[str, jax.Array]) -> jax.Array:
        states = family.logits(headless, params, {"mask": inputs["mask"]}, inputs["inputs"])
        return contrastive.pooled(states, inputs["mask"], pooling)

    return _make_reader(vectors, family, headless, partition, compute_dtype)


def _make_reader(
    function: Callable[[PyTree, dict[str, jax.Array]], jax.Array],
    family: family_lib.Family,
    config: Any,
    partition: partition_lib.Partition,
    compute_dtype: DTypeLike | None,
) -> Callable[..., np.ndarray]:
    """Builds `read(params, input_ids, attention_mask=None, token_type_ids=None)`, what `function` returns of each row."""
    run = fetched_params.on_all(function, partition, **family_lib.gathering(family, config, compute_dtype))

    def read(params: PyTree, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> np.ndarray:
        _, mask = generate.check(input_ids, attention_mask, config.vocab_size)
        # Padding keeps its ids: some models count positions by them.
        inputs = {"inputs": np.clip(np.asarray(input_ids, np.int32), 0, config.vocab_size - 1), "mask": mask}
        if token_type_ids is not None:
            inputs["kinds"] = _kinds(token_type_ids, mask.shape, getattr(config, "num_kinds", 0))
        longest, tokens = family.positions(config), mask.shape[1]
        if longest is not None and tokens > longest:
            raise UserError(
                f"input_ids: have {tokens} tokens, and the model has {longest} positions; shorten the texts"
            )
        found = run(params, generate.sharded_rows(inputs, partition.mesh))
        return np.asarray(found)[: len(mask)]

    return read


def _kinds(token_type_ids: Any, shape: tuple[int, ...], known: int) -> np.ndarray:
    """Returns the kinds of texts as int32[rows, length]."""
    if not known:
        raise UserError("token_type_ids: the model has no kinds of texts; leave them out")
    kinds = np.asarray(token_type_ids)
    if kinds.shape != shape or not np.issubdtype(kinds.dtype, np.integer) or kinds.min() < 0 or kinds.max() >= known:
        raise UserError(
            f"token_type_ids: must be integers {list(shape)} from 0 to {known - 1}; mend them, or leave them out"
        )
    return kinds.astype(np.int32)
