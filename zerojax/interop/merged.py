"""Writes a model with an adapter merged into it. This module reads, merges and writes one tensor at a time, on the host.

A merged kernel is W + scale * B A, computed in float32 and cast to the dtype that it is written in.
"""

import os
from typing import Any

import numpy as np

from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, layout, peft
from zerojax.lora import adapters, targets


def export(folder: folder_lib.Folder, adapter: peft.Adapter, path: str | os.PathLike, *, dtype: Any = None) -> None:
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
    huggingface.export(
        targets.nested({tensor.path: _Leaf(folder, adapter, tensor) for tensor in tensors}),
        folder.family,
        folder.model,
        path,
        dtype=dtype,
        source=folder.path,
    )


class _Leaf:
    """One weight, which is read and merged when it becomes an array."""

    def __init__(self, folder: folder_lib.Folder, adapter: peft.Adapter, tensor: layout.ModelTensor):
        self._folder, self._adapter, self._tensor = folder, adapter, tensor
        self.shape = tensor.leaf_shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        tensor, (module, _, name) = self._tensor, self._tensor.path.rpartition("/")
        saved = self._adapter.tensors.get(tensor.path)
        if saved is not None:
            found = _read(self._adapter, saved)
        else:
            found = _read(self._folder, tensor)
            if name == targets.KERNEL and module in self._adapter.chosen.adapted:
                a, b = (
                    _read(self._adapter, self._adapter.tensors[f"{module}/{part}"]) for part in (targets.A, targets.B)
                )
                found = adapters.merged(found, a, b, self._adapter.chosen.scale(module))
        return found if dtype is None else found.astype(dtype)


def _read(source: folder_lib.TensorFiles, tensor: layout.ModelTensor) -> np.ndarray:
    """Returns a whole weight in float32."""
    index = tuple(slice(0, size) for size in tensor.leaf_shape)
    return folder_lib.read_shard(source, tensor, index, np.dtype(np.float32))
