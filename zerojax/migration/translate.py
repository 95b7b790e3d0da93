"""Translates a DeepSpeed config. This module turns its values into settings of ours, and accounts for every key.

`keys` says which key decides which setting. DeepSpeed's defaults are those of 0.19; `version` takes older ones.
"""

import math
from collections.abc import Mapping
from typing import Any

from zerojax import errors
from zerojax.errors import UserError
from zerojax.migration import draft as draft_lib
from zerojax.migration import keys as keys_lib
from zerojax.migration.draft import Draft, Translation
from zerojax.zero import stages
from zerojax.zero.host import settings as offload_lib
from zerojax.zero.wires import packed

NEWEST = (0, 19)
CLIPS_SINCE = (0, 19, 3)  # gradient_clipping is 1.0 where it is absent; before, 0

# DeepSpeed's type, in lower case -> (our optimizer, why it is not the same; "" if it is)
_COMPRESSED = "gradients are summed uncompressed"
_RATES = "updates of config.optimizer.name=muon are as large as AdamW's, and DeepSpeed's are not; set it with a rate of AdamW's"
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
    "muon": ("adamw", _RATES),
    "muadam": ("adamw", _WIDTHS),
    "muadamw": ("adamw", _WIDTHS),
    "musgd": ("sgd", _WIDTHS),
}
DECAYING = ("adamw", "adafactor", "lamb", "lion")  # with a weight decay of their own
MOMENTUM = "momentum"
# Of DeepSpeed's optimizer
READS = dict.fromkeys(("adamw", "adam", "lamb"), ("betas", "eps")) | {"lion": ("betas",), "sgd": (MOMENTUM,)}
# what transformers' Trainer takes for "auto" where nobody gives it a value, and for an optimizer and a schedule that are absent
ASSUMED: Mapping[str, Any] = {
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": (0.9, 0.999),
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "gradient_clipping": 1.0,
    "scheduler.params.warmup_num_steps": 0,
}
LINEAR = {
    "optimizer.schedule": "linear",
    "optimizer.warmup": "linear",
    "optimizer.warmup_steps": 0,
    "optimizer.final_fraction": 0.0,
}
_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULES: Mapping[str, tuple[str, ...]] = {  # DeepSpeed's type -> its parameters
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP),
}
DEVICES = {"none": offload_lib.NONE, "cpu": offload_lib.HOST, "nvme": offload_lib.NVME}  # DeepSpeed's -> ours
MOST_EMULATED = 64  # CPU devices
MIN_SIZE = 1024  # of config.zero.min_size, where the file asks for ten times a hidden size that it does not know
_REDUCED = {"fp32": "fp32", "float32": "fp32", "fp16": "fp32", "float16": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_HALVES = {**_REDUCED, **dict.fromkeys(("fp16", "float16", "half"), "fp16")}
_ZERO, _OPT, _SCHED = "zero_optimization", "optimizer.params", "scheduler.params"
# axes along which devices have the same examples -> their sizes
_SHARE_EXAMPLES = {
    "mesh.pipe": ("pipeline_parallel_size", "pipeline.stages"),
    "mesh.context": ("sequence_parallel_size",),
    "mesh.model": ("tensor_parallel.autotp_size",),
}


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
    draft = Draft(_modern(content), keys_lib.KEYS, canonical=keys_lib.canonical, auto=auto, switches=keys_lib.SWITCHES)
    axes = {}
    for place, names in _SHARE_EXAMPLES.items():
        key = next((name for name in names if draft.has(name)), names[0])
        axes[place] = (max(1, draft.whole(key) or 1), key)
    shared = math.prod(size for size, _ in axes.values())
    devices = _batch(draft, devices, shared)
    _zero(draft, devices, shared)
    for place, (size, key) in axes.items():
        if size > 1:
            draft.put(place, size, key)
    _offload(draft)
    _wires(draft, devices)
    _precision(draft)
    _sums(draft)
    _optimizer(draft)
    _schedule(draft)
    _clip(draft, version)
    _clients(draft)
    every = draft.number("steps_per_print", infinite=True)
    if every is not None and 1 <= every < 2**31:
        draft.put("log_every", int(every), "steps_per_print")
    elif every is not None:
        draft.say("steps_per_print", keys_lib.NO_EFFECT, "DeepSpeed prints no steps; config.log_every stays")
    return draft.finish(devices)


def assume_script(draft: Draft) -> None:
    """Puts what every format here leaves to the training script: the batch, the optimizer and its schedule."""
    _batch(draft, None)
    _optimizer(draft)
    _schedule(draft)


def _modern(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with a legacy truth value of zero_optimization, and those of cpu_offload, in today's form."""
    found = dict(content)
    zero = found.get(_ZERO)
    if isinstance(zero, bool):
        found[_ZERO] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        found[_ZERO] = {k: _device(v) if k.startswith("cpu_offload") and "pin" not in k else v for k, v in zero.items()}
    return found


def _device(value: object) -> Any:
    return ("cpu" if value else "none") if isinstance(value, bool) else value


def _batch(draft: Draft, devices: int | None, shared: int = 1) -> int | None:
    """Puts the batch sizes, and returns the number of devices if they tell it. Each example is on `shared` of them."""
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
        devices = devices or total // (micro * accum) * shared
    if total:
        draft.put("global_batch_size", total, names[0])
        draft.put("micro_batch_size", micro or 0, names[1])
        draft.put("grad_accum", 0 if micro else accum or 1, names[2])
    else:
        draft.put("global_batch_size", 0, names[0])
        if micro:
            draft.put("micro_batch_size", micro, names[1])
        else:
            draft.assume(names[1], {"micro_batch_size": 1}, "the training script's; the smallest is taken")
        draft.put("grad_accum", accum or 1, names[2])
    derived = "it follows from the two others and the number of devices"
    for name, place in zip(names, ("global_batch_size", "micro_batch_size", "grad_accum")):
        if draft.is_auto(name) and not draft.settings[place]:
            draft.say(name, keys_lib.IMPLIED, derived)
    if total and not devices:
        most = next(count for count in range(max(1, 8 // shared), 0, -1) if total // (micro or accum or 1) % count == 0)
        if most * shared != 8:  # the base config emulates 8
            draft.put("emulate_devices", most * shared, names[0])
    return devices


def _clients(draft: Draft) -> None:
    """Puts what shows the metrics beside TensorBoard."""
    if draft.flag("wandb.enabled"):
        draft.put("metrics.to", ("tensorboard", "wandb"), "wandb.enabled")
        if project := draft.get("wandb.project"):
            draft.put("metrics.project", str(project), "wandb.project")


def _zero(draft: Draft, devices: int | None, shared: int) -> None:
    """Puts what is sharded, and how the devices are arranged."""
    chosen = draft.whole(f"{_ZERO}.stage", 0)
    if chosen not in range(4):
        raise UserError(f"{_ZERO}.stage: must be 0, 1, 2 or 3, and is {chosen}; correct it in the file")
    draft.put("zero.stage", chosen, f"{_ZERO}.stage")
    if not draft.has(f"{_ZERO}.stage"):
        draft.absent(f"{_ZERO}.stage", keys_lib.TAKEN, "absent: config.zero.stage = 0, DeepSpeed's default")
    threshold = f"{_ZERO}.stage3_param_persistence_threshold"
    elements = draft.number(threshold, infinite=True)
    if chosen < 3:
        draft.say(threshold, keys_lib.NO_EFFECT, "DeepSpeed reads it at stage 3 alone")
    elif elements is not None:
        draft.put("zero.min_size", int(max(0, min(elements, 2**31 - 1))), threshold)
    elif draft.is_auto(threshold):
        why = "ten times the model's hidden size, which the file does not have; our default is taken"
        draft.assume(threshold, {"zero.min_size": MIN_SIZE}, why)
    ways = draft.whole(f"{_ZERO}.mics_shard_size", -1)
    if ways > 0:
        name, count = f"{_ZERO}.mics_shard_size", devices or draft.settings.get("emulate_devices", 8)
        draft.put("mesh.data", ways, name)
        copies = max(1, count // (ways * shared))
        draft.put("mesh.replica", copies, name)
        if not devices:
            draft.put("emulate_devices", copies * ways * shared, name)
            found = draft_lib.shown({"mesh.data": ways, "mesh.replica": copies})
            why = "the file does not tell how many devices there are: set config.mesh.replica to their number over mesh.data"
            draft.say(name, keys_lib.TAKEN, f"{found}, for {copies * ways * shared} devices; {why}")
    if devices and devices <= MOST_EMULATED:
        draft.put("emulate_devices", devices)


def _wires(draft: Draft, devices: int | None) -> None:
    """Puts how weights and gradients travel (ZeRO++)."""
    names = {
        part: f"{_ZERO}.zero_{part}" for part in ("quantized_weights", "quantized_gradients", "hpz_partition_size")
    }
    size = draft.whole(names["hpz_partition_size"], 1) or 1
    asked = {
        names["quantized_weights"]: draft.flag(names["quantized_weights"]),
        names["quantized_gradients"]: draft.flag(names["quantized_gradients"]),
        names["hpz_partition_size"]: size > 1,
    }
    if not stages.STAGES[draft.settings["zero.stage"]].params:
        for name in (name for name, is_on in asked.items() if is_on):
            draft.say(name, keys_lib.NO_EFFECT, "DeepSpeed reads it at stage 3 alone")
        return
    why_plain = {
        "offload.params": "weights are fetched from config.offload.params as they are, so they also travel so",
        "mesh.pipe": "the stages of config.mesh.pipe send weights as they are",
    }
    for why in (why for place, why in why_plain.items() if place in draft.settings):
        for name in (name for name, is_on in asked.items() if is_on):
            draft.say(name, keys_lib.UNSUPPORTED, why)
        return
    spans = size > 1 and not (devices and devices <= size)
    if asked[names["quantized_weights"]]:
        draft.put("wire.weights", packed.INT8, names["quantized_weights"])
    if asked[names["quantized_gradients"]]:
        draft.put("wire.gradients", packed.INT4 if spans else packed.INT8, names["quantized_gradients"])
    if spans:
        draft.put("wire.second_copy", True, names["hpz_partition_size"])
        draft.put("wire.host_devices", size, names["hpz_partition_size"])
        if devices is None:
            found = draft_lib.shown({"wire.second_copy": True, "wire.host_devices": size})
            why = f"the file does not tell how many there are: one host of {size} refuses both, and int4 gradients, so omit them there"
            draft.say(names["hpz_partition_size"], keys_lib.TAKEN, f"{found}, for more than {size} devices; {why}")
    elif size > 1:
        draft.say(
            names["hpz_partition_size"], keys_lib.NO_EFFECT, "all devices are one host, whose weights are one copy"
        )


def _offload(draft: Draft) -> None:
    """Puts what lives outside of device memory."""
    for part, group in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        name = f"{_ZERO}.{group}.device"
        wanted = str(draft.get(name, "none")).lower()
        if wanted != "none":
            offload(draft, part, wanted, name)
    why_not = {
        "here params are offloaded with the optimizer state alone, so both stay on the device; add offload_optimizer, or set "
        "config.offload": "offload.optimizer" not in draft.settings,
        "a stage of config.mesh.pipe reads weights from the devices, so they stay there": "mesh.pipe" in draft.settings,
    }
    if "offload.params" in draft.settings and any(why_not.values()):
        del draft.settings["offload.params"]
        why = next(why for why, holds in why_not.items() if holds)
        draft.say(f"{_ZERO}.offload_param.device", keys_lib.UNSUPPORTED, why)
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
            draft.put("offload.nvme_path", wanted, folder, *draft.sources.get("offload.nvme_path", ()))
    name = f"{_ZERO}.offload_optimizer.ratio"
    ratio = draft.number(name, 1.0)
    if "offload.optimizer" not in draft.settings:
        draft.say(name, keys_lib.NO_EFFECT, "the optimizer state is not offloaded")
    elif ratio != 1.0 and not stages.STAGES[draft.settings["zero.stage"]].params:
        draft.say(name, keys_lib.NO_EFFECT, "DeepSpeed reads it at stage 3 alone")
    elif ratio != 1.0:
        draft.put("offload.fraction", ratio, name)


def offload(draft: Draft, part: str, device: str, name: str) -> None:
    """Puts where a part of the state lives, or says why it is not offloaded."""
    kind = _meant(DEVICES, name, device)
    if not is_sharded(draft, part):
        return draft.say(name, keys_lib.NO_EFFECT, f"the stage does not shard {part}, so it is not offloaded")
    return draft.put(f"offload.{part}", kind, name)


def _meant(table: Mapping[str, str], name: str, value: Any) -> str:
    """Returns what a table has for the value of a key, in any case. Raises a UserError if it has none."""
    found = table.get(str(value).lower())
    if found is None:
        raise UserError(f"{name}: must be one of {', '.join(table)}, and is {value!r}; correct it in the file")
    return found


def is_sharded(draft: Draft, part: str) -> bool:
    """Returns whether the stage shards a part of the state, "optimizer" or "params"."""
    return getattr(stages.STAGES[draft.settings["zero.stage"]], offload_lib.PARTS[part])


def _precision(draft: Draft) -> None:
    """Puts the precision, and the loss scale of fp16."""
    names = {"bf16": "bf16.enabled", "fp16": "fp16.enabled"}
    on = {kind: draft.flag(name) for kind, name in names.items()}
    if all(on.values()):
        raise UserError(
            "bf16.enabled and fp16.enabled: both are true, and DeepSpeed refuses that; set one to false in the file"
        )
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
        _autocast(draft)
    elif draft.flag("amp.enabled"):
        draft.put("precision", "fp16")
    else:
        draft.put("precision", "fp32", "bf16.enabled", "fp16.enabled")
        for name in filter(draft.is_auto, names.values()):
            draft.assume(name, {"precision": "fp32"}, f"{draft_lib.SCRIPT} (false)")
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


def _autocast(draft: Draft) -> None:
    """Puts the precision of PyTorch's autocast, which takes float16 on GPUs where no dtype is given."""
    name = "torch_autocast.dtype"
    dtype = draft.get(name)
    kind = _meant(_HALVES, name, str(dtype or "fp16").lower().removeprefix("torch."))
    draft.put("precision", kind, "torch_autocast.enabled", name)
    if dtype is None:
        draft.absent(name, keys_lib.TAKEN, "absent: config.precision = 'fp16', as PyTorch's autocast on GPUs")


def _loss_scale(draft: Draft) -> None:
    static = draft.number("fp16.loss_scale", 0.0)
    draft.put("loss_scale.static", static, "fp16.loss_scale")
    power = draft.whole("fp16.initial_scale_power", 16)
    if not 0 <= power < 128:
        raise UserError(f"fp16.initial_scale_power: must be from 0 to 127, and is {power}; correct it in the file")
    dynamic = {
        "init_scale": (2.0**power, "fp16.initial_scale_power"),
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
            draft.put(field, _meant(_REDUCED, name, value), name)
    if draft.flag("fp32_allreduce"):
        draft.put("reduce_dtype", "fp32", "fp32_allreduce")


def _optimizer(draft: Draft) -> None:
    """Puts the optimizer and its numbers."""
    if not draft.holds("optimizer"):
        betas = ASSUMED[f"{_OPT}.betas"]
        settings = {
            "optimizer.name": "adamw",
            "optimizer.learning_rate": ASSUMED[f"{_OPT}.lr"],
            "optimizer.b1": betas[0],
            "optimizer.b2": betas[1],
            "optimizer.eps": ASSUMED[f"{_OPT}.eps"],
            "optimizer.weight_decay": ASSUMED[f"{_OPT}.weight_decay"],
        }
        return draft.assume("optimizer.type", settings)
    kind = str(draft.get("optimizer.type", "AdamW"))
    name, why = OPTIMIZERS.get(kind.lower(), ("adamw", "there is no such optimizer"))
    modes = f"{_OPT}.adam_w_mode", f"{_OPT}.adamw_mode"
    if name == "adamw" and kind.lower() != "adamw" and not all(draft.flag(mode, True) for mode in modes):
        name = "adam"
    draft.put("optimizer.name", name, "optimizer.type", *modes)
    if why:
        draft.say("optimizer.type", keys_lib.UNSUPPORTED, f"{why}; config.optimizer.name = {name!r} is taken instead")
    rate, adams = f"{_OPT}.lr", f"{_OPT}.adam_lr"
    if kind.lower() == "muon" and draft.has(adams):
        draft.say(rate, keys_lib.UNSUPPORTED, f"it is Muon's; the AdamW that is taken has {adams}")
        rate = adams
    else:
        draft.say(adams, keys_lib.UNSUPPORTED, f"{kind} has no such parameter")
    if draft.is_auto(rate):
        draft.assume(rate, {"optimizer.learning_rate": ASSUMED[f"{_OPT}.lr"]})
    else:
        draft.put("optimizer.learning_rate", draft.number(rate, 1e-3), rate)
    _moments(draft, name)
    _decay(draft, name)
    return None


def _moments(draft: Draft, name: str) -> None:
    """Puts the averages' decay rates and eps."""
    reads = READS.get(name, ())
    for key in ("betas", "eps", MOMENTUM):
        if key not in reads:
            draft.say(f"{_OPT}.{key}", keys_lib.UNSUPPORTED, f"{name} has no such parameter")
    if MOMENTUM in reads:
        draft.put("optimizer.b1", draft.number(f"{_OPT}.momentum", 0.0), f"{_OPT}.momentum")
    if "betas" in reads:
        _betas(draft)
    if "eps" in reads and draft.is_auto(f"{_OPT}.eps"):
        draft.assume(f"{_OPT}.eps", {"optimizer.eps": ASSUMED[f"{_OPT}.eps"]})
    elif "eps" in reads:
        draft.put("optimizer.eps", draft.number(f"{_OPT}.eps", 1e-8), f"{_OPT}.eps")
    if draft.has(f"{_OPT}.fp32_optimizer_states"):
        is_wide = draft.flag(f"{_OPT}.fp32_optimizer_states")
        draft.put("optimizer.moments", "fp32" if is_wide else "bf16", f"{_OPT}.fp32_optimizer_states")


def _betas(draft: Draft) -> None:
    betas = draft.get(f"{_OPT}.betas", ASSUMED[f"{_OPT}.betas"])
    if (
        not isinstance(betas, (list, tuple))
        or len(betas) != 2
        or not all(isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0 <= beta < 1 for beta in betas)
    ):
        raise UserError(
            f"{_OPT}.betas: must be two numbers from 0 to below 1, and is {errors.shown(betas)}; correct it in the file"
        )
    found = dict(zip(("optimizer.b1", "optimizer.b2"), map(float, betas)))
    if draft.is_auto(f"{_OPT}.betas"):
        return draft.assume(f"{_OPT}.betas", found)
    for place, beta in found.items():
        draft.put(place, beta, f"{_OPT}.betas")
    return None


def _decay(draft: Draft, name: str) -> None:
    """Puts the weight decay. DeepSpeed's optimizer decays all weights that it is given, and transformers' Trainer gives it all."""
    key = f"{_OPT}.weight_decay"
    torchs = f"{_OPT}.torch_adam"
    is_torchs = name == "adamw" and draft.flag(torchs) and not draft.has(key)
    decay = draft.number(key, 0.01 if is_torchs else ASSUMED[key])
    if name not in DECAYING:
        draft.put("optimizer.weight_decay", 0.0, key)
        if decay:
            draft.say(key, keys_lib.UNSUPPORTED, f"{name} here has no L2 penalty; add it to your loss, or use AdamW")
        return
    if draft.is_auto(key):
        draft.assume(key, {"optimizer.weight_decay": decay})
    else:
        draft.put("optimizer.weight_decay", decay, torchs if is_torchs else key)
    limits = f"{_OPT}.max_coeff"
    if name == "lamb" and not draft.has(limits):
        draft.absent(
            limits, keys_lib.UNSUPPORTED, "absent: LAMB's trust ratio is not limited; DeepSpeed's is, to 0.01 and 10"
        )
    if decay or draft.has(key):
        draft.put("optimizer.weight_decay_on", "all", key)


def _is_of_script(draft: Draft) -> bool:
    """Returns whether the optimizer's numbers are a training script's."""
    return any(draft.is_auto(f"{_OPT}.{key}", filled=True) for key in ("lr", "weight_decay", "betas", "eps"))


def _schedule(draft: Draft) -> None:
    """Puts the learning-rate schedule."""
    if not draft.holds("scheduler"):
        if not draft.holds("optimizer") or _is_of_script(draft):
            draft.assume("scheduler.type", LINEAR)
        else:
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
    for name in {key for names in SCHEDULES.values() for key in names} - set(SCHEDULES[kind]):
        draft.say(f"{_SCHED}.{name}", keys_lib.UNSUPPORTED, f"{kind} has no such parameter, and DeepSpeed refuses it")
    rise = f"{_SCHED}.warmup_num_steps"
    if draft.is_auto(rise):
        draft.assume(rise, {"optimizer.warmup_steps": ASSUMED[rise]})
    else:
        share = draft.number(rise, 1000)
        is_share = draft.is_auto(rise, filled=True) and 0 < share < 1
        draft.put("optimizer.warmup_steps", share if is_share else draft.whole(rise, 1000), rise)
    last = f"{_SCHED}.total_num_steps"
    if kind != "WarmupLR" and (steps := draft.whole(last)) is not None:
        draft.put("steps", steps, last)
    elif kind != "WarmupLR" and not draft.has(last):
        draft.absent(last, keys_lib.UNSUPPORTED, f"absent, and DeepSpeed's {kind} needs it; config.steps counts")
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
    own = draft.settings["optimizer.learning_rate"]
    peak = draft.number(largest, 1e-3 if kind == "WarmupDecayLR" and not draft.has(largest) else own)
    if draft.is_auto(largest):
        draft.say(largest, keys_lib.ASSUMED, f"{draft_lib.SCRIPT}: config.optimizer.learning_rate = {peak}")
    elif peak == own and draft.has(largest):
        draft.put("optimizer.learning_rate", peak, largest, *draft.sources["optimizer.learning_rate"])
    elif peak != own:
        draft.put("optimizer.learning_rate", peak, largest if draft.has(largest) else "scheduler.type")
        whose = "" if draft.has(largest) else f", DeepSpeed's default of {largest}"
        told = f"the schedule's own peak counts{whose}: config.optimizer.learning_rate = {peak}"
        draft.say(f"{_OPT}.lr", keys_lib.NO_EFFECT, told)
    first = draft.number(smallest, 0.0)
    draft.put("optimizer.initial_fraction", first / peak if peak else 0.0, smallest)


def _clip(draft: Draft, version: tuple[int, ...]) -> None:
    """Puts the largest norm of the gradients."""
    norm = draft.number("gradient_clipping", infinite=True)
    if norm is not None:
        return draft.put("optimizer.clip_norm", norm if 0 < norm < math.inf else 0.0, "gradient_clipping")
    if draft.is_auto("gradient_clipping"):
        return draft.assume("gradient_clipping", {"optimizer.clip_norm": ASSUMED["gradient_clipping"]})
    norm = 1.0 if version >= CLIPS_SINCE or version == NEWEST else 0.0
    draft.put("optimizer.clip_norm", norm)
    since = ".".join(map(str, CLIPS_SINCE))
    text = f"absent: config.optimizer.clip_norm = {norm}, DeepSpeed's default (1.0 since {since}, 0.0 before: --deepspeed 0.18)"
    return draft.absent("gradient_clipping", keys_lib.TAKEN, text)
