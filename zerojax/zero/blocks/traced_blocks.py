"""Finds blocks in the trace of a loss. This module lets weights be gathered block by block in models that no interceptor sees.

A loss is traced with gathered weights, and the trace is run with stored ones. A scan over stacked weights runs over their shards, and its
body gathers the layer that it reads. Each call of another block (`trace_segments`) becomes a function of its weights and of arrays, as an
intercepted one does. All other weights are gathered once, before they are read first. So scans of NNX and JAX, loops over Equinox's layers,
Haiku's modules, and modules in wrappers need no interceptor.
"""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zerojax import traces, tree
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings, lifted_blocks, trace_segments
from zerojax.zero.blocks import stored as stored_lib
from zerojax.zero.blocks.trace_segments import OUTSIDE, STACK, Operation, Operations, TraceValue


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A weight that is not gathered yet, and the operations that a trace applies to it once it is."""

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
        elif eqn.primitive.name in trace_segments.SAME_ROWS and own[0]:
            path_of[eqn.outvars[0]] = own[0]
    return found


def by_trace(loss_fn: Callable[[PyTree], PyTree], params: PyTree, stored: stored_lib.Stored) -> PyTree | None:
    """Returns `loss_fn(gathered params)`, whose blocks gather their own weights; None if the trace has none.

    Args:
      loss_fn: the loss as a function of gathered weights; it changes nothing but what it returns.
      params: stored weights.
      stored: how they are gathered, and which are blocks; without a regex these are the stacks that scans run over.
    """
    named = tree.flatten(params, stored.is_weight)
    regex = stored_lib.pattern(stored.how)
    block_of = block_settings.blocks_of([path for path, _ in named], regex) if stored.how.pattern else {}
    if stored.how.pattern and not block_of:
        return None
    structure: Any = jax.tree.structure(params, is_leaf=stored.is_weight)
    abstract = [jax.eval_shape(lambda leaf, path=path: stored.gather_leaf(path, leaf), leaf) for path, leaf in named]
    program, shape = jax.make_jaxpr(lambda *used: loss_fn(structure.unflatten(used)), return_shape=True)(*abstract)
    stacks = _stacks(program, named, abstract, block_of)
    if not stacks and not stored.how.pattern:
        return None
    weights = [
        TraceValue(
            own,
            STACK if path in stacks else block_of.get(path, OUTSIDE),
            path,
            has_shards=jax.eval_shape(lambda path=path, leaf=leaf: (stored.shard_leaf(path, leaf) or [None])[0])
            is not None,
        )
        for (path, leaf), own in zip(named, abstract)
    ]
    whole = dict[str, str]()
    found = trace_segments.read(program, weights, whole)
    if not (stacks or whole or trace_segments.have_blocks(found)):
        return None
    if stored.run is not None:
        stored.run.restart()
    run = _TraceRun(stored, {value: _Stored(path, leaf) for value, (path, leaf) in zip(weights, named)})
    results = run.all(found)
    if stored.how.heads and not any(stored_lib.is_head(stored.how, path) for path in itertools.chain(*run.called)):
        raise block_settings.unmatched(stored.how, is_head=True, paths=[path for path, _ in named])
    run.warn_of(whole)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _stacks(
    program: traces.Program, named: Sequence[tuple[str, Any]], abstract: Sequence[Any], block_of: Mapping[str, str]
) -> set[str]:
    """Returns the paths of stacks of layers that scans run over; refuses those of blocks that are sharded by their layers."""
    found = scanned(program, [path for path, _ in named])
    if block_of:
        # An unrolled layer may scan over some of its weights, such as experts.
        rows, every = ([block_of[path] for path in paths if path in block_of] for paths in (found, block_of))
        found = {path for path in found if (own := block_of.get(path)) and 2 * rows.count(own) >= every.count(own)}
    by_layers = {path: own.shape for (path, leaf), own in zip(named, abstract) if _first_dim(leaf) != own.shape[:1]}
    apart = next((path for path in by_layers if block_of and path in found), None)
    if apart is not None:
        raise lifted_blocks.sharded_by_layers(apart, by_layers[apart])
    return found - by_layers.keys()


def _first_dim(weight: PyTree) -> tuple[int, ...]:
    return jax.tree.leaves(weight)[0].shape[:1]


class _TraceRun:
    """Runs a trace, or the body of a scan or of a checkpoint in it; gathers each weight once, where it is read first."""

    def __init__(self, stored: stored_lib.Stored, weights: dict[TraceValue, _Stored]):
        self._stored, self._weights = stored, weights
        self._known: dict[TraceValue, Any] = {}
        self.called: list[Sequence[str]] = []  # the blocks of each segment

    def all(self, found: Operations) -> list[Any]:
        """Returns the results of a trace."""
        number = 0
        for segment in trace_segments.of_blocks(found):
            self._run(found.operations[number : segment.start])
            self._call(found, segment)
            number = segment.stop
        self._run(found.operations[number:])
        return [self._used(value) for value in found.results]

    def warn_of(self, whole: Mapping[str, str]) -> None:
        """Warns of weights that are not gathered block by block."""
        if whole and self._stored.moves:
            warnings.warn(
                f"blocks: {next(iter(whole.values()))} reads weights of several blocks in one operation; {', '.join([*whole][:3])} are "
                "gathered before it and stay gathered until the backward pass has used them",
                stacklevel=2,
            )
        many = next((blocks for blocks in self.called if len(blocks) > 2), None)
        if many:
            warnings.warn(
                f"blocks: {', '.join(many[:3])}{' and others' * (len(many) > 3)} read their weights in turns, so the weights of all of "
                "them are gathered at a time",
                stacklevel=2,
            )

    def _inside(self, weights: dict[TraceValue, _Stored], known: dict[TraceValue, Any]) -> "_TraceRun":
        inside = _TraceRun(self._stored, weights)
        inside._known, inside.called = known, self.called
        return inside

    def _used(self, value: Any) -> Any:
        """Returns the array of a value, which is gathered or made if it is not there."""
        if not isinstance(value, TraceValue):
            return value.val
        if value not in self._known:
            if value in self._weights:
                own = self._weights[value]
                used = self._stored.gather_leaf(own.path, own.weight)
                for eqn in own.casts:
                    (used,) = traces.bind(eqn, [used])
                self._known[value] = used
            elif value.maker is not None:
                self._run([value.maker])
            else:
                assert value.constant is not None
                return value.constant
        return self._known[value]

    def _run(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            eqn, results = operation.eqn, None
            with contextlib.ExitStack() as scopes:
                for own in (*operation.around, eqn):
                    scopes.enter_context(traces.scopes(own))
                if operation.terms is not None:
                    results = self._sum(operation, operation.terms)
                elif operation.inside is not None:
                    results = self._checkpoint(operation)
                elif eqn.primitive.name == "scan" and STACK in operation.blocks:
                    results = self._scan(operation)
                else:
                    results = traces.bind(eqn, [self._used(value) for value in operation.reads])
            self._known.update(zip(operation.writes, results))

    def _sum(self, operation: Operation, terms: TraceValue) -> Sequence[Any]:
        """Returns the sum of a function of a weight's elements, whose shards are not gathered."""
        weight = terms.of_weight or terms
        own = self._weights[weight]
        found = self._stored.shard_leaf(own.path, own.weight)
        assert found is not None
        known, axes = {weight: found[0]}, found[1]

        def of(value: Any) -> Any:
            if isinstance(value, TraceValue) and value in known:
                return known[value]
            inside = value.from_elements if isinstance(value, TraceValue) else None
            if inside is None:
                return self._used(value)
            reads, is_scalar = [*map(of, inside.reads)], inside.eqn.primitive.name == "broadcast_in_dim"
            if not value.is_uniform:
                # What is uniform is one element, and some operations take arrays of one shape alone.
                shapes = [found[0].shape if own.aval.shape else () for own in inside.reads]
                reads = [*map(jax.numpy.broadcast_to, reads, shapes)]
            known.update(zip(inside.writes, reads if is_scalar else _inlined(inside.eqn, reads)))
            return known[value]

        (total,) = traces.bind(operation.eqn, [of(terms)])
        return [jax.lax.psum(total, axes) if axes else total]

    def _call(self, found: Operations, segment: trace_segments.BlockSegment) -> None:
        """Runs a segment as a block."""
        operations, made = found.operations[segment.start : segment.stop], trace_segments.read_later(found, segment)
        read = [value for own in operations for value in own.reads]
        weights = [value for value in trace_segments.leaves(read) if value.block not in (OUTSIDE, STACK)]
        inside = {value for own in operations for value in own.writes}
        others = [value for value in trace_segments.leaves(read) if value not in weights]
        given = [
            value for value in trace_segments.sources(read) if value not in inside and not _is_held(value)
        ] + others
        kinds = _Words(), _Words()

        def body(used: Mapping[str, Any], *arrays: Any) -> list[Any]:
            known = dict(zip(given, kinds[0].give(arrays)))
            known |= {value: used[value.path] for value in weights}
            run = self._inside({}, known)
            run._run(operations)
            return kinds[1].take([run._used(value) for value in made])

        self.called.append(segment.blocks)
        stored = {value.path: self._weights[value].weight for value in weights}
        run = self._stored.run or lifted_blocks.by_gathers(self._stored.gather_leaf)
        arrays = kinds[0].take([self._used(value) for value in given])
        is_head = all(stored_lib.is_head(self._stored.how, path) for path in segment.blocks)
        results = run(body, stored, arrays, None if is_head else self._stored.policy, None)
        self._known.update(zip(made, kinds[1].give(results)))

    def _scan(self, operation: Operation) -> Sequence[Any]:
        eqn, body = operation.eqn, operation.eqn.params["jaxpr"]
        constants, carried = traces.scan_counts(eqn)
        given = [self._used(value) for value in operation.reads[: constants + carried]]
        own, carry = given[:constants], given[constants:]
        stacks = [self._stack(value) for value in operation.reads[constants + carried :]]
        groups = scanned(body, [*[None] * len(given), *(stack.path if stack else None for stack in stacks)])
        rows = [
            self._used(value) if stack is None else stack.weight
            for value, stack in zip(operation.reads[constants + carried :], stacks)
        ]

        def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            arrays = [*own, *carry, *rows]
            inputs = [TraceValue(var.aval) for var in traces.opened(body)[0].invars]
            weights, known = dict[TraceValue, _Stored](), dict[TraceValue, Any]()
            for value, array, stack in zip(inputs, arrays, [*[None] * len(given), *stacks]):
                if stack is None:
                    known[value] = array
                else:
                    # A layer may be a group of layers, over which a scan inside runs.
                    is_group = stack.path in groups and _first_dim(array) == value.aval.shape[:1]
                    value.block, value.path = STACK if is_group else OUTSIDE, stack.path
                    weights[value] = dataclasses.replace(stack, weight=array)
            results = self._inside(weights, known).all(trace_segments.read(body, inputs, {}))
            return results[:carried], results[carried:]

        # A loop is no place for CSE, so that no barrier is needed.
        policy = self._stored.policy
        run = step if policy is None else jax.checkpoint(step, policy=policy, prevent_cse=False)
        how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, made = jax.lax.scan(run, carry, rows, **how)
        return [*carry, *made]

    def _stack(self, value: Any) -> _Stored | None:
        """Returns the stack that rows of a scan are, with the operations on them; None for other rows."""
        if not isinstance(value, TraceValue) or value.block != STACK:
            return None
        if value.maker is None:
            return self._weights[value]
        found = self._stack(value.maker.reads[0])
        return found and dataclasses.replace(found, casts=(*found.casts, value.maker.eqn))

    def _checkpoint(self, operation: Operation) -> Sequence[Any]:
        """Runs a checkpoint of the user's around several blocks, by the user's own policy."""
        eqn, inside = operation.eqn, operation.inside
        assert inside is not None
        atoms = [*trace_segments.atoms(operation)]
        leaves = [value for value in trace_segments.leaves(atoms) if value in self._weights]
        made = {value for own in inside.operations for value in own.writes}
        given = [value for value in trace_segments.sources(atoms) if value not in made and not _is_held(value)]

        def called(weights: list[Any], arrays: list[Any]) -> list[Any]:
            own = {value: dataclasses.replace(self._weights[value], weight=new) for value, new in zip(leaves, weights)}
            return self._inside(own, dict(zip(given, arrays))).all(inside)

        how = {"policy": eqn.params["policy"], "prevent_cse": eqn.params["prevent_cse"]}
        weights = [self._weights[value].weight for value in leaves]
        return jax.checkpoint(called, **how)(weights, [self._used(value) for value in given])


def _inlined(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an elementwise operation, or of a call of some, for arrays of other shapes than those of the trace."""
    inner = traces.called(eqn)
    return traces.bind(eqn, inputs) if inner is None else traces.run(inner, inputs, _inlined)


def _is_held(value: TraceValue) -> bool:
    """Returns whether a trace holds the array of a value, which is no argument of a block then."""
    return value.is_constant and value.constant is not None


class _Words:
    """Random keys among arrays, which blocks take and return as their words."""

    def take(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values with words in place of keys."""
        self._impls = [*map(tree.key_impl, values)]
        return [jax.numpy.asarray(tree.key_words(value)) for value in values]

    def give(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values that were taken."""
        return [*map(tree.keys_again, values, self._impls)]
