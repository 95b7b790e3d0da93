"""Summarises the files that runs of the trainer wrote. This module is the half of scripts/bench_train.py that starts no runs.

The step time of a setting is the median over runs of the median over steps; see `summary`.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from zerojax.plan import targets  # noqa: E402
from zerojax.trainer import metrics  # noqa: E402
from zerojax.trainer.checks import memory_guard  # noqa: E402

SCHEMA = 1
# The first step is slow, and after the second the trainer compares memory. If steps copy arrays to the host, the metrics of each step
# arrive after the next step's first copies, except for the last step, which therefore seems short.
COUNTED = slice(2, -1)
OK, NOT_STARTED = "ok", "not started: no time left"
RECORDED = re.compile(r"(XLA|JAX|NCCL|CUDA|NVIDIA|TF|LIBTPU|OMP)_")  # environment variables
PACKAGES = "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin libtpu flax optax numpy nvidia-cudnn-cu13 nvidia-nccl-cu13"


def measured(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the figures in a run's folder, as far as the run wrote them."""
    found: dict[str, Any] = {}
    if (folder / memory_guard.FILE).exists():
        saved = json.loads((folder / memory_guard.FILE).read_text())
        plan, config = saved["plan"], json.loads((folder / "config.json").read_text())
        target = targets.TARGETS.get(plan["target"])
        rate = target and target.matrix_rates.get("fp32" if config["precision"] == "fp32" else "bf16")  # any 16 bits
        found = {
            "device_kind": saved["device_kind"],
            "devices": plan["devices"],
            "tokens_per_step": plan["tokens_per_step"],
            "flops_per_token": saved["flops_per_token"],
            "peak_flops": rate.value if rate else None,
            "planned_bytes": saved["planned_peak_bytes"],
            "bound_s": plan["bound"] and plan["bound"]["step_seconds"],
            "compile_s": plan["compile_seconds"],
        }
    if (folder / metrics.FILE).exists():
        lines = [line for line in metrics.read(folder) if "loss" in line and "profiled" not in line]
        found["step_s"] = [line["step_seconds"] for line in lines]
        found["host_s"] = [line["host_seconds"] for line in lines]
        found["loss"] = [line["loss"] for line in lines]
        found["measured_bytes"] = max((line.get("device_peak_bytes", 0) for line in lines), default=0) or None
    return found


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one row for the runs of a setting.

    Its step time is the median over runs of the median over counted steps. The shortest and the longest step are over all counted steps.
    Causal MFU is flops_per_token x tokens/s/device / peak FLOP/s of the device (see flops_per_token in zerojax.models.family).
    """
    good = [found for found in runs if found["status"] == OK and found.get("step_s", ())[COUNTED]]
    if not good:
        bad = next((found for found in runs if found["status"] != NOT_STARTED), runs[0])
        status = "too few steps to count" if bad["status"] == OK else bad["status"]
        return {"status": status, "runs": 0, **{key: bad.get(key) for key in ("devices", "planned_bytes")}}
    first, counted = good[0], [found["step_s"][COUNTED] for found in good]
    step = statistics.median(map(statistics.median, counted))
    host = statistics.median(statistics.median(found["host_s"][COUNTED]) for found in good)
    rate = first["tokens_per_step"] / first["devices"] / step
    peaks = [found["measured_bytes"] for found in good if found["measured_bytes"]]
    return {
        "status": OK if len(good) == len(runs) else f"{len(good)} of {len(runs)} runs",
        "runs": len(good),
        "step_s": step,
        "shortest_s": min(map(min, counted)),
        "longest_s": max(map(max, counted)),
        "tokens_per_s_per_device": rate,
        "mfu": rate * first["flops_per_token"] / first["peak_flops"] if first["peak_flops"] else None,
        "host_share": host / step,
        "first_step_s": statistics.median(found["first_step_s"] for found in good),
        "measured_bytes": max(peaks, default=None),
        "losses": [first["loss"][0], first["loss"][-1]],
        **{key: first[key] for key in ("devices", "tokens_per_step", "planned_bytes", "bound_s", "compile_s")},
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the rows as a Markdown table. Unknown values are empty cells."""
    forms = {
        "setting": lambda row: row["name"],
        "devices": lambda row: f"{row['devices']:d}",
        "tokens a step": lambda row: f"{row['tokens_per_step']:,}",
        "step ms": lambda row: f"{row['step_s'] * 1e3:.4g}",
        "shortest - longest": lambda row: f"{row['shortest_s'] * 1e3:.4g} - {row['longest_s'] * 1e3:.4g}",
        "bound ms": lambda row: f"{row['bound_s'] * 1e3:.4g}",
        "tokens/s/device": lambda row: f"{row['tokens_per_s_per_device']:,.0f}",
        "causal MFU": lambda row: f"{row['mfu']:.1%}",
        "planned GB": lambda row: f"{row['planned_bytes'] / 1e9:.2f}",
        "measured GB": lambda row: f"{row['measured_bytes'] / 1e9:.2f}",
        "host": lambda row: f"{row['host_share']:.1%}",
        "first step s": lambda row: f"{row['first_step_s']:.1f}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "loss": lambda row: " -> ".join(f"{loss:.4g}" for loss in row["losses"]),
        "status": lambda row: row["status"].replace("|", "/"),
    }

    def cell(form: Any, row: Mapping[str, Any]) -> str:
        try:
            return form(row)
        except (KeyError, TypeError):  # a failed run or this device kind does not report it
            return ""

    lines = [list(forms), ["---"] * len(forms)]
    lines += [[cell(form, {"name": name, **row}) for form in forms.values()] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def outcome(found: Mapping[str, Any]) -> str:
    """Returns a line on how a run ended."""
    if found["status"] != OK or not found.get("step_s", ())[COUNTED]:
        return found["status"]
    step = statistics.median(found["step_s"][COUNTED])
    return f"ok after {found['seconds']:.0f} s, {step * 1e3:.4g} ms a step, loss {found['loss'][-1]:.4g}"


def provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns everything else that the figures depend on: the code, the versions, the flags and the machine."""
    versions = {}
    for name in PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "schema": SCHEMA,
        "arguments": list(arguments),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": (_git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
        "python": platform.python_version(),
        "versions": versions,
        "environment": {name: value for name, value in sorted(os.environ.items()) if RECORDED.match(name)},
        "gpus": _output("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv"),
        "cpus": os.cpu_count(),
    }


def _git(*words: str) -> str | None:
    return _output("git", "-C", str(ROOT), *words)


def _output(*words: str) -> str | None:
    """Returns a command's stdout, or None if the command is missing or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
