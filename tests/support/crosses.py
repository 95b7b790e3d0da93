# ruff: noqa: E402
"""Crosses the settings of the trainer, so that every pair of values of any two of them occurs. This module holds them and runs the cases.

    python tests/support/crosses.py                       # all cases, with those at fault
    python tests/support/crosses.py --only 17             # one of them, with its command and traceback
    python tests/support/crosses.py --random 50 --seed 3  # as many random crosses instead

A case trains three steps. Its losses, norms and evaluations equal those of its baseline: the same settings on one device, at stage 0, in
one pass, with nothing offloaded, within what `zerojax verify` allows. `PLAIN` lists the settings that must not change the losses.
`EXCLUSIVE` lists what the trainer refuses, in one line and before it compiles; no case holds that.
"""

import argparse
import contextlib
import dataclasses
import io
import pathlib
import random
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    import conftest

import covering
import runs

from configs import base as base_config
from zerojax import train
from zerojax.commands import verify
from zerojax.errors import UserError
from zerojax.trainer import config as config_lib
from zerojax.trainer import metrics, results, setting_names
from zerojax.trainer import settings as settings_lib

GOLDEN = "tests/golden/huggingface"
STEPS = 3
BATCH = 48  # sequences, for 1, 4, 6 and 8 devices, in one or two passes

BASE: Mapping[str, Any] = {
    "steps": STEPS,
    "global_batch_size": BATCH,
    "seq_len": 32,
    "log_every": 1,
    "model.num_layers": 1,
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

MODELS = {"llama": "test", "t5": "t5_test", "bart": "bart_test", "moe": "moe_test"}
FOLDERS = {"moe": "mixtral"}  # of weights that are read, where the family's name is not theirs


def _axes(replica: int, data: int, model: int, context: int = 1, pipe: int = 1) -> dict[str, Any]:
    sizes = {
        "mesh.pipe": pipe,
        "mesh.replica": replica,
        "mesh.data": data,
        "mesh.context": context,
        "mesh.model": model,
    }
    return {**sizes, "emulate_devices": pipe * replica * data * context * model}


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
        "context": _axes(1, 2, 1, context=4),
        "pipe": _axes(1, 4, 1, pipe=2),
        "zero_bubble": {**_axes(1, 4, 1, pipe=2), "pipeline.schedule": "zero_bubble", "grad_accum": 2},
        "expert": {**_axes(1, 8, 1), "mesh.expert": 4},
        "pipe_expert": {**_axes(1, 4, 1, pipe=2), "mesh.expert": 2},
    },
    "load": {"1.5": {}, "1": {"experts.load": 1.0}},
    "parts": {"1": {}, "2": {"experts.parts": 2}},
    "wire": {
        "plain": {},
        "int8": {"wire.weights": "int8", "wire.gradients": "int8"},
        "hosts": {
            "wire.weights": "int8",
            "wire.gradients": "int4",
            "wire.second_copy": True,
            "wire.host_devices": 2,
        },
        "feedback": {"wire.gradients": "int4", "wire.host_devices": 2, "wire.error_feedback": True},
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
    "chunk_bytes": {"256M": {}, "8192": {"offload.chunk_bytes": 8192}},
    "in_flight": {"8": {}, "2": {"offload.in_flight": 2}},
    "by_block": {name: {"offload.by_block": name} for name in ("auto", "on", "off")},
    "late_norm": {"no": {}, "yes": {"offload.late_norm": True}},
    "nvme_buffers": {"4": {}, "1": {"offload.nvme_buffers": 1}},
    "remat": {name: {"model.remat": name} for name in ("none", "dots", "attention", "full")},
    "recompute": {"": {}, "mlp": {"model.recompute": r"layer_0/mlp|(en|de)coder_0/mlp"}},
    "by_columns": {"": {}, "head": {"model.by_columns": "head"}, "both": {"model.by_columns": "embed|head"}},
    "activations": {
        "": {},
        "mlp": {"model.offload": r"(layer|encoder|decoder)_\d+/mlp"},
        "layers": {"model.offload": r"(layer|encoder|decoder)_\d+"},
    },
    "ring": {"no": {}, "yes": {"model.ring": True}},
    "tile_tokens": {"0": {}, "24": {"model.tile_tokens": 24}},
    "family": {"llama": {}, "t5": {}, "bart": {}, "moe": {}},
    "weights": {"drawn": {}, "read": {}},
    "dropout": {"0": {}, "0.1": {"model.dropout": 0.1}},
    "lora": {"off": {}, "on": {"lora.r": 16}},
    "quantize": {name: {"lora.quantize": name} for name in ("none", "nf4", "int8", "fp8_block")},
    "lora_from": {"drawn": {}, "folder": {}},
    "lora_dropout": {"0": {}, "0.1": {"lora.dropout": 0.1}},
    "lora_targets": {"": {}, "all": {"lora.target_modules": "all-linear"}},
    "rslora": {"no": {}, "yes": {"lora.rslora": True}},
    "modules_to_save": {"": {}, "yes": {}},
    "frozen_dtype": {name: {"lora.frozen_dtype": name} for name in ("auto", "fp32", "bf16")},
    "optimizer": {
        name: {"optimizer.name": name} for name in ("adamw", "adam", "adafactor", "lamb", "lion", "sgd", "muon")
    },
    "moments": {name: {"optimizer.moments": name} for name in ("fp32", "bf16", "int8")},
    "clip": {"1": {}, "0": {"optimizer.clip_norm": 0.0}, "0.01": {"optimizer.clip_norm": 0.01}},
    "decay": {
        "": {},
        "all": {"optimizer.weight_decay": 0.1, "optimizer.weight_decay_on": "all"},
        "0": {"optimizer.weight_decay": 0.0},
        "by kinds": {"optimizer.rates": "matrix=0.5,norm=2"},
    },
    "loss_scale": {
        "dynamic": {},
        "static": {"loss_scale.static": 128.0},
        "overflow": {"loss_scale.init_scale": 2.0**40},
    },
    "fp8": {
        "tensorwise": {},
        "delayed": {"fp8.recipe": "delayed"},
        "rowwise": {"fp8.recipe": "rowwise"},
        "some": {"fp8.filter": ".*/(mlp/.*|o)"},
    },
    "task": {name: {"data.task": name} for name in ("text", "seq2seq", "classification", "chat")}
    | {"dpo": {"data.task": "dpo", "data.rejected": "un{label}"}}
    | {"grpo": {"data.task": "grpo", "data.answer_len": 4, "grpo.reward": "crosses:spread"}},
    "pack": {"yes": {}, "no": {"data.pack": False}},
    "sources": {
        "one": {},
        "two": {
            "data.train_file": "",
            "data.sources": (
                {"title": "a", "train_file": "tests/golden/crosses/train.jsonl"},
                {"title": "b", "train_file": "tests/golden/crosses/train.jsonl", "weight": 2.0},
            ),
        },
    },
    "mix_by": {"tokens": {}, "examples": {"data.mix_by": "examples"}},
    "evaluate": {"no": {}, "yes": {"data.eval_file": "tests/golden/crosses/eval.jsonl"}},
    "checkpoint": {"no": {}, "yes": {"checkpoint.at_end": True}},
    "export": {"none": {}, "huggingface": {"export.format": "huggingface"}, "peft": {"export.format": "peft"}},
    "sample": {"no": {}, "yes": {"sample.length": 4}},
}

# The settings that must not change the losses: those of where and how a run computes, and what it writes.
PLAIN = (
    "grad_accum stage mesh load parts wire min_size indivisible overrides optimizer_offload params_offload fraction params_fraction "
    "params_on_device chunk_bytes in_flight by_block nvme_buffers remat recompute by_columns activations tile_tokens "
    "pack evaluate checkpoint export sample".split()
)


PACKED = ("int8", "hosts", "feedback")
PIPES = ("pipe", "zero_bubble", "pipe_expert")
EXPERTS = ("expert", "pipe_expert")


def spread(prompt: str, answer: str, label: str) -> float:
    """Returns a reward that differs between random answers."""
    return sum(map(ord, answer)) % 97 / 97


def _but(name: str, *values: str) -> tuple[str, ...]:
    """Returns all values of a setting but these."""
    return tuple(value for value in SETTINGS[name] if value not in values)


EXCLUSIVE: list[covering.Rule] = [
    covering.never("config.wire", wire=PACKED, stage=("0", "1", "2")),
    covering.never("config.wire", wire=PACKED, precision="fp8", fp8=_but("fp8", "rowwise")),
    covering.never("config.wire", wire="hosts", mesh="2x2x2"),
    covering.never("wire", wire=PACKED, params_offload=("host", "nvme")),
    covering.never("wire", wire=PACKED, late_norm="yes"),
    covering.never("wire", wire=PACKED, by_block="on"),
    covering.never("offload.optimizer", optimizer_offload=("host", "nvme"), stage="0"),
    covering.never("offload.params", params_offload=("host", "nvme"), stage=("0", "1", "2")),
    covering.never("offload.fraction", fraction="0.5", optimizer_offload="none"),
    covering.never("offload.params_fraction", params_fraction="0.5", params_offload="none"),
    covering.never("offload.params_on_device", params_on_device="embed|head", params_offload="none"),
    *(
        covering.never(f"offload.{name}", **{name: value}, optimizer_offload="none", params_offload="none")
        for name, value in (("chunk_bytes", "8192"), ("in_flight", "2"), ("by_block", ("on", "off")))
    ),
    covering.never("offload.optimizer", optimizer_offload=("host", "nvme"), lora="on", min_size="8192"),
    covering.never(
        "offload.optimizer", optimizer_offload=("host", "nvme"), lora_from="folder", min_size=_but("min_size", "0")
    ),
    covering.never("offload.params", params_offload=("host", "nvme"), optimizer_offload="none", lora="off"),
    covering.never("offload.late_norm", late_norm="yes", optimizer_offload=("none", "nvme")),
    covering.never("offload.by_block", late_norm="yes", by_block="off"),
    covering.never("offload.late_norm", late_norm="yes", clip="0"),
    covering.never("offload.late_norm", late_norm="yes", precision="fp16"),
    covering.never("offload.by_block", by_block="on", optimizer_offload="nvme"),
    covering.never("offload.by_block", by_block="off", params_offload=("host", "nvme")),
    covering.Rule(
        ("nvme_buffers", "optimizer_offload", "params_offload"),
        lambda row: row["nvme_buffers"] == "1" and "nvme" not in (row["optimizer_offload"], row["params_offload"]),
        "offload.nvme_buffers",
    ),
    covering.never("activations", activations=("mlp", "layers"), params_offload=("host", "nvme")),
    covering.never("activations", activations=("mlp", "layers"), late_norm="yes"),
    covering.never("activations", activations=("mlp", "layers"), by_block="on"),
    covering.never("config.model.offload", activations=("mlp", "layers"), remat="none"),
    covering.never("config.model.recompute", recompute="mlp", remat=("none", "attention", "full")),
    covering.never("config.model.recompute", recompute="mlp", activations="mlp"),
    covering.never("config.model.by_columns", by_columns=("head", "both"), stage=("0", "1", "2")),
    covering.never("config.model.by_columns", by_columns=("head", "both"), mesh="1x6x1"),
    covering.never("config.model.by_columns", by_columns=("head", "both"), mesh="2x2x2"),
    covering.never("config.model.by_columns", by_columns=("head", "both"), family="t5", weights="read"),
    covering.never("by_columns", by_columns=("head", "both"), params_offload=("host", "nvme")),
    covering.never("by_columns", by_columns=("head", "both"), late_norm="yes"),
    covering.never("by_columns", by_columns=("head", "both"), by_block="on"),
    covering.never("by_columns", by_columns=("head", "both"), task=_but("task", "text")),
    covering.never("by_columns", by_columns=("head", "both"), family="bart"),
    covering.never("by_columns", by_columns=("head", "both"), lora="on"),
    covering.never("config.data.sources", sources="two", task=("dpo", "grpo")),
    covering.never("config.data.eval_file", sources="two", evaluate="yes"),
    covering.never("config.mesh.context", mesh="context", task=("dpo", "grpo")),
    covering.never("config.precision", precision="fp8", task=("dpo", "grpo")),
    covering.never("config.mesh.expert", mesh=EXPERTS, family=_but("family", "moe")),
    covering.never("config.model.tile_tokens", tile_tokens="24", family=("t5", "bart")),
    covering.never("config.model.offload", tile_tokens="24", activations="mlp"),
    covering.never("fp8.recipe", tile_tokens="24", precision="fp8", fp8="delayed"),
    covering.never("config.zero.overrides", overrides="features", mesh="1x6x1"),
    covering.never("offload.params", mesh=PIPES, params_offload=("host", "nvme")),
    covering.never("offload.late_norm", mesh=PIPES, late_norm="yes"),
    covering.never("offload.by_block", mesh=PIPES, by_block="on"),
    covering.never("config.fp8.recipe", mesh=PIPES, precision="fp8", fp8="delayed"),
    covering.never("config.model.by_columns", mesh=PIPES, by_columns=("head", "both")),
    covering.never("config.wire", mesh=PIPES, wire=PACKED),
    covering.never("fp8", fp8="delayed", precision="fp8", params_offload=("host", "nvme")),
    covering.never("fp8", fp8="delayed", precision="fp8", late_norm="yes"),
    covering.never("fp8", fp8="delayed", precision="fp8", by_block="on"),
    covering.never("config.model.dropout", dropout="0.1", family=("llama", "moe")),
    covering.never("config.lora.dropout", lora="on", lora_dropout="0.1", lora_targets="all", family="moe"),
    covering.never("config.lora.init_from", lora_from="folder", weights="drawn"),
    covering.never("config.lora.init_from", lora_from="folder", rslora="yes"),
    covering.never("config.lora.init_from", lora_from="folder", lora_targets="all"),
    covering.never("config.lora.init_from", lora_from="folder", modules_to_save="yes"),
    covering.never(
        "config.precision: stochastic rounding needs",
        precision="bf16_sr",
        optimizer=("adafactor", "lamb", "sgd", "muon"),
    ),
    covering.never("config.lora.quantize", quantize=_but("quantize", "none"), precision="fp8"),
    covering.never("config.export.format", export="peft", lora="off"),
    covering.never(
        "config.optimizer.moments", moments=("bf16", "int8"), optimizer=_but("optimizer", "adamw", "adam", "lion")
    ),
    covering.never("config.optimizer.name", optimizer="muon", lora="on"),
    covering.never("config.optimizer.weight_decay", optimizer=("adam", "sgd"), decay="all"),
    covering.never("config.optimizer.rates", lora="on", decay="by kinds"),  # adapters are of another
    covering.never("config.loss_scale.static", loss_scale="static", precision=_but("precision", "fp16")),
    covering.never("config.loss_scale.init_scale", loss_scale="overflow", precision=_but("precision", "fp16")),
]

# What has no effect, and a line of the run names: pairs with it would show nothing.
UNREAD: list[covering.Rule] = [
    covering.never("zero.min_size", min_size=("0", "8192"), stage="0"),
    covering.never("zero.indivisible", indivisible="pad", stage="0"),
    *(
        covering.never(place, **{name: _but(name, next(iter(SETTINGS[name]))), "lora": "off"})
        for name, place in {
            "quantize": "lora.quantize",
            "lora_dropout": "lora.dropout",
            "lora_targets": "lora.target_modules",
            "rslora": "lora.rslora",
            "frozen_dtype": "lora.frozen_dtype",
        }.items()
    ),
    covering.never("fp8", fp8=_but("fp8", "tensorwise"), precision=_but("precision", "fp8")),
    covering.never("data.pack", pack="no", task=("text", "dpo", "grpo")),
    covering.never("data.mix_by", mix_by="examples", sources="one"),
    *(
        covering.never(f"experts.{name}", **{name: value}, mesh=_but("mesh", *EXPERTS))
        for name, value in (("load", "1"), ("parts", "2"))
    ),
    covering.never("sample", sample="yes", task=_but("task", "text")),
    covering.never("model.ring", ring="yes", mesh=_but("mesh", "2x2x2")),
    covering.never("model.ring", ring="yes", precision="fp8"),
    covering.never("model.ring", ring="yes", quantize=_but("quantize", "none")),
]
# Values of this tool that set nothing beside others.
HOLLOW: list[covering.Rule] = [
    covering.never("", lora_from="folder", lora="off"),
    covering.never("", modules_to_save="yes", lora="off"),
    covering.never("", accum_dtype="bf16", grad_accum="1"),
    covering.never("", by_columns=("head", "both"), mesh=("1x1x1", "8x1x1")),
    covering.never("", wire=PACKED, mesh=("1x1x1", "8x1x1")),
    covering.never("", wire=PACKED, min_size="8192"),
    covering.never("", wire="feedback", lora_from="folder"),  # whose adapters are too small to be packed
    covering.never("", wire="feedback", lora="on", mesh="1x8x1"),  # an eighth of an adapter is too small as well
    covering.never("", wire="feedback", lora="on", mesh="1x6x1"),  # so is a sixth
    covering.never("", wire=PACKED, mesh="1x6x1", indivisible="whole"),  # six divide few of the small models' dims
    covering.never("", family="moe", lora_from="folder"),
    covering.never("", ring="yes", family=("t5", "bart")),  # the run says so
    # Nothing but the output projection is large enough.
    covering.never("", params_on_device="embed|head", quantize="nf4", min_size="8192"),
    covering.never("", family="moe", overrides="model"),  # whose matrices have other names
    # Weights that are rounded otherwise draw other answers.
    covering.never("", task="grpo", precision=_but("precision", "fp32")),
    covering.never("", task="grpo", reduce_dtype="bf16"),
    covering.never("", task="grpo", accum_dtype="bf16"),
    covering.never("", task="grpo", wire=PACKED),
]
SPACE = covering.Space(
    {name: tuple(values) for name, values in SETTINGS.items()},
    [*EXCLUSIVE, *UNREAD, *HOLLOW],
    ("lora", "optimizer_offload", "params_offload"),
)


def changes(row: covering.Row) -> dict[str, Any]:
    """Returns what a row sets, by dotted place."""
    found: dict[str, Any] = dict(BASE)
    for name, value in row.items():
        found |= SETTINGS[name][value]
    family, is_read, adapts = row["family"], row["weights"] == "read", row["lora"] != "off"
    folder = f"{GOLDEN}/{FOLDERS.get(family, family)}"
    found |= {"init_from": folder, "model.num_layers": 0} if is_read else {"model.preset": MODELS[family]}
    if row["lora_from"] == "folder" and adapts:
        found |= {"lora.init_from": f"{GOLDEN}/{family}/lora", "lora.r": 0}
    if row["modules_to_save"] == "yes" and adapts:
        found["lora.modules_to_save"] = "lm_head" if family in ("llama", "moe") else "shared"
    if row["task"] == "chat":
        found["data.chat_template"] = "plain"
    return found


def baseline(row: covering.Row) -> dict[str, str]:
    """Returns the row of the same losses that computes in the simplest way."""
    plain = {name: first_value(name) for name in PLAIN}
    if row["late_norm"] == "yes":
        plain |= {"stage": "1", "optimizer_offload": "host", "min_size": row["min_size"]}
    if "0.1" in (row["dropout"], row["lora_dropout"]):  # devices and passes draw their own masks
        plain |= {name: row[name] for name in ("mesh", "grad_accum", "overrides")}
    return {**row, **plain, "evaluate": row["evaluate"], "pack": row["pack"]}


def first_value(name: str) -> str:
    """Returns the value of the baseline."""
    return next(iter(SETTINGS[name]))


def broken(row: covering.Row) -> list[covering.Rule]:
    """Returns the rules that a row breaks."""
    return [rule for rule in EXCLUSIVE if rule.breaks(row)]


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings by dotted place as arguments of the command line."""
    return [f"--config.{place}={value}" for place, value in settings.items()]


def command(row: covering.Row) -> str:
    """Returns the command line that repeats a case."""
    return shlex.join(
        [
            "python",
            "-m",
            "zerojax.train",
            "--config=configs/base.py",
            *flags(changes(row)),
        ]
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

    def read(self, folder: pathlib.Path) -> None:
        """Reads the numbers of a run that ended well: rewards of drawn answers, whose first losses are 0, or losses."""
        lines = metrics.read(folder)
        self.losses = [line.get("reward", line["loss"]) for line in lines if "loss" in line]
        self.norms = [line["grad_norm"] for line in lines if "loss" in line]
        self.evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]


def attempt(row: covering.Row, folder: pathlib.Path) -> End:
    """Trains a row in `folder`."""
    end, out, began = End(), io.StringIO(), time.process_time()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            mock.patch.object(results, "draw"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)  # lines of the command, which `out` keeps
            setting_names.tell.cache_clear()  # each row is a command of its own
            with runs.on_devices(changes(row)["emulate_devices"]), runs.spared():
                train.train(config(row), folder)
        end.read(folder)
    except (Exception, SystemExit) as error:
        end.error = error
    end.out, end.seconds = out.getvalue(), time.process_time() - began
    return end


def attempt_in_two(row: covering.Row, folder: pathlib.Path, commands: runs.Commands) -> End:
    """Trains a row in `folder` in two processes, each with half of the devices."""
    settings = changes(row)
    settings["emulate_devices"] //= 2
    words = ("--config=configs/base.py", *flags(settings), f"--workdir={folder}")
    both = commands.start_two(*words, before=(runs.FINDS_SUPPORT, runs.FINDS_SUPPORT))
    statuses = {one.wait().status for one in both}
    end = End(out="".join(one.out + one.err for one in both))
    if statuses == {0}:
        end.read(folder)
    else:
        end.error = UserError(both[0].error_line) if statuses == {2} else RuntimeError(end.out)
    return end


def config(row: covering.Row) -> settings_lib.Config:
    """Returns the checked settings of a row."""
    raw = base_config.get_config()
    raw.update_from_flattened_dict({**changes(row), "metrics.to": ()})
    return config_lib.from_dict(raw)


def tolerance(row: covering.Row) -> float:
    """Returns the largest relative difference of losses that rounding explains, which `zerojax verify` allows too."""
    return verify.tolerance_of(config(row), "cpu")[0]


def fault(row: covering.Row, end: End, base: End | None) -> str:
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
        row = {
            name: rng.choice(list(values)) if rng.random() < share else next(iter(values))
            for name, values in SETTINGS.items()
        }
        for _ in range(200):  # mend what is broken, one setting at a time
            rules = [rule for rule in SPACE.rules if rule.breaks(row)]
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
    parser.add_argument("--only", default="", help="numbers of cases, with commas between them")
    options = parser.parse_args()
    rows = random_rows(options.random, options.seed) if options.random else SPACE.rows
    only = set(map(int, options.only.split(","))) if options.only else set(range(len(rows)))
    bases: dict[tuple, End] = {}
    seconds = [0.0, 0.0]
    ends = {"equal": 0, "refused": 0, "fault": 0}
    import jax

    scratch = pathlib.Path(tempfile.mkdtemp())
    began = time.time()
    with runs.jax_settings(jax_compilation_cache_dir=str(scratch / "programs"), **conftest.CACHED):
        for number, row in enumerate(rows):
            if number not in only:
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
                        if not isinstance(one.error, UserError) or len(only) == 1:
                            print("".join(traceback.format_exception(one.error)[-8:]), flush=True)
            if len(only) == 1:
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
