"""Describes this machine to whoever helps with it. This module is the command line `zerojax report`.

zerojax report         versions, devices, links, driver, compile-only targets, kernels, cache; a remedy below each line that is wrong
zerojax report --json  the same as JSON
"""

import argparse
import glob
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from packaging import requirements

from zerojax import display, files
from zerojax.cluster import probe
from zerojax.commands import arguments, facts
from zerojax.commands.facts import NOTE, WRONG, Fact
from zerojax.errors import UserError
from zerojax.launch import devices as devices_lib
from zerojax.launch import program_cache
from zerojax.plan import targets

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin", "libtpu")
_NVIDIA = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_BESIDE = ("jaxlib", *_PLUGINS, *_NVIDIA, "safetensors", "ray", "wandb", "mlflow")
_VARIABLES = ("JAX_", "XLA_", "CUDA_VISIBLE", "HIP_VISIBLE", "TPU_", "NCCL_", "LIBTPU_", "SLURM_JOB_ID")
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
LIMIT = 180  # seconds: a driver that hangs must not hang the report

# What JAX finds is asked of another process: a broken driver may abort it, and planning for absent devices hides those that are here.
_ASK_DEVICES = """
import json, sys
from zerojax.launch import devices
devices.pass_over_absent()
import jax, jax.numpy as jnp
found = []
for device in jax.local_devices():
    x = jax.device_put(jnp.ones((256, 256)), device)
    assert float((x @ x)[0, 0]) == 256.0
    found.append({"kind": device.device_kind, "memory": (device.memory_stats() or {}).get("bytes_limit")})
print("\\n" + json.dumps({"backend": jax.default_backend(), "runtime": jax.devices()[0].client.platform_version, "devices": found}))
"""
_ASK_TARGET = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from zerojax.plan import targets
devices = targets.devices(sys.argv[1], sys.argv[2])
print("\\n" + json.dumps({"devices": len(devices)}))
"""
_ASK_KERNEL = """
import json, sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from zerojax import mesh
from zerojax.optim import fused
from zerojax.plan import targets
place = jax.sharding.NamedSharding(mesh.make_mesh(devices=targets.devices(sys.argv[1], "1x1")), jax.sharding.PartitionSpec())
tx = fused.fused_adamw(1e-3, moments="int8", implementation="pallas")
params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=place)}
state = jax.eval_shape(tx.init, params)
state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)
apply = lambda grads, state, params: tx.apply(grads, state, params, shardings={"w": place})
text = jax.jit(apply).lower(params, state, params).compile().as_text()
print("\\n" + json.dumps({"calls": text.count("custom_call_target=\\"__gpu$xla.gpu.triton") + text.count("triton_kernel_call")}))
"""


@arguments.command
def main() -> int:
    """Prints the report. Ends with status 1 if a line is wrong."""
    given = _parse(sys.argv[1:])
    if not given.json:
        print("asking devices and compilers, which may take a minute", file=sys.stderr, flush=True)
    return facts.show(list(collect()), as_json=given.json)


def collect() -> Iterator[Fact]:
    """Yields every fact. What takes seconds is done in other processes."""
    yield from _versions()
    yield from _machine()
    yield from _devices()
    yield from _links()
    yield from _targets()
    yield from _cache()
    yield from _environment(os.environ)


def _versions() -> Iterator[Fact]:
    """Yields versions, each against what zerojax requires."""
    is_new = sys.version_info >= (3, 11)
    yield Fact.judged("versions", "python", platform.python_version(), is_new, "install Python 3.11 or newer")
    yield Fact("versions", "zerojax", facts.version("zerojax") or "not installed; run from a checkout")
    for text in importlib.metadata.requires("zerojax") or [] if facts.version("zerojax") else []:
        wanted = requirements.Requirement(text)
        if wanted.marker is None:
            found = facts.version(wanted.name)
            fits = found is not None and wanted.specifier.contains(found, prereleases=True)
            value = found if fits and found else f"{found or 'missing'}, wants {wanted.specifier}"
            yield Fact.judged("versions", wanted.name, value, fits, f"pip install '{wanted.name}{wanted.specifier}'")
    jax_version = facts.version("jax") or ""
    for name in _BESIDE:
        found = facts.version(name)
        if found is None:
            continue
        is_of_jax = name == "jaxlib" or name.startswith("jax-")
        fits = not is_of_jax or found.split(".")[:2] == jax_version.split(".")[:2]
        value = found if fits else f"{found}, and jax is {jax_version}"
        yield Fact.judged("versions", name, value, fits, f"pip install '{name}=={jax_version}', the version of jax")


def _machine() -> Iterator[Fact]:
    """Yields the machine's system, processors, memory and disk."""
    yield Fact("machine", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Fact("machine", "processors", f"{cores} usable of {os.cpu_count()}")
    if memory := probe.memory():
        total, available = (display.human(memory[name]) for name in ("MemTotal", "MemAvailable"))
        yield Fact("machine", "memory", f"{total}, {available} available")
    free = shutil.disk_usage(".").free
    remedy = "checkpoints hold 12 bytes a parameter: make room, or use a --workdir on another disk"
    yield Fact.judged("machine", "disk", f"{display.human(free)} free here", free >= 10 * 2**30, remedy, NOTE)


def _devices() -> Iterator[Fact]:
    """Yields the devices that JAX finds and that compute, and those that are here and are not found."""
    found, why = _ask(_ASK_DEVICES)
    present = [kind for kind, (files, _) in devices_lib.DEVICE_FILES.items() if any(glob.glob(one) for one in files)]
    if found is None:
        remedy = "fix the driver or the plugin; JAX_PLATFORMS=cpu runs on the processors"
        yield Fact("devices", "JAX", why, WRONG, remedy)
    else:
        kinds = [device["kind"] for device in found["devices"]]
        counts = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        memory = next((device["memory"] for device in found["devices"] if device["memory"]), None)
        each = f", {display.human(memory)} each for JAX" if memory else ""
        yield Fact("devices", "JAX", f"{counts}{each}; each one computes")
        yield Fact("devices", "runtime", " ".join(str(found["runtime"]).split()))
        if found["backend"] == "cpu":
            yield from _unused(present)
    yield from _driver(present)


def _unused(present: list[str]) -> Iterator[Fact]:
    """Yields a line for accelerators that are here and that JAX does not use."""
    if not present:
        yield Fact("devices", "accelerators", "none; the trainer emulates CPU devices")
    extras = {"cuda": "cuda", "tpu": "plan-tpu"}
    for kind in present:
        _, variable = devices_lib.DEVICE_FILES[kind]
        hidden = os.environ.get(variable) in ("", "-1") or os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
        what = f"{kind} devices are here, and JAX computes on the CPU"
        remedy = f"pip install 'zerojax[{extras.get(kind, kind)}]', and check the driver"
        remedy = f"they are hidden: unset {variable} and JAX_PLATFORMS to use them" if hidden else remedy
        yield Fact("devices", "accelerators", what, NOTE if hidden else WRONG, remedy)


def _driver(present: list[str]) -> Iterator[Fact]:
    """Yields the GPUs' driver."""
    query = "name,driver_version,memory.total,pcie.link.gen.max"
    rows = facts.lines(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    if rows:
        name, version, *_ = map(str.strip, rows[0].split(","))
        yield Fact("devices", "driver", f"NVIDIA {version}: {len(rows)} x {name}")
    elif "cuda" in present:
        remedy = "install or restart the NVIDIA driver, version 580 or newer for CUDA 13"
        yield Fact("devices", "driver", "nvidia-smi does not answer", WRONG, remedy)


def _links() -> Iterator[Fact]:
    """Yields how GPUs and hosts are connected."""
    # The header is indented
    matrix = [line.split() for line in facts.lines(["nvidia-smi", "topo", "-m"]) if re.match(r"GPU\d+\s", line)]
    pairs = [word for row in matrix for word in row[1 : 1 + len(matrix)] if word != "X"]
    if pairs:
        kinds = {kind: pairs.count(kind) for kind in dict.fromkeys(pairs)}
        shown = ", ".join(f"{kind} between {count // 2} pairs" for kind, count in kinds.items())
        is_fast = all(kind.startswith("NV") for kind in pairs)
        remedy = "gathers cross PCIe: prefer stage 2, or mesh.replica, between devices without NVLink"
        yield Fact.judged("links", "between GPUs", shown, is_fast, remedy, NOTE)
    ports = sorted(glob.glob("/sys/class/infiniband/*/ports/*/rate"))
    for rate in ports:
        state = pathlib.Path(rate).with_name("state")
        try:
            value, is_up = pathlib.Path(rate).read_text().strip(), "ACTIVE" in state.read_text()
        except OSError:
            continue
        value = value if is_up else f"{value}, not active"
        yield Fact.judged("links", rate.split("/")[4], value, is_up, "check the cable and the subnet manager", NOTE)
    if not ports:
        yield Fact("links", "between hosts", "no InfiniBand; several hosts talk over TCP")


def _targets() -> Iterator[Fact]:
    """Yields the targets for which programs can be compiled without their devices, and whether kernels compile for them."""
    gpus = [name for name, target in targets.TARGETS.items() if target.kind == "gpu"]
    tpus = [name for name, target in targets.TARGETS.items() if target.kind == "tpu"]
    for kind, names, topology in (("gpu", gpus, "1x8"), ("tpu", tpus, "2x4" if "v5e" in tpus[:1] else "2x2x1")):
        found, why = _can_compile(names[0], topology)
        shown = f"zerojax plan --target {'|'.join(names)}"
        if found is None:
            remedy = _remedy(why, f"pip install 'zerojax[plan-{kind}]'")
            yield Fact("compile-only targets", kind, "not usable", NOTE, remedy)
            continue
        yield Fact("compile-only targets", kind, f"usable: {shown}")
        if kind == "gpu":
            kernels, why = _ask(_ASK_KERNEL, names[0])
            compiled = kernels is not None and kernels["calls"] > 0
            value = "the fused optimizer compiles" if compiled else "the fused optimizer does not compile"
            remedy = _remedy(why, "config.optimizer.moments = 'fp32' needs no kernel")
            yield Fact.judged("compile-only targets", "Triton kernels", value, compiled, remedy)


def _can_compile(name: str, topology: str) -> tuple[Any, str]:
    """Returns (the answer of a process that makes a target's devices, ""), or (None, why there are none)."""
    try:
        targets.check_compiler(targets.TARGETS[name])  # before a process is started, which imports JAX
    except UserError as error:
        return None, str(error)
    return _ask(_ASK_TARGET, name, topology)


def _remedy(why: str, default: str) -> str:
    """Returns the remedy, with the error that asks for it."""
    return f"{default} ({why})" if why and default not in why else default


def _cache() -> Iterator[Fact]:
    """Yields where compiled programs are kept."""
    if program_cache.is_off():
        remedy = f"unset {program_cache.SWITCH.upper()} and {program_cache.FOLDER.upper()}: a second start then compiles nothing"
        yield Fact("cache", "compiled programs", "not kept", NOTE, remedy)
        return
    path = pathlib.Path(jax.config.values[program_cache.FOLDER] or program_cache.users_folder())
    value = f"{path}, {display.human(program_cache.size(path))}"
    remedy = f"it cannot be written: name another folder by {program_cache.FOLDER.upper()}"
    yield Fact.judged("cache", "compiled programs", value, os.access(files.nearest(path), os.W_OK), remedy)


def _environment(environ: Mapping[str, str]) -> Iterator[Fact]:
    """Yields the variables that change what JAX does."""
    for name in sorted(environ):
        if name.startswith(_VARIABLES) and not _SECRET.search(name):
            yield Fact("environment", name, environ[name])


def _ask(script: str, *words: str) -> tuple[Any, str]:
    """Runs a script in another process. Returns (its last line as JSON, ""), or (None, why it failed)."""
    command = [sys.executable, "-c", script, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {LIMIT} s"
    try:
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    except (ValueError, IndexError):
        lines = [line.strip() for line in done.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
        return None, (lines[-1] if lines else f"the process ended with status {done.returncode}")[:300]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax report", doc=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
