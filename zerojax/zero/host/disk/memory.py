"""Host memory that a disk reads into and a device copies from. This module allocates it, registers it with CUDA, and hands it to JAX.

Memory that CUDA has registered is handed over as a `pinned_host` array by DLPack (device type kDLCUDAHost): the same bytes, without a copy,
and outside of the pool that JAX pins by itself. XLA's CPU backend takes aligned memory of numpy as its own array, so there the bytes are
copied first.
"""

import ctypes
import functools
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from zerojax.errors import UserError

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: registered for all devices of the process
_CUDA_HOST = 3  # kDLCUDAHost
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # DLDataTypeCode, by numpy's kind
_BFLOAT = 4
_NAME = b"dltensor"


class Buffer:
    """Aligned memory that may be read and written at any time, in one piece.

    Attributes:
      view: uint8[size], the memory.
      is_registered: whether CUDA copies from it as from its own.
    """

    def __init__(self, size: int, devices: Any = ()):
        """Allocates the memory.

        Args:
          size: bytes.
          devices: that shall copy from it; it is registered if they are CUDA's.

        Raises:
          UserError: there is not enough memory, or it cannot be pinned.
        """
        try:
            self._map = mmap.mmap(-1, max(size, 1))
        except (OSError, MemoryError) as error:
            raise UserError(f"offload.chunk_bytes: the host has no {size} bytes for a chunk; lower it") from error
        self.view = np.frombuffer(self._map, np.uint8)[:size]
        self.is_registered = any(device.platform == "gpu" for device in devices) and _driver() is not None
        if self.is_registered:
            self._ordinal = devices[0].local_hardware_id or 0
            self._register(len(self._map))

    def array(self, start: int, shape: tuple[int, ...], dtype: DTypeLike | None) -> np.ndarray:
        """Returns the memory from byte `start` on as an array, without a copy."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.view[start : start + count].view(dtype).reshape(shape)

    def _register(self, size: int) -> None:
        pointer = ctypes.c_void_p(self.view.ctypes.data)
        length, flags = ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE)
        status = _in_context(self._ordinal, lambda: _driver().cuMemHostRegister_v2(pointer, length, flags))
        if status:
            raise UserError(
                f"offload.chunk_bytes: CUDA cannot pin {size} bytes of host memory (error {status}); lower it, or raise the limit of "
                "locked memory (ulimit -l) of this machine or container"
            )
        weakref.finalize(self, _unregister, pointer, self._ordinal)


def _unregister(pointer: ctypes.c_void_p, ordinal: int) -> None:
    _in_context(ordinal, lambda: _driver().cuMemHostUnregister(pointer))


def put(array: np.ndarray, device: jax.Device, *, is_registered: bool) -> jax.Array:
    """Copies host memory to a device's own. The memory must stay as it is until the result is ready."""
    if is_registered and _type(array.dtype) is not None:
        pinned = jax.dlpack.from_dlpack(_Producer(array, (_CUDA_HOST, device.local_hardware_id or 0)))
        return jax.device_put(pinned, jax.sharding.SingleDeviceSharding(device))
    if device.platform == "cpu":
        # The copy becomes the result: `may_alias=False` does not keep this backend from taking numpy's memory
        array = array.copy()
    return jax.device_put(array, jax.sharding.SingleDeviceSharding(device))


class _DLTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h: the tensor, then its manager's context and deleter."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_HELD: dict[int, Any] = {}  # what lives until its consumer deletes the tensor, by the tensor's address


@_DELETER
def _delete(address: int) -> None:
    _HELD.pop(address, None)


class _Producer:
    """Memory as a producer of DLPack, on a device of DLPack: its type and number. `__dlpack__` may be called once."""

    def __init__(self, array: np.ndarray, device: tuple[int, int]):
        self._array, self._device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        array = self._array
        shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        code, bits = _type(array.dtype) or (0, 0)
        tensor = _DLTensor(
            data=array.ctypes.data,
            device_type=self._device[0],
            device_id=self._device[1],
            ndim=array.ndim,
            code=code,
            bits=bits,
            lanes=1,
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
            strides=None,
            byte_offset=0,
            context=None,
            deleter=ctypes.cast(_delete, ctypes.c_void_p),
        )
        address = ctypes.addressof(tensor)
        _HELD[address] = tensor, shape, array
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(address, _NAME, None)


def _type(dtype: DTypeLike | None) -> tuple[int, int] | None:
    """Returns DLPack's code and bits of a dtype; None if JAX does not take it from there."""
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return _BFLOAT, 16
    code = _CODES.get(dtype.kind)
    return None if code is None or dtype.name.startswith(("float8", "int4", "uint4")) else (code, dtype.itemsize * 8)


@functools.cache
def _driver() -> Any:
    """Returns CUDA's driver library, or None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _in_context(ordinal: int, call: Callable[[], int]) -> int:
    """Makes a call of the driver in the context that JAX uses on a device, and returns the first status that is not 0."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    for step in (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: driver.cuCtxPushCurrent_v2(context),
    ):
        status = step()
        if status:
            return status
    try:
        return call()
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
