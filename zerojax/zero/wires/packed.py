"""Sends weights and gradients as blocks of 8 or 4 bits (ZeRO++, arXiv:2306.10209). This module is for links that are slower than NVLink.

    weights       each device packs its shard into int8, all gather codes and scales                        qwZ
    second copy   first the shards that far devices hold are gathered, and kept for the backward pass;      hpZ
                  both passes then gather among the devices of a host
    gradients     each device packs its gradient, an all-to-all brings the parts of a shard together, and   qgZ
                  they are added up in float32. Between hosts the sums of a host travel, in 8 bits, or
                  in 4 after a rotation (SDP4Bit, arXiv:2410.15526)

Each value is packed once where it is sent, and once more between hosts. Weights are packed from their stored values in each pass. A block
with a NaN or an infinity arrives as NaN. Vectors, and weights whose shards are shorter than a block, are sent as they are.
"""

import collections
import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import errors, roles, specs, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.ops import packed, quantized
from zerojax.zero.weights import gather
from zerojax.zero.weights.partition import Partition, is_over_state
from zerojax.zero.weights.placement import OneProgram, Placement, moves
from zerojax.zero.wires import columns, fp8

PLAIN, INT8, INT4 = "plain", "int8", "int4"
WEIGHTS = (PLAIN, INT8)
GRADIENTS = (PLAIN, INT8, INT4)
_BITS = {INT8: 8, INT4: 4}


@dataclasses.dataclass(frozen=True)
class PackedWires:
    """How weights and gradients travel.

    Attributes:
      weights: "plain", in the compute dtype, or "int8".
      gradients: "plain", in the reduce dtype, "int8", or "int4": 8 bits inside a host, and 4 between hosts.
      second_copy: whether each host keeps a copy of the weights from the forward to the backward pass, divided among its devices.
      host_devices: neighbouring devices of the mesh that are one host; 0: those of a process.
      error_feedback: whether what packing loses of gradients between hosts is added to those of the next pass; the train state then needs
        a field for it (`unsent.with_unsent`).
    """

    weights: str = PLAIN
    gradients: str = PLAIN
    second_copy: bool = False
    host_devices: int = 0
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name, known in (("weights", WEIGHTS), ("gradients", GRADIENTS)):
            errors.one_of(f"wire.{name}", getattr(self, name), known)
        for name in ("second_copy", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"wire.{name}: must be True or False, and is {errors.shown(getattr(self, name))}")
        if self.error_feedback and self.gradients == PLAIN:
            raise UserError(
                "wire.error_feedback: gradients that are not packed lose nothing; set wire.gradients to 'int4', or omit it"
            )
        if isinstance(self.host_devices, bool) or not isinstance(self.host_devices, int) or self.host_devices < 0:
            raise UserError(
                f"wire.host_devices: must be a number of devices, 0 for those of a process, and is {errors.shown(self.host_devices)}"
            )

    @property
    def is_on(self) -> bool:
        """Returns whether anything is sent in another form."""
        return self.weights != PLAIN or self.gradients != PLAIN or self.second_copy

    sends_rest: ClassVar[bool] = True

    def one_program(self, pattern: str) -> OneProgram | None:
        """Returns why a step with these wires is one program."""
        return OneProgram("wire", "packs within one program", "omit wires") if self.is_on else None

    def marked(self, partition: Partition, pattern: str, blocks: str, reduce_dtype: DTypeLike | None) -> Partition:
        """Returns a partition whose sharded matrices, those whose paths a regex finds, are sent so; see `marked`."""
        return marked(partition, self, blocks, reduce_dtype, pattern)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The devices over which the state is sharded, as `count` hosts of `size` neighbours."""

    count: int
    size: int

    @property
    def within(self) -> list[list[int]] | None:
        """Returns the groups of the devices of a host; None for one group of all."""
        if self.count == 1:
            return None
        return [[host * self.size + own for own in range(self.size)] for host in range(self.count)]

    @property
    def between(self) -> list[list[int]] | None:
        """Returns the groups of the devices that have the same place in their hosts; None for one group of all."""
        if self.size == 1:
            return None
        return [[host * self.size + own for host in range(self.count)] for own in range(self.size)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrived:
    """All shards of a weight, as they are sent: in 8 bits, or values [..., n] in `codes` without scales.

    The first dims count devices, or places in a host and then hosts.
    """

    codes: jax.Array
    scales: jax.Array | None
    placement: Placement = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class InBlocks(gather.Plain):
    """The wire of a weight that is sent in blocks; see `placement.Wire`."""

    hosts: Hosts = Hosts(1, 1)
    is_packed: bool = False
    second_copy: bool = False
    bits: int = 0  # of gradients between hosts; 0: they are sent as they are
    has_feedback: bool = False

    @property
    def _changes_weights(self) -> bool:
        return self.is_packed or self.second_copy

    def near(self, shard: jax.Array, placement: Placement, dtype: DTypeLike | None) -> Any:
        if not self.second_copy:
            return None
        with jax.named_scope(roles.PACKED_WEIGHT), jax.named_scope(roles.SECOND_COPY):
            return _over_rest(
                lambda shard: _gathered(self._form(shard, placement, dtype), self.hosts.between), placement, (None,)
            )(shard)

    def send(self, shard: Any, known: Any, placement: Placement, dtype: DTypeLike | None) -> Any:
        if not self._changes_weights:
            return super().send(shard, known, placement, dtype)
        with jax.named_scope(roles.PACKED_WEIGHT):
            if self.second_copy:
                far = _over_rest(lambda near: _gathered(near, self.hosts.within), placement, (None, None), (None,))
                codes, scales = far(shard)
                return Arrived(codes, scales, placement)
            form = functools.partial(self._form, placement=placement, dtype=dtype)
            codes, scales = _over_rest(lambda shard: _gathered(form(shard), None), placement, (None,))(shard)
            return Arrived(codes, scales, placement)

    def differentiated(self, sent: Any, dtype: DTypeLike | None) -> jax.Array:
        if not self._changes_weights:
            return super().differentiated(sent, dtype)
        return jnp.zeros(_used_shape(sent.placement), dtype)

    def used(self, path: str, sent: Any, differentiated: jax.Array) -> AbstractContextManager[jax.Array]:
        if not self._changes_weights:
            return super().used(path, sent, differentiated)
        return nullcontext(widened(sent, differentiated))

    @property
    def _leaves_early(self) -> bool:
        # XLA starts the second of two exchanges as early as it can, and kernels then wait for the end of the first.
        return bool(self.bits) and min(self.hosts.count, self.hosts.size) > 1

    def leave(self, grad: jax.Array, placement: Placement, reduction: gather.Reduction) -> jax.Array:
        return self._inside(grad, placement) if self._leaves_early and not reduction.waits(placement) else grad

    def home(
        self, grad: jax.Array, placement: Placement, reduction: gather.Reduction, unsent: Any = None
    ) -> tuple[jax.Array, Any]:
        if not self.bits or reduction.waits(placement):
            return super().home(grad, placement, reduction, unsent)
        parts = grad if self._leaves_early else self._inside(grad, placement)
        total, unsent = self._between(parts, placement, unsent)
        mesh = placement.update.mesh
        summed = gather.of_shards(functools.partial(gather.sum_over_copies, mesh=mesh), placement)
        return summed(total.astype(reduction.dtype)).astype(self.grad_dtype), unsent

    def outside(
        self,
        path: str,
        weight: gather.ShardAndSink,
        placement: Placement,
        dtype: DTypeLike | None,
        reduction: gather.Reduction,
    ) -> jax.Array:
        return _outside(weight, placement, dtype, reduction)

    def received(self, placement: Placement) -> Mapping[str, float]:
        n = math.prod(placement.stored.shard_shape(placement.shape or ()))
        found, hosts = {}, self.hosts
        if self._changes_weights:
            shard = packed.elements(n, 8) if self.is_packed else n
            far, near = (hosts.count - 1) * shard, (hosts.size - 1) * hosts.count * shard
            found[roles.WEIGHTS_FORWARD] = far + near
            found[roles.WEIGHTS_BACKWARD] = near + (0 if self.second_copy else far)
        if self.bits and placement.trainable:
            mesh = placement.update.mesh
            copies = math.prod(mesh.shape[axis] for axis in mesh_lib.SUMMED if axis not in mesh_lib.STATE)
            inside = (hosts.size - 1) * hosts.count * packed.elements(n, 8)
            between = (hosts.count - 1) * packed.elements(n, self.bits)
            found[roles.GRADIENTS] = inside + between + 2 * n * (copies - 1) / copies
        return found

    def _form(self, shard: jax.Array, placement: Placement, dtype: DTypeLike | None) -> tuple:
        """Returns the arrays that are sent of a shard."""
        row = shard.reshape(-1)
        if not self.is_packed:
            return gather.cast(row, placement, dtype), None
        return tuple(packed.pack(row, 8, mesh_lib.platform(placement.stored.mesh)))

    def _inside(self, grad: jax.Array, placement: Placement) -> jax.Array:
        """Returns the sums over this device's host of the shards of the devices at its place in each host: [hosts, n]."""
        dim, hosts, platform = gather.data_dim(placement.update), self.hosts, mesh_lib.platform(placement.update.mesh)
        assert dim is not None
        ways = hosts.count * hosts.size

        def summed(grad: jax.Array) -> jax.Array:
            apart = grad.reshape(*grad.shape[:dim], ways, -1, *grad.shape[dim + 1 :])
            parts = jnp.moveaxis(apart, dim, 0).reshape(ways, -1)
            if hosts.size == 1:
                return parts
            own = packed.pack(parts, 8, platform)
            # [places in a host, hosts, ...]
            in_hosts = (array.reshape(hosts.count, hosts.size, *array.shape[1:]) for array in own)
            by_place = packed.Packed(*(jnp.swapaxes(array, 0, 1) for array in in_hosts))
            return packed.sum_of(_exchanged(by_place, hosts.within), 8, parts.shape[1], platform)

        with jax.named_scope(roles.PACKED_GRADIENT):
            spec = specs.only(placement.stored.spec, mesh_lib.COMPILER)
            whole = gather.with_padding(grad, placement)
            return mesh_lib.manual_over_rest(summed, spec, P(None, compiler_axes(placement)))(whole)

    def _between(self, parts: jax.Array, placement: Placement, unsent: Any) -> tuple[jax.Array, Any]:
        """Returns this device's shard of the sum over `STATE`, float32, from the sums over its host, and what is not sent of these.

        `unsent` is float32[hosts, n] like these, or [layers, hosts, n of a layer] of a stack, that of earlier passes, or None.
        """
        hosts, platform, shape = self.hosts, mesh_lib.platform(placement.update.mesh), _shard_shape(placement)

        def summed(parts: jax.Array, unsent: Any) -> tuple[jax.Array, Any]:
            n = parts.shape[1]
            if hosts.count == 1:
                return parts.reshape(shape), unsent
            if unsent is not None:
                parts += jnp.moveaxis(unsent, -2, 0).reshape(parts.shape)
            own = packed.pack(parts, self.bits, platform)
            if unsent is not None:
                rest = parts - packed.unpack(own, self.bits, n)
                unsent = jnp.moveaxis(rest.reshape(-1, *unsent.shape[:-2], unsent.shape[-1]), 0, -2)
            return packed.sum_of(_exchanged(own, hosts.between), self.bits, n, platform).reshape(shape), unsent

        with jax.named_scope(roles.PACKED_GRADIENT):
            spec, of_parts = specs.only(placement.stored.spec, mesh_lib.COMPILER), P(None, compiler_axes(placement))
            of_unsent = None if unsent is None else P(*[None] * (unsent.ndim - 1), compiler_axes(placement))
            run = mesh_lib.manual_over_rest(summed, (of_parts, of_unsent), (spec, of_unsent))
            return run(parts, unsent)


@jax.custom_vjp
def widened(arrived: Arrived, sink: jax.Array) -> jax.Array:
    """Returns a weight in the dtype of its sink, which gets its gradient, from all its shards."""
    placement = arrived.placement
    shape = _shard_shape(placement)
    outer = arrived.codes.ndim - (1 if arrived.scales is None else 2)

    def unpacked(codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        n = math.prod(shape)
        rows = codes if scales is None else packed.unpack(packed.Packed(codes, scales), 8, n)
        rows = rows.astype(sink.dtype)
        rows = jnp.swapaxes(rows, 0, 1).reshape(-1, *shape) if outer == 2 else rows.reshape(-1, *shape)
        dim = gather.data_dim(placement.stored) or 0
        merged = (*shape[:dim], rows.shape[0] * shape[dim], *shape[dim + 1 :])
        return jnp.moveaxis(rows, 0, dim).reshape(merged)

    own, lead = compiler_axes(placement), (None,) * outer
    in_specs = (P(*lead, own), None if arrived.scales is None else P(*lead, own))
    whole = mesh_lib.manual_over_rest(unpacked, in_specs, specs.only(placement.stored.spec, mesh_lib.COMPILER))
    return gather.without_padding(whole(arrived.codes, arrived.scales), placement)


widened.defvjp(lambda arrived, sink: (widened(arrived, sink), None), lambda _, grad: (None, grad))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _outside(
    weight: gather.ShardAndSink, placement: Placement, dtype: DTypeLike | None, reduction: gather.Reduction
) -> jax.Array:
    wire, stored = placement.wire, weight.stored
    near = wire.near(stored, placement, dtype)
    sent = wire.send(stored if near is None else near, None, placement, dtype)
    with wire.used("", sent, wire.differentiated(sent, dtype or stored.dtype)) as array:
        return array


_outside.defvjp(
    lambda weight, placement, dtype, reduction: (_outside(weight, placement, dtype, reduction), weight.unsent),
    gather.shard_backward,
)


def marked(
    partition: Partition, wires: PackedWires | None, blocks: str, reduce_dtype: DTypeLike | None, pattern: str = ""
) -> Partition:
    """Returns a partition whose sharded matrices are sent as asked for; weights that another wire sends keep theirs.

    Args:
      partition: of the train state.
      wires: None for no change.
      blocks, reduce_dtype: as of `make_train_step`.
      pattern: a regex that finds the paths of the weights; "" finds all.

    Raises:
      UserError: nothing is sent that could be packed, hosts cannot be told, or an option would change nothing.
    """
    if wires is None or not wires.is_on:
        return partition
    if reduce_dtype is None:
        raise UserError("wire: needs explicit collectives; pass reduce_dtype=jnp.float32, or omit wires")
    mesh = partition.mesh
    sizes, ways = mesh_lib.text(mesh, mesh_lib.STATE), mesh_lib.size(mesh, mesh_lib.STATE)
    if ways == 1:
        warnings.warn(f"wire: has no effect, because the mesh has {sizes} and nothing is sent; omit it", stacklevel=3)
        return partition
    if not moves(partition.placements):
        reasons = collections.Counter(partition.leaves[path].reason for path in partition.placements)
        (most, _), *_ = reasons.most_common(1)
        why, way_out = "they are sharded at stage 3 alone", "set `stage=3`"
        if not any(is_over_state(partition.leaves[path].sharded) for path in partition.placements):
            why = f"most because of this: {most}"
            way_out = "lower `min_size`" if "fewer" in most else "set `indivisible='pad'`"
        raise UserError(f"wire: every device holds all weights, {why}; {way_out}, or omit wires")
    if wires.second_copy and not blocks:
        raise UserError(
            "wire.second_copy: needs `blocks`, whose weights are gathered again in the backward pass; pass blocks, or omit it"
        )
    knows_hosts = wires.gradients != PLAIN or wires.second_copy
    hosts = _hosts(mesh, wires.host_devices) if knows_hosts else Hosts(1, ways)
    where = f"all devices of {sizes} are on one host" if hosts.count == 1 else f"each host has one device of {sizes}"
    for name, is_wrong, what in (
        ("gradients", wires.gradients == INT4 and hosts.count == 1, "'int4' is for the links between hosts"),
        ("second_copy", wires.second_copy and 1 in (hosts.count, hosts.size), "is divided among the devices of one of several hosts"),
        ("error_feedback", wires.error_feedback and hosts.count == 1, "is of what is sent between hosts"),
    ):  # fmt: skip
        if is_wrong:
            raise UserError(f"wire.{name}: {what}, and {where}; omit it, or set `host_devices` to those of a host")
    wire = InBlocks(
        hosts=hosts,
        is_packed=wires.weights == INT8,
        second_copy=wires.second_copy,
        bits=_BITS.get(wires.gradients, 0),
        has_feedback=wires.error_feedback,
    )
    named = {path: weight for path, weight in partition.placements.items() if re.search(pattern, path)}
    if not named:
        raise UserError(
            f"wires: {pattern!r} finds no weight{tree.such_as(pattern, partition.placements)}; omit the row"
        )
    chosen = {path for path, weight in named.items() if _takes(weight)} - _quantized(partition)
    if any(isinstance(partition.placements[path].wire, fp8.InFp8) for path in chosen):
        raise UserError(
            "wire: matmuls in fp8 gather their weights in 8 bits already; omit wires, take fp8's recipe 'rowwise', or compute in bf16"
        )
    # Those of an earlier row keep its wire.
    found = {path for path in chosen if not isinstance(partition.placements[path].wire, columns.ByColumns | InBlocks)}
    if not found:
        raise UserError(f"wire: no matrix that is gathered has a shard of {packed.BLOCK} elements; omit wires")
    if wires.error_feedback and not any(partition.placements[path].trainable for path in found):
        raise UserError(
            f"wire.error_feedback: no trained matrix has a shard of {packed.BLOCK} elements, so no gradient is packed; omit it"
        )
    return partition.with_wires(dict.fromkeys(found, wire))


def _hosts(mesh: Mesh, host_devices: int) -> Hosts:
    """Returns the hosts of the devices over which the state is sharded."""
    ways = mesh_lib.size(mesh, mesh_lib.STATE)
    names = list(mesh.shape)
    grid = np.moveaxis(
        np.arange(mesh.size).reshape(mesh.devices.shape),
        [names.index(axis) for axis in mesh_lib.STATE],
        range(-len(mesh_lib.STATE), 0),
    )
    of_device = [number // host_devices for number in range(mesh.size)] if host_devices else _processes(mesh)
    layouts = set()
    for group in grid.reshape(-1, ways):
        found = [of_device[number] for number in group]
        size = found.count(found[0])
        is_even = all(len(set(found[start : start + size])) == 1 for start in range(0, ways, size))
        layouts.add(size if is_even and ways % size == 0 and len(set(found)) == ways // size else 0)
    if len(layouts) > 1 or 0 in layouts:
        what = f"wire.host_devices: {host_devices}" if host_devices else "wire.host_devices: the devices of a process"
        raise UserError(
            f"{what} do not divide the devices of {mesh_lib.text(mesh, mesh_lib.STATE)} into equal hosts of neighbours; set it to a number "
            "of devices of the mesh that does"
        )
    size = layouts.pop()
    return Hosts(ways // size, size)


def _processes(mesh: Mesh) -> list[int]:
    """Returns the process of each device.

    Raises:
      UserError: each has one device, so they do not tell hosts apart.
    """
    found = [device.process_index for device in mesh.devices.flat]
    if len(found) > 1 and len({*found}) == len(found):
        raise UserError(
            "wire.host_devices: is 0, and each process has one device, so hosts cannot be told; set `host_devices` to the devices of a host"
        )
    return found


def _takes(weight: Placement) -> bool:
    """Returns whether a weight is sent, and its shards have whole blocks."""
    shape = weight.shape or ()
    entries = [specs.names(entry) for entry in weight.stored.spec]
    is_shared = any({*names} & {*mesh_lib.STATE} and {*names} & {*mesh_lib.COMPILER} for names in entries)
    is_matrix = len(shape) > 1 and math.prod(weight.stored.shard_shape(shape)) >= packed.BLOCK
    # Experts that live on different devices keep their wire, which gathers them over fewer devices, or over none.
    is_own = weight.overwritten or weight.is_experts or is_shared
    return is_matrix and gather.is_gathered(weight) and not is_own


def _quantized(partition: Partition) -> set[str]:
    """Returns the paths of frozen weights that are stored in few bits, and of others that are not floating."""
    found = {
        path
        for path, leaf in tree.flatten(partition.abstract_state)
        if path in partition.placements and not jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    stored = {path.rpartition("/")[0] for path in found}
    scales = {path for path in partition.placements if path.rpartition("/")[2] == quantized.SCALES}
    return found | {path for path in scales if path.rpartition("/")[0] in stored}


def _gathered(arrays: tuple, groups: list[list[int]] | None) -> tuple:
    """Returns the arrays of all devices of a group, in a new first dim."""
    return tuple(
        None if array is None else jax.lax.all_gather(array, gather.STATE, axis_index_groups=groups) for array in arrays
    )


def _exchanged(parts: packed.Packed, groups: list[list[int]] | None) -> packed.Packed:
    """Returns what each device of a group has for this one; the first dim of the arrays counts them."""
    exchange = functools.partial(
        jax.lax.all_to_all, axis_name=gather.STATE, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True
    )
    return packed.Packed(*map(exchange, parts))


def compiler_axes(placement: Placement) -> specs.Entry:
    """Returns the compiler's axes over which a weight is sharded, as an entry of a spec."""
    used = specs.axes(placement.stored.spec)
    return specs.entry(tuple(axis for axis in mesh_lib.COMPILER if axis in used))


def _over_rest(
    function: Callable[..., tuple], placement: Placement, lead: tuple, taken: tuple | None = None
) -> Callable[..., tuple]:
    """Returns a function of a shard, or of its form with the dims `taken` before, on the shards over the compiler's axes."""
    own = compiler_axes(placement)
    has_scales = isinstance(placement.wire, InBlocks) and placement.wire.is_packed
    form = lambda before: (P(*before, own), P(*before, own) if has_scales else None)  # noqa: E731
    in_specs = (specs.only(placement.stored.spec, mesh_lib.COMPILER),) if taken is None else (form(taken),)
    return mesh_lib.manual_over_rest(function, in_specs, form(lead))


def _shard_shape(placement: Placement) -> tuple[int, ...]:
    """Returns the shape of a device's shard of a weight inside `mesh.manual_over_rest`."""
    whole = placement.shape or ()
    return placement.stored.shard_shape(whole) if mesh_lib.rest() else gather.local_shape(whole, placement.stored)


def _used_shape(placement: Placement) -> tuple[int, ...]:
    """Returns the shape of a weight as the model sees it."""
    assert placement.shape is not None
    padding = placement.padding or (0,) * len(placement.shape)
    return tuple(size - extra for size, extra in zip(placement.shape, padding))
