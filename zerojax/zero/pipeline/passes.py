"""Traces one pass of a micro-batch for the devices of a group. This module says where each value of the trace comes from and goes to."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import traces, tree, xla_flags
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings
from zerojax.zero.pipeline import segments
from zerojax.zero.sharded_batch import inputs
from zerojax.zero.step_programs import blocks, one_pass, programs
from zerojax.zero.weights import gather
from zerojax.zero.weights import partition as partition_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """One pass, traced for the devices of a group."""

    call: Any  # the equation of the `jax.shard_map` that it is
    structure: Any  # the tree of its results ((loss, aux), grads)
    values: Mapping[int, Any]  # the abstract inputs of `inner`, by number
    # where each comes from: "0/" params, "1/" the batch, "2/" the state, "3" the number of the pass; by number
    paths: Mapping[int, str]
    constants: Mapping[int, Any]  # the inputs of `inner` that are arrays and random keys of the trace, by number

    @property
    def inner(self) -> Any:
        """Returns the trace on one device."""
        return self.call.params["jaxpr"]

    @functools.cached_property
    def params(self) -> dict[str, int]:
        """Returns the number of each param, by path from the state."""
        return {f"params/{path[2:]}": number for number, path in self.paths.items() if path.startswith("0/")}

    def results(self, cut: segments.Segments) -> PyTree:
        """Returns the tree of its results, with `Result`s as leaves."""
        found = [Result(cut.number_of[atom] if traces.is_var(atom) else None, atom) for atom in cut.results]
        return jax.tree.unflatten(self.structure, found)

    def grads(self, cut: segments.Segments) -> dict[str, int]:
        """Returns the number of each gradient that is computed, by the path of its weight."""
        _, grads = self.results(cut)
        return {f"params/{path}": own.number for path, own in tree.flatten(grads) if own.number is not None}


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a pass: the number of its value, or None for a literal."""

    number: int | None
    atom: Any


def is_result(node: Any) -> bool:
    """Returns whether a node is a `Result`."""
    return isinstance(node, Result)


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass on the devices of a group, of which it runs some stages.

    Attributes:
      loss_fn: of `outputs.with_aux`.
      partition: how the group would hold the whole state.
      how: where weights are gathered.
      layout: of the batch of one pass.
      reduce_dtype, compute_dtype: as of `one_pass.one_pass`.
      passes: of a step.
      in_16_bits: whether gradients of several passes add up in bf16.
    """

    loss_fn: Callable[..., Any]
    partition: partition_lib.Partition
    how: block_settings.Blocks
    layout: inputs.Layout
    reduce_dtype: Any
    compute_dtype: Any = None
    passes: int = 1
    in_16_bits: bool = False

    @functools.cached_property
    def reduction(self) -> gather.Reduction:
        """Returns how gradients are summed over the devices of a group: once a step, but for those that are sharded."""
        return gather.Reduction(self.reduce_dtype, at_once=self.passes == 1)

    def summed(self, path: str) -> jax.ShapeDtypeStruct:
        """Returns the abstract sum of a weight's gradients over passes."""
        weight = self.partition.placements[path]
        shape, sharding = weight.shape or (), weight.update
        if self.reduction.waits(weight):
            sharding = one_pass.unsummed(weight)
            shape = (mesh_lib.size(self.partition.mesh, sharding.spec[0]), *shape)
        is_halved = self.in_16_bits and not weight.overwritten
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16 if is_halved else np.float32, sharding=sharding)

    def traced(self, micro: PyTree) -> Trace:
        """Returns the trace of a micro-batch, abstract or not."""
        xla_flags.check_settings(xla_flags.NO_LEAKS)
        mesh, state = self.partition.mesh, self.partition.abstract_state
        count = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))
        args = (state.params, self.layout.abstract(micro), state, count)
        run = one_pass.one_pass(
            self.loss_fn,
            self.partition,
            self.how,
            passes=self.passes,
            reduce_dtype=self.reduce_dtype,
            compute_dtype=self.compute_dtype,
            layout=self.layout,
            runner=blocks.NestedBlocks,
            at_once=self.reduction.at_once,
        )
        trace = programs.MappedTrace(run, *args)
        names = [path for path, _ in tree.flatten(args)]
        taken = dict(enumerate(trace.number_of[var] for var in trace.call.invars))
        return Trace(
            trace.call,
            trace.structure,
            {number: trace.values[own] for number, own in taken.items()},
            {number: names[own] for number, own in taken.items() if own < len(names)},
            {number: trace.constants[own] for number, own in taken.items() if own in trace.constants},
        )
