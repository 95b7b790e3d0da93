"""Plans the train step of a model of your own before anything is allocated. This module goes from an init function and a loss to a plan."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax import mesh as mesh_lib
from zerojax.plan import step_plan, targets
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero import shard_state, step, step_values


def plan_own_step(
    init: Callable[..., State],
    *init_args: Any,
    loss_fn: Callable[..., Any],
    batch: PyTree,
    mesh: Mesh,
    shard: Mapping[str, Any] | None = None,
    **how: Any,
) -> step_plan.Plan:
    """Plans the step that `shard_train_state` and `make_train_step` would make. Its mesh may be of devices that are not there.

    Args:
      init: returns the state; it is traced and not run.
      *init_args: its arguments, as `shard_train_state` takes them.
      loss_fn: the loss, as `make_train_step` takes it.
      batch: one step's batch, or its shapes; leaves without a sharding have the mesh's.
      mesh: from `make_mesh`, of this machine's devices or of `targets.devices`, with whose memory the plan compares.
      shard: options of `shard_train_state`: `stage`, `trainable`, `overrides` and others.
      **how: options of `make_train_step`: `blocks`, `reduce_dtype` and others.

    Raises:
      UserError: either call refuses what it is given.

    >>> mesh = zerojax.make_mesh(devices=targets.devices("h100", "1x2"))
    >>> report.verdict(plan_own_step(init, key, loss_fn=loss_fn, batch=batch, mesh=mesh, reduce_dtype=jnp.float32))
    'peak 30.8 GiB on each device: fits in ...'
    """
    partition = shard_state.partition_of_init(init, *init_args, mesh=mesh, **shard or {})
    sums = step_values.Sums.of(how.get("sums"))
    passes = how.get("grad_accum", sums.grad_accum)

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        dim = int(passes > 1)
        whole = mesh_lib.batch_sharding(mesh, dim) if leaf.ndim > dim else None
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return step_plan.plan_step(
        step.make_train_step(loss_fn, partition, **how),
        partition.abstract_state,
        jax.tree.map(abstract, batch),
        mesh=partition.mesh,
        target=targets.of_device(mesh.devices.flat[0]) or targets.HERE,
        placement=partition,
        passes=passes,
        by_hand=how.get("reduce_dtype", sums.reduce_dtype) is not None,
        compute_dtype=how.get("compute_dtype"),
    )
