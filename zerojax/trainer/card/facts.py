"""Collects what a run is before its first step. This module returns a run card's fields that no step changes, as JSON."""

import hashlib
import importlib.metadata
import json
import pathlib
import platform
import re
import socket
from collections.abc import Mapping
from typing import Any

import jax

from zerojax import mesh as mesh_lib
from zerojax.launch import together
from zerojax.plan import step_plan
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib

PACKAGES = ("zerojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SOURCES = ("zerojax", "pallas_kernels")  # folders beside each other, in a checkout and where they are installed
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def collect(
    config: settings_lib.Config, program: program_lib.Program, plan: step_plan.Plan, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the settings, the versions, the devices and the plan of a run. All processes of the run must call it.

    Args:
      config: the run's settings, as they were given.
      program, plan: the built program and its compiled step.
      fingerprints: of the training text and the tokenizer.
    """
    settings, first = config_lib.to_dict(config), program.mesh.devices.flat[0]
    return {
        "config": settings,
        "config_sha256": sha256(settings),
        "data": dict(fingerprints),
        "versions": versions(),
        "hosts": list(dict.fromkeys(together.allgathered(socket.gethostname()))),
        "processes": jax.process_count(),
        "devices": {"count": program.mesh.size, "kind": first.device_kind, "platform": first.platform},
        "mesh": mesh_lib.sizes(program.mesh),
        "stage": config.zero.stage,
        "global_batch_size": program.sizes.global_batch_size,
        "micro_batch_size": program.sizes.micro_batch_size,
        "grad_accum": program.sizes.grad_accum,
        "tokens_per_step": program.tokens_per_step,
        "flops_per_token": program.flops_per_token,
        "planned_peak_bytes": plan.most,
        "foretold_step_seconds": plan.seconds,
        "received_bytes": received(plan),
    }


def sha256(settings: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of settings as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def received(plan: step_plan.Plan) -> dict[str, dict[str, int]]:
    """Returns the bytes that each device receives in a step, by the collective's kind and by role."""
    by_kind: dict[str, int] = {}
    for row in plan.ledger.rows:
        by_kind[row.kind] = by_kind.get(row.kind, 0) + row.nbytes
    by_role = {role: round(found["bytes"]) for role, found in plan.ledger.totals().items() if found["bytes"]}
    return {"by_kind": dict(sorted(by_kind.items())), "by_role": by_role}


def versions() -> dict[str, str]:
    """Returns the versions of Python, the packages, the runtime and the GPUs' driver. What is not there is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["zerojax_sources"] = sources()
    found["runtime"] = " ".join(jax.devices()[0].client.platform_version.split())
    if (driver := _driver()) is not None:
        found["driver"] = driver
    return found


def sources() -> str:
    """Returns the first 12 digits of a SHA-256 of this library's own files, which a version does not tell apart.

    Configs are left out: a card holds every setting, and only an installed package has a copy of them.
    """
    root, digest = pathlib.Path(__file__).parents[3], hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        if path.parent.name == "configs":
            continue
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver, or None without one."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None
