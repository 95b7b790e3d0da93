"""Writes trained weights in the form in which they leave. This module exports a Llama to Hugging Face safetensors.

Leaves stream: each is gathered alone, cast to bfloat16, laid out as [out, in] and written into its file, so no
host ever holds the model. Query and key need no permutation: the model rotates the first half of a head's
dims against the second (rotate-half RoPE), as Hugging Face's Llama does.
"""

import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, tree
from zerojax.errors import UserError

SHARD_BYTES = 5 * 2**30
CONFIG, INDEX, ONE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
# Our path -> Hugging Face's name, and how many leading dims are inputs: [in..., out...] becomes [out, in]; 0: as it is.
OUTER_NAMES = {
    "embed/embedding": ("model.embed_tokens.weight", 0),
    "norm/scale": ("model.norm.weight", 0),
    "head/kernel": ("lm_head.weight", 1),
}
LAYER_NAMES = {
    "attention_norm/scale": ("input_layernorm.weight", 0),
    "attention/q/kernel": ("self_attn.q_proj.weight", 1),
    "attention/k/kernel": ("self_attn.k_proj.weight", 1),
    "attention/v/kernel": ("self_attn.v_proj.weight", 1),
    "attention/o/kernel": ("self_attn.o_proj.weight", 2),
    "mlp_norm/scale": ("post_attention_layernorm.weight", 0),
    "mlp/gate/kernel": ("mlp.gate_proj.weight", 1),
    "mlp/up/kernel": ("mlp.up_proj.weight", 1),
    "mlp/down/kernel": ("mlp.down_proj.weight", 1),
}


class _Tensor(NamedTuple):
    """One tensor of the export: where it comes from and how it lies in its file."""

    name: str
    path: str
    shape: tuple[int, ...]
    inputs: int

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def export_llama(
    params: Any,
    model: Any,
    directory: str | os.PathLike,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Writes bfloat16 safetensors and config.json, which `transformers.LlamaForCausalLM.from_pretrained` loads.

    All processes call this alike; the first one writes. The directory appears, or replaces an earlier export,
    only when it is complete.

    Args:
      params: the model's parameters, sharded in any way; nothing padded.
      model: the settings of the Llama: vocab_size, num_layers, embed_dim, num_heads, num_kv_heads, head_dim,
        mlp_dim, rope_theta, norm_eps, tie_embeddings, max_seq_len.
      directory: holds nothing yet, or an earlier export.
      max_shard_bytes: bound on the tensors of one file; a larger tensor gets a file of its own.
      bos_token_id: the token that begins a text, for config.json.
      eos_token_id: the token that ends a text, for config.json.

    Raises:
      UserError: a leaf is missing, unknown or of another shape; the directory holds other files; the disk is full.
    """
    leaves = dict(tree.flatten(params))
    tensors = _plan(leaves, model)
    shards = _pack(tensors, max_shard_bytes)
    directory = pathlib.Path(directory).absolute()
    is_primary = jax.process_index() == 0
    fetch = _make_fetch(is_primary)
    config = _config(model, bos_token_id, eos_token_id)
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        if is_primary:
            _prepare(directory, partial)
        _write(leaves, shards, config, partial, fetch, is_primary)
        if is_primary:
            _replace(directory, partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = "no space left on the disk; free some" if errors.is_disk_full(error) else f"{error.strerror}; mend that"
        raise UserError(f"{directory}: export failed: {cause} or choose another directory") from error
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zerojax export")


def _plan(leaves: Mapping[str, Any], model: Any) -> list[_Tensor]:
    """Returns the tensors to write, in the model's order, after checking every leaf against the model."""
    names = {path: name for path, name in OUTER_NAMES.items() if path != "head/kernel" or not model.tie_embeddings}
    for layer in range(model.num_layers):
        for path, (name, inputs) in LAYER_NAMES.items():
            names[f"layer_{layer}/{path}"] = (f"model.layers.{layer}.{name}", inputs)
    for path in [*names, *leaves]:
        if path not in leaves or path not in names:
            what = "is missing" if path in names else "is no weight of this Llama"
            raise UserError(f"params/{path}: {what}; export with the config that the weights were trained with")
    shapes = _shapes(model)
    tensors = []
    for path, (name, inputs) in names.items():
        expected = shapes[path.split("/", 1)[1] if path.startswith("layer_") else path]
        shape = tuple(leaves[path].shape)
        if shape != expected:
            raise UserError(
                f"params/{path}: has shape {shape}, and the model's settings say {expected}; "
                f"export with the config that the weights were trained with, unpadded"
            )
        split = (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else shape
        tensors.append(_Tensor(name, path, split, inputs))
    return tensors


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each kind of leaf."""
    embed, mlp, head_dim = model.embed_dim, model.mlp_dim, model.head_dim
    return {
        "embed/embedding": (model.vocab_size, embed),
        "norm/scale": (embed,),
        "head/kernel": (embed, model.vocab_size),
        "attention_norm/scale": (embed,),
        "attention/q/kernel": (embed, model.num_heads, head_dim),
        "attention/k/kernel": (embed, model.num_kv_heads, head_dim),
        "attention/v/kernel": (embed, model.num_kv_heads, head_dim),
        "attention/o/kernel": (model.num_heads, head_dim, embed),
        "mlp_norm/scale": (embed,),
        "mlp/gate/kernel": (embed, mlp),
        "mlp/up/kernel": (embed, mlp),
        "mlp/down/kernel": (mlp, embed),
    }


def _pack(tensors: list[_Tensor], max_bytes: int) -> dict[str, list[_Tensor]]:
    """Fills files in order, each up to `max_bytes`; returns {file name: tensors}."""
    groups: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(other.nbytes for other in groups[-1]) + tensor.nbytes > max_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _config(model: Any, bos_token_id: int | None, eos_token_id: int | None) -> dict[str, Any]:
    """Returns the contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_seq_len,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
    }


def _make_fetch(is_primary: bool) -> Callable[[Any], np.ndarray | None]:
    """Returns the function that brings one leaf to this host in bfloat16, if this process writes."""

    @jax.jit
    def cast(leaf: jax.Array) -> jax.Array:
        return jnp.copy(leaf.astype(jnp.bfloat16))

    def fetch(leaf: Any) -> np.ndarray | None:
        if not isinstance(leaf, jax.Array):
            return np.asarray(leaf).astype(ml_dtypes.bfloat16)
        kind = next(iter(leaf.sharding.device_set)).default_memory().kind  # type: ignore[attr-defined]
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))  # offloaded leaves come to the device
        # Always a new array: an array keeps the numpy copy made of it, which would add up to the whole model.
        leaf = cast(leaf)
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        whole = jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, P()))
        return np.asarray(whole.addressable_data(0)) if is_primary else None

    return fetch


def _write(
    leaves: Mapping[str, Any],
    shards: Mapping[str, list[_Tensor]],
    config: Mapping[str, Any],
    partial: pathlib.Path,
    fetch: Callable[[Any], np.ndarray | None],
    is_primary: bool,
) -> None:
    """Writes every file of the export; processes that do not write join in gathering each leaf."""
    if not is_primary:
        for tensor in (tensor for group in shards.values() for tensor in group):
            fetch(leaves[tensor.path])
        return
    for file_name, group in shards.items():
        with open(partial / file_name, "wb") as file:
            _write_header(file, group)
            for tensor in group:
                array = fetch(leaves[tensor.path])
                assert array is not None
                _write_tensor(file, tensor, array)
    if len(shards) > 1:
        files = {tensor.name: file_name for file_name, group in shards.items() for tensor in group}
        total = sum(tensor.nbytes for group in shards.values() for tensor in group)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _write_header(file: BinaryIO, group: list[_Tensor]) -> None:
    """Writes safetensors' header: its length as a little-endian uint64, then JSON padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in group:
        offsets = [start, start + tensor.nbytes]
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(file: BinaryIO, tensor: _Tensor, array: np.ndarray) -> None:
    """Writes one array as [out, in], row by row of memory."""
    if tensor.inputs:
        array = array.reshape(tensor.shape[::-1]).T
    file.write(np.ascontiguousarray(array).view(np.uint16).data)


def _prepare(directory: pathlib.Path, partial: pathlib.Path) -> None:
    """Makes the empty directory to write into, after checking what the final one holds."""
    old = _old(directory)
    if old.exists() and not directory.exists():
        old.rename(directory)  # an export was killed between its two renames
    if directory.exists():
        for entry in sorted(directory.iterdir()):
            is_ours = entry.name in (CONFIG, INDEX) or entry.match("model*.safetensors")
            if not is_ours:
                raise UserError(
                    f"{directory}: holds {entry.name}, which no export wrote; move it away or choose another directory"
                )
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _replace(directory: pathlib.Path, partial: pathlib.Path) -> None:
    """Gives the complete export its final name, in the place of an earlier one."""
    old = _old(directory)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    if old.exists():
        shutil.rmtree(old)


def _old(directory: pathlib.Path) -> pathlib.Path:
    return directory.with_name(f".{directory.name}.replaced")
