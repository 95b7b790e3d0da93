"""Checks arrays in a file: what is read is what was written last, whatever the order in which threads run; failures reach whoever waits.
This module tests zerojax.zero.host.disk.store."""

import concurrent.futures
import errno
import gc
import os
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero.host.disk import store as store_lib

LIMIT = 30  # seconds, after which a test hangs
LEAVES = {  # shape, dtype, spec
    "kernel": ((64, 1000), np.float32, P("data")),
    "scale": ((333,), jnp.bfloat16, P()),
    "codes": ((16, 8), np.int8, P(None, "data")),
    "count": ((), np.float32, P()),
}


@pytest.fixture(scope="module")
def mesh():
    return mesh_lib.make_mesh(replica=2, data=4, devices=jax.devices()[:8])


@pytest.fixture
def held(mesh, tmp_path):
    """Returns (store, DiskArrays, the numpy arrays that they hold) of `LEAVES`."""
    rng = np.random.default_rng(0)
    values = [np.asarray(rng.integers(-9, 9, shape)).astype(dtype) for shape, dtype, _ in LEAVES.values()]
    shardings = [NamedSharding(mesh, spec, memory_kind="pinned_host") for *_, spec in LEAVES.values()]
    arrays = [jax.device_put(value, sharding) for value, sharding in zip(values, shardings)]
    settings = store_lib.Settings(str(tmp_path), buffers=2, buffer_bytes=8192, threads=3, part_bytes=4096)
    store = store_lib.Store(settings, arrays)
    return store, [store.put(array) for array in arrays], values


def load(store, array):
    sharding = NamedSharding(array.sharding.mesh, array.sharding.spec)
    return store.load([array], [sharding])[0]


def on_host(value, like):
    return jax.device_put(value, like.sharding)


def slowed(monkeypatch, **seconds):
    """Makes calls to the kernel take some time, at random."""
    draw = random.Random(0)
    for name, most in seconds.items():
        real = getattr(os, name)

        def slow(*args, real=real, most=most):
            time.sleep(draw.random() * most)
            return real(*args)

        monkeypatch.setattr(os, name, slow)


def failing(monkeypatch, name, number=errno.EIO):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def test_an_array_is_read_as_it_was_written_whole_or_by_device(held, mesh):
    store, arrays, values = held
    for array, value in zip(arrays, values):
        arrived = load(store, array).result(LIMIT)
        assert arrived.sharding.is_equivalent_to(NamedSharding(mesh, array.sharding.spec), array.ndim)
        assert np.array_equal(arrived, value) and np.array_equal(array, value) and arrived.dtype == array.dtype
        copied = array.to_host()
        assert np.array_equal(copied, value) and copied.sharding == array.sharding
        shards = array.addressable_shards
        assert [(s.device, s.index, s.replica_id) for s in shards] == [
            (s.device, s.index, s.replica_id) for s in copied.addressable_shards
        ]
        assert all(np.array_equal(s.data, o.data) for s, o in zip(shards, copied.addressable_shards))
    assert sum(len(array.places) for array in arrays) == 4 + 1 + 4 + 1  # replicas are stored once
    assert (arrays[0].shape, arrays[0].ndim, arrays[0].size, arrays[0].nbytes) == ((64, 1000), 2, 64000, 256000)


@pytest.mark.parametrize("seed", range(3))
def test_reads_see_the_last_write_in_any_order_of_threads(held, seed, monkeypatch):
    store, arrays, values = held
    slowed(monkeypatch, preadv=0.002, pwritev=0.004)
    draw = random.Random(seed)
    for _ in range(6):
        order = draw.sample(range(len(arrays)), len(arrays))
        for number in order[: draw.randrange(len(order) + 1)]:
            store.prefetch([arrays[number]])
        arriving = [(number, load(store, arrays[number])) for number in order]
        for number, future in arriving:
            new = np.asarray(future.result(LIMIT)) + np.asarray(1, values[number].dtype)
            values[number] = values[number] + np.asarray(1, values[number].dtype)
            assert np.array_equal(new, values[number])
            (arrays[number],) = store.replace([arrays[number]], [on_host(new, arrays[number])])
    assert all(np.array_equal(array, value) for array, value in zip(arrays, values))


def test_groups_that_were_prefetched_for_a_state_that_is_gone_free_their_buffers(held):
    store, arrays, values = held
    for _ in range(3):  # more than there are buffers
        store.prefetch([arrays[0]])
        store.prefetch([arrays[1]])
        assert np.array_equal(load(store, arrays[3]).result(LIMIT), values[3])
    assert np.array_equal(load(store, arrays[0]).result(LIMIT), values[0])


def test_arrays_that_come_together_share_the_buffers_in_runs(held):
    """Of two buffers, each holds less than one of these arrays or some of the others."""
    store, arrays, values = held
    shardings = [NamedSharding(array.sharding.mesh, array.sharding.spec) for array in arrays]
    for _ in range(2):  # the same arrays may be asked for ahead more than once, as forward and backward passes do
        store.prefetch(arrays)
    for _ in range(2):
        arriving = store.load(arrays, shardings)
        assert all(np.array_equal(one.result(LIMIT), value) for one, value in zip(arriving, values))


def test_an_array_that_was_written_over_cannot_be_used(held):
    store, arrays, values = held
    store.replace(arrays[:1], [on_host(values[0], arrays[0])])
    assert arrays[0].is_deleted()
    for use in (
        lambda: np.asarray(arrays[0]),
        lambda: load(store, arrays[0]),
        lambda: store.replace(arrays[:1], [None]),
    ):
        with pytest.raises(RuntimeError, match=r"DiskArray\(float32\[64,1000\] in .*has been deleted"):
            use()


def test_arrays_that_leave_wait_for_the_disk_when_they_are_many(held, monkeypatch):
    store, arrays, values = held
    store.flush()
    gate, real = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: gate.wait(LIMIT) and real(*args))
    sent = []

    def send():
        array = arrays[3]
        for _ in range(store_lib.WRITES + 1):
            (array,) = store.replace([array], [on_host(values[3], array)])
            sent.append(array)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.3)
    assert len(sent) == store_lib.WRITES and not sent[0].is_ready()
    gate.set()
    thread.join(LIMIT)
    store.flush()
    assert len(sent) == store_lib.WRITES + 1 and all(array.is_ready() for array in sent)


@pytest.mark.parametrize(("name", "doing"), [("preadv", "reading"), ("pwritev", "writing")])
def test_a_failing_disk_reaches_every_later_call_and_nothing_waits(held, name, doing, monkeypatch):
    store, arrays, values = held
    store.flush()
    failing(monkeypatch, name)
    words = rf"{store.folder}: {doing} the offloaded state failed \(Input/output error\)"
    if name == "preadv":
        with pytest.raises(UserError, match=words):
            load(store, arrays[0]).result(LIMIT)
    else:
        written = store.replace(arrays[:1], [on_host(values[0], arrays[0])])
        with pytest.raises(UserError, match=words):
            written[0].block_until_ready()
    for use in (
        store.flush,
        lambda: load(store, arrays[1]),
        lambda: store.prefetch([arrays[1]]),
        lambda: store.replace([arrays[2]], [on_host(values[2], arrays[2])]),
        lambda: np.asarray(arrays[3]),
    ):
        with pytest.raises(UserError, match=words):
            use()


def test_a_write_that_failed_is_raised_by_the_read_that_waited_for_it(held, monkeypatch):
    store, arrays, values = held
    store.flush()
    slowed(monkeypatch, pwritev=0.2)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: (real(*args) and failing(monkeypatch, "pwritev")) or os.pwritev())
    new = store.replace(arrays[:1], [on_host(values[0], arrays[0])])
    with pytest.raises(UserError, match="writing the offloaded state failed"):
        load(store, new[0]).result(LIMIT)


def test_a_closed_store_ends_its_threads_and_refuses(mesh, tmp_path):
    before = set(threading.enumerate())
    array = jax.device_put(jnp.ones(4096), NamedSharding(mesh, P(), memory_kind="pinned_host"))
    store = store_lib.Store(store_lib.Settings(str(tmp_path)), [array])
    arrays = [store.put(array)]
    load(store, arrays[0]).result(LIMIT)
    store.flush()
    threads = set(threading.enumerate()) - before
    store.close()
    for thread in threads:
        thread.join(LIMIT)
    assert threads and not any(thread.is_alive() for thread in threads)
    with pytest.raises(UserError, match="its store was closed"):
        np.asarray(arrays[0])


def test_nothing_waits_for_a_part_that_closing_has_cancelled():
    gate, pool = threading.Event(), concurrent.futures.ThreadPoolExecutor(1)
    parts = [pool.submit(gate.wait), pool.submit(gate.wait)]
    thread = threading.Thread(target=store_lib._wait, args=[parts], daemon=True)
    thread.start()
    pool.shutdown(wait=False, cancel_futures=True)
    gate.set()
    thread.join(LIMIT)
    assert parts[0].done() and parts[1].cancelled() and not thread.is_alive()


def test_a_store_that_nothing_refers_to_frees_its_disk(mesh, tmp_path):
    sharding = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    array = jax.device_put(jnp.ones(4096), sharding)
    store = store_lib.Store(store_lib.Settings(str(tmp_path)), [array])
    on_disk, descriptor = store.put(array), store._moving.file.descriptor
    load(store, on_disk).result(LIMIT)
    store.flush()
    del store, on_disk
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        gc.collect()
        try:
            os.fstat(descriptor)
        except OSError:
            return
        time.sleep(0.01)
    raise AssertionError("the file is still open")


def test_the_space_of_all_arrays_is_taken_at_once(mesh, tmp_path):
    huge = jax.ShapeDtypeStruct((1 << 44,), np.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(UserError, match=r"64.00 TiB are needed there"):
        store_lib.Store(store_lib.Settings(str(tmp_path)), [huge])
