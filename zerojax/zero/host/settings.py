"""Says which parts of a train state live in host memory or on a disk. This module holds the settings, their values and where they apply.

part        kinds                 stages
optimizer   none, host, nvme      those that shard the optimizer state
params      none, host, nvme      those that shard params
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from zerojax import errors
from zerojax.errors import UserError

NONE, HOST, NVME = "none", "host", "nvme"
KINDS = (NONE, HOST, NVME)
PARTS: Mapping[str, str] = {"optimizer": "opt_state", "params": "params"}  # part -> its column in the table of stages
CHUNK_BYTES = 256 << 20  # 6 ms at 43 GB/s
IN_FLIGHT, IN_FLIGHT_BYTES = 8, 2 << 30  # at most; on each device
NVME_BUFFERS = 4  # at most
AUTO, ON, OFF = "auto", "on", "off"
BY_BLOCK = (AUTO, ON, OFF)


@dataclasses.dataclass(frozen=True)
class Offload:
    """What lives outside of device memory between its uses.

    Attributes:
      optimizer: where moments and master weights live: "none" (on the device), "host" (pinned memory) or "nvme" (a local disk).
      params: where the params live; the same values.
      fraction: of the optimizer state's bytes that is offloaded, from above 0 to 1. The rest stays on the device.
      params_fraction: the same of the bytes of the params that may be offloaded.
      params_on_device: a regex; params whose path it matches stay on the device. For matrices that are too large to arrive beside a block.
      chunk_bytes: bytes of state on each device that are copied and updated together. A larger leaf is stored in pieces of about this size.
      in_flight: chunks that each device holds at once: those that arrive, are updated and leave. So the update needs about
        chunk_bytes * in_flight of device memory, whatever the model's size. Half of them arrive before the forward pass begins, or in a
        step block by block as many as fit. 0 derives it: as many as 2 GiB hold, from 2 to 8.
      by_block: whether a step runs block by block ("on"), so that groups can be updated beside the backward pass, or as one program with
        its updates behind it ("off"). "auto" decides (`step_by_block.is_chosen`).
      late_norm: whether gradients are clipped by the norm of the step before, so that their update need not wait for their own norm.
      nvme_path: the folder whose disk holds what is "nvme". It should be on a local disk.
      nvme_buffers: chunks of optimizer state for each device, and as many of params, that are read from the disk into host memory ahead
        of their use. A buffer holds the largest leaf if that is more than a chunk. 0 derives it: 4, or as many as there are leaves.
    """

    optimizer: str = NONE
    params: str = NONE
    fraction: float = 1.0
    params_fraction: float = 1.0
    params_on_device: str = ""
    chunk_bytes: int = CHUNK_BYTES
    in_flight: int = 0
    by_block: str = AUTO
    late_norm: bool = False
    nvme_path: str = ""
    nvme_buffers: int = 0

    @property
    def chunks_at_once(self) -> int:
        """Returns the chunks that each device holds at once: `in_flight`, or what is derived."""
        return self.in_flight or max(2, min(IN_FLIGHT, IN_FLIGHT_BYTES // self.chunk_bytes))

    def buffers(self, leaves: int = NVME_BUFFERS) -> int:
        """Returns the buffers that a file of so many leaves is read into: `nvme_buffers`, or what is derived."""
        return self.nvme_buffers or min(NVME_BUFFERS, leaves)

    @property
    def is_on(self) -> bool:
        """Returns whether anything is offloaded."""
        return self != Offload() and (self.optimizer, self.params) != (NONE, NONE)


def read(value: object) -> Offload:
    """Returns the settings that an argument `offload` means: an Offload, a dict of its fields, a kind for the optimizer, or None.

    Raises:
      UserError: a field is unknown or a value is not allowed.
    """
    if isinstance(value, Offload):
        return _checked(value)
    if value is None:
        return Offload()
    if isinstance(value, str):
        return _checked(Offload(optimizer=value))
    names = [field.name for field in dataclasses.fields(Offload)]
    if not isinstance(value, Mapping):
        raise UserError(f"offload: must be one of {', '.join(KINDS)}, a dict or an Offload, and is {value!r}")
    unknown = [key for key in value if key not in names]
    if unknown:
        raise UserError(f"offload.{unknown[0]}: unknown; known are {', '.join(names)}")
    return _checked(Offload(**value))


def _checked(offload: Offload) -> Offload:
    for part in PARTS:
        errors.one_of(f"offload.{part}", getattr(offload, part), KINDS)
    for name in ("fraction", "params_fraction"):
        value = getattr(offload, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= 1:
            raise UserError(f"offload.{name}: must be above 0 and at most 1, and is {value!r}")
    for name, least in (("chunk_bytes", 1), ("in_flight", 2), ("nvme_buffers", 1)):
        value = getattr(offload, name)
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or (value < least and (value or name == "chunk_bytes"))
        ):
            or_else = "" if name == "chunk_bytes" else ", or 0 to derive it"
            raise UserError(f"offload.{name}: must be a whole number of at least {least}{or_else}, and is {value!r}")
    errors.regex("offload.params_on_device", offload.params_on_device)
    errors.one_of("offload.by_block", offload.by_block, BY_BLOCK)
    if not isinstance(offload.late_norm, bool):
        raise UserError(f"offload.late_norm: must be True or False, and is {offload.late_norm!r}")
    if not isinstance(offload.nvme_path, (str, os.PathLike)):
        raise UserError(f"offload.nvme_path: must be a folder's path, and is {offload.nvme_path!r}")
    kinds = (offload.optimizer, offload.params)
    read = dict.fromkeys(("by_block", "chunk_bytes", "in_flight"), kinds != (NONE, NONE))
    read |= dict.fromkeys(("fraction", "late_norm"), offload.optimizer != NONE)
    read |= dict.fromkeys(("params_fraction", "params_on_device"), offload.params != NONE)
    read |= dict.fromkeys(("nvme_path", "nvme_buffers"), NVME in kinds)
    for name in sorted(read):
        if not read[name] and getattr(offload, name) != getattr(Offload(), name):
            raise UserError(
                f"offload.{name}: is {getattr(offload, name)!r} and cannot take effect, since nothing is offloaded that reads it; "
                f"set offload.{'params' if name.startswith('params') else 'optimizer'} to {NVME if 'nvme' in name else HOST!r}, or omit it"
            )
    if offload.by_block == OFF and (offload.params != NONE or offload.late_norm):
        what = "offloaded params are fetched" if offload.params != NONE else "updates beside the backward pass run"
        raise UserError(f"offload.by_block: is 'off', and {what} block by block; omit it")
    for name in ("by_block", "late_norm"):
        if offload.optimizer == NVME and getattr(offload, name) in (ON, True):
            raise UserError(
                f"offload.{name}: cannot be used with offload.optimizer='nvme', as a disk takes longer than a backward pass; omit it"
            )
    return offload


def check(offload: Offload, table: Mapping[int, Any], row: int) -> None:
    """Checks that a stage allows what is offloaded.

    Args:
      offload: the settings.
      table: the table of stages.
      row: the stage.

    Raises:
      UserError: it does not.
    """
    for part, column in PARTS.items():
        kind = getattr(offload, part)
        if kind == NONE:
            continue
        allowed = [number for number, sharded in table.items() if getattr(sharded, column)]
        if row not in allowed:
            listed = ", ".join(map(str, allowed))
            raise UserError(
                f"offload.{part}: is {kind!r}, which works at stage {listed}, and the stage is {row}; set the stage to "
                f"{allowed[0]}, or offload.{part} to 'none'"
            )
