"""Settings that nothing reads. This module lists those that differ from their default and cannot take effect, each with the reason."""

import math
from collections.abc import Iterable, Iterator

from jax.sharding import Mesh

from zerojax import mesh as mesh_lib
from zerojax import precision
from zerojax.data.pairs import tasks
from zerojax.ops import fp8, preferences
from zerojax.optim import registry, schedules
from zerojax.trainer import config as config_lib
from zerojax.trainer import settings, trackers
from zerojax.zero import stages
from zerojax.zero.wires import packed

LORA_ON = ("lora.r", "lora.init_from")
# of an evaluation, which a task does not read
_OF_EVALUATION = {
    tasks.DPO: ("evaluate.answers",),
    tasks.GRPO: ("evaluate.batches", "evaluate.patience", "checkpoint.keep_best"),
}
_OF_SHARDS = ("zero.min_size", "zero.indivisible")  # of the state, over the axes of ZeRO
OFF = {"sample.length": 0}  # values that ask for nothing


def unread(config: settings.Config) -> list[str]:
    """Returns a line for each setting without effect that is not at its default, with the first reason."""
    return _lines(config, ((place, why) for why, is_unread, places in _rows(config) if is_unread for place in places))


def unsharded(config: settings.Config, mesh: Mesh) -> list[str]:
    """Returns a line for each setting of how ZeRO shards the state, if the mesh is one over which it is not sharded."""
    if mesh_lib.size(mesh, mesh_lib.STATE) > 1 or not stages.STAGES[config.zero.stage].opt_state:
        return []
    why = f"no state is sharded over {mesh_lib.text(mesh, mesh_lib.STATE)}"
    return _lines(config, ((place, why) for place in _OF_SHARDS))


def _lines(config: settings.Config, ignored: Iterable[tuple[str, str]]) -> list[str]:
    reasons: dict[str, str] = {}
    for place, why in ignored:
        default = settings.table()[place].default
        if settings.lookup(config, place) not in (default, OFF.get(place, default)):
            reasons.setdefault(place, why)
    return [f"config.{place}={settings.lookup(config, place)!r} has no effect: {why}" for place, why in reasons.items()]


def unreached(config: settings.Config) -> list[str]:
    """Returns a line for each setting that counts steps of which a run has fewer: it publishes or saves nothing, or cannot end early. The
    steps must be known."""
    places = ["export.deltas_every"] + ([] if config.checkpoint.at_end else ["checkpoint.every"])
    return [
        f"config.{place}={every} has no effect: the run has {config.length}"
        for place in places
        if (every := settings.lookup(config, place)) > config.steps
    ] + _without_early_end(config)


def _without_early_end(config: settings.Config) -> list[str]:
    """Returns a line if the evaluations before the last step are too few for `evaluate.patience` to end the run."""
    patience, every = config.evaluate.patience, config.evaluate.every
    is_read = config.data.task != tasks.GRPO and config_lib.has_held_out(config.data)
    if not patience or not (every or config.epochs) or not is_read:
        return []
    count = math.ceil(config.epochs) - 1 if config.epochs else (config.steps - 1) // every
    if count > patience:
        return []
    return [
        f"config.evaluate.patience={patience} cannot end the run of {config.length}: it takes {patience + 1} evaluations before the last "
        f"step, and there are {count}; the results are those of the lowest loss all the same"
    ]


def shortened(config: settings.Config) -> list[str]:
    """Returns a line if the warm-up is longer than the run, whose steps must be known."""
    chosen = config.optimizer
    warmup = schedules.fitting_warmup(chosen.schedule, chosen.warmup_steps, config.steps)
    if warmup == chosen.warmup_steps or 0 < chosen.warmup_steps < 1:
        return []
    steps = f"{warmup} step" if warmup == 1 else f"{warmup} steps"
    return [
        f"config.optimizer.warmup_steps={chosen.warmup_steps:g} is longer than the run of {config.length}: the warm-up takes {steps}"
    ]


def undivided(config: settings.Config, rows: int) -> list[str]:
    """Returns a line if the tokens of `rows` sequences, those of a device and pass, do not divide by `experts.parts`."""
    tokens, parts = rows * config.seq_len // config.mesh.context, config.experts.parts
    if config.mesh.expert == 1 or config.model.tile_tokens or config.data.task == tasks.DPO or tokens % parts == 0:
        return []
    return [
        f"config.experts.parts={parts} has no effect: it does not divide the {tokens} tokens of a device and pass, which travel at once"
    ]


def _of_task(config: settings.Config) -> tuple[str, ...]:
    """Returns the places of what the task does not read."""
    task, of_pairs, of_chat = config.data.task, ("prompt", "answer", "labels"), ("messages", "chat_template", "learn")
    unread: tuple[str, ...] = ("text_key",)
    if task == tasks.TEXT:
        unread = (*of_pairs, *of_chat, "answer_len", "pack")
    elif task == tasks.CHAT:
        unread = (*unread, *of_pairs)
    else:
        unread = (*unread, "messages")  # whether there are conversations is known when the examples are read
    if task in tasks.ANSWERS:
        unread = (*unread, "pack")
    if task != tasks.DPO:
        unread = (*unread, "rejected")
    others = ("evaluate.answers",) if task == tasks.TEXT else ("sample.length", "sample.prompt", "sample.temperature")
    others = (*others, *_OF_EVALUATION.get(task, ()))
    for group in {tasks.DPO, tasks.GRPO} - {task}:
        others = (*others, *_group(group))
    return (*(f"data.{name}" for name in unread), *others)


def _group(name: str) -> tuple[str, ...]:
    return tuple(place for place in settings.table() if place.startswith(f"{name}."))


def _rows(config: settings.Config) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """Yields (the reason, whether it holds, the places of the settings that nothing reads then)."""
    c, chosen = config, config.optimizer
    has_fp8, sharded = precision.PRECISIONS[c.precision].has_fp8, stages.STAGES[c.zero.stage]
    is_quantized = c.lora.is_on and c.lora.quantize != "none"
    tells_hosts = c.wire.second_copy or c.wire.gradients != packed.PLAIN
    read = (*registry.reads(chosen.name), "weight_decay")  # whose value is refused
    unread = tuple(f"optimizer.{name}" for name in registry.read_by_some() if name not in read)
    of_lora = tuple(place for place in _group("lora") if place not in LORA_ON)
    of_evaluation = (
        "evaluate.every",
        "evaluate.batches",
        "evaluate.answers",
        "evaluate.patience",
        "checkpoint.keep_best",
    )
    places = config_lib.places(c.data)
    has_client = {*trackers.names(c.metrics.to)} & {*trackers.CLIENTS}
    yield from (
        ("config.mesh.pipe=1", c.mesh.pipe == 1, ("pipeline.schedule", "pipeline.chunks")),
        ("config.mesh.model=1", c.mesh.model == 1, ("model.ring",)),
        ("modules in fp8, and with quantized weights, run for all examples at once", has_fp8 or is_quantized, ("model.ring",)),
        ("config.mesh.expert=1", c.mesh.expert == 1, ("experts.load", "experts.parts")),
        (f"config.zero.stage={c.zero.stage} shards nothing", not sharded.opt_state, _OF_SHARDS),
        (f"config.wire.gradients={c.wire.gradients!r} and config.wire.second_copy=False tell no host from another", not tells_hosts,
         ("wire.host_devices",)),
        (f"config.precision={c.precision!r} computes nothing in fp8", not has_fp8,
         ("fp8.recipe", "fp8.filter", "fp8.first", "fp8.last", "fp8.experts")),
        (f"no scale is delayed (config.fp8.recipe={c.fp8.recipe!r})", not (has_fp8 and c.fp8.recipe == fp8.DELAYED), ("fp8.history",)),
        (f"the optimizer {chosen.name} does not read it", True, unread),
        (f"the schedule {chosen.schedule} does not read it", chosen.schedule not in schedules.FALLING, ("optimizer.final_fraction",)),
        ("config.optimizer.warmup_steps=0", not chosen.warmup_steps, ("optimizer.warmup", "optimizer.initial_fraction")),
        ("config.optimizer.weight_decay=0", not chosen.weight_decay, ("optimizer.weight_decay_on",)),
        ("config.lora.r=0 and there is no config.lora.init_from", not c.lora.is_on, of_lora),
        ("config.export.format='peft' writes adapters as they are trained", c.export.format == "peft" and not c.export.deltas_every,
         ("export.dtype",)),
        ("config.export.format='none'", c.export.format == "none" and not c.export.deltas_every, ("export.dtype",)),
        ("random tokens are not read from files", places.is_random, ("data.train_split", "data.text_key", "data.dir")),
        ("config.data.train_file is read instead", bool(c.data.train_file),
         ("data.name", "data.train_split", "data.eval_split", "data.dir")),
        ("config.data.sources name their own", bool(c.data.sources), ("data.eval_split",)),
        ("config.data.sources is empty", not c.data.sources, ("data.mix_by",)),
        ("nothing is held out, so nothing is evaluated", not config_lib.has_held_out(c.data), of_evaluation),
        ("config.evaluate.every=0 evaluates after the last step alone", not (c.evaluate.every or c.epochs), ("evaluate.patience",)),
        (f"config.data.task={c.data.task} does not read it", not c.data.sources, _of_task(c)),
        ("sources are read as they are needed, and no answers to them are generated", bool(c.data.sources), ("evaluate.answers",)),
        (f"config.dpo.loss={c.dpo.loss} does not read it", c.dpo.loss != preferences.SIGMOID, ("dpo.label_smoothing",)),
        ("config.grpo.inner_steps=1 draws each token with the weights that learn from it", c.grpo.inner_steps == 1, ("grpo.clip",)),
        (f"config.epochs={c.epochs:g} counts", bool(c.epochs), ("steps", "evaluate.every")),
        ("no checkpoint is saved", not (c.checkpoint.every or c.checkpoint.at_end), ("checkpoint.keep_last", "checkpoint.keep_best")),
        ("config.sample.length=0", not c.sample.length, ("sample.prompt", "sample.temperature")),
        ("config.metrics.to names neither wandb nor mlflow", not has_client, _group("metrics")[1:]),
        ("config.profile.steps=0", not c.profile.steps, ("profile.start",)),
    )  # fmt: skip
