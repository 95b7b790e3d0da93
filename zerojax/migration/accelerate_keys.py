"""The keys of an Accelerate config, and of a transformers Trainer's arguments. This module is the table of what each one becomes here.

The keys of `fsdp_config` stand here without their prefix `fsdp_`, and those of `parallelism_config` without `parallelism_config_`.
Source: Accelerate 1.15 (`commands/config`), transformers 5.24 (`TrainingArguments`), Axolotl of July 2026 (`utils/schemas/fsdp.py`).
"""

from collections.abc import Mapping

from zerojax.migration import keys as keys_lib
from zerojax.migration.keys import IMPLIED, NO_EFFECT, OFF, ONE, TAKEN, UNSUPPORTED, Key

_WAY = "what attention exchanges follows from heads, lengths and windows; the run says it"
_JOIN = "zerojax launch, Slurm, Open MPI or Kubernetes start the processes and join them"
_HOSTS = "start processes on the wanted hosts alone; CUDA_VISIBLE_DEVICES chooses a host's GPUs"
_NEXT = "the backward pass gathers the next block's weights while a block runs"
_BLOCKS = "the model family says which modules are blocks; `blocks=` in your own step"

KEYS: Mapping[str, Key] = {
    "compute_environment": Key(IMPLIED, "a run is one command a process, wherever it runs"),
    "distributed_type": Key(TAKEN, "", ("zero.stage",)),
    "mixed_precision": Key(TAKEN, "", ("precision",)),
    "fp16": Key(TAKEN, "the older form of mixed_precision", ("precision",)),
    "use_cpu": Key(IMPLIED, "JAX_PLATFORMS=cpu leaves a machine's accelerators unused", (), (False, None)),
    "debug": Key(NO_EFFECT, "shapes are checked when the step is compiled"),
    "num_processes": Key(TAKEN, "where there is no accelerator; else a run takes all devices", ("emulate_devices",)),
    "machine_rank": Key(IMPLIED, _JOIN),
    "num_machines": Key(IMPLIED, _JOIN),
    "gpu_ids": Key(IMPLIED, "a run takes all devices that CUDA_VISIBLE_DEVICES shows", (), ("all",)),
    "main_process_ip": Key(IMPLIED, _JOIN),
    "main_process_port": Key(IMPLIED, _JOIN),
    "rdzv_backend": Key(IMPLIED, _JOIN),
    "rdzv_conf.*": Key(IMPLIED, _JOIN),
    "same_network": Key(IMPLIED, _JOIN),
    "main_training_function": Key(NO_EFFECT, "python -m zerojax.train is the program"),
    "enable_cpu_affinity": Key(NO_EFFECT, "start the processes under numactl to bind them"),
    "downcast_bf16": Key(NO_EFFECT, "config.precision decides it, on TPUs too"),
    "tpu_name": Key(IMPLIED, "JAX finds the TPU slice that it runs on"),
    "tpu_zone": Key(IMPLIED, "JAX finds the TPU slice that it runs on"),
    "tpu_env": Key(NO_EFFECT, "set environment variables where you start the run"),
    "tpu_use_cluster": Key(IMPLIED, "JAX finds the TPU slice that it runs on"),
    "tpu_use_sudo": Key(NO_EFFECT, "no command is sent to other machines"),
    "command_file": Key(NO_EFFECT, "no command is sent to other machines"),
    "commands": Key(NO_EFFECT, "no command is sent to other machines"),
    "dynamo_backend": Key(IMPLIED, "XLA compiles the whole step"),
    "dynamo_config.*": Key(IMPLIED, "XLA compiles the whole step"),
    "fp8_config.backend": Key(TAKEN, "the scaling that the backend uses", ("fp8.recipe",)),
    "fp8_config.amax_history_len": Key(TAKEN, "", ("fp8.history",)),
    "fp8_config.amax_compute_algo": Key(UNSUPPORTED, "the largest of the history counts", (), ("max",)),
    "fp8_config.amax_compute_algorithm": Key(UNSUPPORTED, "the largest of the history counts", (), ("max",)),
    "fp8_config.fp8_format": Key(IMPLIED, "the forward pass is in e4m3, gradients are in e5m2"),
    "fp8_config.margin": Key(UNSUPPORTED, "scales have no margin", (), (0,)),
    "fp8_config.interval": Key(IMPLIED, "scales are those of each step"),
    "fp8_config.override_linear_precision": Key(
        UNSUPPORTED,
        "all three matmuls of a layer are in fp8",
        (),
        ([False, False, False], "(false, false, false)", False),
    ),
    "fp8_config.use_autocast_during_eval": Key(IMPLIED, "an evaluation computes in fp8 too"),
    "fp8_config.enable_fsdp_float8_all_gather": Key(IMPLIED, "stage 3 gathers in fp8"),
    "fp8_config.pad_inner_dim": Key(IMPLIED, "XLA pads what the matmul needs"),
    "fp8_config.*": Key(UNSUPPORTED, "set config.fp8: it has no such choice"),
    "megatron_lm_config.megatron_lm_tp_degree": Key(TAKEN, keys_lib.TENSOR, ("mesh.model",), ONE),
    "megatron_lm_config.megatron_lm_pp_degree": Key(TAKEN, keys_lib.PIPE, ("mesh.pipe",), ONE),
    "megatron_lm_config.megatron_lm_num_micro_batches": Key(TAKEN, "passes of a step", ("grad_accum",)),
    "megatron_lm_config.megatron_lm_gradient_clipping": Key(TAKEN, "", ("optimizer.clip_norm",)),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": Key(TAKEN, "true: stage 1, false: 0", ("zero.stage",)),
    "megatron_lm_config.megatron_lm_recompute_activations": Key(TAKEN, "true: full", ("model.remat",)),
    "megatron_lm_config.megatron_lm_sequence_parallelism": Key(
        IMPLIED, "tokens are sharded between matmuls where config.mesh.model is above 1"
    ),
    "megatron_lm_config.*": Key(
        UNSUPPORTED, "Megatron's own; config.mesh, config.pipeline and config.zero have what there is"
    ),
    "mpirun_config.*": Key(IMPLIED, "mpirun of the command starts a run"),
    "ipex_config.*": Key(NO_EFFECT, "XLA compiles for CPUs too"),
    "ec2_instance_type": Key(UNSUPPORTED, "no SageMaker job is started"),
    "deepspeed_config.deepspeed_config_file": Key(IMPLIED, "its keys follow, after this file's"),
    "deepspeed_config.zero_stage": Key(TAKEN, "", ("zero.stage",)),
    "deepspeed_config.gradient_accumulation_steps": Key(TAKEN, "", ("grad_accum",)),
    "deepspeed_config.gradient_clipping": Key(TAKEN, "", ("optimizer.clip_norm",)),
    "deepspeed_config.offload_optimizer_device": keys_lib.KEYS["zero_optimization.offload_optimizer.device"],
    "deepspeed_config.offload_param_device": keys_lib.KEYS["zero_optimization.offload_param.device"],
    "deepspeed_config.offload_optimizer_nvme_path": keys_lib.KEYS["zero_optimization.offload_optimizer.nvme_path"],
    "deepspeed_config.offload_param_nvme_path": keys_lib.KEYS["zero_optimization.offload_param.nvme_path"],
    "deepspeed_config.zero3_init_flag": Key(IMPLIED, "state is made sharded; no unsharded state ever exists"),
    "deepspeed_config.zero3_save_16bit_model": Key(
        IMPLIED, "a checkpoint holds full arrays; config.export.format=huggingface writes 16-bit safetensors"
    ),
    "deepspeed_config.deepspeed_moe_layer_cls_names": Key(IMPLIED, _BLOCKS),
    "deepspeed_config.seq_parallel_communication_data_type": Key(
        NO_EFFECT, "activations are sent in the compute dtype"
    ),
    "deepspeed_config.deepspeed_multinode_launcher": Key(IMPLIED, _JOIN),
    "deepspeed_config.deepspeed_hostfile": Key(IMPLIED, _JOIN + "; `zerojax migrate HOSTFILE` translates it"),
    "deepspeed_config.deepspeed_exclusion_filter": Key(IMPLIED, _HOSTS),
    "deepspeed_config.deepspeed_inclusion_filter": Key(IMPLIED, _HOSTS),
    "fsdp_config.version": Key(IMPLIED, "FSDP 1 and 2 are the same stages here"),
    "fsdp_config.sharding_strategy": Key(TAKEN, "", ("zero.stage", "mesh.replica")),
    "fsdp_config.reshard_after_forward": Key(TAKEN, "true: stage 3, false: stage 2", ("zero.stage", "mesh.replica")),
    "fsdp_config.offload_params": Key(
        TAKEN,
        "weights and optimizer state in pinned host memory",
        ("offload.optimizer", "offload.params"),
        (False, None),
    ),
    "fsdp_config.cpu_offload": Key(
        TAKEN,
        "weights and optimizer state in pinned host memory",
        ("offload.optimizer", "offload.params"),
        (False, None),
    ),
    "fsdp_config.cpu_offload_pin_memory": Key(UNSUPPORTED, "host memory is pinned", (), (True, None)),
    "fsdp_config.final_state_dict_type": Key(
        IMPLIED, "config.export.format=huggingface writes full arrays, from any stage"
    ),
    "fsdp_config.auto_wrap_policy": Key(IMPLIED, _BLOCKS),
    "fsdp_config.transformer_layer_cls_to_wrap": Key(IMPLIED, _BLOCKS),
    "fsdp_config.min_num_params": Key(NO_EFFECT, _BLOCKS),
    "fsdp_config.limit_all_gathers": Key(IMPLIED, "one block's weights are gathered at a time, and the next block's"),
    "fsdp_config.backward_prefetch": Key(IMPLIED, _NEXT),
    "fsdp_config.backward_prefetch_policy": Key(IMPLIED, _NEXT),
    "fsdp_config.forward_prefetch": Key(
        IMPLIED, "the forward pass gathers the next block's weights while a block runs"
    ),
    "fsdp_config.state_dict_type": Key(IMPLIED, "a checkpoint holds global arrays, written shard by shard"),
    "fsdp_config.use_orig_params": Key(IMPLIED, "weights keep their names and shapes"),
    "fsdp_config.cpu_ram_efficient_loading": Key(IMPLIED, "state is made and restored sharded"),
    "fsdp_config.sync_module_states": Key(IMPLIED, "all processes draw the same weights from one key"),
    "fsdp_config.activation_checkpointing": Key(
        TAKEN, "only a layer's input is kept for its backward pass", ("model.remat",), (False, None)
    ),
    "fsdp_config.ignored_modules": Key(
        UNSUPPORTED, "config.zero.overrides keeps weights replicated by their paths", (), OFF
    ),
    "fsdp_config.mixed_precision_policy": Key(
        UNSUPPORTED, "config.precision and config.reduce_dtype decide the dtypes", (), OFF
    ),
    "parallelism_config.dp_replicate_size": Key(TAKEN, "", ("mesh.replica",), (1, None)),
    "parallelism_config.dp_shard_size": Key(TAKEN, "", ("mesh.data",)),
    "parallelism_config.tp_size": Key(TAKEN, keys_lib.TENSOR, ("mesh.model",), ONE),
    "parallelism_config.cp_size": Key(TAKEN, keys_lib.CONTEXT, ("mesh.context",), ONE),
    "parallelism_config.sp_size": Key(TAKEN, keys_lib.CONTEXT, ("mesh.context",), ONE),
    "parallelism_config.cp_comm_strategy": Key(NO_EFFECT, _WAY),
    "parallelism_config.sp_backend": Key(NO_EFFECT, _WAY),
    "parallelism_config.sp_seq_length": Key(NO_EFFECT, "config.seq_len is the length of all sequences"),
    "parallelism_config.sp_seq_length_is_variable": Key(NO_EFFECT, "config.seq_len is the length of all sequences"),
    "parallelism_config.sp_attn_implementation": Key(NO_EFFECT, "config.model.attention chooses the kernel"),
}

PREFIXES: Mapping[str, str] = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}


def canonical(name: str) -> str:
    """Returns a dotted name without the prefix that its group gives to its keys."""
    group, _, key = name.partition(".")
    return f"{group}.{key.removeprefix(PREFIXES[group])}" if key and group in PREFIXES else name
