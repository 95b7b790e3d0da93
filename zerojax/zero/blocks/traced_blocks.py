"""Finds stacks of layers in the trace of a loss. This module lets each step of a scan gather its own layer, whoever wrote the scan.

A loss is traced with gathered weights, and the trace is run with stored ones. A scan over stacked weights runs over their shards, and its
body gathers the layer that it reads. All other weights are gathered once, before they are read first. So NNX's scans, `jax.lax.scan` and
modules in wrappers need no interceptor.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zerojax import traces, tree
from zerojax.tree import PyTree
from zerojax.zero.blocks import remat

Gather = Callable[[str, Any], Any]
_SAME_ROWS = frozenset({traces.CAST, "copy", "copy_p", "stop_gradient"})  # a layer of the result is that of the operand


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A weight that is not gathered yet, and the operations that the trace applies to it."""

    path: str
    weight: Any
    casts: tuple[Any, ...] = ()


def scanned(program: traces.Program, paths: Sequence[str | None]) -> set[str]:
    """Returns which of a trace's first arguments, of these paths, are rows of a scan."""
    jaxpr = traces.opened(program)[0]
    path_of: dict[Any, str] = {var: path for var, path in zip(jaxpr.invars, paths) if path is not None}
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        own = [path_of.get(atom) if traces.is_var(atom) else None for atom in eqn.invars]
        if not any(own):
            continue
        if eqn.primitive.name == "scan":
            found |= {path for path in own[sum(traces.scan_counts(eqn)) :] if path}
        elif (inner := traces.called(eqn)) is not None:
            found |= scanned(inner, own)
        elif eqn.primitive.name in _SAME_ROWS and own[0]:
            path_of[eqn.outvars[0]] = own[0]
    return found


def layer_by_layer(
    loss_fn: Callable[[PyTree], PyTree],
    params: PyTree,
    gather_leaf: Gather,
    policy: remat.Policy,
    *,
    is_weight: tree.IsLeaf,
    pattern: str = "",
) -> PyTree | None:
    """Returns `loss_fn(gathered params)` whose scans gather a layer a step; None if there are none.

    Args:
      loss_fn: the loss as a function of gathered weights; it changes nothing but what it returns.
      params: stored weights.
      gather_leaf: f(path, stored weight or a layer of it) -> gathered.
      policy: of the `jax.checkpoint` of a step; None for no rematerialisation.
      is_weight: returns whether a node of the params is one stored weight.
      pattern: a regex over modules around the stacks; empty: all stacks.
    """
    named = tree.flatten(params, is_weight)
    structure: Any = jax.tree.structure(params, is_leaf=is_weight)
    abstract = [jax.eval_shape(lambda leaf, path=path: gather_leaf(path, leaf), leaf) for path, leaf in named]
    program, shape = jax.make_jaxpr(lambda *used: loss_fn(structure.unflatten(used)), return_shape=True)(*abstract)
    regex = re.compile(pattern)
    found = scanned(program, [path for path, _ in named])
    found = {path for path in found if not pattern or tree.block_of(path, regex)}
    whole = {path for (path, leaf), own in zip(named, abstract) if _first_dim(leaf) == own.shape[:1]}
    stacks = found & whole  # a shard has all layers
    if not stacks:
        return None
    results = _TraceRun(gather_leaf, policy, stacks).run(program, [_Stored(path, leaf) for path, leaf in named])
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _first_dim(weight: PyTree) -> tuple[int, ...]:
    return jax.tree.leaves(weight)[0].shape[:1]


class _TraceRun:
    """Runs a trace, or the body of a scan or of a checkpoint in it; gathers each weight once, where it is read first."""

    def __init__(self, gather_leaf: Gather, policy: remat.Policy, stacks: set[str]):
        self._gather_leaf, self._policy, self._stacks = gather_leaf, policy, stacks
        self._gathered: dict[str, Any] = {}

    def run(self, program: traces.Program, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of a program, of which some inputs are weights that are not gathered yet."""
        return [self._used(value) for value in traces.run(program, inputs, self._apply)]

    def _used(self, value: Any) -> Any:
        if not isinstance(value, _Stored):
            return value
        if value.path not in self._gathered:
            self._gathered[value.path] = self._gather_leaf(value.path, value.weight)
        used = self._gathered[value.path]
        for eqn in value.casts:
            (used,) = traces.bind(eqn, [used])
        return used

    def _apply(self, eqn: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        weights = {value.path for value in inputs if isinstance(value, _Stored)}
        name = eqn.primitive.name
        with traces.scopes(eqn):
            if not weights:
                return traces.bind(eqn, inputs)
            if name in _SAME_ROWS:
                return [dataclasses.replace(inputs[0], casts=(*inputs[0].casts, eqn))]
            if name == "scan" and weights & self._stacks:
                return self._scan(eqn, inputs)
            inner = traces.called(eqn)
            if inner is not None and weights & self._stacks:
                if name in traces.INLINED:
                    return traces.run(inner, inputs, self._apply)
                if name in traces.CHECKPOINTS:
                    return self._checkpoint(eqn, inner, inputs)
            return traces.bind(eqn, [self._used(value) for value in inputs])

    def _scan(self, eqn: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        constants, carried = traces.scan_counts(eqn)
        given = [self._used(value) for value in inputs[: constants + carried]]
        rows = [value if self._is_stack(value) else self._used(value) for value in inputs[constants + carried :]]
        own, carry = given[:constants], given[constants:]

        def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            inside = _TraceRun(self._gather_leaf, self._policy, set())
            results = inside.run(eqn.params["jaxpr"], [*own, *carry, *map(_opened, rows, kinds)])
            return results[:carried], results[carried:]

        kinds = [value if self._is_stack(value) else None for value in rows]
        arrays = [value.weight if self._is_stack(value) else value for value in rows]
        # A loop is no place for CSE, so that no barrier is needed.
        body = step if self._policy is None else jax.checkpoint(step, policy=self._policy, prevent_cse=False)
        how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, made = jax.lax.scan(body, carry, arrays, **how)
        return [*carry, *made]

    def _is_stack(self, value: Any) -> bool:
        return isinstance(value, _Stored) and value.path in self._stacks

    def _checkpoint(self, eqn: jex.JaxprEqn, inner: traces.Program, inputs: list[Any]) -> Sequence[Any]:
        """Runs a checkpoint of the user's around stacks, by the user's own policy."""
        weights = [value.weight if isinstance(value, _Stored) else value for value in inputs]

        def called(values: list[Any]) -> list[Any]:
            inside = _TraceRun(self._gather_leaf, self._policy, self._stacks)
            given = [
                dataclasses.replace(kind, weight=value) if isinstance(kind, _Stored) else value
                for kind, value in zip(inputs, values)
            ]
            return inside.run(inner, given)

        how = {"policy": eqn.params["policy"], "prevent_cse": eqn.params["prevent_cse"]}
        return jax.checkpoint(called, **how)(weights)


def _opened(row: Any, kind: _Stored | None) -> Any:
    return row if kind is None else dataclasses.replace(kind, weight=row)
