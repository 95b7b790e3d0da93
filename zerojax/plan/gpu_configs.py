"""Describes GPUs to XLA's compiler. This module derives each description from that of an H200, which was read off the device.

Two files hold an H200's GpuTargetConfigProto as text, because JAX 0.11 and later need rates that JAX 0.10 does not accept.
The other GPUs are edits of these files, with figures from XLA's descriptions of the devices (Apache 2.0) and NVIDIA's data sheets.
"""

import re
from importlib import resources

import jax

Edits = tuple[tuple[str, str], ...]


def _device(
    kind: str, capability: str, *, cores: int, clock: int, memory: int, memory_clock: int, bandwidth: int, l2: int
) -> Edits:
    """Returns the edits for a kind of device; clocks are in kHz, and sizes in bytes."""
    clocks = f"{cores} cores, {clock}KHz clock, {memory_clock}KHz mem clock"
    return (
        (r"(?m)^  name: .*", f'  name: "{kind}"'),
        (r"(?m)^  model_str: .*", f'  model_str: "sm_{capability} with {memory}B RAM, {clocks}, {l2}B L2$"'),
        (r"device_description_str: .*", f'device_description_str: "{kind}"'),
        (r"device_memory_size: \d+", f"device_memory_size: {memory}"),
        (r"memory_bandwidth: \d+", f"memory_bandwidth: {bandwidth}"),
        (r"l2_cache_size: \d+", f"l2_cache_size: {l2}"),
        (r"(cuda_compute_capability \{\s*major:) 9", rf"\g<1> {capability.partition('.')[0]}"),
        (r"Compute Capability 9\.0a", f"Compute Capability {capability}"),
        (r"\bcore_count: \d+", f"core_count: {cores}"),
    )


_H100 = {"cores": 132, "clock": 1980000, "memory_clock": 2619000, "bandwidth": 3352320000000, "l2": 52428800}
_A100 = {"cores": 108, "clock": 1410000, "memory_clock": 1593000, "bandwidth": 2039040000000, "l2": 41943040}
_B200 = {"cores": 148, "clock": 1965000, "memory_clock": 3996000, "bandwidth": 7672320000000, "l2": 132644864}
# (regex, replacement) pairs, applied in this order.
EDITS: dict[str, Edits] = {
    "h200": (),
    "h100": _device("NVIDIA H100 80GB HBM3", "9.0a", memory=84942979072, **_H100),
    "a100": (
        *_device("NVIDIA A100-SXM4-80GB", "8.0", memory=85100068864, **_A100),
        (r"\n *feature_extension: .*", ""),
        (r"fpus_per_core: \d+", "fpus_per_core: 64"),
        (r"shared_memory_per_core: \d+", "shared_memory_per_core: 167936"),
        (r"shared_memory_per_block_optin: \d+", "shared_memory_per_block_optin: 166912"),
        (r"clock_rate_ghz: [\d.]+", "clock_rate_ghz: 1.41"),
        (r"ops_per_clock: 256\b", "ops_per_clock: 128"),
        (r"ops_per_clock: 512\b", "ops_per_clock: 256"),
        (r"ops_per_clock: 1024\b", "ops_per_clock: 512"),
        (r"pcie_bandwidth: \d+", "pcie_bandwidth: 34359738368"),
    ),
    "b200": (
        *_device("NVIDIA B200", "10.0a", memory=191514411008, **_B200),
        (r"clock_rate_ghz: 1\.98\b", "clock_rate_ghz: 1.965"),
        (r"clock_rate_ghz: 1\.8\d+", "clock_rate_ghz: 1.8353101"),
        (r"ops_per_clock: 1024\b", "ops_per_clock: 2048"),
        (r"ops_per_clock: 512\b", "ops_per_clock: 1024"),
        (r"ops_per_clock: 256\b", "ops_per_clock: 512"),
    ),
}


def text(name: str, jax_version: tuple[int, ...] = jax.__version_info__) -> str:
    """Returns a GPU's description in the format of a version of JAX."""
    form = "0.10" if jax_version < (0, 11) else "0.11"
    described = (resources.files("zerojax.plan") / "target_configs" / f"h200-jax-{form}.txtpb").read_text()
    for pattern, replacement in EDITS[name]:
        described = re.sub(pattern, replacement, described)
    return described


def for_compiler(name: str, usable: float) -> str:
    """Returns a GPU's description with which the compiler of an absent GPU recomputes no more than that of a run.

    Where XLA's estimate of a program's memory is above what JAX may take, it computes values again. Without a device it counts with 0.8 of
    the memory described.

    Args:
      name: one of `EDITS`.
      usable: the share of the memory that JAX may take in a run.
    """
    return re.sub(r"(?<=device_memory_size: )\d+", lambda found: str(round(int(found[0]) * usable / 0.8)), text(name))
