"""Arranges devices as a mesh with the axes replica, data and model. This module also defines the sharding of a batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors
from zerojax.errors import UserError

REPLICA, DATA, MODEL = "replica", "data", "model"
BATCH_AXES = (REPLICA, DATA)


def make_mesh(replica: int = 1, data: int = -1, model: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh (replica, data, model) over `devices`, by default all of them.

    ZeRO shards over `data`. `replica` holds copies of the sharded state (hybrid sharding). `model` is for tensor-parallel specs.
    Neighbouring devices are along `model`, then `data`, so that replicas are the farthest apart.

    Args:
      replica: number of copies.
      data: number of shards; -1 takes all remaining devices.
      model: number of tensor-parallel shards.
      devices: the devices to use; None: all of `jax.devices()`.

    Raises:
      UserError: the product of the sizes is not the number of devices.

    >>> mesh = make_mesh(replica=1, data=-1)
    """
    found = list(jax.devices() if devices is None else devices)
    if min(replica, model) < 1 or (data < 1 and data != -1):
        raise UserError(
            "mesh: axis sizes must be above 0 (data may be -1: all remaining); got "
            f"mesh.replica={replica}, mesh.data={data}, mesh.model={model}"
        )
    if data == -1:
        data = max(1, len(found) // (replica * model))
    needed = replica * data * model
    if needed != len(found):
        raise UserError(
            f"mesh: replica {replica} x data {data} x model {model} = {needed} devices, but there are {len(found)}; "
            f"choose sizes whose product is {len(found)}, or pass the devices to use"
        )
    grid = np.asarray(found).reshape(replica, data, model)
    return Mesh(grid, (REPLICA, DATA, MODEL), axis_types=(AxisType.Auto,) * 3)


def completed(mesh: Mesh) -> Mesh:
    """Returns a mesh with the axes that a user's mesh lacks, of size 1: `replica` in front, `model` at the end.

    Its devices keep their order, so arrays that are sharded over the user's mesh stay where they are. All axes are Auto: the compiler
    infers the shardings inside a step.

    Raises:
      UserError: the mesh has no axis `data`.
    """
    if not isinstance(mesh, Mesh) or DATA not in mesh.shape:
        held = tuple(mesh.shape) if isinstance(mesh, Mesh) else errors.shown(mesh)
        raise UserError(f"mesh: needs an axis named 'data', and has {held}; see zerojax.make_mesh")
    front, back = [axis for axis in (REPLICA,) if axis not in mesh.shape], [MODEL] if MODEL not in mesh.shape else []
    names = (*front, *mesh.axis_names, *back)
    if names == mesh.axis_names and all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    grid = mesh.devices.reshape((1,) * len(front) + mesh.devices.shape + (1,) * len(back))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def batch_sharding(mesh: Mesh, batch_dim: int = 0) -> NamedSharding:
    """Returns the sharding over replica and data of arrays whose dim `batch_dim` counts examples."""
    return NamedSharding(mesh, P(*[None] * batch_dim, BATCH_AXES))


def platform(where: Mesh | jax.Device | None = None) -> str:
    """Returns the kind of devices of a mesh, a device, or by default this process: "gpu" (of any maker), "tpu" or "cpu"."""
    device = where.devices.flat[0] if isinstance(where, Mesh) else where
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def ways(mesh: Mesh) -> int:
    """Returns the number of shards of a batch."""
    return mesh.shape[REPLICA] * mesh.shape[DATA]


def manual_over_model(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns `function`, run on each device's shards over `model` where an outer `jax.shard_map` leaves `model` to the compiler.

    There XLA gathers the operands of an explicit collective, and of a kernel that it cannot shard, over `model` first. Anywhere else, or if
    `model` has size 1, this is `function` itself.

    Args:
      function: takes and returns arrays. What it computes of its shards must be the shards of its result.
      in_specs, out_specs: as of `jax.shard_map`, naming `model` alone.
    """
    around = jax.sharding.get_abstract_mesh()
    left = set(around.axis_names) - set(around.manual_axes)
    if not around.manual_axes or MODEL not in left or around.shape[MODEL] == 1:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={MODEL}, check_vma=False)
