"""Reads the kernels of a profiler's trace. This module reads the file that `jax.profiler` writes, without TensorFlow.

A trace has planes, a plane has lines, and a line has events. A GPU is a plane "/device:GPU:0" with a line for each stream. Other lines of
that plane repeat the same time by module, by step and so on. CPU devices have no planes: their kernels are the events, on any thread,
that name an instruction.
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
      device: its plane, or the number of an emulated device.
      name: its name in its library.
      instruction, module: its HLO instruction and program; "" if the trace does not name them.
      start, end: nanoseconds since the trace began.
    """

    device: str
    name: str
    instruction: str
    module: str
    start: float
    end: float


def newest(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest trace below a folder, or None if there is none."""
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read(path: pathlib.Path) -> list[Kernel]:
    """Returns the kernels of a trace file."""
    return list(kernels(ProfileData.from_file(str(path))))


def kernels(trace: ProfileData) -> Iterator[Kernel]:
    """Yields the kernels of a trace: those of its GPUs, or of CPU devices if no plane is a device's."""
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
