"""Translates an Accelerate config and a hostfile. This module turns their values into settings of ours."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from zerojax.errors import UserError
from zerojax.interop.deepspeed import accelerate_keys, translate
from zerojax.interop.deepspeed import draft as draft_lib
from zerojax.interop.deepspeed import keys as keys_lib
from zerojax.interop.deepspeed.draft import Draft, Line, Translation

_DS, _FSDP, _WAYS, _FP8 = "deepspeed_config", "fsdp_config", "parallelism_config", "fp8_config"
_OFFLOAD = {group: f"deepspeed_config.{group}_device" for group in ("offload_optimizer", "offload_param")}
# sharding_strategy -> (the stage, whether each machine holds a copy)
STRATEGIES: Mapping[str, tuple[int, bool]] = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
    "1": (3, False),
    "2": (2, False),
    "3": (0, False),
    "4": (3, True),
    "5": (2, True),
}
# TransformerEngine scales by earlier steps, torchao by the array itself
FP8_RECIPES = {"TE": "delayed", "AO": "tensorwise", "TORCHAO": "tensorwise"}
PRECISIONS: Mapping[str, str] = {"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU", "TPU", "XLA")


def translate_accelerate(
    content: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None = None,
    *,
    version: tuple[int, ...] = translate.NEWEST,
) -> Translation:
    """Returns what an Accelerate config becomes.

    Args:
      content: the config.
      deepspeed: the content of its `deepspeed_config_file`, if it names one.
      version: of DeepSpeed, whose defaults hold for absent keys.

    Raises:
      UserError: a value has a wrong type or is not known.
    """
    draft = Draft(content, accelerate_keys.KEYS, canonical=accelerate_keys.canonical)
    devices = draft.whole("num_processes")
    if devices is not None and 0 < devices <= translate.MOST_EMULATED:
        draft.put("emulate_devices", devices, "num_processes")
    kind = str(draft.get("distributed_type") or "NO").upper()  # YAML reads `no` as False
    if kind == "DEEPSPEED":
        return _with_deepspeed(draft, content, deepspeed, devices, version)
    _precision(draft)
    if kind == "FSDP":
        _fsdp(draft)
    elif kind in REPLICATED:
        draft.put("zero.stage", 0, "distributed_type")
    else:
        draft.put("zero.stage", 0)
        draft.say(
            "distributed_type",
            keys_lib.UNSUPPORTED,
            "there is no such parallelism; config.zero.stage = 0 is taken instead",
        )
    _mesh(draft)
    _fp8(draft, content)
    for group, wanted in ((_DS, "DEEPSPEED"), (_FSDP, "FSDP"), ("megatron_lm_config", "MEGATRON_LM")):
        if kind != wanted:
            _unread(draft, content, group, f"Accelerate reads it with distributed_type {wanted} alone")
    return draft.finish(devices)


def translate_hostfile(text: str) -> Translation:
    """Returns what a hostfile becomes: the number of devices.

    Raises:
      UserError: a line is not "HOST slots=N", or a host comes twice.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\d+)", words)
        if match is None or match[1] in hosts:
            raise UserError(
                f"hostfile line {number}: must be 'HOST slots=N' with each host once, and is {line.strip()!r}"
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError("hostfile: names no host; a line is 'HOST slots=N'")
    devices = sum(hosts.values())
    start = "zerojax launch --hostfile FILE starts a process there for each"
    lines = tuple(
        Line(host, f"slots={count}", keys_lib.IMPLIED, f"{count} of {devices} devices; {start}")
        for host, count in hosts.items()
    )
    settings = {"mesh.data": -1, **({"emulate_devices": devices} if devices <= translate.MOST_EMULATED else {})}
    return Translation(settings, dict.fromkeys(settings, ()), lines, devices)


def _with_deepspeed(
    draft: Draft,
    content: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None,
    devices: int | None,
    version: tuple[int, ...],
) -> Translation:
    """Returns the translation of the DeepSpeed config that an Accelerate config holds, or of the file that it names."""
    named = draft.get(f"{_DS}.deepspeed_config_file")
    inner = translate.translate(_written(draft) if deepspeed is None else deepspeed, version=version, devices=devices)
    for place, value in inner.settings.items():
        draft.settings[place], draft.sources[place] = value, inner.sources[place]
    if named is not None and deepspeed is not None:
        _unread(draft, content, _DS, "the DeepSpeed config file decides it", but="deepspeed_config_file")
        draft.say("mixed_precision", keys_lib.NO_EFFECT, "the DeepSpeed config file decides it")
        draft.say("distributed_type", keys_lib.IMPLIED, "the stage is the DeepSpeed config file's")
        more = tuple(dataclasses.replace(line, key=f"{named}: {line.key}") for line in inner.lines)
    else:
        if named is not None:
            draft.say(
                f"{_DS}.deepspeed_config_file",
                keys_lib.UNSUPPORTED,
                "the file is not there; translate it, and take its settings",
            )
        more = ()
        own = {
            "zero.stage": ("distributed_type", f"{_DS}.zero_stage"),
            "grad_accum": (f"{_DS}.gradient_accumulation_steps",),
            "optimizer.clip_norm": (f"{_DS}.gradient_clipping",),
            "precision": ("mixed_precision", "fp16"),
            "emulate_devices": ("num_processes",),
            "offload.optimizer": (_OFFLOAD["offload_optimizer"],),
            "offload.params": (_OFFLOAD["offload_param"],),
        }
        for line in inner.lines:
            group = line.key.removeprefix("zero_optimization.").removesuffix(".device")
            if group in _OFFLOAD and line.verdict != keys_lib.TAKEN:
                draft.say(_OFFLOAD[group], line.verdict, line.text)
        draft.sources |= {place: own.get(place, ()) for place in draft.settings}
        if _named_precision(draft) == "fp8":
            _precision(draft)
    _fp8(draft, content)
    _mesh(draft)
    _unread(draft, content, _FSDP, "Accelerate reads it with distributed_type FSDP alone")
    found = draft.finish(devices)
    return dataclasses.replace(found, lines=found.lines + more)


def _written(draft: Draft) -> dict[str, Any]:
    """Returns the DeepSpeed config that Accelerate writes from its own keys."""
    precision = _named_precision(draft)
    accum = draft.get(f"{_DS}.gradient_accumulation_steps", 1)
    clip = draft.get(f"{_DS}.gradient_clipping", "none")
    found: dict[str, Any] = {
        "zero_optimization": {"stage": draft.get(f"{_DS}.zero_stage", 2)}
        | {group: {"device": draft.get(name, "none")} for group, name in _OFFLOAD.items()},
        "gradient_accumulation_steps": 1 if str(accum).lower() in ("auto", "none") else accum,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto" if str(clip).lower() in ("auto", "none") else clip,
    }
    if precision != "fp32":
        found["fp16" if precision == "fp16" else "bf16"] = {"enabled": True}
    return found


def _named_precision(draft: Draft) -> str:
    """Returns our precision for `mixed_precision`; YAML reads `no` as False."""
    value = draft.get("mixed_precision", "fp16" if draft.flag("fp16") else "no")
    name = "no" if value is False else str(value).lower()
    if name not in PRECISIONS:
        raise UserError(
            f"mixed_precision: must be one of {', '.join(PRECISIONS)}, and is {value!r}; correct it in the file"
        )
    return PRECISIONS[name]


def _precision(draft: Draft) -> None:
    draft.put("precision", _named_precision(draft), "mixed_precision", "fp16")


def _fp8(draft: Draft, content: Mapping[str, Any]) -> None:
    """Puts the recipe that is nearest to that of a backend."""
    if draft.settings.get("precision") != "fp8":
        _unread(draft, content, _FP8, "Accelerate reads it with mixed_precision fp8 alone")
        return
    if not draft.has(_FP8):
        return
    backend = str(draft.get(f"{_FP8}.backend", "TE")).upper()
    if backend not in FP8_RECIPES:
        draft.say(
            f"{_FP8}.backend",
            keys_lib.UNSUPPORTED,
            "optimizer state is not in fp8; config.fp8.recipe chooses the scaling",
        )
        return
    draft.put("fp8.recipe", FP8_RECIPES[backend], f"{_FP8}.backend")
    if FP8_RECIPES[backend] == "delayed":
        draft.put("fp8.history", draft.whole(f"{_FP8}.amax_history_len", 1024), f"{_FP8}.amax_history_len")


def _fsdp(draft: Draft) -> None:
    """Puts the stage of FSDP's strategy, and copies for its hybrid forms."""
    strategy = draft.get(f"{_FSDP}.sharding_strategy")
    again = draft.get(f"{_FSDP}.reshard_after_forward", True)
    named = str(strategy if strategy is not None else again).upper().lstrip("_")
    if named not in STRATEGIES:
        named = "FULL_SHARD" if draft_lib.is_true(again) else "SHARD_GRAD_OP"
    sharded, is_hybrid = STRATEGIES[named]
    key = f"{_FSDP}.{'sharding_strategy' if strategy is not None else 'reshard_after_forward'}"
    draft.put("zero.stage", sharded, key, "distributed_type")
    if is_hybrid:
        draft.put("mesh.replica", max(1, draft.whole("num_machines", 1)), key)
    if draft.flag(f"{_FSDP}.offload_params"):
        for part in ("optimizer", "params"):
            translate.offload(draft, part, "cpu", f"{_FSDP}.offload_params")
    if draft.flag(f"{_FSDP}.activation_checkpointing"):
        draft.put("model.remat", "full", f"{_FSDP}.activation_checkpointing")


def _mesh(draft: Draft) -> None:
    """Puts the copies and shards of `parallelism_config`."""
    copies = draft.whole(f"{_WAYS}.dp_replicate_size", 1)
    if copies > 1:
        draft.put("mesh.replica", copies, f"{_WAYS}.dp_replicate_size")
    shards = draft.whole(f"{_WAYS}.dp_shard_size")
    others = (draft.whole(f"{_WAYS}.{name}_size", 1) for name in ("tp", "cp", "sp"))
    if shards is not None and shards > 1 and not any(size > 1 for size in others):
        draft.put("mesh.data", shards, f"{_WAYS}.dp_shard_size")


def _unread(draft: Draft, content: Mapping[str, Any], group: str, why: str, but: str = "") -> None:
    """Says that the keys of a group have no effect."""
    inner = content.get(group)
    for name, _ in draft_lib.leaves(inner, f"{group}.") if isinstance(inner, Mapping) else ():
        if name != f"{group}.{but}":
            draft.say(accelerate_keys.canonical(name), keys_lib.NO_EFFECT, why)
