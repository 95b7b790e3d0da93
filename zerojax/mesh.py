"""Lays devices out as a mesh with the axes replica, data and model. This module also says how a batch lies on it."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.errors import UserError

REPLICA, DATA, MODEL = "replica", "data", "model"
BATCH_AXES = (REPLICA, DATA)


def make_mesh(replica: int = 1, data: int = -1, model: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh (replica, data, model) over `devices`, by default all of them.

    `data` is the axis that ZeRO splits over, `replica` holds whole copies of the split state (hybrid sharding), `model` is for
    tensor-parallel specs. Neighbouring devices lie along `model`, then `data`, so that replicas are the farthest apart.

    Args:
      replica: number of whole copies.
      data: number of ways to split; -1 takes all devices that are left.
      model: number of tensor-parallel ways.
      devices: the devices to use; all of `jax.devices()` where None.

    Raises:
      UserError: the sizes do not multiply to the number of devices.

    >>> mesh = make_mesh(replica=1, data=-1)
    """
    found = list(jax.devices() if devices is None else devices)
    if min(replica, model) < 1 or (data < 1 and data != -1):
        raise UserError(
            f"mesh: axis sizes must be above 0 (data may be -1: all left); got {replica} x {data} x {model}"
        )
    if data == -1:
        data = max(1, len(found) // (replica * model))
    wanted = replica * data * model
    if wanted != len(found):
        raise UserError(
            f"mesh: replica {replica} x data {data} x model {model} = {wanted} devices, but there are {len(found)}; "
            f"choose sizes whose product is {len(found)}, or pass the devices to use"
        )
    grid = np.asarray(found).reshape(replica, data, model)
    return Mesh(grid, (REPLICA, DATA, MODEL), axis_types=(AxisType.Auto,) * 3)


def batch_sharding(mesh: Mesh, batch_dim: int = 0) -> NamedSharding:
    """Returns the sharding of arrays whose dim `batch_dim` counts examples: split over replica and data."""
    return NamedSharding(mesh, P(*[None] * batch_dim, BATCH_AXES))


def platform(where: Mesh | jax.Device | None = None) -> str:
    """Returns what kind of devices a mesh, a device, or by default this process has: "gpu" (of any maker), "tpu" or "cpu"."""
    device = where.devices.flat[0] if isinstance(where, Mesh) else where
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def ways(mesh: Mesh) -> int:
    """Returns in how many parts a batch is split."""
    return mesh.shape[REPLICA] * mesh.shape[DATA]
