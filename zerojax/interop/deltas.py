"""Publishes the weights of a model in training, for programs elsewhere that answer with them. This module writes what changed.

    FOLDER/index.json              {"step": 8, "tensors": {NAME: {"step": 8, "file": "8/weights-00001.safetensors", "checksum": "..."}},
                                    "crc32": ...}
    FOLDER/8/weights-00001.safetensors, ...

Names and layouts are Hugging Face's. A tensor is written if its bytes are others than those that the index knows, so a reader that has step
4 reads the tensors of later steps (scripts/read_deltas.py). The index is replaced when all files of a step are complete: a reader finds the
old step or the new one. Its crc32 is that of the rest as Python's json.dumps writes it; older code wrote none. Files stay while this index
or the one before names them, so a step that comes again is FOLDER/8-2.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from zerojax import bounded, errors, files, tree
from zerojax.checkpoint import checksums
from zerojax.errors import UserError
from zerojax.interop import huggingface, layout, tensor_files
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree

INDEX = "index.json"
FILE_BYTES = 1 << 30  # of the tensors that are held until they are written


class Published(NamedTuple):
    """What was written: the number of tensors, of how many, and their bytes. Zeros on processes that do not write."""

    tensors: int
    of: int
    nbytes: int


def publish(
    params: PyTree,
    family: family_lib.Family,
    model: ModelConfig,
    folder: str | os.PathLike[str],
    step: int,
    *,
    dtype: DTypeLike | None = None,
    source: str | os.PathLike[str] | None = None,
    may_change: Callable[[str], bool] = lambda path: True,
) -> Published:
    """Writes the tensors that changed since the last step that was published. All processes must call it; the first one writes.

    Args:
      params, family, model, dtype, source: see `huggingface.export`.
      folder: new, or with earlier steps.
      step: the step. One that is not above that of the index, as after a resume, is written as a whole.
      may_change: f(path of a weight) -> whether it is read if the index has it; the others are frozen.

    Raises:
      UserError: the index is damaged, or the disk is full.
    """
    folder, is_primary = pathlib.Path(folder), jax.process_index() == 0
    leaves = dict(tree.flatten(params, is_leaf=lambda node: isinstance(node, huggingface.Made)))
    tensors = [member for tensor in layout.written(family, model) for member in tensor.members]
    dtypes = huggingface.dtypes_of(tensors, dtype, source)
    newest, before = _read(folder / INDEX)
    known = {name: entry for name, entry in before.items() if step > newest and os.path.isfile(folder / entry["file"])}
    fetch = huggingface.make_fetch(is_primary)
    found, written = dict(known), 0
    group: list[tuple[layout.ModelTensor, np.ndarray]] = []
    partial = folder / f"{step}.partial"
    # A step that comes again, as after a resume, gets a folder of its own: the index may name files of the first.
    home = next(name for name in _homes(step) if not os.path.lexists(folder / name))

    def write() -> None:
        numbered = sum(1 for _ in partial.iterdir()) + 1
        name = f"weights-{numbered:05}.safetensors"
        with open(partial / name, "wb") as file:
            tensor_files.write_header(file, {tensor.name: (tensor.shape, array.dtype) for tensor, array in group})
            for tensor, array in group:
                file.write(array.view(np.uint8).data)
                found[tensor.name] = {"step": step, "file": f"{home}/{name}", "checksum": checksum(array)}
        group.clear()

    with files.writing(folder, "make room, or choose another folder"):
        if is_primary:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        for tensor in tensors:
            if tensor.name in known and not may_change(tensor.path):
                continue
            fetched = fetch(leaves[tensor.path], dtypes[tensor.name], tensor.part)
            if not is_primary:
                continue
            assert fetched is not None
            array = np.ascontiguousarray(tensor.to_theirs(fetched))
            if known.get(tensor.name, {}).get("checksum") == checksum(array):
                continue
            if group and sum(held.nbytes for _, held in group) + array.nbytes > FILE_BYTES:
                write()
            group.append((tensor, array))
            written += array.nbytes
        if not is_primary:
            return Published(0, 0, 0)
        if group:
            write()
        os.replace(partial, folder / home)
        index = {"step": step, "tensors": found}
        files.replace(folder / INDEX, json.dumps({**index, checksums.CRC32: checksums.of_values(index)}) + "\n")
        _remove(folder, {entry["file"].partition("/")[0] for entries in (before, found) for entry in entries.values()})
    changed = sum(entry["step"] == step for entry in found.values())
    return Published(changed, len(tensors), written)


def checksum(array: np.ndarray) -> str:
    """Returns the BLAKE2b of an array's bytes, 16 bytes in hexadecimal."""
    return hashlib.blake2b(array.view(np.uint8).data, digest_size=16).hexdigest()


def _read(path: pathlib.Path) -> tuple[int, Mapping[str, Any]]:
    """Returns the step and the tensors of an index, by name; -1 and none if there is no index."""
    try:
        found = bounded.parse_json(bounded.read_bytes(path))
        if checksums.is_altered(found):
            raise ValueError("its checksum differs")
        types = {"step": int, "file": str, "checksum": str}
        return int(found["step"]), {
            name: {key: of(entry[key]) for key, of in types.items()} for name, entry in found["tensors"].items()
        }
    except FileNotFoundError:
        return -1, {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path}: is no index of weights ({errors.one_line(error)}); delete the folder") from error


def _homes(step: int) -> Iterator[str]:
    """Yields names for the folder of a step: 8, 8-2, 8-3, ..."""
    yield str(step)
    yield from (f"{step}-{number}" for number in itertools.count(2))


def _remove(folder: pathlib.Path, kept: set[str]) -> None:
    """Removes the steps that no index names."""
    for path in folder.iterdir():
        if path.is_dir() and re.fullmatch(r"\d+(-\d+)?", path.name) and path.name not in kept:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
