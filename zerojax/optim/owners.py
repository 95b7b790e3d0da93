"""Gives each matrix of sharded leaves an owner, which alone computes a function of the whole matrix. This module moves matrices to owners
and results back, by two all-to-alls for as many matrices as there are devices.

A leaf is a batch of matrices by its *form*, a letter for each dim: "b" counts matrices, the dims "r" together are rows, and "c" columns.
A device's shard is a tile of each matrix. Devices along the axes that shard rows or columns hold the tiles of one matrix, and exchange
them. Along axes that shard the batch, devices have matrices of their own. Along all other axes shards are equal: these devices own
different matrices too, and gather each other's results.

A *unit* is some matrices of one leaf, with one owner. Units are sorted by cost, and each *round* takes as many of the next as there are
owners, so that the owners of a round compute about as long. In most rounds all matrices have one shape. In others a device branches by
its index.

The matrices of a round travel while owners compute those of the round before, and results go back beside the next: `optimization_barrier`
orders this, and bounds the matrices in flight to those of two rounds each way.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zerojax import roles, specs

BATCH, ROWS, COLUMNS = "brc"
MOST = 1 << 27  # elements of the matrices that one owner computes at once, where there are more than owners


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """A leaf as a batch of matrices."""

    shape: tuple[int, ...]  # of the leaf
    form: str  # a letter for each dim
    axes: tuple[tuple[str, ...], ...]  # for each dim, the mesh axes that shard it, those of one device omitted
    # the mesh axes of more than one device, in the mesh's order, and their sizes
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def shard(self) -> tuple[int, ...]:
        """Returns the shape of a device's shard."""
        sizes = dict(self.sizes)
        return tuple(n // math.prod(sizes[axis] for axis in axes) for n, axes in zip(self.shape, self.axes))

    @property
    def over(self) -> tuple[str, ...]:
        """Returns the axes along which devices hold the tiles of one matrix."""
        found = {axis for letter, axes in zip(self.form, self.axes) for axis in axes if letter != BATCH}
        return tuple(axis for axis, _ in self.sizes if axis in found)

    @property
    def alike(self) -> tuple[str, ...]:
        """Returns the axes along which shards are equal."""
        found = set(itertools.chain(*self.axes))
        return tuple(axis for axis, _ in self.sizes if axis not in found)

    @property
    def count(self) -> int:
        """Returns the number of matrices of which a device has tiles."""
        return math.prod(n for n, letter in zip(self.shard, self.form) if letter == BATCH)

    @property
    def rows(self) -> int:
        return math.prod(n for n, letter in zip(self.shape, self.form) if letter == ROWS)

    @property
    def columns(self) -> int:
        return math.prod(n for n, letter in zip(self.shape, self.form) if letter == COLUMNS)

    @property
    def matrix(self) -> "MatrixLayout":
        """Returns the layout of one of its matrices."""
        kept = [dim for dim, letter in enumerate(self.form) if letter != BATCH]
        shape, axes = tuple(self.shape[dim] for dim in kept), tuple(self.axes[dim] for dim in kept)
        return MatrixLayout(shape, "".join(self.form[dim] for dim in kept), axes, self.sizes)

    def split(self, shard: jax.Array) -> jax.Array:
        """Returns the tiles of a shard, [matrices, *tile]."""
        return jnp.transpose(shard, self._batch_first).reshape(self.count, *self.matrix.shard)

    def join(self, tiles: jax.Array) -> jax.Array:
        """Inverts `split`."""
        moved = tiles.reshape([self.shard[dim] for dim in self._batch_first])
        return jnp.transpose(moved, [self._batch_first.index(dim) for dim in range(len(self.form))])

    @property
    def _batch_first(self) -> list[int]:
        return sorted(range(len(self.form)), key=lambda dim: self.form[dim] != BATCH)  # stable

    def assemble(self, tiles: jax.Array) -> jax.Array:
        """Returns matrices, [count, rows, columns], from the tiles of all devices along `over`, [devices, count, *tile]. Of one matrix."""
        count, lengths = tiles.shape[1], [dict(self.sizes)[axis] for axis in self.over]
        return jnp.transpose(tiles.reshape(*lengths, count, *self.shard), self._order).reshape(
            count, self.rows, self.columns
        )

    def cut(self, matrices: jax.Array) -> jax.Array:
        """Inverts `assemble`."""
        before = [*(dict(self.sizes)[axis] for axis in self.over), matrices.shape[0], *self.shard]
        moved = jnp.transpose(
            matrices.reshape([before[dim] for dim in self._order]),
            [self._order.index(dim) for dim in range(len(before))],
        )
        return moved.reshape(-1, matrices.shape[0], *self.shard)

    @property
    def _order(self) -> list[int]:
        """Returns the dims of [*over, count, *tile] in the order of [count, *rows, *columns], each dim after the axes that shard it."""
        of_axis = {axis: number for number, axis in enumerate(self.over)}
        order = [len(of_axis)]
        for letter in (ROWS, COLUMNS):
            for dim in (dim for dim, own in enumerate(self.form) if own == letter):
                order += [*(of_axis[axis] for axis in self.axes[dim]), len(of_axis) + 1 + dim]
        return order


def layout(shape: Sequence[int], form: str, sharding: NamedSharding | None = None) -> MatrixLayout:
    """Returns the layout of a leaf of that form; without a sharding, of one that a single device holds."""
    if sharding is None:
        return MatrixLayout(tuple(shape), form, ((),) * len(shape))
    sizes = tuple((axis, size) for axis, size in sharding.mesh.shape.items() if size > 1)
    large = {axis for axis, _ in sizes}
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes = tuple(tuple(axis for axis in specs.names(entry) if axis in large) for entry in entries)
    return MatrixLayout(tuple(shape), form, axes, sizes)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Matrices of a leaf that have one owner: the leaf's number, its layout, and which of its matrices."""

    leaf: int
    layout: MatrixLayout
    start: int
    count: int

    @property
    def kind(self) -> tuple[int, MatrixLayout]:
        """Returns what units have in common that an owner computes alike."""
        return self.count, self.layout.matrix

    @property
    def width(self) -> int:
        """Returns the elements that each device sends the owner."""
        return self.count * math.prod(self.layout.matrix.shard)


@dataclasses.dataclass(frozen=True)
class Round:
    """Units with an owner each, in the order of the owners: devices along `alike` count first, then those along `over`."""

    units: tuple[Unit, ...]
    over: tuple[str, ...]
    alike: tuple[str, ...]

    def ways(self, axes: Sequence[str]) -> int:
        """Returns the number of devices along axes of the mesh."""
        return math.prod(dict(self.units[0].layout.sizes)[axis] for axis in axes)

    @property
    def width(self) -> int:
        return max(unit.width for unit in self.units)

    @property
    def received(self) -> int:
        """Returns the elements that a device receives: of matrices, of results, and of the results of devices with equal shards."""
        across, copies = self.ways(self.over), self.ways(self.alike)
        return (2 * (across - 1) + (copies - 1) * across) * self.width


def rounds(layouts: Mapping[int, MatrixLayout], cost: Callable[[int, int], float]) -> list[Round]:
    """Returns the rounds in which all matrices of these leaves get an owner.

    Args:
      layouts: of the leaves, by number.
      cost: (rows, columns) -> the operations of one matrix.
    """
    units = collections.defaultdict(list)
    for number, found in layouts.items():
        owners = math.prod(size for axis, size in found.sizes if axis in (*found.over, *found.alike))
        count = max(1, min(found.count // owners, MOST // (found.rows * found.columns)))
        for start in range(0, found.count, count):
            unit = Unit(number, found, start, min(count, found.count - start))
            units[found.over, found.alike, owners].append(unit)
    made = []
    for (over, alike, owners), own in units.items():
        own.sort(
            key=lambda unit: (-unit.count * cost(unit.layout.rows, unit.layout.columns), str(unit.kind), unit.leaf)
        )
        made += [Round(tuple(own[n : n + owners]), over, alike) for n in range(0, len(own), owners)]
    return made


def apply(
    function: Callable[[jax.Array], jax.Array],
    planned: Sequence[Round],
    read: Callable[[int, Sequence[Any]], jax.Array],
) -> dict[int, jax.Array]:
    """Returns each leaf's shard of `function` of its matrices, by the leaf's number. For the inside of a `jax.shard_map` over all axes.

    Args:
      function: f(matrices [count, rows, columns]) -> the same of their results.
      planned: from `rounds`.
      read: f(number, after) -> this device's shard of a leaf, computed after the arrays `after`.
    """
    tiles: dict[int, jax.Array] = {}
    results: dict[int, list[tuple[int, jax.Array]]] = collections.defaultdict(list)
    made: list[Any] = []
    returned: list[Any] = []
    for number, one in enumerate(planned):
        before = made[number - 2 : number - 1] if number >= 2 else []
        for unit in one.units:
            if unit.leaf not in tiles:
                tiles[unit.leaf] = unit.layout.split(read(unit.leaf, before))
        sent = _packed(one, tiles)
        with jax.named_scope(roles.TO_OWNERS):
            arrived = _exchanged(one, sent)
        (arrived,) = ordered([arrived], returned[number - 2 : number - 1] if number >= 2 else [])
        made.append(_computed(function, one, arrived))
        with jax.named_scope(roles.TO_OWNERS):
            back = _exchanged(one, made[-1])
            back = jax.lax.all_gather(back, one.alike, tiled=True) if one.alike else back
        returned.append(back)
        for place, unit in enumerate(one.units):
            own = back[place, : unit.width].reshape(unit.count, *unit.layout.matrix.shard)
            results[unit.leaf].append((unit.start, own))
    layouts = {unit.leaf: unit.layout for one in planned for unit in one.units}
    return {
        leaf: layouts[leaf].join(jnp.concatenate([own for _, own in sorted(parts, key=lambda part: part[0])]))
        for leaf, parts in results.items()
    }


def _exchanged(one: Round, array: jax.Array) -> jax.Array:
    """Returns the rows of this device of all along `over`, [devices, width]."""
    return jax.lax.all_to_all(array, one.over, 0, 0, tiled=True) if one.over else array


def ordered(arrays: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Returns the arrays, which are computed no earlier than those of `after`."""
    if not after:
        return list(arrays)
    held = jax.lax.optimization_barrier((list(arrays), list(after)))
    return held[0]


def _packed(one: Round, tiles: Mapping[int, jax.Array]) -> jax.Array:
    """Returns what this device sends each owner along `over`, [owners, width], from its share of the round."""
    across, copies = one.ways(one.over), one.ways(one.alike)
    sent = [
        jnp.pad(tiles[unit.leaf][unit.start : unit.start + unit.count].reshape(-1), (0, one.width - unit.width))
        for unit in one.units
    ]
    taken = -(-len(sent) // across)  # devices along `alike` that have any
    sent += [jnp.zeros_like(sent[0])] * (across * taken - len(sent))
    stacked = jnp.stack(sent)
    if copies == 1:
        return stacked
    # Those without any repeat the last, and nobody reads their results
    own = jnp.minimum(jax.lax.axis_index(one.alike), taken - 1)
    return jax.lax.dynamic_slice_in_dim(stacked, own * across, across)


def _computed(function: Callable[[jax.Array], jax.Array], one: Round, arrived: jax.Array) -> jax.Array:
    """Returns the results of this device's unit, cut for the devices along `over`: [devices, width]."""

    def of_kind(count: int, matrix: MatrixLayout) -> Callable[[jax.Array], jax.Array]:
        width = count * math.prod(matrix.shard)

        def run(arrived: jax.Array) -> jax.Array:
            tiles = arrived[:, :width].reshape(-1, count, *matrix.shard)
            done = matrix.cut(function(matrix.assemble(tiles))).reshape(-1, width)
            return jnp.pad(done, ((0, 0), (0, one.width - width)))

        return run

    kinds = list(dict.fromkeys(unit.kind for unit in one.units))
    branches = [of_kind(*kind) for kind in kinds]
    if len(branches) == 1:
        return branches[0](arrived)
    place = jax.lax.axis_index(one.alike) * one.ways(one.over) if one.alike else 0
    place += jax.lax.axis_index(one.over) if one.over else 0
    owners = one.ways((*one.alike, *one.over))
    of_owner = [kinds.index(unit.kind) for unit in one.units]
    of_owner += [len(kinds)] * (owners - len(of_owner))  # the others compute nothing
    return jax.lax.switch(jnp.asarray(of_owner)[place], [*branches, jnp.zeros_like], arrived)
