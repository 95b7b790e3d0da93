"""Makes the steps of a run. This module puts its model's loss, with labels and dropout, into a train and an evaluation step."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zerojax import jitted, precision, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.clock import rates as rates_lib
from zerojax.data import mixture, parts
from zerojax.data.pairs import tasks
from zerojax.models import family as family_lib
from zerojax.models import layers
from zerojax.models.family import ModelConfig
from zerojax.optim import schedules
from zerojax.plan import targets, traced
from zerojax.train_state import State
from zerojax.trainer import config as config_lib
from zerojax.trainer import distilled, embedded, preferences, rewarded, settings
from zerojax.trainer import metrics as metrics_lib
from zerojax.trainer import teacher as teacher_lib
from zerojax.tree import PyTree
from zerojax.zero import step, step_values
from zerojax.zero.blocks import block_settings
from zerojax.zero.fp8 import modules as fp8_modules
from zerojax.zero.gradients import forward_only
from zerojax.zero.host import selection
from zerojax.zero.offload import fetched_params
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.sharded_batch import outputs
from zerojax.zero.step_programs import forward, xla_options
from zerojax.zero.update import loss_scale as loss_scale_lib
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import columns, experts

DROPOUT = 1  # folded into the random key of a step


def loss(
    config: settings.Config,
    family: family_lib.Family,
    model: ModelConfig,
    schedule: schedules.Schedule,
    teacher: teacher_lib.Teacher | None = None,
) -> Callable[..., Any]:
    """Returns the loss of a training step, as of `make_train_step`."""
    is_dropped = config.model.dropout or (config.lora.is_on and config.lora.dropout)
    of_batch = objective(config, family, model) if teacher is None else distilled.loss(config, family, model, teacher)

    def loss_fn(params: PyTree, batch: PyTree, state: State) -> Any:
        keys = (_dropout_key(state),) if is_dropped else ()
        mean, metrics = of_batch(params, batch, *keys)
        return mean, {"metrics": {"learning_rate": schedule(state.step), **metrics}}

    return loss_fn


def objective(config: settings.Config, family: family_lib.Family, model: ModelConfig) -> Callable[..., Any]:
    """Returns f(params, batch, *keys) -> (the mean of what the task minimises without a teacher, metrics)."""
    return _OBJECTIVES.get(config.data.task, _of_labels)(config, family, model)


def _of_labels(config: settings.Config, family: family_lib.Family, model: ModelConfig) -> Callable[..., Any]:
    """Returns the objective of tasks that learn their labels, of several sources with the loss and the share of each."""
    mixed = config_lib.sources(config.data)
    titles = [source.title for source in mixed] if len(mixed) > 1 else []
    by_token = {"by_token": layers.BESIDE} if titles else {}

    def of_labels(params: PyTree, batch: PyTree, *keys: jax.Array) -> tuple[Any, dict[str, Any]]:
        found: Any = family.loss(model, params, batch, *keys, **by_token)
        mean = _weighted(found[0] if titles else found, batch)
        labels = {"labels": outputs.Sum(mean.weight)} if isinstance(mean, outputs.Mean) else {}
        return mean, {**labels, **(_by_source(titles, found[1], batch) if titles else {})}

    return of_labels


def _by_source(titles: Sequence[str], terms: jax.Array, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Returns the loss of each source and its share of the tokens, from the loss of each label, float32[rows, labels]."""
    numbers = batch[mixture.SOURCES]  # of each token; a row has one source
    counts = parts.labeled(batch) > 0 if "labeled" in batch else jnp.ones(terms.shape, bool)
    tokens = jnp.sum(numbers > 0).astype(jnp.float32)
    found: dict[str, Any] = {}
    for number, title in enumerate(titles, 1):
        is_own = jnp.max(numbers, axis=-1, keepdims=True) == number
        found[metrics_lib.LOSS_OF + title] = outputs.Mean(
            jnp.sum(jnp.where(is_own, terms, 0.0)), jnp.sum(is_own & counts).astype(jnp.float32)
        )
        read = jnp.sum(numbers == number).astype(jnp.float32)
        found[metrics_lib.SHARE_OF + title] = outputs.Mean(read, tokens)
    return found


_OBJECTIVES: Mapping[str, Callable[..., Callable[..., Any]]] = {
    tasks.DPO: preferences.loss,
    tasks.REWARD: preferences.reward_loss,
    tasks.GRPO: rewarded.loss,
    tasks.EMBED: embedded.loss,
}


def pipeline(
    config: settings.Config,
    loss_fn: Callable[..., Any],
    family: family_lib.Family,
    model: ModelConfig,
    mesh: Mesh,
    batch: PyTree,
) -> pipeline_state.Pipeline | None:
    """Returns how the layers of a run are divided into stages, or None if its mesh has none; `batch` is one micro-batch, abstract."""
    if mesh_lib.PIPE not in mesh.shape:
        return None
    how = {"batch_specs": _batch_specs(mesh), **_how(config, family, model), **vars(config.pipeline)}
    rates = rates_lib.of(targets.of_device(mesh.devices.flat[0]))
    how["costs"] = None if rates is None else traced.cost(rates)
    return pipeline_state.Pipeline(loss_fn, batch, **how)


def train_step(
    config: settings.Config,
    grad_accum: int,
    loss_fn: Callable[..., Any],
    family: family_lib.Family,
    model: ModelConfig,
    partition: partition_lib.Partition,
    loss_scale: loss_scale_lib.LossScale | None,
) -> Callable[..., Any]:
    """Returns (state, batch) -> (state, metrics)."""
    fp8, of_both = config_lib.make_fp8(config), _how(config, family, model)
    dtype, chosen = of_both["compute_dtype"], config.model
    return step.make_train_step(
        loss_fn,
        partition,
        clip_norm=config.optimizer.clip_norm,
        loss_scale=loss_scale,
        compute_dtype=dtype if fp8 is None else dataclasses.replace(fp8, dtype=dtype),
        blocks=block_settings.Blocks(
            family.blocks,
            of_both["heads"],
            chosen.remat,
            chosen.recompute,
            chosen.offload,
            [row if chosen.ring else row[:3] for row in family.parallel.activations],
            chosen.programs,
        ),
        sums=step_values.Sums(precision.DTYPES[config.reduce_dtype], precision.DTYPES[config.accum_dtype], grad_accum),
        batch=step_values.BatchLayout(_batch_specs(partition.mesh), check_context=False),
        wires=_wires(config),
    )


def _wires(config: settings.Config) -> list[tuple[str, step_values.WireChoice]]:
    """Returns how a run's weights are sent."""
    of_columns = [(config.model.by_columns, columns.ByColumns())] if config.model.by_columns else []
    to_experts = experts.ToExperts(load=config.experts.load, parts=config.experts.parts)
    wires = config_lib.make_wires(config)
    return [("", to_experts), *of_columns, *([("", wires)] if wires.is_on else [])]


def as_sent(
    config: settings.Config, family: family_lib.Family, partition: partition_lib.Partition
) -> partition_lib.Partition:
    """Returns a partition whose weights have a step's packed wires, by which a plan knows what the step should send."""
    if not config_lib.make_wires(config).is_on or partition.pipeline:
        return partition
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step has said it
        for pattern, choice in _wires(config):
            partition = choice.marked(partition, pattern, family.blocks, precision.DTYPES[config.reduce_dtype])
        return partition


def eval_loss(
    config: settings.Config, family: family_lib.Family, model: ModelConfig, partition: partition_lib.Partition
) -> Callable[..., Any]:
    """Returns (params, batch) -> the mean loss over all devices, with the arithmetic of the training step."""
    fp8, how = config_lib.make_fp8(config), _how(config, family, model)
    options = {} if fp8 is None else xla_options.for_fp8(partition.mesh, but=xla_flags.names())

    of_batch = objective(config, family, model)

    def loss_fn(params: PyTree, batch: PyTree) -> Any:
        return of_batch(params, batch)[0]

    loss_fn = fp8_modules.stateless(fp8, loss_fn, partition, family.blocks)
    how["batch_specs"] = _batch_specs(partition.mesh)
    if selection.are_params_on_host(partition):
        return fetched_params.mean_of(loss_fn, partition, compiler_options=options, **how)
    if config.model.programs == block_settings.KINDS:
        return forward.mean_by_kind(loss_fn, partition, compiler_options=options, **how)
    return jitted.jit(forward_only.mean(loss_fn, partition, **how), options)


def _batch_specs(mesh: Mesh) -> list[tuple[str, P]]:
    """Returns the specs of a batch's leaves, which are all [examples, tokens]."""
    return [("", mesh_lib.batch_sharding(mesh, has_tokens=True).spec)]


def _how(config: settings.Config, family: family_lib.Family, model: ModelConfig) -> dict[str, Any]:
    """Returns the options that both steps have. A divergence reads the head's kernel outside of the head."""
    own = {"heads": ""} if config.distill.teacher else {}
    return family_lib.gathering(family, model, config.policy.compute_dtype) | own


def _dropout_key(state: State) -> jax.Array:
    """Returns the random key of a step's dropout. Stochastic rounding folds the step alone into the state's."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step), DROPOUT)


def _weighted(loss: jax.Array, batch: Mapping[str, jax.Array]) -> outputs.Value:
    """Returns the mean over the labels of a batch, such that it stays one over several batches."""
    if "labeled" not in batch:
        return loss
    labels = jnp.sum(parts.labeled(batch))
    return outputs.Mean(loss * labels, labels)
