"""Builds a training program from settings without allocating anything. This module connects the other rooms:
config -> mesh -> model -> optimizer -> abstract state -> partition (the only use of the stage) -> train and evaluation steps.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from rich.table import Table

from zerojax import kinds, precision, train_state, tree
from zerojax import mesh as mesh_lib
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import feed, mixture, objectives, parts
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import splits, tasks
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.launch import watch
from zerojax.lora import families as families_lora
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import context_attention, token_order
from zerojax.optim import balance, master_weights, registry, schedules
from zerojax.train_state import State
from zerojax.trainer import config as config_lib
from zerojax.trainer import examples, ranges, setting_names, steps
from zerojax.trainer import forward as forward_lib
from zerojax.trainer import model as model_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import weights as weights_lib
from zerojax.tree import PyTree
from zerojax.zero import shard_state, stages, state_bytes
from zerojax.zero.blocks import tensor_parallel
from zerojax.zero.host import settings as offload_settings
from zerojax.zero.offload import late_norm, step_by_block
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.update import loss_scale as loss_scale_lib
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import unsent


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that a run needs, except data and weights.

    Attributes:
      config, mesh: the settings and the devices.
      family, model: the model's family, and its config.
      sizes: the three batch sizes.
      partition: the shardings of the train state.
      at_stage_0: (mesh) -> the run's shardings at stage 0 on a mesh of these devices, or on `rollout_mesh`.
      row: the arrays of a batch's rows, as the run's task declares them.
      abstract_batch: a training batch of such rows with shardings: {name: array[(accum,) batch, length, ...]}.
      train_step: (state, batch) -> (state, metrics).
      forward: how it evaluates and generates.
      way: how devices attend that each hold a part of every row; None: a device has all tokens of its rows.
      weights: where the weights come from.
      tx: the optimizer that the state applies, with master weights where they are kept.
      create: (float32 weights) -> the initial state.
      copy_dtype: the dtype of the 16-bit weights stored with the master weights; None if there are none.
      loss_scale: the loss scale; None if the loss is not scaled.
      rollout_mesh: the devices that draw answers while those of `mesh` train; None if all train.
    """

    config: settings_lib.Config
    mesh: Mesh
    sizes: config_lib.BatchSizes
    family: family_lib.Family
    model: Any
    tx: optax.GradientTransformation
    create: Callable[[Any], Any]
    partition: partition_lib.Partition
    at_stage_0: Callable[[Mesh], partition_lib.Partition]
    row: objectives.Row
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    train_step: Callable[..., Any]
    forward: forward_lib.ForwardPlacement
    way: context_attention.Way | None
    weights: weights_lib.Weights
    copy_dtype: Any
    loss_scale: loss_scale_lib.LossScale | None
    rollout_mesh: Mesh | None = None

    @functools.cached_property
    def baseline(self) -> partition_lib.Partition:
        """Returns the same run's shardings at stage 0, for comparison."""
        return self.at_stage_0(self.forward.partition.mesh)

    @functools.cached_property
    def rollouts(self) -> partition_lib.Partition:
        """Returns how the weights are sharded that value answers: as for evaluations, or as copies on `rollout_mesh`."""
        return self.forward.partition if self.rollout_mesh is None else self.at_stage_0(self.rollout_mesh)

    def copies(self, own: partition_lib.Partition) -> PyTree:
        """Returns copies of the weights as a partition shards them, as ShapeDtypeStructs in the compute dtype."""
        plain = tree.map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(own.leaves[f"params/{path}"].shape, leaf.dtype),
            own.abstract_state.params,
        )
        cast = jax.eval_shape(lambda params: precision.cast_floating(params, self.config.policy.compute_dtype), plain)
        return jax.tree.map(lambda leaf, where: leaf.update(sharding=where), cast, own.shardings.params)

    @property
    def objective(self) -> objectives.Objective:
        """Returns the training objective of the model family."""
        return objectives.OBJECTIVES[self.family.objective]

    @property
    def lengths(self) -> Mapping[str, int]:
        """Returns the lengths of the arrays of a batch's rows, by name."""
        return objectives.lengths(self.row)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding of a training batch's arrays."""
        return mesh_lib.batch_sharding(self.mesh, int(self.sizes.grad_accum > 1), has_tokens=True)

    @property
    def order(self) -> parts.Order | None:
        """Returns the order of tokens on devices that each hold a part of every row; None if a device has all."""
        if self.way is None:
            return None
        ways = mesh_lib.size(self.mesh, mesh_lib.TOKENS)
        return functools.partial(token_order.permutation, ways=ways, order=self.way.order)

    @property
    def tokens_per_step(self) -> int:
        """Returns the tokens of a batch; all answers of a pair count."""
        return self.sizes.global_batch_size * self.config.seq_len * examples.compared(self.config)

    @property
    def flops_per_token(self) -> float:
        """Returns the floating-point operations of training per token; a sequence has `seq_len` tokens."""
        lengths = model_lib.lengths_of_answer(self.config, self.lengths)
        if self.weights.adapted is None:
            return self.family.flops_per_token(self.model, lengths)
        # A frozen weight costs a forward and a backward matmul, and has no gradient of its own.
        trained = sum(math.prod(found.shape or ()) for found in self.partition.placements.values() if found.trainable)
        return self.family.flops_per_token(self.model, lengths, per_weight=4.0) + 6.0 * trained

    @property
    def fingerprints(self) -> dict[str, str]:
        """Returns what tells the frozen weights of a run apart from those of another, if they are read."""
        weights, found = self.weights, dict[str, str]()
        if weights.adapted is not None and weights.source is not None:
            found["base"] = folder_lib.fingerprint(weights.source)
        return found if weights.teacher is None else {**found, "teacher": weights.teacher.fingerprint}

    @property
    def logical_abstract_state(self) -> State:
        """Returns the abstract state in the form that checkpoints store, with shardings."""
        return self.to_logical(self.partition.abstract_state)

    def to_logical(self, state: State) -> State:
        """Returns a state, or a tree like it, in the form that checkpoints store; frozen weights are not in it."""
        return self.trained_part(logical_lib.to_logical(state))

    def to_saved(self, state: State) -> State:
        """Returns what a checkpoint stores of a state, with shards in each process."""
        return pipeline_state.spread(self.to_logical(state), self.partition.pipeline)

    def trained_part(self, state: State) -> State:
        """Returns a state, or a tree like it, without frozen weights."""
        return state.replace(params=self.partition.trainable_part(state.params))


def build(config: settings_lib.Config, *, tokenizer_vocab: int = 0, devices: Sequence[Any] | None = None) -> Program:
    """Builds the program. Allocates nothing. Errors name config keys, the most basic first.

    Args:
      config: checked settings.
      tokenizer_vocab: the tokenizer's number of ids. 0 loads the tokenizer if the model's size depends on it.
      devices: the devices of the mesh; None takes all. Compile-only devices are allowed.

    Raises:
      UserError: settings contradict each other or the devices.
    """
    with setting_names.of_config(), config_lib.telling_of_long_texts(config.model):
        return _build(config, tokenizer_vocab, devices)


def _build(config: settings_lib.Config, tokenizer_vocab: int, devices: Sequence[Any] | None) -> Program:
    mesh, aside = config_lib.make_mesh(config, devices), config_lib.rollout_mesh(config, devices)
    sizes = config_lib.batch_sizes(config, mesh_lib.ways(mesh))
    policy = config.policy
    loss_scale = config_lib.make_loss_scale(config.loss_scale, is_scaled=policy.scales_loss)
    source = model_lib.source(config)
    family, model = model_lib.choose(config, source, mesh, policy.compute_dtype, tokenizer_vocab)
    _tell_of_no_effect(config, sizes, model, mesh)
    way = model_lib.way(config, family, model, mesh, sizes.micro_batch_size)
    in_parts = model if way is None else dataclasses.replace(model, way=way)
    if config.optimizer.router_bias_rate:
        ranges.check_router_bias(config, model)
        in_parts = in_parts.changed(mixture={"counts_choices": True})
    if config.data.task == tasks.GRPO and config.grpo.replay:
        ranges.check_replay(model)
    schedule, inner = _optimizer(config, policy)
    offload = config_lib.make_offload(config.offload, config.zero.stage)
    # Params in host memory are sent in 16 bits, so these are stored beside the master weights. Adapters are few: they have no copy.
    is_cast_on_device = stages.STAGES[config.zero.stage].params and offload.params == offload_settings.NONE
    weights = weights_lib.choose(config, family, model, source)
    copy_dtype = None if weights.trainable else policy.copy_dtype(splits_params=is_cast_on_device)
    tx = inner if copy_dtype is None else master_weights.with_master_weights(inner)

    params, trainable = weights.abstract(policy, config.lora.frozen_dtype), weights.trainable
    if weights.adapted is not None:
        family = families_lora.with_adapters(family, weights.adapted.chosen)
    fp8 = config_lib.make_fp8(config)
    # Of all weights: a state of adapters is made without the frozen ones.
    histories = (lambda: ()) if fp8 is None else functools.partial(fp8.init, params, blocks=family.blocks)
    how: dict[str, Any] = {"policy": policy, "loss_scale": loss_scale, "seed": config.seed, "trainable": trainable}
    how |= {"histories": histories, "has_late_norm": offload.late_norm}
    create = functools.partial(_state, tx=tx, inner=inner, copy_dtype=copy_dtype, **how)
    row = model_lib.row(config, family, model)
    # A row in parts has arrays of its own, of the parts on all devices together.
    read = row if way is None else parts.row(row)
    read = {**read, **({} if weights.teacher is None else weights.teacher.states(row, policy.compute_dtype))}
    abstract_batch = functools.partial(_abstract_batch, mesh, sizes, read)
    loss_fn = steps.loss(config, family, in_parts, schedule, weights.teacher)
    overrides, unsharded = _overrides(config, family, params, mesh)
    if unsharded:
        setting_names.tell(f"config.mesh: {unsharded}")
    partitioned = functools.partial(
        stages.partition_state,
        jax.eval_shape(create, params),
        overrides=overrides,
        min_size=config.zero.min_size,
        indivisible=config.zero.indivisible,
        trainable=trainable,
    )
    partition = partitioned(
        mesh=mesh,
        stage=config.zero.stage,
        offload=offload,
        pipeline=steps.pipeline(config, loss_fn, family, in_parts, mesh, abstract_batch(passes=1)),
    )
    _check_axes(partition)
    _check_rates(config.optimizer.rates, partition)
    partition = unsent.in_partition(partition, steps.as_sent(config, family, partition))
    everywhere = partitioned(mesh=forward_lib.mesh_of(mesh)) if partition.pipeline else partition
    return Program(
        config=config,
        mesh=mesh,
        sizes=sizes,
        family=family,
        model=model,
        tx=tx,
        create=functools.partial(create, unsent_grads=partition.abstract_state.unsent_grads),
        partition=partition,
        at_stage_0=functools.partial(
            _baseline, config, family, params, create, None if trainable else policy, trainable
        ),
        row=row,
        abstract_batch=abstract_batch(),
        train_step=steps.train_step(config, sizes.grad_accum, loss_fn, family, in_parts, partition, loss_scale),
        forward=forward_lib.ForwardPlacement(
            everywhere,
            partition,
            sizes.grad_accum if everywhere is partition else forward_lib.passes_of(everywhere.mesh, sizes),
            steps.eval_loss(config, family, in_parts, everywhere),
        ),
        way=way,
        weights=weights,
        copy_dtype=copy_dtype,
        loss_scale=loss_scale,
        rollout_mesh=aside,
    )


def memory_table(program: Program) -> Table:
    """Returns the table of bytes on each device, beside those of stage 0. Gradients count as this program's step holds them."""
    step = program.train_step
    frees = isinstance(step, step_by_block.BlockwiseStep) and not step.holds_gradients
    return state_bytes.memory_table(
        program.partition,
        program.baseline,
        accumulates=program.sizes.grad_accum > 1,
        by_hand=True,
        one_block=program.family.blocks if frees else "",
        in_16_bits=program.config.accum_dtype == "bf16",
    )


@setting_names.of_config()
def open_feed(
    program: Program,
    tokenizer: tokenizer_lib.Tokenizer,
    data_dir: str | os.PathLike[str],
    pairs: splits.Splits | mixture.SourceMixture | None = None,
) -> feed.Feed:
    """Returns the feed of the program's batches, of text, of examples with answers or of several sources; see `feed.Feed`."""
    config = program.config
    return feed.Feed(
        program.mesh,
        tokenizer,
        program.objective,
        config.data.places(data_dir),
        text_key=config.data.text_key,
        global_batch_size=program.sizes.global_batch_size,
        grad_accum=program.sizes.grad_accum,
        held_out=(program.forward.partition.mesh, program.forward.passes),
        seq_len=config.seq_len,
        seed=config.seed,
        eval_batches=config.evaluate.batches,
        pairs=pairs,
        order=program.order,
        on_bad=config.data.on_bad,
    )


def held_out_loss(
    program: Program, batches: feed.Feed, params: PyTree, check: Callable[[], object] = lambda: None
) -> float | None:
    """Returns the mean loss over the first `evaluate.batches` global batches of held-out text, or None if there is none.

    Calls `check` before each batch; it may raise to give up.
    """

    held = program.forward.params(params)

    def measure(batch: PyTree) -> Any:
        watch.at(watch.EVALUATE)
        check()
        return program.forward.loss(held, batch)

    return batches.held_out_mean(measure, program.config.evaluate.batches)


def _state(
    params: PyTree,
    *,
    policy: precision.Precision,
    tx: optax.GradientTransformation,
    inner: optax.GradientTransformation,
    copy_dtype: DTypeLike | None,
    loss_scale: loss_scale_lib.LossScale | None,
    seed: int,
    trainable: str,
    histories: Callable[[], Any],
    has_late_norm: bool,
    unsent_grads: Any = (),
) -> State:
    # Where weights are frozen, all have their dtypes already.
    weights = precision.cast_floating(params, policy.weight_dtype) if not trainable else params
    part = shard_state.trained_params(weights, trainable)
    last_norm = late_norm.first_norm() if has_late_norm else ()
    fields = {
        "loss_scale": () if loss_scale is None else loss_scale.init(),
        "fp8": histories(),
        late_norm.FIELD: last_norm,
    }
    fields[unsent.FIELD] = unsent.zeros(unsent_grads)
    logical = train_state.create(part, inner, jax.random.key(seed), **fields)
    logical = logical.replace(params=weights)
    return logical_lib.from_logical(logical, copy_dtype).replace(tx=tx)


def _abstract_batch(
    mesh: Mesh, sizes: config_lib.BatchSizes, row: objectives.Row, *, passes: int = 0
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a batch, or a part of it with another number of passes."""
    accum = passes or sizes.grad_accum
    leading = (sizes.rows,) if accum == 1 else (accum, sizes.rows)
    sharding = mesh_lib.batch_sharding(mesh, len(leading) - 1, has_tokens=True)
    return {
        name: jax.ShapeDtypeStruct((*leading, *array.shape), array.dtype, sharding=sharding)
        for name, array in row.items()
    }


def _baseline(
    config: settings_lib.Config,
    family: family_lib.Family,
    params: PyTree,
    create: Callable[..., Any],
    policy: precision.Precision | None,
    trainable: str,
    mesh: Mesh,
) -> partition_lib.Partition:
    """Returns the partition at stage 0: only overrides shard, and there is a 16-bit copy of the weights if the precision needs one."""
    state = create if policy is None else functools.partial(create, copy_dtype=policy.copy_dtype(splits_params=False))
    overrides, _ = _overrides(config, family, params, mesh)
    return stages.partition_state(
        jax.eval_shape(state, params), mesh=mesh, stage=0, overrides=overrides, trainable=trainable
    )


def _overrides(
    config: settings_lib.Config, family: family_lib.Family, params: PyTree, mesh: Mesh
) -> tuple[Sequence[tuple[str, tuple]], str]:
    """Returns the config's overrides and the family's, for weights that the config's do not name, and which weights do not divide."""
    shapes = {path: leaf.shape for path, leaf in tree.flatten({"params": params})}
    own = config.zero.overrides
    rows, unsharded = tensor_parallel.overrides(family.parallel.weights, shapes, mesh, [row[0] for row in own])
    return (*own, *rows), unsharded


def _check_axes(partition: partition_lib.Partition) -> None:
    """Raises a UserError if devices along an axis that overrides shard would only repeat each other's work."""
    for axis, size in stages.unused_axes(partition):
        raise UserError(
            f"config.mesh.{axis}: is {size}, and no weight is sharded over `{axis}`, so its devices would repeat each other's work; "
            f"name weights in config.zero.overrides, or set --config.mesh.{axis}=1"
        )
    ways = mesh_lib.size(partition.mesh, mesh_lib.EXPERT)
    if ways > 1 and not any(weight.is_experts for weight in partition.placements.values()):
        raise UserError(
            f"config.mesh.expert: is {ways}, and no weight is sharded over `expert`: the model has no experts, or their number does not "
            "divide; set --config.mesh.expert=1"
        )


def _check_rates(rates: str, partition: partition_lib.Partition) -> None:
    """Raises a UserError if no trained weight is of a kind whose rate is given."""
    trained = {path: found.shape for path, found in partition.placements.items() if found.trainable}
    held = sorted({kinds.of(tree.below_params(path), shape or ()) for path, shape in trained.items()})
    if lacking := sorted(registry.factors_of(rates).keys() - held):
        raise UserError(
            f"config.optimizer.rates: no trained weight is of the kind {lacking[0]!r}; they are of {', '.join(held)}; name these"
        )


def _tell_of_no_effect(
    config: settings_lib.Config, sizes: config_lib.BatchSizes, model: ModelConfig, mesh: Mesh
) -> None:
    """Names settings that the kernel of attention, the length of a pass, or a classifier leaves without effect."""
    tokens = sizes.micro_batch_size * config.seq_len // mesh_lib.size(mesh, mesh_lib.TOKENS)
    has_classes, is_tiled = getattr(model, "classes", ()), config.model.tile_tokens < tokens
    of_classifier = "a classifier reads one text a row, and writes none" if has_classes else ""
    for place, why in {
        "data.answer_len": of_classifier,
        "data.pack": of_classifier,
        "model.ring": "" if hasattr(model, "tile_tokens") else "only modules of decoders run in rings",
        "model.tile_tokens": "" if is_tiled else f"a pass has {tokens} tokens on each device",
    }.items():
        for line in settings_lib.told(config, place, why):
            setting_names.tell(line)
    if config.model.remat == "attention" and model.attention == "xla":
        setting_names.tell(
            "config.model.remat: 'attention' keeps what fused attention returns; XLA's returns none, so it is 'full' here"
        )


def _optimizer(
    config: settings_lib.Config, policy: precision.Precision
) -> tuple[schedules.Schedule, optax.GradientTransformation]:
    chosen = config.optimizer
    schedule = schedules.make(
        chosen.schedule,
        chosen.learning_rate,
        schedules.fitting_warmup(chosen.schedule, chosen.warmup_steps, config.steps),
        config.steps,
        chosen.final_fraction,
        warmup=chosen.warmup,
        initial_fraction=chosen.initial_fraction,
    )
    given = (*registry.READ_BY_SOME, "weight_decay_on", "rates", "moments")
    tx = registry.make_optimizer(
        chosen.name,
        schedule,
        rounds_weights=policy.rounds_stochastically,
        in_float32=policy.compute_dtype == jnp.float32,
        **{name: getattr(chosen, name) for name in given},
    )
    return schedule, balance.with_balance(tx, chosen.router_bias_rate) if chosen.router_bias_rate else tx
