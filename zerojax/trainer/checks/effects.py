"""Settings that nothing reads. This module lists those that differ from their default and cannot take effect, each with the reason."""

import math

from jax.sharding import Mesh

from zerojax import mesh as mesh_lib
from zerojax.data.pairs import tasks
from zerojax.optim import schedules
from zerojax.trainer import settings
from zerojax.zero import stages


def unread(config: settings.Config) -> list[str]:
    """Returns a line for each setting without effect that is not at its default, with the first reason."""
    return [
        line for place in settings.table() for line in settings.told(config, place, settings.why_unread(config, place))
    ]


def unsharded(config: settings.Config, mesh: Mesh) -> list[str]:
    """Returns a line for each setting of how ZeRO shards the state, if the mesh is one over which it is not sharded."""
    if mesh_lib.size(mesh, mesh_lib.STATE) > 1 or not stages.STAGES[config.zero.stage].opt_state:
        return []
    why = f"no state is sharded over {mesh_lib.text(mesh, mesh_lib.STATE)}"
    return [line for name in ("min_size", "indivisible") for line in settings.told(config, f"zero.{name}", why)]


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
    if not patience or settings.why_unread(config, "evaluate.patience"):
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
    if config.mesh.expert == 1 or config.model.tile_tokens or config.data.task in tasks.PAIRED or tokens % parts == 0:
        return []
    why = f"it does not divide the {tokens} tokens of a device and pass, which travel at once"
    return settings.told(config, "experts.parts", why)
