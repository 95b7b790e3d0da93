"""Shards a batch over devices and passes. This module decides which dim of each leaf counts examples, and which counts tokens."""

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

from zerojax import errors, precision, tree
from zerojax import mesh as mesh_lib
from zerojax import specs as specs_lib
from zerojax.errors import UserError
from zerojax.tree import Leaf, PyTree
from zerojax.zero.sharded_batch import arguments


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
        arguments.batch_specs(self.batch_specs, is_list=_is_list(self.batch_specs))
        if not isinstance(self.cast_batch, bool):
            errors.regex("cast_batch", self.cast_batch, "pass one over paths of the batch's leaves")

    def place(self, batch: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        """Returns the batch constrained to its shardings and cast to `dtype`, each leaf [passes, ...] if there are several.

        Raises:
          UserError: a leaf does not fit.
        """
        own, dim = self._own(batch), int(self.passes > 1)
        for path, leaf in tree.flatten(batch):
            if 0 in leaf.shape:  # every mean over it would be NaN
                why = (
                    "has no examples" if 0 in leaf.shape[: dim + 1] else f"has no elements in dim {leaf.shape.index(0)}"
                )
                out = "pass at least one for each device" if 0 in leaf.shape[: dim + 1] else "omit it, or pass some"
                raise UserError(f"batch/{path}: {why}, its shape is {leaf.shape}; {out}")
        if mesh_lib.size(self.mesh, mesh_lib.TOKENS) > 1:
            arguments.tokens(self.mesh, batch, own)
        rows = {path: leaf.shape[dim] for path, leaf in tree.flatten(batch) if path not in own and leaf.ndim > dim}
        if self.by_device and len(set(rows.values())) > 1:
            raise arguments.unequal(rows)
        return self._cast(tree.map_with_path(functools.partial(self._placed, own), batch), dtype)

    def specs(self, batch: PyTree) -> PyTree:
        """Returns the PartitionSpecs of a batch that was placed."""
        own, before = self._own(batch), (None,) * (self.passes > 1)
        return tree.map_with_path(lambda path, leaf: P(*before, *self._spec(own, path, leaf.ndim - len(before))), batch)

    @property
    def of_one_pass(self) -> "Layout":
        """Returns how the batch of one pass is sharded."""
        return dataclasses.replace(self, passes=1)

    def micro_batch(self, placed: PyTree, number: jax.Array | int) -> PyTree:
        """Returns the batch of one pass, of a batch that was placed."""
        micro = placed if self.passes == 1 else jax.tree.map(lambda leaf: leaf[number], placed)
        return jax.lax.with_sharding_constraint(micro, self.of_one_pass.shardings(micro))

    def micro_batches(self, dtype: DTypeLike | None, batch: PyTree) -> list[PyTree]:
        """Returns the batches of all passes; see `place`."""
        placed = self.place(batch, dtype)
        return [self.micro_batch(placed, number) for number in range(self.passes)]

    def shardings(self, batch: PyTree) -> PyTree:
        """Returns the shardings of a batch that was placed."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(batch), is_leaf=is_spec)

    def abstract(self, batch: PyTree) -> PyTree:
        """Returns a batch that was placed, or numpy arrays like it, as abstract arrays with shardings."""
        return jax.tree.map(
            lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, tree.dtype_of(leaf), sharding=own),
            batch,
            self.shardings(batch),
        )

    def counting(self, batch: PyTree) -> dict[str, bool]:
        """Returns the leaves of a batch that was placed that count examples, the largest first: whether `batch_specs` says so."""
        own, specs = self._own(batch), dict(tree.flatten(self.specs(batch), is_leaf=is_spec))
        leaves = sorted(tree.flatten(batch), key=lambda pair: -pair[1].size)
        return {path: path in own for path, _ in leaves if specs_lib.dims_of(specs[path], mesh_lib.EXAMPLES)}

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
                    raise arguments.unmatched_spec(pattern, paths)
        else:
            try:
                full = jax.tree.broadcast(chosen, batch, is_leaf=is_spec)
            except ValueError as error:
                raise arguments.other_tree(paths) from error
            found = dict(zip(paths, jax.tree.leaves(full, is_leaf=is_spec)))
        own = {path: spec for path, spec in found.items() if spec is not None}
        for path, leaf in tree.flatten(batch):
            if path in own:
                self._check_spec(path, leaf, own[path])
        return {path: mesh_lib.with_parts(self.mesh, spec) for path, spec in own.items()}

    def _check_spec(self, path: str, leaf: Leaf, spec: P) -> None:
        dims = leaf.ndim - int(self.passes > 1 and bool(specs_lib.axes(spec)))
        unknown = sorted(specs_lib.axes(spec) - set(self.mesh.shape))
        if unknown or len(spec) > dims:
            why = (
                f"and the mesh has no axis {unknown[0]!r} but {', '.join(mesh_lib.sizes(self.mesh))}"
                if unknown
                else f"with {dims} dims{' in each pass' if self.passes > 1 else ''} for {len(spec)} entries"
            )
            raise UserError(f"batch/{path}: batch_specs gives {spec} to shape {leaf.shape}, {why}; change the spec")

    def _spec(self, own: dict[str, P], path: str, dims: int) -> P:
        return own[path] if path in own else P(mesh_lib.EXAMPLES) if dims > 0 else P()

    def _placed(self, own: dict[str, P], path: str, leaf: Leaf) -> Leaf:
        before = int(self.passes > 1)
        if path in own and not specs_lib.axes(own[path]):
            leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, P()))
            return jnp.broadcast_to(leaf, (self.passes, *leaf.shape)) if before else leaf
        if before and (leaf.ndim == 0 or leaf.shape[0] != self.passes):
            per_pass, rest = divmod(leaf.shape[0], self.passes) if leaf.ndim else (0, 1)
            form = "" if rest else f"; reshape it to {(self.passes, per_pass, *leaf.shape[1:])}"
            raise UserError(
                f"batch/{path}: shape {leaf.shape} must begin with grad_accum={self.passes}, then examples{form}"
                f"; pass {arguments.OWN_SPEC.format(path)} for a leaf that counts no examples"
            )
        spec = self._spec(own, path, leaf.ndim - before)
        self._check_fits(path, leaf, P(*(None,) * before, *spec), is_own=path in own)
        sharding = NamedSharding(self.mesh, P(*(None,) * before, *spec))
        return jax.lax.with_sharding_constraint(leaf, sharding) if specs_lib.axes(spec) else leaf

    def _check_fits(self, path: str, leaf: Leaf, spec: P, *, is_own: bool) -> None:
        for dim, entry in enumerate(spec):
            if leaf.shape[dim] % mesh_lib.size(self.mesh, specs_lib.names(entry)):
                raise arguments.indivisible(self.mesh, path, leaf, spec, dim, is_own=is_own)


def _is_list(batch_specs: PyTree) -> bool:
    """Returns whether these are pairs (path regex, spec)."""
    is_sequence = isinstance(batch_specs, Sequence) and not isinstance(batch_specs, (str, P))
    return is_sequence and all(
        isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str) for pair in batch_specs
    )


def is_spec(node: PyTree) -> bool:
    """Returns whether a node is a PartitionSpec."""
    return isinstance(node, P)
