"""Translates an Accelerate config and a hostfile. This module turns their values into settings of ours."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from zerojax import errors, tree
from zerojax.errors import UserError
from zerojax.migration import accelerate_keys, translate
from zerojax.migration import draft as draft_lib
from zerojax.migration import keys as keys_lib
from zerojax.migration.draft import Draft, Line, Translation

_DS, _FSDP, _WAYS, _FP8 = "deepspeed_config", "fsdp_config", "parallelism_config", "fp8_config"
# key of Accelerate -> the DeepSpeed key that it becomes
_OWN: Mapping[str, str] = {
    f"{_DS}.zero_stage": "zero_optimization.stage",
    f"{_DS}.gradient_accumulation_steps": "gradient_accumulation_steps",
    f"{_DS}.gradient_clipping": "gradient_clipping",
    **{
        f"{_DS}.{group}_{key}": f"zero_optimization.{group}.{key}"
        for group in ("offload_optimizer", "offload_param")
        for key in ("device", "nvme_path")
    },
}
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
MEGATRON = "MEGATRON_LM"
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
      UserError: a value has a wrong type or is not known, or the `deepspeed_config_file` is not there.
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
    elif kind in (*REPLICATED, MEGATRON):
        draft.put("zero.stage", 0, "distributed_type")
    else:
        draft.put("zero.stage", 0)
        draft.say(
            "distributed_type",
            keys_lib.UNSUPPORTED,
            "there is no such parallelism; config.zero.stage = 0 is taken instead",
        )
    translate.assume_script(draft)
    draft.assume("gradient_clipping", {"optimizer.clip_norm": translate.ASSUMED["gradient_clipping"]})
    if kind == MEGATRON:
        _megatron(draft)
    _mesh(draft)
    _fp8(draft, content)
    for group, wanted in ((_DS, "DEEPSPEED"), (_FSDP, "FSDP"), ("megatron_lm_config", MEGATRON)):
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
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*([0-9]{1,5})", words)
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


def translate_parts(fsdp: Mapping[str, Any] | None, ways: Mapping[str, Any]) -> Translation:
    """Returns what the `fsdp_config` of a Trainer's arguments becomes, if FSDP is on, and the sizes of its `parallelism_config`.

    Raises:
      UserError: a value has a wrong type.
    """
    draft = Draft({_FSDP: fsdp or {}, _WAYS: ways}, accelerate_keys.KEYS, canonical=accelerate_keys.canonical)
    if fsdp is not None:
        _fsdp(draft)
    _mesh(draft)
    return draft.finish()


def _with_deepspeed(
    draft: Draft,
    content: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None,
    devices: int | None,
    version: tuple[int, ...],
) -> Translation:
    """Returns the translation of the DeepSpeed config that an Accelerate config holds, or of the file that it names."""
    named = draft.get(f"{_DS}.deepspeed_config_file")
    more: tuple[Line, ...] = ()
    if named is None:
        _of_keys(draft, devices, version)
    elif deepspeed is None:
        raise UserError(
            f"{_DS}.deepspeed_config_file: is {errors.shown(named)}, which decides the stage, the precision and the batch, and no "
            "such file can be read here; put it beside this file, or correct its path"
        )
    else:
        more = _of_file(draft, content, deepspeed, str(named), devices, version)
    _fp8(draft, content)
    _mesh(draft)
    _unread(draft, content, _FSDP, "Accelerate reads it with distributed_type FSDP alone")
    found = draft.finish(devices)
    return dataclasses.replace(found, lines=found.lines + more)


def _of_keys(draft: Draft, devices: int | None, version: tuple[int, ...]) -> None:
    """Puts what the DeepSpeed config decides that Accelerate makes of its own keys."""
    precision = _named_precision(draft)
    written = {inner: draft.get(name) for name, inner in _OWN.items() if draft.get(name) is not None}
    # Accelerate's forms of "not given"; its gradient_clipping is then that of `prepare`, 1.0
    written = {name: value for name, value in written.items() if str(value).lower() not in ("auto", "none")}
    absent = {"zero_optimization.stage": 2, "gradient_clipping": draft_lib.AUTO}
    absent |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), draft_lib.AUTO)
    if precision != "fp32":
        absent |= {f"{'fp16' if precision == 'fp16' else 'bf16'}.enabled": True}
    nested = tree.nested({**absent, **written}, ".")
    inner = translate.translate(nested, version=version, devices=devices)
    sources = {inner: name for name, inner in _OWN.items()} | {
        "fp16.enabled": "fp16",
        "bf16.enabled": "mixed_precision",
    }
    more = {
        "zero.stage": ("distributed_type",),
        "precision": ("mixed_precision",),
        "emulate_devices": ("num_processes",),
    }
    for place, value in inner.settings.items():
        keys = [sources[key] for key in inner.sources[place] if key in sources]
        draft.put(place, value, *keys, *more.get(place, ()))
    draft.assumed |= inner.assumed
    draft.sources |= {place: inner.sources[place] for place in inner.assumed}
    for line in inner.lines:
        name = sources.get(line.key, line.key)
        if line.verdict == keys_lib.ASSUMED and not draft.has(name):
            draft.absent(line.key, line.verdict, line.text)
        elif line.verdict == keys_lib.ASSUMED or (
            line.verdict != keys_lib.TAKEN and name in _OWN and draft.get(name) is not None
        ):
            draft.say(name, line.verdict, line.text)
    if not draft.has(f"{_DS}.zero_stage"):
        draft.absent(f"{_DS}.zero_stage", keys_lib.TAKEN, "absent: config.zero.stage = 2, Accelerate's default")
    if precision == "fp8":
        _precision(draft)


def _of_file(
    draft: Draft,
    content: Mapping[str, Any],
    deepspeed: Mapping[str, Any],
    named: str,
    devices: int | None,
    version: tuple[int, ...],
) -> tuple[Line, ...]:
    """Puts what a DeepSpeed config file decides, and returns the lines of its keys. Its "auto" takes Accelerate's keys."""
    precision = _named_precision(draft)
    own = {name: inner for name, inner in _OWN.items() if draft.get(name) is not None}
    auto = {inner: draft.get(name) for name, inner in own.items()}
    halves = {"bf16": precision in ("bf16", "fp8"), "fp16": precision == "fp16"}
    auto |= {f"{kind}.enabled": is_on for kind, is_on in halves.items()}
    given = dict(draft_lib.leaves(deepspeed))
    is_chosen = any(draft_lib.is_true(given.get(f"{kind}.enabled")) for kind in halves)
    added = {
        kind: {"enabled": True} for kind, is_on in halves.items() if is_on and kind not in deepspeed and not is_chosen
    }
    inner = translate.translate({**deepspeed, **added}, version=version, devices=devices, auto=auto)
    draft.settings |= inner.settings
    draft.sources = {**inner.sources, **draft.sources}
    draft.assumed |= inner.assumed
    _unread(
        draft, content, _DS, f"{named} decides it; Accelerate refuses it beside that file", but="deepspeed_config_file"
    )
    for name, key in own.items():
        if given.get(key) == draft_lib.AUTO:
            draft.say(name, keys_lib.TAKEN, f'fills in the "auto" of {key}')
    fills = added or any(given.get(f"{kind}.enabled") == draft_lib.AUTO for kind in halves)
    told = f"config.precision = {inner.settings['precision']!r}" if fills else f"{named} decides it"
    draft.say("mixed_precision", keys_lib.TAKEN if fills else keys_lib.NO_EFFECT, told)
    draft.say("distributed_type", keys_lib.IMPLIED, "the stage is the DeepSpeed config file's")
    lines = [line for line in inner.lines if line.key.partition(".")[0] not in added]
    return tuple(dataclasses.replace(line, key=f"{named}: {line.key}") for line in lines)


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
    for key in (f"{_FSDP}.offload_params", f"{_FSDP}.cpu_offload"):  # Accelerate's name, and transformers'
        if draft.flag(key):
            offloaded = [part for part in ("optimizer", "params") if translate.is_sharded(draft, part)]
            for part in offloaded or ["params"]:
                translate.offload(draft, part, "cpu", key)
    if draft.flag(f"{_FSDP}.activation_checkpointing"):
        draft.put("model.remat", "full", f"{_FSDP}.activation_checkpointing")


def _megatron(draft: Draft) -> None:
    """Puts the axes, the passes, the clipping and the stage of Megatron's plugin."""
    group = "megatron_lm_config.megatron_lm"
    if draft.flag(f"{group}_use_distributed_optimizer"):
        draft.put("zero.stage", 1, f"{group}_use_distributed_optimizer", "distributed_type")
    for place, name in (("mesh.model", "tp_degree"), ("mesh.pipe", "pp_degree"), ("grad_accum", "num_micro_batches")):
        if (size := draft.whole(f"{group}_{name}", 1)) > 1:
            draft.put(place, size, f"{group}_{name}")
    if (most := draft.number(f"{group}_gradient_clipping")) is not None:
        draft.put("optimizer.clip_norm", most, f"{group}_gradient_clipping")
    if draft.flag(f"{group}_recompute_activations"):
        draft.put("model.remat", "full", f"{group}_recompute_activations")


def _mesh(draft: Draft) -> None:
    """Puts the sizes of `parallelism_config`."""
    copies = draft.whole(f"{_WAYS}.dp_replicate_size", 1)
    if copies > 1:
        draft.put("mesh.replica", copies, f"{_WAYS}.dp_replicate_size")
    shards = draft.whole(f"{_WAYS}.dp_shard_size")
    if (model := draft.whole(f"{_WAYS}.tp_size", 1)) > 1:
        draft.put("mesh.model", model, f"{_WAYS}.tp_size")
    parts = {key: size for key in (f"{_WAYS}.cp_size", f"{_WAYS}.sp_size") if (size := draft.whole(key, 1)) > 1}
    if parts:
        draft.put("mesh.context", math.prod(parts.values()), *parts)
    if shards is not None and shards > 1:
        draft.put("mesh.data", shards, f"{_WAYS}.dp_shard_size")


def _unread(draft: Draft, content: Mapping[str, Any], group: str, why: str, but: str = "") -> None:
    """Says that the keys of a group have no effect."""
    inner = content.get(group)
    for name, _ in draft_lib.leaves(inner, f"{group}.") if isinstance(inner, Mapping) else ():
        if name != f"{group}.{but}":
            draft.say(accelerate_keys.canonical(name), keys_lib.NO_EFFECT, why)
