"""Translates the arguments of transformers' Trainer. This module fills the "auto" values of their DeepSpeed config, and names what remains.

Trainer makes an optimizer and a schedule itself where the DeepSpeed config has none, or where there is no DeepSpeed config.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from zerojax.interop.deepspeed import draft as draft_lib
from zerojax.interop.deepspeed import keys as keys_lib
from zerojax.interop.deepspeed import translate
from zerojax.interop.deepspeed.draft import Line, Translation

# argument -> the DeepSpeed keys whose "auto" takes it, and the setting of ours that it decides
ARGUMENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "per_device_train_batch_size": (("train_micro_batch_size_per_gpu",), "micro_batch_size"),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), "grad_accum"),
    "learning_rate": (("optimizer.params.lr", "scheduler.params.warmup_max_lr"), "optimizer.learning_rate"),
    "weight_decay": (("optimizer.params.weight_decay",), "optimizer.weight_decay"),
    "adam_epsilon": (("optimizer.params.eps",), "optimizer.eps"),
    "adam_beta1": (("optimizer.params.betas",), "optimizer.b1"),
    "adam_beta2": (("optimizer.params.betas",), "optimizer.b2"),
    "max_grad_norm": (("gradient_clipping",), "optimizer.clip_norm"),
    "warmup_steps": (("scheduler.params.warmup_num_steps",), "optimizer.warmup_steps"),
    "warmup_ratio": (("scheduler.params.warmup_num_steps",), "optimizer.warmup_steps"),
    "lr_scheduler_type": ((), "optimizer.schedule"),
    "max_steps": (("scheduler.params.total_num_steps",), "steps"),
    "bf16": (("bf16.enabled",), "precision"),
    "fp16": (("fp16.enabled",), "precision"),
    "gradient_checkpointing": ((), "model.remat"),
    "seed": ((), "seed"),
    "logging_steps": ((), "log_every"),
    "save_steps": ((), "checkpoint.every"),
    "save_total_limit": ((), "checkpoint.keep_last"),
    "eval_steps": ((), "evaluate.every"),
}
# argument -> what to set instead
BY_HAND: Mapping[str, str] = {
    "output_dir": "give the folder as --workdir",
    "resume_from_checkpoint": "the same --workdir resumes the run",
    "num_train_epochs": "set config.steps, or config.epochs with a config.data.task of answers",
    "per_device_eval_batch_size": "an evaluation has the batches of training; set config.evaluate.batches",
    "optim": "set config.optimizer.name, and config.optimizer.moments for 8-bit state",
    "report_to": "set config.metrics.to",
    "run_name": "set config.metrics.name",
    "fsdp": "set config.zero.stage: 3 for full_shard, 2 for shard_grad_op",
}
# transformers' defaults, for arguments that the file omits
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "bf16": False,
    "fp16": False,
}
MOST_STEPS = 2**31
SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), draft_lib.AUTO)}
_PLAIN = {  # what decides a run without DeepSpeed
    "train_micro_batch_size_per_gpu": draft_lib.AUTO,
    "gradient_accumulation_steps": draft_lib.AUTO,
    "gradient_clipping": draft_lib.AUTO,
    "bf16": {"enabled": draft_lib.AUTO},
    "fp16": {"enabled": draft_lib.AUTO},
}


def translate_trainer(
    content: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, *, version: tuple[int, ...] = translate.NEWEST
) -> Translation:
    """Returns what a Trainer's arguments become. They give the values of "auto" in the DeepSpeed config that they name.

    Args:
      content: the arguments.
      deepspeed: the config under `deepspeed`; None if there is none, or its file is not there.
      version: of DeepSpeed, whose defaults hold for absent keys.

    Raises:
      UserError: a value has a wrong type or is not known.
    """
    arguments = {name: value for name, value in content.items() if name != "deepspeed"}
    given = {key: value for key, value in (_PLAIN if deepspeed is None else deepspeed).items() if value is not None}
    filled = {"optimizer": _ADAMW, **given}
    found = translate.translate(filled, version=version, auto=_auto(arguments))
    settings, sources = dict(found.settings), dict(found.sources)
    for name, (keys, place) in ARGUMENTS.items():
        if name in arguments and any(key in sources.get(place, ()) and not _holds(deepspeed, key) for key in keys):
            sources[place] = (name,)
    sources = {
        place: tuple(k for k in keys if k in arguments or _holds(deepspeed, k)) for place, keys in sources.items()
    }
    own = _own(arguments, has_scheduler="scheduler" in given)
    settings |= {place: value for place, (value, _) in own.items()}
    sources |= {place: (name,) if name in arguments else () for place, (_, name) in own.items()}
    lines = [_line(name, value, settings, sources) for name, value in arguments.items()]
    inner = [
        dataclasses.replace(line, key=f"deepspeed.{line.key}")
        for line in found.lines
        if (_holds(deepspeed, line.key) if line.value is not None else deepspeed is not None)
        and not (line.key == "scheduler.type" and line.value is None)
    ]
    return Translation(settings, sources, (*lines, _named(content, deepspeed), *inner), found.devices)


def _auto(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {DeepSpeed key: value} for the values that are "auto"."""
    values = {**DEFAULTS, **{name: value for name, value in arguments.items() if not _is_unset(name, value)}}
    values["warmup_steps"] = _warmup(arguments)
    auto = {
        key: values[name]
        for name, (keys, _) in ARGUMENTS.items()
        if values.get(name) is not None and name != "warmup_ratio"
        for key in keys
    }
    auto["optimizer.params.betas"] = [values["adam_beta1"], values["adam_beta2"]]
    return auto


def _own(arguments: Mapping[str, Any], *, has_scheduler: bool) -> dict[str, tuple[Any, str]]:
    """Returns {place: (value, argument)} of what the arguments decide without DeepSpeed."""
    found: dict[str, tuple[Any, str]] = {}
    for name in ("seed", "logging_steps", "save_steps", "save_total_limit", "eval_steps", "max_steps"):
        value = arguments.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found[ARGUMENTS[name][1]] = value, name
    if draft_lib.is_true(arguments.get("gradient_checkpointing", False)):
        found["model.remat"] = "full", "gradient_checkpointing"
    if not has_scheduler:
        kind = str(arguments.get("lr_scheduler_type") or "linear")
        found["optimizer.schedule"] = SCHEDULES.get(kind, "linear"), "lr_scheduler_type"
        found["optimizer.warmup"] = "linear", ""
        found["optimizer.final_fraction"] = 0.0, ""
        steps = 0 if kind == "constant" else _warmup(arguments)
        name = "warmup_steps" if arguments.get("warmup_steps") else "warmup_ratio"
        found["optimizer.warmup_steps"] = (0, "") if steps is None else (steps, name)
    return found


def _warmup(arguments: Mapping[str, Any]) -> int | None:
    """Returns the steps of the warm-up; None for a share of a number of steps that is not known."""
    steps, share, last = (arguments.get(name) or 0 for name in ("warmup_steps", "warmup_ratio", "max_steps"))
    if not all(isinstance(value, (int, float)) and abs(value) < MOST_STEPS for value in (steps, share, last)):
        return None
    share = steps if 0 < steps < 1 else share if not steps else 0
    if not share:
        return int(steps)
    return math.ceil(share * last) if last > 0 else None


def _line(name: str, value: Any, settings: Mapping[str, Any], sources: Mapping[str, Iterable[str]]) -> Line:
    """Returns the account of one argument."""
    if name == "optim" and str(value) in _PLAIN_ADAMW:
        return Line(name, value, keys_lib.IMPLIED, "AdamW is taken unless the DeepSpeed config names another")
    if name == "num_train_epochs" and "steps" in settings:
        return Line(name, value, keys_lib.NO_EFFECT, "the number of steps is given")
    if name not in ARGUMENTS and not draft_lib.is_true(value):
        return Line(name, value, keys_lib.NO_EFFECT, "it is off")
    if name == "fsdp_config":
        return Line(name, value, keys_lib.NO_EFFECT, "Trainer reads it with fsdp alone; set config.zero.stage")
    if name in BY_HAND:
        return Line(name, value, keys_lib.UNSUPPORTED, BY_HAND[name])
    if name not in ARGUMENTS:
        return Line(name, value, keys_lib.UNSUPPORTED, "an argument of the training script, which nothing here reads")
    keys, place = ARGUMENTS[name]
    if name == "lr_scheduler_type" and "optimizer.schedule" in settings and str(value or "linear") not in SCHEDULES:
        return Line(
            name, value, keys_lib.UNSUPPORTED, f"there is no such schedule; {settings[place]!r} is taken instead"
        )
    if any(key in sources.get(place, ()) for key in (name, *keys)):
        return Line(name, value, keys_lib.TAKEN, draft_lib.shown({place: settings[place]}))
    if _is_unset(name, value):
        return Line(name, value, keys_lib.NO_EFFECT, f"it is not given; set config.{place}")
    if not draft_lib.is_true(value):
        return Line(name, value, keys_lib.NO_EFFECT, "it is off")
    if name == "warmup_ratio":
        return Line(
            name,
            value,
            keys_lib.UNSUPPORTED,
            "a share of max_steps, which is not given; set config.optimizer.warmup_steps",
        )
    why = f"the DeepSpeed config has its own value or none; set config.{place}"
    return Line(name, value, keys_lib.NO_EFFECT, why)


def _named(content: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> Line:
    """Returns the account of the argument `deepspeed`."""
    named = content.get("deepspeed")
    if deepspeed is not None:
        return Line("deepspeed", "...", keys_lib.IMPLIED, "its keys follow")
    if named:
        return Line(
            "deepspeed", named, keys_lib.UNSUPPORTED, "the file is not there; translate it, and take its settings"
        )
    return Line("deepspeed", None, keys_lib.TAKEN, "absent: config.zero.stage = 0, every device holds the full state")


def _holds(deepspeed: Mapping[str, Any] | None, name: str) -> bool:
    """Returns whether the DeepSpeed config has a key."""
    return any(key == name or keys_lib.canonical(key) == name for key, _ in draft_lib.leaves(deepspeed or {}))


def _is_unset(name: str, value: Any) -> bool:
    """Returns whether an argument's value is one of its ways of saying "not given"."""
    return value in ("", "auto", None) or (name == "max_steps" and isinstance(value, (int, float)) and value <= 0)
