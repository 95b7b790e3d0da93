"""Measures a disk as the store uses it: direct reads, writes, and both at once, in parts on several threads. This module also turns the
rates into the time of a step.

A file of the given size is written once before anything is timed, since the first write to a block also notes that it is in use. Each rate
is that of one pass over the file, or of as much of it as `seconds` allows.
"""

import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from zerojax import display
from zerojax.zero.host.disk import memory, scratch

Move = tuple[Callable[..., None], int, int]  # Scratch.read or .write, bytes, offset


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a disk gives, in bytes a second.

    Attributes:
      chunk: bytes of one call to the kernel.
      threads: calls at once; for `both`, as many in each direction.
      read, write: alone.
      both: read and written together, the sum of the two.
    """

    chunk: int
    threads: int
    read: float
    write: float
    both: float

    def seconds(self, nbytes: int) -> float:
        """Returns the time in which that many bytes are read and written once each, at the same time.

        A disk that others use too may be faster in that measurement than in those of one direction, but no step is.
        """
        return max(2 * nbytes / self.both, self.least_seconds(nbytes))

    def least_seconds(self, nbytes: int) -> float:
        """Returns the time of the slower direction alone, than which no step is faster."""
        return nbytes / min(self.read, self.write)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Rates by chunk and threads, and how the file was read and written ("/disk (ext4, direct)")."""

    where: str
    is_direct: bool
    rates: tuple[Rates, ...]

    @property
    def best(self) -> Rates:
        """Returns the rates with the fastest step."""
        return max(self.rates, key=lambda rates: rates.both)


def measure(
    folder: str | os.PathLike[str],
    *,
    size: int,
    chunks: Sequence[int],
    threads: Sequence[int],
    seconds: float = 3.0,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measures the disk of a folder.

    Args:
      folder: made where it is missing.
      size: bytes of the file; more than the disk's own cache.
      chunks: bytes of one call, multiples of the alignment.
      threads: calls at once.
      seconds: the longest that one rate is measured.
      say: is told what is being measured.

    Raises:
      UserError: the folder cannot be used, its disk has no room, or it fails.
    """
    file = scratch.Scratch(folder, size)
    try:
        buffers = [memory.Buffer(max(chunks)) for _ in range(2 * max(threads))]
        random = np.random.default_rng(0).integers(0, 256, max(chunks), np.uint8)  # some disks compress
        for buffer in buffers:
            buffer.view[:] = random
        say("writing the file once")
        _rate([_moves(file, file.write, max(chunks))], buffers, seconds=float("inf"))
        found = []
        for chunk in chunks:
            for number in threads:
                say(f"chunks of {display.human(chunk)}, threads {number}")
                reads, writes = (_moves(file, call, chunk) for call in (file.read, file.write))
                half = len(reads) // 2
                read, write = (_rate([moves], buffers[:number], seconds) for moves in (reads, writes))
                # Threads of their own for each direction: a slow read holds up no write.
                duplex = _rate([reads[:half] or reads, writes[half:]], buffers[: 2 * number], seconds)
                found.append(Rates(chunk, number, read, write, duplex))
        return Measured(scratch.describe(file.folder, file.is_direct), file.is_direct, tuple(found))
    finally:
        file.close()


def _moves(file: scratch.Scratch, call: Callable[..., None], chunk: int) -> list[Move]:
    return [(call, min(chunk, file.size - offset), offset) for offset in range(0, file.size, chunk)]


def _rate(directions: Sequence[Sequence[Move]], buffers: Sequence[memory.Buffer], seconds: float) -> float:
    """Returns bytes a second of the moves of each direction at the same time, for at most `seconds`.

    Each buffer has a thread, and each direction its share of them.
    """
    left, lock, began = [iter(moves) for moves in directions], threading.Lock(), time.perf_counter()

    def work(number: int) -> int:
        moved, buffer = 0, buffers[number]
        while time.perf_counter() - began < seconds:
            with lock:
                move = next(left[number % len(left)], None)
            if move is None:
                break
            call, nbytes, offset = move
            call(buffer.view[:nbytes], offset)
            moved += nbytes
        return moved

    with concurrent.futures.ThreadPoolExecutor(len(buffers)) as pool:
        moved = sum(pool.map(work, range(len(buffers))))
    return moved / (time.perf_counter() - began)
