# ruff: noqa: E402
"""Crosses the settings of the trainer: a covering array in which every pair of values of any two settings occurs. This module makes and runs it.

    python tests/support/crosses.py                      # all cases, with a table of their ends
    python tests/support/crosses.py --only 17            # one of them, with its traceback
    python tests/support/crosses.py --random 50 --seed 3 # as many random crosses instead

A case trains some steps, and its losses equal those of its baseline: the same settings on one device, at stage 0, in one pass, with
nothing offloaded. `PLAIN` lists the settings that must not change the losses. `EXCLUSIVE` lists what the trainer refuses, in one line and
before it compiles. Each case prints the command that repeats it.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import os
import pathlib
import random
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    import conftest  # noqa: F401  sets the devices

import allpairspy
import runs

from configs import base as base_config
from zerojax import train
from zerojax.commands import verify
from zerojax.errors import UserError
from zerojax.trainer import config as config_lib
from zerojax.trainer import metrics, results

GOLDEN = "tests/golden/huggingface"
STEPS = 3
BATCH = 48  # sequences, for 1, 4, 6 and 8 devices, in one or two passes

BASE: Mapping[str, Any] = {
    "steps": STEPS,
    "global_batch_size": BATCH,
    "seq_len": 32,
    "log_every": 1,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 0,
    "optimizer.schedule": "constant",
    "data.train_file": "tests/golden/crosses/train.jsonl",
    "data.eval_file": "",
    "data.tokenizer": "bytes",
    "data.answer_len": 8,
    "evaluate.every": 0,
    "evaluate.batches": 1,
    "evaluate.answers": 0,
    "checkpoint.every": 0,
    "checkpoint.at_end": False,
    "sample.length": 0,
    "loss_scale.init_scale": 65536.0,
    "metrics.to": "",
}

MODELS = {"llama": "test", "t5": "t5_test", "bart": "bart_test"}


def _axes(replica: int, data: int, model: int) -> dict[str, Any]:
    return {"mesh.replica": replica, "mesh.data": data, "mesh.model": model, "emulate_devices": replica * data * model}


# A setting, or several that belong together: the names of its values -> what each sets. The first value is that of the baseline.
SETTINGS: dict[str, dict[str, Mapping[str, Any]]] = {
    "precision": {name: {"precision": name} for name in ("fp32", "bf16", "fp16", "bf16_sr", "fp8")},
    "reduce_dtype": {name: {"reduce_dtype": name} for name in ("fp32", "bf16")},
    "accum_dtype": {name: {"accum_dtype": name} for name in ("fp32", "bf16")},
    "grad_accum": {"1": {}, "2": {"grad_accum": 2}},
    "stage": {str(stage): {"zero.stage": stage} for stage in range(4)},
    "mesh": {
        "1x1x1": _axes(1, 1, 1),
        "1x8x1": _axes(1, 8, 1),
        "2x4x1": _axes(2, 4, 1),
        "1x6x1": _axes(1, 6, 1),
        "2x2x2": _axes(2, 2, 2),
        "8x1x1": _axes(8, 1, 1),
    },
    "min_size": {"1024": {}, "0": {"zero.min_size": 0}, "8192": {"zero.min_size": 8192}},
    "indivisible": {name: {"zero.indivisible": name} for name in ("whole", "pad")},
    "overrides": {
        "none": {},
        "features": {"zero.overrides": (("embed/embedding", (None, "data")),)},
        "replicated": {"zero.overrides": (("norm", ()),)},
        "model": {"zero.overrides": (("mlp/up/kernel", (None, "model")), ("mlp/down/kernel", ("model",)))},
    },
    "optimizer_offload": {name: {"offload.optimizer": name} for name in ("none", "host", "nvme")},
    "params_offload": {name: {"offload.params": name} for name in ("none", "host", "nvme")},
    "fraction": {"1": {}, "0.5": {"offload.fraction": 0.5}},
    "params_fraction": {"1": {}, "0.5": {"offload.params_fraction": 0.5}},
    "params_on_device": {"": {}, "embed|head": {"offload.params_on_device": "embed|head"}},
    "chunk_bytes": {"256M": {}, "4096": {"offload.chunk_bytes": 4096}},
    "in_flight": {"8": {}, "2": {"offload.in_flight": 2}},
    "by_block": {name: {"offload.by_block": name} for name in ("auto", "on", "off")},
    "late_norm": {"no": {}, "yes": {"offload.late_norm": True}},
    "nvme_buffers": {"4": {}, "1": {"offload.nvme_buffers": 1}},
    "remat": {name: {"model.remat": name} for name in ("none", "dots", "full")},
    "recompute": {"": {}, "mlp": {"model.recompute": r"layer_0/mlp|(en|de)coder_0/mlp"}},
    "by_columns": {"": {}, "head": {"model.by_columns": "head"}, "both": {"model.by_columns": "embed|head"}},
    "activations": {"": {}, "mlp": {"model.offload": r"(layer|encoder|decoder)_\d+/mlp"}},
    "family": {"llama": {}, "t5": {}, "bart": {}},
    "weights": {"drawn": {}, "read": {}},
    "layers": {"1": {"model.num_layers": 1}, "2": {"model.num_layers": 2}},
    "dropout": {"0": {}, "0.1": {"model.dropout": 0.1}},
    "lora": {"off": {}, "on": {"lora.r": 16}},
    "quantize": {name: {"lora.quantize": name} for name in ("none", "nf4", "int8")},
    "lora_from": {"drawn": {}, "folder": {}},
    "lora_dropout": {"0": {}, "0.1": {"lora.dropout": 0.1}},
    "lora_targets": {"": {}, "all": {"lora.target_modules": "all-linear"}},
    "rslora": {"no": {}, "yes": {"lora.rslora": True}},
    "modules_to_save": {"": {}, "yes": {}},
    "frozen_dtype": {name: {"lora.frozen_dtype": name} for name in ("auto", "fp32", "bf16")},
    "optimizer": {name: {"optimizer.name": name} for name in ("adamw", "adam", "adafactor", "lamb", "lion", "sgd")},
    "moments": {name: {"optimizer.moments": name} for name in ("fp32", "bf16", "int8")},
    "clip": {"1": {}, "0": {"optimizer.clip_norm": 0.0}, "0.01": {"optimizer.clip_norm": 0.01}},
    "decay": {"matrices": {}, "all": {"optimizer.weight_decay_on": "all"}, "0": {"optimizer.weight_decay": 0.0}},
    "loss_scale": {"dynamic": {}, "static": {"loss_scale.static": 128.0}, "overflow": {"loss_scale.init_scale": 2.0**40}},
    "fp8": {
        "tensorwise": {},
        "delayed": {"fp8.recipe": "delayed"},
        "rowwise": {"fp8.recipe": "rowwise"},
        "some": {"fp8.first": 1, "fp8.filter": "mlp"},
    },
    "task": {name: {"data.task": name} for name in ("text", "seq2seq", "classification", "chat")},
    "pack": {"yes": {}, "no": {"data.pack": False}},
    "evaluate": {"no": {}, "yes": {"data.eval_file": "tests/golden/crosses/eval.jsonl"}},
    "checkpoint": {"no": {}, "yes": {"checkpoint.at_end": True}},
    "export": {"none": {}, "huggingface": {"export.format": "huggingface"}, "peft": {"export.format": "peft"}},
    "sample": {"no": {}, "yes": {"sample.length": 4}},
}

# The settings that must not change the losses: those of where and how a run computes, and what it writes.
PLAIN = (
    "grad_accum stage mesh min_size indivisible overrides optimizer_offload params_offload fraction params_fraction params_on_device "
    "chunk_bytes in_flight by_block nvme_buffers remat recompute by_columns activations pack evaluate checkpoint export sample".split()
)

Row = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Exclusive:
    """What the trainer refuses: the settings that a rule reads, whether a row breaks it, and words of the line."""

    settings: tuple[str, ...]
    breaks: Callable[[Row], bool]
    words: str


def _no(words: str, **values: str | tuple[str, ...]) -> Exclusive:
    """Returns the rule that these values do not go together."""
    sets = {name: (value,) if isinstance(value, str) else value for name, value in values.items()}
    return Exclusive(tuple(sets), lambda row: all(row[name] in found for name, found in sets.items()), words)


def _but(name: str, *values: str) -> tuple[str, ...]:
    """Returns all values of a setting but these."""
    return tuple(value for value in SETTINGS[name] if value not in values)


EXCLUSIVE: list[Exclusive] = [
    _no("offload.optimizer", optimizer_offload=("host", "nvme"), stage="0"),
    _no("offload.params", params_offload=("host", "nvme"), stage=("0", "1", "2")),
    _no("offload.fraction", fraction="0.5", optimizer_offload="none"),
    _no("offload.params_fraction", params_fraction="0.5", params_offload="none"),
    _no("offload.params_on_device", params_on_device="embed|head", params_offload="none"),
    *(
        _no(f"offload.{name}", **{name: value}, optimizer_offload="none", params_offload="none")
        for name, value in (("chunk_bytes", "4096"), ("in_flight", "2"), ("by_block", ("on", "off")))
    ),
    _no("offload.optimizer", optimizer_offload=("host", "nvme"), lora="on", min_size="8192"),
    _no("offload.params", params_offload=("host", "nvme"), optimizer_offload="none", lora="off"),
    _no("offload.late_norm", late_norm="yes", optimizer_offload=("none", "nvme")),
    _no("offload.late_norm", late_norm="yes", by_block="off"),
    _no("offload.late_norm", late_norm="yes", clip="0"),
    _no("offload.late_norm", late_norm="yes", precision="fp16"),
    _no("offload.by_block", by_block="on", optimizer_offload="nvme"),
    _no("offload.by_block", by_block="off", params_offload=("host", "nvme")),
    Exclusive(
        ("nvme_buffers", "optimizer_offload", "params_offload"),
        lambda row: row["nvme_buffers"] == "1" and "nvme" not in (row["optimizer_offload"], row["params_offload"]),
        "offload.nvme_buffers",
    ),
    _no("activations", activations="mlp", params_offload=("host", "nvme")),
    _no("activations", activations="mlp", late_norm="yes"),
    _no("activations", activations="mlp", by_block="on"),
    _no("config.model.offload", activations="mlp", remat="none"),
    _no("config.model.recompute", recompute="mlp", remat=("none", "full")),
    _no("config.model.by_columns", by_columns=("head", "both"), stage=("0", "1", "2")),
    _no("config.model.by_columns", by_columns=("head", "both"), params_offload=("host", "nvme")),
    _no("by_columns", by_columns=("head", "both"), late_norm="yes"),
    _no("by_columns", by_columns=("head", "both"), by_block="on"),
    _no("by_columns", by_columns=("head", "both"), task=_but("task", "text")),
    _no("by_columns", by_columns=("head", "both"), family="bart"),
    _no("by_columns", by_columns=("head", "both"), lora="on"),
    _no("config.zero.overrides", overrides="features", mesh="1x6x1"),
    _no("fp8", fp8="delayed", precision="fp8", params_offload=("host", "nvme")),
    _no("fp8", fp8="delayed", precision="fp8", late_norm="yes"),
    _no("fp8", fp8="delayed", precision="fp8", by_block="on"),
    _no("config.mesh.model", mesh="2x2x2", overrides=_but("overrides", "model")),
    _no("config.model.dropout", dropout="0.1", family="llama"),
    _no("config.lora.init_from", lora_from="folder", weights="drawn"),
    _no("config.lora.init_from", lora_from="folder", rslora="yes"),
    _no("config.lora.init_from", lora_from="folder", lora_targets="all"),
    _no("config.lora.init_from", lora_from="folder", modules_to_save="yes"),
    _no("config.lora.quantize", quantize=("nf4", "int8"), precision="fp8"),
    _no("config.export.format", export="peft", lora="off"),
    _no("config.optimizer.moments", moments=("bf16", "int8"), optimizer=_but("optimizer", "adamw", "adam", "lion")),
    _no("config.optimizer.weight_decay", optimizer=("adam", "sgd", "adafactor"), decay=("matrices", "all")),
    _no("config.loss_scale.static", loss_scale="static", precision=_but("precision", "fp16")),
    _no("config.loss_scale.init_scale", loss_scale="overflow", precision=_but("precision", "fp16")),
]

# What has no effect, and a line of the run names: pairs with it would show nothing.
UNREAD: list[Exclusive] = [
    _no("zero.min_size", min_size=("0", "8192"), stage="0"),
    _no("zero.indivisible", indivisible="pad", stage="0"),
    *(
        _no(place, **{name: _but(name, next(iter(SETTINGS[name]))), "lora": "off"})
        for name, place in {
            "quantize": "lora.quantize",
            "lora_dropout": "lora.dropout",
            "lora_targets": "lora.target_modules",
            "rslora": "lora.rslora",
            "frozen_dtype": "lora.frozen_dtype",
        }.items()
    ),
    _no("fp8", fp8=_but("fp8", "tensorwise"), precision=_but("precision", "fp8")),
    _no("data.pack", pack="no", task="text"),
    _no("sample", sample="yes", task=_but("task", "text")),
]
# Values of this tool that set nothing beside others.
HOLLOW: list[Exclusive] = [
    _no("", lora_from="folder", lora="off"),
    _no("", modules_to_save="yes", lora="off"),
    _no("", accum_dtype="bf16", grad_accum="1"),
    _no("", layers="2", weights="read"),
]
RULES = [*EXCLUSIVE, *UNREAD, *HOLLOW]
TOGETHER = ("lora", "optimizer_offload", "params_offload")  # each of their triples meets every other value


def changes(row: Row) -> dict[str, Any]:
    """Returns what a row sets, by dotted place."""
    found: dict[str, Any] = dict(BASE)
    for name, value in row.items():
        found |= SETTINGS[name][value]
    family, is_read, adapts = row["family"], row["weights"] == "read", row["lora"] != "off"
    found |= {"init_from": f"{GOLDEN}/{family}", "model.num_layers": 0} if is_read else {"model.preset": MODELS[family]}
    if row["lora_from"] == "folder" and adapts:
        found |= {"lora.init_from": f"{GOLDEN}/{family}/lora", "lora.r": 0}
    if row["modules_to_save"] == "yes" and adapts:
        found["lora.modules_to_save"] = "lm_head" if family == "llama" else "shared"
    if row["task"] == "chat":
        found["data.chat_template"] = "plain"
    return found


def baseline(row: Row) -> dict[str, str]:
    """Returns the row of the same losses that computes in the simplest way."""
    plain = {name: next(iter(SETTINGS[name])) for name in PLAIN}
    if row["late_norm"] == "yes":
        plain |= {"stage": "1", "optimizer_offload": "host"}
    if "0.1" in (row["dropout"], row["lora_dropout"]):  # devices and passes draw their own masks
        plain |= {name: row[name] for name in ("mesh", "grad_accum", "overrides")}
    return {**row, **plain, "evaluate": row["evaluate"], "pack": row["pack"]}


def first_value(name: str) -> str:
    """Returns the value of the baseline."""
    return next(iter(SETTINGS[name]))


@functools.cache
def array() -> tuple[Row, ...]:
    """Returns the rows of the covering array: every pair of values that the rules allow, and every triple of `TOGETHER` with every value.

    The generator drops a pair if the rules refuse what it chose for the rest of the row; `completed` looks for another row of it.
    """
    meet = factors()
    names = sorted(meet, key=lambda name: -len(meet[name]))
    place = {setting: at for at, name in enumerate(names) for setting in name.split("+")}
    due: dict[int, list[Exclusive]] = {}
    for rule in RULES:
        due.setdefault(max(place[name] for name in rule.settings), []).append(rule)

    def is_allowed(begun: Sequence[tuple]) -> bool:
        return not any(rule.breaks(joined(names, begun)) for rule in due.get(len(begun) - 1, ()))

    found = [joined(names, row) for row in allpairspy.AllPairs([meet[name] for name in names], filter_func=is_allowed)]
    there = {pair for row in found for pair in pairs(row)}
    left = [
        joined((one, other), pair)
        for one, other in itertools.combinations(names, 2)
        for pair in itertools.product(meet[one], meet[other])
        if frozenset(zip((one, other), pair)) not in there
    ]
    left = [pair for pair in left if completed(pair) is not None]
    while left:
        fixed: Row = {}
        for pair in left:
            both = {**fixed, **pair}
            if both == {**pair, **fixed} and completed(both) is not None:
                fixed = both
        found.append(completed(fixed) or {})
        left = [pair for pair in left if not pair.items() <= found[-1].items()]
    return tuple({name: row[name] for name in SETTINGS} for row in found)


def factors() -> dict[str, list[tuple]]:
    """Returns the values that meet in pairs, as tuples: those of each setting, and the triples of TOGETHER."""
    joint = list(itertools.product(*(SETTINGS[name] for name in TOGETHER)))
    return {"+".join(TOGETHER): joint, **{name: [(v,) for v in values] for name, values in SETTINGS.items() if name not in TOGETHER}}


def joined(names: Iterable[str], values: Iterable[tuple]) -> Row:
    """Returns a row, or a part of one, from values of `_factors`."""
    return {setting: value for name, found in zip(names, values) for setting, value in zip(name.split("+"), found)}


def pairs(row: Row) -> set[frozenset]:
    """Returns the pairs of values of `_factors` that meet in a row."""
    there = [(name, tuple(row[setting] for setting in name.split("+"))) for name in factors()]
    return set(map(frozenset, itertools.combinations(there, 2)))


def completed(fixed: Row, but: Exclusive | None = None, row: Row | None = None) -> Row | None:
    """Returns a row with the given values that breaks no rule (`but` may be broken), or None if there is none.

    A row that breaks a rule must differ in one of the settings that the rule reads: each of these is tried with each other value.
    """
    row = {**{name: first_value(name) for name in SETTINGS}, **(row or {}), **fixed}
    rule = next((rule for rule in RULES if rule is not but and rule.breaks(row)), None)
    if rule is None:
        return row
    for name in rule.settings:
        if name not in fixed:
            for value in SETTINGS[name]:
                if value != row[name] and (found := completed({**fixed, name: value}, but, row)) is not None:
                    return found
            fixed = {**fixed, name: row[name]}  # further branches keep it
    return None


def breaking(rule: Exclusive) -> Row:
    """Returns a row that breaks one rule alone."""
    for values in itertools.product(*(SETTINGS[name] for name in rule.settings)):
        fixed = dict(zip(rule.settings, values))
        if rule.breaks(fixed) and (row := completed(fixed, rule)) is not None:
            return row
    raise AssertionError(f"{rule.settings}: the other rules refuse all that this one refuses; delete it")


def broken(row: Row) -> list[Exclusive]:
    """Returns the rules that a row breaks."""
    return [rule for rule in EXCLUSIVE if rule.breaks(row)]


def command(row: Row) -> str:
    """Returns the command line that repeats a case."""
    return shlex.join(
        ["python", "-m", "zerojax.train", "--config=configs/base.py", *(f"--config.{place}={value}" for place, value in changes(row).items())]
    )


@dataclasses.dataclass
class End:
    """How a run ended: its losses and gradient norms by step, its evaluations, or the error."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[float] = dataclasses.field(default_factory=list)
    error: BaseException | None = None
    out: str = ""
    seconds: float = 0.0


def attempt(row: Row, folder: pathlib.Path) -> End:
    """Trains a row in `folder`."""
    end, out, began = End(), io.StringIO(), time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), mock.patch.object(results, "draw"):
            with runs.on_devices(changes(row)["emulate_devices"]):
                train.train(config(row), folder)
        lines = metrics.read(folder)
        end.losses = [line["loss"] for line in lines if "loss" in line]
        end.norms = [line["grad_norm"] for line in lines if "loss" in line]
        end.evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    except (Exception, SystemExit) as error:
        end.error = error
    end.out, end.seconds = out.getvalue(), time.process_time() - began
    return end


def config(row: Row) -> config_lib.Config:
    """Returns the checked settings of a row."""
    raw = base_config.get_config()
    raw.update_from_flattened_dict({**changes(row), "metrics.to": ()})
    return config_lib.from_dict(raw)


def tolerance(row: Row) -> float:
    """Returns the largest relative difference of losses that rounding explains, which `zerojax verify` allows too."""
    found = verify.tolerance_of(config(row), "cpu")[0]
    if row["accum_dtype"] == "bf16" and row["grad_accum"] != "1":
        found = max(found, verify.TOLERANCES["bf16"][0])
    return found


def fault(row: Row, end: End, base: End | None) -> str:
    """Returns why the end of a case is not right, or ""."""
    rules = broken(row)
    if end.error is not None:
        if not isinstance(end.error, UserError):
            return "traceback"
        line = str(end.error)
        if "\n" in line:
            return "not one line"
        if not rules:
            return "refused"
        return "" if any(rule.words in line for rule in rules) else "refused for another reason"
    if rules:
        return f"not refused: {rules[0].words}"
    if len(end.losses) != STEPS:
        return f"{len(end.losses)} losses"
    if base is None or base.error is not None:
        return "the baseline failed"
    allowed = tolerance(row)
    for what, mine, theirs, factor in (
        ("loss", end.losses, base.losses, 1.0),
        ("grad_norm", end.norms, base.norms, verify.NORM),
        ("eval_loss", end.evaluations, base.evaluations, 1.0),
    ):
        if len(mine) != len(theirs):
            return f"{len(mine)} of {len(theirs)} {what}"
        for step, (a, b) in enumerate(zip(mine, theirs)):
            if a is None and b is None:
                continue
            if not (a is not None and b is not None and abs(a - b) <= factor * allowed * abs(b)):
                return f"{what} of step {step + 1}: {a} and {b}, {abs((a or 0) / (b or 1) - 1):.1e} of {factor * allowed:.1e}"
    return ""


def random_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Returns random rows that break no rule, half of whose settings are the baseline's."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        share = rng.random()
        row = {name: rng.choice(list(values)) if rng.random() < share else next(iter(values)) for name, values in SETTINGS.items()}
        for _ in range(200):  # mend what is broken, one setting at a time
            rules = [rule for rule in RULES if rule.breaks(row)]
            if not rules:
                break
            name = rng.choice(rules[0].settings)
            row[name] = rng.choice(list(SETTINGS[name]))
        if not broken(row):
            found.append(row)
    return found


def main() -> None:
    """Runs the cases and prints those at fault. Exits with 1 if there are any."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--begin", type=int, default=0)
    options = parser.parse_args()
    rows = random_rows(options.random, options.seed) if options.random else array()
    part, parts = map(int, options.part.split("/"))
    bases: dict[tuple, End] = {}
    seconds = [0.0, 0.0]
    ends = {"equal": 0, "refused": 0, "fault": 0}
    import jax

    scratch = pathlib.Path(tempfile.mkdtemp())
    began = time.time()
    with runs.jax_settings(jax_compilation_cache_dir=str(scratch / "programs"), **conftest.CACHED):
        for number, row in enumerate(rows):
            if options.only not in (None, number) or number % parts != part or number < options.begin:
                continue
            folder = scratch / str(number)
            end = attempt(row, folder / "case")
            base = None
            if end.error is None:
                plain = baseline(row)
                key = tuple(sorted(changes(plain).items(), key=str))
                key = repr(key)
                if key not in bases:
                    bases[key] = attempt(plain, folder / "base")
                    seconds[1] += bases[key].seconds
                base = bases[key]
            seconds[0] += end.seconds
            shutil.rmtree(folder, ignore_errors=True)
            why = fault(row, end, base)
            ends["fault" if why else "equal" if end.error is None else "refused"] += 1
            shown = {name: value for name, value in row.items() if value != first_value(name)}
            if why:
                print(f"case {number}: {why}: {shown}", flush=True)
                for what, one in (("", end), ("baseline: ", base)):
                    if one is not None and one.error is not None:
                        print("   ", what + str(one.error)[:600])
                        if not isinstance(one.error, UserError) or options.only is not None:
                            print("".join(traceback.format_exception(one.error)[-8:]), flush=True)
            if options.only is not None:
                print(command(row), end.out, end, base, sep="\n")
            else:
                print(f"case {number}: {end.seconds:.1f} s", flush=True)
            if number % 20 == 0:
                jax.clear_caches()
    shutil.rmtree(scratch, ignore_errors=True)
    print(ends, f"cases {seconds[0]:.0f} s, baselines {seconds[1]:.0f} s CPU, {time.time() - began:.0f} s", flush=True)
    sys.exit(bool(ends["fault"]))


if __name__ == "__main__":
    main()
