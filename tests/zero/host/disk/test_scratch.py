"""Checks the file without a name: what it reads, what it leaves, how it fails. This module tests zerojax.zero.host.disk.scratch."""

import errno
import fcntl
import gc
import os

import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.zero.host.disk import memory, scratch

BLOCK = scratch.ALIGNMENT
RNG = np.random.default_rng(0)


@pytest.fixture(params=["direct", "buffered"])
def file(tmp_path, request, monkeypatch):
    if request.param == "buffered":
        refuse_direct(monkeypatch)
    opened = scratch.Scratch(tmp_path, 8 * BLOCK)
    if request.param == "direct" and not opened.is_direct:
        pytest.skip("this file system takes no direct reads and writes")
    assert opened.is_direct == (request.param == "direct")
    return opened


def refuse_direct(monkeypatch):
    real = fcntl.fcntl

    def refuse(descriptor, command, *args):
        if command == fcntl.F_SETFL and args[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, *args)

    monkeypatch.setattr(scratch.fcntl, "fcntl", refuse)


def contents(file, nbytes, offset=0):
    buffer = memory.Buffer(nbytes)
    file.read(buffer.view, offset)
    return buffer.view


@pytest.mark.parametrize("nbytes", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_memory_of_any_length_and_alignment_is_written_as_it_is(file, nbytes, shift):
    data = memory.Buffer(nbytes + shift).view[shift:]
    data[:] = RNG.integers(0, 256, nbytes)
    file.write(data, BLOCK)
    assert np.array_equal(contents(file, 4 * BLOCK, BLOCK)[:nbytes], data)


def test_calls_that_move_less_than_they_were_asked_are_continued(file, monkeypatch):
    data = memory.Buffer(4 * BLOCK).view
    data[:] = RNG.integers(0, 256, data.size)
    calls = []
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda fd, views, at, real=real: calls.append(at) or real(fd, [views[0][:BLOCK]], at)
        )
    file.write(data, 0)
    assert np.array_equal(contents(file, data.size), data) and calls == [0, BLOCK, 2 * BLOCK, 3 * BLOCK] * 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_disk_is_one_line_that_names_the_folder(file, number, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    for name, do in (
        ("preadv", lambda: contents(file, BLOCK)),
        ("pwritev", lambda: file.write(memory.Buffer(BLOCK).view, 0)),
    ):
        monkeypatch.setattr(os, name, fail)
        with pytest.raises(UserError) as refused:
            do()
        line = str(refused.value)
        assert (
            str(file.folder) in line and os.strerror(number) in line and "last checkpoint" in line and "\n" not in line
        )


def test_a_file_that_became_shorter_is_one_line(file):
    os.ftruncate(file.descriptor, 2 * BLOCK)
    with pytest.raises(UserError, match=r"reading the offloaded state failed \(it ends at byte 8192"):
        contents(file, 4 * BLOCK)


def test_a_file_leaves_no_name_and_outlives_its_folder(tmp_path):
    folder = tmp_path / "scratch"
    file = scratch.Scratch(folder, BLOCK)
    assert not list(folder.iterdir())
    folder.rmdir()
    file.write(np.arange(8, dtype=np.uint8), 0)
    assert list(contents(file, BLOCK)[:9]) == [*range(8), 0]


def test_space_is_taken_when_the_file_is_made_and_given_back_when_it_is_dropped(tmp_path):
    file = scratch.Scratch(tmp_path, 100 * BLOCK + 1)
    descriptor = file.descriptor
    assert file.size == 101 * BLOCK and os.fstat(descriptor).st_blocks * 512 >= file.size
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_disk_without_room_is_known_when_the_file_is_made(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"1024.00 TiB are needed there"):
        scratch.Scratch(tmp_path, 1 << 50)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)  # another process takes the space in between
    with pytest.raises(UserError, match=r"taking its space .* failed \(No space left on device\)"):
        scratch.Scratch(tmp_path, BLOCK)


def test_how_a_file_is_read_is_told(tmp_path):
    assert scratch.describe(tmp_path, True).endswith("direct)")
    assert "through the page cache" in scratch.describe(tmp_path, False)
