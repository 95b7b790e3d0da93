"""Writes a model with an adapter merged into it. This module merges one tensor at a time: of two folders, or of params.

A merged kernel is W + scale * A B, computed in float32 and cast to the dtype that it is written in. One device computes it, some rows at a
time, with programs that depend on the kernel's shape alone: the bytes are the same whatever the mesh, the stage and the processes.
"""

import functools
import math
import os
from collections.abc import Callable
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

MOST_WEIGHTS = 2**24  # of those that are merged at a time


def export(
    folder: folder_lib.Folder, adapter: peft.Adapter, path: str | os.PathLike[str], *, dtype: DTypeLike | None = None
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
    tensors, chosen = layout.tensors(folder.family, folder.model), adapter.chosen
    targets.check_merge(chosen)

    def made(tensor: layout.ModelTensor) -> huggingface.Made:
        module = next((path for path in chosen.adapted if tensor.path in chosen.kernels(path)), None)
        read = functools.partial(_of_folders, folder, adapter, tensor, module)
        return huggingface.Made(tensor.leaf_shape, read, _maker(0.0 if module is None else chosen.scale(module)))

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
    leaves = dict(own)
    for path, leaf in own.items():
        if path in found or quantized.is_quantized(leaf):
            shape = quantized.shape_of(leaf) if quantized.is_quantized(leaf) else leaf.shape
            adapter = found.get(path)
            parts = functools.partial(tuple, (leaf, *_arrays(adapter)))
            leaves[path] = huggingface.Made(tuple(shape), parts, _maker(adapter.scale if adapter else 0.0))
    return tree.nested(leaves)


def _arrays(adapter: adapters.KernelAdapter | None) -> list[Any]:
    return [] if adapter is None else [part for part in (adapter.a, adapter.b, adapter.magnitude) if part is not None]


def _maker(scale: float) -> Callable[..., np.ndarray]:
    return functools.partial(_make, scale)


def _make(scale: float, parts: tuple[Any, ...], dtype: np.dtype) -> np.ndarray:
    """Returns a kernel in a dtype, with an adapter merged if `parts` has one.

    Args:
      scale: of the adapter.
      parts: the kernel, quantized or not, and the adapter's weights; or the kernel alone.
      dtype: of what is returned.
    """
    if isinstance(parts[0], np.ndarray) and len(parts) == 1:
        return parts[0].astype(dtype)
    kernel, *given = jax.device_put(parts, jax.local_devices()[0])
    shape = quantized.shape_of(kernel) if quantized.is_quantized(kernel) else kernel.shape
    if any(leaf.shape[0] != shape[0] for leaf in jax.tree.leaves(kernel)):  # scales of several rows
        kernel = _float32(kernel)
    found = np.empty(shape, dtype)
    a, b, magnitude = [*given, None, None, None][:3]
    adapter = adapters.KernelAdapter(a, b, scale, magnitude) if given else None
    size = max(1, MOST_WEIGHTS // math.prod(shape[1:]))
    blocks = [functools.partial(_rows, start=at, size=min(size, shape[0] - at)) for at in range(0, shape[0], size)]

    def merged(rows: Callable[[PyTree], PyTree]) -> jax.Array:
        block = _float32(rows(kernel))
        if adapter is None:
            return block
        a, b = rows(adapter.a.reshape(shape[0], -1, adapter.a.shape[-1])), adapter.b
        return _merge(scale)(block, a, rows(b) if b.ndim > 2 else b)

    by = None
    if adapter is not None and adapter.magnitude is not None:
        squares = sum(_squares(merged(rows), adapter.magnitude.size) for rows in blocks)
        by = adapters.factor(adapter.magnitude, squares)
    for number, rows in enumerate(blocks):
        block = merged(rows) if by is None else _times(merged(rows), by)
        found[number * size : (number + 1) * size] = block.astype(dtype)
    return found


@functools.partial(jax.jit, static_argnames="outputs")
def _squares(block: jax.Array, outputs: int) -> jax.Array:
    return jnp.sum(block.reshape(-1, outputs) ** 2, axis=0)


@jax.jit
def _times(block: jax.Array, by: jax.Array) -> jax.Array:
    return (block.reshape(-1, by.size) * by).reshape(block.shape)


@functools.partial(jax.jit, static_argnames="size")
def _rows(leaves: PyTree, start: int, size: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), leaves)


@jax.jit
def _float32(kernel: Any) -> jax.Array:
    return quantized.dequantize(kernel, jnp.float32) if quantized.is_quantized(kernel) else kernel.astype(jnp.float32)


@functools.lru_cache
def _merge(scale: float) -> Callable[..., jax.Array]:
    def run(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        a = a.reshape(*kernel.shape[: int(b.ndim > 2)], -1, a.shape[-1])
        return adapters.merged(kernel, adapters.KernelAdapter(a, b, scale))

    return jax.jit(run)


def _of_folders(
    folder: folder_lib.Folder, adapter: peft.Adapter, tensor: layout.ModelTensor, module: str | None
) -> tuple[np.ndarray, ...]:
    """Returns a weight of the merged model, and the adapter of its module, in float32."""
    is_there = tensor.path in adapter.tensors
    kernel = _read(adapter, adapter.tensors[tensor.path]) if is_there else _read(folder, tensor)
    if module is None:
        return (kernel,)
    beside, ends = adapter.chosen.adapter(module), adapter.chosen.shapes(module)
    leaves = {end: _read(adapter, adapter.tensors[f"{beside}/{end}"]) for end in ends}
    return (kernel, *_arrays(adapters.of_kernels(module, leaves, adapter.chosen)[tensor.path]))


def _read(source: folder_lib.TensorFiles, tensor: layout.ModelTensor) -> np.ndarray:
    """Returns a whole weight in float32."""
    folder_lib.check_files(source)
    index = tuple(slice(0, size) for size in tensor.leaf_shape)
    return folder_lib.read_shard(source, tensor, index, np.dtype(np.float32))
