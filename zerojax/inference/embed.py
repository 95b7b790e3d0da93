"""Makes vectors of texts. This module runs a decoder without its head, whose weights stay sharded."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from zerojax import errors
from zerojax.errors import UserError
from zerojax.inference import classify, generate
from zerojax.models import family as family_lib
from zerojax.ops import contrastive
from zerojax.tree import PyTree
from zerojax.zero.offload import fetched_params
from zerojax.zero.weights import partition as partition_lib


def make_embedder(
    family: family_lib.Family,
    config: Any,
    partition: partition_lib.Partition,
    *,
    pooling: str,
    compute_dtype: DTypeLike | None = None,
) -> Callable[..., np.ndarray]:
    """Builds `embed(params, input_ids, attention_mask=None) -> float32[rows, embed]`, the vectors of texts, of length 1.

    `input_ids` are int[rows, length], and `attention_mask` is 0 where a text is padded, at either end. All processes must call it with the
    same arrays. Each shape of `input_ids` is compiled once.

    Args:
      family, config: the model, with a head of any kind or none.
      partition: the shardings of its params. Rows are sharded over the mesh's replica and data axes.
      pooling: how a vector is made of a text's states; one of `contrastive.OF_DECODERS`.
      compute_dtype: the dtype of floating weights in the model; None keeps the stored one.

    Raises:
      UserError: the model has no states without a head. `embed` refuses ids that the model does not know, and texts longer than its
        positions.
    """
    errors.one_of("pooling", pooling, contrastive.OF_DECODERS)
    if not hasattr(config, "output"):
        raise UserError("embedder: the model is no decoder that gives states; choose another model")
    headless = dataclasses.replace(config, output=family_lib.STATES)

    def vectors(params: PyTree, inputs: dict[str, jax.Array]) -> jax.Array:
        states = family.logits(headless, params, {"mask": inputs["mask"]}, inputs["inputs"])
        return contrastive.pooled(states, inputs["mask"], pooling)

    how: dict[str, Any] = {"blocks": family.blocks, "heads": "", "compute_dtype": compute_dtype}
    run = fetched_params.on_all(vectors, partition, **how)

    def embed(params: PyTree, input_ids: Any, attention_mask: Any = None) -> np.ndarray:
        ids, mask = generate.check(input_ids, attention_mask, config.vocab_size)
        classify.check_length(family, config, mask.shape[1])
        found = run(params, generate.sharded_rows({"inputs": ids, "mask": mask}, partition.mesh))
        return np.asarray(found)[: len(mask)]

    return embed
