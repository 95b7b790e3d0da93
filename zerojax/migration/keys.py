"""The keys of a DeepSpeed config. This module is the table of what each one becomes here, and why.

`translate` reads the values; this table decides what the report says of a key. A pattern's last part may be "*", which stands for
everything below. Sources: DeepSpeed 0.19 (`runtime/config.py`, `runtime/zero/config.py`, `runtime/constants.py`) and its older names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

TAKEN, IMPLIED, NO_EFFECT, ASSUMED, UNSUPPORTED = "taken", "implied", "no effect", "assumed", "not supported"
VERDICTS = (TAKEN, IMPLIED, NO_EFFECT, ASSUMED, UNSUPPORTED)


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key becomes."""

    verdict: str  # one of VERDICTS
    why: str = ""  # the reason, or what differs here
    into: tuple[str, ...] = ()  # the settings that it decides, by their places in a config ("zero.stage")
    # values with which the key asks for nothing; they are reported as without effect. A truth value is no number: True is not 1.
    off: tuple[Any, ...] = ()


OFF = (None, False, 0, "none", "no", "off", "")  # what an option that is not used holds
ONE = (None, 0, 1)  # what a number of devices holds where there is no such parallelism


def _taken(into: str, why: str = "") -> Key:
    return Key(TAKEN, why, tuple(into.split()))


def _implied(why: str) -> Key:
    return Key(IMPLIED, why)


def _no_effect(why: str) -> Key:
    return Key(NO_EFFECT, why)


def _unsupported(why: str, *off: Any) -> Key:
    return Key(UNSUPPORTED, why, (), off)


_BUCKETS = "XLA merges and schedules collectives itself; a block's are one collective each"
_GATHERED = "at stage 3 one block's weights are gathered at a time, and the next block's while it runs"
_ONE_ARRAY = "state is made of global arrays, which are already contiguous on each device"
_CHECKPOINTS = "a checkpoint holds global arrays and restores at any stage and number of devices"
_HOST_STATE = "state in host memory is pinned and moves in chunks: config.offload.chunk_bytes, config.offload.in_flight"
_NVME = "a disk is read and written by threads of our own; config.offload.nvme_buffers"
_PROFILE = "--config.profile.steps=2 traces steps and prints a table of their time"
EXPERTS = "DeepSpeed's layer of experts is not read; a family with experts shards them over config.mesh.expert"
PIPE = "layers are divided by their foretold times, or FLOPs, and passes of config.grad_accum are its micro-batches"
CONTEXT = "each device has a part of every sequence, and attention exchanges heads or keys, whichever the run says"
TENSOR = "heads, the MLP's width, the vocabulary and, between matmuls, tokens are sharded, at any stage"
_NO_FEEDBACK = "LoCo's error is a moving average that is reset; config.wire.error_feedback adds the last error instead"
_NOT_FINITE = "a step whose numbers are not finite is not skipped: it ends the run, and is not saved"
_AVERAGED = "gradients are averaged in float32, where the order of scaling does not matter"
_ONE_BIT = "gradients are summed uncompressed; the optimizer without compression is taken"

KEYS: Mapping[str, Key] = {
    # Batch
    "train_batch_size": _taken("global_batch_size"),
    "train_micro_batch_size_per_gpu": _taken("micro_batch_size"),
    "gradient_accumulation_steps": _taken(
        "grad_accum", "0 (derived) where the global batch and the micro-batch are given"
    ),
    "managed_gradient_accumulation": _unsupported(
        "the step accumulates in one compiled program, and leaves no part of it to a script", None, True
    ),
    "sequence_parallel_size": Key(TAKEN, CONTEXT, ("mesh.context",), ONE),
    "seq_parallel_communication_data_type": _no_effect("activations are sent in the compute dtype"),
    "data_parallel_size": _implied("the mesh takes all devices"),
    "dataloader_drop_last": _implied("the data are an endless stream of full batches"),
    "use_data_before_expert_parallelism": _no_effect(
        "devices along config.mesh.expert are neighbours of data and context"
    ),
    # ZeRO
    "zero_optimization.stage": _taken("zero.stage"),
    "zero_optimization.stage3_param_persistence_threshold": _taken(
        "zero.min_size", "for moments and gradients too, at every stage"
    ),
    "zero_optimization.contiguous_gradients": _implied(_ONE_ARRAY),
    "zero_optimization.reduce_scatter": _implied("gradients are reduce-scattered wherever they are stored sharded"),
    "zero_optimization.reduce_bucket_size": _no_effect(_BUCKETS),
    "zero_optimization.use_multi_rank_bucket_allreduce": _no_effect(_BUCKETS),
    "zero_optimization.allgather_partitions": _implied("updated weights are all-gathered"),
    "zero_optimization.allgather_bucket_size": _no_effect(_BUCKETS),
    "zero_optimization.overlap_comm": _implied("a block's collectives run beside its neighbours' matmuls"),
    "zero_optimization.load_from_fp32_weights": _unsupported(
        "a checkpoint is restored with the float32 weights that it holds", None, True
    ),
    "zero_optimization.elastic_checkpoint": _implied(_CHECKPOINTS),
    "zero_optimization.sub_group_size": _no_effect("an update runs leaf by leaf, without sub-groups"),
    "zero_optimization.ignore_unused_parameters": _unsupported(
        "weights that the loss does not read are no error: JAX gives them zero gradients", None, True
    ),
    "zero_optimization.legacy_stage1": _no_effect("there is one stage 1"),
    "zero_optimization.round_robin_gradients": _no_effect("each device holds an equal shard of every gradient"),
    "zero_optimization.stage3_prefetch_bucket_size": _no_effect(_GATHERED),
    "zero_optimization.stage3_model_persistence_threshold": _no_effect(
        "zero.min_size alone decides what stays replicated"
    ),
    "zero_optimization.stage3_max_live_parameters": _no_effect(_GATHERED),
    "zero_optimization.stage3_max_reuse_distance": _no_effect(_GATHERED),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _implied(
        "a checkpoint holds full arrays; config.export.format=huggingface writes 16-bit safetensors"
    ),
    "zero_optimization.stage3_module_granularity_threshold": _no_effect(_GATHERED),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _no_effect("weights are all-gathered"),
    "zero_optimization.stage3_allgather_sequential": _no_effect(_BUCKETS),
    "zero_optimization.zero_hpz_partition_size": Key(
        TAKEN,
        "each host of so many devices keeps a copy of the weights from the forward to the backward pass",
        ("wire.second_copy", "wire.host_devices"),
        ONE,
    ),
    "zero_optimization.zero_quantized_weights": Key(
        TAKEN, "weights travel in int8, 256 to a scale; frozen ones too", ("wire.weights",), OFF
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": _unsupported(
        "frozen weights are gathered as others are (config.wire.weights), and stored in few bits by config.lora.quantize",
        *OFF,
    ),
    "zero_optimization.zero_quantized_gradients": Key(
        TAKEN,
        "int8 inside a host, and int4 between hosts where zero_hpz_partition_size tells a host's devices; otherwise int8",
        ("wire.gradients",),
        OFF,
    ),
    "zero_optimization.zeropp_loco_param": _unsupported(_NO_FEEDBACK, *OFF),
    "zero_optimization.zeropp_loco_param.*": _unsupported(_NO_FEEDBACK),
    "zero_optimization.mics_shard_size": Key(
        TAKEN,
        "state is sharded within as many devices, and replicated beyond",
        ("mesh.replica", "mesh.data"),
        (-1, None),
    ),
    "zero_optimization.mics_hierarchical_params_gather": _no_effect("XLA chooses the steps of a gather"),
    "zero_optimization.memory_efficient_linear": _implied("the backward pass gathers weights again and keeps none"),
    "zero_optimization.pipeline_loading_checkpoint": _no_effect(_NVME),
    "zero_optimization.override_module_apply": _no_effect("models are not patched"),
    "zero_optimization.log_trace_cache_warnings": _no_effect("the order of blocks is fixed when the step is compiled"),
    "zero_optimization.enable_sanity_checks": _no_effect("shapes and shardings are checked when the step is compiled"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _no_effect(
        "a momentum is optimizer state: config.offload.optimizer says where it lives"
    ),
    "zero_optimization.leaf_module.*": _implied(
        "the model family says which modules are blocks; `blocks=` in your own step"
    ),
    "zero_optimization.offload_optimizer.device": Key(
        TAKEN, "cpu: pinned host memory", ("offload.optimizer",), ("none", None)
    ),
    "zero_optimization.offload_optimizer.nvme_path": Key(
        TAKEN, "with device: nvme", ("offload.nvme_path",), ("", None)
    ),
    "zero_optimization.offload_optimizer.ratio": Key(TAKEN, "", ("offload.fraction",), (1, None)),
    "zero_optimization.offload_optimizer.super_offload": _unsupported("there is one way of offloading", *OFF),
    "zero_optimization.offload_optimizer.*": _no_effect(_HOST_STATE),
    "zero_optimization.offload_param.device": Key(
        TAKEN, "cpu: pinned host memory", ("offload.params",), ("none", None)
    ),
    "zero_optimization.offload_param.nvme_path": Key(TAKEN, "with device: nvme", ("offload.nvme_path",), ("", None)),
    "zero_optimization.offload_param.*": _no_effect(_HOST_STATE),
    "zero_optimization.zenflow": _unsupported("every weight is updated in every step", *OFF),
    "zero_optimization.zenflow.*": _unsupported("every weight is updated in every step"),
    "zero_allow_untested_optimizer": _implied("any optax transformation is sharded by the same rule"),
    "zero_force_ds_cpu_optimizer": _no_effect("updates are computed on the devices"),
    # Precision
    "bf16.enabled": _taken("precision", "float32 master weights, as in DeepSpeed"),
    "bf16.immediate_grad_update": _no_effect("gradients are added up in config.reduce_dtype"),
    "bf16.check_grad_overflow": _no_effect(_NOT_FINITE),
    "bf16.check_overflow": _no_effect(_NOT_FINITE),
    "bf16.auto_cast": _implied("floating inputs are cast to the compute dtype"),
    "bf16.bf16_master_weights_and_grads": Key(
        TAKEN, "bf16 weights without master weights, rounded stochastically", ("precision",), (False, None)
    ),
    "bf16.bf16_optimizer_states": Key(TAKEN, "", ("optimizer.moments",), (False, None)),
    "bf16.loss_scale": _no_effect("bf16 needs no loss scale"),
    "bf16.initial_scale_power": _no_effect("bf16 needs no loss scale"),
    "bf16.loss_scale_window": _no_effect("bf16 needs no loss scale"),
    "bf16.hysteresis": _no_effect("bf16 needs no loss scale"),
    "bf16.min_loss_scale": _no_effect("bf16 needs no loss scale"),
    "fp16.enabled": _taken("precision"),
    "fp16.auto_cast": _implied("floating inputs are cast to the compute dtype"),
    "fp16.loss_scale": _taken("loss_scale.static", "0 is dynamic in both"),
    "fp16.initial_scale_power": _taken("loss_scale.init_scale", "2 to this power"),
    "fp16.loss_scale_window": _taken("loss_scale.window"),
    "fp16.hysteresis": _taken("loss_scale.hysteresis", "at stage 0 too, where DeepSpeed ignores it"),
    "fp16.consecutive_hysteresis": _taken("loss_scale.consecutive_hysteresis"),
    "fp16.min_loss_scale": _taken("loss_scale.min_scale"),
    "fp16.fp16_master_weights_and_grads": _unsupported("fp16 weights have float32 master weights", *OFF),
    "fp16.fp16_opt_level": _no_effect("it belongs to apex"),
    "fp16.opt_level": _no_effect("it belongs to apex"),
    "fp16.fp16_scale_tolerance": _no_effect("DeepSpeed does not read it"),
    "amp.enabled": _unsupported("apex is PyTorch's; precision fp16 is taken instead", *OFF),
    "amp.*": _no_effect("apex is PyTorch's; precision fp16 has DeepSpeed's loss scale"),
    "torch_autocast.enabled": _taken("precision", "all arithmetic but norms and softmax is in that dtype"),
    "torch_autocast.dtype": _taken("precision"),
    "torch_autocast.lower_precision_safe_modules": _unsupported(
        "one compute dtype holds for all modules; norms and softmax are float32", *OFF
    ),
    "data_types.grad_accum_dtype": _taken("accum_dtype", "gradients of several passes add up in it; fp16 becomes fp32"),
    "data_types.param_dtype": _unsupported("config.precision decides the dtype of weights", *OFF),
    "data_types.buffer_dtype": _no_effect("the models have no buffers"),
    "communication_data_type": _taken("reduce_dtype", "fp16 becomes fp32"),
    "fp32_allreduce": Key(TAKEN, "", ("reduce_dtype",), (False, None)),
    "prescale_gradients": _implied(_AVERAGED),
    "gradient_predivide_factor": _implied(_AVERAGED),
    "gradient_allreduce_op": _unsupported("gradients are averaged over devices", "mean", None),
    "sparse_gradients": _unsupported("gradients of embeddings are dense", *OFF),
    "gradient_clipping": _taken("optimizer.clip_norm"),
    "disable_allgather": _no_effect("updated weights are always gathered"),
    # Optimizer
    "optimizer.type": _taken("optimizer.name"),
    "optimizer.params.lr": _taken("optimizer.learning_rate"),
    "optimizer.params.adam_lr": _taken("optimizer.learning_rate", "with type Muon, for which AdamW is taken"),
    "optimizer.params.betas": _taken("optimizer.b1 optimizer.b2"),
    "optimizer.params.eps": _taken("optimizer.eps"),
    "optimizer.params.weight_decay": _taken("optimizer.weight_decay"),
    "optimizer.params.momentum": _taken("optimizer.b1"),
    "optimizer.params.adam_w_mode": _taken("optimizer.name", "Adam means AdamW unless this is false"),
    "optimizer.params.torch_adam": _taken(
        "optimizer.weight_decay", "one implementation computes the same update; an absent weight decay is torch's"
    ),
    "optimizer.params.fused": _implied("XLA fuses the update; GPUs run it as one kernel where moments are 16-bit"),
    "optimizer.params.foreach": _implied("XLA fuses the update"),
    "optimizer.params.capturable": _implied("the step is compiled"),
    "optimizer.params.adamw_mode": _taken("optimizer.name", "Adam means AdamW unless this is false"),
    "optimizer.params.set_grad_none": _implied("gradients do not outlive a step"),
    "optimizer.params.fp32_optimizer_states": _taken("optimizer.moments", "true: fp32"),
    "optimizer.params.bias_correction": _unsupported("Adam's moments are always corrected", True, None),
    "optimizer.params.amsgrad": _unsupported("there is no AMSGrad", *OFF),
    "optimizer.params.maximize": _unsupported("the loss is minimised", *OFF),
    "optimizer.params.eps_inside_sqrt": _unsupported("eps is added to the root", *OFF),
    "optimizer.params.nesterov": _unsupported("sgd has plain momentum", *OFF),
    "optimizer.params.dampening": _unsupported("sgd's momentum is not dampened", 0, 0.0, None),
    "optimizer.params.max_grad_norm": _unsupported("DeepSpeed refuses it; gradient_clipping is the key", 0, 0.0, None),
    "optimizer.params.max_coeff": _unsupported("LAMB's trust ratio is not limited"),
    "optimizer.params.min_coeff": _unsupported("LAMB's trust ratio is not limited"),
    "optimizer.params.freeze_step": _unsupported(_ONE_BIT),
    "optimizer.params.var_freeze_step": _unsupported(_ONE_BIT),
    "optimizer.params.var_update_scaler": _unsupported(_ONE_BIT),
    "optimizer.params.local_step_scaler": _unsupported(_ONE_BIT),
    "optimizer.params.local_step_clipper": _unsupported(_ONE_BIT),
    "optimizer.params.coeff_beta": _unsupported(_ONE_BIT),
    "optimizer.params.factor_max": _unsupported(_ONE_BIT),
    "optimizer.params.factor_min": _unsupported(_ONE_BIT),
    "optimizer.params.factor_threshold": _unsupported(_ONE_BIT),
    "optimizer.params.cuda_aware": _no_effect("XLA chooses the transport"),
    "optimizer.params.comm_backend_name": _no_effect("XLA chooses the transport"),
    "optimizer.params.*": _unsupported("the optimizers here have no such parameter"),
    "optimizer.legacy_fusion": _no_effect("XLA fuses the update"),
    # Schedule
    "scheduler.type": _taken("optimizer.schedule", "the same rates, step for step"),
    "scheduler.params.warmup_min_lr": _taken("optimizer.initial_fraction", "as a fraction of the peak"),
    "scheduler.params.warmup_max_lr": _taken("optimizer.learning_rate"),
    "scheduler.params.warmup_num_steps": _taken("optimizer.warmup_steps"),
    "scheduler.params.warmup_type": _taken("optimizer.warmup"),
    "scheduler.params.total_num_steps": _taken("steps"),
    "scheduler.params.warmup_min_ratio": _taken("optimizer.initial_fraction"),
    "scheduler.params.cos_min_ratio": _taken("optimizer.final_fraction"),
    "scheduler.params.last_batch_iteration": _unsupported(
        "a run begins its schedule at step 0, and a checkpoint holds the step", None, -1
    ),
    "scheduler.params.*": _unsupported("only zerojax.from_deepspeed_config has OneCycle and LRRangeTest"),
    # Activations
    "activation_checkpointing.partition_activations": Key(
        IMPLIED,
        "what a block keeps is sharded over config.mesh.model where that is above 1, as its tokens are",
        (),
        OFF,
    ),
    "activation_checkpointing.cpu_checkpointing": _unsupported(
        "config.model.offload keeps the outputs of chosen modules in host memory, unless config.offload.params is set; name them",
        *OFF,
    ),
    "activation_checkpointing.contiguous_memory_optimization": _implied("XLA plans the memory of activations"),
    "activation_checkpointing.number_checkpoints": _no_effect("every block is rematerialised by config.model.remat"),
    "activation_checkpointing.synchronize_checkpoint_boundary": _no_effect("a compiled step has no such boundaries"),
    "activation_checkpointing.profile": _no_effect(_PROFILE),
    # Logs
    "steps_per_print": _taken("log_every", "a line is printed once a minute at least"),
    "wall_clock_breakdown": _no_effect(_PROFILE),
    "memory_breakdown": _implied("plan.json has the memory by role, and metrics.jsonl the device's"),
    "dump_state": _implied("WORKDIR/config.json holds every setting"),
    "log_level": _no_effect("a run prints its lines, and errors"),
    "tensorboard.enabled": _implied("config.metrics.to writes WORKDIR/tensorboard unless it is changed"),
    "tensorboard.*": _no_effect("events go to WORKDIR/tensorboard"),
    "csv_monitor.enabled": _implied("metrics.jsonl holds the same numbers"),
    "csv_monitor.*": _no_effect("numbers go to WORKDIR/metrics.jsonl"),
    "wandb.enabled": _taken("metrics.to", "a run needs its package: pip install 'zerojax[wandb]'"),
    "wandb.project": _taken("metrics.project"),
    "wandb.team": _no_effect("set WANDB_ENTITY in the environment, which wandb reads"),
    "wandb.group": _no_effect("set WANDB_RUN_GROUP in the environment, which wandb reads"),
    "comet.*": _unsupported("its client is not called; WORKDIR/tensorboard and metrics.jsonl can be synced"),
    "flops_profiler.*": _no_effect("the plan counts a step's operations; " + _PROFILE),
    "comms_logger.*": _no_effect("the plan lists a step's collectives and their bytes"),
    "comms_config.*": _no_effect("the plan lists a step's collectives and their bytes"),
    # Other blocks
    "aio.*": _no_effect(_NVME),
    "checkpoint.tag_validation": _implied("a step's number is its name, the same in every process"),
    "checkpoint.load_universal": _implied(_CHECKPOINTS),
    "checkpoint.use_node_local_storage": _unsupported("all processes write to one folder", *OFF),
    "checkpoint.parallel_write.*": _implied("every process writes its own shards"),
    "checkpoint.*": _no_effect("the checkpointer has no such choice"),
    "compile.*": _implied("XLA compiles the whole step"),
    "graph_harvesting": _implied("XLA makes CUDA graphs"),
    "tensor_parallel.autotp_size": Key(TAKEN, TENSOR, ("mesh.model",), ONE),
    "tensor_parallel.*": _unsupported(
        "each model family has one table of what is sharded; config.zero.overrides comes first"
    ),
    "expert_parallel.*": _unsupported(EXPERTS),
    "pipeline.stages": Key(TAKEN, PIPE, ("mesh.pipe",), ONE),
    "pipeline.*": _unsupported(
        "layers are divided by their foretold times, or FLOPs; config.pipeline has the schedule"
    ),
    "pipeline_parallel_size": Key(TAKEN, PIPE, ("mesh.pipe",), ONE),
    "moe.*": _unsupported(EXPERTS),
    "hybrid_engine.*": _unsupported("there is no inference engine inside training"),
    "elasticity.*": _unsupported(
        "the global batch stays as given; another number of devices resumes with another grad_accum"
    ),
    "autotuning.*": _unsupported("python -m zerojax.plan --search compares settings without running them"),
    "compression_training.*": _unsupported("weights are not quantized or pruned in training"),
    "quantize_training.*": _unsupported("weights are not quantized in training"),
    "data_efficiency.*": _unsupported("every token is computed, in the data's order"),
    "curriculum_learning.*": _unsupported("the sequence length is fixed"),
    "progressive_layer_drop.*": _unsupported("every layer runs in every step"),
    "sparse_attention.*": _unsupported("attention is dense"),
    "eigenvalue.*": _unsupported("there is no quantization in training that needs it"),
    "nebula.*": _no_effect("checkpoints are written in the background"),
    "vocabulary_size": _no_effect("the preset or the tokenizer decides it; set config.model.vocab_size"),
    "timers.*": _no_effect(_PROFILE),
    "weight_quantization.*": _unsupported("weights are not quantized"),
    "zero_quantized_weights": _unsupported("it is read below zero_optimization alone; set config.wire.weights", *OFF),
}

# Groups that DeepSpeed reads only if a key of theirs is true, which it is not by default -> that key.
SWITCHES: Mapping[str, str] = {
    **{
        group: f"{group}.enabled"
        for group in (
            "fp16 bf16 amp torch_autocast wandb comet elasticity autotuning hybrid_engine progressive_layer_drop eigenvalue "
            "curriculum_learning data_efficiency data_efficiency.data_sampling data_efficiency.data_routing "
            "data_efficiency.data_sampling.curriculum_learning data_efficiency.data_routing.random_ltd "
            "compression_training.layer_reduction"
        ).split()
    },
    **{
        f"compression_training.{kind}": f"compression_training.{kind}.shared_parameters.enabled"
        for kind in "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning channel_pruning".split()
    },
}

# Older and second names -> the names of the table.
ALIASES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "monitor_config.tensorboard": "tensorboard",
    "monitor_config.wandb": "wandb",
    "monitor_config.csv_monitor": "csv_monitor",
    "monitor_config.comet": "comet",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload_use_pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "gather_16bit_weights_on_model_save prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
            "max_live_parameters max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"
        ).split()
    },
    "zero_optimization.gather_fp16_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "curriculum_learning.curriculum_type": "curriculum_learning.type",
}


def find(path: str, table: Mapping[str, Key] = KEYS) -> Key | None:
    """Returns the row of a dotted path: its own, or that of the nearest "*" above it; None if there is none."""
    if path in table:
        return table[path]
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (row := table.get(".".join([*parts[:length], "*"]))) is not None:
            return row
    return table.get(f"{path}.*")


def canonical(path: str) -> str:
    """Returns a path with older names replaced."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ALIASES.get(".".join(parts[:length]))) is not None:
            return ".".join([name, *parts[length:]])
    return path
