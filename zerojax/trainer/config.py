"""Turns an ml_collections config into frozen settings. This module checks every setting before anything uses it.

`configs/base.py` holds every field with its default, unit and effect. The dataclasses here declare only the fields and their
types, and the tables hold the allowed values. In a field that can be derived, 0 (or -1) means "derive".

No library reads nested mappings as strictly. ml_collections does not make dataclasses of them. dacite does not name the group of
an unknown key. It accepts True as an int, "x" as a tuple and NaN, and keeps 1 an int where a float is declared.
"""

import dataclasses
import difflib
import math
import os
import re
import typing
from collections.abc import Mapping
from typing import Any

from zerojax import precision
from zerojax.errors import UserError
from zerojax.interop import huggingface
from zerojax.optim import fused, registry, schedules
from zerojax.zero import loss_scale as loss_scale_lib
from zerojax.zero import remat, stages
from zerojax.zero.offload import settings as offload_lib

# place -> the values allowed there, from the table of the module that uses them
CHOICES: dict[str, tuple] = {
    "zero.stage": tuple(stages.STAGES),
    "zero.indivisible": stages.INDIVISIBLE,
    "precision": tuple(precision.PRECISIONS),
    "optimizer.moments": tuple(fused.MOMENTS),
    "optimizer.warmup": schedules.WARMUPS,
    "optimizer.weight_decay_on": tuple(registry.DECAYS),
    "loss_scale.on_minimum": loss_scale_lib.ON_MINIMUM,
    "offload.optimizer": offload_lib.KINDS,
    "offload.params": offload_lib.KINDS,
    "reduce_dtype": tuple(precision.DTYPES),
    "model.remat": tuple(remat.REMAT),
    "model.attention": ("auto", "xla", "cudnn"),
    "export.format": ("none", "huggingface"),
    "export.dtype": ("auto", *huggingface.DTYPES),
}
POSITIVE = (
    "steps",
    "seq_len",
    "log_every",
    "emulate_devices",
    "mesh.replica",
    "mesh.model",
    "optimizer.learning_rate",
    "optimizer.eps",
    "loss_scale.init_scale",
    "loss_scale.window",
    "loss_scale.hysteresis",
    "loss_scale.min_scale",
    "evaluate.batches",
    "checkpoint.keep_last",
    "profile.start",
)
SMALLEST_NORMAL = 1.2e-38
BELOW_ONE = ("optimizer.b1", "optimizer.b2")
NOT_NEGATIVE = tuple(
    "seed global_batch_size micro_batch_size grad_accum zero.min_size model.vocab_size model.num_layers "
    "optimizer.warmup_steps optimizer.initial_fraction optimizer.final_fraction optimizer.weight_decay optimizer.clip_norm "
    "loss_scale.static evaluate.every checkpoint.every checkpoint.keep_best sample.length sample.temperature profile.steps".split()
)


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Sizes of the mesh axes; data = -1 takes all remaining devices."""

    replica: int
    data: int
    model: int


@dataclasses.dataclass(frozen=True)
class ZeroSettings:
    """Which arrays are sharded over the `data` axis, and which leaves are exempt."""

    stage: int
    min_size: int
    indivisible: str
    overrides: tuple


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The model's shape, and the residuals kept for its backward pass."""

    preset: str
    vocab_size: int
    num_layers: int
    remat: str
    recompute: str
    offload: str
    attention: str


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The names and hyperparameters of an optax transformation and a schedule."""

    name: str
    learning_rate: float
    schedule: str
    warmup_steps: int
    warmup: str
    initial_fraction: float
    final_fraction: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    weight_decay_on: str
    clip_norm: float
    moments: str


@dataclasses.dataclass(frozen=True)
class LossScaleSettings:
    """How float16 gradients are kept in range; see `zerojax.zero.loss_scale`."""

    static: float
    init_scale: float
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_scale: float
    on_minimum: str


@dataclasses.dataclass(frozen=True)
class OffloadSettings:
    """Which parts of the state live in host memory; see `zerojax.zero.offload.settings`."""

    optimizer: str
    params: str
    fraction: float
    chunk_bytes: int
    in_flight: int
    nvme_path: str
    nvme_buffers: int


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """A tensorflow-datasets name, its splits and its tokenizer."""

    name: str
    train_split: str
    eval_split: str
    text_key: str
    tokenizer: str
    dir: str


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
    """How often the held-out loss is measured, and over how many batches."""

    every: int
    batches: int


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """How often to save, and which checkpoints to keep."""

    every: int
    at_end: bool
    keep_last: int
    keep_best: int


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """The text generated at the end of a run."""

    prompt: str
    length: int
    temperature: float


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """The format and the dtype in which the final weights are exported."""

    format: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
    """Which steps are traced."""

    start: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run; see configs/base.py for units and effects."""

    seed: int
    init_from: str
    steps: int
    global_batch_size: int
    micro_batch_size: int
    grad_accum: int
    seq_len: int
    precision: str
    reduce_dtype: str
    log_every: int
    emulate_devices: int
    mesh: MeshSettings
    zero: ZeroSettings
    model: ModelSettings
    optimizer: OptimizerSettings
    loss_scale: LossScaleSettings
    offload: OffloadSettings
    data: DataSettings
    evaluate: EvaluateSettings
    checkpoint: CheckpointSettings
    sample: SampleSettings
    export: ExportSettings
    profile: ProfileSettings


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The three batch sizes, which satisfy global = micro * accum * ways."""

    global_batch_size: int
    micro_batch_size: int
    grad_accum: int


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Reads a nested mapping, such as a ConfigDict, into a checked `Config`.

    Raises:
      UserError: a key is unknown or missing, or a value has a wrong type or is not allowed. The line names it.
    """
    config = read(Config, raw, "config")
    for override in config.zero.overrides:
        _check_override(override)
    for place, choices in CHOICES.items():
        value = _lookup(config, place)
        if value not in choices:
            listed = ", ".join(map(str, choices))
            raise UserError(f"config.{place}: must be one of {listed}, and is {value!r}; set --config.{place}=...")
    for place in (*POSITIVE, *NOT_NEGATIVE):
        if _lookup(config, place) >= 2**31 and isinstance(_lookup(config, place), int):
            raise UserError(f"config.{place}: must be below 2**31, and is {_lookup(config, place)}")
    for place in POSITIVE:
        if _lookup(config, place) <= 0:
            raise UserError(f"config.{place}: must be above 0, and is {_lookup(config, place)}")
        if _lookup(config, place) < SMALLEST_NORMAL:
            raise UserError(
                f"config.{place}: must be above {SMALLEST_NORMAL}, below which float32 has only 0, and is {_lookup(config, place)}"
            )
    for place in NOT_NEGATIVE:
        if _lookup(config, place) < 0:
            raise UserError(f"config.{place}: must not be negative, and is {_lookup(config, place)}")
    for place in BELOW_ONE:
        if not 0 <= _lookup(config, place) < 1:
            raise UserError(f"config.{place}: must be at least 0 and below 1, and is {_lookup(config, place)}")
    if config.mesh.data != -1 and config.mesh.data <= 0:
        raise UserError(f"config.mesh.data: must be above 0, or -1 for all devices left, and is {config.mesh.data}")
    make_offload(config.offload, config.zero.stage)
    return config


def with_scratch(config: Config, folder: str | os.PathLike) -> Config:
    """Returns the config with `folder` for offload to a disk, where the config offloads to one and names no folder."""
    group = config.offload
    if offload_lib.NVME not in (group.optimizer, group.params) or group.nvme_path:
        return config
    return dataclasses.replace(config, offload=dataclasses.replace(group, nvme_path=os.fspath(folder)))


def make_offload(group: OffloadSettings, stage: int) -> offload_lib.Offload:
    """Returns what the group `offload` describes.

    Raises:
      UserError: the stage does not allow it, or a setting is out of range or cannot take effect.
    """
    try:
        chosen = offload_lib.read(vars(group))
        offload_lib.check(chosen, stages.STAGES, stage)
    except UserError as error:
        raise UserError(f"config.{error}") from error
    return chosen


def read(cls: type, raw: Mapping[str, Any], place: str) -> Any:
    """Builds dataclass `cls`, whose fields may be dataclasses, from nested mappings.

    Args:
      cls: the dataclass.
      raw: a value for every field. Ints are accepted as floats, and lists as tuples.
      place: the name of the mapping in errors.

    Raises:
      UserError: a key is unknown or missing, or a value has a wrong type. The line names it.
    """
    hints = typing.get_type_hints(cls)
    if not isinstance(raw, Mapping) and not hasattr(raw, "items"):
        raise UserError(f"{place}: must be a group of settings ({', '.join(hints)}), and is {raw!r}")
    given = dict(raw.items())
    for key in given:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(hints)}"
            raise UserError(f"{place}.{key}: unknown config key; {hint}")
    missing = [key for key in hints if key not in given]
    if missing:
        raise UserError(f"{place}.{missing[0]}: missing; start from configs/base.py, which holds every key")
    return cls(**{key: _value(hint, given[key], f"{place}.{key}") for key, hint in hints.items()})


def to_dict(config: Config) -> dict:
    """Returns the settings as nested plain dicts, ready for JSON."""
    return dataclasses.asdict(config)


def batch_sizes(config: Config, ways: int) -> BatchSizes:
    """Derives the batch size that is 0 from the other two and `ways` = data * replica.

    Raises:
      UserError: fewer than two sizes are set, or they contradict each other.
    """
    total, micro, accum = config.global_batch_size, config.micro_batch_size, config.grad_accum
    rule = "global_batch_size = micro_batch_size * grad_accum * data * replica"
    if [total, micro, accum].count(0) > 1:
        raise UserError(f"config: {rule}; give at least two of the first three (now {total}, {micro}, {accum})")
    if total == 0:
        total = micro * accum * ways
    known = (micro or 1) * (accum or 1) * ways
    if total % known or (micro and accum and total != known):
        near = known if micro and accum else max(1, round(total / known)) * known
        raise UserError(
            f"config.global_batch_size: {total} does not fit {rule} with micro_batch_size={micro or 'derived'}, "
            f"grad_accum={accum or 'derived'}, data * replica={ways}; set --config.global_batch_size={near}"
        )
    return BatchSizes(total, micro or total // known, accum or total // known)


def _value(hint: type, value: Any, place: str) -> Any:
    """Checks one value against its declared type."""
    if dataclasses.is_dataclass(hint):
        return read(hint, value, place)
    if hint is tuple and isinstance(value, (list, tuple)):
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_number = isinstance(value, float) and math.isfinite(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)) or (hint is float and not is_number):
        raise UserError(f"{place}: must be {hint.__name__}, and is {value!r}")
    return value


def make_loss_scale(group: LossScaleSettings, *, is_scaled: bool) -> loss_scale_lib.LossScale | None:
    """Returns the loss scale that the group `loss_scale` describes, or None where the precision needs none.

    Raises:
      UserError: a setting cannot take effect or is out of range.
    """
    static, dynamic = group.static, {name: value for name, value in vars(group).items() if name != "static"}
    defaults = {"static": 0.0, **dataclasses.asdict(loss_scale_lib.DynamicLossScale())}
    unread = dynamic if static else {}
    for name, value in (unread if is_scaled else {"static": static, **dynamic}).items():
        if value != defaults[name]:
            why = "config.loss_scale.static is set" if is_scaled else "config.precision is not fp16"
            raise UserError(
                f"config.loss_scale.{name}: is {value!r} and cannot take effect, since {why}; leave it at {defaults[name]!r}"
            )
    if not is_scaled:
        return None
    try:
        return loss_scale_lib.StaticLossScale(static) if static else loss_scale_lib.DynamicLossScale(**dynamic)
    except UserError as error:  # a static scale's field has the name `static` in a config
        raise UserError(f"config.{error}".replace("loss_scale.scale", "loss_scale.static")) from error


def _check_override(override: Any) -> None:
    """Checks the form of one (path regex, axes). The partition checks it against the leaves."""
    form = "config.zero.overrides: must be ((path regex, (mesh axis or None for each dim)), ...)"
    if not isinstance(override, list | tuple) or len(override) != 2:
        raise UserError(f"{form}, and one of them is {override!r}")
    pattern, axes = override
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UserError(f"{form}, and {pattern!r} is not a regex ({error})") from error
    if not isinstance(axes, list | tuple) or not all(_is_axis(axis) for axis in axes):
        raise UserError(f"{form}, and that of {pattern!r} names {axes!r}")


def _is_axis(axis: Any) -> bool:
    """Returns whether an entry is valid for one dim: an axis, several axes, or None."""
    if isinstance(axis, list | tuple):
        return all(isinstance(name, str) for name in axis)
    return axis is None or isinstance(axis, str)


def _lookup(config: Config, place: str) -> Any:
    """Returns the setting at a dotted place."""
    value: Any = config
    for name in place.split("."):
        value = getattr(value, name)
    return value
