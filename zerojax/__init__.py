"""ZeRO for JAX: shards the optimizer state, gradients and params of any Flax model by one table of specs.

>>> mesh = zerojax.make_mesh()
>>> state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=3)
>>> train_step = zerojax.make_train_step(loss_fn, partition, clip_norm=1.0)
>>> state, metrics = train_step(state, batch)
"""

import inspect

import zerojax.launch.early  # first: it ends a command that is stopped during the imports below
import zerojax.signatures
from zerojax.checkpoint.checkpointer import Checkpointer
from zerojax.errors import UserError
from zerojax.inference.engine.engine import Engine
from zerojax.interop.pretrained import export_adapter, export_huggingface, load_huggingface
from zerojax.kinds import decayed, weight_kinds
from zerojax.launch.together import main_process_first, wait_for_everyone
from zerojax.lora.add import add_lora
from zerojax.lora.linen import with_lora
from zerojax.lora.settings import Lora
from zerojax.mesh import batch_sharding, make_mesh
from zerojax.migration.own_step import from_deepspeed_config
from zerojax.ops import fp8
from zerojax.ops.embedding import embedding_lookup
from zerojax.ops.tiles import over_tiles
from zerojax.ops.tokens import attention
from zerojax.optim.fused import fused_adamw, fused_lion
from zerojax.optim.master_weights import with_master_weights
from zerojax.optim.muon import muon
from zerojax.train_state import TrainState
from zerojax.zero.blocks.block_settings import Blocks
from zerojax.zero.blocks.where_used import where_used
from zerojax.zero.compare import compare_context, compare_sums
from zerojax.zero.fp8.modules import Fp8
from zerojax.zero.host.settings import Offload
from zerojax.zero.offload.late_norm import first_norm
from zerojax.zero.pipeline.state import Pipeline
from zerojax.zero.shard_state import shard_train_state
from zerojax.zero.sharded_batch.outputs import Mean, Sum
from zerojax.zero.stages import partition_state
from zerojax.zero.state_bytes import memory_table
from zerojax.zero.step import make_train_step
from zerojax.zero.step_values import BatchLayout, Sums
from zerojax.zero.update.loss_scale import DynamicLossScale, LossScaleState, StaticLossScale, raise_if_exhausted
from zerojax.zero.update.padding import pad, unpad
from zerojax.zero.weights.partition import Partition
from zerojax.zero.weights.placement import Placement
from zerojax.zero.wires.columns import ByColumns
from zerojax.zero.wires.experts import ToExperts
from zerojax.zero.wires.packed import PackedWires
from zerojax.zero.wires.unsent import with_unsent

__all__ = [
    "BatchLayout",
    "Blocks",
    "ByColumns",
    "Checkpointer",
    "DynamicLossScale",
    "Engine",
    "Fp8",
    "Lora",
    "LossScaleState",
    "Mean",
    "Offload",
    "PackedWires",
    "Partition",
    "Pipeline",
    "Placement",
    "StaticLossScale",
    "Sum",
    "Sums",
    "ToExperts",
    "TrainState",
    "UserError",
    "add_lora",
    "attention",
    "batch_sharding",
    "compare_context",
    "compare_sums",
    "decayed",
    "embedding_lookup",
    "export_adapter",
    "export_huggingface",
    "first_norm",
    "fp8",
    "from_deepspeed_config",
    "fused_adamw",
    "fused_lion",
    "load_huggingface",
    "main_process_first",
    "make_mesh",
    "make_train_step",
    "memory_table",
    "muon",
    "over_tiles",
    "pad",
    "partition_state",
    "raise_if_exhausted",
    "shard_train_state",
    "unpad",
    "wait_for_everyone",
    "weight_kinds",
    "where_used",
    "with_lora",
    "with_master_weights",
    "with_unsent",
]

globals().update(
    {name: zerojax.signatures.checked(one) for name in __all__ if inspect.isfunction(one := globals()[name])}
)
