"""ZeRO for JAX: shards the optimizer state, gradients and params of any Flax model by one table of specs.

>>> mesh = zerojax.make_mesh()
>>> state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=3)
>>> train_step = zerojax.make_train_step(loss_fn, partition, clip_norm=1.0)
>>> state, metrics = train_step(state, batch)
"""

import inspect
from typing import TYPE_CHECKING, Any

import zerojax.launch.early  # first: it ends a command that is stopped during later imports

if TYPE_CHECKING:  # `as` again: strict type checkers see no other import as public
    from zerojax.checkpoint.checkpointer import Checkpointer as Checkpointer
    from zerojax.errors import UserError as UserError
    from zerojax.inference.engine.engine import Engine as Engine
    from zerojax.interop.pretrained import export_adapter as export_adapter
    from zerojax.interop.pretrained import export_huggingface as export_huggingface
    from zerojax.interop.pretrained import load_huggingface as load_huggingface
    from zerojax.kinds import decayed as decayed
    from zerojax.kinds import weight_kinds as weight_kinds
    from zerojax.launch.together import main_process_first as main_process_first
    from zerojax.launch.together import wait_for_everyone as wait_for_everyone
    from zerojax.lora.add import add_lora as add_lora
    from zerojax.lora.linen import with_lora as with_lora
    from zerojax.lora.settings import Lora as Lora
    from zerojax.mesh import batch_sharding as batch_sharding
    from zerojax.mesh import make_mesh as make_mesh
    from zerojax.migration.own_step import from_deepspeed_config as from_deepspeed_config
    from zerojax.ops import fp8 as fp8
    from zerojax.ops.embedding import embedding_lookup as embedding_lookup
    from zerojax.ops.tiles import over_tiles as over_tiles
    from zerojax.ops.tokens import attention as attention
    from zerojax.optim.fused import fused_adamw as fused_adamw
    from zerojax.optim.fused import fused_lion as fused_lion
    from zerojax.optim.master_weights import with_master_weights as with_master_weights
    from zerojax.optim.muon import muon as muon
    from zerojax.train_state import TrainState as TrainState
    from zerojax.zero.blocks.block_settings import Blocks as Blocks
    from zerojax.zero.blocks.where_used import where_used as where_used
    from zerojax.zero.compare import compare_context as compare_context
    from zerojax.zero.compare import compare_sums as compare_sums
    from zerojax.zero.fp8.modules import Fp8 as Fp8
    from zerojax.zero.host.settings import Offload as Offload
    from zerojax.zero.offload.late_norm import first_norm as first_norm
    from zerojax.zero.pipeline.state import Pipeline as Pipeline
    from zerojax.zero.shard_state import shard_train_state as shard_train_state
    from zerojax.zero.sharded_batch.outputs import Mean as Mean
    from zerojax.zero.sharded_batch.outputs import Sum as Sum
    from zerojax.zero.stages import partition_state as partition_state
    from zerojax.zero.state_bytes import memory_table as memory_table
    from zerojax.zero.step import make_train_step as make_train_step
    from zerojax.zero.step_values import BatchLayout as BatchLayout
    from zerojax.zero.step_values import Sums as Sums
    from zerojax.zero.update.loss_scale import DynamicLossScale as DynamicLossScale
    from zerojax.zero.update.loss_scale import LossScaleState as LossScaleState
    from zerojax.zero.update.loss_scale import StaticLossScale as StaticLossScale
    from zerojax.zero.update.loss_scale import raise_if_exhausted as raise_if_exhausted
    from zerojax.zero.update.padding import pad as pad
    from zerojax.zero.update.padding import unpad as unpad
    from zerojax.zero.weights.partition import Partition as Partition
    from zerojax.zero.weights.placement import Placement as Placement
    from zerojax.zero.wires.columns import ByColumns as ByColumns
    from zerojax.zero.wires.experts import ToExperts as ToExperts
    from zerojax.zero.wires.packed import PackedWires as PackedWires
    from zerojax.zero.wires.unsent import with_unsent as with_unsent

    __version__: str

_MODULES = {  # public name -> where it is, of which `__getattr__` imports each when it is used
    "BatchLayout": "zerojax.zero.step_values",
    "Blocks": "zerojax.zero.blocks.block_settings",
    "ByColumns": "zerojax.zero.wires.columns",
    "Checkpointer": "zerojax.checkpoint.checkpointer",
    "DynamicLossScale": "zerojax.zero.update.loss_scale",
    "Engine": "zerojax.inference.engine.engine",
    "Fp8": "zerojax.zero.fp8.modules",
    "Lora": "zerojax.lora.settings",
    "LossScaleState": "zerojax.zero.update.loss_scale",
    "Mean": "zerojax.zero.sharded_batch.outputs",
    "Offload": "zerojax.zero.host.settings",
    "PackedWires": "zerojax.zero.wires.packed",
    "Partition": "zerojax.zero.weights.partition",
    "Pipeline": "zerojax.zero.pipeline.state",
    "Placement": "zerojax.zero.weights.placement",
    "StaticLossScale": "zerojax.zero.update.loss_scale",
    "Sum": "zerojax.zero.sharded_batch.outputs",
    "Sums": "zerojax.zero.step_values",
    "ToExperts": "zerojax.zero.wires.experts",
    "TrainState": "zerojax.train_state",
    "UserError": "zerojax.errors",
    "add_lora": "zerojax.lora.add",
    "attention": "zerojax.ops.tokens",
    "batch_sharding": "zerojax.mesh",
    "compare_context": "zerojax.zero.compare",
    "compare_sums": "zerojax.zero.compare",
    "decayed": "zerojax.kinds",
    "embedding_lookup": "zerojax.ops.embedding",
    "export_adapter": "zerojax.interop.pretrained",
    "export_huggingface": "zerojax.interop.pretrained",
    "first_norm": "zerojax.zero.offload.late_norm",
    "fp8": "zerojax.ops",
    "from_deepspeed_config": "zerojax.migration.own_step",
    "fused_adamw": "zerojax.optim.fused",
    "fused_lion": "zerojax.optim.fused",
    "load_huggingface": "zerojax.interop.pretrained",
    "main_process_first": "zerojax.launch.together",
    "make_mesh": "zerojax.mesh",
    "make_train_step": "zerojax.zero.step",
    "memory_table": "zerojax.zero.state_bytes",
    "muon": "zerojax.optim.muon",
    "over_tiles": "zerojax.ops.tiles",
    "pad": "zerojax.zero.update.padding",
    "partition_state": "zerojax.zero.stages",
    "raise_if_exhausted": "zerojax.zero.update.loss_scale",
    "shard_train_state": "zerojax.zero.shard_state",
    "unpad": "zerojax.zero.update.padding",
    "wait_for_everyone": "zerojax.launch.together",
    "weight_kinds": "zerojax.kinds",
    "where_used": "zerojax.zero.blocks.where_used",
    "with_lora": "zerojax.lora.linen",
    "with_master_weights": "zerojax.optim.master_weights",
    "with_unsent": "zerojax.zero.wires.unsent",
}
if not TYPE_CHECKING:  # they know the names above, and would take any other for one of type Any
    __all__ = [*_MODULES]

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used, so that commands that need no JAX, and programs of few names, start at once."""
        if name == "__version__":
            import importlib.metadata  # half of what `import zerojax` takes

            return importlib.metadata.version(__name__)
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from zerojax import signatures  # imports JAX

        value = getattr(__import__(_MODULES[name], fromlist=[name]), name)
        globals()[name] = signatures.checked(value) if inspect.isfunction(value) else value
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
