"""Names the devices that programs can be compiled for without having them. This module holds their figures and makes compile-only devices.

A compile-only device has no memory and runs nothing. Programs lowered for a mesh of such devices go through all of XLA's pipeline, so
their collectives, buffers and peak memory are those of the real machine. GPUs need the extra `plan-gpu`, TPUs need `plan-tpu`.
"""

import contextlib
import dataclasses
import glob
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from zerojax import errors
from zerojax.errors import UserError
from zerojax.launch import devices as devices_lib
from zerojax.plan import gpu_configs

MEASURED = "measured"
GIVEN = "given"  # by the user
ASSUMED = "assumed"
NVIDIA = "published: NVIDIA data sheet, not measured"
XLA = "published: XLA's description of the device, not measured"
GOOGLE = "published: Cloud TPU documentation, not measured"


# The share of a device's memory that XLA may use: the driver, NCCL, cuBLAS and cuDNN need the rest.
USABLE = 0.92


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number and its source."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device. Rates are of one device, and those of links are for one direction. None means unknown."""

    name: str  # the value of --target
    kind: str  # "gpu", "tpu" or "cpu"
    device_kind: str  # JAX's name of the device
    memory: Figure | None = None  # bytes of device memory
    memory_bandwidth: Figure | None = None  # bytes/s to and from device memory
    # dense FLOP/s by dtype ("bf16", "fp8", "fp32"; on GPUs fp32 matmuls run as TF32)
    matrix_rates: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    link: Figure | None = None  # bytes/s to devices of the same host (NVLink) or slice (ICI)
    network: Figure | None = None  # bytes/s to other hosts; None if the link reaches them (ICI) or there are none
    host_link: Figure | None = None  # bytes/s to host memory
    # bytes/s to host memory and as many from it at the same time; None: those of `host_link`
    host_duplex: Figure | None = None
    # bytes/s to host memory from all devices of one host together; None: what their links carry
    host_memory: Figure | None = None
    # bytes/s of a host's disk, read and written at the same time, both together; for offload to a disk
    disk: Figure = Figure(2e9, ASSUMED)
    is_pool: bool = False  # whether `memory` is the amount that JAX may allocate, not all of the device's memory

    @property
    def usable(self) -> int | None:
        """Returns the bytes of memory that XLA may use, or None if the memory is unknown."""
        if self.memory is None:
            return None
        return int(self.memory.value if self.is_pool else self.memory.value * USABLE)

    def beside(self, devices: int) -> "Target":
        """Returns the target with the rates to host memory and a disk that each has when so many devices of one host copy at once."""
        disk = dataclasses.replace(self.disk, value=self.disk.value / devices)
        if self.host_memory is None:
            return dataclasses.replace(self, disk=disk)
        share = dataclasses.replace(self.host_memory, value=self.host_memory.value / devices)

        def least(link: Figure | None) -> Figure | None:
            return share if link and share.value < link.value and link.source != GIVEN else link

        return dataclasses.replace(
            self, disk=disk, host_link=least(self.host_link), host_duplex=least(self.host_duplex)
        )


def _rates(source: str, **rates: float) -> dict[str, Figure]:
    return {dtype: Figure(rate, source) for dtype, rate in rates.items()}


_INFINIBAND_400 = Figure(50e9, "published: one 400 Gbit/s adapter for each GPU, not measured")
_INFINIBAND_200 = Figure(25e9, "published: one 200 Gbit/s adapter for each GPU, not measured")

_CLOCK = MEASURED + ": the memory's clock; copies reach 3.5e12, a fused update 4.15e12"
_EIGHT = MEASURED + ": eight at once, each 28 copies of 470 MB in 0.75 s; docs/benchmarks/gpu.md"
_HOPPER = _rates(NVIDIA, bf16=989.4e12, fp8=1978.9e12, fp32=494.7e12)

# Each row has the memory, its bandwidth, the rates of matmuls, and the links to devices of the host or slice and to other hosts.
# fmt: off
TARGETS: dict[str, Target] = {
    "h200": Target(
        "h200", "gpu", "NVIDIA H200", Figure(150109880320, MEASURED), Figure(4.814304e12, _CLOCK), _HOPPER,
        Figure(450e9, NVIDIA), _INFINIBAND_400, host_link=Figure(54e9, MEASURED), host_duplex=Figure(43e9, MEASURED),
        host_memory=Figure(141e9, _EIGHT),
    ),
    "h100": Target(
        "h100", "gpu", "NVIDIA H100 80GB HBM3", Figure(84942979072, XLA), Figure(3.35232e12, XLA), _HOPPER,
        Figure(450e9, NVIDIA), _INFINIBAND_400, host_duplex=Figure(43e9, MEASURED),
        host_link=Figure(54e9, MEASURED + " on an H200, over the same PCIe 5.0 x16"),
    ),
    "a100": Target(
        "a100", "gpu", "NVIDIA A100-SXM4-80GB", Figure(85100068864, XLA), Figure(2.03904e12, XLA),
        _rates(NVIDIA, bf16=312e12, fp32=156e12), Figure(300e9, NVIDIA), _INFINIBAND_200, host_link=Figure(32e9, NVIDIA),
    ),
    "b200": Target(
        "b200", "gpu", "NVIDIA B200", Figure(191514411008, XLA), Figure(7.67232e12, XLA),
        _rates(NVIDIA, bf16=2250e12, fp8=4500e12, fp32=1125e12), Figure(900e9, NVIDIA), _INFINIBAND_400,
        host_link=Figure(64e9, NVIDIA),
    ),
    "v5e": Target(
        "v5e", "tpu", "TPU v5 lite", Figure(16 * 2**30, GOOGLE), Figure(819e9, GOOGLE), _rates(GOOGLE, bf16=197e12),
        Figure(200e9, GOOGLE + ": 1,600 Gbit/s over 4 links"),
    ),
    "v5p": Target(
        "v5p", "tpu", "TPU v5", Figure(95 * 2**30, GOOGLE), Figure(2765e9, GOOGLE), _rates(GOOGLE, bf16=459e12, fp8=459e12),
        Figure(600e9, GOOGLE + ": 4,800 Gbit/s over 6 links"),
    ),
    "v6e": Target(
        "v6e", "tpu", "TPU v6 lite", Figure(32 * 2**30, GOOGLE), Figure(1640e9, GOOGLE), _rates(GOOGLE, bf16=918e12),
        Figure(400e9, GOOGLE + ": 3,200 Gbit/s over 4 links"),
    ),
    "cpu": Target("cpu", "cpu", "cpu"),
}
# fmt: on
HERE = "here"  # the devices of this machine

_TPU_DIMS = {"v5e": 2, "v5p": 3, "v6e": 2}

# libtpu needs these on a machine without a TPU. The last lets several processes load it at the same time.
_LIBTPU_ENVIRON = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def get(name: str) -> Target:
    """Returns a target by name. "here" is this machine's kind of device, with the memory that the device reports.

    Raises:
      UserError: the target is unknown.
    """
    if name == HERE:
        return _kind_of(jax.local_devices()[0])  # a process cannot query the memory of non-addressable devices
    errors.one_of("target", name, [*TARGETS, HERE])
    return TARGETS[name]


def of_device(device: Any) -> str:
    """Returns the name of the target that a device is, present or not; "" if none is."""
    return next((name for name, target in TARGETS.items() if target.device_kind == device.device_kind), "")


def devices(target: str, topology: str = "") -> list[Any]:
    """Returns the devices for a mesh: real ones for the targets "cpu" and "here", compile-only ones for the others.

    Args:
      target: a name in TARGETS, or "here".
      topology: for GPUs and CPUs, hosts x devices ("1x8", "64x8"; "8" is one host). For TPUs, the slice's chips ("4x4x8", "8x8").
        "" means all devices, for "here" and "cpu" only.

    Raises:
      UserError: the target is unknown, the topology is malformed, or the target's extra is not installed.

    >>> mesh = zerojax.make_mesh(devices=devices("h200", "1x8"))
    """
    known = get(target)
    if are_here(target):
        return _real_devices(target, topology)
    return _tpus(known, topology) if known.kind == "tpu" else _gpus(known, topology)


def check_compiler(target: Target) -> None:
    """Raises a UserError if the compiler for an absent device is not installed."""
    names, what = {
        "gpu": (("jax_cuda13_plugin", "jax_cuda12_plugin"), "JAX's CUDA compiler"),
        "tpu": (("libtpu",), "the TPU compiler"),
    }[target.kind]
    if not any(map(importlib.util.find_spec, names)):
        raise UserError(f"target {target.name}: {what} is missing; pip install 'zerojax[plan-{target.kind}]'")


def are_here(target: str) -> bool:
    """Returns whether the devices of a target are this machine's, so that compiled programs may run."""
    return target in (HERE, "cpu")


def _gpus(target: Target, topology: str) -> list[Any]:
    hosts, per_host = hosts_of(target.name, topology)
    check_compiler(target)
    config = gpu_configs.for_compiler(target.name, USABLE)
    return _compile_only(target, topology, platform="cuda", target_config=config, topology=f"1x{hosts}x{per_host}")


def _tpus(target: Target, topology: str) -> list[Any]:
    dims = _TPU_DIMS[target.name]
    if not re.fullmatch("x".join([r"[1-9]\d*"] * dims), topology):
        form = "4x4x8" if dims == 3 else "4x8"
        raise UserError(f"topology: a {target.name} slice has {dims} dims of chips, such as {form}; got {topology!r}")
    check_compiler(target)
    if line := _other_libtpu():
        warnings.warn(f"target {target.name}: {line}", stacklevel=2)
    if not any(glob.glob(pattern) for pattern in devices_lib.DEVICE_FILES["tpu"][0]):
        for name, value in _LIBTPU_ENVIRON.items():
            os.environ.setdefault(name, value)
    return _compile_only(target, topology, platform="tpu", topology_name=f"{target.name}:{topology}")


def _other_libtpu() -> str:
    """Returns a line if the TPU compiler is of another version than this JAX requires; "" if not, or if a version is unknown."""
    try:
        found, required = importlib.metadata.version("libtpu"), importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    wanted = next(filter(None, (re.match(r"libtpu==([\d.]+)\.\*", line) for line in required)), None)
    if wanted is None or f"{found}.".startswith(f"{wanted[1]}."):
        return ""
    return (
        f"libtpu is {found}, and jax {jax.__version__} requires {wanted[1]}.*; programs that it compiles may be unreadable; "
        "pip install 'zerojax[plan-tpu]'"
    )


def _compile_only(target: Target, requested: str, **description: Any) -> list[Any]:
    with contextlib.suppress(RuntimeError):  # JAX's backends have started
        devices_lib.pass_over_absent()
    try:
        return list(topologies.get_topology_desc(**description).devices)
    except Exception as error:  # the plugins raise JaxRuntimeError, ValueError, RuntimeError and NotImplementedError
        raise UserError(
            f"target {target.name}: the compiler of jax {jax.__version__} rejects topology {requested!r}: {errors.first_line(error)}"
        ) from error


def _real_devices(target: str, topology: str) -> list[Any]:
    """Returns this machine's devices. If JAX's backends have not started, emulates CPU devices."""
    hosts, per_host = hosts_of(target, topology) if topology else (0, 0)
    count = hosts * per_host
    if target == "cpu":
        with contextlib.suppress(UserError):  # JAX's backends have started, perhaps with enough devices
            devices_lib.emulate_cpu_devices(count or 1)
    devices = jax.devices("cpu") if target == "cpu" else jax.devices()
    if count > len(devices):
        can_be = target == "cpu" and count <= devices_lib.MOST_EMULATED
        way_out = f"set JAX_NUM_CPU_DEVICES={count} before JAX starts" if can_be else "choose fewer"
        raise UserError(f"topology: {topology} needs {count} devices, and {target} has {len(devices)}; {way_out}")
    return list(devices[: count or len(devices)])


def hosts_of(target: str, topology: str) -> tuple[int, int]:
    """Returns the hosts of a topology, and the devices of each. Raises a UserError if it is not hosts x devices."""
    if not re.fullmatch(r"([1-9][0-9]{0,5}x)?[1-9][0-9]{0,5}", topology):
        raise UserError(f"topology: {target} needs hosts x devices, such as 1x8 or 64x8; got {errors.shown(topology)}")
    hosts, _, per_host = topology.rpartition("x")
    return int(hosts or 1), int(per_host)


def _kind_of(device: jax.Device) -> Target:
    """Returns the device's target, or one without figures if the device is not in TARGETS, with the memory that the device reports."""
    known = next((t for t in TARGETS.values() if t.device_kind == device.device_kind), None)
    target = known or Target(HERE, device.platform, device.device_kind)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit:  # the allocator cuda_async reports 0 where XLA_PYTHON_CLIENT_PREALLOCATE is false
        return target
    return dataclasses.replace(
        target, memory=Figure(limit, MEASURED + ": the amount that JAX may allocate here"), is_pool=True
    )
