"""Hugging Face's format of weights. This module writes a model's weights as safetensors, and converts Hugging Face's tensors to params.

The family defines names and layouts. Leaves are exported one at a time: each is gathered, cast to bfloat16, laid out as [out, in] and
written to its file. No host ever holds the full model.
"""

import functools
import json
import math
import os
import pathlib
import re
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
from zerojax.models import family as family_lib

SHARD_BYTES = 5 * 2**30
CONFIG, INDEX, ONE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
_LAYER = re.compile(r"_(\d+)/")  # the layer number in a path


class _Tensor(NamedTuple):
    """One tensor: its name at Hugging Face, its path and shape in our params, and the number of leading input dims of that shape."""

    name: str
    path: str
    leaf_shape: tuple[int, ...]
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape at Hugging Face."""
        ours, inputs = self.leaf_shape, self.inputs
        return (math.prod(ours[inputs:]), math.prod(ours[:inputs])) if inputs else ours

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def export(
    params: Any,
    family: family_lib.Family,
    model: Any,
    directory: str | os.PathLike,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Writes bfloat16 safetensors and config.json for `from_pretrained` of the family's class in transformers.

    All processes must call it; the first one writes. The directory is created, or replaces an earlier export, only when it is
    complete.

    Args:
      params: the model's parameters, with any sharding and without padding.
      family: the model's family.
      model: the model's config.
      directory: new, empty, or with an earlier export.
      max_shard_bytes: limit on the tensors of one file. A larger tensor gets its own file.
      bos_token_id: the token that begins a text, for config.json.
      eos_token_id: the token that ends a text, for config.json.

    Raises:
      UserError: a leaf is missing, unknown or of another shape, the directory holds other files, or the disk is full.
    """
    leaves = dict(tree.flatten(params))
    tensors = _tensors(family, model)
    _check(leaves, tensors)
    shards = _pack(tensors, max_shard_bytes)
    directory = pathlib.Path(directory).absolute()
    is_primary = jax.process_index() == 0
    fetch = _make_fetch(is_primary)
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    config = family.huggingface.config(model) | {"torch_dtype": "bfloat16"} | ids
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        if is_primary:
            _prepare(directory, partial)
        _write(leaves, shards, config, partial, fetch, is_primary)
        if is_primary:
            _replace(directory, partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = "no space left on the disk; free some" if errors.is_disk_full(error) else f"{error.strerror}; fix that"
        raise UserError(f"{directory}: export failed: {cause} or choose another directory") from error
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zerojax export")


def params_from_tensors(tensors: Mapping[str, np.ndarray], family: family_lib.Family, model: Any) -> dict[str, Any]:
    """Returns params made of Hugging Face's tensors, in the tensors' dtype.

    Args:
      tensors: by their names in transformers, in its layout.
      family: the model's family.
      model: the model's config.

    Raises:
      UserError: a tensor is missing, unknown or of another shape.
    """
    wanted = _tensors(family, model)
    for name in [*(tensor.name for tensor in wanted), *tensors]:
        if name not in tensors or name not in {tensor.name for tensor in wanted}:
            what = "is missing" if name not in tensors else "is not a tensor of this model"
            raise UserError(f"{name}: {what}; give the config that the tensors were saved with")
    params: dict[str, Any] = {}
    for tensor in wanted:
        array = np.asarray(tensors[tensor.name])
        if array.shape != tensor.shape:
            raise UserError(
                f"{tensor.name}: has shape {array.shape}, but the model's config gives {tensor.shape}; "
                f"give the config that the tensors were saved with"
            )
        *folders, leaf = tensor.path.split("/")
        inner = functools.reduce(lambda node, name: node.setdefault(name, {}), folders, params)
        inner[leaf] = (array.T if tensor.inputs else array).reshape(tensor.leaf_shape)
    return params


def _tensors(family: family_lib.Family, model: Any) -> list[_Tensor]:
    """Returns the model's tensors: first those outside layers, then layer by layer. Each group is in the order of the family's table."""
    table = family.huggingface.tensors(model)
    order = list(table)
    found = []
    for path, leaf in tree.flatten(family_lib.abstract_params(family.parts, model)):
        layer = _LAYER.search(path)
        entry = _LAYER.sub("_{}/", path)
        name, inputs = table[entry]
        number = layer[1] if layer else -1
        found.append((int(number), order.index(entry), _Tensor(name.format(number), path, leaf.shape, inputs)))
    return [tensor for *_, tensor in sorted(found)]


def _check(leaves: Mapping[str, Any], tensors: list[_Tensor]) -> None:
    """Checks every leaf against the model."""
    shapes = {tensor.path: tensor.leaf_shape for tensor in tensors}
    for path in [*shapes, *leaves]:
        if path not in leaves or path not in shapes:
            what = "is missing" if path in shapes else "is not a weight of this model"
            raise UserError(f"params/{path}: {what}; export with the config that the weights were trained with")
    for path, expected in shapes.items():
        shape = tuple(leaves[path].shape)
        if shape != expected:
            raise UserError(
                f"params/{path}: has shape {shape}, but the model's config gives {expected}; "
                f"export with the config that the weights were trained with, unpadded"
            )


def _pack(tensors: list[_Tensor], max_bytes: int) -> dict[str, list[_Tensor]]:
    """Assigns tensors to files in order, each up to `max_bytes`. Returns {file name: tensors}."""
    groups: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(other.nbytes for other in groups[-1]) + tensor.nbytes > max_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _make_fetch(is_primary: bool) -> Callable[[Any], np.ndarray | None]:
    """Returns a function that gathers one leaf in bfloat16 and, on the primary process, copies it to the host."""

    @jax.jit
    def cast(leaf: jax.Array) -> jax.Array:
        return jnp.copy(leaf.astype(jnp.bfloat16))

    def fetch(leaf: Any) -> np.ndarray | None:
        if not isinstance(leaf, jax.Array):
            return np.asarray(leaf).astype(ml_dtypes.bfloat16)
        kind = next(iter(leaf.sharding.device_set)).default_memory().kind  # type: ignore[attr-defined]
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))  # moves offloaded leaves to the device
        # Always a new array: an array caches its numpy copy, and the copies would add up to the full model.
        leaf = cast(leaf)
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        gathered = jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, P()))
        return np.asarray(gathered.addressable_data(0)) if is_primary else None

    return fetch


def _write(
    leaves: Mapping[str, Any],
    shards: Mapping[str, list[_Tensor]],
    config: Mapping[str, Any],
    partial: pathlib.Path,
    fetch: Callable[[Any], np.ndarray | None],
    is_primary: bool,
) -> None:
    """Writes every file of the export. All processes take part in gathering each leaf."""
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
    """Writes the safetensors header: its length as a little-endian uint64, then JSON padded to 8 bytes."""
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
    """Writes one array as [out, in] in row-major order."""
    if tensor.inputs:
        array = array.reshape(tensor.shape[::-1]).T
    file.write(np.ascontiguousarray(array).view(np.uint16).data)


def _prepare(directory: pathlib.Path, partial: pathlib.Path) -> None:
    """Creates the empty directory `partial`, after checking the contents of the final directory."""
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
    """Renames the complete export to its final name, and deletes an earlier export."""
    old = _old(directory)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    if old.exists():
        shutil.rmtree(old)


def _old(directory: pathlib.Path) -> pathlib.Path:
    return directory.with_name(f".{directory.name}.replaced")
