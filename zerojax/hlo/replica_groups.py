"""Finds the mesh axes that a collective runs over. This module reads every form in which XLA prints device groups.

    {{0,1},{2,3}}                                    a list of groups
    [2,4]<=[8], [2,4]<=[4,2]T(1,0)                   an iota: reshape 0..7 to [4,2], transpose, reshape to 2 groups of 4
    mesh['replica'=2,'data'=4] {'data'}              a mesh, and the axes whose devices form a group
    mesh['data'=8], device_ids=(0,2,4,...) {'data':(2)4}      a mesh with an order of devices, and a part of an axis
    mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}         an order as an iota: reshape to [2,4], transpose
    {{0,1},{1,2},{2,3},{3,0}}                        source and target pairs of a permute

Numbers are indices into the program's list of devices, which is the mesh's, flattened.
"""

import functools
import itertools
import re

import numpy as np
from jax.sharding import Mesh

_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d,]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? \{[^}]*\})"
)
_PAIRS = re.compile(r"source_target_pairs=(\{(?:\{[\d,]*\},?)*\})")
_COUNTED = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")
_AXIS_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS_PART = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")

Groups = tuple[tuple[int, ...], ...]
UNKNOWN = "?"  # the axis of groups that match no axes of the mesh


def groups(attributes: str, devices: int) -> Groups:
    """Returns the groups in a collective's attributes, each a tuple of device indices. A permute's rings count as groups.

    Without groups in the attributes, all devices form one.
    """
    pairs = _PAIRS.search(attributes)
    if pairs:
        return _connected(_listed(pairs[1]))
    found = _GROUPS.search(attributes)
    return parse(found[1], devices) if found else (tuple(range(devices)),)


@functools.lru_cache(maxsize=256)
def parse(text: str, devices: int) -> Groups:
    """Returns the groups of one `replica_groups` value.

    >>> parse("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    """
    if text.startswith("mesh"):
        return _of_mesh(text)
    counted = _COUNTED.match(text)
    if counted:
        shape = [int(n) for n in counted[1].split(",")]
        return _as_groups(_counted(counted[2], counted[3]).reshape(shape))
    return _listed(text) or (tuple(range(devices)),)


def axes(found: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes (of more than one device) that form the groups, or ("?",) if no set of axes does."""
    target = frozenset(frozenset(group) for group in found if len(group) > 1)
    return _axes(target, tuple(mesh.shape.items()))


@functools.lru_cache(maxsize=256)
def _axes(target: frozenset[frozenset[int]], sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    grid = np.arange(np.prod([size for _, size in sizes], dtype=int)).reshape([size for _, size in sizes])
    wide = [(dim, name) for dim, (name, size) in enumerate(sizes) if size > 1]
    for count in range(len(wide) + 1):
        for chosen in itertools.combinations(wide, count):
            if _along(grid, tuple(dim for dim, _ in chosen)) == target:
                return tuple(name for _, name in chosen)
    return (UNKNOWN,)


def _along(grid: np.ndarray, dims: tuple[int, ...]) -> frozenset[frozenset[int]]:
    """Returns the groups of devices that differ only along some dims of the grid."""
    if not dims:
        return frozenset()
    moved = np.moveaxis(grid, dims, range(-len(dims), 0))
    ways = int(np.prod([grid.shape[dim] for dim in dims]))
    return frozenset(frozenset(group) for group in moved.reshape(-1, ways).tolist())


def _of_mesh(text: str) -> Groups:
    found = _MESH.match(text)
    if found is None:
        return ()
    sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(found[1])}
    total = int(np.prod(list(sizes.values()), dtype=int))
    order = _device_order(found[2] or "", total)
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in _AXIS_PART.findall(found[3]):
        parts.setdefault(name, []).append((int(before or 1), int(size or sizes[name])))
    shape: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        done = 1  # devices of this axis that `shape` covers so far
        for before, part in sorted(parts.get(name, ())):
            if before > done:
                shape.append(before // done)
            chosen.append(len(shape))
            shape.append(part)
            done = before * part
        shape.append(size // done)
    grid = order.reshape(shape)
    moved = np.moveaxis(grid, chosen, range(-len(chosen), 0))
    return _as_groups(moved.reshape(-1, int(np.prod([shape[dim] for dim in chosen], dtype=int))))


def _device_order(text: str, total: int) -> np.ndarray:
    counted = _ORDER.search(text)
    if counted:
        return _counted(counted[1], counted[2])
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    return np.asarray(numbers) if numbers else np.arange(total)


def _counted(shape: str, order: str | None) -> np.ndarray:
    """Returns 0, 1, 2, ... reshaped to a shape, then transposed."""
    dims = [int(n) for n in shape.split(",")]
    numbers = np.arange(np.prod(dims)).reshape(dims)
    return numbers.transpose([int(n) for n in order.split(",")]) if order else numbers


def _listed(text: str) -> Groups:
    return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text))


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in rows.tolist())


def _connected(pairs: Groups) -> Groups:
    """Returns the sets of devices that the pairs connect."""
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        for device in joined:
            group_of[device] = joined
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))
