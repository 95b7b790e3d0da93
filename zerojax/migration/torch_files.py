"""Reads files that `torch.save` wrote, without PyTorch. This module builds tensors and plain values from them, and nothing else.

A file is a zip archive: a pickle, and one entry of raw bytes for each storage. A pickle may name any function of Python to be called. The
unpickler here knows a table of names and refuses all others, before anything of the file is built; so reading runs no code of the file.
Storages are mapped from the disk: a tensor's bytes are read when they are used.
"""

import collections
import collections.abc
import dataclasses
import io
import math
import os
import pathlib
import pickle
import pickletools
import re
import struct
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from zerojax import bounded, errors
from zerojax.errors import UserError
from zerojax.train_state import State

_MOST_PICKLE_BYTES, _MOST_OPCODES = 2**27, 2**22  # a pickle's objects take up to 250 bytes each
_MOST_VALUES = 2**24
_MOST_BUILT = 2**22  # items, or 64 characters, that are given to functions of a file: most of these copy what they get
# Integers of 61 bits and more. Python hashes a few of them alike, and a table of many such keys takes hours
_MOST_LARGE = 1000
_MOST_JOINED = 4096  # characters of a path or of a device's name
_MOST_PACKED = 2**28  # bytes of compressed storages, which are unpacked in memory; torch.save compresses none
_PIECE = 2**24  # bytes
_DTYPES: Mapping[str, np.dtype] = {
    "Float": np.dtype(np.float32),
    "Double": np.dtype(np.float64),
    "Half": np.dtype(np.float16),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
    "Long": np.dtype(np.int64),
    "Int": np.dtype(np.int32),
    "Short": np.dtype(np.int16),
    "Char": np.dtype(np.int8),
    "Byte": np.dtype(np.uint8),
    "Bool": np.dtype(np.bool_),
}
_NAMED = "float32 float float64 double float16 half bfloat16 int64 long int32 int int16 short int8 uint8 bool complex64".split()


class PickledObject:
    """An object of a class that is not built: its name, and its fields as plain values."""

    def __init__(self, name: str, *arguments: Any):
        self.__dict__["_name"], self.__dict__["_arguments"] = name, arguments

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default."""
        return self.__dict__.get(name, default)


class _Sealed:
    """Takes no state from a pickle, which otherwise could change it for later files."""

    __slots__ = ()

    def __setstate__(self, state: State) -> NoReturn:
        raise ValueError("a state is given to what has none")


class _Builder(_Sealed):
    """A function that a pickle may call."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        _charge(*arguments)
        return self._function(*arguments)


_built = threading.local()  # .count: items that functions of the file that this thread reads were given


def _charge(*arguments: Any) -> None:
    """Counts what functions of a file are given. Raises ValueError if it is too much."""
    sized = [one for one in arguments if isinstance(one, collections.abc.Sized)]
    _built.count += 1 + sum(len(one) // 64 if isinstance(one, str | bytes) else len(one) for one in sized)
    if _built.count > _MOST_BUILT:
        raise ValueError(f"its functions are given more than {_MOST_BUILT} items")


@dataclasses.dataclass(frozen=True)
class _Storage(_Sealed):
    """One entry of raw bytes, as a flat array."""

    array: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Constant(_Sealed):
    """A name that stands for itself, such as a dtype of PyTorch."""

    name: str


def read(path: pathlib.Path) -> Any:
    """Returns the content of a file: nested plain values, with numpy arrays for tensors.

    Raises:
      UserError: the file is missing, damaged, of PyTorch's format before 1.6, or names something that is neither a tensor nor a plain
        value. Nothing of it was built or called.
    """
    try:
        with bounded.open_file(path) as file, zipfile.ZipFile(file) as archive:
            return _load(path, archive)
    except UserError:
        raise
    except zipfile.BadZipFile as error:
        raise UserError(
            f"{path}: is not a zip archive; it is damaged, or of PyTorch before 1.6: load and save it there once"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix that") from error
    except Exception as error:  # a damaged pickle may end in any error
        what = f"{type(error).__name__}: {errors.one_line(error, 160)}"
        raise UserError(f"{path}: is damaged ({what}); copy it again") from error


def written_as(path: pathlib.Path) -> str:
    """Returns the name without its end under which `torch.save` wrote a file, or "" if the file does not say. A copy keeps it."""
    try:
        with bounded.open_file(path) as file, zipfile.ZipFile(file) as archive:
            return next((info.filename.split("/")[0] for info in archive.infolist()), "")
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, struct.error):
        return ""  # `read` says why


def _load(path: pathlib.Path, archive: zipfile.ZipFile) -> Any:
    pickles = [info for info in archive.infolist() if info.filename.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1 or pickles[0].file_size > _MOST_PICKLE_BYTES:
        raise UserError(f"{path}: holds no data.pkl of torch.save; name a file that torch.save wrote")
    folder = pickles[0].filename.split("/")[0]
    order = f"{folder}/byteorder"
    if order in archive.namelist() and _unpacked(archive, archive.getinfo(order), 64).strip() != b"little":
        raise UserError(f"{path}: was saved on a big-endian machine, which is not read; save it on another")
    content = _unpacked(archive, pickles[0], _MOST_PICKLE_BYTES)
    _check_opcodes(content)
    _built.count = 0
    found = _Unpickler(path, archive, folder, content).load()
    _count_values(found, {})
    return found


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """Returns the bytes of an entry that may be compressed, as deflate does it, and never more than it says.

    Raises:
      ValueError: it has more than `most` bytes, fewer than it says, or another checksum.
    """
    if info.file_size > most or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"{info.filename} would have {info.file_size} bytes, and at most {most} are unpacked by deflate"
        )
    with archive.open(info) as file:
        content = file.read(info.file_size)
    if len(content) != info.file_size or zlib.crc32(content) != info.CRC:
        raise ValueError(f"{info.filename} has {len(content)} bytes of {info.file_size}, or another checksum")
    return content


def _check_opcodes(content: bytes) -> None:
    """Refuses a pickle of too many objects, of too many large integers, or that numbers an object higher than it has bytes: Python would
    fill a table of that many entries.

    Raises:
      ValueError: it does, or is no pickle.
    """
    large = 0
    for count, (opcode, number, _) in enumerate(pickletools.genops(content)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(number or 0) > len(content):
            raise ValueError(f"object {number} in a pickle of {len(content)} bytes")
        large += isinstance(number, int) and abs(number) >= sys.hash_info.modulus
        if large > _MOST_LARGE:
            raise ValueError(f"more than {_MOST_LARGE} integers of 61 bits and more")
        if count > _MOST_OPCODES:
            raise ValueError(f"a pickle of more than {_MOST_OPCODES} objects")


def _count_values(part: object, sizes: dict[int, int | None]) -> int:
    """Returns the number of values in a part. A pickle may name a part many times, or inside itself.

    Args:
      part: of the content.
      sizes: {id: the number of values} of the parts seen so far; None for those that this one is inside of.

    Raises:
      ValueError: a part holds itself, or there are too many values.
    """
    if isinstance(part, PickledObject):
        part = part.__dict__
    if not isinstance(part, (Mapping, list, tuple, set, frozenset)):
        return 1
    known = sizes.get(id(part), 0)
    if known is None:
        raise ValueError("a part holds itself")
    if not known:
        sizes[id(part)] = None
        inner = [*part.keys(), *part.values()] if isinstance(part, Mapping) else part
        known = 1 + sum(_count_values(one, sizes) for one in inner)
        if known > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values, repeated ones counted")
        sizes[id(part)] = known
    return known


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows the names of `_KNOWN` alone."""

    def __init__(self, path: pathlib.Path, archive: zipfile.ZipFile, folder: str, content: bytes):
        super().__init__(io.BytesIO(content))
        self._path, self._archive, self._folder = path, archive, folder
        self._storages: dict[str, _Storage] = {}
        self._packed = self._mapped = 0  # bytes of storages: of compressed ones, and of those in the file as they are

    def find_class(self, module: str, name: str) -> Any:
        """Returns what stands for a name of the file.

        Raises:
          UserError: the name is not known.
        """
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if (
            module in ("torch", "torch.storage")
            and name.removesuffix("Storage") in _DTYPES
            and name.endswith("Storage")
        ):
            return _Constant(name.removesuffix("Storage"))
        if full in ("torch.UntypedStorage", "torch.storage.UntypedStorage"):
            return _Constant("Byte")
        if module == "torch" and name in _NAMED:
            return _Constant(f"torch.{name}")
        raise UserError(
            f"{self._path}: names {full}, which is neither a tensor nor a plain value; nothing of the file was run. "
            "If you trust it, load it with PyTorch and save it without that object"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """Returns a storage: ("storage", type, key, device, elements)."""
        kind, of, key, _, elements = pid
        if kind != "storage" or not isinstance(of, _Constant) or not isinstance(key, str):
            raise ValueError("an unknown kind of storage")
        if key not in self._storages:
            self._storages[key] = _Storage(self._map(f"{self._folder}/data/{key}", _DTYPES[of.name], int(elements)))
        return self._storages[key]

    def _map(self, name: str, dtype: np.dtype, elements: int) -> np.ndarray:
        """Returns the bytes of an entry as a flat array, mapped from the disk where they are stored uncompressed."""
        info = self._archive.getinfo(name)
        if info.file_size != elements * dtype.itemsize:
            raise ValueError(f"{name} has {info.file_size} bytes, and {elements} {dtype} elements need another number")
        if info.compress_type != zipfile.ZIP_STORED or not elements:
            self._packed += info.file_size
            return np.frombuffer(_unpacked(self._archive, info, _MOST_PACKED - self._packed + info.file_size), dtype)
        with bounded.open_file(self._path) as file:  # the local header may be longer than the one in the directory
            self._mapped += info.file_size
            if self._mapped > os.fstat(file.fileno()).st_size:
                raise ValueError("storages overlap")
            file.seek(info.header_offset)
            header = file.read(30)
        start = (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )
        mapped = np.memmap(self._path, dtype, "r", start, (elements,))
        if _crc32(mapped.view(np.uint8)) != info.CRC:
            raise ValueError(
                f"the checksum of {name} is another; if it was saved under set_crc32_options(False), save it without"
            )
        return mapped


def _crc32(content: np.ndarray) -> int:
    """Returns the CRC-32 of uint8[n], read from the disk piece by piece."""
    found = 0
    for first in range(0, content.size, _PIECE):
        found = zlib.crc32(content[first : first + _PIECE].tobytes(), found)
    return found


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> np.ndarray:
    """Returns a view of a storage.

    Raises:
      ValueError: the view would leave the storage, or be larger than it.
    """
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    shape, steps, flat = tuple(map(int, size)), tuple(map(int, stride)), storage.array
    last = int(offset) + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    is_empty = 0 in shape
    if (
        min((0, int(offset), *shape, *steps)) < 0
        or (not is_empty and last >= flat.size)
        or math.prod(shape) > flat.size
    ):
        raise ValueError(f"a tensor of shape {shape} leaves its storage of {flat.size} elements")
    if is_empty:
        return np.empty(shape, flat.dtype)
    strides = [step * flat.itemsize for step in steps]
    return np.lib.stride_tricks.as_strided(flat[int(offset) :], shape, strides, writeable=False)


def _of_type(build: Any, _: Any, arguments: Any, __: Any) -> Any:
    """Returns a tensor with attributes of its own, without them."""
    if build not in (_KNOWN["torch._utils._rebuild_tensor_v2"], _KNOWN["torch._utils._rebuild_tensor"]):
        raise ValueError("a tensor of an unknown kind")
    return build(*arguments)


def _parameter(data: Any, *_: Any) -> Any:
    if not isinstance(data, np.ndarray):
        raise ValueError("a parameter without a tensor")
    return data


def _number(value: object, *_: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("a number that is none")
    return value


def _size(sizes: Any = ()) -> tuple[int, ...]:
    return tuple(map(int, sizes))


def _joined(between: str) -> Callable[..., str]:
    """Returns a function that joins short texts and numbers."""

    def join(*parts: Any) -> str:
        if not all(isinstance(part, (str, int)) for part in parts):
            raise ValueError("a text of other parts than texts")
        if sum(len(part) if isinstance(part, str) else 20 for part in parts) > _MOST_JOINED:
            raise ValueError(f"a path or a device of more than {_MOST_JOINED} characters")
        return between.join(map(str, parts))

    return join


def _encode(text: str, encoding: str) -> bytes:
    """Returns the bytes that protocol 2 writes as a text."""
    if encoding != "latin1" or not isinstance(text, str):
        raise ValueError("a text in an unknown encoding")
    return text.encode("latin1")


class _NumpyDtype:
    """A dtype of numpy: plain numbers, little-endian."""

    def __init__(self, name: str, *_: Any):
        if not isinstance(name, str) or not re.fullmatch("[fiu][1248]|b1|c8|c16", name):
            raise ValueError(f"an array of {errors.shown(name)}")
        self.__dict__["dtype"] = np.dtype(name)

    def __setstate__(self, state: State) -> None:
        if state[1] == ">":
            raise ValueError("a big-endian array")


class _NumpyArray:
    """An array of numpy, which nothing here reads: random states and what else a program saves beside its weights."""

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: State) -> None:
        pass


def _numpy_scalar(of: Any, content: object = b"") -> Any:
    if not isinstance(of, _NumpyDtype) or not isinstance(content, bytes):
        raise ValueError("a scalar of an unknown kind")
    (value,) = np.frombuffer(content, of.__dict__["dtype"])
    return value.item()


class _Text(_Sealed, str):
    """A text with a class of its own."""

    __slots__ = ()


def _record(name: str) -> type[PickledObject]:
    """Returns a class whose instances keep a name and fields."""

    def build(self: Any, *arguments: Any) -> None:
        PickledObject.__init__(self, name, *arguments)

    return type(name.rpartition(".")[2], (PickledObject,), {"__init__": build, "__setstate__": _set_fields})


def _set_fields(self: Any, fields: Any) -> None:
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError("an object whose fields are not a table")
    _charge(fields)
    self.__dict__.update(fields)


_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
    "types.SimpleNamespace",
)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda *pairs: collections.OrderedDict(*pairs),
    "collections.defaultdict": lambda *_: {},
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _size,
    "torch.device": _joined(":"),
    "pathlib.PosixPath": _joined("/"),
    "pathlib.WindowsPath": _joined("/"),
    "_codecs.encode": _encode,
    "numpy.dtype": _NumpyDtype,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _NumpyArray,
    "numpy._core.multiarray._reconstruct": _NumpyArray,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _number,
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": _joined(":"),
}
_KNOWN: Mapping[str, Any] = {
    "torch.Tensor": _Constant("torch.Tensor"),
    "torch.nn.parameter.Parameter": _Constant("torch.nn.Parameter"),
    "numpy.ndarray": _Constant("numpy.ndarray"),
    "torch.torch_version.TorchVersion": _Text,
    **{name: _Builder(function) for name, function in _FUNCTIONS.items()},
    **{name: _record(name) for name in _RECORDS},
}
