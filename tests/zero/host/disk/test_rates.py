"""Checks the measurement of a disk. This module tests zerojax.zero.host.disk.rates."""

import os
import threading
import time

from zerojax.zero.host.disk import memory, rates, scratch

MB = 1 << 20


def test_each_pair_of_chunk_and_threads_is_measured_over_the_whole_file(tmp_path, monkeypatch):
    moved = {"preadv": 0, "pwritev": 0}
    for name in moved:
        real = getattr(os, name)

        def note(fd, views, at, real=real, name=name):
            moved[name] += len(views[0])
            return real(fd, views, at)

        monkeypatch.setattr(os, name, note)
    measured = rates.measure(tmp_path, size=4 * MB, chunks=(MB // 2, MB), threads=(1, 3), seconds=60)
    assert [(row.chunk, row.threads) for row in measured.rates] == [(MB // 2, 1), (MB // 2, 3), (MB, 1), (MB, 3)]
    assert all(min(row.read, row.write, row.both) > 0 for row in measured.rates)
    tries = 3 * 4096  # whether direct calls work
    assert (
        0 <= moved["preadv"] - 4 * (4 + 2) * MB <= tries
    )  # read alone, then half of the file beside writes to the other half
    assert 0 <= moved["pwritev"] - (4 + 4 * (4 + 2)) * MB <= tries  # and written once before
    assert str(tmp_path) in measured.where and not list(tmp_path.iterdir())


def test_a_step_reads_and_writes_its_state_once_at_the_rate_of_both():
    slow, fast = rates.Rates(1, 1, read=9e9, write=9e9, both=2e9), rates.Rates(1, 2, read=3e9, write=3e9, both=4e9)
    measured = rates.Measured("here", True, (slow, fast))
    assert measured.best is fast and measured.best.seconds(8 * 10**9) == 4.0
    assert slow.least_seconds(9 * 10**9) == 1.0 and rates.Rates(1, 1, 2e9, 4e9, 1e9).least_seconds(8 * 10**9) == 4.0


def test_reads_and_writes_have_threads_of_their_own(tmp_path, monkeypatch):
    """Reads that wait until a write has ended would wait for ever if they held all threads."""
    wrote = threading.Event()
    real = os.preadv

    def after_a_write(fd, views, at):
        assert wrote.wait(30)
        return real(fd, views, at)

    file = scratch.Scratch(tmp_path, 4 * MB)
    monkeypatch.setattr(os, "preadv", after_a_write)
    buffers = [memory.Buffer(MB) for _ in range(2)]
    reads = [(file.read, MB, n * MB) for n in range(2)]

    def write(view, offset):
        file.write(view, offset)
        wrote.set()

    began = time.perf_counter()
    rate = rates._rate([reads, [(write, MB, 2 * MB)]], buffers, seconds=60)
    assert rate >= 3 * MB / (time.perf_counter() - began)


def test_a_rate_is_measured_no_longer_than_allowed(tmp_path):
    measured = rates.measure(tmp_path, size=4 * MB, chunks=(MB,), threads=(1,), seconds=0.0)
    assert measured.rates[0].read == 0.0


def test_a_step_is_never_faster_than_the_slower_direction_alone():
    steady = rates.Rates(chunk=MB, threads=1, read=2e9, write=3e9, both=2.5e9)
    assert (steady.seconds(10**9), steady.least_seconds(10**9)) == (0.8, 0.5)
    noisy = rates.Rates(chunk=MB, threads=1, read=0.5e9, write=3e9, both=1.3e9)
    assert noisy.seconds(10**9) == noisy.least_seconds(10**9) == 2.0
