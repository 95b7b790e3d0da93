"""What a model family is. This module holds the one value that the trainer, the plan, the sampler and the export are handed.

A family's config is a frozen dataclass of its own. The trainer reads and fills four of its fields: `vocab_size` (0 in a preset: the
tokenizer's), `num_layers`, `attention` (a kernel of `ops.attention`) and `max_seq_len` (None where no sequence is too long).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

Inputs = tuple[jax.ShapeDtypeStruct, ...]
# name -> (the module whose weights lie under that name, inputs to initialise it on)
Parts = dict[str, tuple[nn.Module, Inputs]]


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """How Hugging Face names and lays out the family's weights.

    Attributes:
      tensors: (config) -> {our path: (Hugging Face's name, the number of leading dims of ours that are inputs)}. "{}" stands for a layer's
        number. A leaf [inputs..., outputs...] is stored as [outputs, inputs]; with 0 inputs it is stored as it is.
      config: (config) -> the contents of config.json, without the dtype and the token ids.
    """

    tensors: Callable[[Any], Mapping[str, tuple[str, int]]]
    config: Callable[[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      presets: configs by name.
      parts: (config) -> the modules that make up the weight tree. Equal modules initialise alike, so one compiled function serves every
        layer, where one for the whole tree takes minutes.
      objective: what the family learns from text, a name in `data.objectives`; it says which arrays a batch holds.
      loss: (config, params, batch) -> float32[], the mean over the batch.
      logits: (config, params, inputs, tokens: int32[batch, length]) -> float32[batch, length, vocab]: the scores of the token behind each
        of `tokens`. `inputs` are the arrays of a prompt beside the tokens that are continued, by name.
      blocks: a regex over the paths of its repeated modules; see `zerojax.make_train_step`.
      heads: the same for its output projections.
      attention: the kernels that the family can run.
      flops_per_token: (config, lengths) -> the floating-point operations of training on one of a row's `seq_len` tokens; `lengths` are
        those of a row's arrays, by name.
      huggingface: the names and layout of its weights in Hugging Face's files.
    """

    presets: Mapping[str, Any]
    parts: Callable[[Any], Parts]
    objective: str
    loss: Callable[[Any, Any, Mapping[str, jax.Array]], jax.Array]
    logits: Callable[[Any, Any, Mapping[str, jax.Array], jax.Array], jax.Array]
    blocks: str
    heads: str
    attention: tuple[str, ...]
    flops_per_token: Callable[[Any, Mapping[str, int]], float]
    huggingface: HuggingFace


def abstract_params(parts: Parts) -> dict[str, Any]:
    """Returns the weight tree that parts make up, as ShapeDtypeStructs; the one source of a model's shapes."""
    return {name: _abstract_part(module, inputs) for name, (module, inputs) in parts.items()}


def count_params(parts: Parts) -> int:
    """Returns the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(parts)))


@functools.lru_cache(maxsize=64)
def _abstract_part(module: nn.Module, inputs: Inputs) -> Any:
    return jax.eval_shape(lambda *arrays: module.init(jax.random.key(0), *arrays), *inputs)["params"]
