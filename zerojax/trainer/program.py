"""Builds a training program from settings without allocating anything. This module connects the other rooms:
config -> mesh -> model -> optimizer -> abstract state -> partition (the only use of the stage) -> train and evaluation steps.
"""

import dataclasses
import functools
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from zerojax import files, precision, roles, specs, train_state, tree, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import feed, objectives
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import splits, tasks
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.launch import watch
from zerojax.lora import families as families_lora
from zerojax.models import families
from zerojax.models import family as family_lib
from zerojax.ops import attention
from zerojax.ops import fp8 as fp8_ops
from zerojax.optim import master_weights, pieces, registry, schedules
from zerojax.trainer import config as config_lib
from zerojax.trainer.adapters import start
from zerojax.trainer.checks import names
from zerojax.trainer.tuning import examples
from zerojax.zero import explicit, memory, placement, shard_state, stages, step, xla_options
from zerojax.zero import loss_scale as loss_scale_lib
from zerojax.zero.fp8 import modules as fp8_modules
from zerojax.zero.offload import blockwise, budget, kept, late_norm, layout
from zerojax.zero.offload import create as offload_create
from zerojax.zero.offload import params as params_on_host
from zerojax.zero.offload import settings as offload_settings
from zerojax.zero.sharded_batch import totals

DROPOUT = 1  # folded into the random key of a step


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that a run needs, except data and weights.

    Attributes:
      config, mesh: the settings and the devices.
      family, model: the model's family, and its config.
      sizes: the three batch sizes.
      partition: the shardings of the train state.
      baseline: the same run's shardings at stage 0, for comparison.
      train_step: (state, batch) -> (state, metrics); see `abstract_batch`.
      eval_loss: (params, a batch of one pass) -> float32[].
      source: the folder that the first weights are read from; None: they are drawn at random.
      tx: the optimizer that the state applies, with master weights where they are kept.
      create: (float32 weights) -> the initial state.
      copy_dtype: the dtype of the 16-bit weights stored with the master weights; None if there are none.
      loss_scale: the loss scale; None if the loss is not scaled.
      weights: where the weights come from, in a run with adapters; None for a run that trains all.
    """

    config: config_lib.Config
    mesh: Mesh
    sizes: config_lib.BatchSizes
    family: family_lib.Family
    model: Any
    tx: optax.GradientTransformation
    create: Callable[[Any], Any]
    partition: placement.Partition
    baseline: placement.Partition
    train_step: Callable[..., Any]
    eval_loss: Callable[..., Any]
    source: folder_lib.Folder | None
    copy_dtype: Any
    loss_scale: loss_scale_lib.LossScale | None
    weights: start.Weights | None = None

    @property
    def objective(self) -> objectives.Objective:
        """Returns the training objective of the model family."""
        return objectives.OBJECTIVES[self.family.objective]

    @property
    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding of a training batch's arrays."""
        return mesh_lib.batch_sharding(self.mesh, 0 if self.sizes.grad_accum == 1 else 1)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns an abstract training batch with shardings: {name: int32[(accum,) batch, length]}."""
        accum, rows = self.sizes.grad_accum, self.sizes.global_batch_size // self.sizes.grad_accum
        leading = (rows,) if accum == 1 else (accum, rows)
        return {
            name: jax.ShapeDtypeStruct((*leading, length), jnp.int32, sharding=self.batch_sharding)
            for name, length in self.lengths.items()
        }

    @property
    def lengths(self) -> Mapping[str, int]:
        """Returns the lengths of the arrays of a batch's rows, by name."""
        if self.config.data.task == tasks.TEXT:
            return self.objective.lengths(self.config.seq_len)
        return examples.lengths(self.config, self.family, self.model)

    @property
    def flops_per_token(self) -> float:
        """Returns the floating-point operations of training per token; a sequence has `seq_len` tokens."""
        if self.weights is None:
            return self.family.flops_per_token(self.model, self.lengths)
        # A frozen weight costs a forward and a backward matmul, and has no gradient of its own.
        trained = sum(math.prod(found.shape or ()) for found in self.partition.placements.values() if found.trainable)
        return self.family.flops_per_token(self.model, self.lengths, per_weight=4.0) + 6.0 * trained

    @property
    def fingerprints(self) -> dict[str, str]:
        """Returns what tells the frozen weights of a run apart from those of another, if they are read from a folder."""
        if self.weights is None or self.source is None:
            return {}
        return {"base": folder_lib.fingerprint(self.source)}

    @property
    def logical_abstract_state(self) -> Any:
        """Returns the abstract state in the form that checkpoints store, with shardings."""
        return self.to_logical(self.partition.abstract_state)

    def to_logical(self, state: Any) -> Any:
        """Returns a state, or a tree like it, in the form that checkpoints store; frozen weights are not in it."""
        if self.weights is None:
            return logical_lib.to_logical(state)
        return start.trained_part(self.partition, state)


def build(config: config_lib.Config, *, tokenizer_vocab: int = 0, devices: Sequence[Any] | None = None) -> Program:
    """Builds the program. Allocates nothing. Errors name config keys, the most basic first.

    Args:
      config: checked settings.
      tokenizer_vocab: the tokenizer's number of ids. 0 loads the tokenizer if the model's size depends on it.
      devices: the devices of the mesh; None takes all. Compile-only devices are allowed.

    Raises:
      UserError: settings contradict each other or the devices.
    """
    with names.of_config():
        return _build(config, tokenizer_vocab, devices)


def _build(config: config_lib.Config, tokenizer_vocab: int, devices: Sequence[Any] | None) -> Program:
    mesh = mesh_lib.make_mesh(config.mesh.replica, config.mesh.data, config.mesh.model, devices=devices)
    sizes = config_lib.batch_sizes(config, mesh_lib.ways(mesh))
    policy = precision.PRECISIONS[config.precision]
    loss_scale = config_lib.make_loss_scale(config.loss_scale, is_scaled=policy.scales_loss)
    source = _source(config.init_from) if config.init_from else None
    family, model = _model(config, source, mesh, policy.compute_dtype, tokenizer_vocab)
    schedule, inner = _optimizer(config, policy)
    offload = config_lib.make_offload(config.offload, config.zero.stage)
    # Params in host memory are sent in 16 bits, so these are stored beside the master weights. Adapters are few: they have no copy.
    is_cast_on_device = stages.STAGES[config.zero.stage].params and offload.params == offload_settings.NONE
    weights = _weights(config, family, model, source)
    copy_dtype = policy.copy_dtype(splits_params=is_cast_on_device) if weights is None else None
    tx = inner if copy_dtype is None else master_weights.with_master_weights(inner)

    params = family_lib.abstract_params(family.parts, model)
    trainable = ""
    if weights is not None:
        params = start.abstract_params(config.lora, weights.adapted, family, model, source, policy)
        family, trainable = families_lora.with_adapters(family, weights.adapted.chosen), weights.trainable
    fp8 = config_lib.make_fp8(config)
    # Of all weights: a state of adapters is made without the frozen ones.
    histories = (lambda: ()) if fp8 is None else functools.partial(fp8.init, params, blocks=family.blocks)
    how: dict[str, Any] = {"policy": policy, "loss_scale": loss_scale, "seed": config.seed, "trainable": trainable}
    how |= {"histories": histories, "has_late_norm": offload.late_norm}
    create = functools.partial(_state, tx=tx, inner=inner, copy_dtype=copy_dtype, **how)
    partition = stages.partition_state(
        jax.eval_shape(create, params),
        mesh=mesh,
        stage=config.zero.stage,
        overrides=config.zero.overrides,
        min_size=config.zero.min_size,
        indivisible=config.zero.indivisible,
        trainable=trainable,
        offload=offload,
    )
    _check_model_axis(partition)
    return Program(
        config=config,
        mesh=mesh,
        sizes=sizes,
        family=family,
        model=model,
        tx=tx,
        create=create,
        partition=partition,
        baseline=_baseline(params, create, policy if weights is None else None, mesh, trainable),
        **_functions(config, sizes, family, model, partition, policy.compute_dtype, schedule, loss_scale),
        source=source,
        copy_dtype=copy_dtype,
        loss_scale=loss_scale,
        weights=weights,
    )


def _weights(
    config: config_lib.Config, family: family_lib.Family, model: Any, source: folder_lib.Folder | None
) -> start.Weights | None:
    """Returns where the weights of a run with adapters come from; None for a run that trains all."""
    adapted = start.choose(config.lora, family, model)
    return None if adapted is None else start.Weights(adapted, family, model, source, config.seed)


def _functions(
    config: config_lib.Config,
    sizes: config_lib.BatchSizes,
    family: family_lib.Family,
    model: Any,
    partition: placement.Partition,
    compute_dtype: Any,
    schedule: Callable[[Any], Any],
    loss_scale: loss_scale_lib.LossScale | None,
) -> dict[str, Callable[..., Any]]:
    """Returns the program's train_step and eval_loss."""
    how: dict[str, Any] = {
        "compute_dtype": compute_dtype,
        "blocks": family.blocks,
        "heads": family_lib.heads(family, model),
    }

    def loss_fn(params: Any, batch: Any, state: Any) -> tuple[Any, dict]:
        is_dropped = config.model.dropout or (config.lora.is_on and config.lora.dropout)
        keys = (_dropout_key(state),) if is_dropped else ()
        loss, metrics = (
            _weighted(family.loss(model, params, batch, *keys), batch),
            {"learning_rate": schedule(state.step)},
        )
        if isinstance(loss, totals.Mean):
            metrics["labels"] = totals.Sum(loss.weight)
        return loss, {"metrics": metrics}

    fp8 = config_lib.make_fp8(config)
    return {
        "train_step": step.make_train_step(
            loss_fn,
            partition,
            fp8=fp8,
            clip_norm=config.optimizer.clip_norm,
            grad_accum=sizes.grad_accum,
            **{name: getattr(config.model, name) for name in ("remat", "recompute", "offload", "by_columns")},
            loss_scale=loss_scale,
            reduce_dtype=precision.DTYPES[config.reduce_dtype],
            accum_dtype=precision.DTYPES[config.accum_dtype],
            **how,
        ),
        "eval_loss": _eval_loss(
            lambda params, batch: _weighted(family.loss(model, params, batch), batch), partition, how, fp8
        ),
    }


def _dropout_key(state: Any) -> jax.Array:
    """Returns the random key of a step's dropout. Stochastic rounding folds the step alone into the state's."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step), DROPOUT)


def _weighted(loss: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
    """Returns the mean over the labels of a batch, such that it stays one over several batches."""
    if "labeled" not in batch:
        return loss
    labels = jnp.sum(batch["labeled"][:, 1:])
    return totals.Mean(loss * labels, labels)


def _eval_loss(
    loss_fn: Callable[..., Any], partition: placement.Partition, how: dict[str, Any], fp8: fp8_modules.Fp8 | None
) -> Callable[..., Any]:
    """Returns f(params, batch) -> the mean loss over all devices, with the arithmetic of the training step."""
    options = {} if fp8 is None else xla_options.for_fp8(partition.mesh, but=xla_flags.names())
    if fp8 is not None:
        modules = fp8_modules.chosen(fp8, partition.placements, how["blocks"])
        recipe = fp8_ops.TENSORWISE if fp8.recipe == fp8_ops.DELAYED else fp8.recipe  # no state, so no history
        loss_fn = fp8_modules.wrapped(loss_fn, modules, recipe)
    if params_on_host.are_on_host(partition):
        return blockwise.mean_of(loss_fn, partition, compiler_options=options, **how)
    return xla_options.jit(explicit.mean(loss_fn, partition, **how), options)


def family_of(config: config_lib.Config) -> tuple[family_lib.Family, folder_lib.Folder | None]:
    """Returns the family of a config's model and the folder that it is imported from, if it is."""
    source = _source(config.init_from) if config.init_from else None
    return families.PRESETS[config.model.preset] if source is None else source.family, source


def most_pinned_bytes(config: config_lib.Config) -> int:
    """Returns an upper bound of the bytes of host memory that all processes of a run pin together. Uses no device."""
    chosen = config_lib.make_offload(config.offload, config.zero.stage)
    if not chosen.is_on:
        return 0
    if offload_settings.HOST not in (chosen.optimizer, chosen.params):
        return 0  # what is in flight to a disk fits into the pool of XLA's own choice, or `budget` tells
    source = _source(config.init_from) if config.init_from else None
    family, model = _preset(config, 0) if source is None else _imported(config, source)
    policy = precision.PRECISIONS[config.precision]
    has_params = chosen.params != offload_settings.NONE  # with a 16-bit copy, as at stage 2
    stage = 2 if has_params else config.zero.stage
    each = memory.bytes_per_parameter(policy, stage, 1, moments=config.optimizer.moments)
    params, trainable = family_lib.abstract_params(family.parts, model), ""
    with warnings.catch_warnings(action="ignore"):  # `build` repeats them
        weights = _weights(config, family, model, source)
    if weights is not None:
        params = start.abstract_params(config.lora, weights.adapted, family, model, source, policy)
        trainable = weights.trainable
        each |= {roles.PARAMS: jnp.dtype(policy.weight_dtype).itemsize, roles.MASTER: 0.0}  # adapters have no copy
    of_opt_state = 0.0 if chosen.optimizer == offload_settings.NVME else each[roles.MASTER] + each[roles.MOMENTS]
    leaves = tree.flatten(params)
    trained = [leaf.size for path, leaf in leaves if re.search(trainable, path)]
    frozen = sum(tree.nbytes(leaf) for path, leaf in leaves if not re.search(trainable, path))
    of_params = (each[roles.PARAMS] * sum(trained) + frozen) if chosen.params == offload_settings.HOST else 0.0
    held = of_params * chosen.params_fraction + of_opt_state * sum(trained) * chosen.fraction
    new = chosen.in_flight * chosen.chunk_bytes
    new += budget.NEW_PARAMS.get(chosen.params, 0) * each[roles.PARAMS] * max(trained)
    return round(held * config.mesh.replica + new)


def init_state(program: Program) -> Any:
    """Returns the initial state, created with the partition's shardings.

    Weights are read from the program's source, or else drawn in float32 and cast, part by part. Equal parts share one compiled function.
    """
    if program.weights is not None:
        return program.weights.first_state(program.create, program.partition)
    abstract_params = logical_lib.to_logical(program.partition.on_device.abstract_state).params
    source = program.source

    def create(params: Any) -> Any:
        # The optimizer's state is that of the weights without padding.
        on_device = program.partition.on_device
        state = program.create(shard_state.unpad({"params": params}, on_device)["params"])
        return shard_state.pad(state, on_device)

    if program.partition.offload:
        parts = (
            _drawn_parts(program, abstract_params) if source is None else folder_lib.read_parts(source, abstract_params)
        )
        place = {path: number for number, (path, _) in enumerate(tree.flatten(abstract_params))}
        numbered = ({place[f"{name}/{path}"]: leaf for path, leaf in tree.flatten(part)} for name, part in parts)
        wanted, keep = program.partition.abstract_state, offload_create.begin(program.partition)
        leaves = offload_create.from_parts(
            create, abstract_params, numbered, wanted, keep, donate=program.copy_dtype is None
        )
        return jax.tree.unflatten(jax.tree.structure(program.partition.abstract_state), leaves)
    params = (
        dict(_drawn_parts(program, abstract_params))
        if source is None
        else folder_lib.read_params(source, abstract_params)
    )
    return jax.jit(create, out_shardings=program.partition.shardings, donate_argnums=0)(params)


def _drawn_parts(program: Program, abstract_params: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the weights of each part of the model, drawn from the run's seed."""
    key = jax.random.key(program.config.seed)
    compiled: list[tuple[nn.Module, Any, Callable[..., Any]]] = []
    for number, (name, (module, inputs)) in enumerate(
        family_lib.parts_to_initialise(program.family.parts, program.model).items()
    ):
        abstract = abstract_params[name]
        init = next((init for known, leaves, init in compiled if (known, leaves) == (module, abstract)), None)
        if init is None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
            init = jax.jit(functools.partial(_init_part, module, inputs, abstract), out_shardings=shardings)
            compiled.append((module, abstract, init))
        yield name, init(key, number)


def open_feed(
    program: Program,
    tokenizer: tokenizer_lib.Tokenizer,
    data_dir: str | os.PathLike,
    pairs: splits.Splits | None = None,
) -> feed.Feed:
    """Returns the feed of the program's batches, of text or of examples with answers; see `feed.Feed`."""
    config = program.config
    return feed.Feed(
        program.mesh,
        tokenizer,
        program.objective,
        name=config.data.name,
        text_key=config.data.text_key,
        train_split=config.data.train_split,
        eval_split=config.data.eval_split,
        data_dir=data_dir,
        global_batch_size=program.sizes.global_batch_size,
        grad_accum=program.sizes.grad_accum,
        seq_len=config.seq_len,
        seed=config.seed,
        eval_batches=config.evaluate.batches,
        train_file=config.data.train_file,
        eval_file=config.data.eval_file,
        pairs=pairs,
    )


def held_out_loss(
    program: Program, batches: feed.Feed, params: Any, check: Callable[[], object] = lambda: None
) -> float | None:
    """Returns the mean loss over the first `evaluate.batches` global batches of held-out text, or None if there is none.

    Calls `check` before each batch; it may raise to give up.
    """

    def measure(batch: Any) -> Any:
        watch.at(watch.EVALUATE)
        check()
        return program.eval_loss(params, batch)

    return batches.held_out_mean(measure, program.config.evaluate.batches)


def restored_state(program: Program, logical: Any, keep: kept.Keep, *, rescales: bool = False) -> Any:
    """Returns the state from its checkpointed form (see `logical_lib.to_logical`), whose buffers are donated.

    `keep` brought what is offloaded to where it lives (see `offload.create.begin`), and so brings the rest of it.

    A loss scale that the checkpoint lacks has abstract leaves and is initialised. With `rescales`, a restored loss scale is initialised
    too, but keeps its count of skipped steps.
    """
    is_lacking = _is_lacking(logical.loss_scale)
    if _is_lacking(logical.fp8):  # its histories begin anew
        logical = logical.replace(fp8=jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), logical.fp8))

    if _is_lacking(logical.last_norm):  # the next step takes its own
        logical = logical.replace(last_norm=np.float32(late_norm.UNKNOWN))

    def restore(logical: Any) -> Any:
        state = _with_copy(program, logical, keep).replace(tx=program.tx)
        if not program.loss_scale or not (is_lacking or rescales):
            return state
        skipped = {} if is_lacking else {"skipped_steps": state.loss_scale.skipped_steps}
        return state.replace(loss_scale=program.loss_scale.init()._replace(**skipped))

    logical = logical.replace(loss_scale=()) if is_lacking else logical
    if program.weights is not None:
        state = restore(logical)
        return program.weights.with_frozen(_with_small_fields(program, state), program.partition, keep)
    if program.partition.offload:  # leaves in host memory pass through no program
        return _with_small_fields(program, restore(logical))
    return jax.jit(restore, out_shardings=program.partition.shardings, donate_argnums=0)(logical)


def _with_small_fields(program: Program, state: Any) -> Any:
    """Returns a state whose loss scale, histories and last norm are on the devices."""
    wanted = program.partition.shardings
    return state.replace(
        **{
            name: jax.device_put(getattr(state, name), getattr(wanted, name))
            for name in ("loss_scale", "fp8", late_norm.FIELD)
        }
    )


def _is_lacking(field: Any) -> bool:
    """Returns whether a checkpoint lacked a part of a field of the state."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(field))


def _with_copy(program: Program, logical: Any, keep: kept.Keep) -> Any:
    """Returns the state of a checkpoint's form: params are copied from the master weights, if there are any."""
    if not program.partition.offload or program.copy_dtype is None:
        return logical_lib.from_logical(logical, program.copy_dtype)
    wanted = program.partition.abstract_state.params

    def copied(leaf: Any, like: Any) -> Any:
        copy = offload_create.copied(leaf, layout.as_on_device(like))
        return keep(copy, like) if layout.is_on_host(like) else copy

    params = jax.tree.map(copied, logical.params, wanted, is_leaf=pieces.is_pieces)
    return logical.replace(
        params=params, opt_state=master_weights.MasterWeightsState(logical.params, logical.opt_state)
    )


def _init_part(module: nn.Module, inputs: family_lib.Inputs, abstract: Any, key: jax.Array, number: int) -> Any:
    """Initialises the weights of part `number` as `abstract` describes them: with its dtype, and zeros where the partition pads a leaf."""
    arrays = [jnp.zeros(like.shape, like.dtype) for like in inputs]
    params = module.init(jax.random.fold_in(key, number), *arrays)["params"]

    def fit(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.pad(leaf, [(0, want - have) for want, have in zip(like.shape, leaf.shape)]).astype(like.dtype)

    return jax.tree.map(fit, params, abstract)


def _state(
    params: Any,
    *,
    policy: precision.Precision,
    tx: Any,
    inner: Any,
    copy_dtype: Any,
    loss_scale: Any,
    seed: int,
    trainable: str,
    histories: Callable[[], Any],
    has_late_norm: bool,
) -> Any:
    # Where weights are frozen, all have their dtypes already.
    weights = precision.cast_floating(params, policy.weight_dtype) if not trainable else params
    part = shard_state.trained_params(weights, trainable)
    last_norm = late_norm.first_norm() if has_late_norm else ()
    fields = {"loss_scale": _first_scale(loss_scale), "fp8": histories(), late_norm.FIELD: last_norm}
    logical = train_state.create(part, inner, jax.random.key(seed), **fields)
    logical = logical.replace(params=weights)
    return logical_lib.from_logical(logical, copy_dtype).replace(tx=tx)


def _first_scale(loss_scale: loss_scale_lib.LossScale | None) -> Any:
    return () if loss_scale is None else loss_scale.init()


def _baseline(
    params: Any, create: Any, policy: precision.Precision | None, mesh: Mesh, trainable: str
) -> placement.Partition:
    """Returns the partition at stage 0: everything is replicated, with a 16-bit copy of the weights if the precision needs one."""
    state = create if policy is None else functools.partial(create, copy_dtype=policy.copy_dtype(splits_params=False))
    return stages.partition_state(jax.eval_shape(state, params), mesh=mesh, stage=0, trainable=trainable)


def _model(
    config: config_lib.Config,
    source: folder_lib.Folder | None,
    mesh: Mesh,
    compute_dtype: Any,
    tokenizer_vocab: int,
) -> tuple[family_lib.Family, Any]:
    """Returns the family and the config of the source's model, or of the preset with its derived fields set."""
    family, model = _preset(config, tokenizer_vocab) if source is None else _imported(config, source)
    name = f"config.model.preset={config.model.preset}" if source is None else str(source.path)
    if model.vocab_size < tokenizer_vocab:
        way_out = f"set --config.model.vocab_size={tokenizer_vocab}" if source is None else "choose its own tokenizer"
        raise UserError(
            f"config.model.vocab_size: {model.vocab_size} is smaller than the {tokenizer_vocab} ids of config.data.tokenizer; {way_out}"
        )
    if model.max_seq_len and config.seq_len > model.max_seq_len:
        raise UserError(
            f"config.seq_len: {config.seq_len} is longer than the {model.max_seq_len} positions of {name}; "
            f"set --config.seq_len={model.max_seq_len} or less"
        )
    if config.data.task == tasks.TEXT:
        objectives.OBJECTIVES[family.objective].lengths(config.seq_len)  # refuses lengths that are too short
    else:
        examples.lengths(config, family, model)
    platform = mesh_lib.platform(mesh)
    chosen = attention.choose_kernel(config.model.attention, family.attention, platform, compute_dtype, config.seq_len)
    if config.model.dropout and not hasattr(model, "dropout"):
        raise UserError(
            f"config.model.dropout: is {config.model.dropout}, and the model of {name} has no dropout; set --config.model.dropout=0"
        )
    dropout = {"dropout": config.model.dropout} if config.model.dropout else {}
    return family, dataclasses.replace(model, attention=chosen, **dropout)


def _source(path: str) -> folder_lib.Folder:
    """Opens the folder that `config.init_from` names."""
    files.check_path(path, "config.init_from")
    try:
        return folder_lib.open_folder(path)
    except UserError as error:
        raise UserError(f"config.init_from: {error}") from error


def _preset(config: config_lib.Config, tokenizer_vocab: int) -> tuple[family_lib.Family, Any]:
    chosen = config.model
    family = families.PRESETS[chosen.preset]
    preset = family.presets[chosen.preset]
    vocab = (
        chosen.vocab_size
        or preset.vocab_size
        or tokenizer_vocab
        or tokenizer_lib.load_tokenizer(config.data.tokenizer).vocab_size
    )
    return family, dataclasses.replace(preset, vocab_size=vocab, num_layers=chosen.num_layers or preset.num_layers)


def _imported(config: config_lib.Config, source: folder_lib.Folder) -> tuple[family_lib.Family, Any]:
    for name in ("vocab_size", "num_layers"):
        value = getattr(config.model, name)
        if value:
            raise UserError(
                f"config.model.{name}: is {value}, and config.init_from={config.init_from} has its own model of "
                f"{name}={getattr(source.model, name)}; set --config.model.{name}=0"
            )
    return source.family, source.model


def _check_model_axis(partition: placement.Partition) -> None:
    """Raises a UserError if devices along `model` would only repeat each other's work."""
    size = partition.mesh.shape[mesh_lib.MODEL]
    if size > 1 and not any(mesh_lib.MODEL in specs.axes(leaf.sharded) for leaf in partition.leaves.values()):
        raise UserError(
            f"config.mesh.model: is {size}, and no weight is sharded over `model`, so its devices would repeat each other's work; "
            "name weights in config.zero.overrides, or set --config.mesh.model=1"
        )


def _optimizer(
    config: config_lib.Config, policy: precision.Precision
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
    tx = registry.make_optimizer(
        chosen.name,
        schedule,
        b1=chosen.b1,
        b2=chosen.b2,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        weight_decay_on=chosen.weight_decay_on,
        moments=chosen.moments,
        rounds_weights=policy.rounds_stochastically,
    )
    return schedule, tx
