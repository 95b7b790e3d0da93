"""Translates a DeepSpeed config. This module turns its values into settings of ours, and accounts for every key.

`keys` says which key decides which setting. DeepSpeed's defaults are those of 0.19; `version` takes older ones.
"""

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from zerojax.errors import UserError
from zerojax.interop.deepspeed import draft as draft_lib
from zerojax.interop.deepspeed import keys as keys_lib
from zerojax.interop.deepspeed.draft import Draft, Translation
from zerojax.zero import stages
from zerojax.zero.offload import settings as offload_lib

NEWEST = (0, 19)
CLIPS_SINCE = (0, 19, 3)  # gradient_clipping is 1.0 where it is absent; before, 0

# DeepSpeed's type, in lower case -> (our optimizer, why it is not the same; "" if it is)
_COMPRESSED = "gradients are summed uncompressed"
_WIDTHS = "learning rates do not depend on the width (muP)"
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adam": ("adamw", ""),
    "adamw": ("adamw", ""),
    "fusedadam": ("adamw", ""),
    "cpuadam": ("adamw", ""),
    "deepspeedcpuadam": ("adamw", ""),
    "lamb": ("lamb", ""),
    "fusedlamb": ("lamb", ""),
    "lion": ("lion", ""),
    "fusedlion": ("lion", ""),
    "cpulion": ("lion", ""),
    "sgd": ("sgd", ""),
    "adafactor": ("adafactor", ""),
    "onebitadam": ("adamw", _COMPRESSED),
    "zerooneadam": ("adamw", _COMPRESSED),
    "onebitlamb": ("lamb", _COMPRESSED),
    "muadam": ("adamw", _WIDTHS),
    "muadamw": ("adamw", _WIDTHS),
    "musgd": ("sgd", _WIDTHS),
}
DECAYING = ("adamw", "adafactor", "lamb", "lion")  # with a weight decay of their own
BETAS = {"adamw": (0.9, 0.999), "adam": (0.9, 0.999), "lamb": (0.9, 0.999), "lion": (0.9, 0.999)}
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
DEVICES = {"none": offload_lib.NONE, "cpu": offload_lib.HOST, "nvme": offload_lib.NVME}  # DeepSpeed's -> ours
MOST_EMULATED = 64  # CPU devices
_REDUCED = {"fp32": "fp32", "float32": "fp32", "fp16": "fp32", "float16": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_ZERO, _OPT, _SCHED = "zero_optimization", "optimizer.params", "scheduler.params"


def translate(
    content: Mapping[str, Any],
    *,
    version: tuple[int, ...] = NEWEST,
    devices: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Translation:
    """Returns what a DeepSpeed config becomes.

    Args:
      content: the config.
      version: of DeepSpeed, whose defaults hold for absent keys.
      devices: the number of devices, if something else says it.
      auto: values for keys that are "auto", by name ("optimizer.params.lr").

    Raises:
      UserError: a value has a wrong type, or keys contradict each other.
    """
    draft = Draft(_modern(content), keys_lib.KEYS, canonical=keys_lib.canonical, auto=auto)
    devices = _batch(draft, devices)
    _zero(draft, devices)
    _offload(draft)
    _precision(draft)
    _sums(draft)
    _optimizer(draft)
    _schedule(draft)
    _clip(draft, version)
    _clients(draft)
    every = draft.number("steps_per_print")
    if every is not None and every >= 1:
        draft.put("log_every", int(min(every, 2**31 - 1)), "steps_per_print")
    return draft.finish(devices)


def is_left_to_script(content: Mapping[str, Any]) -> bool:
    """Returns whether a config has "auto" values, as those for transformers' Trainer do."""
    return any(value == draft_lib.AUTO for _, value in draft_lib.leaves(content))


def _modern(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with a legacy truth value of zero_optimization, and those of cpu_offload, in today's form."""
    found = dict(content)
    zero = found.get(_ZERO)
    if isinstance(zero, bool):
        found[_ZERO] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        found[_ZERO] = {k: _device(v) if k.startswith("cpu_offload") and "pin" not in k else v for k, v in zero.items()}
    return found


def _device(value: Any) -> Any:
    return ("cpu" if value else "none") if isinstance(value, bool) else value


def _batch(draft: Draft, devices: int | None) -> int | None:
    """Puts the batch sizes, and returns the number of devices if they tell it."""
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    total, micro, accum = (draft.whole(name) for name in names)
    for name, value in zip(names, (total, micro, accum)):
        if value is not None and value < 1:
            raise UserError(f"{name}: must be at least 1, and is {value}; correct it in the file")
    if total and micro and total % (micro * (accum or 1)):
        each = f"train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps {accum or 1}"
        draft.say(
            names[1], keys_lib.UNSUPPORTED, f"DeepSpeed refuses it: {total} is not a multiple of {each}; it is derived"
        )
        micro = None
    if total and micro and accum:
        devices = devices or total // (micro * accum)
    if total:
        draft.put("global_batch_size", total, names[0])
        draft.put("micro_batch_size", micro or 0, names[1])
        draft.put("grad_accum", 0 if micro else accum or 1, names[2])
    elif micro or accum:
        draft.put("global_batch_size", 0, names[0])
        draft.put("micro_batch_size", micro or 1, names[1])
        draft.put("grad_accum", accum or 1, names[2])
        if not micro and not draft.has(names[1]):
            draft.absent(
                names[1], keys_lib.NO_EFFECT, "absent: the training script's; 1 is taken, set config.micro_batch_size"
            )
    elif not any(map(draft.has, names)):
        draft.absent(names[0], keys_lib.NO_EFFECT, "absent: the training script's; set config.global_batch_size")
    if total and not devices:
        most = next(count for count in range(8, 0, -1) if total // (micro or accum or 1) % count == 0)
        if most < 8:  # the base config emulates 8
            draft.put("emulate_devices", most, names[0])
    if draft.is_auto(names[1]) and "micro_batch_size" in draft.settings and not total:
        draft.say(
            names[1], keys_lib.NO_EFFECT, "auto is the training script's value; 1 is taken, set config.micro_batch_size"
        )
    return devices


def _clients(draft: Draft) -> None:
    """Puts what shows the metrics beside TensorBoard."""
    if draft.flag("wandb.enabled") and importlib.util.find_spec("wandb") is None:
        why = "wandb is not installed here; install it and translate again, or set config.metrics.to"
        draft.say("wandb.enabled", keys_lib.UNSUPPORTED, why)
    elif draft.flag("wandb.enabled"):
        draft.put("metrics.to", ("tensorboard", "wandb"), "wandb.enabled")
        if project := draft.get("wandb.project"):
            draft.put("metrics.project", str(project), "wandb.project")


def _zero(draft: Draft, devices: int | None) -> None:
    """Puts what is sharded, and how the devices are arranged."""
    chosen = draft.whole(f"{_ZERO}.stage", 0)
    if chosen not in range(4):
        raise UserError(f"{_ZERO}.stage: must be 0, 1, 2 or 3, and is {chosen}; correct it in the file")
    draft.put("zero.stage", chosen, f"{_ZERO}.stage")
    if not draft.has(f"{_ZERO}.stage"):
        draft.absent(f"{_ZERO}.stage", keys_lib.TAKEN, "absent: config.zero.stage = 0, DeepSpeed's default")
    threshold = f"{_ZERO}.stage3_param_persistence_threshold"
    elements = draft.number(threshold)
    if elements is not None and chosen == 3:
        draft.put("zero.min_size", int(min(elements, 2**31 - 1)), threshold)
    elif elements is not None:
        draft.say(threshold, keys_lib.NO_EFFECT, "DeepSpeed reads it at stage 3 alone")
    ways = draft.whole(f"{_ZERO}.mics_shard_size", -1)
    if ways > 0:
        draft.put("mesh.data", ways, f"{_ZERO}.mics_shard_size")
        draft.put("mesh.replica", max(1, (devices or ways) // ways), f"{_ZERO}.mics_shard_size")
    if devices and devices <= MOST_EMULATED:
        draft.put("emulate_devices", devices)


def _offload(draft: Draft) -> None:
    """Puts what lives outside of device memory."""
    for part, group in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        name = f"{_ZERO}.{group}.device"
        wanted = str(draft.get(name, "none")).lower()
        if wanted != "none":
            offload(draft, part, wanted, name)
    if "offload.params" in draft.settings and "offload.optimizer" not in draft.settings:
        draft.put("offload.optimizer", offload_lib.HOST, f"{_ZERO}.offload_param.device")
    for part, group in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        folder = f"{_ZERO}.{group}.nvme_path"
        wanted, known = str(draft.get(folder, "")), draft.settings.get("offload.nvme_path")
        if not draft.has(folder):
            continue
        if draft.settings.get(f"offload.{part}") != offload_lib.NVME:
            draft.say(folder, keys_lib.NO_EFFECT, f"{part} are not offloaded to a disk")
        elif known not in (None, wanted):
            draft.say(
                folder, keys_lib.UNSUPPORTED, f"one folder holds both files: config.offload.nvme_path = {known!r}"
            )
        else:
            draft.put("offload.nvme_path", wanted, folder)
    ratio = draft.number(f"{_ZERO}.offload_optimizer.ratio", 1.0)
    if ratio != 1.0 and "offload.optimizer" in draft.settings:
        draft.put("offload.fraction", ratio, f"{_ZERO}.offload_optimizer.ratio")


def offload(draft: Draft, part: str, device: str, name: str) -> None:
    """Puts where a part of the state lives, or says why it is not offloaded."""
    if device not in DEVICES:
        raise UserError(f"{name}: must be one of {', '.join(DEVICES)}, and is {device!r}; correct it in the file")
    column = offload_lib.PARTS[part]
    if not getattr(stages.STAGES[draft.settings["zero.stage"]], column):
        return draft.say(name, keys_lib.NO_EFFECT, f"the stage does not shard {part}, so it is not offloaded")
    draft.put(f"offload.{part}", DEVICES[device], name)
    return None


def _precision(draft: Draft) -> None:
    """Puts the precision, and the loss scale of fp16."""
    names = {"bf16": "bf16.enabled", "fp16": "fp16.enabled"}
    on = {kind: draft.flag(name) for kind, name in names.items()}
    if all(on.values()):
        raise UserError(
            "bf16.enabled and fp16.enabled: both are true, and DeepSpeed refuses that; set one to false in the file"
        )
    auto = next((kind for kind, name in names.items() if draft.is_auto(name)), None)
    if on["bf16"]:
        keeps_master = not draft.flag("bf16.bf16_master_weights_and_grads")
        draft.put(
            "precision", "bf16" if keeps_master else "bf16_sr", "bf16.enabled", "bf16.bf16_master_weights_and_grads"
        )
        if draft.flag("bf16.bf16_optimizer_states"):
            draft.put("optimizer.moments", "bf16", "bf16.bf16_optimizer_states")
    elif on["fp16"]:
        draft.put("precision", "fp16", "fp16.enabled")
    elif draft.flag("torch_autocast.enabled"):
        is_half = "bf" not in str(draft.get("torch_autocast.dtype", "bfloat16"))
        draft.put("precision", "fp16" if is_half else "bf16", "torch_autocast.enabled", "torch_autocast.dtype")
    elif draft.flag("amp.enabled"):
        draft.put("precision", "fp16")
    elif auto:
        draft.put("precision", auto)
        for name in filter(draft.is_auto, names.values()):
            text = f"auto is the training script's value; {auto} is taken, set config.precision"
            draft.say(name, keys_lib.NO_EFFECT, text)
    else:
        draft.put("precision", "fp32", "bf16.enabled", "fp16.enabled")
        if not any(map(draft.has, names.values())):
            draft.absent("bf16.enabled", keys_lib.TAKEN, "absent: config.precision = 'fp32', DeepSpeed's default")
    if draft.settings["precision"] == "fp16":
        _loss_scale(draft)
        return
    for key in (
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    ):
        draft.say(
            f"fp16.{key}", keys_lib.NO_EFFECT, f"precision is {draft.settings['precision']}, which needs no loss scale"
        )


def _loss_scale(draft: Draft) -> None:
    static = draft.number("fp16.loss_scale", 0.0)
    draft.put("loss_scale.static", static, "fp16.loss_scale")
    dynamic = {
        "init_scale": (2.0 ** draft.whole("fp16.initial_scale_power", 16), "fp16.initial_scale_power"),
        "window": (draft.whole("fp16.loss_scale_window", 1000), "fp16.loss_scale_window"),
        "hysteresis": (draft.whole("fp16.hysteresis", 2), "fp16.hysteresis"),
        "consecutive_hysteresis": (draft.flag("fp16.consecutive_hysteresis"), "fp16.consecutive_hysteresis"),
        "min_scale": (max(2.0**-126, draft.number("fp16.min_loss_scale", 1.0)), "fp16.min_loss_scale"),
    }
    for field, (value, name) in dynamic.items():
        if static:
            draft.say(name, keys_lib.NO_EFFECT, "fp16.loss_scale is a constant")
        elif draft.has(name):
            draft.put(f"loss_scale.{field}", value, name)


def _sums(draft: Draft) -> None:
    """Puts the dtypes of the gradients' sums over passes and over devices."""
    sums = {"data_types.grad_accum_dtype": "accum_dtype", "communication_data_type": "reduce_dtype"}
    for name, field in sums.items():
        value = draft.get(name)
        if value is not None:
            if str(value).lower() not in _REDUCED:
                raise UserError(
                    f"{name}: must be one of {', '.join(_REDUCED)}, and is {value!r}; correct it in the file"
                )
            draft.put(field, _REDUCED[str(value).lower()], name)
    if draft.flag("fp32_allreduce"):
        draft.put("reduce_dtype", "fp32", "fp32_allreduce")


def _optimizer(draft: Draft) -> None:
    """Puts the optimizer and its numbers."""
    if not draft.has("optimizer"):
        text = "absent: the training script's; config.optimizer keeps the base config's AdamW"
        return draft.absent("optimizer.type", keys_lib.NO_EFFECT, text)
    kind = str(draft.get("optimizer.type", "AdamW"))
    name, why = OPTIMIZERS.get(kind.lower(), ("adamw", "there is no such optimizer"))
    modes = f"{_OPT}.adam_w_mode", f"{_OPT}.adamw_mode"
    if name == "adamw" and kind.lower() != "adamw" and not all(draft.flag(mode, True) for mode in modes):
        name = "adam"
    draft.put("optimizer.name", name, "optimizer.type", *modes)
    if why:
        draft.say("optimizer.type", keys_lib.UNSUPPORTED, f"{why}; config.optimizer.name = {name!r} is taken instead")
    rate = draft.number(f"{_OPT}.lr", None if draft.is_auto(f"{_OPT}.lr") else 1e-3)
    if rate is not None:
        draft.put("optimizer.learning_rate", rate, f"{_OPT}.lr")
    _moments(draft, name)
    _decay(draft, name)
    return None


def _moments(draft: Draft, name: str) -> None:
    """Puts the averages' decay rates and eps."""
    if name == "sgd":
        draft.put("optimizer.b1", draft.number(f"{_OPT}.momentum", 0.0), f"{_OPT}.momentum")
    elif name in BETAS:
        betas = draft.get(f"{_OPT}.betas", BETAS[name])
        if (
            not isinstance(betas, (list, tuple))
            or not all(isinstance(b, (int, float)) for b in betas)
            or len(betas) < 2
        ):
            raise UserError(f"{_OPT}.betas: must be two numbers, and is {betas!r}; correct it in the file")
        if not draft.is_auto(f"{_OPT}.betas"):
            draft.put("optimizer.b1", float(betas[0]), f"{_OPT}.betas")
            draft.put("optimizer.b2", float(betas[1]), f"{_OPT}.betas")
    epsilon = draft.number(f"{_OPT}.eps")
    if epsilon is not None:
        draft.put("optimizer.eps", epsilon, f"{_OPT}.eps")
    if draft.has(f"{_OPT}.fp32_optimizer_states"):
        is_wide = draft.flag(f"{_OPT}.fp32_optimizer_states")
        draft.put("optimizer.moments", "fp32" if is_wide else "bf16", f"{_OPT}.fp32_optimizer_states")


def _decay(draft: Draft, name: str) -> None:
    """Puts the weight decay. transformers' Trainer, whose configs have "auto" values, exempts biases and norms from it."""
    decay = draft.number(f"{_OPT}.weight_decay", None if draft.is_auto(f"{_OPT}.weight_decay") else 0.0)
    if name not in DECAYING:
        draft.put("optimizer.weight_decay", 0.0, f"{_OPT}.weight_decay")
        if decay:
            text = f"{name} here has no L2 penalty; add it to your loss, or use AdamW"
            draft.say(f"{_OPT}.weight_decay", keys_lib.UNSUPPORTED, text)
        return
    if decay is not None:
        draft.put("optimizer.weight_decay", decay, f"{_OPT}.weight_decay")
    if decay or draft.has(f"{_OPT}.weight_decay"):
        by_script = any(draft.is_auto(f"{_OPT}.{key}", filled=True) for key in ("lr", "weight_decay", "betas", "eps"))
        draft.put("optimizer.weight_decay_on", "matrices" if by_script else "all", f"{_OPT}.weight_decay")


def _schedule(draft: Draft) -> None:
    """Puts the learning-rate schedule."""
    if not draft.has("scheduler"):
        if draft.has("optimizer"):
            draft.put("optimizer.schedule", "constant")
            draft.put("optimizer.warmup_steps", 0)
            text = "absent: config.optimizer.schedule = 'constant', as in DeepSpeed where the training script has none"
            draft.absent("scheduler.type", keys_lib.TAKEN, text)
        return
    kind = str(draft.get("scheduler.type"))
    if kind not in SCHEDULES:
        text = f"a config has no {kind}; config.optimizer.schedule = 'constant' is taken instead"
        draft.say("scheduler.type", keys_lib.UNSUPPORTED, text)
        draft.put("optimizer.schedule", "constant")
        draft.put("optimizer.warmup_steps", 0)
        for name in keys_lib.KEYS:
            if name.startswith(f"{_SCHED}.") and draft.has(name):
                draft.say(name, keys_lib.UNSUPPORTED, f"a config has no {kind}")
        return
    draft.put("optimizer.schedule", kind, "scheduler.type")
    draft.put("optimizer.warmup", _form(draft), f"{_SCHED}.warmup_type")
    steps = draft.whole(f"{_SCHED}.warmup_num_steps", None if draft.is_auto(f"{_SCHED}.warmup_num_steps") else 1000)
    if steps is not None:
        draft.put("optimizer.warmup_steps", steps, f"{_SCHED}.warmup_num_steps")
    if kind != "WarmupLR" and (last := draft.whole(f"{_SCHED}.total_num_steps")) is not None:
        draft.put("steps", last, f"{_SCHED}.total_num_steps")
    if kind == "WarmupCosineLR":
        draft.put(
            "optimizer.initial_fraction", draft.number(f"{_SCHED}.warmup_min_ratio", 0.0), f"{_SCHED}.warmup_min_ratio"
        )
        draft.put("optimizer.final_fraction", draft.number(f"{_SCHED}.cos_min_ratio", 1e-4), f"{_SCHED}.cos_min_ratio")
    else:
        _bounds(draft, kind)


def _form(draft: Draft) -> str:
    form = str(draft.get(f"{_SCHED}.warmup_type", "log"))
    return form if form in ("log", "linear") else "log"  # as DeepSpeed, which warns


def _bounds(draft: Draft, kind: str) -> None:
    """Puts the schedule's largest and smallest rate."""
    largest, smallest = f"{_SCHED}.warmup_max_lr", f"{_SCHED}.warmup_min_lr"
    known = draft.settings.get("optimizer.learning_rate")
    default = 1e-3 if kind == "WarmupDecayLR" and not draft.has(largest) else known
    peak = draft.number(largest, default)
    if peak is not None:
        draft.put("optimizer.learning_rate", peak, largest if draft.has(largest) else f"{_OPT}.lr")
    first = draft.number(smallest, 0.0)
    if first and not peak:
        text = "the peak is the training script's; set config.optimizer.initial_fraction"
        return draft.say(smallest, keys_lib.NO_EFFECT, text)
    return draft.put("optimizer.initial_fraction", first / peak if first else 0.0, smallest)


def _clip(draft: Draft, version: tuple[int, ...]) -> None:
    """Puts the largest norm of the gradients."""
    norm = draft.number("gradient_clipping")
    if norm is not None:
        return draft.put("optimizer.clip_norm", norm if math.isfinite(norm) else 0.0, "gradient_clipping")
    if draft.is_auto("gradient_clipping"):
        return None
    norm = 1.0 if version >= CLIPS_SINCE or version == NEWEST else 0.0
    draft.put("optimizer.clip_norm", norm)
    since = ".".join(map(str, CLIPS_SINCE))
    text = f"absent: config.optimizer.clip_norm = {norm}, DeepSpeed's default (1.0 since {since}, 0.0 before: --deepspeed 0.18)"
    return draft.absent("gradient_clipping", keys_lib.TAKEN, text)
