"""Classifies texts. This module computes a classifier's scores, from a model whose weights stay sharded."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.models import family as family_lib
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

    `input_ids` are int[rows, length], and `attention_mask` is 0 where a text is padded. All processes must call it with the same arrays.
    Each shape of `input_ids` is compiled once.

    Args:
      family, config: the model.
      partition: the shardings of its params. Rows are sharded over the mesh's replica and data axes.
      compute_dtype: the dtype of floating weights in the model; None keeps the stored one.

    Raises:
      UserError: `classify` refuses ids that the model does not know, and texts longer than its positions.
    """
    how: dict[str, Any] = {
        "blocks": family.blocks,
        "heads": family_lib.heads(family, config),
        "compute_dtype": compute_dtype,
    }

    def scores(params: PyTree, inputs: dict[str, jax.Array]) -> jax.Array:
        return family.logits(config, params, inputs, inputs["inputs"])

    run = fetched_params.on_all(scores, partition, **how)

    def classify(params: PyTree, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> np.ndarray:
        _, mask = generate.check(input_ids, attention_mask, config.vocab_size)
        # Padding keeps its ids: some models count positions by them.
        inputs = {"inputs": np.clip(np.asarray(input_ids, np.int32), 0, config.vocab_size - 1), "mask": mask}
        if token_type_ids is not None:
            inputs["kinds"] = _kinds(token_type_ids, mask.shape, config.num_kinds)
        check_length(family, config, mask.shape[1])
        found = run(params, generate.sharded_rows(inputs, partition.mesh))
        return np.asarray(found)[: len(mask)]

    return classify


def check_length(family: family_lib.Family, config: Any, tokens: int) -> None:
    """Raises UserError if texts have more tokens than the model has positions with weights of their own."""
    longest = family.positions(config)
    if longest is not None and tokens > longest:
        raise UserError(f"input_ids: have {tokens} tokens, and the model has {longest} positions; shorten the texts")


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
