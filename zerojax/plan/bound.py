"""Bounds the time of a step on a kind of device from below. This module divides a step's work by the device's rates.

    step >= max( operations / matrix rate,     bytes moved / memory bandwidth,
                 bytes received / link bandwidth,  bytes to or from the host / its link )

It is the maximum because all four can run at the same time. Bytes moved are those that the compiled program's instructions read and write.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax
from zerojax.plan import matmuls, targets

COMPUTE, MEMORY, COLLECTIVES, HOST, DISK = "compute", "memory", "collectives", "host link", "disk"

REACHED = 0.7  # of the matrix rate, by the layers' matmuls and attention of 8B on H200s (docs/benchmarks/gpu.md)

# Instructions that move no bytes themselves. The bytes of a loop or a branch are those of its body, and those of a -done are its -start's.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id opt-barrier "
    "optimization-barrier domain add-dependency".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")  # read as many bytes of their first operand as they return


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least time of a step.

    Attributes:
      seconds: by term: "compute", "memory", "collectives", and "host link" and "disk" if bytes travel over them.
      offloaded: the least time of a step with offloaded state, whose copies run beside a part of it only (`times`); 0 without.
    """

    seconds: Mapping[str, float]
    offloaded: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Returns the least time of a step: its longest term, or that of its phases."""
        return max(*self.seconds.values(), self.offloaded)

    @property
    def binds(self) -> str:
        """Returns the name of the longest term."""
        return max(self.seconds, key=lambda term: self.seconds[term])

    def most_tokens_per_second(self, tokens: float) -> float:
        """Returns the highest possible tokens/s of a step of this many tokens."""
        return tokens / self.step_seconds


def least_step(
    target: targets.Target,
    mesh: Mesh,
    *,
    flops: Mapping[str, float],
    traffic: float,
    received: Mapping[tuple[str, ...], float],
    host: float = 0,
) -> Bound | None:
    """Returns the least time of a step, or None if the target's rates are unknown.

    Args:
      target: the kind of device.
      mesh: the devices; those of one process share a host.
      flops: operations of all devices together, by dtype (`flops.count`).
      traffic: bytes that one device reads and writes (`memory_traffic`).
      received: bytes that one device receives from others, by the mesh axes that they travel over.
      host: bytes between one device and host memory, in the busier direction (`host_traffic`).
    """
    rates = {dtype: rate.value for dtype, rate in target.matrix_rates.items()}
    if not rates or target.memory_bandwidth is None or target.link is None:
        return None
    per_device = {dtype: count / mesh.size for dtype, count in flops.items()}
    seconds = {
        # A dtype without a rate runs in 16 bits: fp8 on an A100, fp32 on a TPU at default precision.
        COMPUTE: sum(count / rates.get(dtype, rates["bf16"]) for dtype, count in per_device.items()),
        MEMORY: traffic / target.memory_bandwidth.value,
        COLLECTIVES: sum(_travel(target, mesh, axes, nbytes) for axes, nbytes in received.items()),
    }
    if host and target.host_link is not None:
        seconds[HOST] = host / target.host_link.value
    return Bound(seconds)


def _travel(target: targets.Target, mesh: Mesh, axes: Iterable[str], nbytes: float) -> float:
    """Returns the seconds that bytes take over some axes of the mesh.

    A group with d devices on a host uses d network adapters at once. NCCL runs one ring (channel) through every host per adapter,
    so 1/d of the bytes that a device receives comes through its own adapter.
    """
    assert target.link is not None
    near = nbytes / target.link.value
    by_host = hosts(mesh, axes)
    if len(by_host) == 1 or target.network is None:
        return near
    far = nbytes / min(by_host.values()) / target.network.value
    return far if min(by_host.values()) == 1 else max(near, far)


def hosts(mesh: Mesh, axes: Iterable[str]) -> dict[int, int]:
    """Returns the number of devices by host, in the first group along some axes."""
    names = set(axes)
    first = mesh.devices[tuple(slice(None) if name in names else 0 for name in mesh.axis_names)]
    found: dict[int, int] = {}
    for device in np.ravel(first):
        found[device.process_index] = found.get(device.process_index, 0) + 1
    return found


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of activations to host memory: their bytes, their seconds, and those of the forward pass beside which they run."""

    nbytes: int
    seconds: float
    forward: float


def copies(target: targets.Target, bound: Bound | None, sent: int) -> Copies | None:
    """Returns the copies of a step that sends so many bytes to host memory; None if there are none, or rates are unknown.

    The forward pass has a third of the operations, and runs at `REACHED` of the matrix rate.
    """
    if bound is None or not sent or target.host_link is None:
        return None
    return Copies(sent, sent / target.host_link.value, bound.seconds[COMPUTE] / 3 / REACHED)


def host_traffic(flow: hlo_flow.Flow) -> tuple[int, int]:
    """Returns the bytes that one device sends to host memory in a step, and the bytes that it fetches from there."""
    sent = fetched = 0
    for call in _counted(flow):
        where = call.computation
        for instruction in where.instructions:
            source = (
                where.by_name.get(instruction.operands[0]) if instruction.opcode in ("copy", "copy-start") else None
            )
            if source is None or not source.arrays:
                continue
            target = instruction.arrays[0]
            nbytes = call.times * target.nbytes * (target.is_on_host != source.arrays[0].is_on_host)
            sent, fetched = (sent + nbytes, fetched) if target.is_on_host else (sent, fetched + nbytes)
    return sent, fetched


def _counted(flow: hlo_flow.Flow) -> list[hlo_flow.Call]:
    """Returns the calls of computations, without those whose -start instruction is counted."""
    return [call for call in flow.calls.values() if not (call.site is not None and call.site.opcode.endswith("-start"))]


def memory_traffic(flow: hlo_flow.Flow) -> int:
    """Returns the bytes that one device reads and writes in a step of the compiled program. A loop counts times its length."""
    return sum(kernel.nbytes * kernel.times for kernel in kernels(flow))


class KernelBytes(NamedTuple):
    """An instruction that moves bytes of the device's memory: how many in one run, how often it runs, and where it is."""

    nbytes: int
    times: int
    where: syntax.Computation
    instruction: syntax.Instruction


def kernels(flow: hlo_flow.Flow) -> Iterator[KernelBytes]:
    """Yields the instructions of a program that move bytes.

    Each instruction reads its operands and writes its output once. If it reads a slice of an array, or updates a slice in place, only
    the slice counts. Caches make the true traffic smaller. Tiles that are read again make it larger.
    """
    for call in _counted(flow):
        for instruction in call.computation.instructions:
            nbytes = _moved(flow.module, call.computation, instruction)
            if nbytes:
                yield KernelBytes(nbytes, call.times, call.computation, instruction)


def _moved(module: syntax.Module, where: syntax.Computation, instruction: syntax.Instruction) -> int:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    written = _nbytes(instruction)
    if opcode == "custom-call" and len(instruction.arrays) > 1 and matmuls.is_library_call(instruction):
        written -= sum(array.nbytes for array in instruction.arrays[1:] if array.dtype in ("s8", "u8"))  # workspace
    read = [_nbytes(where.by_name[operand]) if operand in where.by_name else 0 for operand in instruction.operands]
    if opcode.removesuffix("-start") == "fusion" and instruction.called:
        inside = module.computation(instruction.called[-1])
        used = [_used(inside, number, nbytes) for number, nbytes in enumerate(read)]
        return sum(used) + _written(inside)
    if opcode in _SLICES:
        return 2 * written
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(read[1:])
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        return written  # a tuple of the inputs and the outputs
    return sum(read) + written


def _used(inside: syntax.Computation, number: int, nbytes: int) -> int:
    """Returns the bytes that a fusion reads of an operand. It converts only the elements that it uses."""
    parameter = inside.parameters.get(number)
    if parameter is None:
        return nbytes
    whole, users = _elements(parameter), inside.users.get(parameter.name, ())
    is_converted = False
    while len(users) == 1 and users[0].opcode in ("bitcast", "convert"):
        is_converted |= users[0].opcode == "convert"
        parameter, users = users[0], inside.users.get(users[0].name, ())
    if users and all(u.opcode in _SLICES and u.operands[0] == parameter.name for u in users):
        return min(nbytes, nbytes * sum(map(_elements, users)) // max(1, whole))
    in_place = ("dynamic-update-slice", "scatter")  # of the operand itself: what is converted is read whole
    if users and not is_converted and all(u.opcode in in_place and u.operands[0] == parameter.name for u in users):
        return 0
    return nbytes


def _written(inside: syntax.Computation) -> int:
    """Returns the bytes that a fusion writes: for an array updated in place, those of the update."""
    root = inside.root
    outputs = [inside.by_name[o] for o in root.operands if o in inside.by_name] if root.opcode == "tuple" else [root]
    total = 0
    for output in outputs:
        while output.opcode == "bitcast" and output.operands[0] in inside.by_name:
            output = inside.by_name[output.operands[0]]
        update = {"dynamic-update-slice": 1, "scatter": -1}.get(output.opcode)
        total += _nbytes(output if update is None else inside.by_name[output.operands[update]])
    return total


def _elements(instruction: syntax.Instruction) -> int:
    return sum(array.elements for array in instruction.arrays)


def _nbytes(instruction: syntax.Instruction) -> int:
    return sum(array.nbytes for array in instruction.arrays if not array.is_on_host)
