"""Reads forty files key by key. This module tests what configs of DeepSpeed, Accelerate and training scripts mean.

Each file says what its keys mean: the settings that they decide, the numbers that are assumed for a training script, and what has no
counterpart. Every other key must be one that changes no number of a run (HARMLESS), or hold a value that switches it off (`off`).
"""

import dataclasses
import json
from typing import Any

import pytest
import yaml

from zerojax import configs, tree
from zerojax.migration import documents, draft, keys, translate
from zerojax.trainer import config as config_lib

# Keys that change neither the numbers of a run nor where its state lives: buckets, schedules of copies, logs, names of processes.
HARMLESS = set(
    """
    zero_optimization.contiguous_gradients zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size
    zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size zero_optimization.overlap_comm
    zero_optimization.sub_group_size zero_optimization.round_robin_gradients zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.buffer_count
    zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.pipeline_read
    zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_param.pin_memory
    zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu
    zero_optimization.mics_hierarchical_params_gather zero_optimization.elastic_checkpoint
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown dump_state memory_breakdown prescale_gradients
    activation_checkpointing.partition_activations aio.block_size aio.queue_depth aio.single_submit aio.overlap_events aio.thread_count
    checkpoint.tag_validation checkpoint.load_universal
    flops_profiler.enabled flops_profiler.profile_step flops_profiler.detailed comms_logger.enabled comms_logger.verbose
    tensorboard.enabled tensorboard.output_path tensorboard.job_name csv_monitor.enabled csv_monitor.output_path
    wandb.group wandb.team activation_checkpointing.number_checkpoints activation_checkpointing.contiguous_memory_optimization
    optimizer.params.torch_adam compile.deepcompile
    compute_environment debug machine_rank num_machines main_process_ip main_process_port rdzv_backend same_network
    main_training_function enable_cpu_affinity downcast_bf16 tpu_env tpu_use_cluster tpu_use_sudo use_cpu gpu_ids
    dynamo_config.dynamo_backend
    deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model deepspeed_config.deepspeed_multinode_launcher
    deepspeed_config.deepspeed_config_file
    fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_transformer_layer_cls_to_wrap fsdp_config.fsdp_backward_prefetch
    fsdp_config.fsdp_backward_prefetch_policy fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_state_dict_type
    fsdp_config.fsdp_use_orig_params fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_version
    fp8_config.fp8_format fp8_config.interval fp8_config.use_autocast_during_eval
    do_train do_eval overwrite_output_dir overwrite_cache plot_loss trust_remote_code preprocessing_num_workers dataloader_num_workers
    ddp_timeout save_only_model bf16_full_eval attn_implementation flash_attn torch_dtype logging_strategy logging_dir
    gradient_checkpointing_kwargs remove_unused_columns lora_task_type bnb_4bit_use_double_quant data_seed tf32
    """.split()
)

ZERO, OPT, SCHED = "zero_optimization", "optimizer.params", "scheduler.params"


@dataclasses.dataclass(frozen=True)
class File:
    """A file and its meaning: {key: {place: value}} where it decides or where it is assumed, and the keys without counterpart or effect.

    `absent` are lines for keys that the file lacks: {key: {place: value}}.
    """

    content: Any
    taken: dict[str, dict[str, Any]]
    assumed: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    unsupported: str = ""
    off: str = ""
    absent: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    beside: dict[str, Any] | None = None


def adam(lr, **more):
    return {"type": "AdamW", "params": {"lr": lr, **more}}


AUTO_ADAM = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}
AUTO_BATCH = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
AUTO_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
FP16_KEYS = "fp16.loss_scale fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale"
LR = {f"{OPT}.lr": {"optimizer.learning_rate": 5e-5}}
ASSUMED_ADAM = {
    **LR,
    f"{OPT}.betas": {"optimizer.b1": 0.9, "optimizer.b2": 0.999},
    f"{OPT}.eps": {"optimizer.eps": 1e-8},
    f"{OPT}.weight_decay": {"optimizer.weight_decay": 0.0, "optimizer.weight_decay_on": "all"},
}
ASSUMED_WARMUP = {
    f"{SCHED}.warmup_num_steps": {"optimizer.warmup_steps": 0},
    f"{SCHED}.warmup_max_lr": {"optimizer.learning_rate": 5e-5},
    f"{SCHED}.warmup_min_lr": {"optimizer.initial_fraction": 0.0},
}
ASSUMED_BATCH = {
    "gradient_accumulation_steps": {"grad_accum": 1},
    "gradient_clipping": {"optimizer.clip_norm": 1.0},
    "train_micro_batch_size_per_gpu": {"micro_batch_size": 1},
}
NO_OPTIMIZER = {
    "optimizer.type": {"optimizer.name": "adamw", "optimizer.learning_rate": 5e-5, "optimizer.weight_decay": 0.0},
    "scheduler.type": {"optimizer.schedule": "linear", "optimizer.warmup_steps": 0, "optimizer.final_fraction": 0.0},
}
NO_SCRIPT = {**NO_OPTIMIZER, "train_micro_batch_size_per_gpu": {"micro_batch_size": 1}}
NO_SCHEDULE = {"scheduler.type": {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}}
CLIP = {"gradient_clipping": {"optimizer.clip_norm": 1.0}}
FP32 = {"bf16.enabled": {"precision": "fp32"}}
STAGE_0 = {f"{ZERO}.stage": {"zero.stage": 0}}

DEEPSPEED = {
    "getting started, fp16 at stage 2 with the optimizer on the host": File(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True},
            ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {
            "train_batch_size": {"global_batch_size": 8, "micro_batch_size": 0},
            "gradient_accumulation_steps": {"grad_accum": 1},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.lr": {"optimizer.learning_rate": 0.00015},
            "fp16.enabled": {"precision": "fp16"},
            f"{ZERO}.stage": {"zero.stage": 2},
            f"{ZERO}.offload_optimizer.device": {"offload.optimizer": "host"},
        },
        absent={**CLIP, **NO_SCHEDULE},
    ),
    "an image classifier with a warm-up": File(
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {
                "enabled": True,
                "fp16_master_weights_and_grads": False,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 15,
            },
            "wall_clock_breakdown": False,
            ZERO: {
                "stage": 0,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 50000000,
                "reduce_bucket_size": 50000000,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "cpu_offload": False,
            },
        },
        {
            "train_batch_size": {"global_batch_size": 16},
            "steps_per_print": {"log_every": 2000},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.betas": {"optimizer.b1": 0.8, "optimizer.b2": 0.999},
            f"{OPT}.eps": {"optimizer.eps": 1e-8},
            f"{OPT}.weight_decay": {"optimizer.weight_decay": 3e-7, "optimizer.weight_decay_on": "all"},
            "scheduler.type": {"optimizer.schedule": "WarmupLR"},
            f"{OPT}.lr": {"optimizer.learning_rate": 0.001},
            f"{SCHED}.warmup_max_lr": {"optimizer.learning_rate": 0.001},
            f"{SCHED}.warmup_min_lr": {"optimizer.initial_fraction": 0.0},
            f"{SCHED}.warmup_num_steps": {"optimizer.warmup_steps": 1000},
            "gradient_clipping": {"optimizer.clip_norm": 1.0},
            "fp16.enabled": {"precision": "fp16"},
            "fp16.loss_scale": {"loss_scale.static": 0.0},
            "fp16.loss_scale_window": {"loss_scale.window": 500},
            "fp16.hysteresis": {"loss_scale.hysteresis": 2},
            "fp16.min_loss_scale": {"loss_scale.min_scale": 1.0},
            "fp16.initial_scale_power": {"loss_scale.init_scale": 2.0**15},
            f"{ZERO}.stage": {"zero.stage": 0},
        },
        off=f"bf16.enabled fp16.fp16_master_weights_and_grads {ZERO}.cpu_offload",
    ),
    "a language model at stage 1, with the legacy truth value": File(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": True,
            "bfloat16": {"enabled": True},
            "optimizer": adam(1e-4),
        },
        {
            "train_batch_size": {"global_batch_size": 64},
            "train_micro_batch_size_per_gpu": {"micro_batch_size": 4, "grad_accum": 0},
            "zero_optimization.stage": {"zero.stage": 1},
            "bfloat16.enabled": {"precision": "bf16"},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.lr": {"optimizer.learning_rate": 1e-4},
        },
        absent={**CLIP, **NO_SCHEDULE},
    ),
    "a transformers file for stage 2, all auto": File(
        {
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAM,
            "scheduler": AUTO_WARMUP,
            ZERO: {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "allgather_partitions": True,
                "overlap_comm": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
            },
            **AUTO_BATCH,
        },
        {
            f"{ZERO}.stage": {"zero.stage": 2},
            f"{ZERO}.offload_optimizer.device": {"offload.optimizer": "host"},
            "optimizer.type": {"optimizer.name": "adamw"},
            "scheduler.type": {"optimizer.schedule": "WarmupLR"},
        },
        {
            **ASSUMED_ADAM,
            **ASSUMED_WARMUP,
            **ASSUMED_BATCH,
            "bf16.enabled": {"precision": "fp32"},
            "fp16.enabled": {"precision": "fp32"},
        },
        off=f"{FP16_KEYS} train_batch_size",
    ),
    "a transformers file for stage 3 with both offloads": File(
        {
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAM,
            ZERO: {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            **AUTO_BATCH,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        {
            f"{ZERO}.stage": {"zero.stage": 3},
            f"{ZERO}.offload_optimizer.device": {"offload.optimizer": "host"},
            f"{ZERO}.offload_param.device": {"offload.params": "host"},
            "optimizer.type": {"optimizer.name": "adamw"},
            "steps_per_print": {"log_every": 2000},
        },
        {
            **ASSUMED_ADAM,
            **ASSUMED_BATCH,
            "bf16.enabled": {"precision": "fp32"},
            f"{ZERO}.stage3_param_persistence_threshold": {"zero.min_size": 1024},
        },
        off="train_batch_size",
        absent={"scheduler.type": {"optimizer.schedule": "linear", "optimizer.warmup_steps": 0}},
    ),
    "infinity on a disk": File(
        {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": adam(3e-5, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7),
            ZERO: {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 4,
                    "fast_init": False,
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 5,
                    "buffer_size": 1e8,
                    "max_in_cpu": 1e9,
                },
                "stage3_param_persistence_threshold": 1e6,
            },
            "aio": {
                "block_size": 262144,
                "queue_depth": 32,
                "thread_count": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        },
        {
            "train_micro_batch_size_per_gpu": {"micro_batch_size": 2, "global_batch_size": 0, "grad_accum": 1},
            "bf16.enabled": {"precision": "bf16"},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.lr": {"optimizer.learning_rate": 3e-5},
            f"{OPT}.betas": {"optimizer.b1": 0.8, "optimizer.b2": 0.999},
            f"{OPT}.eps": {"optimizer.eps": 1e-8},
            f"{OPT}.weight_decay": {"optimizer.weight_decay": 3e-7},
            f"{ZERO}.stage": {"zero.stage": 3},
            f"{ZERO}.offload_optimizer.device": {"offload.optimizer": "nvme"},
            f"{ZERO}.offload_optimizer.nvme_path": {"offload.nvme_path": "/local_nvme"},
            f"{ZERO}.offload_param.device": {"offload.params": "nvme"},
            f"{ZERO}.offload_param.nvme_path": {"offload.nvme_path": "/local_nvme"},
            f"{ZERO}.stage3_param_persistence_threshold": {"zero.min_size": 1_000_000},
        },
        absent={**CLIP, **NO_SCHEDULE},
    ),
    "params alone on a disk": File(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            ZERO: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}},
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "bf16.enabled": {"precision": "bf16"},
            f"{ZERO}.stage": {"zero.stage": 3},
        },
        unsupported=f"{ZERO}.offload_param.device",
        off=f"{ZERO}.offload_param.nvme_path",
        absent={**CLIP, **NO_OPTIMIZER},
    ),
    "ZeRO++": File(
        {
            "train_batch_size": 32,
            "bf16": {"enabled": True},
            ZERO: {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zero_hpz_partition_size": 8,
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "optimizer": adam(1e-4),
        },
        {
            "train_batch_size": {"global_batch_size": 32},
            "bf16.enabled": {"precision": "bf16"},
            f"{ZERO}.stage": {"zero.stage": 3},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.lr": {"optimizer.learning_rate": 1e-4},
            f"{ZERO}.zero_quantized_weights": {"wire.weights": "int8"},
            f"{ZERO}.zero_quantized_gradients": {"wire.gradients": "int4"},
            f"{ZERO}.zero_hpz_partition_size": {"wire.second_copy": True, "wire.host_devices": 8},
        },
        absent={**CLIP, **NO_SCHEDULE},
    ),
    "ZeRO++ switched off by its defaults": File(
        {
            "train_batch_size": 32,
            "fp16": {"enabled": False},
            ZERO: {
                "stage": 3,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": "false",
                "zero_hpz_partition_size": 1,
            },
        },
        {
            "train_batch_size": {"global_batch_size": 32},
            f"{ZERO}.stage": {"zero.stage": 3},
        },
        off=f"{ZERO}.zero_quantized_weights {ZERO}.zero_quantized_gradients {ZERO}.zero_hpz_partition_size fp16.enabled",
        absent={**CLIP, **NO_OPTIMIZER},
    ),
    "MiCS": File(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            ZERO: {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True},
        },
        {
            "train_batch_size": {"global_batch_size": 32},
            "train_micro_batch_size_per_gpu": {"micro_batch_size": 2},
            "gradient_accumulation_steps": {"grad_accum": 0},
            "bf16.enabled": {"precision": "bf16"},
            f"{ZERO}.stage": {"zero.stage": 3},
            f"{ZERO}.mics_shard_size": {"mesh.data": 4, "mesh.replica": 4},
        },
        absent={**CLIP, **NO_OPTIMIZER},
    ),
    "1-bit Adam": File(
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False, "comm_backend_name": "nccl"},
            },
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "loss_scale": 128},
        },
        {
            "train_batch_size": {"global_batch_size": 4096},
            "train_micro_batch_size_per_gpu": {"micro_batch_size": 16},
            f"{OPT}.lr": {"optimizer.learning_rate": 4e-4, "optimizer.name": "adamw"},
            "gradient_clipping": {"optimizer.clip_norm": 1.0},
            "fp16.enabled": {"precision": "fp16"},
            "fp16.loss_scale": {"loss_scale.static": 128.0},
        },
        unsupported=f"optimizer.type {OPT}.freeze_step",
        off=f"{OPT}.cuda_aware {OPT}.comm_backend_name",
        absent={**STAGE_0, **NO_SCHEDULE},
    ),
    "LAMB with its limits": File(
        {
            "train_batch_size": 1024,
            "optimizer": {
                "type": "Lamb",
                "params": {
                    "lr": 6e-3,
                    "betas": [0.9, 0.999],
                    "weight_decay": 0.01,
                    "bias_correction": False,
                    "max_coeff": 0.3,
                    "min_coeff": 0.01,
                },
            },
            "gradient_clipping": 1.0,
        },
        {
            "train_batch_size": {"global_batch_size": 1024},
            "optimizer.type": {"optimizer.name": "lamb"},
            f"{OPT}.lr": {"optimizer.learning_rate": 6e-3},
            f"{OPT}.betas": {"optimizer.b1": 0.9},
            f"{OPT}.weight_decay": {"optimizer.weight_decay": 0.01},
            "gradient_clipping": {"optimizer.clip_norm": 1.0},
        },
        unsupported=f"{OPT}.bias_correction {OPT}.max_coeff {OPT}.min_coeff",
        absent={**STAGE_0, **NO_SCHEDULE, **FP32},
    ),
    "Adam with L2 and AMSGrad": File(
        {
            "train_batch_size": 8,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.01, "amsgrad": True, "torch_adam": True},
            },
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "optimizer.type": {"optimizer.name": "adam"},
            f"{OPT}.adam_w_mode": {"optimizer.name": "adam"},
            f"{OPT}.lr": {"optimizer.learning_rate": 1e-3},
        },
        unsupported=f"{OPT}.weight_decay {OPT}.amsgrad",
        absent={**STAGE_0, **NO_SCHEDULE, **FP32, **CLIP},
    ),
    "SGD with momentum": File(
        {
            "train_batch_size": 8,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0}},
            "gradient_clipping": 0,
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "optimizer.type": {"optimizer.name": "sgd"},
            f"{OPT}.lr": {"optimizer.learning_rate": 0.1},
            f"{OPT}.momentum": {"optimizer.b1": 0.9},
            f"{OPT}.weight_decay": {"optimizer.weight_decay": 0.0},
            "gradient_clipping": {"optimizer.clip_norm": 0.0},
        },
        unsupported=f"{OPT}.nesterov",
        absent={**STAGE_0, **NO_SCHEDULE, **FP32},
    ),
    "Lion, with a parameter that it lacks": File(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.95, 0.98], "eps": 1e-8}},
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "bf16.enabled": {"precision": "bf16"},
            "optimizer.type": {"optimizer.name": "lion"},
            f"{OPT}.lr": {"optimizer.learning_rate": 1e-4},
            f"{OPT}.betas": {"optimizer.b1": 0.95, "optimizer.b2": 0.98},
        },
        unsupported=f"{OPT}.eps",
        absent={**STAGE_0, **NO_SCHEDULE, **CLIP},
    ),
    "a linear decay": File(
        {
            "train_batch_size": 8,
            "optimizer": adam(1e-3),
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": 5000,
                    "warmup_min_lr": 1e-6,
                    "warmup_max_lr": 1e-4,
                    "warmup_num_steps": 500,
                    "warmup_type": "linear",
                    "last_batch_iteration": -1,
                },
            },
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "optimizer.type": {"optimizer.name": "adamw"},
            "scheduler.type": {"optimizer.schedule": "WarmupDecayLR"},
            f"{SCHED}.total_num_steps": {"steps": 5000},
            f"{SCHED}.warmup_min_lr": {"optimizer.initial_fraction": 0.01},
            f"{SCHED}.warmup_max_lr": {"optimizer.learning_rate": 1e-4},
            f"{SCHED}.warmup_num_steps": {"optimizer.warmup_steps": 500},
            f"{SCHED}.warmup_type": {"optimizer.warmup": "linear"},
        },
        off=f"{OPT}.lr {SCHED}.last_batch_iteration",
        absent={**STAGE_0, **FP32, **CLIP},
    ),
    "a cosine, and a schedule's foreign parameter": File(
        {
            "train_batch_size": 8,
            "optimizer": adam(2e-4),
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 900,
                    "warmup_num_steps": 90,
                    "warmup_min_ratio": 0.1,
                    "cos_min_ratio": 0.05,
                    "warmup_max_lr": 1e-3,
                },
            },
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.lr": {"optimizer.learning_rate": 2e-4},
            "scheduler.type": {"optimizer.schedule": "WarmupCosineLR"},
            f"{SCHED}.total_num_steps": {"steps": 900},
            f"{SCHED}.warmup_num_steps": {"optimizer.warmup_steps": 90},
            f"{SCHED}.warmup_min_ratio": {"optimizer.initial_fraction": 0.1},
            f"{SCHED}.cos_min_ratio": {"optimizer.final_fraction": 0.05},
        },
        unsupported=f"{SCHED}.warmup_max_lr",
        absent={**STAGE_0, **FP32, **CLIP},
    ),
    "one cycle": File(
        {
            "train_batch_size": 8,
            "optimizer": adam(2e-4),
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 100},
            },
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.lr": {"optimizer.learning_rate": 2e-4, "optimizer.schedule": "constant"},
        },
        unsupported=f"scheduler.type {SCHED}.cycle_min_lr {SCHED}.cycle_max_lr {SCHED}.cycle_first_step_size",
        absent={**STAGE_0, **FP32, **CLIP},
    ),
    "activations, profiles and monitors": File(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "activation_checkpointing": {
                "partition_activations": True,
                "cpu_checkpointing": True,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
            },
            "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": True},
            "comms_logger": {"enabled": True, "verbose": False},
            "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"},
            "csv_monitor": {"enabled": True, "output_path": "logs"},
            "wandb": {"enabled": True, "project": "mine", "group": "g", "team": "t"},
            "comet": {"enabled": True, "project": "mine"},
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "bf16.enabled": {"precision": "bf16"},
            "wandb.enabled": {"metrics.to": ("tensorboard", "wandb")},
            "wandb.project": {"metrics.project": "mine"},
        },
        unsupported="activation_checkpointing.cpu_checkpointing comet.enabled comet.project",
        absent={**STAGE_0, **NO_OPTIMIZER, **CLIP},
    ),
    "blocks that are off": File(
        {
            "train_batch_size": 8,
            "elasticity": {"enabled": False, "max_train_batch_size": 2000},
            "autotuning": {"metric": "throughput"},
            "amp": {"enabled": False, "opt_level": "O1"},
            "progressive_layer_drop": {"enabled": False, "theta": 0.5},
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"a": {"b": 1}}}
            },
            "sparse_gradients": False,
            "wandb": {"enabled": False, "project": "mine"},
        },
        {"train_batch_size": {"global_batch_size": 8}},
        off=(
            "elasticity.enabled elasticity.max_train_batch_size autotuning.metric amp.enabled amp.opt_level "
            "progressive_layer_drop.enabled progressive_layer_drop.theta "
            "compression_training.weight_quantization.shared_parameters.enabled "
            "compression_training.weight_quantization.different_groups.a.b sparse_gradients wandb.enabled wandb.project"
        ),
        absent={**STAGE_0, **FP32, **NO_OPTIMIZER, **CLIP},
    ),
    "the same blocks, on": File(
        {
            "train_batch_size": 8,
            "elasticity": {"enabled": True, "max_train_batch_size": 2000},
            "autotuning": {"enabled": True, "metric": "throughput"},
            "progressive_layer_drop": {"enabled": True, "theta": 0.5},
            "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"},
            "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
            "sparse_gradients": True,
        },
        {"train_batch_size": {"global_batch_size": 8}},
        unsupported=(
            "elasticity.enabled elasticity.max_train_batch_size autotuning.enabled autotuning.metric "
            "progressive_layer_drop.enabled progressive_layer_drop.theta curriculum_learning.enabled "
            "curriculum_learning.curriculum_type compression_training.weight_quantization.shared_parameters.enabled "
            "sparse_gradients"
        ),
        absent={**STAGE_0, **FP32, **NO_OPTIMIZER, **CLIP},
    ),
    "sums and communication": File(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "data_types": {"grad_accum_dtype": "bf16"},
            "communication_data_type": "bf16",
            "gradient_predivide_factor": 2.0,
            "gradient_allreduce_op": "sum",
            "seq_parallel_communication_data_type": "fp32",
            "sequence_parallel_size": 2,
        },
        {
            "train_micro_batch_size_per_gpu": {"micro_batch_size": 1},
            "gradient_accumulation_steps": {"grad_accum": 4},
            "bf16.enabled": {"precision": "bf16"},
            "data_types.grad_accum_dtype": {"accum_dtype": "bf16"},
            "communication_data_type": {"reduce_dtype": "bf16"},
            "sequence_parallel_size": {"mesh.context": 2},
        },
        unsupported="gradient_allreduce_op",
        off="bf16.immediate_grad_update gradient_predivide_factor seq_parallel_communication_data_type",
        absent={**STAGE_0, **NO_OPTIMIZER, **CLIP},
    ),
    "bf16 without master weights, and a share of the state on the host": File(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}},
            "optimizer": adam(1e-5),
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            "bf16.enabled": {"precision": "bf16_sr"},
            "bf16.bf16_master_weights_and_grads": {"precision": "bf16_sr"},
            "bf16.bf16_optimizer_states": {"optimizer.moments": "bf16"},
            f"{ZERO}.stage": {"zero.stage": 3},
            f"{ZERO}.offload_optimizer.device": {"offload.optimizer": "host"},
            f"{ZERO}.offload_optimizer.ratio": {"offload.fraction": 0.4},
            "optimizer.type": {"optimizer.name": "adamw"},
            f"{OPT}.lr": {"optimizer.learning_rate": 1e-5},
        },
        absent={**NO_SCHEDULE, **CLIP},
    ),
    "options of which the run has the opposite": File(
        {
            "train_batch_size": 8,
            "managed_gradient_accumulation": False,
            ZERO: {"stage": 1, "load_from_fp32_weights": False, "ignore_unused_parameters": False},
            "torch_autocast": {
                "enabled": True,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": ["torch.nn.Linear"],
            },
            "amp": {"enabled": True},
            "tensor_parallel": {"autotp_size": 4},
        },
        {
            "train_batch_size": {"global_batch_size": 8},
            f"{ZERO}.stage": {"zero.stage": 1},
            "torch_autocast.enabled": {"precision": "bf16"},
            "torch_autocast.dtype": {"precision": "bf16"},
            "tensor_parallel.autotp_size": {"mesh.model": 4},
        },
        unsupported=(
            f"managed_gradient_accumulation {ZERO}.load_from_fp32_weights {ZERO}.ignore_unused_parameters "
            "torch_autocast.lower_precision_safe_modules amp.enabled"
        ),
        absent={**NO_OPTIMIZER, **CLIP},
    ),
    "a typing error": File(
        {"train_batch_size": 8, ZERO: {"stage": 2, "overlap_com": True}, "gradient_cliping": 1.0},
        {"train_batch_size": {"global_batch_size": 8}, f"{ZERO}.stage": {"zero.stage": 2}},
        unsupported=f"{ZERO}.overlap_com gradient_cliping",
        absent={**FP32, **NO_OPTIMIZER, **CLIP},
    ),
}

LOCAL = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
TWO = {"num_processes": {"emulate_devices": 2}}
DS = "deepspeed_config"
ACCELERATE = {
    "PEFT's guide: stage 3 with both offloads": File(
        {
            **LOCAL,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "no",
            "downcast_bf16": "no",
            DS: {
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "cpu",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
                "zero_stage": 3,
            },
        },
        {
            **TWO,
            "distributed_type": {"zero.stage": 3},
            "mixed_precision": {"precision": "fp32"},
            f"{DS}.gradient_accumulation_steps": {"grad_accum": 1},
            f"{DS}.gradient_clipping": {"optimizer.clip_norm": 1.0},
            f"{DS}.offload_optimizer_device": {"offload.optimizer": "host"},
            f"{DS}.offload_param_device": {"offload.params": "host"},
            f"{DS}.zero_stage": {"zero.stage": 3},
        },
        absent=NO_SCRIPT,
    ),
    "stage 2 without clipping": File(
        {
            **LOCAL,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            DS: {
                "gradient_accumulation_steps": 4,
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
                "zero3_init_flag": False,
                "zero_stage": 2,
                "deepspeed_multinode_launcher": "standard",
            },
        },
        {
            **TWO,
            "distributed_type": {"zero.stage": 2},
            "mixed_precision": {"precision": "bf16"},
            f"{DS}.gradient_accumulation_steps": {"grad_accum": 4},
            f"{DS}.zero_stage": {"zero.stage": 2},
        },
        off=f"{DS}.offload_optimizer_device {DS}.offload_param_device",
        absent={**NO_SCRIPT, **CLIP},
    ),
    "a disk": File(
        {
            **LOCAL,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "fp16",
            DS: {
                "gradient_clipping": "auto",
                "gradient_accumulation_steps": "auto",
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/fast",
                "zero_stage": 3,
            },
        },
        {
            **TWO,
            "distributed_type": {"zero.stage": 3},
            "mixed_precision": {"precision": "fp16"},
            f"{DS}.offload_optimizer_device": {"offload.optimizer": "nvme"},
            f"{DS}.offload_optimizer_nvme_path": {"offload.nvme_path": "/fast"},
            f"{DS}.zero_stage": {"zero.stage": 3},
        },
        {
            f"{DS}.gradient_clipping": {"optimizer.clip_norm": 1.0},
            f"{DS}.gradient_accumulation_steps": {"grad_accum": 1},
        },
        absent=NO_SCRIPT,
    ),
    "a file whose auto takes the keys beside it": File(
        {
            **LOCAL,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            DS: {"deepspeed_config_file": "ds.json", "zero3_init_flag": True, "gradient_clipping": 0.5},
        },
        {
            **TWO,
            "mixed_precision": {"precision": "bf16"},
            f"{DS}.gradient_clipping": {"optimizer.clip_norm": 0.5},
            "ds.json: gradient_clipping": {"optimizer.clip_norm": 0.5},
            "ds.json: bf16.enabled": {"precision": "bf16"},
            f"ds.json: {ZERO}.stage": {"zero.stage": 2},
            "ds.json: train_batch_size": {"global_batch_size": 32},
        },
        off="distributed_type",
        absent={f"ds.json: {key}": value for key, value in NO_OPTIMIZER.items()},
        beside={
            "ds.json": {
                "bf16": {"enabled": "auto"},
                "gradient_clipping": "auto",
                ZERO: {"stage": 2},
                "train_batch_size": 32,
            }
        },
    ),
    "FSDP, sharded, with params on the CPU": File(
        {
            **LOCAL,
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_forward_prefetch": False,
                "fsdp_offload_params": True,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_sync_module_states": True,
                "fsdp_use_orig_params": True,
                "fsdp_cpu_ram_efficient_loading": True,
            },
        },
        {
            **TWO,
            "distributed_type": {"zero.stage": 3},
            "mixed_precision": {"precision": "bf16"},
            "fsdp_config.fsdp_sharding_strategy": {"zero.stage": 3},
            "fsdp_config.fsdp_offload_params": {"offload.params": "host", "offload.optimizer": "host"},
        },
        absent={**NO_SCRIPT, **CLIP},
    ),
    "FSDP 2": File(
        {
            **LOCAL,
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": True,
                "fsdp_activation_checkpointing": True,
                "fsdp_offload_params": False,
                "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            },
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 1,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            },
        },
        {
            **TWO,
            "distributed_type": {"zero.stage": 3},
            "mixed_precision": {"precision": "bf16"},
            "fsdp_config.fsdp_reshard_after_forward": {"zero.stage": 3},
            "fsdp_config.fsdp_activation_checkpointing": {"model.remat": "full"},
            "parallelism_config.parallelism_config_dp_shard_size": {"mesh.data": 2},
        },
        off=(
            "fsdp_config.fsdp_offload_params parallelism_config.parallelism_config_dp_replicate_size "
            "parallelism_config.parallelism_config_tp_size parallelism_config.parallelism_config_cp_size"
        ),
        absent={**NO_SCRIPT, **CLIP},
    ),
    "copies alone, in fp8": File(
        {
            **LOCAL,
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "fp8",
            "fp8_config": {
                "backend": "TE",
                "amax_history_len": 32,
                "amax_compute_algo": "max",
                "fp8_format": "HYBRID",
                "interval": 1,
                "margin": 2,
                "use_autocast_during_eval": False,
            },
        },
        {
            **TWO,
            "distributed_type": {"zero.stage": 0},
            "mixed_precision": {"precision": "fp8"},
            "fp8_config.backend": {"fp8.recipe": "delayed"},
            "fp8_config.amax_history_len": {"fp8.history": 32},
        },
        unsupported="fp8_config.margin",
        off="fp8_config.amax_compute_algo",
        absent={**NO_SCRIPT, **CLIP},
    ),
}

LORA_FILE = {
    "model_name_or_path": "opt/llama",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "chats.jsonl",
    "template": "llama3",
    "cutoff_len": 2048,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "output_dir": "saves",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
}
LORA_TAKEN = {
    "model_name_or_path": {"init_from": "opt/llama"},
    "lora_rank": {"lora.r": 8, "export.format": "peft"},
    "lora_target": {"lora.target_modules": "all-linear"},
    "dataset": {"data.train_file": "chats.jsonl"},
    "cutoff_len": {"seq_len": 2048},
    "logging_steps": {"log_every": 10},
    "save_steps": {"checkpoint.every": 500},
    "per_device_train_batch_size": {"micro_batch_size": 1, "global_batch_size": 0},
    "gradient_accumulation_steps": {"grad_accum": 8},
    "learning_rate": {"optimizer.learning_rate": 1e-4},
    "num_train_epochs": {"epochs": 3.0},
    "lr_scheduler_type": {"optimizer.schedule": "cosine", "optimizer.final_fraction": 0.0},
    "warmup_ratio": {"optimizer.warmup_steps": 0.1},
    "bf16": {"precision": "bf16"},
}
LORA_ASSUMED = {"finetuning_type": {"lora.alpha": 16.0}, "stage": {"data.task": "chat"}}
TRAINER_DEFAULTS = {
    "learning_rate": {"optimizer.learning_rate": 5e-5},
    "weight_decay": {"optimizer.weight_decay": 0.0},
    "adam_beta1": {"optimizer.b1": 0.9},
    "adam_beta2": {"optimizer.b2": 0.999},
    "adam_epsilon": {"optimizer.eps": 1e-8},
    "max_grad_norm": {"optimizer.clip_norm": 1.0},
}


def defaults(*but):
    return {name: value for name, value in TRAINER_DEFAULTS.items() if name not in but}


TRAINER = {
    "adapters on conversations": File(
        LORA_FILE, LORA_TAKEN, LORA_ASSUMED, unsupported="template output_dir", absent=defaults("learning_rate")
    ),
    "adapters on frozen kernels of 4 bits": File(
        {**LORA_FILE, "quantization_bit": 4, "lora_alpha": 32, "lora_dropout": 0.05, "report_to": "none"},
        {
            **LORA_TAKEN,
            "quantization_bit": {"lora.quantize": "nf4"},
            "lora_alpha": {"lora.alpha": 32.0},
            "lora_dropout": {"lora.dropout": 0.05},
            "report_to": {"metrics.to": ()},
        },
        {"stage": {"data.task": "chat"}},
        unsupported="template output_dir",
        off="finetuning_type",
        absent=defaults("learning_rate"),
    ),
    "all weights at stage 3": File(
        {
            **{key: value for key, value in LORA_FILE.items() if not key.startswith("lora")},
            "finetuning_type": "full",
            "deepspeed": "ds.json",
            "pure_bf16": True,
        },
        {
            **{key: value for key, value in LORA_TAKEN.items() if not key.startswith("lora")},
            f"deepspeed.{ZERO}.stage": {"zero.stage": 3},
            "deepspeed.bf16.enabled": {"precision": "bf16"},
            "deepspeed.gradient_clipping": {"optimizer.clip_norm": 1.0},
            "deepspeed.train_micro_batch_size_per_gpu": {"micro_batch_size": 1},
            "deepspeed.gradient_accumulation_steps": {"grad_accum": 8},
        },
        {"stage": {"data.task": "chat"}},
        unsupported="template output_dir pure_bf16",
        off=(
            "finetuning_type deepspeed deepspeed.fp16.enabled deepspeed.train_batch_size deepspeed.fp16.loss_scale "
            "deepspeed.fp16.loss_scale_window deepspeed.fp16.initial_scale_power deepspeed.fp16.hysteresis deepspeed.fp16.min_loss_scale"
        ),
        absent=defaults("learning_rate"),
        beside={
            "ds.json": {
                **AUTO_BATCH,
                "fp16": AUTO_FP16,
                "bf16": {"enabled": "auto"},
                ZERO: {"stage": 3, "overlap_comm": False, "sub_group_size": 1e9},
            }
        },
    ),
    "pre-training": File(
        {
            "model_name_or_path": "opt/llama",
            "stage": "pt",
            "do_train": True,
            "dataset": "c4_demo",
            "cutoff_len": 1024,
            "max_samples": 1000,
            "output_dir": "saves",
            "max_steps": 300,
            "warmup_ratio": 0.1,
            "per_device_train_batch_size": 4,
            "save_strategy": "no",
            "optim": "adamw_8bit",
        },
        {
            "model_name_or_path": {"init_from": "opt/llama"},
            "stage": {"data.task": "text"},
            "cutoff_len": {"seq_len": 1024},
            "max_steps": {"steps": 300},
            "warmup_ratio": {"optimizer.warmup_steps": 30},
            "per_device_train_batch_size": {"micro_batch_size": 4},
            "save_strategy": {"checkpoint.every": 0},
            "optim": {"optimizer.name": "adamw", "optimizer.moments": "int8"},
        },
        unsupported="dataset max_samples output_dir",
        absent=defaults(),
    ),
    "TRL with PEFT": File(
        {
            "model_name_or_path": "opt/qwen",
            "dataset_name": "trl-lib/Capybara",
            "output_dir": "out",
            "use_peft": True,
            "lora_r": 32,
            "lora_alpha": 16,
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_task_type": "CAUSAL_LM",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "max_length": 2048,
            "packing": True,
            "learning_rate": 2.0e-4,
            "max_steps": 100,
            "eval_strategy": "steps",
            "eval_steps": 50,
            "gradient_checkpointing": True,
            "attn_implementation": "flash_attention_2",
            "torch_dtype": "bfloat16",
            "report_to": ["wandb"],
            "run_name": "mine",
            "seed": 7,
        },
        {
            "model_name_or_path": {"init_from": "opt/qwen"},
            "dataset_name": {"data.name": "hf:trl-lib/Capybara"},
            "lora_r": {"lora.r": 32},
            "lora_alpha": {"lora.alpha": 16.0},
            "lora_target_modules": {"lora.target_modules": "q_proj,v_proj"},
            "load_in_4bit": {"lora.quantize": "nf4"},
            "max_length": {"seq_len": 2048},
            "packing": {"data.pack": True},
            "learning_rate": {"optimizer.learning_rate": 2e-4},
            "max_steps": {"steps": 100},
            "eval_strategy": {"evaluate.every": 50},
            "eval_steps": {"evaluate.every": 50},
            "gradient_checkpointing": {"model.remat": "full"},
            "report_to": {"metrics.to": ("wandb",)},
            "run_name": {"metrics.name": "mine"},
            "seed": {"seed": 7},
        },
        {"use_peft": {"lora.dropout": 0.05}},
        unsupported="output_dir",
        off="bnb_4bit_quant_type",
        absent={**defaults("learning_rate"), "per_device_train_batch_size": {"micro_batch_size": 8}},
    ),
    "a Trainer with epochs and a share of warm-up": File(
        {
            "output_dir": "out",
            "num_train_epochs": 3,
            "warmup_ratio": 0.06,
            "learning_rate": 2e-5,
            "weight_decay": 0.01,
            "adam_beta2": 0.98,
            "max_grad_norm": 0.5,
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 32,
            "fp16": True,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "label_smoothing_factor": 0.1,
            "save_total_limit": 3,
        },
        {
            "warmup_ratio": {"optimizer.warmup_steps": 0.06, "optimizer.schedule": "linear"},
            "learning_rate": {"optimizer.learning_rate": 2e-5},
            "weight_decay": {"optimizer.weight_decay": 0.01},
            "adam_beta2": {"optimizer.b2": 0.98},
            "max_grad_norm": {"optimizer.clip_norm": 0.5},
            "per_device_train_batch_size": {"micro_batch_size": 16},
            "fp16": {"precision": "fp16"},
            "save_total_limit": {"checkpoint.keep_last": 3},
        },
        unsupported="output_dir num_train_epochs per_device_eval_batch_size eval_strategy save_strategy label_smoothing_factor",
        absent=defaults("learning_rate", "weight_decay", "adam_beta2", "max_grad_norm"),
    ),
    "a Trainer whose DeepSpeed config is all auto": File(
        {
            "output_dir": "out",
            "deepspeed": "ds.json",
            "learning_rate": 3e-5,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 16,
            "max_steps": 1000,
            "warmup_steps": 50,
            "bf16": True,
            "max_grad_norm": 0.3,
        },
        {
            "learning_rate": {"optimizer.learning_rate": 3e-5},
            "per_device_train_batch_size": {"micro_batch_size": 2},
            "gradient_accumulation_steps": {"grad_accum": 16},
            "max_steps": {"steps": 1000},
            "warmup_steps": {"optimizer.warmup_steps": 50},
            "bf16": {"precision": "bf16"},
            "max_grad_norm": {"optimizer.clip_norm": 0.3},
            "deepspeed.bf16.enabled": {"precision": "bf16"},
            "deepspeed.optimizer.type": {"optimizer.name": "adamw"},
            f"deepspeed.{OPT}.lr": {"optimizer.learning_rate": 3e-5},
            f"deepspeed.{OPT}.betas": {"optimizer.b1": 0.9, "optimizer.b2": 0.999},
            f"deepspeed.{OPT}.eps": {"optimizer.eps": 1e-8},
            f"deepspeed.{OPT}.weight_decay": {"optimizer.weight_decay": 0.0},
            "deepspeed.scheduler.type": {"optimizer.schedule": "WarmupLR"},
            f"deepspeed.{SCHED}.warmup_max_lr": {"optimizer.learning_rate": 3e-5},
            f"deepspeed.{SCHED}.warmup_num_steps": {"optimizer.warmup_steps": 50},
            f"deepspeed.{ZERO}.stage": {"zero.stage": 1},
            "deepspeed.gradient_clipping": {"optimizer.clip_norm": 0.3},
            "deepspeed.train_micro_batch_size_per_gpu": {"micro_batch_size": 2},
            "deepspeed.gradient_accumulation_steps": {"grad_accum": 16},
        },
        {f"deepspeed.{SCHED}.warmup_min_lr": {"optimizer.initial_fraction": 0.0}},
        unsupported="output_dir",
        off="deepspeed deepspeed.train_batch_size",
        absent=defaults("learning_rate", "max_grad_norm"),
        beside={
            "ds.json": {
                **AUTO_BATCH,
                "bf16": {"enabled": "auto"},
                "optimizer": AUTO_ADAM,
                "scheduler": AUTO_WARMUP,
                ZERO: {"stage": 1},
            }
        },
    ),
    "the numbers of a dumped TrainingArguments": File(
        {
            "output_dir": "out",
            "max_steps": -1,
            "warmup_steps": 0,
            "bf16": False,
            "fp16": False,
            "deepspeed": None,
            "fsdp": [],
            "report_to": [],
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "constant",
            "weight_decay": 0.0,
            "save_steps": 0.1,
        },
        {
            "optim": {"optimizer.name": "adamw"},
            "lr_scheduler_type": {"optimizer.schedule": "constant"},
            "weight_decay": {"optimizer.weight_decay": 0.0},
            "report_to": {"metrics.to": ()},
            "deepspeed": {"zero.stage": 0},
            "bf16": {"precision": "fp32"},
            "fp16": {"precision": "fp32"},
        },
        unsupported="output_dir save_steps",
        off="max_steps warmup_steps fsdp",
        absent=defaults("weight_decay"),
    ),
}
FILES = {**DEEPSPEED, **ACCELERATE, **TRAINER}


def test_there_are_forty_files():
    assert len(FILES) == len(DEEPSPEED) + len(ACCELERATE) + len(TRAINER) == 40


@pytest.fixture(params=FILES)
def read(request, tmp_path):
    """Returns a file, its kind and its translation, as the command reads it."""
    file = FILES[request.param]
    path = tmp_path / ("ds.json" if request.param in DEEPSPEED else "file.yaml")
    path.write_text(json.dumps(file.content) if path.suffix == ".json" else yaml.safe_dump(file.content))
    for name, content in (file.beside or {}).items():
        (tmp_path / name).write_text(json.dumps(content))
    document = documents.read(str(path))
    kind = (
        documents.DEEPSPEED
        if request.param in DEEPSPEED
        else documents.ACCELERATE
        if request.param in ACCELERATE
        else documents.TRAINER
    )
    assert document.kind == kind
    return file, documents.translated(document)


def test_every_key_of_a_file_means_what_its_own_program_takes_it_for(read):
    file, found = read
    told = {line.key: line for line in found.lines}
    assert len(told) == len(found.lines), "one line a key"
    named = [name for name, _ in draft.leaves(file.content) if not (name == ZERO and file.content[name] is True)]
    prefix = "ds.json: " if "deepspeed_config_file" in file.content.get(DS, {}) else "deepspeed."
    named += [f"{prefix}{name}" for name, _ in draft.leaves((file.beside or {}).get("ds.json", {}))]
    assert set(named) <= told.keys()
    unsupported, off = set(file.unsupported.split()), set(file.off.split())
    for name, line in told.items():
        if name not in named and line.value is None:
            continue
        if name in file.taken or name in file.assumed:
            assert line.verdict == (keys.TAKEN if name in file.taken else keys.ASSUMED), line
        elif name in unsupported:
            assert line.verdict == keys.UNSUPPORTED, line
        else:
            is_harmless = name in off or name.removeprefix(prefix) in HARMLESS
            assert is_harmless and line.verdict in (keys.IMPLIED, keys.NO_EFFECT), line
    for name, values in {**file.taken, **file.assumed, **file.absent}.items():
        for place, value in values.items():
            is_share = isinstance(value, float)
            assert found.settings[place] == (pytest.approx(value) if is_share else value), (name, place)
    for name, values in {**file.assumed, **file.absent}.items():
        texts = told[name].text if name in told else " ".join(line.text for line in found.lines if line.value is None)
        shown = [f"config.{place} = {value!r}" for place, value in values.items()]
        assert told[name].verdict != keys.NO_EFFECT and any(text in texts for text in shown), (name, texts)


def test_the_config_that_a_file_becomes_can_run(read):
    raw = configs.get("base")
    raw.update_from_flattened_dict(read[1].settings)
    config_lib.from_dict(raw)


# Every key of DeepSpeed 0.19 with its default and another value, in JSON. Groups that a key switches on are on.
DEFAULTS = """
zero_optimization.stage 0 3
zero_optimization.contiguous_gradients true false
zero_optimization.reduce_scatter true false
zero_optimization.reduce_bucket_size 5e8 1e6
zero_optimization.use_multi_rank_bucket_allreduce true false
zero_optimization.allgather_partitions true false
zero_optimization.allgather_bucket_size 5e8 1e6
zero_optimization.overlap_comm null true
zero_optimization.load_from_fp32_weights true false
zero_optimization.elastic_checkpoint false true
zero_optimization.sub_group_size 1e9 1e6
zero_optimization.ignore_unused_parameters true false
zero_optimization.legacy_stage1 false true
zero_optimization.round_robin_gradients false true
zero_optimization.stage3_prefetch_bucket_size 5e7 1e6
zero_optimization.stage3_param_persistence_threshold 1e5 1e3
zero_optimization.stage3_model_persistence_threshold 9e18 1e6
zero_optimization.stage3_max_live_parameters 1e9 1e6
zero_optimization.stage3_max_reuse_distance 1e9 1e6
zero_optimization.stage3_gather_16bit_weights_on_model_save false true
zero_optimization.stage3_module_granularity_threshold 0 10
zero_optimization.stage3_use_all_reduce_for_fetch_params false true
zero_optimization.stage3_allgather_sequential false true
zero_optimization.zero_hpz_partition_size 1 8
zero_optimization.zero_quantized_weights false true
zero_optimization.zero_quantized_nontrainable_weights false true
zero_optimization.zero_quantized_gradients false true
zero_optimization.zeropp_loco_param null {"err_beta":0.8}
zero_optimization.mics_shard_size -1 2
zero_optimization.mics_hierarchical_params_gather false true
zero_optimization.memory_efficient_linear true false
zero_optimization.pipeline_loading_checkpoint false true
zero_optimization.override_module_apply true false
zero_optimization.log_trace_cache_warnings false true
zero_optimization.enable_sanity_checks false true
zero_optimization.save_muon_momentum_buffer_in_memory false true
zero_optimization.offload_param.device "none" "cpu"
zero_optimization.offload_param.nvme_path null "/n"
zero_optimization.offload_param.buffer_count 5 2
zero_optimization.offload_param.buffer_size 1e8 1e6
zero_optimization.offload_param.max_in_cpu 1e9 1e6
zero_optimization.offload_param.pin_memory true false
zero_optimization.offload_optimizer.device "none" "cpu"
zero_optimization.offload_optimizer.nvme_path null "/n"
zero_optimization.offload_optimizer.buffer_count 4 2
zero_optimization.offload_optimizer.pin_memory true false
zero_optimization.offload_optimizer.pipeline_read false true
zero_optimization.offload_optimizer.pipeline_write false true
zero_optimization.offload_optimizer.fast_init false true
zero_optimization.offload_optimizer.ratio 1.0 0.5
zero_optimization.offload_optimizer.super_offload false true
zero_optimization.offload_optimizer.cpuadam_cores_perc 0.8 0.5
zero_optimization.zenflow null {"topk_ratio":0.1}
fp16.enabled false true
fp16.auto_cast false true
fp16.loss_scale 0 128
fp16.initial_scale_power 16 8
fp16.loss_scale_window 1000 100
fp16.hysteresis 2 1
fp16.consecutive_hysteresis false true
fp16.min_loss_scale 1 2
fp16.fp16_master_weights_and_grads false true
bf16.enabled false true
bf16.immediate_grad_update false true
bf16.check_grad_overflow true false
bf16.bf16_master_weights_and_grads false true
bf16.bf16_optimizer_states false true
data_types.grad_accum_dtype null "bf16"
data_types.param_dtype null "bf16"
data_types.buffer_dtype null "bf16"
torch_autocast.enabled false true
torch_autocast.lower_precision_safe_modules null ["a"]
amp.enabled false true
train_batch_size null 64
train_micro_batch_size_per_gpu null 4
gradient_accumulation_steps null 4
managed_gradient_accumulation true false
gradient_clipping 1.0 0.5
prescale_gradients false true
gradient_predivide_factor 1.0 2.0
gradient_allreduce_op "mean" "sum"
sparse_gradients false true
communication_data_type null "bf16"
seq_parallel_communication_data_type "fp32" "bf16"
sequence_parallel_size 1 2
steps_per_print null 7
wall_clock_breakdown false true
memory_breakdown false true
dump_state false true
disable_allgather false true
dataloader_drop_last false true
zero_allow_untested_optimizer false true
zero_force_ds_cpu_optimizer true false
graph_harvesting false true
vocabulary_size null 9
log_level null "info"
optimizer.params.lr 1e-3 1e-4
optimizer.params.bias_correction true false
optimizer.params.betas [0.9,0.999] [0.8,0.9]
optimizer.params.eps 1e-8 1e-6
optimizer.params.weight_decay 0 0.1
optimizer.params.amsgrad false true
optimizer.params.adam_w_mode true false
optimizer.params.muon_lr null 1e-3
scheduler.params.warmup_min_lr 0 1e-5
scheduler.params.warmup_max_lr null 1e-4
scheduler.params.warmup_num_steps 1000 10
scheduler.params.warmup_type "log" "linear"
scheduler.params.last_batch_iteration -1 5
activation_checkpointing.partition_activations false true
activation_checkpointing.contiguous_memory_optimization false true
activation_checkpointing.cpu_checkpointing false true
activation_checkpointing.synchronize_checkpoint_boundary false true
activation_checkpointing.profile false true
activation_checkpointing.number_checkpoints null 4
aio.block_size 1048576 4096
aio.use_gds false true
checkpoint.tag_validation "Warn" "Fail"
checkpoint.load_universal false true
checkpoint.use_node_local_storage false true
flops_profiler.enabled false true
comms_logger.enabled false true
tensorboard.enabled false true
csv_monitor.enabled false true
wandb.enabled false true
wandb.project "deepspeed" "mine"
comet.enabled false true
elasticity.enabled false true
autotuning.enabled false true
tensor_parallel.autotp_size 0 2
hybrid_engine.enabled false true
progressive_layer_drop.enabled false true
eigenvalue.enabled false true
data_efficiency.enabled false true
curriculum_learning.enabled false true
compression_training.sparse_pruning.shared_parameters.enabled false true
"""
# Those of the table that change no number: beside HARMLESS, what copies, checks, measures or prepares.
TUNING = HARMLESS | set(
    """
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.legacy_stage1 zero_optimization.stage3_model_persistence_threshold
    zero_optimization.stage3_module_granularity_threshold zero_optimization.stage3_use_all_reduce_for_fetch_params
    zero_optimization.stage3_allgather_sequential zero_optimization.memory_efficient_linear zero_optimization.pipeline_loading_checkpoint
    zero_optimization.override_module_apply zero_optimization.log_trace_cache_warnings zero_optimization.enable_sanity_checks
    zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.offload_optimizer.cpuadam_cores_perc
    fp16.auto_cast bf16.immediate_grad_update bf16.check_grad_overflow data_types.buffer_dtype gradient_predivide_factor
    seq_parallel_communication_data_type disable_allgather dataloader_drop_last graph_harvesting vocabulary_size log_level
    activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile aio.use_gds
    """.split()
)
AROUND = {
    "train_micro_batch_size_per_gpu": 2,
    f"{ZERO}.stage": 3,
    f"{ZERO}.offload_optimizer.device": "nvme",
    f"{ZERO}.offload_param.device": "nvme",
    "optimizer.type": "Adam",
    f"{OPT}.lr": 5e-4,
    "scheduler.type": "WarmupLR",
}
ON = {  # what must be on for a key to be read
    "fp16": {"fp16.enabled": True},
    "bf16": {"bf16.enabled": True},
    "torch_autocast": {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16"},
    "wandb": {"wandb.enabled": True},
}


@pytest.mark.parametrize("row", DEFAULTS.strip().splitlines(), ids=lambda row: row.split()[0])
def test_a_key_that_is_not_at_its_default_is_never_silent(row):
    name, default, other = row.split(" ")
    around = {**AROUND, **ON.get(name.partition(".")[0], {})}
    without = translate.translate(tree.nested({key: value for key, value in around.items() if key != name}, "."))
    told = {}
    for value in (json.loads(default), json.loads(other)):
        found = translate.translate(tree.nested({**around, name: value}, "."))
        told[value == json.loads(other)] = [
            line for line in found.lines if line.key == name or line.key.startswith(f"{name}.")
        ]
        if value != json.loads(other) and value is not None:
            assert not [line for line in told[False] if line.verdict == keys.UNSUPPORTED], "a default is no demand"
    (line,) = told[True]
    assert line.text not in ("it is off", "it is empty", "it is null", "other keys decide it"), line
    if name in TUNING:
        assert line.verdict in (keys.IMPLIED, keys.NO_EFFECT) and found.settings == without.settings
    elif line.verdict == keys.TAKEN:
        assert found.settings != without.settings
    else:
        assert line.verdict == keys.UNSUPPORTED
        assert found.settings == without.settings or "taken instead" in line.text
