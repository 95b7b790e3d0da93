"""Decides which leaves of a train state are sharded, and on which dim. This module is the table of ZeRO's stages.

    stage   optimizer state   gradients                 params
    0       replicated        replicated (all-reduce)   replicated
    1       sharded           replicated                replicated
    2       sharded           sharded                   replicated
    3       sharded           sharded                   sharded, gathered where used

`shard_dim` picks the dim from (shape, base spec, axis size). A weight, its master copy, its moments and its gradient share one shape and
one override, so they get the same dim. The optimizer update is therefore local (ZeRO, arXiv:1910.02054, sections 5.1 to 5.3).
"""

import collections
import dataclasses
import functools
import math
import re
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, train_state, tree
from zerojax import mesh as mesh_lib
from zerojax import specs as specs_lib
from zerojax.errors import UserError
from zerojax.optim import eight_bit
from zerojax.roles import FROZEN, OPT_STATE, OTHER, PARAMS
from zerojax.train_state import State
from zerojax.tree import Leaf
from zerojax.zero.host import selection, settings, storage
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import experts

STATE = mesh_lib.STATE  # the axes over which a stage shards


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Which roles a stage shards over the axes of `STATE`."""

    opt_state: bool
    grads: bool
    params: bool


STAGES: dict[int, Sharded] = {
    0: Sharded(opt_state=False, grads=False, params=False),
    1: Sharded(opt_state=True, grads=False, params=False),
    2: Sharded(opt_state=True, grads=True, params=False),
    3: Sharded(opt_state=True, grads=True, params=True),
}

INDIVISIBLE = ("whole", "pad")  # of a leaf with no dim that divides

# The first regex found in a leaf's path gives its role. The role of an NNX variable follows from its type. Params whose path does not
# match `trainable` are frozen: they are stored and gathered like other params, but have no gradient and no optimizer state.
ROLES: tuple[tuple[str, str], ...] = ((r"(^|/)opt_state(/|$)", OPT_STATE), (r"(^|/)params(/|$)", PARAMS), (r"", OTHER))

Overrides = Sequence[tuple[str, P | Sequence[Any]]]


def shard_dim(shape: Sequence[int], base: P, axis_size: int, layer_dims: int = 0) -> int | None:
    """Picks the dim to shard `axis_size` ways: the first that divides and that `base` does not shard; None if there is none.

    The first `layer_dims` dims count layers, each of which is gathered alone, and are not sharded.

    The first dim is the major one in memory: a shard is then contiguous, and a gather needs no reordering.

    >>> shard_dim((50257, 768), P(), 8)
    1
    """
    taken = tuple(base) + (None,) * (len(shape) - len(base))
    for dim, length in enumerate(shape):
        if dim >= layer_dims and taken[dim] is None and length and length % axis_size == 0:
            return dim
    return None


def pad_dim(shape: Sequence[int], base: P, ways: int, layer_dims: int = 0) -> tuple[int | None, tuple[int, ...]]:
    """Picks the longest dim that `base` does not shard; returns it and the padding of each dim that makes it divide."""
    taken = tuple(base) + (None,) * (len(shape) - len(base))
    free = [dim for dim in range(layer_dims, len(shape)) if taken[dim] is None]
    if not free:
        return None, ()
    dim = max(free, key=lambda d: shape[d])
    return dim, tuple(-shape[d] % ways if d == dim else 0 for d in range(len(shape)))


def partition_state(
    abstract_state: State,
    *,
    mesh: Mesh,
    stage: int = 3,
    overrides: Overrides = (),
    min_size: int = 1024,
    indivisible: str = "whole",
    roles: Sequence[tuple[str, str]] = ROLES,
    trainable: str = "",
    offload: settings.Offload | Mapping[str, Any] | str | None = None,
    pipeline: pipeline_state.Pipeline | None = None,
    layer_dims: Mapping[str, int] = types.MappingProxyType({}),
) -> partition_lib.Partition:
    """Decides how a train state is sharded, without allocating anything.

    Args:
      abstract_state: any pytree of arrays or ShapeDtypeStructs: a flax TrainState, NNX modules and optimizers, a dict.
      mesh: a mesh with a `data` axis (see `make_mesh`). Missing axes are added with size 1, see `mesh.completed`.
      stage: 0 to 3, the table above.
      overrides: ordered (path regex, PartitionSpec); the first regex found in a weight's path wins. It holds for the weight, its
        master copy, its moments and its gradient. A spec that names `data` is used as it is; `data` stands for all axes over which
        the stage shards. `P()` keeps the leaf replicated. A spec of other axes only (`P(None, "model")`) is a base to which the stage adds
        `data`.
      min_size: leaves of fewer elements stay replicated.
      indivisible: if no dim divides, "whole" keeps the leaf replicated and "pad" pads its longest free dim with zeros. `make_train_step`
        hides the padding from models and optimizers. A step of your own hides it with `unpad(state, partition)`, also of
        {"params": grads}, and `pad`.
      roles: ordered (path regex, role); the first regex found in a leaf's path gives its role. NNX variables have that of their type
        unless an entry of your own matches. A leaf that has none, and a weight's name
        and shape (averaged weights, a momentum of your own), is sharded as the weight's moments.
      trainable: a regex; weights whose path below `params` does not match are frozen. The optimizer state must omit them, as that of
        `shard_train_state` does. Empty: all weights are trained.
      offload: what lives in host memory: "host" for the optimizer state, an `Offload` or a dict of its fields; None for nothing.
      pipeline: how layers are divided into stages, on a mesh with `pipe`; None without one.
      layer_dims: how many first dims of a weight count layers of a scan or a vmap, by path (`layer_stacks.counts`). They are not sharded
        unless an override says so. `shard_train_state` reads them from the trace of its init function.

    Raises:
      UserError: the stage, `indivisible` or a mesh axis is unknown; an override matches no weight or does not fit its shape; a regex of
        `roles` matches no leaf; two leaves have one path; the state has no params; `trainable` matches no weight; the optimizer state
        has leaves of a frozen weight; or the stage or the optimizer does not allow what `offload` says.

    >>> partition = partition_state(jax.eval_shape(init, key), mesh=make_mesh(), stage=2)
    """
    errors.one_of("stage", stage, STAGES)
    errors.one_of("indivisible", indivisible, INDIVISIBLE)
    mesh = mesh_lib.completed(mesh)
    if len(mesh_lib.groups(mesh)) > 1:
        if pipeline is None:
            raise UserError("pipeline: is not given, and the mesh has stages (`pipe`); pass a zerojax.Pipeline")
        same: dict[str, Any] = {
            "overrides": overrides,
            "min_size": min_size,
            "indivisible": indivisible,
            "roles": roles,
            "layer_dims": layer_dims,
        }
        of_group = functools.partial(
            partition_state, abstract_state, stage=stage, trainable=trainable, offload=offload, **same
        )
        return pipeline_state.partitioned(pipeline, mesh, lambda own: of_group(mesh=own))
    if pipeline is not None:
        warnings.warn(
            "pipeline: has no effect, because the mesh has no `pipe`; omit it, or make_mesh(pipe=...)", stacklevel=2
        )
    chosen = settings.read(offload)
    settings.check(chosen, STAGES, stage)
    abstract_state = tree.abstract(abstract_state)
    _check_paths(abstract_state)
    _check_roles(abstract_state, roles)
    role_of = leaf_roles(abstract_state, roles, trainable)
    if PARAMS not in role_of.values() and FROZEN not in role_of.values():
        raise UserError(
            "state: no leaf has the role 'params'; pass roles=[(path regex, 'params'), ...] to name the weights; for make_train_step "
            f"{train_state.way_to_one(abstract_state)}"
        )
    if PARAMS not in role_of.values():
        known = ", ".join([tree.below_params(path) for path, role in role_of.items() if role == FROZEN][:3])
        raise UserError(f"trainable: {trainable!r} matches no weight's path; paths look like {known}")
    rule = _Rule(mesh, STAGES[stage], tuple(overrides), min_size, indivisible, layer_dims)
    weights = {path: leaf for path, leaf in tree.flatten(abstract_state) if role_of[path] in (PARAMS, FROZEN)}
    rule.check_overrides(weights)
    index = tree.suffix_index(weights)
    blocks = eight_bit.moments(abstract_state)
    leaves = {}
    for path, leaf in tree.flatten(abstract_state):
        moment, shape = blocks.get(path, (path, leaf.shape))
        owner = tree.longest_suffix(index, moment)
        weight = owner if owner is not None and weights[owner].shape == shape else None
        if role_of[path] == OTHER and weight is not None and _is_copy(path, leaf, weight, roles):
            leaves[path] = rule.decide_copy(weight, leaf)
            continue
        if role_of[path] == OPT_STATE and weight is not None and role_of[weight] == FROZEN and _is_of(moment, weight):
            raise UserError(
                f"{path}: belongs to {weight}, which trainable={trainable!r} freezes, and so has no optimizer "
                "state; call zerojax.shard_train_state, which makes that of the trainable weights alone, or pass the state that it returns"
            )
        decided = rule.decide(weight, jax.ShapeDtypeStruct(shape, leaf.dtype), role_of[path])
        decided = dataclasses.replace(decided, weight=weight or "")
        leaves[path] = decided if shape == leaf.shape else _scales(decided, leaf.shape, mesh)
    partition = selection.place(_assemble(mesh, stage, abstract_state, leaves), chosen, min_size)
    if storage.on_disk(partition):  # a restored checkpoint needs it
        partition = dataclasses.replace(partition, keeper=storage.keeper)
    return partition


def unused_axes(partition: partition_lib.Partition) -> Iterator[tuple[str, int]]:
    """Yields the name and the size of each axis over which overrides alone shard, and none does."""
    named = {axis for leaf in partition.leaves.values() for axis in specs_lib.axes(leaf.sharded)}
    for axis in mesh_lib.COMPILER:
        if (size := partition.mesh.shape[axis]) > 1 and axis not in named:
            yield axis, size


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The settings that decide one leaf."""

    mesh: Mesh
    sharded: Sharded
    overrides: tuple
    min_size: int
    indivisible: str
    layer_dims: Mapping[str, int]

    def check_overrides(self, weights: Mapping[str, Any]) -> None:
        for entry in self.overrides:
            if not (isinstance(entry, (tuple, list)) and len(entry) == 2) or isinstance(entry[1], str):
                raise UserError(
                    f"overrides: each is a pair (path regex, PartitionSpec), and one is {errors.shown(entry)}"
                )
            pattern = entry[0]
            if not any(map(errors.regex("overrides", pattern).search, weights)):
                known = ", ".join(list(weights)[:3])
                raise UserError(f"overrides: {pattern!r} matches no weight's path; paths look like {known}")

    def decide(self, weight: str | None, leaf: Leaf, role: str) -> partition_lib.Decision:
        # A leaf that belongs to no weight (a count, a factored moment) has a shape of its own, so overrides do not apply to it.
        base, final, over = (P(), False, STATE) if weight is None else self._override(weight, leaf.shape)
        replicated = specs_lib.without(base, over)
        layer_dims = self.layer_dims.get(weight or "", 0)
        sharded, reason, padding = self._shard(leaf, base, final, over, layer_dims)
        if weight is not None and placement.is_overwritten(weight):
            return partition_lib.Decision(role, leaf.shape, leaf.dtype, P(), P(), "overwritten with its gradient")
        if role == OTHER:
            return partition_lib.Decision(
                role, leaf.shape, leaf.dtype, replicated, replicated, "neither weight nor moment"
            )
        is_sharded = self.sharded.opt_state if role == OPT_STATE else self.sharded.params
        pads = padding if is_sharded or (role == PARAMS and self.sharded.opt_state) else ()
        spec = sharded if is_sharded else replicated
        return partition_lib.Decision(
            role, leaf.shape, leaf.dtype, spec, sharded, reason, pads, over=over, layer_dims=layer_dims
        )

    def decide_copy(self, weight: str, leaf: Leaf) -> partition_lib.Decision:
        """Decides an array beside the params that is updated with a weight. It is never padded, since loss functions read it as it is."""
        found = self.decide(weight, leaf, OPT_STATE)
        if not found.padding:
            return found
        replicated = specs_lib.without(found.sharded, found.over)
        reason = f"no dim of {leaf.shape} divides by {mesh_lib.text(self.mesh, found.over)}"
        return dataclasses.replace(found, spec=replicated, sharded=replicated, reason=reason, padding=())

    def _override(self, path: str, shape: tuple[int, ...]) -> tuple[P, bool, tuple[str, ...]]:
        """Returns the spec to start from, whether it is final, and the axes over which the stage shards."""
        for pattern, entries in self.overrides:
            if re.search(pattern, path):
                self._check_spec(path, P(*entries))
                if mesh_lib.size(self.mesh, mesh_lib.EXPERT) == 1:
                    entries = specs_lib.without(P(*entries), mesh_lib.EXPERT)
                own = () if specs_lib.axes(P(*entries)).isdisjoint(mesh_lib.EXPERT) else mesh_lib.EXPERT
                over = tuple(axis for axis in STATE if axis not in own)
                spec = P(*[self._of_all(self._of_all(entry, own), over) for entry in entries])
                self._check_once(path, spec)
                self._check_fits(path, shape, spec)
                return spec, not specs_lib.axes(spec) or not specs_lib.axes(spec).isdisjoint(over), over
        return P(), False, STATE

    def _of_all(self, entry: Any, axes: tuple[str, ...]) -> Any:
        """Returns an entry of a spec in which one of some axes stands for all of them, as `data` does for those of the stage."""
        names = specs_lib.names(entry)
        first = next((number for number, name in enumerate(names) if name in axes), None)
        if first is None:
            return entry
        rest = tuple(name for name in names[first:] if name not in axes)
        return specs_lib.entry((*names[:first], *mesh_lib.sharded(self.mesh, axes), *rest))

    def _check_spec(self, path: str, spec: P) -> None:
        unknown = specs_lib.axes(spec) - set(self.mesh.shape)
        if unknown:
            raise UserError(
                f"overrides: {spec} of {path} names {sorted(unknown)}; the mesh has {[*mesh_lib.sizes(self.mesh)]}"
            )
        self._check_once(path, spec)

    def _check_once(self, path: str, spec: P) -> None:
        named = [axis for entry in spec for axis in specs_lib.names(entry)]
        if repeated := [axis for axis in self.mesh.shape if named.count(axis) > 1]:
            raise UserError(
                f"overrides: {spec} of {path} names {repeated[0]!r} twice, and a mesh axis can shard one dim; name it once"
            )

    def _check_fits(self, path: str, shape: tuple[int, ...], spec: P) -> None:
        if len(spec) > len(shape):
            raise UserError(
                f"overrides: {spec} of {path} has {len(spec)} dims, and the leaf has shape {shape}; name its dims only"
            )
        for dim, entry in enumerate(spec):
            ways = math.prod(self.mesh.shape[axis] for axis in specs_lib.axes(P(entry)))
            if shape[dim] % ways:
                raise UserError(
                    f"overrides: {spec} of {path} shards dim {dim} of {shape} in {ways}, which does not divide {shape[dim]}; "
                    "name another dim or axis"
                )

    def _shard(
        self, leaf: Leaf, base: P, final: bool, over: tuple[str, ...], layer_dims: int
    ) -> tuple[P, str, tuple[int, ...]]:
        """Returns the sharded spec, the reason, and the padding."""
        ways = mesh_lib.size(self.mesh, over)
        if final:
            return base, "sharded" if partition_lib.is_over_state(base) else "override", ()
        if ways == 1:
            return base, f"{' x '.join(mesh_lib.sharded(self.mesh, over))} axis of 1", ()
        if math.prod(leaf.shape) < self.min_size or not leaf.shape:
            return base, f"fewer than {self.min_size} elements", ()
        padding: tuple[int, ...] = ()
        dim = shard_dim(leaf.shape, base, ways, layer_dims)
        if dim is None and self.indivisible == "pad":
            dim, padding = pad_dim(leaf.shape, base, ways, layer_dims)
        if dim is None:
            but = " but those that count layers" if layer_dims else ""
            return base, f"no dim of {leaf.shape}{but} divides by {mesh_lib.text(self.mesh, over)}", ()
        entries = list(base) + [None] * (len(leaf.shape) - len(base))
        entries[dim] = specs_lib.entry(mesh_lib.sharded(self.mesh, over))
        return specs_lib.trimmed(entries), "sharded", padding


def _scales(codes: partition_lib.Decision, shape: tuple[int, ...], mesh: Mesh) -> partition_lib.Decision:
    """Returns the decision for a moment's scales, from that for its codes."""
    stored = _padded(codes.shape, codes.padding)
    padding = tuple(n - have for n, have in zip(eight_bit.scales_shape(stored), shape))
    spec, sharded = (eight_bit.scales_spec(s, stored, mesh) for s in (codes.spec, codes.sharded))
    return dataclasses.replace(codes, shape=shape, spec=spec, sharded=sharded, padding=padding if any(padding) else ())


def _check_paths(abstract_state: State) -> None:
    """Raises a UserError if two leaves have one path, as those of {"a/b": x, "a": {"b": y}} have."""
    paths = collections.Counter(path for path, _ in tree.flatten(abstract_state))
    path, count = max(paths.items(), key=lambda found: found[1], default=("", 0))
    if count > 1:
        raise UserError(f"{path}: is the path of {count} leaves of the state, and names one; rename the key with a '/'")


def _check_roles(abstract_state: State, roles: Sequence[tuple[str, str]]) -> None:
    """Checks a user's table of roles: its regexes match leaves, and its roles are known."""
    paths = [path for path, _ in tree.flatten(abstract_state)]
    for entry in roles:
        if entry in ROLES:
            continue
        if not (isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], str)):
            raise UserError(f"roles: each is a pair (path regex, role), and one is {errors.shown(entry)}")
        pattern, role = entry
        if role not in (PARAMS, OPT_STATE, OTHER):
            way_out = errors.choose(role, (PARAMS, OPT_STATE, OTHER))
            raise UserError(f"roles: {role!r}, the role of {pattern!r}, is not known; {way_out}")
        if not any(map(errors.regex("roles", pattern).search, paths)):
            raise UserError(f"roles: {pattern!r} matches no leaf's path; paths look like {', '.join(paths[:3])}")


def leaf_roles(abstract_state: State, roles: Sequence[tuple[str, str]] = ROLES, trainable: str = "") -> dict[str, str]:
    """Returns each leaf's role by path.

    Raises:
      UserError: `trainable` is not a regex.
    """
    is_trained = errors.regex("trainable", trainable, "pass one such as 'lora|head'").search
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(
        abstract_state, is_leaf=lambda n: isinstance(n, nnx.Variable)
    ):
        node_path = tree.path_string(path)
        entry = next((tuple(entry) for entry in roles if re.search(entry[0], node_path)), ROLES[-1])
        role = entry[1]
        # A table of the user's own decides itself
        if isinstance(node, nnx.Variable) and role != OPT_STATE and entry in ROLES:
            role = PARAMS if isinstance(node, nnx.Param) else OTHER
        for inner, _ in jax.tree_util.tree_leaves_with_path(node):
            inner_path = tree.path_string((*path, *inner))
            found[inner_path] = FROZEN if role == PARAMS and not is_trained(tree.below_params(inner_path)) else role
    return found


def _assemble(
    mesh: Mesh, stage: int, abstract_state: State, leaves: dict[str, partition_lib.Decision]
) -> partition_lib.Partition:
    """Returns the partition that the decisions describe."""
    specs = tree.map_with_path(lambda path, _: leaves[path].spec, abstract_state)
    shardings = tree.map_with_path(lambda path, _: NamedSharding(mesh, leaves[path].spec), abstract_state)

    def stored(path: str, leaf: Leaf) -> jax.ShapeDtypeStruct:
        shape = _padded(leaf.shape, leaves[path].padding)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, leaves[path].spec))

    placements = {}
    for path, leaf in leaves.items():
        if leaf.role in (PARAMS, FROZEN):
            replicated = NamedSharding(mesh, specs_lib.without(leaf.sharded, leaf.over))
            # A frozen weight has no gradient, and is not padded for one.
            sharded = NamedSharding(mesh, leaf.sharded if leaf.role == PARAMS else leaf.spec)
            opt_state = sharded if STAGES[stage].opt_state else replicated
            placements[path] = placement.Placement(
                stored=NamedSharding(mesh, leaf.spec),
                used=replicated,
                grad=sharded if STAGES[stage].grads else replicated,
                opt_state=opt_state,
                update=opt_state,
                wire=gather.PLAIN
                if specs_lib.axes(replicated.spec).isdisjoint(mesh_lib.EXPERT)
                else experts.TO_EXPERTS,
                padding=leaf.padding,
                shape=_padded(leaf.shape, leaf.padding),
                trainable=leaf.role == PARAMS,
                overwritten=placement.is_overwritten(path),
                layer_dims=leaf.layer_dims,
            )
    return partition_lib.Partition(
        mesh, stage, tree.map_with_path(stored, abstract_state), specs, shardings, leaves, placements
    )


def _is_copy(path: str, leaf: Leaf, weight: str, roles: Sequence[tuple[str, str]]) -> bool:
    """Returns whether a leaf without a role of its own is an average or a momentum: floating, and of the name of the weight."""
    own = weight.partition("/")[2]  # below `params`, or the name of an NNX module in a tuple
    if any(pattern and re.search(pattern, path) for pattern, _ in roles):
        return False
    return bool(own) and f"/{path}".endswith(f"/{own}") and jnp.issubdtype(tree.dtype_of(leaf), jnp.inexact)


def _is_of(path: str, weight: str) -> bool:
    """Returns whether a leaf's path ends with a weight's full path, so that no other weight or count can be meant."""
    return f"/{path}".endswith(f"/{tree.below_params(weight)}")


def _padded(shape: tuple[int, ...], padding: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n + extra for n, extra in zip(shape, padding)) if padding else tuple(shape)
