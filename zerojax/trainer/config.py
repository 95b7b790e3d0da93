"""Turns an ml_collections config into frozen settings. This module checks every setting before anything uses it.

`settings` declares every field. No library reads nested mappings as strictly (docs/design.md names those that were tried).
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax import errors
from zerojax import mesh as mesh_lib
from zerojax.data import batches, mixture
from zerojax.data.pairs import tasks
from zerojax.errors import UserError
from zerojax.interop import hub, huggingface, vllm_server
from zerojax.lora import settings as lora_lib
from zerojax.ops import tiles
from zerojax.trainer import ranges, settings, trackers
from zerojax.zero import stages
from zerojax.zero.fp8 import modules as fp8_lib
from zerojax.zero.host import settings as offload_lib
from zerojax.zero.update import loss_scale as loss_scale_lib
from zerojax.zero.wires import packed

AUTO, BYTES = "auto", "bytes"  # of config.data.tokenizer
# What one of config.data.sources may set of config.data, and the rest that it may set.
OF_SOURCE = (
    *("name", "train_split", "eval_split", "train_file", "eval_file", "text_key"),
    *("task", "prompt", "answer", "labels", "messages", "chat_template", "learn"),
)
TITLE, WEIGHT = "title", "weight"
_HELD_OUT = {"eval_split": "eval_file", "eval_file": "eval_split"}
TOKENIZER = "tokenizer.json"
LONG_TEXTS: Mapping[str, Any] = {"tile_tokens": tiles.USUAL, "remat": "attention", "offload": r"layer_\d+"}


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The three batch sizes, which satisfy global = micro * accum * ways."""

    global_batch_size: int
    micro_batch_size: int
    grad_accum: int

    @property
    def rows(self) -> int:
        """Returns the sequences of a pass, over all devices."""
        return self.global_batch_size // self.grad_accum


def from_dict(raw: Mapping[str, Any]) -> settings.Config:
    """Reads a nested mapping, such as a ConfigDict, into a checked `Config`.

    Raises:
      UserError: a key is unknown or missing, or a value has a wrong type or is not allowed. The line names it.
    """
    config = read(settings.Config, raw, "config")
    mixed = sources(config.data)
    if mixed:
        named = [{**dict(raw), "task": source.data.task} for raw, source in zip(config.data.sources, mixed)]
        config = settings.changed(config, {"data.sources": tuple(named), "data.task": _task(mixed)})
    for override in config.zero.overrides:
        _check_override(override)
    ranges.check(config)
    trackers.check(config.metrics)
    _check_export(config)
    make_offload(config.offload, config.zero.stage)
    make_fp8(config)
    make_wires(config)
    _check_lora(config)
    own = settings.own_values(config).items()
    found = {
        **{place: number for place, number in own if settings.lookup(config, place) == settings.OWN},
        "data.tokenizer": _tokenizer(config),
        "model": _for_long_texts(config.model),
    }
    return settings.changed(config, found)


def _for_long_texts(model: settings.ModelSettings) -> settings.ModelSettings:
    """Returns the settings of a model with those that `long_texts` stands for, where they have their defaults."""
    if not model.long_texts:
        return model
    default = settings.ModelSettings()
    return dataclasses.replace(
        model, **{name: value for name, value in LONG_TEXTS.items() if getattr(model, name) == getattr(default, name)}
    )


@contextlib.contextmanager
def telling_of_long_texts(model: settings.ModelSettings) -> Iterator[None]:
    """Adds to a UserError that refuses the `offload` of `long_texts` where it comes from: "" would ask for it again."""
    try:
        yield
    except UserError as error:
        if not model.long_texts or repr(LONG_TEXTS["offload"]) not in str(error):
            raise
        instead = f"omit that, and set --config.model.tile_tokens={tiles.USUAL}"
        raise UserError(f"{error}. config.model.long_texts=True sets this offload; {instead}") from error


def with_scratch(config: settings.Config, folder: str | os.PathLike[str]) -> settings.Config:
    """Returns the config with `folder` for offload to a disk, where the config offloads to one and names no folder."""
    group = config.offload
    if offload_lib.NVME not in (group.optimizer, group.params) or group.nvme_path:
        return config
    return settings.changed(config, {"offload.nvme_path": os.fspath(folder)})


def _tokenizer(config: settings.Config) -> str:
    """Returns `config.data.tokenizer`, with the one that "auto" stands for: that of the folder `init_from`, or "bytes".

    Raises:
      UserError: the folder's tokenizer cannot be read, or is not chosen: ids of another would mean other words.
    """
    chosen, folder = config.data.tokenizer, pathlib.Path(hub.folder(config.init_from))
    own = folder / TOKENIZER
    if not config.init_from or not os.path.isdir(folder) or chosen not in (AUTO, BYTES):
        return BYTES if chosen == AUTO else chosen
    if own.is_file():
        if chosen == BYTES:
            raise UserError(
                f'config.data.tokenizer: is "bytes", and the model of config.init_from has a tokenizer of its own; omit it, or set {own}'
            )
        return str(own)
    if others := [name for name in huggingface.OTHER_TOKENIZERS if (folder / name).is_file()]:
        raise UserError(
            f"config.data.tokenizer: {folder} has {others[0]} and no {TOKENIZER}; write one with transformers "
            f"(AutoTokenizer.from_pretrained(folder).save_pretrained(folder)), or set config.data.tokenizer"
        )
    if chosen == AUTO and not config.data.places().is_random:
        raise UserError(
            f'config.data.tokenizer: {folder} has no {TOKENIZER}; add the model\'s own, or set it to "bytes" if the model reads bytes'
        )
    return BYTES


@dataclasses.dataclass(frozen=True)
class SourceSettings:
    """One of `config.data.sources`: its title, its weight at some steps, and the group `data` as it is for this source."""

    title: str
    weight: mixture.Weight
    data: settings.DataSettings
    where: str


def sources(group: settings.DataSettings) -> tuple[SourceSettings, ...]:
    """Returns the sources that the group `data` names; () if it names none.

    Raises:
      UserError: a key is unknown, a value has a wrong type or is not allowed, or it names training examples beside them.
    """
    if not group.sources:
        return ()
    default = settings.DataSettings()
    for name in ("name", "train_file", "eval_file"):
        if getattr(group, name) != getattr(default, name):
            raise UserError(
                f"config.data.{name}: is {getattr(group, name)!r}, and config.data.sources name what is read; make it one of them, or "
                "omit it"
            )
    found = [_source(group, raw, f"config.data.sources[{number}]") for number, raw in enumerate(group.sources)]
    titles = [source.title for source in found]
    if twice := next((source for source in found if titles.count(source.title) > 1), None):
        raise UserError(f"{twice.where}.title: {twice.title!r} names another source too; give each a title of its own")
    for step in sorted({step for source in found for step, _ in source.weight}):
        if not any(mixture.MixedSource("", group.places(), source.weight).weight_at(step) for source in found):
            raise UserError(f"config.data.sources: no weight is above 0 at step {step}; give a source one")
    return tuple(found)


def _source(group: settings.DataSettings, raw: Any, where: str) -> SourceSettings:
    if not isinstance(raw, Mapping):
        raise UserError(
            f'{where}: must be a table such as {{"train_file": "web.jsonl", "weight": 2.0}}, and is {errors.shown(raw)}'
        )
    hints, given = typing.get_type_hints(settings.DataSettings), dict[str, Any]()
    for key, value in raw.items():
        if key not in (*OF_SOURCE, TITLE, WEIGHT):
            raise UserError(
                f"{where}.{key}: unknown key of a source; {errors.choose(key, (*OF_SOURCE, TITLE, WEIGHT))}"
            )
        if key in OF_SOURCE:
            given[key] = _value(hints[key], value, f"{where}.{key}")
            if choices := settings.table()[f"data.{key}"].choices:
                errors.one_of(f"{where}.{key}", given[key], choices)
    if bool(given.get("name")) == bool(given.get("train_file")):
        raise UserError(f'{where}: must name what is read, by "train_file" or by "name", and not by both')
    other = "eval_split" if given.get("train_file") else "eval_file"
    if given.get(other):
        raise UserError(
            f'{where}.{other}: held-out examples of a dataset are a split, and of files a file; set "{_HELD_OUT[other]}"'
        )
    if given.get("name") == batches.RANDOM:
        raise UserError(f'{where}.name: "random" is no text that could be mixed; name a dataset or a file')
    data = dataclasses.replace(group, **{"eval_split": "", "train_file": "", "sources": (), **given})
    if data.task in tasks.ANSWERS:
        raise UserError(
            f"{where}.task: {data.task!r} compares answers, and sources learn texts or answers; choose another"
        )
    stem = re.sub(r"\W+", "_", pathlib.PurePosixPath(data.train_file or data.name).stem).strip("_")
    title = _value(str, raw.get(TITLE, stem or "source"), f"{where}.{TITLE}")
    if not re.fullmatch(r"[\w.-]+", title):
        raise UserError(f"{where}.{TITLE}: {title!r} names metrics; use letters, digits, _, - and .")
    return SourceSettings(title, _weight(raw.get(WEIGHT, 1.0), f"{where}.{WEIGHT}"), data, where)


def _weight(value: Any, where: str) -> mixture.Weight:
    """Returns a source's weight at some steps."""
    form = "must be a number, or ((step, weight), ...) with rising steps"
    if not isinstance(value, list | tuple):
        value = ((0, value),)
    found: list[tuple[int, float]] = []
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"{where}: {form}, and has {errors.shown(pair)}")
        step, weight = (_value(hint, part, where) for hint, part in zip((int, float), pair))
        if not 0 <= step < 2**31 or not 0 <= weight <= 1e9 or (found and step <= found[-1][0]):
            raise UserError(f"{where}: {form}, weights from 0 to 1e9, and has {errors.shown(pair)}")
        found.append((step, weight))
    if not found:
        raise UserError(f"{where}: {form}, and is empty")
    return tuple(found)


def _task(mixed: tuple[SourceSettings, ...]) -> str:
    """Returns the task whose rows hold those of all sources."""
    return next((source.data.task for source in mixed if source.data.task != tasks.TEXT), tasks.TEXT)


def reads_text(group: settings.DataSettings) -> bool:
    """Returns whether windows of documents are learned, and not random tokens."""
    groups = [source.data for source in sources(group)] or [group]
    return any(own.task == tasks.TEXT and not own.places().is_random for own in groups)


def make_offload(group: settings.OffloadSettings, stage: int) -> offload_lib.Offload:
    """Returns what the group `offload` describes.

    Raises:
      UserError: the stage does not allow it, or a setting is out of range or cannot take effect.
    """
    with errors.below("config."):
        chosen = offload_lib.read(vars(group))
        offload_lib.check(chosen, stages.STAGES, stage)
    return chosen


def make_fp8(config: settings.Config) -> fp8_lib.Fp8 | None:
    """Returns which matmuls run in fp8, or None if the precision has none.

    Raises:
      UserError: a setting is out of range.
    """
    if not config.policy.has_fp8:
        return None
    with errors.below("config."):
        return fp8_lib.Fp8(**vars(config.fp8))


def make_wires(config: settings.Config) -> packed.PackedWires:
    """Returns how weights and gradients travel.

    Raises:
      UserError: a setting is out of range.
    """
    with errors.below("config."):
        return packed.PackedWires(**vars(config.wire))


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
    try:
        given = dict(raw.items())
    except Exception as error:  # no group, or a ConfigDict with a required placeholder
        raise UserError(f"{place}: must be {settings.kind(cls)}, and is {errors.shown(raw)}") from error
    for key in given:
        if key not in hints:
            raise UserError(f"{place}.{key}: unknown config key; {errors.choose(key, hints)}")
    missing = [key for key in hints if key not in given]
    if missing:
        raise UserError(f"{place}.{missing[0]}: missing; start from zerojax.configs.base, which holds every key")
    return cls(**{key: _value(hint, given[key], f"{place}.{key}") for key, hint in hints.items()})


def to_dict(config: settings.Config) -> dict:
    """Returns the settings as nested plain dicts, ready for JSON."""
    return dataclasses.asdict(config)


def make_mesh(config: settings.Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of the devices that train: all, or all but those of `rollout_mesh`.

    Args:
      config: checked settings.
      devices: those of the run; None: all there are.

    Raises:
      UserError: the sizes of the mesh are not those of the devices.
    """
    count = config.rollout_devices
    if not count:
        return mesh_lib.make_mesh(**vars(config.mesh), devices=devices)
    found = list(jax.devices() if devices is None else devices)
    place = f"config.grpo.rollout_devices: is {count}, and"
    if count >= len(found):
        raise UserError(
            f"{place} of {len(found)} device{'s' * (len(found) > 1)} none is left to train; lower it, or take more "
            "(CPUs: config.emulate_devices)"
        )
    try:
        return mesh_lib.make_mesh(**vars(config.mesh), devices=found[:-count])
    except UserError as error:
        raise UserError(f"{place} {len(found) - count} of {len(found)} devices are left to train: {error}") from error


def rollout_mesh(config: settings.Config, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Returns the mesh of the devices that draw answers while others train, which `make_mesh` leaves out; None if all train.

    Raises:
      UserError: `mesh.model`, over which they shard weights as the others do, does not divide them, or there are several processes.
    """
    count, model = config.rollout_devices, config.mesh.model
    if not count:
        return None
    place = f"config.grpo.rollout_devices: is {count}, and"
    if jax.process_count() > 1:
        raise UserError(f"{place} the weights that are sent to them are those of one process; set it to 0")
    if count % model:
        near = count + -count % model
        raise UserError(f"{place} config.mesh.model={model} devices share a copy of the weights; set it to {near}")
    found = list(jax.devices() if devices is None else devices)
    return mesh_lib.make_mesh(model=model, devices=found[-count:])


def batch_sizes(config: settings.Config, ways: int) -> BatchSizes:
    """Derives the batch size that is 0 from the other two and `ways` = data * replica.

    Raises:
      UserError: fewer than two sizes are set, they contradict each other, the batch is too large, or groups of answers do not divide it.
    """
    total, micro, accum = config.global_batch_size, config.micro_batch_size, config.grad_accum
    rule = "global_batch_size = micro_batch_size * grad_accum * data * replica"
    if [total, micro, accum].count(0) > 1:
        raise UserError(
            f"config: {rule}; give at least two of the first three (now config.global_batch_size={total}, "
            f"config.micro_batch_size={micro}, config.grad_accum={accum})"
        )
    if total == 0:
        total = micro * accum * ways
    known = (micro or 1) * (accum or 1) * ways
    if total % known or (micro and accum and total != known):
        unit = math.lcm(known, config.group)
        near = known if micro and accum else max(1, round(total / unit)) * unit
        keeps = _keeping(total, micro, accum, ways)
        raise UserError(
            f"config.global_batch_size: {total} does not fit {rule} with micro_batch_size={micro or 'derived'}, "
            f"grad_accum={accum or 'derived'}, data * replica={ways} (config.mesh); set {keeps}--config.global_batch_size={near}"
        )
    most = min(settings.MOST_ROWS, ranges.MOST_TOKENS // config.seq_len)
    if total > most:
        raise UserError(
            f"config.global_batch_size: {total} sequences of config.seq_len={config.seq_len} tokens are more than a batch may have, "
            f"{most:.0f}; lower config.global_batch_size, or config.micro_batch_size and config.grad_accum where it is derived"
        )
    if total % (group := config.group):
        raise UserError(
            f"config.grpo.group: {group} answers a prompt do not divide the {total} answers of config.global_batch_size; set "
            f"--config.global_batch_size={total + -total % math.lcm(group, known)}"
        )
    return BatchSizes(total, micro or total // known, accum or total // known)


def _keeping(total: int, micro: int, accum: int, ways: int) -> str:
    """Returns the settings that keep the global batch and take no more sequences at once, as text; "" if there are none."""
    rows, left = divmod(total, ways)
    if left or not micro:
        return ""
    most = max(n for n in range(1, min(micro, rows) + 1) if rows % n == 0)
    passes = rows // most
    given = [f"--config.micro_batch_size={most}"] if most != micro else []
    given += [f"--config.grad_accum={passes}"] if accum not in (0, passes) else []
    return f"{' '.join(given)}, which keeps the batch, or "


def per_example(mesh: settings.MeshSettings) -> int:
    """Returns the number of devices that share examples: along axes over which these do not differ, and in other groups of a pipeline."""
    same = [axis.name for axis in mesh_lib.AXES if not axis.examples and not axis.part_of]
    return mesh.pipe * math.prod(getattr(mesh, name) for name in same)


def refit(config: settings.Config, devices: int, full_devices: int) -> settings.Config:
    """Returns the config for `devices` of the `full_devices` for which it was written: a restart may lack hosts.

    The global batch stays, and the sequences per device and pass do not grow: there are more passes. The mesh keeps `context` and `model`,
    `pipe` if it fits what is left, or else the most groups that do, and `data` as long as it divides what is left; `replica` shrinks.

    Raises:
      UserError: the global batch or the mesh cannot be kept.
    """
    if devices == full_devices:
        return config
    old = config.mesh
    one = per_example(old)
    data = full_devices // (old.replica * one) if old.data == -1 else old.data
    sizes = batch_sizes(config, data * old.replica)
    for pipe in range(old.pipe, 0, -1):
        ways, left = divmod(devices, pipe * one // old.pipe)
        rows, more = divmod(sizes.global_batch_size, max(1, ways))
        whole = pipe if config.pipeline.chunks > 1 else 1  # interleaved stages take their micro-batches in rounds
        micro = [n for n in range(1, min(sizes.micro_batch_size, rows) + 1) if rows % (n * whole) == 0]
        if ways and not left and not more and micro:
            break
    else:
        raise UserError(
            f"config.global_batch_size: {sizes.global_batch_size} cannot be kept on {devices} of {full_devices} devices with "
            f"mesh.pipe={old.pipe}, mesh.context={old.context} and mesh.model={old.model}; choose one that {devices // one} divides, or "
            "raise --min_nodes so that the run waits for all hosts"
        )
    replica = ways // data if ways % data == 0 else 1
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(old, pipe=pipe, replica=replica, data=ways // replica),
        pipeline=config.pipeline if pipe > 1 else settings.PipelineSettings(),
        global_batch_size=sizes.global_batch_size,
        micro_batch_size=max(micro),
        grad_accum=rows // max(micro),
    )


def _value(hint: type, value: Any, place: str) -> Any:
    """Checks one value against its declared type."""
    if dataclasses.is_dataclass(hint):
        return read(hint, value, place)
    if hint is tuple and isinstance(value, (list, tuple)):
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise UserError(f"{place}: is too large for a float, and is {errors.shown(value)}") from error
    is_number = isinstance(value, float) and math.isfinite(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)) or (hint is float and not is_number):
        raise UserError(f"{place}: must be {settings.kind(hint)}, and is {errors.shown(value)}")
    return value


def make_loss_scale(group: settings.LossScaleSettings, *, is_scaled: bool) -> loss_scale_lib.LossScale | None:
    """Returns the loss scale that the group `loss_scale` describes, or None where the precision needs none.

    Raises:
      UserError: a setting cannot take effect or is out of range.
    """
    static, dynamic = group.static, {name: value for name, value in vars(group).items() if name != "static"}
    why = "config.loss_scale.static is set" if is_scaled else "config.precision is not fp16"
    for name, value in (vars(group) if not is_scaled else dynamic if static else {}).items():
        if value != (usual := getattr(settings.LossScaleSettings, name)):
            raise UserError(
                f"config.loss_scale.{name}: is {value!r} and cannot take effect, since {why}; leave it at {usual!r}"
            )
    if not is_scaled:
        return None
    try:
        return loss_scale_lib.StaticLossScale(static) if static else loss_scale_lib.DynamicLossScale(**dynamic)
    except UserError as error:  # a static scale's field has the name `static` in a config
        raise UserError(f"config.{error}".replace("loss_scale.scale", "loss_scale.static")) from error


def make_lora(group: settings.LoraSettings) -> lora_lib.Lora:
    """Returns the settings of the group `lora`, which is on. Errors begin with "lora."."""
    return lora_lib.Lora(
        r=group.r,
        alpha=group.alpha or float(group.r),
        dropout=group.dropout,
        target_modules=_modules(group.target_modules) or None,
        exclude_modules=_modules(group.exclude_modules),
        target_parameters=tuple(_modules(group.target_parameters)),
        rslora=group.rslora,
        dora=group.dora,
        modules_to_save=tuple(_modules(group.modules_to_save)),
        quantize=group.quantize,
    )


def _modules(text: str) -> str | tuple[str, ...]:
    """Returns the names in a text that commas divide; other texts, such as a regex or "all-linear", as they are."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    is_list = all(re.fullmatch(r"[\w.]+", name) for name in names)
    return names if is_list and text != lora_lib.ALL_LINEAR else text


def _check_export(config: settings.Config) -> None:
    """Checks that there is something to export, and that it can be written to the hub."""
    group = config.export
    if group.format == "peft" and not config.lora.is_on:
        raise UserError("config.export.format: 'peft' writes adapters, and the run has none; choose 'huggingface'")
    if group.push_to and group.format == "none":
        raise UserError(
            "config.export.push_to: nothing is exported; set --config.export.format=huggingface, or omit it"
        )
    if group.push_to:
        with errors.below("config.export.push_to: "):
            hub.check_push(group.push_to)
    if group.deltas_to:
        with errors.below("config.export.deltas_to: "):
            vllm_server.check(group.deltas_to)


def _check_lora(config: settings.Config) -> None:
    """Checks the group `lora` by itself, and that it goes together with the rest."""
    group = config.lora
    if not group.is_on:
        return
    with errors.below("config."):
        for name in ("modules_to_save", "target_parameters"):
            value = getattr(group, name)
            if any(not re.fullmatch(r"[\w.]+", part) for part in _modules(value)):
                raise UserError(f"lora.{name}: must be names with commas between them, and is {errors.shown(value)}")
        make_lora(dataclasses.replace(group, r=group.r or 1))


def _check_override(override: Any) -> None:
    """Checks the form of one (path regex, axes). The partition checks it against the leaves."""
    form = "config.zero.overrides: must be ((path regex, (mesh axis or None for each dim)), ...)"
    if not isinstance(override, list | tuple) or len(override) != 2:
        raise UserError(f"{form}, and one of them is {errors.shown(override)}")
    pattern, axes = override
    try:
        if not isinstance(pattern, str):
            raise TypeError("it is not text")
        re.compile(pattern)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{form}, and {errors.shown(pattern)} is not a regex ({errors.first_line(error)})") from error
    if not isinstance(axes, list | tuple) or not all(_is_axis(axis) for axis in axes):
        raise UserError(f"{form}, and that of {errors.shown(pattern)} names {errors.shown(axes)}")


def _is_axis(axis: Any) -> bool:
    """Returns whether an entry is valid for one dim: an axis, several axes, or None."""
    if isinstance(axis, list | tuple):
        return all(isinstance(name, str) for name in axis)
    return axis is None or isinstance(axis, str)
