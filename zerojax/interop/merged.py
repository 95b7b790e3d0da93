"""Writes a model with an adapter merged into it. This module merges one tensor at a time: of two folders on the host, or of params.

A merged kernel is W + scale * B A, computed in float32 and cast to the dtype that it is written in.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, layout, peft
from zerojax.lora import adapters, targets
from zerojax.ops import quantized
from zerojax.tree import PyTree
from zerojax.zero.offload import storage


def export(
    folder: folder_lib.Folder, adapter: peft.Adapter, path: str | os.PathLike, *, dtype: DTypeLike | None = None
) -> None:
    """Writes a folder of transformers with the adapter merged, and with the files that the model's folder has beside its weights.

    Args:
      folder: the model's.
      adapter: for this model.
      path: new, empty, or with an earlier export.
      dtype: of the tensors; None: each as it is in the model's folder.

    Raises:
      UserError: the directory holds other files, or the disk is full.
    """
    tensors = layout.tensors(folder.family, folder.model)

    def made(tensor: layout.ModelTensor) -> huggingface.Made:
        return huggingface.Made(tensor.leaf_shape, functools.partial(_of_folders, folder, adapter, tensor))

    huggingface.export(
        tree.nested({tensor.path: made(tensor) for tensor in tensors}),
        folder.family,
        folder.model,
        path,
        dtype=dtype,
        source=folder.path,
    )


def of_params(params: PyTree, chosen: targets.Targets) -> PyTree:
    """Returns the weights of a plain model for `huggingface.export`: each is merged, or dequantized, when it is written.

    Args:
      params: the weights with their adapters, with any sharding and without padding.
      chosen: the adapters.
    """
    own, found = adapters.split(params, chosen)

    def make(path: str) -> Any:
        if path not in found:
            leaf = storage.to_device(own[path])
            return quantized.dequantize(leaf, jnp.float32) if quantized.is_quantized(leaf) else leaf
        module, *pair = found[path]
        return _merge(chosen.scale(module))(*storage.to_device((own[path], tuple(pair))))

    leaves = {}
    for path, leaf in own.items():
        shape = quantized.shape_of(leaf) if quantized.is_quantized(leaf) else leaf.shape
        leaves[path] = huggingface.Made(tuple(shape), functools.partial(make, path))
    return tree.nested(leaves)


@functools.lru_cache
def _merge(scale: float) -> Any:
    def run(kernel: Any, parts: tuple[jax.Array, jax.Array]) -> jax.Array:
        kernel = quantized.dequantize(kernel, jnp.float32) if quantized.is_quantized(kernel) else kernel
        return adapters.merged(kernel, *parts, scale)

    return jax.jit(run)


def _of_folders(folder: folder_lib.Folder, adapter: peft.Adapter, tensor: layout.ModelTensor) -> np.ndarray:
    """Returns a weight of the merged model in float32."""
    if tensor.path in adapter.tensors:
        return _read(adapter, adapter.tensors[tensor.path])
    found, chosen = _read(folder, tensor), adapter.chosen
    module = next((path for path in chosen.adapted if chosen.kernel(path) == tensor.path), None)
    if module is not None:
        a, b = (_read(adapter, adapter.tensors[f"{chosen.adapter(module)}/{part}"]) for part in (targets.A, targets.B))
        found = adapters.merged(found, a, b, chosen.scale(module))
    return found


def _read(source: folder_lib.TensorFiles, tensor: layout.ModelTensor) -> np.ndarray:
    """Returns a whole weight in float32."""
    folder_lib.check_files(source)
    index = tuple(slice(0, size) for size in tensor.leaf_shape)
    return folder_lib.read_shard(source, tensor, index, np.dtype(np.float32))
