"""Translates the arguments of transformers' Trainer. This module fills the "auto" values of their DeepSpeed config, and names what remains.

Trainer makes an optimizer and a schedule itself where the DeepSpeed config has none, or where there is no DeepSpeed config.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerojax.errors import UserError
from zerojax.migration import accelerate, accelerate_keys, script_arguments, translate
from zerojax.migration import draft as draft_lib
from zerojax.migration import keys as keys_lib
from zerojax.migration.draft import Draft, Line, Translation
from zerojax.migration.keys import Key

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
    "per_device_eval_batch_size": "an evaluation has the batches of training; set config.evaluate.batches",
}
# argument, as several trainers name it -> the size of `parallelism_config`
WAYS: Mapping[str, str] = {
    "dp_replicate_size": "dp_replicate_size",
    "dp_shard_size": "dp_shard_size",
    "tensor_parallel_size": "tp_size",
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_size", "sequence_parallel_degree"), "cp_size"),
}
_LOWEST = ("lr_scheduler_kwargs.min_lr_rate", "lr_scheduler_kwargs.min_lr", "cosine_min_lr_ratio")
_FSDP, _PARALLELISM = "fsdp_config", "parallelism_config"
_STRATEGIES = ("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy")
KEYS: Mapping[str, Key] = {
    **{name: Key(keys_lib.TAKEN, "", (place,)) for name, (_, place) in ARGUMENTS.items()},
    **{name: Key(keys_lib.UNSUPPORTED, text) for name, text in BY_HAND.items()},
    **script_arguments.KEYS,
    "fsdp": Key(
        keys_lib.TAKEN, "", ("zero.stage", "mesh.replica", "offload.optimizer", "offload.params"), (False, None, "")
    ),
    "fsdp_version": Key(keys_lib.TAKEN, accelerate_keys.KEYS["fsdp_config.version"].why, ("zero.stage",)),
    **{name: accelerate_keys.KEYS[f"{_PARALLELISM}.{size}"] for name, size in WAYS.items()},
    **dict.fromkeys(_LOWEST, Key(keys_lib.TAKEN, "", ("optimizer.final_fraction",))),
    "fp8": Key(keys_lib.TAKEN, "", ("precision",), (False, None)),
    "activation_offloading": keys_lib.KEYS["activation_checkpointing.cpu_checkpointing"],
    "use_muon": Key(keys_lib.TAKEN, "matrices by muon, the rest by adamw", ("optimizer.name",), (False, None)),
    "num_train_epochs": Key(keys_lib.TAKEN, "", ("epochs",)),
    "optim": Key(keys_lib.TAKEN, "", ("optimizer.name", "optimizer.moments")),
    **dict.fromkeys(_STRATEGIES[:2], Key(keys_lib.TAKEN, "", ("evaluate.every",))),
    "save_strategy": Key(keys_lib.TAKEN, "", ("checkpoint.every",)),
    "logging_strategy": Key(
        keys_lib.IMPLIED, "config.log_every counts steps, and a line is printed once a minute at least"
    ),
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
SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    # with restarts: of one cycle, unless its kwargs say otherwise; the last: one step ahead of the others
    **dict.fromkeys(("cosine_with_min_lr", "cosine_with_restarts", "cosine_warmup_with_min_lr"), "cosine"),
    "constant": "constant",
    "constant_with_warmup": "constant",
}
# Trainer's `optim` -> (DeepSpeed's type, how moments are stored)
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        "adamw_torch adamw_torch_fused adamw_torch_xla adamw_hf adamw_apex_fused paged_adamw paged_adamw_32bit".split(),
        ("AdamW", "fp32"),
    ),
    **dict.fromkeys("adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit".split(), ("AdamW", "int8")),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), ("Lion", "fp32")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), ("Lion", "int8")),
    "adafactor": ("Adafactor", "fp32"),
    "sgd": ("SGD", "fp32"),
}
_PARAMS = {"AdamW": ("lr", "betas", "eps", "weight_decay"), "Lion": ("lr", "betas", "weight_decay")}
_DECAYS = "optimizer.weight_decay_on"
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
    own = {script_arguments.ALIASES.get(name, name): name for name in content if name != "deepspeed"}
    arguments = {name: content[given] for name, given in own.items()}
    tool, omitted = script_arguments.omitted(content, arguments)
    arguments |= omitted
    is_hardwares = arguments.get("bf16") == draft_lib.AUTO  # where the hardware has it, which all of our targets do
    if is_hardwares:
        arguments["bf16"] = True
    draft = Draft(arguments, KEYS)
    script_arguments.read(draft)
    blocks = {key: value for key, value in (_PLAIN if deepspeed is None else deepspeed).items() if value is not None}
    kind, moments = OPTIMIZERS.get(str(draft.get("optim", "adamw_torch")).lower(), ("AdamW", "fp32"))
    made = {"type": kind, "params": dict.fromkeys(_PARAMS.get(kind, ("lr", "weight_decay")), draft_lib.AUTO)}
    try:
        inner = translate.translate({"optimizer": made, **blocks}, version=version, auto=_auto(arguments))
    except UserError as error:
        raise UserError(_named_argument(str(error), arguments, deepspeed)) from error
    is_own = "optimizer" not in blocks
    if is_own and _DECAYS in inner.settings:  # Trainer's own optimizer spares biases and norms
        inner = dataclasses.replace(inner, settings={**inner.settings, _DECAYS: "matrices"})
    _merge(draft, inner, deepspeed)
    _parts(draft, arguments, is_alone=deepspeed is None)
    if deepspeed is None:
        _emulate(draft)
    _optimizer(draft, moments, is_own=is_own)
    if "scheduler" not in blocks:
        _schedule(draft)
    _steps(draft)
    for name, value in draft_lib.leaves(arguments):
        _say(draft, name, value)
    if is_hardwares:
        draft.assume("bf16", {"precision": draft.settings["precision"]}, "the hardware's")
    found = draft.finish(inner.devices)
    own |= {new: old for old, new in script_arguments.ALIASES.items() if new in omitted and new not in own}
    told = [dataclasses.replace(line, **_as_given(line.key, own, content)) for line in found.lines]
    for index, (line, before) in enumerate(zip(told, found.lines, strict=True)):
        if before.key in omitted:
            text = f"absent: {tool} takes {omitted[before.key]!r}; {line.text}"
            told[index] = dataclasses.replace(line, value=None, text=text)
    sources = {
        place: tuple(own.get(name, name) for name in names if name not in omitted)
        for place, names in found.sources.items()
    }
    lines = [
        dataclasses.replace(line, key=f"deepspeed.{line.key}")
        for line in inner.lines
        if (_holds(deepspeed, line.key) if line.value is not None else deepspeed is not None)
        and not (line.key in ("scheduler.type", "optimizer.type") and line.value is None)
    ]
    return dataclasses.replace(found, sources=sources, lines=(*told, *_deepspeed(draft, content, deepspeed), *lines))


def _as_given(name: str, own: Mapping[str, str], content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the key and the value that the file has for an argument, which it may name otherwise."""
    first, dot, rest = name.partition(".")
    given = own.get(first, first)
    return {"key": f"{given}{dot}{rest}"} if dot or given not in content else {"key": given, "value": content[given]}


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


def _merge(draft: Draft, inner: Translation, deepspeed: Mapping[str, Any] | None) -> None:
    """Puts what the DeepSpeed config decides, with the arguments that filled in its "auto" as its sources."""
    held = dict(draft_lib.leaves(deepspeed or {}))
    for place, value in inner.settings.items():
        keys = inner.sources[place]
        names = [
            name
            for name, (own, its) in ARGUMENTS.items()
            if its == place
            and draft.has(name)
            and not _is_unset(name, draft.get(name))
            and any(key in keys and held.get(key, draft_lib.AUTO) == draft_lib.AUTO for key in own)
            and not (name == "warmup_ratio" and draft.get("warmup_steps"))
        ]
        draft.put(place, value, *names)
        draft.sources[place] += tuple(key for key in keys if _holds(deepspeed, key))
        if place in inner.assumed:
            draft.assumed.add(place)
            draft.sources[place] = keys
    for name, value in DEFAULTS.items():
        keys, place = ARGUMENTS[name]
        is_taken = any(
            key in inner.sources.get(place, ()) and held.get(key, draft_lib.AUTO) == draft_lib.AUTO for key in keys
        )
        if is_taken and not draft.has(name) and value is not False:
            draft.absent(
                name, keys_lib.TAKEN, f"absent: config.{place} = {inner.settings[place]!r}, transformers' default"
            )


def _parts(draft: Draft, arguments: Mapping[str, Any], *, is_alone: bool) -> None:
    """Puts what the arguments of FSDP, and the sizes of axes, decide: what they do in an Accelerate config."""
    asked = arguments.get("fsdp")
    words = [str(word).lower() for word in asked] if isinstance(asked, list) else str(asked or "").lower().split()
    strategy = next((word for word in words if word.upper() in accelerate.STRATEGIES), "")
    block, ways, names = _as_accelerate(draft, arguments, strategy, has_offload="offload" in words)
    is_on = is_alone and (draft_lib.is_true(asked) or draft.flag("fsdp_version"))
    found = accelerate.translate_parts(block if is_on else None, ways)
    for place, value in found.settings.items():
        if is_alone or place not in draft.settings:
            more = ("fsdp", "fsdp_version") if place == "zero.stage" else ()
            draft.put(place, value, *[names[key] for key in found.sources[place] if key in names], *more)
    for line in found.lines:
        if draft.has(line.key) and (is_on or line.key.startswith(_PARALLELISM)):
            draft.say(line.key, line.verdict, line.text)
    if not is_alone and draft_lib.is_true(asked):
        draft.say("fsdp", keys_lib.NO_EFFECT, "the DeepSpeed config has the stage")
    elif is_on and strategy.startswith("hybrid"):
        draft.say(
            "fsdp",
            keys_lib.TAKEN,
            f"config.zero.stage = {draft.settings['zero.stage']}; set config.mesh.replica to the number of hosts",
        )


def _as_accelerate(
    draft: Draft, arguments: Mapping[str, Any], strategy: str, *, has_offload: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Returns the two sections of an Accelerate config that the arguments are, and its keys with the arguments that gave them.

    Args:
      draft: the arguments.
      arguments: the same.
      strategy: the word of `fsdp` that names one, and `has_offload` whether another asks for offload. The section's own key comes first.
    """
    block, ways = (_section(draft, arguments, name) for name in (_FSDP, _PARALLELISM))
    names = {accelerate_keys.canonical(name): name for name, _ in draft_lib.leaves({_FSDP: block, _PARALLELISM: ways})}
    has_own = not {f"{_FSDP}.sharding_strategy", f"{_FSDP}.reshard_after_forward"}.isdisjoint(names)
    from_words: dict[str, Any] = {"sharding_strategy": strategy.upper()} if strategy and not has_own else {}
    from_words |= {"offload_params": True} if has_offload else {}
    names |= {f"{_FSDP}.{key}": "fsdp" for key in from_words}
    for name, size in WAYS.items():
        if draft.has(name):
            ways[size] = arguments[name]
            names[f"{_PARALLELISM}.{size}"] = name
    return block | from_words, ways, names


def _section(draft: Draft, arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns an argument that is a section of an Accelerate config; {} for a file's name, which is not read."""
    given = arguments.get(name)
    if isinstance(given, str):
        draft.say(name, keys_lib.UNSUPPORTED, "a file's keys are not read; write them here")
    return {**given} if isinstance(given, Mapping) else {}


def _emulate(draft: Draft) -> None:
    """Puts the number of devices that the mesh needs, where it is not the base config's."""
    devices = math.prod(size for place, size in draft.settings.items() if place.startswith("mesh."))
    is_other = 8 % devices or "mesh.data" in draft.settings  # the base config emulates 8
    if is_other and devices <= translate.MOST_EMULATED:
        draft.put("emulate_devices", devices)


def _optimizer(draft: Draft, moments: str, *, is_own: bool) -> None:
    """Says what became of the name of the optimizer, which Trainer reads where the DeepSpeed config has none."""
    if draft.flag("use_muon") and is_own:
        draft.put("optimizer.name", "muon", "use_muon")
        draft.say("optim", keys_lib.NO_EFFECT, "use_muon decides it")
        return
    kind = draft.get("optim")
    if kind is None:
        return
    if not is_own:
        draft.say("optim", keys_lib.NO_EFFECT, "the DeepSpeed config has an optimizer")
    elif str(kind).lower() == "muon":
        why = "set config.optimizer.name=muon if the rate is one of AdamW's, whose updates are as large; adamw is taken"
        draft.say("optim", keys_lib.UNSUPPORTED, why)
    elif str(kind).lower() not in OPTIMIZERS:
        draft.say(
            "optim",
            keys_lib.UNSUPPORTED,
            "there is no such optimizer; config.optimizer.name = 'adamw' is taken instead",
        )
    else:
        draft.put("optimizer.name", draft.settings["optimizer.name"], "optim")
        if moments != "fp32":
            draft.put("optimizer.moments", moments, "optim")


def _schedule(draft: Draft) -> None:
    """Puts the schedule that Trainer makes where the DeepSpeed config has none."""
    kind = str(draft.get("lr_scheduler_type") or "linear")
    draft.put("optimizer.schedule", SCHEDULES.get(kind, "linear"), "lr_scheduler_type")
    draft.put("optimizer.warmup", "linear")
    draft.put("optimizer.final_fraction", 0.0)
    lowest = next((name for name in _LOWEST if draft.get(name) is not None), "")
    if lowest and SCHEDULES.get(kind) == "cosine":
        peak = draft.settings["optimizer.learning_rate"] if lowest.endswith("min_lr") else 1.0
        draft.put("optimizer.final_fraction", draft.number(lowest) / (peak or 1.0), lowest)
    if kind not in SCHEDULES:
        text = f"there is no such schedule; {draft.settings['optimizer.schedule']!r} is taken instead"
        draft.say("lr_scheduler_type", keys_lib.UNSUPPORTED, text)
    name = "warmup_steps" if draft.get("warmup_steps") else "warmup_ratio"
    rise = (
        0
        if kind == "constant"
        else _warmup({key: draft.get(key) for key in ("warmup_steps", "warmup_ratio", "max_steps")})
    )
    draft.put("optimizer.warmup_steps", rise, *([name] if draft.get(name) and kind != "constant" else []))
    draft.sources["optimizer.warmup_steps"] = (name,) if draft.get(name) and kind != "constant" else ()


def _steps(draft: Draft) -> None:
    """Puts what Trainer counts in steps: the run, its logs, its checkpoints and its evaluations."""
    last = draft.whole("max_steps")
    if last is not None and last > 0:
        draft.put("steps", last, "max_steps")
    elif draft.settings.get("data.task", "text") != "text":
        draft.put("epochs", draft.number("num_train_epochs", 3.0), "num_train_epochs")
        if not draft.has("num_train_epochs"):
            draft.absent("num_train_epochs", keys_lib.TAKEN, "absent: config.epochs = 3.0, transformers' default")
    for name in ("seed", "save_total_limit"):
        if (value := draft.whole(name)) is not None and value > 0:
            draft.put(ARGUMENTS[name][1], value, name)
    if draft.flag("fp8"):
        draft.put("precision", "fp8", "fp8")
    if draft_lib.is_true(draft.get("gradient_checkpointing", False)):  # may name where it offloads to
        draft.put("model.remat", "full", "gradient_checkpointing")
        if "offload" in str(draft.get("gradient_checkpointing")).lower():
            why = "config.model.remat = 'full' without offload; config.model.offload keeps outputs of modules that it names in host memory"
            draft.say("gradient_checkpointing", keys_lib.UNSUPPORTED, why)
    _every(draft, "logging_steps")
    saves = str(draft.get("save_strategy", "steps")).lower()
    if saves == "steps":
        _every(draft, "save_steps", "save_strategy")
    elif saves == "no" or draft.get("save_strategy") is False:  # YAML reads `no` as False
        draft.put("checkpoint.every", 0, "save_strategy")
    else:
        draft.say(
            "save_strategy", keys_lib.UNSUPPORTED, "checkpoints are counted in steps; set config.checkpoint.every"
        )
    strategy = next((name for name in _STRATEGIES[:2] if draft.get(name) is not None), "")
    evaluates = str(draft.get(strategy, "no")).lower() if strategy else "no"
    if evaluates == "steps":
        _every(draft, "eval_steps", strategy)
    elif evaluates == "epoch" and "epochs" in draft.settings:
        draft.say(strategy, keys_lib.IMPLIED, "config.epochs evaluates after each")
    elif evaluates == "epoch":
        draft.say(
            strategy,
            keys_lib.UNSUPPORTED,
            "config.epochs, which evaluates after each, needs a config.data.task of answers",
        )
    else:
        if strategy:
            draft.put("evaluate.every", 0, strategy)
        draft.say("eval_steps", keys_lib.NO_EFFECT, "Trainer reads it with eval_strategy: steps")


def _every(draft: Draft, name: str, strategy: str = "") -> None:
    """Puts a number of steps, or the share of them that a value below 1 is."""
    given = draft.number(name)
    if given is None:
        if strategy:
            draft.say(strategy, keys_lib.IMPLIED, f"config.{ARGUMENTS[name][1]} counts steps")
        return
    steps = script_arguments.share(given, draft.settings.get("steps"))
    if steps is not None:
        draft.put(ARGUMENTS[name][1], steps, name, *([strategy] if strategy else []))
    elif 0 < given < 1:
        why = f"a share of max_steps, which is not given; set config.{ARGUMENTS[name][1]}"
        draft.say(name, keys_lib.UNSUPPORTED, why)


def _warmup(arguments: Mapping[str, Any]) -> float:
    """Returns the steps of the warm-up, or their share where the number of steps is not known."""
    values = Draft(arguments, {})
    steps, ratio = (values.number(name, 0.0) for name in ("warmup_steps", "warmup_ratio"))
    last = values.whole("max_steps", 0)
    chosen = steps or ratio
    if not 0 < chosen < 1:
        return int(chosen) if chosen == steps else 0
    return script_arguments.share(chosen, last) or chosen


def _say(draft: Draft, name: str, value: object) -> None:
    """Says of an argument what the table does not."""
    if name.partition(".")[0] in (_FSDP, _PARALLELISM):
        if name not in draft.told:
            draft.say(name, keys_lib.NO_EFFECT, "Trainer reads it with fsdp alone; set config.zero.stage")
    elif name == "num_train_epochs" and "steps" in draft.settings:
        draft.say(name, keys_lib.NO_EFFECT, "the number of steps is given")
    elif name == "num_train_epochs" and "epochs" not in draft.settings:
        text = "config.epochs needs a config.data.task of answers; set both, or config.steps"
        draft.say(name, keys_lib.UNSUPPORTED, text)
    elif name in KEYS and KEYS[name].verdict == keys_lib.TAKEN and _is_unset(name, value):
        draft.say(name, keys_lib.NO_EFFECT, f"it is not given; set config.{KEYS[name].into[0]}")
    elif name in KEYS and True in KEYS[name].off:  # on without being set, so that off asks for something
        return
    elif not draft_lib.is_true(value) and not any(name in names for names in draft.sources.values()):
        draft.say(name, keys_lib.NO_EFFECT, "it is off")
    elif keys_lib.find(name, KEYS) is None:
        draft.say(name, keys_lib.UNSUPPORTED, "an argument of the training script, which nothing here reads")
    elif name in ARGUMENTS and name not in draft.told and not any(name in names for names in draft.sources.values()):
        why = "the DeepSpeed config, or the optimizer, has its own value or none"
        draft.say(name, keys_lib.NO_EFFECT, f"{why}; set config.{ARGUMENTS[name][1]}")


def _deepspeed(draft: Draft, content: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> tuple[Line, ...]:
    """Returns the account of the argument `deepspeed`; none where FSDP's arguments decide the stage."""
    named = content.get("deepspeed")
    if deepspeed is not None:
        return (Line("deepspeed", "...", keys_lib.IMPLIED, "its keys follow"),)
    if named:
        why = "the file is not there; translate it, and take its settings"
        return (Line("deepspeed", named, keys_lib.UNSUPPORTED, why),)
    if draft.sources["zero.stage"]:
        return ()
    return (
        Line("deepspeed", None, keys_lib.TAKEN, "absent: config.zero.stage = 0, every device holds the full state"),
    )


def _named_argument(text: str, arguments: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> str:
    """Returns an error's line with the argument's name in place of the DeepSpeed key that it filled in."""
    for name, (keys, _) in ARGUMENTS.items():
        for key in keys:
            if name in arguments and text.startswith(f"{key}:") and not _holds(deepspeed, key):
                return name + text.removeprefix(key)
    return text


def _holds(deepspeed: Mapping[str, Any] | None, name: str) -> bool:
    """Returns whether the DeepSpeed config has a key."""
    return any(key == name or keys_lib.canonical(key) == name for key, _ in draft_lib.leaves(deepspeed or {}))


def _is_unset(name: str, value: object) -> bool:
    """Returns whether an argument's value is one of its ways of saying "not given"."""
    return value in ("", "auto", None) or (name == "max_steps" and isinstance(value, (int, float)) and value <= 0)
