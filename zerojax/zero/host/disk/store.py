"""Arrays that live in a file between their uses. This module reads them to the device and writes them back, beside other work.

    reading   a thread takes requests in order: it waits for a free buffer and for the array's last write, then hands the read to the pool
    arriving  a thread sends what was read to the device, waits for the copy, and frees the buffer
    writing   a thread waits for an array that leaves the device, hands the write to the pool, and drops the array

The pool's threads move one part of a few megabytes each, and wait for nothing else. So the host's memory is bounded by the buffers and by
the writes that are allowed at once, and a failed part reaches whoever waits for it: nothing waits for ever.

A `DiskArray` stands in a train state where its jax.Array stood. Its file is written in place, so writing makes the old `DiskArray` invalid,
as donation does with a jax.Array.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.errors import UserError
from zerojax.tree import Leaf
from zerojax.zero.host.disk import memory, scratch

PART_BYTES = 8 << 20  # of one call to the kernel
THREADS = 8  # calls at once
WRITES = 4  # groups of arrays that leave at once

Future = concurrent.futures.Future


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a store moves its arrays."""

    folder: str  # whose disk holds the file
    buffers: int = 4  # runs of arrays that were read and are not on the device yet; at least 1
    # bytes of each buffer. Arrays that are asked for together are read in runs that fit. A buffer that is too small for an array is
    # replaced.
    buffer_bytes: int = 0
    threads: int = THREADS  # calls to the kernel at once
    part_bytes: int = PART_BYTES  # bytes of one call, a multiple of the alignment


class FileShard:
    """The part of an array that a device holds, as a shard of a jax.Array describes it. `data` is read when it is asked for."""

    def __init__(self, array: "DiskArray", device: jax.Device, index: Any, replica_id: int):
        self._array, self.device, self.index, self.replica_id = array, device, index, replica_id

    @property
    def data(self) -> np.ndarray:
        return self._array.read(key_of(self.index))


class DiskArray:
    """An array whose shards of this process lie in a store's file. It has the shape, dtype and sharding of the array that it stands for.

    Attributes:
      shape, dtype: of the global array.
      sharding: of the array where it is in host memory.
      places: the first byte of each distinct shard of this process in the file, by the shard's index.
      writing: ends when its bytes are in the file.
    """

    def __init__(self, store: "Store", abstract: jax.ShapeDtypeStruct, places: Mapping[Any, int], writing: Future):
        self.store, self.places, self.writing = store, places, writing
        self.shape, self.dtype, self.sharding = tuple(abstract.shape), np.dtype(abstract.dtype), abstract.sharding
        self._is_deleted = False

    is_in_file = True  # tells the checkpoint, which imports no offload
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    is_fully_addressable = property(lambda self: self.sharding.is_fully_addressable)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.shape)

    @property
    def shard_bytes(self) -> int:
        return math.prod(self.shard_shape) * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Returns whether its bytes in the file are another array's."""
        return self._is_deleted

    def is_ready(self) -> bool:
        """Returns whether its bytes are in the file."""
        return self.writing.done()

    def block_until_ready(self) -> "DiskArray":
        """Waits until its bytes are in the file."""
        self.writing.result()
        return self

    def delete(self) -> None:
        """Makes it invalid. Its place in the file stays taken."""
        self._is_deleted = True

    def read(self, index: Any) -> np.ndarray:
        """Reads one of its distinct shards into new memory."""
        self.check()
        self.block_until_ready()
        return self.store.read(self.places[index], self.shard_shape, self.dtype)

    def shards(self) -> dict[Any, np.ndarray]:
        """Reads its distinct shards of this process into new memory, by index."""
        return {index: self.read(index) for index in self.places}

    def to_host(self) -> jax.Array:
        """Reads it into an array with its sharding, in host memory."""
        by_index = self.shards()
        placed = []
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            there = jax.sharding.SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind)
            placed.append(jax.device_put(by_index[key_of(index)], there))
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed, dtype=self.dtype)

    @property
    def addressable_shards(self) -> list[FileShard]:
        """Returns the shards of this process's devices, which are read when their data are asked for."""
        seen: collections.Counter = collections.Counter()
        found = []
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            if device in self.sharding.addressable_devices:
                found.append(FileShard(self, device, index, seen[key_of(index)]))
            seen[key_of(index)] += 1
        return found

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy
        whole = np.empty(self.shape, self.dtype)
        if not self.is_fully_addressable:
            raise RuntimeError(f"{self!r} has shards of other processes, which only they can read")
        for index, shard in self.shards().items():
            whole[tuple(slice(*part) for part in index)] = shard
        return whole if dtype is None else whole.astype(dtype)

    def check(self) -> None:
        """Refuses to be used after `delete`."""
        if self._is_deleted:
            raise RuntimeError(f"{self!r} has been deleted: a step wrote its successor over it")

    def __repr__(self) -> str:
        return f"DiskArray({self.dtype.name}[{','.join(map(str, self.shape))}] in {self.store.folder})"


@dataclasses.dataclass(frozen=True)
class Arriving:
    """One of the arrays that come to the device together."""

    together: "Future[list[jax.Array]]"
    number: int

    def result(self, timeout: float | None = None) -> jax.Array:
        """Waits for the array, at most `timeout` seconds."""
        return self.together.result(timeout)[self.number]


def key_of(index: Sequence[slice]) -> tuple[tuple[int | None, int | None], ...]:
    """Returns the index of a shard as a value that can be a key."""
    return tuple((part.start, part.stop) for part in index)


@dataclasses.dataclass
class _Request:
    """Arrays that are read together. `parts` are the reads; `buffer` is theirs from when it is set."""

    arrays: Sequence[DiskArray]
    is_sent: threading.Event = dataclasses.field(default_factory=threading.Event)
    parts: list[Future] = dataclasses.field(default_factory=list)
    buffer: memory.Buffer | None = None
    error: BaseException | None = None


class _Moving:
    """What a store's threads share: the file, the pool that reads and writes it, the free buffers, and the requests in their order.

    Attributes:
      changed: guards what follows.
      requests: not handed to the pool yet.
      free: buffers that nobody reads into or from.
      num_leaving: groups of arrays that are being written.
      failure: the first error of any thread, as its type and text: an error itself would keep the store alive by its frames.
    """

    def __init__(self, settings: Settings, file: scratch.Scratch, devices: Sequence[Any]):
        self.file, self._part_bytes, self._devices = file, settings.part_bytes, devices
        self.pool = concurrent.futures.ThreadPoolExecutor(settings.threads, "offload.disk")
        self.changed = threading.Condition()
        self.requests: collections.deque[_Request] = collections.deque()
        self.free = [memory.Buffer(settings.buffer_bytes, devices) for _ in range(settings.buffers)]
        self.num_leaving = 0
        self.failure: tuple[type[Exception], str] | None = None
        self.is_open = True
        threading.Thread(target=self._read_requests, name="offload.reading", daemon=True).start()

    def read(self, view: np.ndarray, place: int) -> list[Future]:
        """Hands a read to the pool, in parts."""
        return self._parts(self.file.read, view, place)

    def write(self, array: np.ndarray, place: int) -> list[Future]:
        """Hands a write to the pool, in parts. The array stays alive until they end."""
        return self._parts(self.file.write, np.ascontiguousarray(array).reshape(-1).view(np.uint8), place)

    def _parts(self, call: Callable[..., None], view: np.ndarray, place: int) -> list[Future]:
        step = self._part_bytes
        return [self.pool.submit(call, view[at : at + step], place + at) for at in range(0, len(view), step)]

    def ask(self, request: _Request) -> None:
        """Appends a request."""
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    def give_back(self, request: _Request) -> None:
        """Frees a request's buffer, when its reads have ended."""
        _wait(request.parts)
        with self.changed:
            assert request.buffer is not None
            self.free.append(request.buffer)
            self.changed.notify_all()

    def drop(self, request: _Request) -> None:
        """Frees the buffer of a request that nobody will load."""
        request.is_sent.wait()
        self.give_back(request)

    def fail(self, error: BaseException) -> None:
        """Notes an error, which every later call of the store raises."""
        with self.changed:
            self.failure = self.failure or (UserError if isinstance(error, UserError) else RuntimeError, str(error))
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the threads when they have done what was begun."""
        with self.changed:
            self.is_open = False
            self.changed.notify_all()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _read_requests(self) -> None:
        """Hands requests to the pool, in their order. Runs as a thread."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self.is_open or (self.requests and self.free))
                if not self.is_open:
                    return
                request = self.requests.popleft()
                request.buffer = self.free.pop()
            self._send(request)
            del request  # so that this thread keeps no store alive

    def _send(self, request: _Request) -> None:
        try:
            buffer, start = request.buffer, 0
            assert buffer is not None
            needed = sum(map(bytes_of, request.arrays))
            if len(buffer.view) < needed:
                buffer = request.buffer = memory.Buffer(needed, self._devices)
            for array in request.arrays:
                array.block_until_ready()
                size = scratch.aligned(array.shard_bytes)
                for place in array.places.values():
                    request.parts += self.read(buffer.view[start : start + size], place)
                    start += size
        except BaseException as error:  # reaches whoever waits for the request
            request.error = error
        request.is_sent.set()


class Store:
    """The arrays of one process in one file. It is closed when nothing refers to it or to one of its arrays.

    Attributes:
      folder: where its file takes its space.
      size: bytes of the file.
      is_direct: whether it is read and written past the page cache.
    """

    def __init__(self, settings: Settings, abstract: Sequence[jax.ShapeDtypeStruct]):
        """Takes the space of all arrays that will be put.

        Args:
          settings: see `Settings`.
          abstract: the arrays, with their shardings.

        Raises:
          UserError: the folder cannot be used, its disk has no room, or the host has no memory for the buffers.
        """
        devices = [device for leaf in abstract for device in leaf.sharding.addressable_devices][:1]
        file = scratch.Scratch(settings.folder, sum(bytes_of(leaf) for leaf in abstract))
        self.folder, self.size, self.is_direct = file.folder, file.size, file.is_direct
        self._moving, self._next, self._buffer_bytes = _Moving(settings, file, devices), 0, settings.buffer_bytes
        self._ahead: collections.deque[_Request] = collections.deque()  # asked for ahead and not loaded yet
        self._arriving = concurrent.futures.ThreadPoolExecutor(2, "offload.arriving")
        self._writing = concurrent.futures.ThreadPoolExecutor(2, "offload.writing")
        self._finalizer = weakref.finalize(self, _close, self._moving, self._arriving, self._writing)

    def put(self, array: jax.Array) -> DiskArray:
        """Gives an array in host memory a place in the file, and begins to write it there."""
        size, places = scratch.aligned(_shard_bytes(array)), {}
        for index in _indices(array):
            places[index] = self._next
            self._next += size
        assert self._next <= self.size, "the store was made for fewer arrays"
        abstract = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return self._write([(array, abstract, places)])[0]

    def replace(self, old: Sequence[DiskArray], new: Sequence[jax.Array]) -> list[DiskArray]:
        """Begins to write arrays in host memory over others of their shapes, which become invalid. Waits while many are on their way."""
        for array in old:
            array.check()
            array.delete()
        return self._write(
            [
                (array, jax.ShapeDtypeStruct(was.shape, was.dtype, sharding=was.sharding), was.places)
                for array, was in zip(new, old, strict=True)
            ]
        )

    def prefetch(self, arrays: Sequence[DiskArray]) -> None:
        """Begins to read arrays as soon as buffers are free. What was prefetched together must be loaded so, in the same order."""
        self._ahead.extend(map(self._request, self._runs(arrays)))

    def load(self, arrays: Sequence[DiskArray], shardings: Sequence[Any]) -> list["Arriving"]:
        """Begins to bring arrays to the device. Those that were not prefetched are read now."""
        arriving: list[Arriving] = []
        for run in self._runs(arrays):
            if self._ahead and list(map(id, self._ahead[0].arrays)) == list(map(id, run)):
                request = self._ahead.popleft()
            else:
                self._forget()
                request = self._request(run)
            placed = self._arriving.submit(self._arrive, request, list(shardings[len(arriving) :][: len(run)]))
            arriving += [Arriving(placed, number) for number in range(len(run))]
        return arriving

    def read(self, place: int, shape: tuple[int, ...], dtype: DTypeLike | None) -> np.ndarray:
        """Returns an array from the file, in new memory."""
        self._check()
        buffer = memory.Buffer(scratch.aligned(math.prod(shape) * np.dtype(dtype).itemsize))
        _all(self._moving.read(buffer.view, place))
        return buffer.array(0, shape, dtype)

    def flush(self) -> None:
        """Waits until all writes have ended.

        Raises:
          UserError: one failed.
        """
        with self._moving.changed:
            self._moving.changed.wait_for(lambda: not self._moving.num_leaving)
        self._check()

    def close(self) -> None:
        """Ends the threads and frees the space. The arrays can be used no more."""
        self._finalizer()

    def _request(self, arrays: Sequence[DiskArray]) -> _Request:
        self._check()
        for array in arrays:
            array.check()
        request = _Request(list(arrays))
        self._moving.ask(request)
        return request

    def _forget(self) -> None:
        """Drops what was asked for ahead, by a step that did not end or of a state that is used no more."""
        for request in self._ahead:
            self._arriving.submit(self._moving.drop, request)
        self._ahead.clear()

    def _runs(self, arrays: Sequence[DiskArray]) -> list[list[DiskArray]]:
        """Returns the arrays in runs that fit into a buffer each, or of one array."""
        return tree.runs(arrays, bytes_of, self._buffer_bytes)

    def _arrive(self, request: _Request, shardings: Sequence[Any]) -> list[jax.Array]:
        """Returns a request's arrays on the device. Runs in a thread."""
        request.is_sent.wait()
        buffer = request.buffer
        assert buffer is not None
        try:
            if request.error is not None:
                raise request.error
            _all(request.parts)
            arrays, start = [], 0
            for array, sharding in zip(request.arrays, shardings, strict=True):
                by_index = {}
                for index in array.places:
                    by_index[index] = buffer.array(start, array.shard_shape, array.dtype)
                    start += scratch.aligned(array.shard_bytes)
                placed = [
                    memory.put(by_index[key_of(index)], device, is_registered=buffer.is_registered)
                    for device, index in sharding.addressable_devices_indices_map(array.shape).items()
                ]
                arrays.append(jax.make_array_from_single_device_arrays(array.shape, sharding, placed))
            return jax.block_until_ready(arrays)
        except BaseException as error:
            self._moving.fail(error)
            raise
        finally:
            self._moving.give_back(request)

    def _write(self, what: Sequence[tuple[jax.Array, jax.ShapeDtypeStruct, Mapping[Any, int]]]) -> list[DiskArray]:
        moving = self._moving
        with moving.changed:
            moving.changed.wait_for(lambda: moving.num_leaving < WRITES or moving.failure is not None)
            self._check()
            moving.num_leaving += 1
        done: Future = concurrent.futures.Future()
        self._writing.submit(_leave, moving, [(array, places) for array, _, places in what], done)
        return [DiskArray(self, abstract, places, done) for _, abstract, places in what]

    def _check(self) -> None:
        if self._moving.failure is not None:
            kind, text = self._moving.failure
            raise kind(text)
        if not self._moving.is_open:
            raise UserError(f"{self.folder}: the offloaded state is gone, since its store was closed; make it anew")


def _leave(moving: _Moving, what: list[tuple[jax.Array, Mapping[Any, int]]], done: Future) -> None:
    """Writes arrays. Runs in a thread."""
    parts: list[Future] = []
    error: BaseException | None = None
    try:
        for array, places in what:
            seen = set()
            for shard in array.addressable_shards:
                index = key_of(shard.index)
                if index not in seen:
                    seen.add(index)
                    parts += moving.write(np.asarray(shard.data), places[index])
        _all(parts)
    except BaseException as caught:
        error = caught
        moving.fail(caught)
    _wait(parts)
    what.clear()
    with moving.changed:
        moving.num_leaving -= 1
        moving.changed.notify_all()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _close(moving: _Moving, *pools: concurrent.futures.ThreadPoolExecutor) -> None:
    moving.close()
    for pool in pools:
        pool.shutdown(wait=False)


def bytes_of(abstract: Leaf) -> int:
    """Returns the bytes that an array takes in the file of this process, and in a buffer."""
    return scratch.aligned(_shard_bytes(abstract)) * len(_indices(abstract))


def _indices(array: Leaf) -> list[Any]:
    """Returns the indices of the distinct shards of this process."""
    indices = array.sharding.addressable_devices_indices_map(tuple(array.shape)).values()
    return list(dict.fromkeys(map(key_of, indices)))


def _shard_bytes(array: Leaf) -> int:
    return math.prod(array.sharding.shard_shape(tuple(array.shape))) * np.dtype(array.dtype).itemsize


def _wait(parts: Sequence[Future]) -> None:
    """Waits until no part runs. `concurrent.futures.wait` would wait forever for one that `_Moving.close` has cancelled."""
    for part in parts:
        with contextlib.suppress(concurrent.futures.CancelledError):
            part.exception()


def _all(parts: Sequence[Future]) -> None:
    """Waits for all parts; raises the error of the first that failed."""
    for part in parts:
        part.result()
