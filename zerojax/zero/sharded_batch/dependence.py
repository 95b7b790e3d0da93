"""Tells what the values that a loss function takes and returns depend on. This module reads the loss's traced program.

The loss is traced for the examples of a batch and for twice as many: a dim that is twice as long counts examples, whatever its length.

A value that a device computes from its own examples differs between devices. How it is made equal depends on what it is:

    same         it reads no example and draws no random number; `TracedLoss.evaluate` gives its value for the whole batch
    rows         has one dim of examples
    count        a sum over examples
    grown        an old value of the state plus a count
    statistic    another function of counts or of drawn numbers, such as a mean
    other        anything else: it mixes examples by more than a sum, such as their maximum

Keys are `same`, and what is drawn from them is not. Rows stay rows where a statistic of the device's examples is part of them, as in batch
norm. Calls (of `jax.jit`, `jax.checkpoint`, functions with their own derivatives) are looked into.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import specs, traces, tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.sharded_batch import arguments, constraints, inputs

SAME, ROWS, COUNT, GROWN, STATISTIC, OTHER = "same", "rows", "count", "grown", "statistic", "other"

_SAME_VALUE = traces.MOVES | traces.MARKS
_CAST_OR_MOVED = _SAME_VALUE | {traces.CAST}
_SUMS = frozenset({"reduce_sum", "dot_general"})
_SUMS_OVER_DEVICES = frozenset("psum psum_invariant pmax pmin all_gather all_gather_invariant".split())
_IN_ORDER = frozenset("cumsum cumprod cummax cummin cumlogsumexp sort".split())  # along a dim
_DRAWS, _WRAP = "random_bits", "random_wrap"
_PARTS_OF_KEYS = _SAME_VALUE | {"dynamic_slice", "gather"}


def of_loss(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, state: State, layout: inputs.Layout
) -> "TracedLoss":
    """Traces a loss function on one pass over the whole batch.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> (loss, aux)`.
      params: abstract, as the loss sees them.
      batch, state: arrays; the batch was placed by `layout`.
    """

    def aux_of(params: PyTree, batch: PyTree, state: State) -> PyTree:
        return loss_fn(params, batch, state)[1]

    params, state = (jax.tree.map(tree.bare, part) for part in (params, state))
    by_count = [of_examples(layout, batch, count * examples(layout, batch)) for count in (1, 2)]
    axes = layout.mesh.shape if layout.by_device else {}
    with constraints.dropped(axes):
        found = TracedLoss.of(aux_of, params, by_count[0], state, by_count[1], axes)
    return dataclasses.replace(found, repeated=repeated(layout, batch))


def of_examples(
    layout: inputs.Layout, batch: PyTree, count: int, apart: Mapping[str, int] | None = None, *, tokens_of: int = 1
) -> PyTree:
    """Returns the abstract form of one pass over a batch that was placed, with `count` examples; those in `apart` have other rows.

    Of the dims that count tokens it has one of `tokens_of` parts.
    """
    whole, before = examples(layout, batch), int(layout.passes > 1)

    def of_count(leaf: Leaf, spec: P, number: int) -> jax.ShapeDtypeStruct:
        rows, tokens = specs.dims_of(spec, mesh_lib.EXAMPLES), specs.dims_of(spec, mesh_lib.TOKENS)
        shape = [length * number // whole if dim in rows else length for dim, length in enumerate(leaf.shape)]
        shape = [length // tokens_of if dim in tokens else length for dim, length in enumerate(shape)]
        return jax.ShapeDtypeStruct(tuple(shape[before:]), tree.dtype_of(leaf))

    found = dict(tree.flatten(layout.specs(batch), is_leaf=inputs.is_spec))
    return tree.map_with_path(lambda path, leaf: of_count(leaf, found[path], (apart or {}).get(path, count)), batch)


def examples(layout: inputs.Layout, batch: PyTree) -> int:
    """Returns the number of examples of one pass over a batch that was placed; 1 if no leaf counts them."""
    for leaf, spec in zip(jax.tree.leaves(batch), jax.tree.leaves(layout.specs(batch), is_leaf=inputs.is_spec)):
        for dim in specs.dims_of(spec, mesh_lib.EXAMPLES):
            return leaf.shape[dim]
    return 1


def repeated(layout: inputs.Layout, batch: PyTree) -> frozenset[str]:
    """Returns the leaves of a batch that was placed of which devices with tokens of their own have the same rows."""
    if mesh_lib.size(layout.mesh, mesh_lib.TOKENS) == 1:
        return frozenset()
    return frozenset(path for path, has_tokens in has_tokens(layout, batch).items() if not has_tokens)


def has_tokens(layout: inputs.Layout, batch: PyTree) -> dict[str, bool]:
    """Returns the leaves of a batch that was placed: whether devices that share examples have tokens of their own of it."""
    found = tree.flatten(layout.specs(batch), is_leaf=inputs.is_spec)
    return {path: not specs.axes(spec).isdisjoint(mesh_lib.TOKENS) for path, spec in found}


def refuse_unread(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, state: State, layout: inputs.Layout, trained: PyTree
) -> None:
    """Warns of trainable weights that the loss does not read. Raises a UserError if it reads none of them.

    Args:
      loss_fn, params, batch, state, layout: as for `of_loss`.
      trained: the trainable part of the params.
    """
    state, axes = jax.tree.map(tree.bare, state), layout.mesh.shape if layout.by_device else {}
    with constraints.dropped(axes):
        found = _tried(loss_fn, axes, params, of_examples(layout, batch, examples(layout, batch)), state)
    if found is not None:  # else the loss raises its own error where it runs
        _refuse_unread(found, params, trained)


def _refuse_unread(found: "TracedLoss", params: PyTree, trained: PyTree) -> None:
    is_read = partial_eval.dce_jaxpr(found.closed.jaxpr, [path.split("/")[0] == "0" for path in found.shapes])[1]
    read = {path for (path, _), is_read in zip(tree.flatten(params), is_read) if is_read}
    paths = [path for path, _ in tree.flatten(trained)]
    unread = [f"params/{path}" for path in paths if path not in read]
    names = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
    if unread and len(unread) == len(paths):
        raise UserError(
            f"loss_fn: reads no trainable weight ({names}), so steps would train nothing; call the model with the params that loss_fn "
            "takes, and inside zerojax.with_lora if the weights are adapters"
        )
    if unread:
        warnings.warn(
            f"loss_fn: does not read {names}, whose gradients are 0; leave them out of the params, or freeze them with `trainable`",
            stacklevel=4,
        )


def refuse_unsure(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, state: State, layout: inputs.Layout, trained: PyTree
) -> None:
    """Raises a UserError for leaves of a batch whose rows may be examples or not, such as weights of as many classes as examples.

    The loss is traced with more rows of some leaves than of others. If it takes that, nothing says that both count examples, unless all
    that it does with these rows is to add up terms of each. Leaves that `batch_specs` names are what it says. Of more than five
    leaves, groups of three that belong together are not told from the others.

    Args:
      loss_fn, params, batch, state, layout: as for `of_loss`, where each device sees its own examples.
      trained: as for `refuse_unread`, which it includes.
    """
    counting = layout.counting(batch)
    whole, ways = examples(layout, batch), mesh_lib.size(layout.mesh, mesh_lib.EXAMPLES)
    params, state = (jax.tree.map(tree.bare, part) for part in (params, state))

    def traced(count: int, names: Sequence[str] = (), rows: int = 0) -> Any:
        """Returns the loss's trace, with another number of rows of these leaves than of examples; None if it does not take that."""
        batch_of_count = of_examples(layout, batch, count, dict.fromkeys(names, rows))
        with constraints.dropped(layout.mesh.shape):
            return _tried(loss_fn, layout.mesh.shape, params, batch_of_count, state)

    for count in (whole + whole // ways, whole // ways):  # the first is the length of no dim but those of examples
        if (found := traced(count)) is not None:
            break
        for names in _groups([path for path, is_said in counting.items() if not is_said]):
            if traced(count, names, whole) is not None:
                raise _no_examples(names, whole, is_certain=True)
    else:
        return  # the loss's own error, which is raised where it runs
    _refuse_unread(found, params, trained)
    found = dataclasses.replace(found, batch_paths={path: found.batch_paths[path] for path in counting})
    is_read = found.reads()
    unsure = [path for path, is_said in counting.items() if path in is_read and not is_said]
    for names in _groups(unsure if any(counting.values()) else unsure[1:]):
        more = traced(count, names, 2 * count)
        if more is not None and not dataclasses.replace(found, like=more.frame, is_additive=True).adds_up():
            raise _no_examples(names, whole, is_certain=False)


def _no_examples(paths: Sequence[str], count: int, *, is_certain: bool) -> UserError:
    """Returns the error for leaves that count no examples, or may count none, though they have `count` rows."""
    names = paths[0] if len(paths) == 1 else f"({'|'.join(paths)})"
    why = "the loss needs {count} rows of it with any number of examples, so it counts none; pass {spec}"
    if not is_certain:
        why = (
            "has {count} rows, as many as there are examples, and the loss takes any number of them, so they may be examples or not; "
            'pass {spec} if not (weights of classes), and else PartitionSpec(("replica", "data")) in its place'
        )
    return UserError(f"batch/{paths[0]}: {why.format(count=count, spec=arguments.OWN_SPEC.format(names))}")


def _groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields one, two, all but one and all of these."""
    sizes = sorted({1, 2, len(names) - 1, len(names)} & {*range(1, len(names) + 1)})
    return itertools.chain.from_iterable(itertools.combinations(names, size) for size in sizes)


def _tried(function: Callable[..., Any], axes: Any, params: PyTree, batch: PyTree, state: State) -> "TracedLoss | None":
    """Returns a traced loss, or None if the user's code raises an error for this batch. What it warns of, the step's own trace tells."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TracedLoss.of(function, params, batch, state, None, axes)
    except Exception:
        return None


class Depends(Exception):
    """A value reads an example, a weight or a drawn number."""


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoss:
    """A traced loss function of (params, batch, state).

    Attributes:
      closed: the trace.
      shapes: the shapes of its results, by path.
      batch_paths, state_paths: the numbers of its arguments, by path.
      like: the trace for twice as many rows, of all leaves or of some.
      apart: the axes, of more than one device, along which examples or tokens differ.
      repeated: the paths of leaves of the batch of which devices that share examples have the same.
      is_additive: whether COUNT is also a sum over examples plus what reads none of them.
    """

    closed: Any
    shapes: Mapping[str, tuple[int, ...]]
    batch_paths: Mapping[str, int]
    state_paths: Mapping[str, int]
    like: traces.Frame | None
    apart: frozenset[str] = frozenset(mesh_lib.SUMMED)
    repeated: frozenset[str] = frozenset()
    is_additive: bool = False

    @classmethod
    def of(
        cls, function: Callable[..., Any], params: PyTree, batch: PyTree, state: State, larger: Any, axes: Any = None
    ) -> "TracedLoss":
        """Traces a function that returns a pytree.

        Args:
          function: of (params, batch, state).
          params, batch, state: arrays or ShapeDtypeStructs, of one pass.
          larger: the same batch with twice the examples; None: nothing is asked that needs it.
          axes: {name: size} of the axes of devices that the function may read or sum over.
        """
        trace = jax.make_jaxpr(function, axis_env=[*(axes or {}).items()], return_shape=True)
        closed, shapes = trace(params, batch, state)
        twice = None if larger is None else _tried(function, axes, params, larger, state)
        numbers = itertools.count(len(jax.tree.leaves(params)))
        in_batch, in_state = ({path: next(numbers) for path, _ in tree.flatten(part)} for part in (batch, state))
        by_path = {path: leaf.shape for path, leaf in tree.flatten(shapes)}
        apart = frozenset(axis for axis in mesh_lib.SUMMED if (axes or {}).get(axis, 1) > 1)
        return cls(closed, by_path, in_batch, in_state, None if twice is None else twice.frame, apart)

    @functools.cached_property
    def frame(self) -> traces.Frame:
        """Returns the whole program."""
        return traces.Frame(self.closed, like=self.like)

    @functools.cached_property
    def outputs(self) -> dict[str, Any]:
        """Returns the variables or literals of the results, by path."""
        return dict(zip(self.shapes, self.closed.jaxpr.outvars))

    @functools.cached_property
    def _kinds(self) -> dict[Any, str]:
        return {}

    def reads(self, output: str | None = None) -> set[str]:
        """Returns the paths of the leaves of the batch that a result, or any, may depend on; one summed over devices is still `same`."""
        wanted = [output in (None, path) for path in self.shapes]
        is_read = partial_eval.dce_jaxpr(self.closed.jaxpr, wanted)[1]
        return {path for path, number in self.batch_paths.items() if is_read[number]}

    def adds_up(self) -> bool:
        """Returns whether each result is a sum of terms of examples, and of what reads none of them; for `is_additive`."""
        return all(self.kind(output) != OTHER for output in self.outputs)

    def kind(self, output: str, of: str | None = None) -> str:
        """Returns how the result of this path depends on examples; `of` is the path of its old value in the state."""
        old = self.state_paths[of] if of is not None else None
        for frame, eqn in self.frame.equations():  # in order, since a loss has more operations than Python allows calls
            for var in eqn.outvars:
                self._kind(frame, var, old)
        found = self._kind(self.frame, self.outputs[output], old)
        return SAME if found == GROWN and self._is_old(self.frame, self.outputs[output], old) else found

    def evaluate(self, output: str, state: State) -> Any:
        """Returns the value of a `same` result, for the whole batch and these values of the state.

        Raises:
          Depends: it reads more than the state.
        """
        known = dict(zip(self.state_paths.values(), jax.tree.leaves(state)))
        return self._value(self.frame, self.outputs[output], known, {})

    def keys(self) -> tuple[set[str], set[str]]:
        """Returns the paths of leaves of the state, and of the batch, that the loss uses as raw random keys."""
        used = set()
        for frame, eqn in self.frame.equations():
            if eqn.primitive.name == _WRAP:
                place, atom = frame.origin(eqn.invars[0], _PARTS_OF_KEYS)
                used.add(place.inputs.get(atom) if traces.is_var(atom) else None)
        return tuple(
            {path for path, number in paths.items() if number in used} for paths in (self.state_paths, self.batch_paths)
        )  # type: ignore[return-value]

    def draws_without(self, path: str) -> list[str]:
        """Returns the lines of code, as `file:line (function)`, that draw with keys that do not depend on this value of the state."""
        number = self.state_paths[path]
        return sorted(
            {
                frame.line(eqn)
                for frame, eqn in self.frame.equations()
                if eqn.primitive.name == _DRAWS and not self._reads(frame, eqn.invars[0], number, {})
            }
        )

    def _reads(self, frame: traces.Frame, atom: traces.Atom, number: int, done: dict[Any, bool]) -> bool:
        """Returns whether a value may depend on one input of the program."""
        frame, atom = frame.origin(atom)
        if not traces.is_var(atom) or atom not in frame.makers:
            return traces.is_var(atom) and frame.inputs.get(atom) == number
        if (frame, atom) not in done:
            done[frame, atom] = any(self._reads(frame, part, number, done) for part in frame.makers[atom].invars)
        return done[frame, atom]

    def _value(self, frame: traces.Frame, atom: traces.Atom, known: Mapping[int, Any], done: dict[Any, Any]) -> Any:
        frame, atom = frame.origin(atom)
        if not traces.is_var(atom) or atom in frame.constants:
            return atom.val if isinstance(atom, jex.Literal) else frame.constants[atom]
        if atom in frame.inputs:
            if frame.inputs[atom] not in known:
                raise Depends
            return known[frame.inputs[atom]]
        if (frame, atom) not in done:
            eqn = frame.makers[atom]
            if eqn.primitive.name in (_DRAWS, "axis_index"):
                raise Depends
            value = functools.partial(self._value, frame, known=known, done=done)
            if eqn.primitive.name == "scan":
                values = [
                    value(part) if is_read or tree.is_key(part.aval) else jnp.zeros(part.aval.shape, part.aval.dtype)
                    for part, is_read in _read_by(eqn, atom)
                ]
                done[frame, atom] = traces.bind(eqn, values)[eqn.outvars.index(atom)]
            else:
                results = traces.bind(eqn, [value(part) for part in eqn.invars])
                done.update(zip([(frame, var) for var in eqn.outvars], results))
        return done[frame, atom]

    def _kind(self, frame: traces.Frame, atom: traces.Atom, old: int | None) -> str:
        frame, atom = frame.origin(atom)
        if not traces.is_var(atom) or atom in frame.constants:
            return SAME
        if atom in frame.inputs:
            number = frame.inputs[atom]
            if number not in self.batch_paths.values():
                return GROWN if number == old else SAME
            return self._by_shape(frame, atom) or STATISTIC
        if (frame, atom, old) not in self._kinds:
            self._kinds[frame, atom, old] = self._kind_of_result(frame, atom, frame.makers[atom], old)
        return self._kinds[frame, atom, old]

    def _kind_of_result(self, frame: traces.Frame, atom: traces.Atom, eqn: jex.JaxprEqn, old: int | None) -> str:
        name = eqn.primitive.name
        if name in _SUMS_OVER_DEVICES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            is_whole = self.apart <= set(axes if isinstance(axes, tuple) else (axes,))
            return SAME if is_whole else self._by_shape(frame, atom) or STATISTIC
        if name in (_DRAWS, "axis_index"):
            return self._by_shape(frame, atom) or STATISTIC
        given = [part for part, is_read in _read_by(eqn, atom) if is_read] if name == "scan" else eqn.invars
        kinds = [self._kind(frame, part, old) for part in given]
        if set(kinds) <= {SAME}:
            return SAME
        is_old = [kind == GROWN and self._is_old(frame, part, old) for kind, part in zip(kinds, given)]
        if all(kind == SAME or unchanged for kind, unchanged in zip(kinds, is_old)) and name not in _CAST_OR_MOVED:
            return SAME  # a function of the old value
        found = OTHER if OTHER in kinds else self._by_shape(frame, atom, eqn)
        if found == ROWS and {GROWN, *([STATISTIC] if self.is_additive else [])} & set(kinds):
            return OTHER
        if found is not None:
            return found
        apart = {ROWS, GROWN, *([COUNT] if self.is_additive else [])}
        return self._kind_of_sum(frame, eqn, kinds) or (OTHER if apart & set(kinds) else STATISTIC)

    def _by_shape(self, frame: traces.Frame, var: Any, maker: Any = None) -> str | None:
        """Returns the kind of a value that has a dim of examples, or None for one that has none."""
        lengths = frame.lengths(var)
        rows = [dim for dim, (one, twice) in enumerate(lengths or ()) if one != twice]
        if lengths is None or len(rows) > 1 or any(2 * lengths[dim][0] != lengths[dim][1] for dim in rows):
            return OTHER
        if rows and maker is not None and maker.primitive.name in _IN_ORDER:
            return OTHER if maker.params.get("axis", maker.params.get("dimension")) == rows[0] else ROWS
        return ROWS if rows else None

    def _is_old(self, frame: traces.Frame, atom: traces.Atom, old: int | None) -> bool:
        """Returns whether a value is the old value of the state itself, moved or cast."""
        frame, atom = frame.origin(atom, _CAST_OR_MOVED)
        return traces.is_var(atom) and old is not None and frame.inputs.get(atom) == old

    def _kind_of_sum(self, frame: traces.Frame, eqn: jex.JaxprEqn, kinds: list[str]) -> str | None:
        """Returns COUNT or GROWN for a result without a dim of examples that is one, or None."""
        name, first = eqn.primitive.name, kinds[0]
        if name in _SUMS and ROWS in kinds:
            return COUNT if set(kinds) == {ROWS} else None
        if self.is_additive and name in ("add", "add_any", "sub") and COUNT in kinds:
            return COUNT if set(kinds) <= {SAME, STATISTIC, COUNT} else None
        if name in ("add", "add_any", "sub"):
            joined = {(COUNT, COUNT): COUNT, (GROWN, COUNT): GROWN, (COUNT, GROWN): None if name == "sub" else GROWN}
            return joined.get((first, kinds[1]))
        if name == "mul":
            return COUNT if sorted(kinds) == [COUNT, SAME] else None
        if name == "div":
            return COUNT if kinds == [COUNT, SAME] and not _is_integer(eqn.outvars[0]) else None
        if name == "scatter-add":
            is_sum = kinds[1:] in ([ROWS, SAME], [ROWS, ROWS], [SAME, ROWS], [SAME, COUNT])
            if is_sum and first == SAME and self._is_zero(frame, eqn.invars[0]):
                return COUNT
            return first if is_sum and first in (COUNT, GROWN) else None
        if name == "concatenate":
            return COUNT if set(kinds) == {COUNT} else None
        if name == traces.CAST:
            return first if _is_integer(eqn.invars[0]) == _is_integer(eqn.outvars[0]) else None
        is_linear = name in _SAME_VALUE or (name in ("neg", "reduce_sum") and first == COUNT)
        return first if is_linear and first in (COUNT, GROWN) else None

    def _is_zero(self, frame: traces.Frame, atom: traces.Atom) -> bool:
        atom = frame.origin(atom, _CAST_OR_MOVED)[1]
        return isinstance(atom, jex.Literal) and not np.any(np.asarray(atom.val))


def _read_by(scan: jex.JaxprEqn, result: Any) -> list[tuple[Any, bool]]:
    """Returns the operands of a scan, and whether one of its results needs each; it needs all if it needs a drawn number."""
    body, (constants, carried) = traces.opened(scan.params["jaxpr"])[0], traces.scan_counts(scan)
    wanted, before = [var is result for var in scan.outvars], None
    while wanted != before:
        before = wanted
        inside, is_read = partial_eval.dce_jaxpr(body, wanted)
        wanted = [own or (n < carried and is_read[constants + n]) for n, own in enumerate(wanted)]
    draws = any(eqn.primitive.name in (_DRAWS, "axis_index") for eqn in traces.equations(inside))
    return [(part, is_needed or draws) for part, is_needed in zip(scan.invars, is_read)]


def _is_integer(atom: Any) -> bool:
    return np.issubdtype(atom.aval.dtype, np.integer)


def of_whole_batch(program: TracedLoss, path: str, state: State, own: Leaf) -> Leaf:
    """Returns the value for the whole batch of a result that reads no example."""
    try:
        return program.evaluate(path, state)
    except Depends:
        if jax.dtypes.issubdtype(own.dtype, jax.dtypes.prng_key):
            raise UserError(
                f"loss_fn: returned a random key as {path} that depends on the batch or the weights; split it from the state's alone"
            ) from None
        return own  # reads weights, which are equal on all devices


def refuse_rows(name: str, value: Leaf, program: TracedLoss) -> None:
    """Raises a UserError for a result that has a dim of examples."""
    for path, part in tree.flatten({name: value}):
        if jnp.ndim(part) and program.shapes[path] != part.shape:
            raise UserError(
                f"loss_fn: returned {name} of shape {part.shape}, which counts one device's examples; return its sum or its mean"
            )


def refuse_repeated(name: str, kind: str, program: TracedLoss) -> None:
    """Raises a UserError for a count that devices would add up which have the same examples, and of these no tokens of their own."""
    same = program.reads(name) & program.repeated
    if same and kind in (COUNT, GROWN):
        raise UserError(
            f"loss_fn: returned {name}, a sum that reads batch/{min(same)}, of which devices along `context` have the same rows; count "
            "tokens, or return a mean"
        )
