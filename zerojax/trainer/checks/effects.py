"""Settings that nothing reads. This module lists those that differ from their default and cannot take effect, each with the reason."""

from collections.abc import Iterable, Iterator

from jax.sharding import Mesh

from zerojax import mesh as mesh_lib
from zerojax import precision
from zerojax.data import batches
from zerojax.data.pairs import tasks
from zerojax.ops import fp8, preferences
from zerojax.optim import registry, schedules
from zerojax.trainer import settings
from zerojax.trainer.clients import outlets
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
    return _lines(config, _ignored(config))


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
    """Returns a line for each setting that counts steps of which a run has fewer, so that it publishes or saves nothing. The steps must be
    known."""
    places = ["export.deltas_every"] + ([] if config.checkpoint.at_end else ["checkpoint.every"])
    return [
        f"config.{place}={every} has no effect: the run has {config.length}"
        for place in places
        if (every := settings.lookup(config, place)) > config.steps
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


def _of_task(config: settings.Config) -> dict[str, tuple[str, ...]]:
    """Returns what the task does not read, by the reason."""
    task, of_pairs, of_chat = config.data.task, ("prompt", "answer", "labels"), ("messages", "chat_template")
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
        others = (*others, *(place for place in settings.table() if place.startswith(f"{group}.")))
    return {
        f"config.data.task={task} does not read it": (*(f"data.{name}" for name in unread), *others),
        f"config.dpo.loss={config.dpo.loss} does not read it": ()
        if config.dpo.loss == preferences.SIGMOID
        else ("dpo.label_smoothing",),
        "config.grpo.inner_steps=1 draws each token with the weights that learn from it": ()
        if config.grpo.inner_steps > 1
        else ("grpo.clip",),
        f"config.epochs={config.epochs:g} counts": ("steps", "evaluate.every") if config.epochs else (),
    }


def _ignored(config: settings.Config) -> Iterator[tuple[str, str]]:
    """Yields the place of each setting that nothing reads, and the reason."""
    chosen = config.optimizer
    sharded = stages.STAGES[config.zero.stage]
    reasons = {
        "config.mesh.pipe=1": () if config.mesh.pipe > 1 else ("pipeline.schedule", "pipeline.chunks"),
        "config.mesh.model=1": () if config.mesh.model > 1 else ("model.ring",),
        "modules in fp8, and with quantized weights, run for all examples at once": ("model.ring",)
        if precision.PRECISIONS[config.precision].has_fp8 or (config.lora.is_on and config.lora.quantize != "none")
        else (),
        "config.mesh.expert=1": () if config.mesh.expert > 1 else ("experts.load", "experts.parts"),
        f"config.zero.stage={config.zero.stage} shards nothing": () if sharded.opt_state else _OF_SHARDS,
        f"config.wire.gradients={config.wire.gradients!r} and config.wire.second_copy=False tell no host from another": ()
        if config.wire.second_copy or config.wire.gradients != packed.PLAIN
        else ("wire.host_devices",),
        f"config.precision={config.precision!r} computes nothing in fp8": ()
        if precision.PRECISIONS[config.precision].has_fp8
        else ("fp8.recipe", "fp8.filter", "fp8.first", "fp8.last"),
        f"no scale is delayed (config.fp8.recipe={config.fp8.recipe!r})": ()
        if config.fp8.recipe == fp8.DELAYED and precision.PRECISIONS[config.precision].has_fp8
        else ("fp8.history",),
        f"the optimizer {chosen.name} does not read it": tuple(
            f"optimizer.{name}"
            for name in ("b1", "b2", "eps", *registry.OF_MUON)
            if name not in registry.READS[chosen.name]
        ),
        f"the schedule {chosen.schedule} does not read it": ()
        if chosen.schedule in schedules.FALLING
        else ("optimizer.final_fraction",),
        "config.optimizer.warmup_steps=0": ()
        if chosen.warmup_steps
        else ("optimizer.warmup", "optimizer.initial_fraction"),
        "config.optimizer.weight_decay=0": () if chosen.weight_decay else ("optimizer.weight_decay_on",),
        "config.lora.r=0 and there is no config.lora.init_from": ()
        if config.lora.is_on
        else tuple(place for place in settings.table() if place.startswith("lora.") and place not in LORA_ON),
        "config.export.format='peft' writes adapters as they are trained": ("export.dtype",)
        if config.export.format == "peft" and not config.export.deltas_every
        else (),
        "config.export.format='none'": ()
        if config.export.format != "none" or config.export.deltas_every
        else ("export.dtype",),
        "random tokens are not read from files": ("data.train_split", "data.text_key", "data.dir")
        if config.data.name == batches.RANDOM and not config.data.train_file
        else (),
        "config.data.train_file is read instead": ("data.name", "data.train_split", "data.eval_split", "data.dir")
        if config.data.train_file
        else (),
        "nothing is held out, so nothing is evaluated": ()
        if (config.data.eval_file if config.data.train_file else config.data.eval_split)
        else ("evaluate.every", "evaluate.batches", "evaluate.answers", "evaluate.patience", "checkpoint.keep_best"),
        "config.evaluate.every=0 evaluates after the last step alone": ()
        if config.evaluate.every or config.epochs
        else ("evaluate.patience",),
        **_of_task(config),
        "no checkpoint is saved": ()
        if config.checkpoint.every or config.checkpoint.at_end
        else ("checkpoint.keep_last", "checkpoint.keep_best"),
        "config.sample.length=0": () if config.sample.length else ("sample.prompt", "sample.temperature"),
        "config.metrics.to names neither wandb nor mlflow": ()
        if {*outlets.names(config.metrics.to)} & {*outlets.CLIENTS}
        else ("metrics.project", "metrics.name", "metrics.dir", "metrics.resume_id"),
        "config.profile.steps=0": () if config.profile.steps else ("profile.start",),
    }
    return ((place, why) for why, places in reasons.items() for place in places)
