"""Checks that one process holds a lock and that dead ones lose it. This module tests zerojax.checkpoint.lock."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import socket
import threading
import time

import file_systems
import pytest

from zerojax.checkpoint import lock
from zerojax.errors import UserError


@contextlib.contextmanager
def held(path):
    taken = lock.take(path, "the folder", "choose another")
    try:
        yield
    finally:
        taken.release()


def left_by_a_dead_process(path, **changes):
    """Writes the lock of a process that ended without removing it."""
    with held(path):
        content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def touch(path, seconds):
    """Dates a file so many seconds before now by the clock of its file system, which is returned."""
    os.utime(path)
    now = path.stat().st_mtime
    os.utime(path, (now - seconds,) * 2)
    return now


def refusal(path):
    with pytest.raises(UserError) as caught:
        lock.take(path, "the folder", "choose another")
    assert "\n" not in str(caught.value) and str(caught.value).endswith("choose another")
    return str(caught.value)


def test_a_lock_is_held_by_one_process_and_free_after_it(tmp_path):
    path = tmp_path / ".lock"
    for _ in range(2):
        with held(path):
            before = path.read_bytes()
            assert f"the folder: process {os.getpid()} on {socket.gethostname()} has held it since" in refusal(path)
            assert path.read_bytes() == before
        assert not list(tmp_path.iterdir())


def test_a_lock_that_nobody_refers_to_is_released(tmp_path):
    taken = lock.take(tmp_path / ".lock", "the folder", "choose another")
    del taken
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    path = tmp_path / ".lock"
    left_by_a_dead_process(path)
    with held(path):
        pass
    for text in ("", '{"host": "a', "[]", '{"host": "a"}'):
        path.write_text(text)
        with held(path):
            assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_another_host_is_refused_with_the_way_to_remove_it(tmp_path):
    path = tmp_path / ".lock"
    left_by_a_dead_process(path, host="node7", pid=12)
    before = path.read_bytes()
    message = refusal(path)
    assert "process 12 on node7 has held it since 2" in message and f"delete {path}" in message
    assert path.read_bytes() == before
    touch(path, 14.5 * 60)
    assert message == refusal(path) and message.endswith("until it has been silent for 15 minutes, else choose another")
    touch(path, 15.1 * 60)
    with held(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_that_the_file_server_has_forgotten_is_opened_again(tmp_path, monkeypatch):
    silence, tries = lock._silence, []

    def forgotten_once(descriptor):
        tries.append(descriptor)
        if len(tries) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return silence(descriptor)

    monkeypatch.setattr(lock, "_silence", forgotten_once)
    with held(tmp_path / ".lock"):
        assert len(tries) == 2
    monkeypatch.setattr(lock, "LINGER_SECONDS", -1.0)
    tries.clear()
    with pytest.raises(UserError, match=r"cannot be written \(Stale file handle\)"):
        lock.take(tmp_path / ".lock", "the folder", "choose another")


def test_the_lock_of_another_host_that_is_dated_in_the_future_is_silent_from_now_on(tmp_path):
    path = tmp_path / ".lock"
    left_by_a_dead_process(path, host="node7", pid=12)
    now = touch(path, -1e8)
    assert "process 12 on node7 has held it" in refusal(path)
    assert abs(path.stat().st_mtime - now) < lock.BEAT_SECONDS


@pytest.mark.parametrize("ahead", [-1e6, 1e8])
def test_a_wrong_clock_of_this_host_changes_nothing(tmp_path, monkeypatch, ahead):
    path = tmp_path / ".lock"
    left_by_a_dead_process(path, host="node7", pid=12)
    now = touch(path, 100)
    monkeypatch.setattr(lock.time, "time", lambda: now + ahead)
    assert "process 12 on node7 has held it" in refusal(path)
    assert path.stat().st_mtime == pytest.approx(now - 100, abs=1)
    touch(path, lock.SILENT_SECONDS + 1)
    with held(path):
        pass


def test_a_restart_of_the_same_run_takes_the_lock_of_another_host_over(tmp_path):
    path = tmp_path / ".lock"
    left_by_a_dead_process(path, host="node7", pid=12, run="abc")
    assert "on node7" in refusal(path)
    taken = lock.take(path, "the folder", "choose another", run_id="abc")
    assert json.loads(path.read_text())["run"] == "abc"
    taken.release()
    left_by_a_dead_process(path, host="node7", pid=12, run="")
    assert "on node7" in refusal(path)  # no run id is no run in common


def test_a_restart_waits_for_a_file_server_that_still_holds_its_lock(tmp_path, monkeypatch):
    path = tmp_path / ".lock"
    first = lock.take(path, "the folder", "choose another", run_id="abc")
    release = threading.Timer(0.3, first.release)
    release.start()
    lock.take(path, "the folder", "choose another", run_id="abc").release()
    release.join()
    monkeypatch.setattr(lock, "LINGER_SECONDS", 0.0)
    with held(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), "run": "abc"}))
        with pytest.raises(UserError, match="has held it since"):
            lock.take(path, "the folder", "choose another", run_id="abc")


def test_a_process_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    path = tmp_path / ".lock"
    with held(path):
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 30
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


@pytest.mark.parametrize("began", ["another", None])
def test_without_locks_of_the_file_system_only_a_process_known_to_be_dead_loses_its_lock(tmp_path, monkeypatch, began):
    monkeypatch.setattr(fcntl, "flock", file_systems.full)
    path, other = tmp_path / ".lock", tmp_path / ".other"
    left_by_a_dead_process(path)
    assert f"process {os.getpid()} on" in refusal(path)
    left_by_a_dead_process(other, began=began)
    if began is None:  # a system that does not say when a process began
        assert f"delete {other}" in refusal(other)
    else:
        with held(other):
            pass


def test_a_lock_removed_by_hand_and_taken_by_another_process_is_left_to_it(tmp_path):
    path = tmp_path / ".lock"
    with held(path):
        path.unlink()
        path.write_text("theirs")
    assert path.read_text() == "theirs"


def test_a_lock_is_not_written_through_a_symbolic_link(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "theirs")
    assert "cannot be written" in refusal(tmp_path / ".lock")
    assert not (tmp_path / "theirs").exists()
