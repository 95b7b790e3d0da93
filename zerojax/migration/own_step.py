"""A DeepSpeed config for a step of your own. This module makes the arguments of `make_mesh`, `shard_train_state` and `make_train_step`.

A config of the trainer has fewer optimizers and schedules than optax: here L2 penalties, Nesterov momentum, OneCycle and LRRangeTest are
built too.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import optax

from zerojax import precision
from zerojax.errors import UserError
from zerojax.migration import keys as keys_lib
from zerojax.migration import translate
from zerojax.migration.draft import AUTO, Line, Translation
from zerojax.optim import deepspeed_schedules, registry
from zerojax.zero.host import settings as offload_lib
from zerojax.zero.update import loss_scale as loss_scale_lib

_OPT, _SCHED = "optimizer.params", "scheduler.params"


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What a DeepSpeed config says of a step, as arguments of this library.

    Attributes:
      mesh: arguments of `make_mesh`.
      stage: argument of `shard_train_state`.
      options: its other arguments (`min_size`, `offload`).
      tx: the optax transformation, its schedule included; None if the config leaves the optimizer to the program.
      schedule: (steps taken before) -> learning rate; None without `tx`.
      precision: a row of `precision.PRECISIONS`. With "bf16_sr" weights must be bfloat16, else float32.
      step: arguments of `make_train_step`: clip_norm, grad_accum, compute_dtype, reduce_dtype and loss_scale.
      global_batch_size: examples a step, over all devices and passes; None if the config leaves it to the program.
      lines: the account of every key of the config.
    """

    mesh: dict[str, int]
    stage: int
    options: dict[str, Any]
    tx: optax.GradientTransformation | None
    schedule: Any
    precision: str
    step: dict[str, Any]
    global_batch_size: int | None
    lines: tuple[Line, ...]

    @property
    def loss_scale(self) -> loss_scale_lib.LossScale | None:
        """Returns the loss scale, whose `init()` the state holds under `loss_scale`; None if the loss is not scaled."""
        found: loss_scale_lib.LossScale | None = self.step["loss_scale"]
        return found


def from_deepspeed_config(
    config: Mapping[str, Any],
    *,
    devices: int | None = None,
    auto: Mapping[str, Any] | None = None,
    version: tuple[int, ...] = translate.NEWEST,
    strict: bool = False,
) -> StepSettings:
    """Returns what a DeepSpeed config (a ds_config.json) means for a step of your own.

    Args:
      config: the config, as nested dicts.
      devices: the number of devices of the mesh; None: all of `jax.devices()`.
      auto: values for keys that are "auto", by name: {"optimizer.params.lr": 1e-4}.
      version: of DeepSpeed, whose defaults hold for absent keys: (0, 18).
      strict: whether a key without a counterpart here is an error.

    Raises:
      UserError: a value has a wrong type or is missing, keys contradict each other, or `strict` refuses one.

    >>> found = zerojax.from_deepspeed_config(json.load(open("ds_config.json")))
    >>> state, partition = zerojax.shard_train_state(init, key, mesh=zerojax.make_mesh(**found.mesh), stage=found.stage, **found.options)
    >>> train_step = zerojax.make_train_step(loss_fn, partition, **found.step)
    """
    devices = len(jax.devices()) if devices is None else devices
    found = _of_program(translate.translate(config, version=tuple(version), devices=devices, auto=auto))
    given = _Given(config, auto or {})
    schedule, tx, own = _optimizer(found, given)
    for start, why in _UNREAD.items():
        names = {name for place in found.sources if place.startswith(start) for name in found.sources[place]}
        of_place = [line for line in found.lines if line.key in names]
        own |= {line.key: dataclasses.replace(line, verdict=keys_lib.UNSUPPORTED, text=why) for line in of_place}
    lines = tuple(own.get(line.key, line) for line in found.lines)
    refused = [line for line in lines if line.verdict == keys_lib.UNSUPPORTED]
    if strict and refused:
        raise UserError(f"{refused[0].key}: is not supported ({refused[0].text}); remove it, or omit strict")
    policy = precision.PRECISIONS[found.settings["precision"]]
    total, accum = _batch(found, devices)
    return StepSettings(
        mesh={axis: found.settings[f"mesh.{axis}"] for axis in ("replica", "data") if f"mesh.{axis}" in found.settings},
        stage=found.settings["zero.stage"],
        options=_options(found.settings),
        tx=tx,
        schedule=schedule,
        precision=found.settings["precision"],
        step={
            "clip_norm": found.settings.get("optimizer.clip_norm", 1.0),
            "grad_accum": accum,
            "compute_dtype": None if policy.compute_dtype == policy.weight_dtype else policy.compute_dtype,
            "reduce_dtype": precision.DTYPES[found.settings.get("reduce_dtype", "fp32")],
            "loss_scale": _loss_scale(found.settings) if policy.scales_loss else None,
        },
        global_batch_size=total,
        lines=lines,
    )


# The starts of settings' places that a step of one's own leaves to its program, and why.
_UNREAD: Mapping[str, str] = {
    "metrics.": "a step of your own calls its clients itself",
    "mesh.context": "a model of your own says what it reads of other devices: make_mesh(context=...), batch_specs and zerojax.attention",
    "mesh.model": "a model of your own says what is sharded: make_mesh(model=...), and overrides that name `model`",
}


def _of_program(found: Translation) -> Translation:
    """Returns a translation that leaves to the program what the config leaves to a training script."""
    settings = {**found.decided, "precision": found.settings["precision"]}
    lines = [
        dataclasses.replace(line, text="the program's own") if line.verdict == keys_lib.ASSUMED else line
        for line in found.lines
    ]
    return dataclasses.replace(found, settings=settings, lines=tuple(lines))


class _Given:
    """The values of a config's optimizer and scheduler, with those of "auto" filled in."""

    def __init__(self, config: Mapping[str, Any], auto: Mapping[str, Any]):
        self._config, self._auto = config, auto

    def params(self, group: str) -> dict[str, Any]:
        """Returns the parameters of a group.

        Raises:
          UserError: one is "auto", and its value is not given.
        """
        block = self._config.get(group)
        params = block.get("params") if isinstance(block, Mapping) else None
        found = {}
        for name, value in (params or {}).items():
            key = f"{group}.params.{name}"
            if value == AUTO and key not in self._auto:
                raise UserError(f"{key}: is 'auto', which a training script fills in; pass auto={{{key!r}: ...}}")
            found[name] = self._auto[key] if value == AUTO else value
        return found

    def kind(self, group: str) -> str:
        block = self._config.get(group)
        return str(block.get("type", "")) if isinstance(block, Mapping) else ""


def _optimizer(found: Translation, given: _Given) -> tuple[Any, Any, dict[str, Line]]:
    """Returns the schedule, the transformation, and lines for keys that a config of the trainer has no setting for."""
    settings = found.settings
    if "optimizer.name" not in settings:
        return None, None, {}
    own: dict[str, Line] = {}
    params = given.params("optimizer")
    rate = float(params.get("lr", 1e-3))
    schedule = _schedule(given, rate, own)
    name, decay = (
        settings["optimizer.name"],
        float(params.get("weight_decay", settings.get("optimizer.weight_decay", 0.0))),
    )
    l2 = decay if name in ("adam", "sgd") else 0.0
    if l2:
        own[f"{_OPT}.weight_decay"] = Line(
            f"{_OPT}.weight_decay", decay, keys_lib.TAKEN, "an L2 penalty on the gradient"
        )
    if name == "sgd":
        nesterov = bool(params.get("nesterov", False))
        tx = optax.sgd(schedule, momentum=float(params.get("momentum", 0.0)) or None, nesterov=nesterov)
        if nesterov:
            own[f"{_OPT}.nesterov"] = Line(f"{_OPT}.nesterov", True, keys_lib.TAKEN, "optax.sgd(nesterov=True)")
    else:
        tx = registry.make_optimizer(
            name,
            schedule,
            b1=settings.get("optimizer.b1", 0.9),
            b2=settings.get("optimizer.b2", 0.999),
            eps=settings.get("optimizer.eps", 1e-8),
            weight_decay=0.0 if l2 else decay,
            weight_decay_on="all",
            moments=settings.get("optimizer.moments", "fp32"),
            rounds_weights=settings["precision"] == "bf16_sr",
        )
    return schedule, optax.chain(optax.add_decayed_weights(l2), tx) if l2 else tx, own


def _schedule(given: _Given, rate: float, own: dict[str, Line]) -> optax.Schedule:
    """Returns the schedule of a config, or a constant rate."""
    kind = given.kind("scheduler")
    if not kind:
        return optax.constant_schedule(rate)
    if kind not in deepspeed_schedules.SCHEDULES:
        known = ", ".join(deepspeed_schedules.SCHEDULES)
        raise UserError(
            f"scheduler.type: must be one of {known}, and is {kind!r}; build tx yourself and remove the block"
        )
    make = deepspeed_schedules.SCHEDULES[kind]
    takes = inspect.signature(make).parameters
    params = {name: value for name, value in given.params("scheduler").items() if value is not None}
    if kind in ("OneCycle", "LRRangeTest"):
        own["scheduler.type"] = Line("scheduler.type", kind, keys_lib.TAKEN, "the same rates, step for step")
        for name in takes.keys() & params.keys():
            own[f"{_SCHED}.{name}"] = Line(f"{_SCHED}.{name}", params[name], keys_lib.TAKEN, f"a parameter of {kind}")
    peak = {"WarmupLR": {"warmup_max_lr": rate}, "WarmupCosineLR": {"lr": rate}}.get(kind, {})
    arguments = {**peak, **{name: value for name, value in params.items() if name in takes}}
    for name, parameter in takes.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            raise UserError(f"{_SCHED}.{name}: is missing, and {kind} needs it; add it to the config")
    return make(**arguments)


def _batch(found: Translation, devices: int) -> tuple[int | None, int]:
    """Returns the global batch and the passes a step."""
    settings = found.settings
    total, micro, accum = (settings.get(name, 0) for name in ("global_batch_size", "micro_batch_size", "grad_accum"))
    if not total:
        is_known = "train_micro_batch_size_per_gpu" in found.sources.get("micro_batch_size", ())
        return (micro * accum * devices if is_known else None), max(1, accum)
    if micro and total % (micro * devices):
        raise UserError(
            f"train_batch_size: {total} is not a multiple of train_micro_batch_size_per_gpu {micro} * {devices} devices; "
            f"pass devices=, or set it to {max(1, round(total / (micro * devices))) * micro * devices}"
        )
    return total, accum or total // (micro * devices)


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is exempt from sharding, and what lives outside of device memory."""
    offload = {
        place.removeprefix("offload."): value for place, value in settings.items() if place.startswith("offload.")
    }
    found = {"min_size": settings["zero.min_size"]} if "zero.min_size" in settings else {}
    return {**found, "offload": offload_lib.read(offload)} if offload else found


def _loss_scale(settings: Mapping[str, Any]) -> loss_scale_lib.LossScale:
    """Returns the loss scale of a config in fp16."""
    if settings["loss_scale.static"]:
        return loss_scale_lib.StaticLossScale(settings["loss_scale.static"])
    fields = [field.name for field in dataclasses.fields(loss_scale_lib.DynamicLossScale)]
    return loss_scale_lib.DynamicLossScale(
        **{name: settings[f"loss_scale.{name}"] for name in fields if f"loss_scale.{name}" in settings}
    )
