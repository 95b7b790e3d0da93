"""The safetensors format. This module reads headers and slices of tensors, and writes headers.

A file is the header's length (a little-endian uint64), the header (JSON: {name: {dtype, shape, data_offsets}}), and the tensors' bytes. A
slice is read through a memory map of a few rows at a time, so that a process touches only the bytes that it needs, and never holds more
of a file than `WINDOW_BYTES`.
"""

import contextlib
import json
import math
import mmap
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from zerojax import bounded, errors, files, tree
from zerojax.checkpoint import checksums
from zerojax.errors import UserError
from zerojax.tree import T

CHECKSUMS = "checksums.json"  # of the weights beside it; other programs do not read it
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
WINDOW_BYTES = 32 * 2**20
# Of a row that a slice skips, above which reading ahead would mostly read what is not needed
READ_AHEAD_BYTES = 16 * 2**10
LFS = b"version "  # begins the pointer to a file that Git LFS has not fetched
MOST_HEADER_BYTES = 100 * 10**6  # the format's own limit
MOST_DIMS = 64  # numpy's own limit
# name in a header -> dtype of weights
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# name in a header -> dtype of other tensors
OTHERS: Mapping[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in {**DTYPES, **OTHERS}.items()}


class Entry(NamedTuple):
    """One tensor in a file: its dtype's name there, its shape, and the offset of its first byte."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Returns its bytes."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


def packed(tensors: Iterable[T], nbytes_of: Callable[[T], int], most: int) -> dict[str, list[T]]:
    """Returns {file name: its tensors}, in order, each file up to `most` bytes."""
    files = tree.runs(tensors, nbytes_of, most) or [[]]
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": own for number, own in enumerate(files, 1)}


def read_folder(folder: pathlib.Path) -> dict[str, Entry]:
    """Returns all tensors of a folder, in one file or in those that its index names. Like transformers it reads those that the index omits.

    Raises:
      UserError: there is no safetensors file, the index names a missing file, a file is damaged, or two files hold unequal
        tensors of one name.
    """
    if (folder / ONE_FILE).is_file():
        return read_header(folder / ONE_FILE)
    if not (folder / INDEX).is_file():
        raise UserError(_why_none(folder))
    files = _read_index(folder / INDEX)
    missing = sorted({name for name in files.values() if not os.path.isfile(folder / name)})
    if missing:
        raise UserError(
            f"{folder / INDEX}: names {missing[0]}, which is missing ({len(missing)} of {len(set(files.values()))} files are); "
            "copy the folder again"
        )
    found: dict[str, Entry] = {}
    again: list[tuple[str, Entry]] = []
    for file in sorted(set(files.values())):
        for name, entry in read_header(folder / file).items():
            if name in found or files.get(name, file) != file:
                again.append((name, entry))
            else:
                found[name] = entry
    lost = next((name for name in files if name not in found), None)
    if lost is not None:
        raise UserError(
            f"{folder / files[lost]}: lacks tensor {lost}, which {INDEX} says it holds; copy the folder again"
        )
    for name, entry in again:
        if not is_equal(entry, found[name]):
            raise UserError(
                f"{entry.file}: tensor {name} has other numbers than in {found[name].file.name}; copy the folder again"
            )
    return found


def read_header(path: pathlib.Path) -> dict[str, Entry]:
    """Returns the tensors of one file.

    Raises:
      UserError: the file cannot be read, is truncated, or is not safetensors.
    """
    not_json = "is damaged or not safetensors: its header is not JSON ({}); copy it again"
    with files.reading(path, "fix that or choose another folder", not_json), bounded.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        begins = file.read(8)
        if begins == LFS:
            raise UserError(f"{path}: is a pointer of Git LFS and holds no weights; run git lfs pull in its folder")
        length = int.from_bytes(begins, "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise damaged(path, f"its header would have {length} bytes, and the file has {size}")
        raw = bounded.parse_json(file.read(length), is_strict=True)
    if not isinstance(raw, dict):
        raise damaged(path, "its header is not a table of tensors")
    raw.pop("__metadata__", None)
    data, end, found = 8 + length, 0, {}
    for name, told in sorted(raw.items(), key=_first_byte):
        shape, first, last = _checked(path, name, told)
        if first != end:
            raise damaged(path, f"tensor {name} begins at byte {first}, and the one before it ends at {end}")
        found[name], end = Entry(path, told["dtype"], shape, data + first), last
    if data + end != size:
        raise damaged(path, f"its tensors end at byte {data + end}, and the file has {size}")
    return found


def damaged(path: pathlib.Path, what: str) -> UserError:
    """Returns the error for a file that is not what it should be."""
    return UserError(f"{path}: is damaged or not safetensors: {what}; copy it again")


def read(
    entry: Entry, view: Sequence[int], index: Sequence[slice], order: Sequence[int], dtype: DTypeLike
) -> np.ndarray:
    """Reads a slice of a tensor.

    Args:
      entry: the tensor.
      view: the shape in which it is sliced; it has as many elements as the tensor.
      index: a slice with start and stop for each dim of `view`.
      order: the dims of the result, as dims of `view`.
      dtype: of the result.

    Returns:
      The slice, its dims in `order`.

    Raises:
      UserError: the file has changed since its header was read.
    """
    lengths = [part.stop - part.start for part in index]
    found = np.empty([lengths[dim] for dim in order], dtype)
    if not found.size:
        return found
    target = found.transpose(np.argsort(np.asarray(order, int)))  # the result, with the dims of `view`
    source, row = DTYPES.get(entry.dtype) or OTHERS[entry.dtype], math.prod(view[1:])
    rows = max(1, WINDOW_BYTES // (row * source.itemsize))
    gap = (row - math.prod(lengths[1:])) * source.itemsize
    with _opened(entry.file) as file:
        for first in range(index[0].start, index[0].stop, rows):
            count = min(rows, index[0].stop - first)
            at, offset = first - index[0].start, entry.start + first * row * source.itemsize
            with _mapped(file, offset, count * row * source.itemsize, reads_ahead=gap <= READ_AHEAD_BYTES) as content:
                window = np.frombuffer(content, source).reshape(count, *view[1:])
                target[at : at + count] = window[(slice(None), *index[1:])]
                del window  # a map in use cannot be closed
    return found


@contextlib.contextmanager
def mapped(path: pathlib.Path, offset: int, length: int) -> Iterator[memoryview]:
    """Maps a part of a file whose header has been read. Raises UserError if it has been deleted, or is shorter by now."""
    with _opened(path) as file, _mapped(file, offset, length, reads_ahead=True) as content:
        yield content


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file whose header has been read. Raises UserError if it has been deleted, or is shorter by now."""
    try:
        with bounded.open_file(path) as file:
            yield file
    except (OSError, ValueError) as error:
        raise damaged(path, f"its tensors cannot be read ({errors.first_line(error)})") from error


@contextlib.contextmanager
def _mapped(file: BinaryIO, offset: int, length: int, *, reads_ahead: bool) -> Iterator[memoryview]:
    """Maps a part of a file. Without read-ahead the kernel reads only the pages that are touched."""
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(file.fileno(), skipped + length, access=mmap.ACCESS_READ, offset=offset - skipped) as mapped:
        if not reads_ahead and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        with memoryview(mapped) as whole, whole[skipped:] as content:
            yield content


def is_finite(array: np.ndarray) -> bool:
    """Returns whether a contiguous array holds no NaN and no infinity, as integers do not.

    Read as integers, the bits of NaN and infinity are above those of all numbers of their sign, so two maxima tell. They copy nothing, and
    take 3 to 8% of the time in which a kernel is read and transposed.
    """
    for sign, kind in ((1, "i"), (-1, "u")) if array.dtype.kind not in "iu" else ():
        bits = np.dtype(f"{kind}{array.dtype.itemsize}")
        if array.size and array.view(bits).max() >= np.asarray(sign * np.inf, array.dtype).view(bits):
            return False
    return True


def is_equal(one: Entry, other: Entry) -> bool:
    """Returns whether two tensors of weights have the same shape, dtype and bytes. Reads both. Tensors of other dtypes are not compared."""
    if one[1:3] != other[1:3] or one.dtype not in DTYPES:
        return False
    size, dtype = math.prod(one.shape), DTYPES[one.dtype]
    for first in range(0, size, WINDOW_BYTES):
        index = [slice(first, min(first + WINDOW_BYTES, size))]
        parts = [read(entry, (size,), index, (0,), dtype).tobytes() for entry in (one, other)]
        if parts[0] != parts[1]:
            return False
    return True


def write_header(file: BinaryIO, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Writes the header of a file with these tensors, {name: (shape, dtype)}, in this order. JSON is padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (shape, dtype) in tensors.items():
        end = start + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def write_checksums(folder: pathlib.Path) -> None:
    """Records the bytes and the checksums of a folder's files beside them. Raises OSError if the folder cannot be written."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    checksums.write(folder / CHECKSUMS, checksums.Record(None, checksums.of(folder, names)))


def check(paths: Iterable[pathlib.Path], part: slice = slice(None)) -> None:
    """Compares files of weights with the record beside them, where there is one. Reads them as a whole.

    A config or a tokenizer in the record that has changed or is gone is warned of: users edit these.

    Args:
      paths: the files.
      part: those of them that are read, in the order of their names. The others are another process's.

    Raises:
      UserError: the record is damaged, or a file is another than it was when it was written.
    """
    ordered = sorted(set(paths))
    known = {folder: _recorded(folder / CHECKSUMS) for folder in {path.parent for path in ordered}}
    for path in ordered[part]:
        if _is_changed(path, known[path.parent]):
            raise UserError(_changed(path, "the weights were"))
    for folder, record in known.items() if not part.start else ():
        others = sorted(folder / name for name in record if not name.endswith(".safetensors"))
        for path in others:
            if not os.path.lexists(path):
                warnings.warn(
                    f"{path}: is missing, and was written with the weights; copy the folder again", stacklevel=2
                )
            elif _is_changed(path, record):
                warnings.warn(_changed(path, "it was"), stacklevel=2)


def _is_changed(path: pathlib.Path, record: Mapping[str, checksums.File]) -> bool:
    """Returns whether a file is another than the record of its folder says."""
    with files.reading(path, "fix that"):
        return path.name in record and checksums.of(path.parent, [path.name])[path.name] != record[path.name]


def _recorded(record: pathlib.Path) -> Mapping[str, checksums.File]:
    """Returns the files of a record; none if there is no record."""
    with files.reading(record, "fix that", "{}; copy the folder again"):
        return checksums.read(record).files if os.path.lexists(record) else {}


def _changed(path: pathlib.Path, what: str) -> str:
    return (
        f"{path}: is not what was written: its checksum is another than in {CHECKSUMS}; copy the folder again, or delete that if {what} "
        "changed on purpose"
    )


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Returns {tensor: file name} of an index."""
    try:
        files = bounded.parse_json(bounded.read_bytes(path), is_strict=True)["weight_map"]
        if not all(isinstance(file, str) and pathlib.PurePath(file).name == file for file in files.values()):
            raise UserError(f"{path}: names a file outside of its folder; copy the folder again")
        return dict(files)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix that or choose another folder") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: is not an index with a weight_map; copy the folder again") from error


def _why_none(folder: pathlib.Path) -> str:
    """Returns the error for a folder without safetensors files."""
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder}: holds {pickled[0]}, a pickle, which may run any code and is not read; save it as safetensors "
            "(save_pretrained of transformers does)"
        )
    return f"{folder}: holds neither {ONE_FILE} nor {INDEX}; name a folder that save_pretrained of transformers wrote"


def _first_byte(item: tuple[str, Any]) -> Any:
    """Returns the sort key of a tensor in a header, also if it is malformed."""
    try:
        return tuple(int(offset) for offset in item[1]["data_offsets"])
    except (TypeError, KeyError, ValueError):
        return (-1, -1)


def _checked(path: pathlib.Path, name: str, told: Any) -> tuple[tuple[int, ...], int, int]:
    """Returns the shape and the first and last byte of a tensor, checked against each other."""
    try:
        dtype, shape, (first, last) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(path, f"tensor {name} lacks a dtype, a shape or two offsets") from error
    if not isinstance(dtype, str):
        raise damaged(path, f"the dtype of tensor {name} is {errors.shown(dtype)}")
    numbers = (*shape, first, last)
    if not all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63 for number in numbers):
        raise damaged(path, f"the shape or the offsets of tensor {name} are not whole numbers below 2**63")
    if len(shape) > MOST_DIMS:
        raise damaged(path, f"tensor {name} has {len(shape)} dims")
    known = DTYPES.get(dtype, OTHERS.get(dtype))
    if known is not None and last - first != known.itemsize * math.prod(shape):
        raise damaged(
            path, f"tensor {name} has {last - first} bytes, and its shape {shape} in {dtype} needs another number"
        )
    return shape, first, last
