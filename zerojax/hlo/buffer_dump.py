"""Reads XLA's dump of a program's memory. This module parses three of its files.

    ...-buffer-assignment.txt    allocation 12: size 4096, color 5, page 0, parameter 3, shape |...| at ShapeIndex {}, maybe-live-out:
                                  value: <17 fusion.2{0} @0> (size=4096,offset=0): f32[32,32]{1,0}
    ...-live-range.txt           the order of all instructions, and the first and last position of each value's life
    ...optimizations.txt         the program; it wraps each asynchronous instruction in a computation

A color is a memory: 0 is the device's, 5 is the host's, and the others are on a TPU's chip.
The order of instructions contains a loop's body once, at the loop.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

ARGUMENT, CONSTANT, OUTPUT, TEMPORARY, LOCAL = "argument", "constant", "output", "temporary", "thread-local"
DEVICE, HOST, CHIP = "device", "host", "chip"

_ASSIGNMENT, _LIVE_RANGE = "-buffer-assignment.txt", "-live-range.txt"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(?: color (\d+),)?(?: page \d+,)? (.*):$")
_PARAMETER = re.compile(r"^parameter (\d+), .* at ShapeIndex \{(\d*)")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")
_POSITION = re.compile(r"^    \d+:")
_START = re.compile(r"^  %(\S+) = .* async-start\(.*?\bcalls=%([\w.\-]+)", re.MULTILINE)
_WRAPPER = re.compile(r"^%(async_\S+) [^\n]*\{\n(.*?)\n\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """The output of one instruction, or one element of its tuple.

    Attributes:
      name, index: the instruction, and the index in its tuple ("" for none).
      nbytes, offset: its size and its offset in its allocation.
      type: its type in HLO.
      start, end: the first and last position in the order of instructions where it is alive.
    """

    name: str
    index: str
    nbytes: int
    offset: int
    type: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A range of memory and the values that are stored in it, at the same time or one after the other."""

    kind: str  # ARGUMENT, CONSTANT, OUTPUT, TEMPORARY or LOCAL (a register of a kernel)
    nbytes: int  # its size
    space: str  # DEVICE, HOST or CHIP
    parameter: int | None  # for an argument, the number of the program's parameter
    is_output: bool  # whether an output is stored here: of an argument, whether it is donated
    values: tuple[Value, ...]  # the values that are stored in it


@dataclasses.dataclass(frozen=True)
class Dump:
    """The memory of one program."""

    allocations: tuple[Allocation, ...]  # its allocations
    length: int  # the number of instructions in the order
    # maps an instruction in an asynchronous wrapper to the instruction that starts the wrapper
    started: Mapping[str, str]


def read(folder: pathlib.Path) -> Dump | None:
    """Returns the dump of the largest program in a folder, or None if there is none."""
    found = sorted(folder.glob(f"*{_ASSIGNMENT}"), key=lambda path: path.stat().st_size)
    if not found:
        return None
    stem = found[-1].name.removesuffix(_ASSIGNMENT)
    ranges, length = _live_ranges((folder / f"{stem}{_LIVE_RANGE}").read_text())
    is_gpu = "gpu_after_optimizations" in stem
    allocations = tuple(_allocations(found[-1].read_text(), ranges, is_gpu))
    return Dump(allocations, length, _started((folder / f"{stem}.txt").read_text()))


def _started(text: str) -> dict[str, str]:
    starts = {computation: name for name, computation in _START.findall(text)}
    wrapped = ((starts[name], body) for name, body in _WRAPPER.findall(text) if name in starts)
    return {inside: start for start, body in wrapped for inside in _INSTRUCTION.findall(body)}


def _live_ranges(text: str) -> tuple[dict[tuple[str, str], tuple[int, int]], int]:
    """Returns (start, end) by instruction and index, and the number of instructions."""
    ranges, length = {}, 0
    for line in text.split("\n"):
        if found := _RANGE.match(line):
            name, index, start, end = found.groups()
            ranges[name, index] = (int(start), int(end))
        elif _POSITION.match(line):
            length += 1
        elif line.startswith("  Live ranges at"):
            break
    return ranges, length


def _allocations(text: str, ranges: dict[tuple[str, str], tuple[int, int]], is_gpu: bool) -> Iterator[Allocation]:
    header: tuple[str, str | None, str] | None = None
    values: list[Value] = []
    for line in [*text.split("\n"), "allocation 0: size 0, end:"]:
        if found := _VALUE.match(line):
            name, index, nbytes, offset, type_text = found.groups()
            start, end = ranges.get((name, index or ""), (-1, -1))
            values.append(Value(name, index or "", int(nbytes), int(offset), type_text, start, end))
        elif found := _ALLOCATION.match(line):
            if header is not None:
                yield _allocation(header, tuple(values), is_gpu)
            header, values = (found[1], found[2], found[3]), []


def _allocation(header: tuple[str, str | None, str], values: tuple[Value, ...], is_gpu: bool) -> Allocation:
    size, color, flags = header
    is_output = "maybe-live-out" in flags or "output shape is" in flags
    parameter = _PARAMETER.match(flags)
    if parameter is not None:
        kind = ARGUMENT
    elif "thread-local" in flags:
        kind = LOCAL
    elif "constant" in flags:
        kind = CONSTANT
    else:
        kind = OUTPUT if is_output else TEMPORARY
    # A program with very many arguments takes them as one tuple. Then the number is the index in the tuple.
    number = int(parameter[2] or parameter[1]) if parameter is not None else None
    return Allocation(kind, int(size), _space(int(color or 0), is_gpu), number, is_output, values)


def _space(color: int, is_gpu: bool) -> str:
    if color == 5:
        return HOST
    return DEVICE if color == 0 or is_gpu else CHIP
