"""Builds a training program from settings, before anything is allocated. This module is where the rooms meet:
config -> mesh -> model -> optimizer -> abstract state -> partition (the stage acts here, once) -> train and evaluation steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from zerojax import mesh as mesh_lib
from zerojax import precision, train_state
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError
from zerojax.models import llama, presets
from zerojax.optim import master_weights, registry
from zerojax.trainer import config as config_lib
from zerojax.trainer import loss_scale_config
from zerojax.zero import explicit, placement, stages, step, where_used
from zerojax.zero import loss_scale as loss_scale_lib

BLOCKS, HEADS = r"layer_\d+", "head"


@dataclasses.dataclass(frozen=True)
class Program:
    """All that a run needs but data and weights.

    Attributes:
      config, mesh, model: the settings, the devices and the model's shape.
      sizes: the three batch sizes.
      partition: the placement of the train state.
      baseline: the same run's placement at stage 0, to compare with.
      train_step: (state, {"tokens": int32[(accum,) batch, length + 1]}) -> (state, metrics).
      eval_loss: (params, tokens: int32[batch, length + 1]) -> float32[].
      logits: (params, tokens: int32[batch, length]) -> float32[batch, length, vocab].
      tx: the optimizer as the state applies it.
      create: (float32 weights) -> the first state.
      copy_dtype: the dtype of the 16-bit weights kept beside the master weights; None where none are kept.
      loss_scale: what scales the loss; None where nothing does.
    """

    config: config_lib.Config
    mesh: Mesh
    sizes: config_lib.BatchSizes
    model: llama.LlamaConfig
    tx: optax.GradientTransformation
    create: Callable[[Any], Any]
    partition: placement.Partition
    baseline: placement.Partition
    train_step: Callable[..., Any]
    eval_loss: Callable[..., Any]
    logits: Callable[..., Any]
    copy_dtype: Any
    loss_scale: loss_scale_lib.LossScale | None

    @property
    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding of a training batch's tokens."""
        return mesh_lib.batch_sharding(self.mesh, 0 if self.sizes.grad_accum == 1 else 1)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns a training batch, abstract and placed."""
        accum, rows = self.sizes.grad_accum, self.sizes.global_batch_size // self.sizes.grad_accum
        shape = (rows, self.config.seq_len + 1) if accum == 1 else (accum, rows, self.config.seq_len + 1)
        return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)}

    @property
    def logical_abstract_state(self) -> Any:
        """Returns the state as checkpoints store it, abstract and placed."""
        return logical_lib.to_logical(self.partition.abstract_state)


def build(config: config_lib.Config, *, tokenizer_vocab: int = 0, devices: Sequence[Any] | None = None) -> Program:
    """Builds the program; allocates nothing.

    Args:
      config: checked settings.
      tokenizer_vocab: the tokenizer's number of ids; 0 looks it up where the model's size depends on it.
      devices: the devices to lay out; all where None. Compile-only devices will do.

    Raises:
      UserError: settings that contradict each other or the devices.
    """
    mesh = mesh_lib.make_mesh(config.mesh.replica, config.mesh.data, config.mesh.model, devices=devices)
    sizes = config_lib.batch_sizes(config, mesh_lib.ways(mesh))
    policy = precision.PRECISIONS[config.precision]
    loss_scale = loss_scale_config.make(policy.scales_loss, **dataclasses.asdict(config.loss_scale))
    model = _model(config, mesh, policy.compute_dtype, tokenizer_vocab)
    schedule, inner = _optimizer(config, policy)
    copy_dtype = policy.copy_dtype(splits_params=stages.STAGES[config.zero.stage].params)
    tx = inner if copy_dtype is None else master_weights.with_master_weights(inner)

    network = llama.Llama(model)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    plain = llama.Llama(dataclasses.replace(model, attention="xla"))  # shapes only; cuDNN traces on GPUs alone
    params = jax.eval_shape(lambda tokens: plain.init(jax.random.key(0), tokens), tokens)["params"]
    create = functools.partial(
        _state, policy=policy, tx=tx, inner=inner, copy_dtype=copy_dtype, loss_scale=loss_scale, seed=config.seed
    )
    partition = stages.partition_state(
        jax.eval_shape(create, params),
        mesh=mesh,
        stage=config.zero.stage,
        overrides=config.zero.overrides,
        min_size=config.zero.min_size,
        indivisible=config.zero.indivisible,
    )
    return Program(
        config=config,
        mesh=mesh,
        sizes=sizes,
        model=model,
        tx=tx,
        create=create,
        partition=partition,
        baseline=_baseline(params, create, policy, mesh),
        **_functions(config, sizes, network, partition, policy.compute_dtype, schedule, loss_scale),
        copy_dtype=copy_dtype,
        loss_scale=loss_scale,
    )


def _functions(
    config: config_lib.Config,
    sizes: config_lib.BatchSizes,
    network: llama.Llama,
    partition: placement.Partition,
    compute_dtype: Any,
    schedule: Callable[[Any], Any],
    loss_scale: loss_scale_lib.LossScale | None,
) -> dict[str, Callable[..., Any]]:
    """Returns the program's train_step, eval_loss and logits."""
    how: dict[str, Any] = {"compute_dtype": compute_dtype, "blocks": BLOCKS, "heads": HEADS}

    def mean_loss(params: Any, tokens: jax.Array) -> Any:
        return network.apply({"params": params}, tokens, method="loss")

    def loss_fn(params: Any, batch: Any, state: Any) -> tuple[jax.Array, dict]:
        return mean_loss(params, batch["tokens"]), {"metrics": {"learning_rate": schedule(state.step)}}

    def logits(params: Any, tokens: jax.Array) -> Any:
        return network.apply({"params": params}, tokens)

    return {
        "train_step": step.make_train_step(
            loss_fn,
            partition,
            clip_norm=config.optimizer.clip_norm,
            grad_accum=sizes.grad_accum,
            **{name: getattr(config.model, name) for name in ("remat", "recompute", "offload")},
            loss_scale=loss_scale,
            reduce_dtype=precision.DTYPES[config.reduce_dtype],
            **how,
        ),
        "eval_loss": jax.jit(explicit.mean(mean_loss, partition, **how)),
        "logits": where_used.where_used(logits, partition.placements, remat="full", **how),
    }


def init_state(program: Program) -> Any:
    """Returns the first state, every leaf born where the partition puts it.

    Weights are initialised in float32 part by part; equal parts share one compiled function.
    """
    key = jax.random.key(program.config.seed)
    wanted = program.logical_abstract_state.params
    params: dict[str, Any] = {}
    compiled: list[tuple[nn.Module, Any, Callable[..., Any]]] = []
    for number, (name, (module, example)) in enumerate(llama.parts(_any_device(program.model)).items()):
        init = next((init for known, leaves, init in compiled if (known, leaves) == (module, wanted[name])), None)
        if init is None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted[name])
            init = jax.jit(functools.partial(_init_part, module, example, wanted[name]), out_shardings=shardings)
            compiled.append((module, wanted[name], init))
        params[name] = init(key, number)
    return jax.jit(program.create, out_shardings=program.partition.shardings, donate_argnums=0)(params)


def restored_state(program: Program, logical: Any, *, rescales: bool = False) -> Any:
    """Returns the state made from its checkpointed form (see `logical_lib.to_logical`); the form is used up.

    A loss scale that the checkpoint lacked, whose leaves then are abstract, starts afresh; another does if `rescales`, but for its count.
    """
    is_lacking = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(logical.loss_scale))

    def restore(logical: Any) -> Any:
        state = logical_lib.from_logical(logical, program.copy_dtype).replace(tx=program.tx)
        if not program.loss_scale or not (is_lacking or rescales):
            return state
        skipped = {} if is_lacking else {"skipped_steps": state.loss_scale.skipped_steps}
        return state.replace(loss_scale=program.loss_scale.init()._replace(**skipped))

    logical = logical.replace(loss_scale=()) if is_lacking else logical
    return jax.jit(restore, out_shardings=program.partition.shardings, donate_argnums=0)(logical)


def _init_part(module: nn.Module, example: jax.ShapeDtypeStruct, wanted: Any, key: jax.Array, number: int) -> Any:
    """Initialises the weights of the module of this number, with zeros where the partition padded a leaf."""
    params = module.init(jax.random.fold_in(key, number), jnp.zeros(example.shape, example.dtype))["params"]

    def fit(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.pad(leaf, [(0, want - have) for want, have in zip(like.shape, leaf.shape)])

    return jax.tree.map(fit, params, wanted)


def _state(
    params: Any, *, policy: precision.Precision, tx: Any, inner: Any, copy_dtype: Any, loss_scale: Any, seed: int
) -> Any:
    weights = precision.cast_floating(params, policy.weight_dtype)
    logical = train_state.create(weights, inner, jax.random.key(seed), loss_scale=_first_scale(loss_scale))
    return logical_lib.from_logical(logical, copy_dtype).replace(tx=tx)


def _first_scale(loss_scale: loss_scale_lib.LossScale | None) -> Any:
    return () if loss_scale is None else loss_scale.init()


def _baseline(params: Any, create: Any, policy: precision.Precision, mesh: Mesh) -> placement.Partition:
    """Returns what stage 0 would hold: everything whole, and a copy to compute with where that is in fewer bits."""
    state = functools.partial(create, copy_dtype=policy.copy_dtype(splits_params=False))
    return stages.partition_state(jax.eval_shape(state, params), mesh=mesh, stage=0)


def _model(config: config_lib.Config, mesh: Mesh, compute_dtype: Any, tokenizer_vocab: int) -> llama.LlamaConfig:
    """Fills the preset's open fields."""
    chosen = config.model
    if chosen.preset not in presets.PRESETS:
        known = ", ".join(presets.PRESETS)
        raise UserError(f"config.model.preset: must be one of {known}, and is {chosen.preset!r}")
    preset = presets.PRESETS[chosen.preset]
    vocab = (
        chosen.vocab_size
        or preset.vocab_size
        or tokenizer_vocab
        or tokenizer_lib.load_tokenizer(config.data.tokenizer).vocab_size
    )
    if vocab < tokenizer_vocab:
        raise UserError(
            f"config.model.vocab_size: {vocab} is smaller than the tokenizer's {tokenizer_vocab} ids; "
            f"set --config.model.vocab_size={tokenizer_vocab}"
        )
    if config.seq_len > preset.max_seq_len:
        raise UserError(
            f"config.seq_len: {config.seq_len} is longer than the {preset.max_seq_len} positions of preset {chosen.preset}"
        )
    return dataclasses.replace(
        preset,
        vocab_size=vocab,
        num_layers=chosen.num_layers or preset.num_layers,
        attention=_attention(chosen.attention, mesh.devices.flat[0].platform, compute_dtype),
    )


def _any_device(model: llama.LlamaConfig) -> llama.LlamaConfig:
    """Returns the model for tracing its initialisation: cuDNN's attention refuses float32 weights and other devices."""
    return dataclasses.replace(model, attention="xla")


def _attention(wanted: str, platform: str, compute_dtype: Any) -> Literal["xla", "cudnn"]:
    """Picks the attention kernel: cuDNN's on GPUs for 16-bit floats, XLA's elsewhere."""
    can_cudnn = platform in ("gpu", "cuda") and compute_dtype != jnp.float32
    if wanted == "cudnn" and not can_cudnn:
        raise UserError(
            f"config.model.attention: cudnn needs an NVIDIA GPU and 16-bit arithmetic; this run has {platform} and "
            f"{jnp.dtype(compute_dtype).name}; set --config.model.attention=xla"
        )
    return "cudnn" if wanted == "cudnn" or (wanted == "auto" and can_cudnn) else "xla"


def _optimizer(
    config: config_lib.Config, policy: precision.Precision
) -> tuple[registry.Schedule, optax.GradientTransformation]:
    chosen = config.optimizer
    schedule = registry.make_schedule(
        chosen.schedule, chosen.learning_rate, chosen.warmup_steps, config.steps, chosen.final_fraction
    )
    tx = registry.make_optimizer(
        chosen.name,
        schedule,
        b1=chosen.b1,
        b2=chosen.b2,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        moments=chosen.moments,
        rounds_weights=policy.rounds_stochastically,
    )
    return schedule, tx
