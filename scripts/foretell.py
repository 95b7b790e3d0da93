"""Compares the clock with the committed measurements: prints the measured and the foretold time of each setting.

    python scripts/foretell.py --texts FOLDER
    python scripts/foretell.py --texts FOLDER --fit
    python scripts/foretell.py --texts FOLDER --start

`docs/benchmarks/raw/clock_settings.json` names the settings. FOLDER holds the compiled program of each. A missing one is compiled by
`zerojax.plan` with the code of the commit that was measured, for GPUs that need not exist (30 to 260 s of CPU each), and kept there.

Measured is the median over the runs of a setting, each the median over its steps. "First" is what was foretold when a row was first
compared (`first_ms`), "today" what today's tables give. `--fit` fits those figures of the tables in `zerojax/clock/tables` whose source
says so to the settings that are not held out, and writes them. The others' errors are the proof.
`--start` compares seconds of compiling, and to the first step, where a run of a setting found nothing in the compilation cache.
"""

import argparse
import dataclasses
import json
import lzma
import math
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RAW = ROOT / "docs" / "benchmarks" / "raw"
TABLES = ROOT / "zerojax" / "clock" / "tables"
sys.path.insert(0, str(ROOT))

from zerojax.clock import rates, start, walk  # noqa: E402
from zerojax.hlo import flow, syntax  # noqa: E402

FITTED = re.compile(r"fitted from ([\d.e+]+) within (\d+)%")  # the beginning of such a figure's source
SCATTER = 0.01  # of a measurement between machines, as a share

# A program that compiles a plan, and keeps the text of its step.
_COMPILE = """
import lzma, runpy, sys
import jax
compile = jax.stages.Lowered.compile
def kept(self, *args, **kwargs):
    compiled = compile(self, *args, **kwargs)
    with lzma.open(sys.argv[0], "wt", preset=1) as file:
        file.write(compiled.as_text())
    return compiled
jax.stages.Lowered.compile = kept
runpy.run_module("zerojax.plan", run_name="__main__")
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting, its measured seconds, and the program that it ran."""

    setting: Mapping[str, Any]
    seconds: float
    program: flow.Flow
    lines: int = 0
    known: walk.Known = dataclasses.field(default_factory=dict)

    def foretold(self, figures: rates.GpuRates) -> walk.StepTime:
        """Returns the time of a step by the clock."""
        return walk.walk(self.program, figures, self.setting["devices"], known=self.known)


def main() -> None:
    """Compiles what is missing, fits if asked to, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=pathlib.Path, required=True, help="a folder of compiled programs")
    parser.add_argument("--only", nargs="*", help="files of settings")
    parser.add_argument("--known", action="store_true", help="compile nothing")
    parser.add_argument("--fit", action="store_true", help="fit figures and write the tables")
    parser.add_argument("--parts", action="store_true", help="print where the time goes, too")
    parser.add_argument("--start", action="store_true", help="print seconds to the first step instead")
    options = parser.parse_args()
    settings = json.loads((RAW / "clock_settings.json").read_text())["settings"]
    chosen = [one for one in settings if not options.only or one["file"] in options.only]
    rows = []
    for setting in chosen:
        path = options.texts / f"{setting['file']}.0.hlo.xz"
        if path.exists() or (not options.known and compiled(setting, path)):
            with lzma.open(path, "rt") as file:
                module = syntax.parse(file.read())
            rows.append(Row(setting, measured(setting), flow.flow(module), module.text.count("\n")))
    if options.start:
        return print("\n".join(starts(rows)))
    if options.fit:
        for target in dict.fromkeys(row.setting["target"] for row in rows):
            fit(target, [row for row in rows if row.setting["target"] == target and row.setting["fitted"]])
        keep_errors(rows)
    print("\n".join(table(rows, options.parts)))


def compiled(setting: Mapping[str, Any], path: pathlib.Path) -> bool:
    """Compiles a setting's step with the code of its commit and keeps the text at `path`. Returns whether it succeeded."""
    config, *words = shlex.split(setting["words"].replace("\\", "\\\\"))
    flags = [f"--config.{word}" for word in words if not word.startswith("XLA_FLAGS=")]
    xla = [word.removeprefix("XLA_FLAGS=") for word in words if word.startswith("XLA_FLAGS=")]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", setting["commit"]], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        source = pathlib.Path(folder) / "source.tar"
        source.write_bytes(archive.stdout)
        with tarfile.open(source) as tar:
            tar.extractall(folder, filter="data")
        environ = os.environ | {"PYTHONPATH": folder, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(xla)}
        topology = f"1x{setting['devices']}"
        words = ["--config", config, "--target", setting["target"], "--topology", topology, *flags]
        code = _COMPILE.replace("sys.argv[0]", repr(str(path.resolve())))
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=folder, env=environ, capture_output=True, text=True
        )
    if not path.exists():
        print(f"{setting['file']}: not compiled: {done.stderr[-300:]}", file=sys.stderr)
    return path.exists()


def measured(setting: Mapping[str, Any]) -> float:
    """Returns the measured seconds of a step: the median over the setting's raw file and those that measured it again."""
    return statistics.median(_measured(one) for one in (setting, *setting.get("again", ())))


def _measured(setting: Mapping[str, Any]) -> float:
    text, pick = (RAW / setting["raw"]).read_text(), setting["pick"]
    if isinstance(pick, int):
        return json.loads(text.splitlines()[pick])["step_ms"] / 1e3
    if isinstance(pick, str):
        found = float(re.search(pick, text, re.DOTALL)[1])
        return found if setting["raw"].startswith("long") else found / 1e3
    steps = [run for name in pick for run in _runs(json.loads(text), name)]
    return statistics.median(steps)


def _runs(document: Any, name: str) -> list[float]:
    """Returns the median step of each run of a name ("part/name") in a file of `bench_train.py` or `bench_fp8.py`."""
    if "steps" in document:
        kind, layers = name.split("/")
        return [document["steps"][kind][layers]["ms"] / 1e3]
    return [statistics.median(run["step_s"][2:-1]) for run in _of_name(document, name) if "step_s" in run]


def _of_name(document: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns the runs of a name in a file of `bench_train.py`."""
    if "machines" in document:
        document = next(one for one in document["machines"] if name in one["settings"])
    *part, last = name.split("/")
    for key in part:
        document = document[key]
    return document["settings"][last]["runs"]


def starts(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table of seconds to the first step, of the errors, and of the figures that fit best."""
    import numpy as np
    from scipy import optimize

    lines = [
        "| setting | GPUs | lines | compile s | foretold | first step s | foretold |",
        "|---|---|---|---|---|---|---|",
    ]
    found: list[tuple[int, float, float, start.StartTimes, int]] = []
    for row in rows:
        setting = row.setting
        document = json.loads((RAW / setting["raw"]).read_text()) if setting["raw"].endswith(".json") else {}
        if not isinstance(setting["pick"], list) or "steps" in document:
            continue
        runs = [run for name in setting["pick"] for run in _of_name(document, name) if run.get("compile_s")]
        cold = max(runs, key=lambda run: run["compile_s"], default=None)
        if cold is None:
            continue
        own = start.foretold(row.lines, setting["devices"], _pinned(row.program.module))
        found.append((row.lines, cold["compile_s"], cold["first_step_s"], own, setting["devices"]))
        cells = f"{cold['compile_s']:.1f} | {own.compile:.1f} | {cold['first_step_s']:.1f} | {own.first_step:.1f}"
        lines.append(
            f"| {setting['name']} | {setting['devices']} {setting['target'].upper()} | {row.lines:,} | {cells} |"
        )
    if not found:
        return ["no setting has seconds of compiling"]
    for name, pairs in (
        ("compile", [(own.compile, took) for _, took, _, own, _ in found]),
        ("first step", [(own.first_step, took) for _, _, took, own, _ in found]),
    ):
        errors = [abs(foretold / took - 1) for foretold, took in pairs]
        lines.append(
            f"\n{name}: {len(errors)} settings, median error {statistics.median(errors):.0%}, worst {max(errors):.0%}"
        )
    compiled, rest = (
        optimize.nnls(np.array(sizes) / np.array(took)[:, None], np.ones(len(found)))[0]
        for sizes, took in (
            ([[1.0, n] for n, *_ in found], [took for _, took, *_ in found]),
            ([[1.0, devices] for *_, devices in found], [first - took for _, took, first, *_ in found]),
        )
    )
    lines.append(
        f"\nbest: {compiled[0]:.1f} s + {compiled[1] * 1e3:.2f} ms a line, then {rest[0]:.1f} s + {rest[1]:.1f} s a GPU"
    )
    return lines


def _pinned(module: syntax.Module) -> float:
    """Returns the bytes that a step copies to host memory, about those that it has there at its peak."""
    copies = [i for i in module.entry.instructions if i.opcode == "copy-start" and i.arrays[0].is_on_host]
    return float(sum(copy.arrays[0].nbytes for copy in copies))


def fit(target: str, rows: Sequence[Row]) -> None:
    """Fits the figures of a table by least squares, each near the value of its source, and writes the table."""
    import numpy as np
    from scipy import optimize

    path = TABLES / f"{target}.json"
    document = json.loads(path.read_text())
    begun = {name: FITTED.match(source) for name, (_, source) in document["figures"].items()}
    known = {name: (float(found[1]), int(found[2]) / 100) for name, found in begun.items() if found}
    table = rates.read(path.read_text())

    def moved(doubts: Sequence[float]) -> rates.GpuRates:
        new = {name: start * math.exp(doubt * share) for (name, (start, share)), doubt in zip(known.items(), doubts)}
        return dataclasses.replace(table, figures={**table.figures, **new})

    def residuals(doubts: Sequence[float]) -> list[float]:
        figures = moved(doubts)
        return [*(math.log(row.foretold(figures).seconds / row.seconds) / SCATTER for row in rows), *doubts]

    found = optimize.least_squares(
        residuals, np.zeros(len(known)), diff_step=0.1, x_scale=1.0, loss="soft_l1", max_nfev=10
    )
    for name in known:
        document["figures"][name][0] = float(f"{moved(found.x).figures[name]:.4g}")
    path.write_text(rates.as_text(document))
    rates.of.cache_clear()


def table(rows: Sequence[Row], has_parts: bool) -> list[str]:
    """Returns the lines of the table, and of the errors."""
    lines = ["| setting | GPUs | measured ms | first | error | today | error | |", "|---|---|---|---|---|---|---|---|"]
    errors: dict[tuple[str, bool, str], list[float]] = {}
    for row in rows:
        setting = row.setting
        found = row.foretold(rates.of(setting["target"]))
        cells = f"{row.seconds * 1e3:,.1f}"
        for when, seconds in (("first", setting.get("first_ms", 0) / 1e3), ("today", found.seconds)):
            error = seconds / row.seconds - 1
            cells += f" | {seconds * 1e3:,.1f} | {error:+.1%}" if seconds else " | | "
            errors.setdefault((setting["target"], setting["fitted"], when), []).extend([abs(error)] if seconds else [])
        gpus = f"{setting['devices']} {setting['target'].upper()}"
        lines.append(f"| {setting['name']} | {gpus} | {cells} | {'fitted' if setting['fitted'] else 'held out'} |")
        if has_parts:
            lines.append("    " + ", ".join(f"{name} {s * 1e3:.1f}" for name, s in found.parts.items() if s > 1e-4))
            lines.append("    " + ", ".join(f"{name} {s * 1e3:.1f}" for name, s in found.busy.items()))
    for (target, is_fitted, when), own in sorted(errors.items(), reverse=True):
        name = f"{target.upper()}, {'fitted' if is_fitted else 'held out'}, {when}"
        if own:
            lines.append(
                f"\n{name}: {len(own)} settings, median error {statistics.median(own):.1%}, worst {max(own):.1%}"
            )
    return lines


def keep_errors(rows: Sequence[Row]) -> None:
    """Writes the errors of the settings that are held out into the tables, for the plan to print."""
    for target in {row.setting["target"] for row in rows}:
        held = [row for row in rows if row.setting["target"] == target and not row.setting["fitted"]]
        errors = [abs(row.foretold(rates.of(target)).seconds / row.seconds - 1) for row in held]
        if errors:
            found = {"median": statistics.median(errors), "worst": max(errors), "settings": len(errors)}
            path = TABLES / f"{target}.json"
            document = json.loads(path.read_text())
            own = {
                f"error.{name}": [float(f"{value:.4g}"), "docs/benchmarks/clock.md"] for name, value in found.items()
            }
            document["figures"] = dict(sorted((document["figures"] | own).items()))
            path.write_text(rates.as_text(document))
            rates.of.cache_clear()


if __name__ == "__main__":
    main()
