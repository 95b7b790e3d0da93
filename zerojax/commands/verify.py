"""Proves on this machine that all stages, offloads and axes give the same losses. This module is the command line `zerojax verify`.

zerojax verify --config configs/zero3.py                            stages 0 to 3, offload to the host, each axis of the mesh
zerojax verify --config configs/llama3_8b.py --config.model.num_layers=4 --steps 8
zerojax verify --config configs/zero3.py --only 0,3,3+optimizer     some settings alone
zerojax verify --against cpu                                        the losses of another machine, which the package ships
zerojax verify --config configs/zero3.py --save losses.json         keep 100 steps; later, or elsewhere: --against losses.json
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax import display, errors, files
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.launch import early, schedulers
from zerojax.trainer import command, metrics
from zerojax.trainer import config as config_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer.card import document
from zerojax.trainer.card import past as past_lib
from zerojax.zero import stages
from zerojax.zero.host import settings as offload_lib

_USAGE = (
    "zerojax verify (--config FILE [--config.KEY=VALUE ...] [--steps N] [--save FILE] | --against FILE) [--only 0,3] "
    "[--keep DIR] [--json]"
)
STEPS, KEPT_STEPS = 5, 100  # by default, and of those that are saved
SAME, DIFFERS, NOT_HERE, FAILED = "same", "differs", "cannot run here", "failed"
QUIET = {  # what a run writes and measures beside its steps is not compared
    "epochs": 0.0,
    "log_every": 1,
    "data.eval_split": "",
    "data.eval_file": "",
    "evaluate.every": 0,
    "checkpoint.every": 0,
    "checkpoint.at_end": False,
    "sample.length": 0,
    "export.format": "none",
    "profile.steps": 0,
    "metrics.to": (),
}
FORWARD = 0.1  # times the tolerance, at step 1: before any update the weights are the same
NORM = 10.0  # times the tolerance, of a gradient norm: a sum of many small squares
MATMULS, EXACT_MATMULS = "JAX_DEFAULT_MATMUL_PRECISION", ("highest", "float32")
# Relative: one last place of what is computed in. Sums over devices have another order at each stage, which flips some last places.
TOLERANCES = {
    "fp32": (1e-5, "float32 sums over devices have another order at each stage"),
    "tf32": (
        2.0**-11,
        "{name}={value} lets matmuls run in TF32, whose last place another order of sums flips here and there",
    ),
    "fp16": (2.0**-11, "another order of sums flips the last place of some float16 weights and activations"),
    "bf16": (2.0**-8, "another order of sums flips the last place of some bfloat16 weights and activations"),
    "fp8": (
        2.0**-4,
        "another order of sums flips the last place of some fp8 weights and activations, which have 3 or 4 bits",
    ),
    "few bits": (1e-2, "8-bit moments and stochastic rounding differ in many bits where a sum differs in its last"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A stage, and what is offloaded or the size of an axis there.

    Attributes:
      name: as in --only: "3", "3+optimizer", "3+params", "3+model=2".
      changes: {place: value} of the config.
    """

    name: str
    changes: Mapping[str, Any]


@dataclasses.dataclass
class Verified:
    """What a setting's run gave.

    Attributes:
      setting: what it ran with.
      verdict: "same", "differs", "cannot run here" (refused, or too large) or "failed".
      line: the reason, if it did not run.
      losses, norms: of each step.
      loss_difference, norm_difference: the largest relative differences to what it is compared with; None if nothing was compared.
      card: the run card.
    """

    setting: Setting
    verdict: str = SAME
    line: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    loss_difference: float | None = None
    norm_difference: float | None = None
    card: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@arguments.command
def main() -> int:
    """Runs each setting and prints the table. Status 1: some losses differ, or nothing was proven; 2: wrong input."""
    if early.listens_for(signal.SIGTERM):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the run in progress too
    given, rest = _parse(sys.argv[1:])
    past = past_lib.read(given.against) if given.against else None
    sys.argv[1:] = rest = [*(past.flags if past else ()), *rest]  # which the config's flags are read from too
    config = config_lib.from_dict(command.parse(["zerojax verify", *rest]))
    started = schedulers.find()
    if started.cluster or started.method:
        raise UserError(f"verify: is started as one of several processes by {started.name}; start it once, on one host")
    steps = len(past.losses) if past else given.steps or (KEPT_STEPS if given.save else STEPS)
    wanted = _chosen(settings(config), given.only, least=1 if past else 2)
    changes = {**QUIET, "steps": steps, "optimizer.warmup_steps": min(config.optimizer.warmup_steps, steps)}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(given.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="zerojax-verify-")))
        changes |= {} if config.data.dir else {"data.dir": str(folder / "datasets")}
        outcomes = _run_all(wanted, functools.partial(_run, rest, changes, folder, environment(config)))
    devices = next((outcome.card["devices"] for outcome in outcomes if outcome.card), {"platform": "cpu"})
    platforms = {devices["platform"], *([past.devices["platform"]] if past else ())}
    tolerance, why = max(tolerance_of(config, platform) for platform in platforms)
    first = _as_run(past, given.against) if past else next((one for one in outcomes if one.losses), None)
    compare(outcomes, tolerance, first)
    is_right = is_proven(outcomes, 1 if past else 2)
    shown = as_json if given.json else text
    found = shown(outcomes, first, is_right, steps, tolerance, why)
    print(json.dumps(found, indent=1) if given.json else found)
    if given.save and is_right and first:
        _save(given.save, settings_lib.changed(config, changes), first, outcomes)
    elif given.save:
        print(f"zerojax: --save: {given.save} is not written, since the settings do not agree", file=sys.stderr)
    return 0 if is_right else 1


def settings(config: settings_lib.Config) -> list[Setting]:
    """Returns the settings to compare: each stage; at the last one offload to the host, and each axis; and the config's own offload.

    An axis has size 2 there, or 1 if the config's own is above 1. Devices that are left are along `data`.
    """
    places = [f"offload.{name}" for name in vars(config.offload)]
    plain = {place: getattr(offload_lib.Offload(), place.partition(".")[2]) for place in places}
    own = {place: getattr(config.offload, place.partition(".")[2]) for place in places}
    by_stage = {str(stage): {"zero.stage": stage, **plain} for stage in stages.STAGES}
    last, top = list(by_stage.items())[-1]
    host = {**top, "offload.optimizer": offload_lib.HOST}
    axes = {axis: 1 if size > 1 else 2 for axis, size in vars(config.mesh).items() if axis != "data"}
    found = {
        **by_stage,
        f"{last}+optimizer": host,
        f"{last}+params": {**host, "offload.params": offload_lib.HOST},
        **{f"{last}+{axis}={size}": {**top, "mesh.data": -1, f"mesh.{axis}": size} for axis, size in axes.items()},
    }
    if {"zero.stage": config.zero.stage, **own} not in found.values():
        kinds = [f"{part}:{own[f'offload.{part}']}" for part in offload_lib.PARTS]
        kinds = [kind for kind in kinds if not kind.endswith(f":{offload_lib.NONE}")]
        found[f"{config.zero.stage}+{'+'.join(kinds)}"] = {"zero.stage": config.zero.stage, **own}
    return [Setting(name, changes) for name, changes in found.items()]


def environment(config: settings_lib.Config) -> dict[str, str]:
    """Returns the variables that runs start with. Float32 matmuls are exact, unless the user says otherwise.

    GPUs would round them to TF32, and equal runs would part within a hundred steps, so that a comparison showed nothing.
    """
    exact = {MATMULS: EXACT_MATMULS[0]} if config.precision == "fp32" else {}
    return {**exact, **os.environ}


def tolerance_of(config: settings_lib.Config, platform: str) -> tuple[float, str]:
    """Returns the largest relative difference of losses that rounding explains on a platform, and why."""
    matmuls = environment(config).get(MATMULS, "")
    in_tf32 = config.precision == "fp32" and platform != "cpu" and matmuls not in EXACT_MATMULS
    rounds = {
        "few bits": config.optimizer.moments == "int8"
        or config.precision == "bf16_sr"
        or config_lib.make_wires(config).is_on,
        "bf16": config.reduce_dtype == "bf16" or (config.accum_dtype == "bf16" and config.grad_accum != 1),
        "tf32" if in_tf32 else config.precision: config.precision in TOLERANCES,
    }
    tolerance, why = max(TOLERANCES[name] for name, is_rounded in rounds.items() if is_rounded)
    return tolerance, why.format(name=MATMULS, value=matmuls)


def compare(outcomes: Sequence[Verified], tolerance: float, first: Verified | None) -> None:
    """Compares the losses and gradient norms of each run with those of `first`, step by step, and sets the verdicts and their lines."""
    for outcome in outcomes:
        if outcome.verdict != SAME or outcome is first or first is None:
            continue
        largest, lines = {}, []
        for name, factor in (("losses", 1.0), ("norms", NORM)):
            pairs = [*zip(getattr(outcome, name), getattr(first, name), strict=True)]
            differences = [_difference(*pair) for pair in pairs]
            allowed = [tolerance * factor] * len(pairs)
            allowed[0] *= FORWARD if name == "losses" else 1.0
            above = [step for step, found in enumerate(differences) if found > allowed[step]]
            largest[name] = max(differences)
            lines += [
                f"{name} from step {step + 1} on: {pairs[step][0]:.9g} for {pairs[step][1]:.9g}" for step in above[:1]
            ]
        outcome.loss_difference, outcome.norm_difference = largest["losses"], largest["norms"]
        outcome.verdict, outcome.line = (DIFFERS, "; ".join(lines)) if lines else (SAME, "")


def is_proven(outcomes: Sequence[Verified], least: int) -> bool:
    """Returns whether `least` settings or more gave the same losses, and none gave others or crashed."""
    verdicts = [outcome.verdict for outcome in outcomes]
    return verdicts.count(SAME) >= least and not {DIFFERS, FAILED} & {*verdicts}


def text(
    outcomes: Sequence[Verified], first: Verified | None, is_right: bool, steps: int, tolerance: float, why: str
) -> str:
    """Returns the table, the tolerance and the verdict."""
    reference = ("setting " if first in outcomes else "") + (first.setting.name if first else "-")
    title = f"{steps} steps, each setting in a process of its own, against {reference}"
    measured = ("losses differ by", "gradient norms", "planned peak", "measured peak", "tokens/s")
    table = display.table(title, ("setting", *measured, "losses"), ("setting", "losses"))
    for outcome in outcomes:
        card = outcome.card
        table.add_row(
            outcome.setting.name,
            *(_share(value) for value in (outcome.loss_difference, outcome.norm_difference)),
            *(
                display.human(card[key]) if card.get(key) else "-"
                for key in ("planned_peak_bytes", "measured_peak_bytes")
            ),
            f"{card['tokens_per_second']:,.0f}" if card.get("tokens_per_second") else "-",
            outcome.verdict,
        )
    lines = [display.as_text(table)]
    lines += [f"{outcome.setting.name}: {outcome.line}" for outcome in outcomes if outcome.line]
    lines.append(
        f"allowed: {tolerance:.1e} of a loss, since {why}; a tenth of it at step 1, before any update; ten times as much of a norm"
    )
    return "\n".join([*lines, _verdict(outcomes, reference, is_right)])


def as_json(
    outcomes: Sequence[Verified], first: Verified | None, is_right: bool, steps: int, tolerance: float, why: str
) -> dict[str, Any]:
    """Returns the same as JSON."""
    rows = [
        {
            **{name: value for name, value in vars(outcome).items() if name not in ("setting", "card")},
            "setting": outcome.setting.name,
            "stage": outcome.setting.changes["zero.stage"],
            **{
                key: outcome.card.get(key) for key in ("planned_peak_bytes", "measured_peak_bytes", "tokens_per_second")
            },
        }
        for outcome in outcomes
    ]
    about = {
        "ok": is_right,
        "against": first and first.setting.name,
        "steps": steps,
        "tolerance": tolerance,
        "why": why,
    }
    return {"schema": 1, **about, "rows": rows}


def _as_run(past: past_lib.PastRun, place: str) -> Verified:
    """Returns a past run in the form of one of these."""
    return Verified(Setting(f"{place} ({past.machine})", {}), losses=past.losses, norms=past.norms)


def _save(path: str, config: settings_lib.Config, first: Verified, outcomes: Sequence[Verified]) -> None:
    """Keeps the losses of the first setting that ran, which are those of all."""
    kept = past_lib.differing(settings_lib.changed(config, {"data.dir": "", **first.setting.changes}))
    same = [outcome.setting.name for outcome in outcomes if outcome.verdict == SAME]
    card = first.card
    past_lib.write(path, past_lib.PastRun(kept, first.losses, first.norms, card["devices"], card["versions"], same))


def _run_all(wanted: Sequence[Setting], run: Callable[[Setting], Verified]) -> list[Verified]:
    """Runs each setting in a process of its own, so that each has all of the device's memory and its own peak.

    Raises:
      UserError: the config is refused for another reason than its stage, its offload or its size.
    """
    outcomes: list[Verified] = []
    for number, setting in enumerate(wanted):
        if sys.stderr.isatty():
            print(f"setting {setting.name}: {number + 1} of {len(wanted)}", file=sys.stderr, flush=True)
        outcome = run(setting)
        if not outcomes and outcome.verdict == NOT_HERE and not outcome.line.startswith("out of "):
            raise UserError(outcome.line)
        outcomes.append(outcome)
    return outcomes


def _run(
    rest: Sequence[str], changes: Mapping[str, Any], folder: pathlib.Path, given: Mapping[str, str], setting: Setting
) -> Verified:
    """Trains with a setting, and returns its losses or the reason why there are none."""
    flags = [f"--config.{place}={value}" for place, value in {**changes, **setting.changes}.items()]
    workdir = folder / f"setting-{re.sub('[+:=]', '-', setting.name)}"
    status, err = _train([*rest, *flags, f"--workdir={workdir}"], given)
    lines = [line for line in err.splitlines() if line.startswith("zerojax: ")]
    if status == 0:
        records = [record for record in metrics.read(workdir) if "loss" in record]
        losses, norms = ([_number(record, name) for record in records] for name in ("loss", "grad_norm"))
        return Verified(setting, losses=losses, norms=norms, card=document.read(workdir))
    if status == 2 and lines:
        return Verified(setting, NOT_HERE, lines[-1].removeprefix("zerojax: "))
    why = lines or [line.strip() for line in err.splitlines() if line.strip()] or ["without a word"]
    return Verified(setting, FAILED, f"ended with status {status}: {why[-1].removeprefix('zerojax: ')}")


def _train(words: Sequence[str], given: Mapping[str, str]) -> tuple[int, str]:
    """Runs `python -m zerojax.train`, and returns its status and its stderr. The run ends with this process."""
    started = [sys.executable, "-m", "zerojax.train", *words]
    with subprocess.Popen(
        started, env=given, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            _, err = run.communicate()
        except BaseException:
            run.kill()
            raise
    return run.returncode, err


def _chosen(known: Sequence[Setting], only: str | None, least: int) -> list[Setting]:
    """Returns the settings of --only, in the order of the table.

    Raises:
      UserError: a name is unknown, or fewer than `least` are left.
    """
    names = [setting.name for setting in known]
    wanted = names if only is None else [word.strip() for word in only.split(",")]
    for word in wanted:
        if word not in names:
            raise UserError(f"--only: {word!r} is no setting; {errors.choose(word, names)}")
    if len({*wanted}) < least:
        raise UserError(
            f"--only: names {wanted[0]!r} alone, and losses are compared between two settings or more; add one"
        )
    return [setting for setting in known if setting.name in wanted]


def _difference(a: float, b: float) -> float:
    """Returns the difference of two numbers relative to the second. Overflows, which fp16 skips, are equal if both have one."""
    if not math.isfinite(a) or not math.isfinite(b):
        return 0.0 if str(a) == str(b) else math.inf
    return abs(a - b) / max(abs(b), 1e-30)


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(record.get("not_finite", {}).get(name, "nan")) if value is None else value


def _share(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _verdict(outcomes: Sequence[Verified], reference: str, is_right: bool) -> str:
    count = {
        verdict: sum(outcome.verdict == verdict for outcome in outcomes)
        for verdict in (SAME, DIFFERS, NOT_HERE, FAILED)
    }
    rest = "".join(f"; {count[name]} {name}" for name in (DIFFERS, FAILED, NOT_HERE) if count[name])
    if not is_right and not count[DIFFERS] + count[FAILED]:
        return f"nothing is proven: {count[SAME]} settings ran{rest}"
    return f"{count[SAME]} of {len(outcomes)} settings give the losses of {reference}{rest}"


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = arguments.OneLineParser("zerojax verify", _USAGE, doc=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--steps",
        type=_steps,
        help=f"steps of each run ({STEPS}; {KEPT_STEPS} with --save); the first two are not timed",
    )
    add(
        "--only",
        metavar="SETTINGS",
        help="some of 0,1,2,3,3+optimizer,3+params,3+replica=2,3+context=2,3+model=2,3+expert=2,3+pipe=2",
    )
    add("--save", metavar="FILE", help="keep the losses and norms, the machine and the versions")
    add(
        "--against",
        metavar="FILE",
        help=f"compare with kept ones, or with those of {', '.join(past_lib.names())}, which the package has",
    )
    add("--keep", metavar="DIR", help="keep the runs in a new folder; default: they are removed")
    add("--json", action="store_true", help="print JSON")
    given, rest = parser.parse_known_args(words)
    if given.keep is not None and os.path.lexists(given.keep):
        raise UserError(f"--keep: {given.keep!r} exists, and a run would resume there; name a new folder")
    if given.save is not None:
        files.check_replaceable(given.save, "--save")
    if given.against is not None:
        others = {
            "--steps": given.steps,
            "--save": given.save,
            "--config": any(re.match("--config(=|$)", word) for word in rest),
        }
        for name in [name for name, is_given in others.items() if is_given]:
            raise UserError(f"{name}: --against takes it from its file; omit {name}")
    return given, rest


def _steps(word: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", word) or not 2 <= int(word) <= 10_000:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no number of steps from 2 to 10000; the first update acts on step 2"
        )
    return int(word)


if __name__ == "__main__":
    main()
