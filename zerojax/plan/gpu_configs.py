"""Describes GPUs to XLA's compiler. This module derives each description from that of an H200, which was read off the device.

Two files hold an H200's GpuTargetConfigProto as text, because JAX 0.11 and later need rates that JAX 0.10 does not accept.
The other GPUs are edits of these files, with figures from XLA's descriptions of the devices (Apache 2.0) and NVIDIA's data sheets.
"""

import re
from importlib import resources

import jax

Edits = tuple[tuple[str, str], ...]


def _device(kind: str, model: str, memory: int, bandwidth: int, l2: int) -> Edits:
    return (
        (r"(?m)^  name: .*", f'  name: "{kind}"'),
        (r"(?m)^  model_str: .*", f'  model_str: "{model}"'),
        (r"device_description_str: .*", f'device_description_str: "{kind}"'),
        (r"device_memory_size: \d+", f"device_memory_size: {memory}"),
        (r"memory_bandwidth: \d+", f"memory_bandwidth: {bandwidth}"),
        (r"l2_cache_size: \d+", f"l2_cache_size: {l2}"),
    )


# (regex, replacement) pairs, applied in this order.
EDITS: dict[str, Edits] = {
    "h200": (),
    "h100": _device(
        "NVIDIA H100 80GB HBM3",
        "sm_9.0a with 84942979072B RAM, 132 cores, 1980000KHz clock, 2619000KHz mem clock, 52428800B L2$",
        memory=84942979072,
        bandwidth=3352320000000,
        l2=52428800,
    ),
    "a100": (
        *_device(
            "NVIDIA A100-SXM4-80GB",
            "sm_8.0 with 85100068864B RAM, 108 cores, 1410000KHz clock, 1593000KHz mem clock, 41943040B L2$",
            memory=85100068864,
            bandwidth=2039040000000,
            l2=41943040,
        ),
        (r"(cuda_compute_capability \{\s*major:) 9", r"\g<1> 8"),
        (r"\n *feature_extension: .*", ""),
        (r"Compute Capability 9\.0a", "Compute Capability 8.0"),
        (r"\bcore_count: \d+", "core_count: 108"),
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
        *_device(
            "NVIDIA B200",
            "sm_10.0a with 191514411008B RAM, 148 cores, 1965000KHz clock, 3996000KHz mem clock, 132644864B L2$",
            memory=191514411008,
            bandwidth=7672320000000,
            l2=132644864,
        ),
        (r"(cuda_compute_capability \{\s*major:) 9", r"\g<1> 10"),
        (r"Compute Capability 9\.0a", "Compute Capability 10.0a"),
        (r"\bcore_count: \d+", "core_count: 148"),
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
