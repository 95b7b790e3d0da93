"""ZeRO for JAX: optimizer state, gradients and params of any Flax model, split by one table of specs.

>>> mesh = zerojax.make_mesh()
>>> state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=3)
>>> train_step = zerojax.make_train_step(loss_fn, partition, clip_norm=1.0)
>>> state, metrics = train_step(state, batch)
"""

from zerojax.embedding import embedding_lookup
from zerojax.errors import UserError
from zerojax.gather import Placement
from zerojax.loss_scale import DynamicLossScale, LossScaleState, StaticLossScale, raise_if_exhausted
from zerojax.mesh import batch_sharding, make_mesh
from zerojax.partition import Partition, partition_state
from zerojax.place import pad, shard_train_state, unpad
from zerojax.precision import with_master_weights
from zerojax.report import memory_table
from zerojax.state import TrainState
from zerojax.step import make_train_step
from zerojax.used import where_used

__all__ = [
    "DynamicLossScale",
    "LossScaleState",
    "Partition",
    "Placement",
    "StaticLossScale",
    "TrainState",
    "UserError",
    "batch_sharding",
    "embedding_lookup",
    "make_mesh",
    "make_train_step",
    "memory_table",
    "pad",
    "partition_state",
    "raise_if_exhausted",
    "shard_train_state",
    "unpad",
    "where_used",
    "with_master_weights",
]
