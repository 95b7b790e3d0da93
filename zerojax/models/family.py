"""Defines a model family. This module holds the `Family` that the trainer, the plan, the sampler and the export use.

Each family has its own config, a frozen dataclass. The trainer reads or sets four of its fields: `vocab_size` (0 in a preset takes the
tokenizer's), `num_layers`, `attention` (a kernel of `ops.attention`) and `max_seq_len` (None for no limit).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

Inputs = tuple[jax.ShapeDtypeStruct, ...]
# name in the weight tree -> (module, inputs to initialise it with)
Parts = dict[str, tuple[nn.Module, Inputs]]


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Hugging Face's names and layouts of the family's weights.

    Attributes:
      tensors: (config) -> {our path: (Hugging Face's name, the number of leading dims of ours that are inputs)}. "{}" stands for a layer's
        number. A leaf [inputs..., outputs...] is stored as [outputs, inputs]. A leaf with 0 inputs is stored unchanged.
      config: (config) -> the contents of config.json, without the dtype and the token ids.
    """

    tensors: Callable[[Any], Mapping[str, tuple[str, int]]]
    config: Callable[[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      presets: configs by name.
      parts: (config) -> the modules that make up the weight tree. Equal modules share one compiled initialiser. Compiling one
        initialiser for the full tree takes minutes.
      objective: a name in `data.objectives`. It defines the arrays of a batch.
      loss: (config, params, batch) -> float32[], the mean over the batch.
      logits: (config, params, inputs, tokens: int32[batch, length]) -> float32[batch, length, vocab]: the scores of the token after each
        of `tokens`. `inputs` are the other arrays of a prompt, by name.
      blocks: a regex over the paths of its repeated modules; see `zerojax.make_train_step`.
      heads: a regex over the paths of its output projections.
      attention: the attention kernels that the family supports.
      flops_per_token: (config, lengths) -> the floating-point operations of training per token; a row has `seq_len` tokens. `lengths` are
        the lengths of a row's arrays, by name.
      huggingface: the names and layouts of its weights in Hugging Face's files.
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


def parts_to_initialise(parts: Callable[[Any], Parts], config: Any) -> Parts:
    """Returns the parts of a config, with which any device can trace their initialisation.

    cuDNN's attention requires GPUs and 16-bit weights. The weights do not depend on the kernel.
    """
    return parts(dataclasses.replace(config, attention="xla"))


def abstract_params(parts: Callable[[Any], Parts], config: Any) -> dict[str, Any]:
    """Returns the weight tree of a config as ShapeDtypeStructs. This is the only source of a model's shapes.

    Args:
      parts: (config) -> its parts; see `Family`.
      config: the model's.
    """
    found = parts_to_initialise(parts, config)
    return {name: _abstract_part(module, inputs) for name, (module, inputs) in found.items()}


def count_params(parts: Callable[[Any], Parts], config: Any) -> int:
    """Returns the number of weights of a config."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(parts, config)))


@functools.lru_cache(maxsize=64)
def _abstract_part(module: nn.Module, inputs: Inputs) -> Any:
    return jax.eval_shape(lambda *arrays: module.init(jax.random.key(0), *arrays), *inputs)["params"]
