"""Arranges devices as a mesh. This module has the table of mesh axes (`AXES`), which alone says what differs along an axis and what runs
over it."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, specs
from zerojax.errors import UserError
from zerojax.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Axis:
    """A row of the table.

    Attributes:
      name: of the mesh axis.
      examples: whether devices along it have examples of their own: the batch is sharded over it, and random numbers differ.
      tokens: whether devices along it have tokens of their own of the same examples: the same holds.
      summed: whether what devices along it compute of a loss, a gradient or a count are terms of a sum.
      state: whether a stage shards the state over it, and weights are gathered over it.
      compiler: whether the compiler shards over it, as overrides say, also where other collectives are explicit.
      part_of: the axis of which it is the inner part; "" for none. Experts live along the parts, together the axis `expert` of `make_mesh`.
    """

    name: str
    examples: bool = False
    tokens: bool = False
    summed: bool = False
    state: bool = False
    compiler: bool = False
    part_of: str = ""


AXES = (
    Axis("replica", examples=True, summed=True),
    Axis("data", examples=True, summed=True, state=True),
    Axis("expert", examples=True, summed=True, state=True, part_of="data"),
    Axis("context", tokens=True, summed=True, state=True),
    Axis("expert_context", tokens=True, summed=True, state=True, part_of="context"),
    Axis("model", compiler=True),
)
EXAMPLES = tuple(axis.name for axis in AXES if axis.examples)
TOKENS = tuple(axis.name for axis in AXES if axis.tokens)
SUMMED = tuple(axis.name for axis in AXES if axis.summed)
STATE = tuple(axis.name for axis in AXES if axis.state)
COMPILER = tuple(axis.name for axis in AXES if axis.compiler)
EXPERT = tuple(axis.name for axis in AXES if axis.part_of)
# Along it devices run other programs, the stages of a pipeline. A mesh has it only where there is a pipeline; within a group of devices
# that run the same programs the axes are those of the table.
PIPE = "pipe"


def make_mesh(
    replica: int = 1,
    data: int = -1,
    model: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
    pipe: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Builds the mesh of `AXES` over `devices`, by default all of them; with `pipe` this is its first axis.

    ZeRO shards over `data` and `context` together. `replica` holds copies of the sharded state (hybrid sharding). Devices along `context`
    hold parts of the same sequences (context parallelism). `model` is for tensor parallelism. Neighbouring devices are along `model`,
    then `context`, then `data`, so that replicas are the farthest apart, and of a pipeline its stages.

    `expert` is a view of `data` and `context`: of their devices, as many neighbours hold different experts. The mesh has the inner parts of
    the two as axes of their own, `expert` and `expert_context`, and along `data` and `context` what is left. A spec that names `expert`
    means both parts, and one that names `data` all four.

    Args:
      replica: number of copies.
      data: number of shards; -1 takes all remaining devices.
      model: number of tensor-parallel shards.
      context: number of parts of a sequence.
      expert: number of groups of experts, one a device (expert parallelism); it divides data x context.
      pipe: number of groups of devices that hold other layers and run side by side (`zerojax.Pipeline`).
      devices: the devices to use; None: all of `jax.devices()`.

    Raises:
      UserError: the product of the sizes is not the number of devices, or `expert` is no part of them.

    >>> mesh = make_mesh(replica=1, data=-1)
    """
    found = list(jax.devices() if devices is None else devices)
    stages = f"mesh.{PIPE}={pipe}, " if pipe != 1 else ""
    if min(pipe, replica, context, model, expert) < 1 or (data < 1 and data != -1):
        raise UserError(
            "mesh: axis sizes must be above 0 (data may be -1: all remaining); got "
            f"{stages}mesh.replica={replica}, mesh.data={data}, mesh.context={context}, mesh.model={model}, mesh.expert={expert}"
        )
    if data == -1:
        data = max(1, len(found) // (pipe * replica * context * model))
    needed = pipe * replica * data * context * model
    if needed != len(found):
        more = "or pass the devices to use"
        if devices is None and needed > len(found) and platform() == "cpu":
            more = (
                f'or emulate {needed} devices: `jax.config.update("jax_num_cpu_devices", {needed})` before JAX starts'
            )
        raise UserError(
            f"mesh: {f'{PIPE} {pipe} x ' if stages else ''}replica {replica} x data {data} x context {context} x model {model} = {needed} "
            f"devices, but there {'is' if len(found) == 1 else 'are'} {len(found)}; choose sizes whose product is {len(found)}, {more}"
        )
    if len(set(found)) < len(found):
        raise UserError(f"devices: {found} name one twice; name each once")
    if data * context % expert:
        raise UserError(
            f"mesh: expert {expert} does not divide data {data} x context {context} = {data * context}, the devices that share experts; "
            "choose a divisor"
        )
    inner = math.gcd(expert, context)
    sizes = (data * inner // expert, expert // inner, context // inner, inner, model)
    grid, names = np.asarray(found).reshape(replica * pipe, *sizes), tuple(axis.name for axis in AXES)
    if pipe > 1:
        grid, names = grid.reshape(pipe, replica, *sizes), (PIPE, *names)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def groups(mesh: Mesh) -> list[Mesh]:
    """Returns the meshes of the devices of a pipeline that run the same programs; `[mesh]` without a pipeline."""
    if PIPE not in mesh.shape:
        return [mesh]
    number = mesh.axis_names.index(PIPE)
    names = tuple(name for name in mesh.axis_names if name != PIPE)
    kinds = tuple(kind for name, kind in zip(mesh.axis_names, mesh.axis_types) if name != PIPE)
    return [Mesh(grid, names, axis_types=kinds) for grid in np.moveaxis(mesh.devices, number, 0)]


def completed(mesh: Mesh) -> Mesh:
    """Returns a mesh with the axes that a user's mesh lacks, of size 1, before and behind its own.

    Its devices keep their order, so arrays that are sharded over the user's mesh stay where they are. All axes are Auto: the compiler
    infers the shardings inside a step.

    Raises:
      UserError: the mesh has no axis `data`.
    """
    if not isinstance(mesh, Mesh) or STATE[0] not in mesh.shape:
        held = tuple(mesh.shape) if isinstance(mesh, Mesh) else errors.shown(mesh)
        raise UserError(f"mesh: needs an axis named 'data', and has {held}; see zerojax.make_mesh")
    order, lacking = [axis.name for axis in AXES], [axis.name for axis in AXES if axis.name not in mesh.shape]
    front = [name for name in lacking if order.index(name) < order.index(STATE[0])]
    back = lacking[len(front) :]
    names = (*front, *mesh.axis_names, *back)
    if names == mesh.axis_names and all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    grid = mesh.devices.reshape((1,) * len(front) + mesh.devices.shape + (1,) * len(back))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def batch_sharding(mesh: Mesh, batch_dim: int = 0, *, has_tokens: bool = False) -> NamedSharding:
    """Returns the sharding of arrays whose dim `batch_dim` counts examples, and, if they `has_tokens`, the next one tokens of these."""
    if batch_dim < 0:
        raise UserError(f"batch_dim: must be counted from the first dim, 0 or above, and is {batch_dim}")
    tokens = (specs.entry(TOKENS),) if has_tokens and size(mesh, TOKENS) > 1 else ()
    return NamedSharding(mesh, P(*[None] * batch_dim, EXAMPLES, *tokens))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of rows of which a device has all tokens: over all axes along which examples or tokens differ in training."""
    return NamedSharding(mesh, P(SUMMED))


def platform(where: Mesh | jax.Device | None = None) -> str:
    """Returns the kind of devices of a mesh, a device, or by default this process: "gpu" (of any maker), "tpu" or "cpu"."""
    device = where.devices.flat[0] if isinstance(where, Mesh) else where
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def capability(mesh: Mesh | None = None) -> float | None:
    """Returns the compute capability, such as 9.0, of the NVIDIA GPUs of a mesh, present or absent, or by default of this process; None of
    other devices."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    found = getattr(device, "compute_capability", None)
    return None if found is None else float(found)


def size(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> int:
    """Returns the number of devices along some axes together."""
    return math.prod(map(mesh.shape.__getitem__, axes))


def sharded(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns those of some axes that have more than one device, or the first where none has."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1) or tuple(axes[:1])


def text(mesh: Mesh, axes: Sequence[str]) -> str:
    """Returns the sizes of axes as messages name them: `data=8`. An axis and its part are one; parts alone are `expert`."""
    whole, sizes = {axis.name: axis.part_of for axis in AXES}, dict[str, int]()
    for axis in sharded(mesh, axes):
        of = whole.get(axis, "")
        name = of if of in axes else EXPERT[0] if of else axis
        sizes[name] = sizes.get(name, 1) * mesh.shape[axis]
    return " x ".join(f"{name}={ways}" for name, ways in sizes.items())


def sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the sizes of axes as arguments of `make_mesh` give them: an axis with its part, and `expert` where there are several."""
    found = dict(mesh.shape)
    parts = {axis.name: axis.part_of for axis in AXES if axis.part_of and axis.name in found}
    expert = math.prod(found[part] for part in parts)
    for part, whole in parts.items():
        found[whole] *= found.pop(part)
    return found | ({EXPERT[0]: expert} if expert > 1 else {})


def with_parts(mesh: Mesh, spec: P) -> P:
    """Returns a spec in which an axis with a part means both, where that has more than one device."""

    def of_dim(entry: Any) -> Any:
        named = specs.names(entry)
        parts = [axis.name for axis in AXES if axis.part_of in named and axis.name not in named]
        if entry is P.UNCONSTRAINED or not any(mesh.shape[part] > 1 for part in parts):
            return entry
        order = [axis.name for axis in AXES]
        return specs.entry(tuple(sorted((*named, *parts), key=lambda name: order.index(name) if name in order else -1)))

    return P(*map(of_dim, spec))


def around(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns those of some axes that a surrounding `jax.shard_map` runs over by hand."""
    return tuple(filter(jax.sharding.get_abstract_mesh().manual_axes.__contains__, axes))


def ways(mesh: Mesh) -> int:
    """Returns the number of devices that have examples of their own."""
    return size(mesh, EXAMPLES)


def manual(mesh: Mesh | AbstractMesh) -> set[str]:
    """Returns the axes over which explicit collectives run, in a `jax.shard_map`; others, if they have a size, are the compiler's."""
    own = {axis.name for axis in AXES if not axis.compiler}
    return {axis for axis, size in mesh.shape.items() if axis in own or size == 1}


def manual_over_rest(function: Callable[..., Any], in_specs: PyTree, out_specs: PyTree) -> Callable[..., Any]:
    """Returns `function`, run on each device's shards over the axes that an outer `jax.shard_map` leaves to the compiler.

    There XLA gathers the operands of an explicit collective, and of a kernel that it cannot shard, over these axes first. Anywhere else, or
    if they have size 1, this is `function` itself.

    Args:
      function: takes and returns arrays. What it computes of its shards must be the shards of its result.
      in_specs, out_specs: as of `jax.shard_map`, naming axes of `COMPILER` alone.
    """
    left = rest()
    return (
        jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={*left}, check_vma=False)
        if left
        else function
    )


def rest() -> tuple[str, ...]:
    """Returns the axes, of a size above 1, that an outer `jax.shard_map` leaves to the compiler; () anywhere else."""
    around = jax.sharding.get_abstract_mesh()
    if not around.manual_axes or {*COMPILER} <= {*around.manual_axes}:
        return ()
    return tuple(axis for axis in COMPILER if around.shape.get(axis, 1) > 1 and axis not in around.manual_axes)


def ways_of_rest() -> int:
    """Returns the number of devices along the axes of `rest` together."""
    return size(jax.sharding.get_abstract_mesh(), rest())


def dim_of_rest(shape: Sequence[int]) -> int | None:
    """Returns the dim of activations [examples, tokens, ...] that is sharded over the axes of `rest`: the first of these two that they
    divide, None for neither. What is gathered over examples is contiguous; over the tokens of several examples it has to be transposed."""
    return next((dim for dim, length in enumerate(shape[:2]) if length % ways_of_rest() == 0), None)
