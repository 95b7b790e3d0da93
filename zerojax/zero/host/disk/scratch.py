"""One file without a name on a local disk. This module opens it, and reads and writes it past the page cache where the file system allows.

A file without a name cannot be left behind, shared or trusted after a crash: the kernel frees it when its process ends, however that ends.
Its space is taken before the first write, so that a full disk is known at the start.

Direct reads and writes need aligned places, lengths and memory. Places and lengths are multiples of `ALIGNMENT`. What memory must be
aligned to depends on the device, and is found by trying.
"""

import errno
import fcntl
import mmap
import os
import pathlib
import tempfile
import threading
import weakref
from typing import Any

import numpy as np

from zerojax import errors
from zerojax.errors import UserError
from zerojax.zero.host.disk import folder as folder_lib

ALIGNMENT = 4096  # bytes: of places and lengths, and the most that memory needs
_TRIED = (64, 512, ALIGNMENT)  # alignments of memory; XLA's buffers have at least 64
_COPIED_BYTES = 8 << 20
_OWN = threading.local()  # each thread's aligned memory


def aligned(nbytes: int) -> int:
    """Returns the length of the blocks that hold `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Scratch:
    """A file of fixed size. Its reads and writes may run on several threads; they hold no lock of Python while the disk works.

    Attributes:
      folder: where its space is taken.
      size: bytes, a multiple of `ALIGNMENT`.
      memory_alignment: bytes that the memory of a direct read or write must be aligned to; 0 where the file goes through the page cache.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int):
        """Takes the space.

        Args:
          folder: on a local disk; made where it is missing.
          size: bytes.

        Raises:
          UserError: the folder cannot be written, or its disk has no room.
        """
        self.folder, self.size = folder_lib.make(folder), aligned(size)
        folder_lib.check_space(self.folder, self.size)
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.folder}: no file can be made there ({error.strerror}); choose another folder"
            ) from error
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        try:
            if self.size:
                os.posix_fallocate(self.descriptor, 0, self.size)
            self.memory_alignment = self._try_direct() if self.size else 0
        except OSError as error:
            self.close()
            raise self._failed("taking its space", error) from error

    @property
    def is_direct(self) -> bool:
        """Returns whether reads and writes go past the page cache."""
        return self.memory_alignment > 0

    def read(self, memory: Any, offset: int) -> None:
        """Fills `memory` from `offset`. Both, and the length, are aligned as the class says.

        Raises:
          UserError: the disk fails, or the file is shorter than it was.
        """
        self._move(os.preadv, "reading", memoryview(memory), offset)

    def write(self, memory: Any, offset: int) -> None:
        """Writes `memory` at `offset`. The length need not be aligned; the file's bytes up to the next block are then zeros.

        Raises:
          UserError: the disk fails.
        """
        view = memoryview(memory).cast("B")
        whole = len(view) if not self.is_direct else len(view) // ALIGNMENT * ALIGNMENT
        if whole and self.is_direct and np.frombuffer(view, np.uint8).ctypes.data % self.memory_alignment:
            self._write_copied(view[:whole], offset)
        elif whole:
            self._move(os.pwritev, "writing", view[:whole], offset)
        if whole < len(view):
            tail = mmap.mmap(-1, ALIGNMENT)
            tail[: len(view) - whole] = view[whole:]
            self._move(os.pwritev, "writing", memoryview(tail), offset + whole)

    def close(self) -> None:
        """Frees the space."""
        self._finalizer()

    def _write_copied(self, view: memoryview, offset: int) -> None:
        """Writes memory that a direct write cannot read, through aligned memory."""
        if not hasattr(_OWN, "copy"):
            _OWN.copy = mmap.mmap(-1, _COPIED_BYTES)
        copy = _OWN.copy
        for start in range(0, len(view), _COPIED_BYTES):
            part = view[start : start + _COPIED_BYTES]
            np.frombuffer(copy, np.uint8)[: len(part)] = np.frombuffer(part, np.uint8)
            self._move(os.pwritev, "writing", memoryview(copy)[: len(part)], offset + start)

    def _move(self, call: Any, doing: str, view: memoryview, offset: int) -> None:
        """Reads or writes all of `view`, in as many calls as the kernel takes."""
        try:
            while len(view):
                moved = call(self.descriptor, [view], offset)
                if moved <= 0:
                    raise OSError(errno.EIO, f"it ends at byte {offset}, where {len(view)} more were expected")
                if moved < len(view) and self.is_direct:
                    moved -= moved % ALIGNMENT  # a direct call that was cut short goes on at a block
                    if not moved:
                        raise OSError(errno.EIO, "a direct call moved less than a block")
                view, offset = view[moved:], offset + moved
        except OSError as error:
            raise self._failed(doing, error) from error

    def _failed(self, doing: str, error: OSError) -> UserError:
        return UserError(
            f"{self.folder}: {doing} the offloaded state failed ({error.strerror}); look after that disk or choose another folder, then "
            "run again: the run goes on from its last checkpoint"
        )

    def _try_direct(self) -> int:
        """Turns direct calls on, and returns the least alignment of memory that they take; 0 where they are refused."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        memory = memoryview(mmap.mmap(-1, 2 * ALIGNMENT))
        for alignment in _TRIED:
            try:
                fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
                start = alignment % ALIGNMENT
                view = memory[start : start + ALIGNMENT]
                if os.pwritev(self.descriptor, [view], 0) == os.preadv(self.descriptor, [view], 0) == ALIGNMENT:
                    return alignment
            except OSError as error:
                if errors.is_disk_full(error) or error.errno == errno.EIO:
                    raise
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)
        return 0


def describe(folder: pathlib.Path, is_direct: bool) -> str:
    """Returns how a file of a folder is read and written."""
    kind = folder_lib.file_system(folder) or "its file system"
    if is_direct:
        return f"{folder} ({kind}, direct)"
    return f"{folder} ({kind}, through the page cache: direct reads and writes are refused there)"
