"""Tells what the values that a loss function returns depend on. This module reads the loss's traced program.

A value that a device computes from its own examples differs between devices. How it is made equal depends on what it is:

    same     it reads no example and draws no random number; `TracedLoss.evaluate` gives its value for the whole batch
    count    a sum over examples
    grown    an old value of the state plus a count
    other    anything else

Keys are `same`, and what is drawn from them is not. Calls (of `jax.jit`, `jax.checkpoint`, functions with their own derivatives) are looked
into. A loop or a branch that reads examples is `other`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source
import jax.numpy as jnp
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.zero import constraints
from zerojax.zero.sharded_batch import inputs

SAME, COUNT, GROWN, OTHER = "same", "count", "grown", "other"
_MIXED = "mixed"  # `other`, and made of many examples by more than a sum, such as their maximum

_CALLS = frozenset("jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call".split())
_MOVES = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p rev slice name stop_gradient sharding_constraint".split()
)
_SUMS_OVER_DEVICES = frozenset("psum psum_invariant pmax pmin all_gather all_gather_invariant".split())
_DRAWS, _WRAP = "random_bits", "random_wrap"
_KEY_MOVES = _MOVES | {"dynamic_slice", "gather"}


@dataclasses.dataclass(frozen=True, eq=False)
class _Frame:
    """A program or one call in it: its jaxpr, the values of its constants, and the call's frame and equation."""

    jaxpr: Any
    consts: Sequence[Any] = ()
    caller: "_Frame | None" = None
    call: Any = None

    @functools.cached_property
    def makers(self) -> dict[Any, Any]:
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    @functools.cached_property
    def inputs(self) -> dict[Any, int]:
        return {var: number for number, var in enumerate(self.jaxpr.invars)}

    @functools.cached_property
    def constants(self) -> dict[Any, Any]:
        return dict(zip(self.jaxpr.constvars, self.consts))

    @functools.cached_property
    def inner(self) -> dict[int, "_Frame"]:
        return {}

    def enter(self, eqn: Any) -> "_Frame | None":
        """Returns the frame of a call, or None for another equation."""
        if eqn.primitive.name not in _CALLS:
            return None
        if id(eqn) not in self.inner:
            program = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)
            closed = isinstance(program, jex.ClosedJaxpr)
            self.inner[id(eqn)] = _Frame(
                program.jaxpr if closed else program, program.consts if closed else (), self, eqn
            )
        return self.inner[id(eqn)]


def of_loss(loss_fn: Callable[..., Any], params: Any, batch: Any, state: Any, layout: inputs.Layout) -> "TracedLoss":
    """Traces a loss function on one pass over the whole batch.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> (loss, aux)`.
      params: abstract, as the loss sees them.
      batch, state: arrays; the batch was placed by `layout`.
    """

    def aux_of(params: Any, batch: Any, state: Any) -> Any:
        return loss_fn(params, batch, state)[1]

    one_pass = jax.tree.map(lambda leaf: _abstract(leaf, layout.passes > 1), batch)
    axes = layout.mesh.shape if layout.by_device else {}
    with constraints.dropped(axes):
        return TracedLoss(aux_of, params, one_pass, jax.tree.map(_abstract, state), layout.examples(batch), axes)


def _abstract(leaf: Any, without_first: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[int(without_first) :], tree.dtype_of(leaf))


@dataclasses.dataclass(frozen=True)
class _BodyArguments:
    """What a body of a loop or a branch is given, in place of the equation of a call."""

    invars: Sequence[Any]
    source_info: Any


class Depends(Exception):
    """A value reads an example, a weight or a drawn number."""


class TracedLoss:
    """A traced loss function of (params, batch, state).

    Args:
      function: returns a pytree.
      params, batch, state: arrays or ShapeDtypeStructs, of one pass over the whole batch.
      examples: the number of examples in it. A dim that it divides is taken to count examples.
      axes: {name: size} of the axes of devices that the function may read or sum over.
    """

    def __init__(
        self, function: Callable[..., Any], params: Any, batch: Any, state: Any, examples: int, axes: Any = None
    ):
        traced = jax.make_jaxpr(function, axis_env=[*(axes or {}).items()], return_shape=True)
        closed, shapes = traced(params, batch, state)
        self._top = _Frame(closed.jaxpr, closed.consts)
        ends = np.cumsum([len(jax.tree.leaves(part)) for part in (params, batch, state)])
        self._batch, self._state = range(ends[0], ends[1]), range(ends[1], ends[2])
        self._state_paths = {path: ends[1] + number for number, (path, _) in enumerate(tree.flatten(state))}
        self._batch_paths = {path: ends[0] + number for number, (path, _) in enumerate(tree.flatten(batch))}
        self._kinds: dict[tuple, str] = {}
        self._examples = examples
        self.outputs = dict(zip([path for path, _ in tree.flatten(shapes)], closed.jaxpr.outvars))
        self.shapes = {path: leaf.shape for path, leaf in tree.flatten(shapes)}

    def kind(self, output: str, of: str | None = None) -> str:
        """Returns how the result of this path depends on examples; `of` is the path of its old value in the state."""
        old = self._state_paths[of] if of is not None else None
        found = self._kind(self._top, self.outputs[output], old)
        if found == GROWN and self._is_old(self._top, self.outputs[output], old):
            return SAME
        return OTHER if found == _MIXED else found

    def reads_examples(self, output: str) -> bool:
        """Returns whether the result of this path may depend on the batch; one that the loss summed over devices is still `same`."""
        return any(self._reads(self._top, self.outputs[output], number, {}) for number in self._batch)

    def evaluate(self, output: str, state: Any) -> Any:
        """Returns the value of a `same` result, for the whole batch and these values of the state.

        Raises:
          Depends: it reads more than the state.
        """
        known = dict(zip(self._state, jax.tree.leaves(state)))
        return self._value(self._top, self.outputs[output], known, {})

    def keys(self) -> tuple[set[str], set[str]]:
        """Returns the paths of leaves of the state, and of the batch, that the loss uses as raw random keys."""
        used = {
            number
            for frame, eqn in _equations(self._top)
            if eqn.primitive.name == _WRAP
            for number in [self._source(frame, eqn.invars[0])]
            if number is not None
        }
        return tuple(
            {path for path, number in paths.items() if number in used}
            for paths in (self._state_paths, self._batch_paths)
        )  # type: ignore[return-value]

    def draws_without(self, path: str) -> list[str]:
        """Returns the lines of code, as `file:line (function)`, that draw with keys that do not depend on this value of the state."""
        number, found = self._state_paths[path], []
        for frame, eqn in _equations(self._top):
            if eqn.primitive.name == _DRAWS and not self._reads(frame, eqn.invars[0], number, {}):
                found.append(_line(frame, eqn))
        return sorted(set(found))

    def _reads(self, frame: _Frame, atom: Any, number: int, done: dict[tuple, bool]) -> bool:
        """Returns whether a value may depend on one input of the program."""
        if isinstance(atom, jex.Literal) or atom in frame.constants:
            return False
        if (outer := self._outer(frame, atom)) is not None:
            return self._reads(*outer, number, done)
        if atom in frame.inputs:
            return frame.caller is not None or frame.inputs[atom] == number
        place = (id(frame), atom)
        if place not in done:
            eqn = frame.makers[atom]
            inside = frame.enter(eqn)
            done[place] = (
                any(self._reads(frame, part, number, done) for part in eqn.invars)
                if inside is None
                else self._reads(inside, inside.jaxpr.outvars[eqn.outvars.index(atom)], number, done)
            )
        return done[place]

    def _outer(self, frame: _Frame, atom: Any) -> tuple[_Frame, Any] | None:
        """Returns the argument that an input of a call stands for, or None for another variable."""
        if frame.caller is None or isinstance(atom, jex.Literal) or atom not in frame.inputs:
            return None
        return frame.caller, frame.call.invars[frame.inputs[atom]]

    def _source(self, frame: _Frame, atom: Any) -> int | None:
        """Returns the number of the program's input that a value is a part of, or None."""
        while not isinstance(atom, jex.Literal):
            if (outer := self._outer(frame, atom)) is not None:
                frame, atom = outer
                continue
            if atom in frame.inputs:
                return frame.inputs[atom]
            eqn = frame.makers.get(atom)
            if eqn is None:
                return None
            if (inside := frame.enter(eqn)) is not None:
                frame, atom = inside, inside.jaxpr.outvars[eqn.outvars.index(atom)]
            elif eqn.primitive.name in _KEY_MOVES:
                atom = eqn.invars[0]
            else:
                return None
        return None

    def _value(self, frame: _Frame, atom: Any, known: dict[int, Any], done: dict[tuple, Any]) -> Any:
        if isinstance(atom, jex.Literal):
            return atom.val
        if atom in frame.constants:
            return frame.constants[atom]
        if (outer := self._outer(frame, atom)) is not None:
            return self._value(*outer, known, done)
        if atom in frame.inputs:
            if frame.inputs[atom] not in known:
                raise Depends
            return known[frame.inputs[atom]]
        if (id(frame), atom) not in done:
            eqn = frame.makers[atom]
            if (inside := frame.enter(eqn)) is not None:
                return self._value(inside, inside.jaxpr.outvars[eqn.outvars.index(atom)], known, done)
            if eqn.primitive.name == _DRAWS or eqn.primitive.name == "axis_index":
                raise Depends
            values = [self._value(frame, part, known, done) for part in eqn.invars]
            results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            for var, result in zip(eqn.outvars, results if eqn.primitive.multiple_results else [results]):
                done[id(frame), var] = result
        return done[id(frame), atom]

    def _kind(self, frame: _Frame, atom: Any, old: int | None) -> str:
        if isinstance(atom, jex.Literal) or atom in frame.constants:
            return SAME
        if (outer := self._outer(frame, atom)) is not None:
            return self._kind(*outer, old)
        if atom in frame.inputs:
            number = frame.inputs[atom]
            return GROWN if number == old else OTHER if number in self._batch else SAME
        place = (id(frame), atom, old)
        if place not in self._kinds:
            eqn = frame.makers[atom]
            inside = frame.enter(eqn)
            self._kinds[place] = (
                self._kind_of_result(frame, eqn, old)
                if inside is None
                else self._kind(inside, inside.jaxpr.outvars[eqn.outvars.index(atom)], old)
            )
        return self._kinds[place]

    def _kind_of_result(self, frame: _Frame, eqn: Any, old: int | None) -> str:
        name = eqn.primitive.name
        if name in (_DRAWS, "axis_index"):
            return OTHER
        if name in _SUMS_OVER_DEVICES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            return SAME if set(mesh_lib.SUMMED) <= set(axes if isinstance(axes, tuple) else (axes,)) else OTHER
        kinds = [self._kind(frame, part, old) for part in eqn.invars]
        if not set(kinds) - {SAME}:
            return SAME
        is_old = [kind == GROWN and self._is_old(frame, part, old) for kind, part in zip(kinds, eqn.invars)]
        if all(kind == SAME or unchanged for kind, unchanged in zip(kinds, is_old)) and name not in _MOVES | {
            "convert_element_type"
        }:
            return SAME  # a function of the old value
        found = self._kind_of_sum(frame, eqn, kinds)
        if found != OTHER or not self._counts_examples(*eqn.outvars):
            was_many = any(
                kind in (OTHER, COUNT) and self._counts_examples(var) for kind, var in zip(kinds, eqn.invars)
            )
            return _MIXED if found == OTHER and (was_many or _MIXED in kinds) else found
        return OTHER

    def _counts_examples(self, *variables: Any) -> bool:
        return any(n and n % self._examples == 0 for var in variables for n in getattr(var.aval, "shape", ()))

    def _is_old(self, frame: _Frame, atom: Any, old: int | None) -> bool:
        """Returns whether a value is the old value of the state itself, moved or cast."""
        while not isinstance(atom, jex.Literal):
            if (outer := self._outer(frame, atom)) is not None:
                frame, atom = outer
                continue
            if atom in frame.inputs:
                return frame.inputs[atom] == old
            eqn = frame.makers.get(atom)
            if eqn is None or eqn.primitive.name not in _MOVES | {"convert_element_type"}:
                return False
            atom = eqn.invars[0]
        return False

    def _kind_of_sum(self, frame: _Frame, eqn: Any, kinds: list[str]) -> str:
        name = eqn.primitive.name
        if name == "reduce_sum":
            return OTHER if kinds[0] in (GROWN, _MIXED) else COUNT
        if name in ("add", "add_any"):
            return {(COUNT, COUNT): COUNT, (GROWN, COUNT): GROWN, (COUNT, GROWN): GROWN}.get(
                (kinds[0], kinds[1]), OTHER
            )
        if name == "sub":
            return {(COUNT, COUNT): COUNT, (GROWN, COUNT): GROWN}.get((kinds[0], kinds[1]), OTHER)
        if name == "mul":
            return COUNT if sorted(kinds) == [COUNT, SAME] else OTHER
        if name == "scatter-add":
            if kinds[0] == SAME and self._is_zero(frame, eqn.invars[0]):
                return COUNT
            return kinds[0] if kinds[0] in (COUNT, GROWN) and kinds[1] != GROWN else OTHER
        if name == "concatenate":
            return COUNT if set(kinds) == {COUNT} else OTHER
        if name == "convert_element_type":
            is_whole = np.issubdtype(eqn.invars[0].aval.dtype, np.integer) and np.issubdtype(
                eqn.outvars[0].aval.dtype, np.integer
            )
            return kinds[0] if is_whole else OTHER
        return kinds[0] if name in _MOVES or (name == "neg" and kinds[0] == COUNT) else OTHER

    def _is_zero(self, frame: _Frame, atom: Any) -> bool:
        while not isinstance(atom, jex.Literal):
            if (outer := self._outer(frame, atom)) is not None:
                frame, atom = outer
                continue
            eqn = frame.makers.get(atom)
            if eqn is None or eqn.primitive.name not in _MOVES | {"convert_element_type"}:
                return False
            atom = eqn.invars[0]
        return not np.any(np.asarray(atom.val))


def _equations(frame: _Frame) -> Iterator[tuple[_Frame, Any]]:
    """Yields each equation of a program and of the calls in it, with its frame; those of loops and branches with what they are given."""
    for eqn in frame.jaxpr.eqns:
        yield frame, eqn
        inside = frame.enter(eqn)
        for inner in [inside] if inside is not None else _bodies(frame, eqn):
            yield from _equations(inner)


def _line(frame: _Frame, eqn: Any) -> str:
    """Returns the innermost line of the user's code that an equation comes from."""
    text = source.summarize(eqn.source_info)
    while not text and frame.caller is not None:
        text, frame = source.summarize(frame.call.source_info), frame.caller
    return text or "an unknown line"


def _bodies(frame: _Frame, eqn: Any) -> Iterator[_Frame]:
    """Yields the programs of a loop or a branch, each with what it is given first."""
    params, given = eqn.params, eqn.invars
    bodies: list[tuple[Any, Sequence[Any]]] = []
    if eqn.primitive.name in ("scan", "shard_map"):
        bodies = [(params["jaxpr"], given)]
    elif eqn.primitive.name == "cond":
        bodies = [(branch, given[1:]) for branch in params["branches"]]
    elif eqn.primitive.name == "while":
        own, rest = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        bodies = [(params["cond_jaxpr"], [*given[:own], *given[rest:]]), (params["body_jaxpr"], given[own:])]
    for program, inputs_of_body in bodies:
        is_closed = isinstance(program, jex.ClosedJaxpr)
        yield _Frame(
            program.jaxpr if is_closed else program,
            program.consts if is_closed else (),
            frame,
            _BodyArguments(inputs_of_body, eqn.source_info),
        )
