"""Measures the memory that each phase of training and evaluation takes on the device and on the host. This module samples it in a thread.

What PEFT's scripts print, in the same terms:

    before       in use when the phase begins
    consumed     in use at its end, less before
    peak         the most in use during the phase, less before
    total peak   the most in use during the phase

JAX reports a device's peak since the process began. A phase that does not exceed earlier ones is known by samples alone, which a short peak
may escape. CPU devices report nothing, so they have no numbers.
"""

import contextlib
import os
import pathlib
import resource
import sys
import threading
from collections.abc import Iterator

import jax

from zerojax import display

SAMPLE_SECONDS = 0.02
DEVICE, HOST = "device", "host"
_STATM = pathlib.Path("/proc/self/statm")


def device_bytes() -> tuple[int, int] | None:
    """Returns the bytes in use on this process's first device, and the most since the process began; None if they are not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_in_use" not in stats:
        return None
    return stats["bytes_in_use"], stats.get("peak_bytes_in_use", stats["bytes_in_use"])


def host_bytes() -> int | None:
    """Returns the resident bytes of this process; None where the system does not report them."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the most so far: it never falls
    return None


class Phase:
    """The memory of one phase, from its construction to `end`."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._device, self._host = device_bytes(), host_bytes()
        self._most = {DEVICE: self._device[0] if self._device else 0, HOST: self._host or 0}
        self._thread = threading.Thread(target=self._sample, daemon=True, name="memory")
        self._thread.start()

    def end(self) -> dict[str, int]:
        """Ends the phase. Returns {"device_before_bytes": ...} and the other numbers that are known."""
        self._over.set()
        self._thread.join()
        self._look()
        found: dict[str, int] = {}
        if self._device is not None and (now := device_bytes()) is not None:
            before, peak_before = self._device
            peak = now[1] if now[1] > peak_before else self._most[DEVICE]
            found |= _numbers(DEVICE, before, now[0], peak)
        if self._host is not None:
            found |= _numbers(HOST, self._host, host_bytes() or self._host, self._most[HOST])
        return found

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        device = device_bytes() if self._device is not None else None
        self._most[DEVICE] = max(self._most[DEVICE], device[0] if device else 0)
        self._most[HOST] = max(self._most[HOST], host_bytes() or 0)


@contextlib.contextmanager
def measured() -> Iterator[dict[str, int]]:
    """Fills the dict that it gives with the numbers of the block, at its end."""
    phase, found = Phase(), {}  # type: ignore[var-annotated]
    try:
        yield found
    finally:
        found |= phase.end()


def lines(name: str, numbers: dict[str, int]) -> list[str]:
    """Returns a line for the device and one for the host, as far as they are known, from the numbers of a phase with this name."""
    told = []
    for where in (DEVICE, HOST):
        if f"{where}_before_bytes" not in numbers:
            continue
        before, consumed, peak, total = (
            numbers[f"{where}_{kind}_bytes"] for kind in ("before", "consumed", "peak", "total_peak")
        )
        sign = "-" if consumed < 0 else ""
        told.append(
            f"{name}: {where} memory {display.human(before)} before, {sign}{display.human(abs(consumed))} consumed, "
            f"{display.human(peak)} peak above that, {display.human(total)} total peak"
        )
    return told


def unreported(numbers: dict[str, int]) -> list[str]:
    """Returns a line for the device and one for the host if the numbers of a phase lack theirs."""
    tellers = {DEVICE: f"backend ({jax.default_backend()})", HOST: f"system ({sys.platform})"}
    return [
        f"the memory of the {where} is not reported by this {teller}"
        for where, teller in tellers.items()
        if f"{where}_before_bytes" not in numbers
    ]


def _numbers(where: str, before: int, after: int, peak: int) -> dict[str, int]:
    peak = max(peak, before, after)
    found = {"before": before, "consumed": after - before, "peak": peak - before, "total_peak": peak}
    return {f"{where}_{kind}_bytes": number for kind, number in found.items()}
