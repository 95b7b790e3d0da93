"""Bounds the time of a step on a kind of device from below. This module divides a step's work by the device's rates.

    step >= max( operations / matrix rate,     bytes moved / memory bandwidth,
                 bytes received / link bandwidth,  bytes to or from the host / its link )

It is the maximum because all four can run at the same time. Bytes moved are those that the compiled program's instructions read and write.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import Mesh

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import traffic as traffic_lib
from zerojax.plan import targets

COMPUTE, MEMORY, COLLECTIVES, HOST, DISK = "compute", "memory", "collectives", "host link", "disk"

REACHED = 0.7  # of the matrix rate, by the layers' matmuls and attention of 8B on H200s (docs/benchmarks/gpu.md)


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
    received: Mapping[tuple[str, ...] | tuple[int, ...], float],
    host: float = 0,
) -> Bound | None:
    """Returns the least time of a step, or None if the target's rates are unknown.

    Args:
      target: the kind of device.
      mesh: the devices; those of one process share a host.
      flops: operations of all devices together, by dtype (`flops.count`).
      traffic: bytes that one device reads and writes (`hlo.traffic`).
      received: bytes that one device receives from others, by the mesh axes that they travel over, or the devices of a group.
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


def _travel(target: targets.Target, mesh: Mesh, axes: Iterable[str] | Iterable[int], nbytes: float) -> float:
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


def hosts(mesh: Mesh, axes: Iterable[str] | Iterable[int]) -> dict[int, int]:
    """Returns the number of devices by host, in the first group along some axes, or of some devices by their indices."""
    names: set[str | int] = set(axes)
    if indices := [index for index in names if isinstance(index, int)]:
        first = mesh.devices.flat[indices]
    else:
        first = mesh.devices[tuple(slice(None) if name in names else 0 for name in mesh.axis_names)]
    found: dict[int, int] = {}
    for device in np.ravel(first):
        found[device.process_index] = found.get(device.process_index, 0) + 1
    return found


def per_host(mesh: Mesh) -> int:
    """Returns the devices of a host; if hosts have unequal numbers, the most."""
    return max(hosts(mesh, mesh.axis_names).values())


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
    for call in traffic_lib.counted(flow):
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
