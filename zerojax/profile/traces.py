"""Reads the kernels out of a profiler's trace. This module knows the file that `jax.profiler` writes, and reads it without TensorFlow.

A trace is planes of lines of events. A GPU is a plane "/device:GPU:0" with a line for each stream; other lines of that plane repeat the
same time by module, by step and so on. CPU devices have no planes: their kernels are the events, on any thread, that name an instruction.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from jax.profiler import ProfileData

_DEVICES, _STREAM = "/device:", "Stream"


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel, or a copy.

    Attributes:
      device: the plane it is on, or the number of an emulated device.
      name: as its library calls it.
      instruction, module: the HLO instruction it was launched for, and its program; "" where the trace does not say.
      start, end: nanoseconds since the trace began.
    """

    device: str
    name: str
    instruction: str
    module: str
    start: float
    end: float


def newest(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the trace that was written last below a folder, or None where there is none."""
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read(path: pathlib.Path) -> list[Kernel]:
    """Returns the kernels of a trace file."""
    return list(kernels(ProfileData.from_file(str(path))))


def kernels(trace: ProfileData) -> Iterator[Kernel]:
    """Yields the kernels of a trace: those of its GPUs, or where it has no device's plane those of CPU devices."""
    planes = list(trace.planes)
    devices = [plane for plane in planes if plane.name.startswith(_DEVICES)]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith(_STREAM):
                continue
            for event in line.events:
                stats: dict[str, Any] = {str(key): value for key, value in event.stats if key is not None}
                instruction = str(stats.get("hlo_op", ""))
                if not devices and not instruction:
                    continue
                device = plane.name if devices else f"cpu:{stats.get('device_ordinal', 0)}"
                start, module = float(event.start_ns), str(stats.get("hlo_module", ""))
                yield Kernel(device, event.name, instruction, module, start, start + float(event.duration_ns))
