"""Writes arrays as a folder of safetensors. This module serves tensors that are on the host already, under the names that they have."""

import json
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np

from zerojax import files
from zerojax.errors import UserError
from zerojax.interop import tensor_files

SHARD_BYTES = 5 * 2**30


def write(
    arrays: Mapping[str, np.ndarray],
    folder: pathlib.Path,
    *,
    carried: Mapping[str, pathlib.Path] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    only_file: str = "",
) -> None:
    """Writes the arrays in their dtypes: `model.safetensors`, or several files and an index.

    Args:
      arrays: by name.
      folder: new or empty.
      carried: other files to copy there (config.json), by their names there.
      max_shard_bytes: limit on the tensors of one file. A larger tensor gets its own file.
      only_file: the name of a file that gets all arrays; "" names them as above.

    Raises:
      UserError: the folder holds files, or the disk is full.
    """
    with files.writing(folder, "make room, or choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        held = next(iter(sorted(folder.iterdir())), None)
        if held is not None:
            raise UserError(f"{folder}: holds {held.name}; choose a new folder")
        shards = {only_file: list(arrays)}
        if not only_file:
            shards = tensor_files.packed(arrays, lambda name: arrays[name].nbytes, max_shard_bytes)
        for name, group in shards.items():
            with open(folder / name, "wb") as file:
                tensor_files.write_header(file, {key: (arrays[key].shape, arrays[key].dtype) for key in group})
                for key in group:
                    file.write(np.ascontiguousarray(arrays[key]).reshape(-1).view(np.uint8).data)
        if len(shards) > 1:
            total = sum(array.nbytes for array in arrays.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {key: name for name, group in shards.items() for key in group},
            }
            (folder / tensor_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name, path in (carried or {}).items():
            shutil.copyfile(path, folder / name)
        tensor_files.write_checksums(folder)
