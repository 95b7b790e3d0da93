"""Checks memory that JAX takes without a copy. This module tests zerojax.zero.host.disk.memory.

CUDA is not there: its driver is replaced by a list of calls, and DLPack's tensors are handed over as memory of the CPU.
"""

import ctypes
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.zero.host.disk import memory

GPU = types.SimpleNamespace(platform="gpu", local_hardware_id=3)
_CPU = 1  # kDLCPU


class Driver:
    """Notes the calls of CUDA's driver."""

    def __init__(self, statuses=()):
        self.calls, self._statuses = [], dict(statuses)

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self.calls.append((name, args)) or self._statuses.get(name, 0)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int8, np.uint8, np.int32])
def test_a_tensor_handed_over_is_the_same_memory_until_jax_drops_it(dtype):
    gc.freeze()  # only what this test made is collected, which takes no time
    buffer = memory.Buffer(4096)
    view = buffer.array(512, (3, 5), dtype)
    view[:] = np.arange(15).reshape(3, 5)
    array = jax.dlpack.from_dlpack(memory._Producer(view, (_CPU, 0)))
    assert array.dtype == dtype and array.shape == (3, 5) and np.array_equal(array, view)
    assert array.unsafe_buffer_pointer() == view.ctypes.data and memory._HELD
    del array
    gc.collect()
    assert not memory._HELD


def test_a_copy_to_a_device_does_not_change_with_the_memory():
    view = memory.Buffer(4096).array(0, (1024,), np.float32)
    copied = jax.block_until_ready(memory.put(view, jax.devices()[1], is_registered=False))
    view[:] = 1
    assert copied.devices() == {jax.devices()[1]} and not copied.any()


def test_memory_for_a_gpu_is_registered_in_its_context_and_released(monkeypatch):
    gc.freeze()
    driver = Driver()
    monkeypatch.setattr(memory, "_driver", lambda: driver)
    buffer = memory.Buffer(8192, [GPU])
    assert buffer.is_registered
    names = [name for name, _ in driver.calls]
    assert (
        names
        == "cuInit cuDeviceGet cuDevicePrimaryCtxRetain cuCtxPushCurrent_v2 cuMemHostRegister_v2 cuCtxPopCurrent_v2".split()
    )
    arguments = dict(driver.calls)
    assert arguments["cuDeviceGet"][1].value == 3
    pointer, size, flags = arguments["cuMemHostRegister_v2"]
    assert (pointer.value, size.value, flags.value) == (buffer.view.ctypes.data, 8192, 1)
    assert isinstance(size, ctypes.c_size_t)
    del buffer
    gc.collect()
    assert dict(driver.calls)["cuMemHostUnregister"][0].value == pointer.value


def test_memory_that_cannot_be_pinned_is_one_line_and_without_a_driver_it_is_plain(monkeypatch):
    driver = Driver({"cuMemHostRegister_v2": 2})
    monkeypatch.setattr(memory, "_driver", lambda: driver)
    with pytest.raises(UserError, match=r"^offload.chunk_bytes: CUDA cannot pin 4096 bytes of .*\(error 2\); lower it"):
        memory.Buffer(4096, [GPU])
    assert driver.calls[-1][0] == "cuCtxPopCurrent_v2"
    monkeypatch.setattr(memory, "_driver", lambda: None)
    assert not memory.Buffer(4096, [GPU]).is_registered


def test_a_dtype_that_dlpack_lacks_is_copied_by_jax():
    assert memory._type(jnp.float8_e4m3fn) is None and memory._type(jnp.int4) is None
    assert memory._type(jnp.bfloat16) == (4, 16) and memory._type(np.bool_) == (6, 8)
