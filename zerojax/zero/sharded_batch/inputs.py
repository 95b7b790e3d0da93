"""Shards a batch over devices and passes. This module decides which dim of each leaf counts examples, and which counts tokens."""

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import precision, tree
from zerojax import specs as specs_lib
from zerojax.errors import UserError
from zerojax.tree import Leaf, PyTree
from zerojax.zero import arguments

OWN_SPEC = 'batch_specs=[("^{}$", jax.sharding.PartitionSpec())]'


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the leaves of a batch are sharded and cast. Raises UserError for settings that no batch fits.

    Attributes:
      mesh: the devices.
      passes: forward and backward passes a step; above 1 leaves are [passes, examples, ...].
      batch_specs: ordered (path regex, PartitionSpec), or a tree of specs like the batch; a spec is that of a leaf in one pass.
        `PartitionSpec()` marks a leaf that counts no examples. It is replicated, the same in every pass, and has no dim of passes.
        Other leaves count examples in their first dim. Where devices have tokens of their own it names every leaf.
      by_device: whether the loss sees one device's examples, so that all leaves must have equally many.
      cast_batch: whether floating leaves are cast to the dtype of the forward pass, or a regex over the paths of those that are.
    """

    mesh: Mesh
    passes: int = 1
    batch_specs: Any = ()
    by_device: bool = False
    cast_batch: bool | str = True

    def __post_init__(self) -> None:
        arguments.grad_accum(self.passes)
        is_list = _is_list(self.batch_specs)
        for pattern, spec in self.batch_specs if is_list else ():
            _check_regex("batch_specs", pattern)
            if not is_spec(spec):
                raise UserError(f"batch_specs: {pattern!r} needs a PartitionSpec, and has {spec!r}")
        for path, spec in () if is_list else tree.flatten(self.batch_specs, is_leaf=is_spec):
            if not is_spec(spec):
                raise UserError(f"batch_specs: {path or 'it'} must be a PartitionSpec, and is {spec!r}")
        if not isinstance(self.cast_batch, bool):
            _check_regex("cast_batch", self.cast_batch)

    def place(self, batch: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        """Returns the batch constrained to its shardings and cast to `dtype`, each leaf [passes, ...] if there are several.

        Raises:
          UserError: a leaf does not fit.
        """
        own = self._own(batch)
        for path, leaf in tree.flatten(batch):
            if 0 in leaf.shape:  # every mean over it would be NaN
                raise UserError(
                    f"batch/{path}: has no examples, its shape is {leaf.shape}; pass at least one for each device"
                )
        self._check_tokens(batch, own)
        self._check(batch, own)
        return self._cast(tree.map_with_path(functools.partial(self._placed, own), batch), dtype)

    def specs(self, batch: PyTree) -> PyTree:
        """Returns the PartitionSpecs of a batch that was placed."""
        own, before = self._own(batch), (None,) * (self.passes > 1)
        return tree.map_with_path(lambda path, leaf: P(*before, *self._spec(own, path, leaf.ndim - len(before))), batch)

    def counting(self, batch: PyTree) -> dict[str, bool]:
        """Returns the leaves of a batch that was placed that count examples, the largest first: whether `batch_specs` says so."""
        own, specs = self._own(batch), dict(tree.flatten(self.specs(batch), is_leaf=is_spec))
        leaves = sorted(tree.flatten(batch), key=lambda pair: -pair[1].size)
        return {path: path in own for path, _ in leaves if example_dims(specs[path])}

    def is_unsure(self, batch: PyTree) -> bool:
        """Returns whether a device could get rows of a leaf which are no examples: `batch_specs` does not name all of several leaves."""
        counting = self.counting(batch)
        is_one_device = mesh_lib.size(self.mesh, mesh_lib.EXAMPLES) == 1
        return not is_one_device and len(counting) > 1 and not all(counting.values())

    def _cast(self, batch: PyTree, dtype: DTypeLike | None) -> PyTree:
        if self.cast_batch is False or dtype is None:
            return batch
        pattern = re.compile("" if self.cast_batch is True else self.cast_batch)
        return tree.map_with_path(
            lambda path, leaf: precision.cast_floating(leaf, dtype) if pattern.search(path) else leaf, batch
        )

    def _own(self, batch: PyTree) -> dict[str, P]:
        """Returns the specs that the user chose, by path."""
        chosen = self.batch_specs
        paths = [path for path, _ in tree.flatten(batch)]
        if _is_list(chosen):
            found = {path: next((spec for pattern, spec in chosen if re.search(pattern, path)), None) for path in paths}
            for pattern, _ in chosen:
                if not any(re.search(pattern, path) for path in paths):
                    raise UserError(
                        f"batch_specs: {pattern!r} matches no leaf of the batch; its leaves are {', '.join(paths[:5])}"
                    )
        else:
            try:
                full = jax.tree.map(
                    lambda spec, part: jax.tree.map(lambda _: spec, part), chosen, batch, is_leaf=is_spec
                )
            except ValueError as error:
                raise UserError(
                    f"batch_specs: is a tree of another structure than the batch, whose leaves are {', '.join(paths[:5])}; "
                    "pass specs like the batch, or pairs (path regex, PartitionSpec)"
                ) from error
            found = dict(zip(paths, jax.tree.leaves(full, is_leaf=is_spec)))
        return {path: mesh_lib.with_parts(self.mesh, spec) for path, spec in found.items() if spec is not None}

    def _spec(self, own: dict[str, P], path: str, dims: int) -> P:
        return own[path] if path in own else P(mesh_lib.EXAMPLES) if dims > 0 else P()

    def _check(self, batch: PyTree, own: dict[str, P]) -> None:
        """Refuses leaves that differ in the number of examples, where each device sees its own."""
        dim = int(self.passes > 1)
        rows = {path: leaf.shape[dim] for path, leaf in tree.flatten(batch) if path not in own and leaf.ndim > dim}
        if not self.by_device or len(set(rows.values())) < 2:
            return
        (most, _), *_ = collections.Counter(rows.values()).most_common()
        odd = next(path for path, count in rows.items() if count != most)
        like = next(path for path, count in rows.items() if count == most)
        raise UserError(
            f"batch/{odd}: has {rows[odd]} rows and batch/{like} has {most}, and with reduce_dtype each device sees its own examples; pass "
            f"{OWN_SPEC.format(odd)} for a leaf that counts none"
        )

    def _check_tokens(self, batch: PyTree, own: dict[str, P]) -> None:
        """Refuses leaves of which nothing says whether they have a dim of tokens, where each device has tokens of its own."""
        if mesh_lib.size(self.mesh, mesh_lib.TOKENS) == 1:
            return
        sizes, axis = mesh_lib.text(self.mesh, mesh_lib.TOKENS), mesh_lib.TOKENS[0]
        form = f'batch_specs=[("tokens|labels", PartitionSpec(("replica", "data"), "{axis}"))] for leaves [examples, tokens, ...]'
        for path, leaf in tree.flatten(batch):
            if path not in own:
                raise UserError(
                    f"batch/{path}: the mesh has {sizes}, and nothing says which dim of it counts tokens; pass {form}, and "
                    'PartitionSpec(("replica", "data")) for those without such a dim'
                )
            is_keys = jax.dtypes.issubdtype(tree.dtype_of(leaf), jax.dtypes.prng_key)
            if is_keys and example_dims(own[path]):
                raise UserError(
                    f"batch/{path}: has a random key of each example, which would draw the same numbers for all parts of it over {sizes}; "
                    "pass one key, with PartitionSpec()"
                )
        if all(specs_lib.axes(spec).isdisjoint(mesh_lib.TOKENS) for spec in own.values()):
            raise UserError(
                f"batch_specs: no leaf has a dim of tokens, so devices along {sizes} would repeat each other's work; pass {form}, or make "
                f"a mesh without {axis}"
            )

    def _placed(self, own: dict[str, P], path: str, leaf: Leaf) -> Leaf:
        before = int(self.passes > 1)
        if path in own and not specs_lib.axes(own[path]):
            leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, P()))
            return jnp.broadcast_to(leaf, (self.passes, *leaf.shape)) if before else leaf
        if before and (leaf.ndim == 0 or leaf.shape[0] != self.passes):
            raise UserError(
                f"batch/{path}: shape {leaf.shape} must begin with grad_accum={self.passes}, then examples"
                f"; pass {OWN_SPEC.format(path)} for a leaf that counts no examples"
            )
        spec = self._spec(own, path, leaf.ndim - before)
        self._check_fits(path, leaf, P(*(None,) * before, *spec), is_own=path in own)
        sharding = NamedSharding(self.mesh, P(*(None,) * before, *spec))
        return jax.lax.with_sharding_constraint(leaf, sharding) if specs_lib.axes(spec) else leaf

    def _check_fits(self, path: str, leaf: Leaf, spec: P, *, is_own: bool) -> None:
        unknown = specs_lib.axes(spec) - set(self.mesh.shape)
        if unknown or len(spec) > leaf.ndim:
            raise UserError(
                f"batch/{path}: batch_specs gives {spec} to shape {leaf.shape} on a mesh of {mesh_lib.sizes(self.mesh)}"
            )
        for dim, entry in enumerate(spec):
            ways = mesh_lib.size(self.mesh, specs_lib.names(entry))
            if leaf.shape[dim] % ways:
                parts = set(mesh_lib.EXPERT) if {*specs_lib.names(entry)} - {*mesh_lib.EXPERT} else set()
                what = " * ".join(sorted({*specs_lib.names(entry)} - parts))
                rest = "" if is_own else f"; pass {OWN_SPEC.format(path)} if it counts none"
                counted = "examples" if dim in example_dims(spec) else "tokens"
                raise UserError(
                    f"batch/{path}: dim {dim} of {leaf.shape} does not divide by {what} = {ways}; use a multiple of {ways} {counted}{rest}"
                )


def _check_regex(name: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UserError(f"{name}: {pattern!r} is not a regex over paths of the batch's leaves: {error}") from error


def example_dims(spec: P) -> list[int]:
    """Returns the dims that count examples."""
    return dims_of(spec, mesh_lib.EXAMPLES)


def dims_of(spec: P, axes: Sequence[str]) -> list[int]:
    """Returns the dims that are sharded over some axes."""
    return [dim for dim, entry in enumerate(spec) if not set(axes).isdisjoint(specs_lib.names(entry))]


def _is_list(batch_specs: PyTree) -> bool:
    """Returns whether these are pairs (path regex, spec)."""
    is_sequence = isinstance(batch_specs, Sequence) and not isinstance(batch_specs, (str, P))
    return is_sequence and all(
        isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str) for pair in batch_specs
    )


def is_spec(node: PyTree) -> bool:
    """Returns whether a node is a PartitionSpec."""
    return isinstance(node, P)
