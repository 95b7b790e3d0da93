"""Reads forty files key by key. This module tests what configs of DeepSpeed, Accelerate and training scripts mean.

A file is a row for each key, with its value in JSON and its meaning:

    KEY VALUE -> SETTING VALUE ...     it decides these settings
    KEY VALUE ~> SETTING VALUE ...     these are assumed for a training script
    KEY VALUE unsupported              it has no counterpart
    KEY VALUE off                      this value switches it off
    KEY VALUE                          it changes no number of a run (HARMLESS)
    (KEY) -> SETTING VALUE ...         a line tells these settings if the file lacks the key

Rows after `file NAME` are of a file beside it.
"""

import dataclasses
import json
from typing import Any

import pytest
import yaml

from zerojax import configs, tree
from zerojax.migration import documents, keys, translate
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

ZERO, OPT, SCHED, DS = "zero_optimization", "optimizer.params", "scheduler.params", "deepspeed_config"
LOCAL = """
compute_environment "LOCAL_MACHINE"
debug false
machine_rank 0
main_training_function "main"
num_machines 1
num_processes 2 -> emulate_devices 2
rdzv_backend "static"
same_network true
use_cpu false
""".strip()
ADAPTERS = """
model_name_or_path "opt/llama" -> init_from "opt/llama"
trust_remote_code true
stage "sft" ~> data.task "chat"
do_train true
dataset "chats.jsonl" -> data.train_file "chats.jsonl"
template "llama3" unsupported
cutoff_len 2048 -> seq_len 2048
overwrite_cache true
preprocessing_num_workers 16
output_dir "saves" unsupported
logging_steps 10 -> log_every 10
save_steps 500 -> checkpoint.every 500
plot_loss true
overwrite_output_dir true
per_device_train_batch_size 1 -> micro_batch_size 1 global_batch_size 0
gradient_accumulation_steps 8 -> grad_accum 8
learning_rate 0.0001 -> optimizer.learning_rate 0.0001
num_train_epochs 3.0 -> epochs 3.0
lr_scheduler_type "cosine" -> optimizer.schedule "cosine" optimizer.final_fraction 0.0
warmup_ratio 0.1 -> optimizer.warmup_steps 0.1
bf16 true -> precision "bf16"
ddp_timeout 180000000
""".strip()
NO_OPTIMIZER = """
(optimizer.type) -> optimizer.name "adamw" optimizer.learning_rate 5e-5 optimizer.weight_decay 0.0
(scheduler.type) -> optimizer.schedule "linear" optimizer.warmup_steps 0 optimizer.final_fraction 0.0
""".strip()
DEFAULTS_OF_ARGUMENTS = """
(learning_rate) -> optimizer.learning_rate 5e-5
(weight_decay) -> optimizer.weight_decay 0.0
(adam_beta1) -> optimizer.b1 0.9
(adam_beta2) -> optimizer.b2 0.999
(adam_epsilon) -> optimizer.eps 1e-8
(max_grad_norm) -> optimizer.clip_norm 1.0
""".strip()
DEEPSPEED = {
    "getting started, fp16 at stage 2 with the optimizer on the host": """
train_batch_size 8 -> global_batch_size 8 micro_batch_size 0
gradient_accumulation_steps 1 -> grad_accum 1
optimizer.type "Adam" -> optimizer.name "adamw"
optimizer.params.lr 0.00015 -> optimizer.learning_rate 0.00015
fp16.enabled true -> precision "fp16"
zero_optimization.stage 2 -> zero.stage 2
zero_optimization.offload_optimizer.device "cpu" -> offload.optimizer "host"
(gradient_clipping) -> optimizer.clip_norm 1.0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
""",
    "an image classifier with a warm-up": """
train_batch_size 16 -> global_batch_size 16
steps_per_print 2000 -> log_every 2000
optimizer.type "Adam" -> optimizer.name "adamw"
optimizer.params.lr 0.001 -> optimizer.learning_rate 0.001
optimizer.params.betas [0.8, 0.999] -> optimizer.b1 0.8 optimizer.b2 0.999
optimizer.params.eps 1e-8 -> optimizer.eps 1e-8
optimizer.params.weight_decay 3e-7 -> optimizer.weight_decay 3e-7 optimizer.weight_decay_on "all"
scheduler.type "WarmupLR" -> optimizer.schedule "WarmupLR"
scheduler.params.warmup_min_lr 0 -> optimizer.initial_fraction 0.0
scheduler.params.warmup_max_lr 0.001 -> optimizer.learning_rate 0.001
scheduler.params.warmup_num_steps 1000 -> optimizer.warmup_steps 1000
gradient_clipping 1.0 -> optimizer.clip_norm 1.0
prescale_gradients false
bf16.enabled false off
fp16.enabled true -> precision "fp16"
fp16.fp16_master_weights_and_grads false off
fp16.loss_scale 0 -> loss_scale.static 0.0
fp16.loss_scale_window 500 -> loss_scale.window 500
fp16.hysteresis 2 -> loss_scale.hysteresis 2
fp16.min_loss_scale 1 -> loss_scale.min_scale 1.0
fp16.initial_scale_power 15 -> loss_scale.init_scale 32768.0
wall_clock_breakdown false
zero_optimization.stage 0 -> zero.stage 0
zero_optimization.allgather_partitions true
zero_optimization.reduce_scatter true
zero_optimization.allgather_bucket_size 50000000
zero_optimization.reduce_bucket_size 50000000
zero_optimization.overlap_comm true
zero_optimization.contiguous_gradients true
zero_optimization.cpu_offload false off
""",
    "a language model at stage 1, with the legacy truth value": """
train_batch_size 64 -> global_batch_size 64
train_micro_batch_size_per_gpu 4 -> micro_batch_size 4 grad_accum 0
zero_optimization true -> zero.stage 1
bfloat16.enabled true -> precision "bf16"
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr 0.0001 -> optimizer.learning_rate 0.0001
(gradient_clipping) -> optimizer.clip_norm 1.0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
""",
    "a transformers file for stage 2, all auto": """
fp16.enabled "auto" ~> precision "fp32"
fp16.loss_scale 0 off
fp16.loss_scale_window 1000 off
fp16.initial_scale_power 16 off
fp16.hysteresis 2 off
fp16.min_loss_scale 1 off
bf16.enabled "auto" ~> precision "fp32"
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr "auto" ~> optimizer.learning_rate 5e-5
optimizer.params.betas "auto" ~> optimizer.b1 0.9 optimizer.b2 0.999
optimizer.params.eps "auto" ~> optimizer.eps 1e-8
optimizer.params.weight_decay "auto" ~> optimizer.weight_decay 0.0 optimizer.weight_decay_on "all"
scheduler.type "WarmupLR" -> optimizer.schedule "WarmupLR"
scheduler.params.warmup_min_lr "auto" ~> optimizer.initial_fraction 0.0
scheduler.params.warmup_max_lr "auto" ~> optimizer.learning_rate 5e-5
scheduler.params.warmup_num_steps "auto" ~> optimizer.warmup_steps 0
zero_optimization.stage 2 -> zero.stage 2
zero_optimization.offload_optimizer.device "cpu" -> offload.optimizer "host"
zero_optimization.offload_optimizer.pin_memory true
zero_optimization.allgather_partitions true
zero_optimization.overlap_comm true
zero_optimization.reduce_bucket_size 2e8
zero_optimization.contiguous_gradients true
gradient_accumulation_steps "auto" ~> grad_accum 1
gradient_clipping "auto" ~> optimizer.clip_norm 1.0
train_batch_size "auto" off
train_micro_batch_size_per_gpu "auto" ~> micro_batch_size 1
""",
    "a transformers file for stage 3 with both offloads": """
bf16.enabled "auto" ~> precision "fp32"
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr "auto" ~> optimizer.learning_rate 5e-5
optimizer.params.betas "auto" ~> optimizer.b1 0.9 optimizer.b2 0.999
optimizer.params.eps "auto" ~> optimizer.eps 1e-8
optimizer.params.weight_decay "auto" ~> optimizer.weight_decay 0.0 optimizer.weight_decay_on "all"
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.offload_optimizer.device "cpu" -> offload.optimizer "host"
zero_optimization.offload_optimizer.pin_memory true
zero_optimization.offload_param.device "cpu" -> offload.params "host"
zero_optimization.offload_param.pin_memory true
zero_optimization.overlap_comm true
zero_optimization.contiguous_gradients true
zero_optimization.sub_group_size 1e9
zero_optimization.reduce_bucket_size "auto"
zero_optimization.stage3_prefetch_bucket_size "auto"
zero_optimization.stage3_param_persistence_threshold "auto" ~> zero.min_size 1024
zero_optimization.stage3_max_live_parameters 1e9
zero_optimization.stage3_max_reuse_distance 1e9
zero_optimization.stage3_gather_16bit_weights_on_model_save true
gradient_accumulation_steps "auto" ~> grad_accum 1
gradient_clipping "auto" ~> optimizer.clip_norm 1.0
train_batch_size "auto" off
train_micro_batch_size_per_gpu "auto" ~> micro_batch_size 1
steps_per_print 2000 -> log_every 2000
wall_clock_breakdown false
(scheduler.type) -> optimizer.schedule "linear" optimizer.warmup_steps 0
""",
    "infinity on a disk": """
train_micro_batch_size_per_gpu 2 -> micro_batch_size 2 global_batch_size 0 grad_accum 1
bf16.enabled true -> precision "bf16"
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr 3e-5 -> optimizer.learning_rate 3e-5
optimizer.params.betas [0.8, 0.999] -> optimizer.b1 0.8 optimizer.b2 0.999
optimizer.params.eps 1e-8 -> optimizer.eps 1e-8
optimizer.params.weight_decay 3e-7 -> optimizer.weight_decay 3e-7
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.offload_optimizer.device "nvme" -> offload.optimizer "nvme"
zero_optimization.offload_optimizer.nvme_path "/local_nvme" -> offload.nvme_path "/local_nvme"
zero_optimization.offload_optimizer.pin_memory true
zero_optimization.offload_optimizer.buffer_count 4
zero_optimization.offload_optimizer.fast_init false
zero_optimization.offload_param.device "nvme" -> offload.params "nvme"
zero_optimization.offload_param.nvme_path "/local_nvme" -> offload.nvme_path "/local_nvme"
zero_optimization.offload_param.pin_memory true
zero_optimization.offload_param.buffer_count 5
zero_optimization.offload_param.buffer_size 1e8
zero_optimization.offload_param.max_in_cpu 1e9
zero_optimization.stage3_param_persistence_threshold 1e6 -> zero.min_size 1000000
aio.block_size 262144
aio.queue_depth 32
aio.thread_count 1
aio.single_submit false
aio.overlap_events true
(gradient_clipping) -> optimizer.clip_norm 1.0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
""",
    "params alone on a disk": f"""
train_batch_size 8 -> global_batch_size 8
bf16.enabled true -> precision "bf16"
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.offload_param.device "nvme" unsupported
zero_optimization.offload_param.nvme_path "/n" off
{NO_OPTIMIZER}
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "ZeRO++": """
train_batch_size 32 -> global_batch_size 32
bf16.enabled true -> precision "bf16"
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.zero_quantized_weights true -> wire.weights "int8"
zero_optimization.zero_quantized_gradients true -> wire.gradients "int4"
zero_optimization.zero_hpz_partition_size 8 -> wire.second_copy true wire.host_devices 8
zero_optimization.contiguous_gradients true
zero_optimization.overlap_comm true
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr 0.0001 -> optimizer.learning_rate 0.0001
(gradient_clipping) -> optimizer.clip_norm 1.0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
""",
    "ZeRO++ switched off by its defaults": f"""
train_batch_size 32 -> global_batch_size 32
fp16.enabled false off
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.zero_quantized_weights false off
zero_optimization.zero_quantized_gradients "false" off
zero_optimization.zero_hpz_partition_size 1 off
{NO_OPTIMIZER}
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "MiCS": f"""
train_batch_size 32 -> global_batch_size 32
train_micro_batch_size_per_gpu 2 -> micro_batch_size 2
gradient_accumulation_steps 1 -> grad_accum 0
bf16.enabled true -> precision "bf16"
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.mics_shard_size 4 -> mesh.data 4 mesh.replica 4
zero_optimization.mics_hierarchical_params_gather true
{NO_OPTIMIZER}
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "1-bit Adam": """
train_batch_size 4096 -> global_batch_size 4096
train_micro_batch_size_per_gpu 16 -> micro_batch_size 16
optimizer.type "OneBitAdam" unsupported
optimizer.params.lr 0.0004 -> optimizer.learning_rate 0.0004 optimizer.name "adamw"
optimizer.params.freeze_step 23000 unsupported
optimizer.params.cuda_aware false off
optimizer.params.comm_backend_name "nccl" off
gradient_clipping 1.0 -> optimizer.clip_norm 1.0
fp16.enabled true -> precision "fp16"
fp16.loss_scale 128 -> loss_scale.static 128.0
(zero_optimization.stage) -> zero.stage 0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
""",
    "LAMB with its limits": """
train_batch_size 1024 -> global_batch_size 1024
optimizer.type "Lamb" -> optimizer.name "lamb"
optimizer.params.lr 0.006 -> optimizer.learning_rate 0.006
optimizer.params.betas [0.9, 0.999] -> optimizer.b1 0.9
optimizer.params.weight_decay 0.01 -> optimizer.weight_decay 0.01
optimizer.params.bias_correction false unsupported
optimizer.params.max_coeff 0.3 unsupported
optimizer.params.min_coeff 0.01 unsupported
gradient_clipping 1.0 -> optimizer.clip_norm 1.0
(zero_optimization.stage) -> zero.stage 0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
(bf16.enabled) -> precision "fp32"
""",
    "Adam with L2 and AMSGrad": """
train_batch_size 8 -> global_batch_size 8
optimizer.type "Adam" -> optimizer.name "adam"
optimizer.params.lr 0.001 -> optimizer.learning_rate 0.001
optimizer.params.adam_w_mode false -> optimizer.name "adam"
optimizer.params.weight_decay 0.01 unsupported
optimizer.params.amsgrad true unsupported
optimizer.params.torch_adam true
(zero_optimization.stage) -> zero.stage 0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
(bf16.enabled) -> precision "fp32"
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "SGD with momentum": """
train_batch_size 8 -> global_batch_size 8
optimizer.type "SGD" -> optimizer.name "sgd"
optimizer.params.lr 0.1 -> optimizer.learning_rate 0.1
optimizer.params.momentum 0.9 -> optimizer.b1 0.9
optimizer.params.nesterov true unsupported
optimizer.params.weight_decay 0 -> optimizer.weight_decay 0.0
gradient_clipping 0 -> optimizer.clip_norm 0.0
(zero_optimization.stage) -> zero.stage 0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
(bf16.enabled) -> precision "fp32"
""",
    "Lion, with a parameter that it lacks": """
train_batch_size 8 -> global_batch_size 8
bf16.enabled true -> precision "bf16"
optimizer.type "Lion" -> optimizer.name "lion"
optimizer.params.lr 0.0001 -> optimizer.learning_rate 0.0001
optimizer.params.betas [0.95, 0.98] -> optimizer.b1 0.95 optimizer.b2 0.98
optimizer.params.eps 1e-8 unsupported
(zero_optimization.stage) -> zero.stage 0
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "a linear decay": """
train_batch_size 8 -> global_batch_size 8
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr 0.001 off
scheduler.type "WarmupDecayLR" -> optimizer.schedule "WarmupDecayLR"
scheduler.params.total_num_steps 5000 -> steps 5000
scheduler.params.warmup_min_lr 1e-6 -> optimizer.initial_fraction 0.01
scheduler.params.warmup_max_lr 0.0001 -> optimizer.learning_rate 0.0001
scheduler.params.warmup_num_steps 500 -> optimizer.warmup_steps 500
scheduler.params.warmup_type "linear" -> optimizer.warmup "linear"
scheduler.params.last_batch_iteration -1 off
(zero_optimization.stage) -> zero.stage 0
(bf16.enabled) -> precision "fp32"
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "a cosine, and a schedule's foreign parameter": """
train_batch_size 8 -> global_batch_size 8
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr 0.0002 -> optimizer.learning_rate 0.0002
scheduler.type "WarmupCosineLR" -> optimizer.schedule "WarmupCosineLR"
scheduler.params.total_num_steps 900 -> steps 900
scheduler.params.warmup_num_steps 90 -> optimizer.warmup_steps 90
scheduler.params.warmup_min_ratio 0.1 -> optimizer.initial_fraction 0.1
scheduler.params.cos_min_ratio 0.05 -> optimizer.final_fraction 0.05
scheduler.params.warmup_max_lr 0.001 unsupported
(zero_optimization.stage) -> zero.stage 0
(bf16.enabled) -> precision "fp32"
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "one cycle": """
train_batch_size 8 -> global_batch_size 8
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr 0.0002 -> optimizer.learning_rate 0.0002 optimizer.schedule "constant"
scheduler.type "OneCycle" unsupported
scheduler.params.cycle_min_lr 1e-5 unsupported
scheduler.params.cycle_max_lr 0.001 unsupported
scheduler.params.cycle_first_step_size 100 unsupported
(zero_optimization.stage) -> zero.stage 0
(bf16.enabled) -> precision "fp32"
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "activations, profiles and monitors": f"""
train_batch_size 8 -> global_batch_size 8
bf16.enabled true -> precision "bf16"
activation_checkpointing.partition_activations true
activation_checkpointing.cpu_checkpointing true unsupported
activation_checkpointing.contiguous_memory_optimization false
activation_checkpointing.number_checkpoints null
flops_profiler.enabled true
flops_profiler.profile_step 1
flops_profiler.detailed true
comms_logger.enabled true
comms_logger.verbose false
tensorboard.enabled true
tensorboard.output_path "logs"
tensorboard.job_name "run"
csv_monitor.enabled true
csv_monitor.output_path "logs"
wandb.enabled true -> metrics.to ["tensorboard", "wandb"]
wandb.project "mine" -> metrics.project "mine"
wandb.group "g"
wandb.team "t"
comet.enabled true unsupported
comet.project "mine" unsupported
{NO_OPTIMIZER}
(zero_optimization.stage) -> zero.stage 0
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "blocks that are off": f"""
train_batch_size 8 -> global_batch_size 8
elasticity.enabled false off
elasticity.max_train_batch_size 2000 off
autotuning.metric "throughput" off
amp.enabled false off
amp.opt_level "O1" off
progressive_layer_drop.enabled false off
progressive_layer_drop.theta 0.5 off
compression_training.weight_quantization.shared_parameters.enabled false off
compression_training.weight_quantization.different_groups.a.b 1 off
sparse_gradients false off
wandb.enabled false off
wandb.project "mine" off
{NO_OPTIMIZER}
(zero_optimization.stage) -> zero.stage 0
(bf16.enabled) -> precision "fp32"
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "the same blocks, on": f"""
train_batch_size 8 -> global_batch_size 8
elasticity.enabled true unsupported
elasticity.max_train_batch_size 2000 unsupported
autotuning.enabled true unsupported
autotuning.metric "throughput" unsupported
progressive_layer_drop.enabled true unsupported
progressive_layer_drop.theta 0.5 unsupported
curriculum_learning.enabled true unsupported
curriculum_learning.curriculum_type "seqlen" unsupported
compression_training.weight_quantization.shared_parameters.enabled true unsupported
sparse_gradients true unsupported
{NO_OPTIMIZER}
(zero_optimization.stage) -> zero.stage 0
(bf16.enabled) -> precision "fp32"
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "sums and communication": f"""
train_micro_batch_size_per_gpu 1 -> micro_batch_size 1
gradient_accumulation_steps 4 -> grad_accum 4
bf16.enabled true -> precision "bf16"
bf16.immediate_grad_update true off
data_types.grad_accum_dtype "bf16" -> accum_dtype "bf16"
communication_data_type "bf16" -> reduce_dtype "bf16"
gradient_predivide_factor 2.0 off
gradient_allreduce_op "sum" unsupported
seq_parallel_communication_data_type "fp32" off
sequence_parallel_size 2 -> mesh.context 2
{NO_OPTIMIZER}
(zero_optimization.stage) -> zero.stage 0
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "bf16 without master weights, and a share of the state on the host": """
train_batch_size 8 -> global_batch_size 8
bf16.enabled true -> precision "bf16_sr"
bf16.bf16_master_weights_and_grads true -> precision "bf16_sr"
bf16.bf16_optimizer_states true -> optimizer.moments "bf16"
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.offload_optimizer.device "cpu" -> offload.optimizer "host"
zero_optimization.offload_optimizer.ratio 0.4 -> offload.fraction 0.4
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr 1e-5 -> optimizer.learning_rate 1e-5
(scheduler.type) -> optimizer.schedule "constant" optimizer.warmup_steps 0
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "options of which the run has the opposite": f"""
train_batch_size 8 -> global_batch_size 8
managed_gradient_accumulation false unsupported
zero_optimization.stage 1 -> zero.stage 1
zero_optimization.load_from_fp32_weights false unsupported
zero_optimization.ignore_unused_parameters false unsupported
torch_autocast.enabled true -> precision "bf16"
torch_autocast.dtype "bfloat16" -> precision "bf16"
torch_autocast.lower_precision_safe_modules ["torch.nn.Linear"] unsupported
amp.enabled true unsupported
tensor_parallel.autotp_size 4 -> mesh.model 4
{NO_OPTIMIZER}
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "a typing error": f"""
train_batch_size 8 -> global_batch_size 8
zero_optimization.stage 2 -> zero.stage 2
zero_optimization.overlap_com true unsupported
gradient_cliping 1.0 unsupported
{NO_OPTIMIZER}
(bf16.enabled) -> precision "fp32"
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
}
ACCELERATE = {
    "PEFT's guide: stage 3 with both offloads": f"""
{LOCAL}
distributed_type "DEEPSPEED" -> zero.stage 3
mixed_precision "no" -> precision "fp32"
downcast_bf16 "no"
deepspeed_config.gradient_accumulation_steps 1 -> grad_accum 1
deepspeed_config.gradient_clipping 1.0 -> optimizer.clip_norm 1.0
deepspeed_config.offload_optimizer_device "cpu" -> offload.optimizer "host"
deepspeed_config.offload_param_device "cpu" -> offload.params "host"
deepspeed_config.zero3_init_flag true
deepspeed_config.zero3_save_16bit_model true
deepspeed_config.zero_stage 3 -> zero.stage 3
{NO_OPTIMIZER}
(train_micro_batch_size_per_gpu) -> micro_batch_size 1
""",
    "stage 2 without clipping": f"""
{LOCAL}
distributed_type "DEEPSPEED" -> zero.stage 2
mixed_precision "bf16" -> precision "bf16"
deepspeed_config.gradient_accumulation_steps 4 -> grad_accum 4
deepspeed_config.offload_optimizer_device "none" off
deepspeed_config.offload_param_device "none" off
deepspeed_config.zero3_init_flag false
deepspeed_config.zero_stage 2 -> zero.stage 2
deepspeed_config.deepspeed_multinode_launcher "standard"
{NO_OPTIMIZER}
(train_micro_batch_size_per_gpu) -> micro_batch_size 1
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "a disk": f"""
{LOCAL}
distributed_type "DEEPSPEED" -> zero.stage 3
mixed_precision "fp16" -> precision "fp16"
deepspeed_config.gradient_clipping "auto" ~> optimizer.clip_norm 1.0
deepspeed_config.gradient_accumulation_steps "auto" ~> grad_accum 1
deepspeed_config.offload_optimizer_device "nvme" -> offload.optimizer "nvme"
deepspeed_config.offload_optimizer_nvme_path "/fast" -> offload.nvme_path "/fast"
deepspeed_config.zero_stage 3 -> zero.stage 3
{NO_OPTIMIZER}
(train_micro_batch_size_per_gpu) -> micro_batch_size 1
""",
    "a file whose auto takes the keys beside it": f"""
{LOCAL}
distributed_type "DEEPSPEED" off
mixed_precision "bf16" -> precision "bf16"
deepspeed_config.deepspeed_config_file "ds.json"
deepspeed_config.zero3_init_flag true
deepspeed_config.gradient_clipping 0.5 -> optimizer.clip_norm 0.5
(ds.json: optimizer.type) -> optimizer.name "adamw" optimizer.learning_rate 5e-5 optimizer.weight_decay 0.0
(ds.json: scheduler.type) -> optimizer.schedule "linear" optimizer.warmup_steps 0 optimizer.final_fraction 0.0
file ds.json
bf16.enabled "auto" -> precision "bf16"
gradient_clipping "auto" -> optimizer.clip_norm 0.5
zero_optimization.stage 2 -> zero.stage 2
train_batch_size 32 -> global_batch_size 32
""",
    "FSDP, sharded, with params on the CPU": f"""
{LOCAL}
distributed_type "FSDP" -> zero.stage 3
mixed_precision "bf16" -> precision "bf16"
fsdp_config.fsdp_auto_wrap_policy "TRANSFORMER_BASED_WRAP"
fsdp_config.fsdp_backward_prefetch "BACKWARD_PRE"
fsdp_config.fsdp_forward_prefetch false
fsdp_config.fsdp_offload_params true -> offload.params "host" offload.optimizer "host"
fsdp_config.fsdp_sharding_strategy "FULL_SHARD" -> zero.stage 3
fsdp_config.fsdp_state_dict_type "SHARDED_STATE_DICT"
fsdp_config.fsdp_sync_module_states true
fsdp_config.fsdp_use_orig_params true
fsdp_config.fsdp_cpu_ram_efficient_loading true
{NO_OPTIMIZER}
(train_micro_batch_size_per_gpu) -> micro_batch_size 1
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "FSDP 2": f"""
{LOCAL}
distributed_type "FSDP" -> zero.stage 3
mixed_precision "bf16" -> precision "bf16"
fsdp_config.fsdp_version 2
fsdp_config.fsdp_reshard_after_forward true -> zero.stage 3
fsdp_config.fsdp_activation_checkpointing true -> model.remat "full"
fsdp_config.fsdp_offload_params false off
fsdp_config.fsdp_transformer_layer_cls_to_wrap "LlamaDecoderLayer"
parallelism_config.parallelism_config_dp_replicate_size 1 off
parallelism_config.parallelism_config_dp_shard_size 2 -> mesh.data 2
parallelism_config.parallelism_config_tp_size 1 off
parallelism_config.parallelism_config_cp_size 1 off
{NO_OPTIMIZER}
(train_micro_batch_size_per_gpu) -> micro_batch_size 1
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
    "copies alone, in fp8": f"""
{LOCAL}
distributed_type "MULTI_GPU" -> zero.stage 0
mixed_precision "fp8" -> precision "fp8"
fp8_config.backend "TE" -> fp8.recipe "delayed"
fp8_config.amax_history_len 32 -> fp8.history 32
fp8_config.amax_compute_algo "max" off
fp8_config.fp8_format "HYBRID"
fp8_config.interval 1
fp8_config.margin 2 unsupported
fp8_config.use_autocast_during_eval false
{NO_OPTIMIZER}
(train_micro_batch_size_per_gpu) -> micro_batch_size 1
(gradient_clipping) -> optimizer.clip_norm 1.0
""",
}
TRAINER = {
    "adapters on conversations": f"""
{ADAPTERS}
finetuning_type "lora" ~> lora.alpha 16.0
lora_rank 8 -> lora.r 8 export.format "peft"
lora_target "all" -> lora.target_modules "all-linear"
{DEFAULTS_OF_ARGUMENTS}
""",
    "adapters on frozen kernels of 4 bits": f"""
{ADAPTERS}
finetuning_type "lora" off
lora_rank 8 -> lora.r 8 export.format "peft"
lora_target "all" -> lora.target_modules "all-linear"
quantization_bit 4 -> lora.quantize "nf4"
lora_alpha 32 -> lora.alpha 32.0
lora_dropout 0.05 -> lora.dropout 0.05
report_to "none" -> metrics.to []
{DEFAULTS_OF_ARGUMENTS}
""",
    "all weights at stage 3": f"""
{ADAPTERS}
finetuning_type "full" off
deepspeed "ds.json" off
pure_bf16 true unsupported
{DEFAULTS_OF_ARGUMENTS}
file ds.json
gradient_accumulation_steps "auto" -> grad_accum 8
gradient_clipping "auto" -> optimizer.clip_norm 1.0
train_batch_size "auto" off
train_micro_batch_size_per_gpu "auto" -> micro_batch_size 1
fp16.enabled "auto" off
fp16.loss_scale 0 off
fp16.loss_scale_window 1000 off
fp16.initial_scale_power 16 off
fp16.hysteresis 2 off
fp16.min_loss_scale 1 off
bf16.enabled "auto" -> precision "bf16"
zero_optimization.stage 3 -> zero.stage 3
zero_optimization.overlap_comm false
zero_optimization.sub_group_size 1e9
""",
    "pre-training": f"""
model_name_or_path "opt/llama" -> init_from "opt/llama"
stage "pt" -> data.task "text"
do_train true
dataset "c4_demo" unsupported
cutoff_len 1024 -> seq_len 1024
max_samples 1000 unsupported
output_dir "saves" unsupported
max_steps 300 -> steps 300
warmup_ratio 0.1 -> optimizer.warmup_steps 30
per_device_train_batch_size 4 -> micro_batch_size 4
save_strategy "no" -> checkpoint.every 0
optim "adamw_8bit" -> optimizer.name "adamw" optimizer.moments "int8"
{DEFAULTS_OF_ARGUMENTS}
""",
    "TRL with PEFT": f"""
model_name_or_path "opt/qwen" -> init_from "opt/qwen"
dataset_name "trl-lib/Capybara" -> data.name "hf:trl-lib/Capybara"
output_dir "out" unsupported
use_peft true ~> lora.dropout 0.05
lora_r 32 -> lora.r 32
lora_alpha 16 -> lora.alpha 16.0
lora_target_modules ["q_proj", "v_proj"] -> lora.target_modules "q_proj,v_proj"
lora_task_type "CAUSAL_LM"
load_in_4bit true -> lora.quantize "nf4"
bnb_4bit_quant_type "nf4" off
bnb_4bit_use_double_quant true
max_length 2048 -> seq_len 2048
packing true -> data.pack true
learning_rate 0.0002 -> optimizer.learning_rate 0.0002
max_steps 100 -> steps 100
eval_strategy "steps" -> evaluate.every 50
eval_steps 50 -> evaluate.every 50
gradient_checkpointing true -> model.remat "full"
attn_implementation "flash_attention_2"
torch_dtype "bfloat16"
report_to ["wandb"] -> metrics.to ["wandb"]
run_name "mine" -> metrics.name "mine"
seed 7 -> seed 7
(per_device_train_batch_size) -> micro_batch_size 8
{DEFAULTS_OF_ARGUMENTS}
""",
    "a Trainer with epochs and a share of warm-up": f"""
output_dir "out" unsupported
num_train_epochs 3 unsupported
warmup_ratio 0.06 -> optimizer.warmup_steps 0.06 optimizer.schedule "linear"
learning_rate 2e-5 -> optimizer.learning_rate 2e-5
weight_decay 0.01 -> optimizer.weight_decay 0.01
adam_beta2 0.98 -> optimizer.b2 0.98
max_grad_norm 0.5 -> optimizer.clip_norm 0.5
per_device_train_batch_size 16 -> micro_batch_size 16
per_device_eval_batch_size 32 unsupported
fp16 true -> precision "fp16"
eval_strategy "epoch" unsupported
save_strategy "epoch" unsupported
label_smoothing_factor 0.1 unsupported
save_total_limit 3 -> checkpoint.keep_last 3
{DEFAULTS_OF_ARGUMENTS}
""",
    "a Trainer whose DeepSpeed config is all auto": f"""
output_dir "out" unsupported
deepspeed "ds.json" off
learning_rate 3e-5 -> optimizer.learning_rate 3e-5
per_device_train_batch_size 2 -> micro_batch_size 2
gradient_accumulation_steps 16 -> grad_accum 16
max_steps 1000 -> steps 1000
warmup_steps 50 -> optimizer.warmup_steps 50
bf16 true -> precision "bf16"
max_grad_norm 0.3 -> optimizer.clip_norm 0.3
{DEFAULTS_OF_ARGUMENTS}
file ds.json
gradient_accumulation_steps "auto" -> grad_accum 16
gradient_clipping "auto" -> optimizer.clip_norm 0.3
train_batch_size "auto" off
train_micro_batch_size_per_gpu "auto" -> micro_batch_size 2
bf16.enabled "auto" -> precision "bf16"
optimizer.type "AdamW" -> optimizer.name "adamw"
optimizer.params.lr "auto" -> optimizer.learning_rate 3e-5
optimizer.params.betas "auto" -> optimizer.b1 0.9 optimizer.b2 0.999
optimizer.params.eps "auto" -> optimizer.eps 1e-8
optimizer.params.weight_decay "auto" -> optimizer.weight_decay 0.0
scheduler.type "WarmupLR" -> optimizer.schedule "WarmupLR"
scheduler.params.warmup_min_lr "auto" ~> optimizer.initial_fraction 0.0
scheduler.params.warmup_max_lr "auto" -> optimizer.learning_rate 3e-5
scheduler.params.warmup_num_steps "auto" -> optimizer.warmup_steps 50
zero_optimization.stage 1 -> zero.stage 1
""",
    "the numbers of a dumped TrainingArguments": f"""
output_dir "out" unsupported
max_steps -1 off
warmup_steps 0 off
bf16 false -> precision "fp32"
fp16 false -> precision "fp32"
deepspeed null -> zero.stage 0
fsdp [] off
report_to [] -> metrics.to []
optim "adamw_torch_fused" -> optimizer.name "adamw"
lr_scheduler_type "constant" -> optimizer.schedule "constant"
weight_decay 0.0 -> optimizer.weight_decay 0.0
save_steps 0.1 unsupported
{DEFAULTS_OF_ARGUMENTS}
""",
}


@dataclasses.dataclass
class File:
    """A file and its meaning: settings by key where it decides or where they are assumed, and the keys without counterpart or effect."""

    content: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    named: dict[str, str] = dataclasses.field(default_factory=dict)  # what a row says of each key that it has
    taken: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    assumed: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    absent: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    prefix: str = ""  # of the names of keys beside it


def first_of(text):
    """Returns the JSON value that a text begins with, and the rest."""
    value, end = json.JSONDecoder().raw_decode(text)
    return value, text[end:].strip()


def settings_of(text):
    found = {}
    while text:
        place, text = text.split(" ", 1)
        value, text = first_of(text)
        found[place] = tuple(value) if isinstance(value, list) else value
    return found


def file_of(rows):
    file, flat = File(), {}
    for row in rows.strip().splitlines():
        name, rest = row.split(" ", 1)
        if name == "file":
            file.beside[rest] = flat = {}
            file.prefix = f"{rest}: " if f"{DS}.deepspeed_config_file" in file.content else "deepspeed."
        elif row.startswith("("):
            name, _, places = row[1:].partition(") -> ")
            file.absent[name] = settings_of(places)
        else:
            (flat if file.beside else file.content)[name], rest = first_of(rest)
            key = f"{ZERO}.stage" if row.startswith(f"{ZERO} true") else f"{file.prefix}{name}"
            file.named[key], _, places = rest.partition(" ")
            if file.named[key] in ("->", "~>"):
                (file.taken if file.named[key] == "->" else file.assumed)[key] = settings_of(places)
    file.absent = {key: values for key, values in file.absent.items() if key not in file.content}
    return file


FILES = {**DEEPSPEED, **ACCELERATE, **TRAINER}


def test_there_are_forty_files():
    assert len(FILES) == len(DEEPSPEED) + len(ACCELERATE) + len(TRAINER) == 40


@pytest.fixture(params=FILES)
def read(request, tmp_path):
    """Returns a file, its kind and its translation, as the command reads it."""
    file = file_of(FILES[request.param])
    content = tree.nested(file.content, ".")
    path = tmp_path / ("ds.json" if request.param in DEEPSPEED else "file.yaml")
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    for name, flat in file.beside.items():
        (tmp_path / name).write_text(json.dumps(tree.nested(flat, ".")))
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
    assert file.named.keys() <= told.keys()
    for name, line in told.items():
        if name not in file.named and line.value is None:
            continue
        if name in file.taken or name in file.assumed:
            assert line.verdict == (keys.TAKEN if name in file.taken else keys.ASSUMED), line
        elif file.named.get(name) == "unsupported":
            assert line.verdict == keys.UNSUPPORTED, line
        else:
            is_harmless = file.named.get(name) == "off" or name.removeprefix(file.prefix) in HARMLESS
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
