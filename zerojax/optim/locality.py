"""Finds how far each weight's update reaches. This module reads an optimizer's traced update, whatever closures and chains it is made of.

An update is local in one of three degrees:

    elementwise   an element's update depends on that element's gradient, weight and state, and on scalars that no weight determines
                  (counts, schedules, hyperparameters). Pieces of a leaf, or a leaf padded with zeros, then update as the leaf does.
    per_leaf      a leaf's update needs that whole leaf, at its own shape: a mean, a norm, a factored moment, the leaf's shape.
                  Leaves may be updated one after another.
    global        a leaf's update, or a part of the state, depends on other leaves, such as a global norm; or a part of the state that
                  belongs to no weight depends on one, such as an estimated learning rate; or `jax.random` draws numbers, since optax
                  splits one key into as many as there are leaves: alone, each leaf would draw the same ones

The answer holds for all values, since no value is looked at: `clip_by_global_norm` is global however high its limit. It is cautious: an
operation that is not known to be elementwise counts as one that mixes elements, so a per_leaf update may still be elementwise (a weight
that is transposed and transposed back).
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
import optax

from zerojax import errors, traces, tree
from zerojax.optim import fused, one_pass
from zerojax.tree import PyTree

ELEMENTWISE, PER_LEAF, GLOBAL = "elementwise", "per_leaf", "global"


@dataclasses.dataclass(frozen=True)
class Locality:
    """How far an optimizer's updates reach.

    Attributes:
      kind: ELEMENTWISE, PER_LEAF or GLOBAL.
      why: what makes it more than the first.
      alike: a number for each weight, equal for weights that the same operations update; () where the update is global or not traced.
    """

    kind: str
    why: str = ""
    alike: Sequence[int] = dataclasses.field(default=(), compare=False)


def of(tx: optax.GradientTransformation, params: PyTree, pieces: Any = None) -> Locality:
    """Returns the locality of an optimizer's update of these params. Traces the update, and computes nothing.

    Args:
      tx: any optax transformation.
      params: arrays or ShapeDtypeStructs, of their own shapes, since masks and factored moments depend on names and shapes.
      pieces: the same tree with other shapes and as many dims, such as those of pieces or of padded leaves; an update that is traced
        otherwise for these is per_leaf. None: each dim halved.

    >>> locality.of(optax.adamw(1e-3), params).kind
    'elementwise'
    """
    params = jax.tree.map(tree.bare, params)
    if pieces is None:
        pieces = jax.tree.map(lambda leaf: leaf.update(shape=tuple(-(-n // 2) for n in leaf.shape)), params)
    pieces = jax.tree.map(tree.bare, pieces)
    try:
        with fused.in_plain_jnp():
            found = _Traced.make(tx, params)
            local = found.locality()
            if local.kind == GLOBAL:
                return local
            alike = found.alike()
            if local.kind == ELEMENTWISE and not _is_alike_in_pieces(tx, found, params, pieces, alike):
                return Locality(PER_LEAF, "the update depends on the shapes of the weights", alike)
    except Exception as error:  # of the user's own code: it needs arguments that only a train step has, or reads values
        return Locality(GLOBAL, f"its update cannot be traced ({errors.one_line(error, 100)})")
    return dataclasses.replace(local, alike=alike)


def _is_alike_in_pieces(
    tx: optax.GradientTransformation, found: "_Traced", params: PyTree, pieces: PyTree, alike: Sequence[int]
) -> bool:
    """Returns whether an elementwise update is traced in the same way for pieces. One weight stands for all that are alike."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(pieces)]
    first = {pair: number for number, pair in reversed([*enumerate(zip(alike, shapes))])}
    numbers = iter(range(len(shapes)))
    kept = jax.tree.map(lambda _: next(numbers) in first.values(), params)
    one, other = (
        jax.tree.map(lambda leaf, is_kept: leaf if is_kept else optax.MaskedNode(), own, kept)
        for own in (params, pieces)
    )
    try:
        return _Traced.make(tx, one).is_like(_Traced.make(tx, other))
    except Exception:  # it cannot be made for a part of the weights
        return found.is_like(_Traced.make(tx, pieces))


def in_step(tx: optax.GradientTransformation, params: PyTree) -> Locality:
    """Returns the locality of the update that a train step makes. An optimizer of one pass says of itself whether leaves may be cut: there,
    stochastic rounding may draw other bits for a piece."""
    if isinstance(tx, one_pass.OnePass):
        return Locality(ELEMENTWISE if tx.is_elementwise else PER_LEAF)
    return of(tx, params)


@dataclasses.dataclass(frozen=True)
class _Value:
    """What an array of the traced update depends on.

    Attributes:
      leaves: the numbers of the weights that it depends on, through their gradients, themselves or their state.
      is_even: with a weight: it has the weight's shape, and each element depends on the elements in the same place. Without one: all its
        elements are equal.
      by: the first operation that made it uneven.
    """

    leaves: frozenset[int] = frozenset()
    is_even: bool = True
    by: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """An optimizer's traced `init` and `update`."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    init: jex.ClosedJaxpr
    update: jex.ClosedJaxpr
    state_paths: list[str]

    @classmethod
    def make(cls, tx: optax.GradientTransformation, params: PyTree) -> "_Traced":
        tx = optax.with_extra_args_support(tx)
        init, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
        update, (_, after) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
        structures: list[Any] = [jax.tree.structure(tree) for tree in (state, after)]
        if structures[0] != structures[1]:
            raise ValueError("its state changes its structure")
        names, leaves = zip(*tree.flatten(params)) if jax.tree.leaves(params) else ((), ())
        return cls(
            list(names), [leaf.shape for leaf in leaves], init, update, [path for path, _ in tree.flatten(state)]
        )

    def locality(self) -> Locality:
        weights = [_Value(frozenset([number])) for number in range(len(self.names))]
        walk = _Walk(self.shapes)
        state = walk.run(self.init, weights)
        while True:  # until no step adds a dependence; each round adds one or ends
            outputs = walk.run(self.update, [*weights, *state, *weights])
            updates, after = outputs[: len(weights)], outputs[len(weights) :]
            joined = [_join(pair, is_even=True) for pair in zip(state, after)]
            if joined == state:
                break
            state = joined
        reaching = [
            (f"the update of {name}", value, number) for number, (name, value) in enumerate(zip(self.names, updates))
        ]
        reaching += [("its state", value, min(value.leaves)) for value in state if value.leaves]
        for what, value, own in reaching:
            if value.leaves - {own}:
                other = self.names[min(value.leaves - {own})]
                return Locality(GLOBAL, f"{what} depends on {other}" + (" too" if own in value.leaves else ""))
        for path, value in zip(self.state_paths, state):
            if value.leaves and not self._is_of_a_weight(path):
                weight = self.names[min(value.leaves)]
                return Locality(GLOBAL, f"its state {path} depends on {weight} and belongs to no weight")
        if any(eqn.primitive.name in _DRAWS for eqn in traces.equations(self.update)):
            return Locality(
                GLOBAL, "the update draws random numbers, of which each weight alone would draw the same ones"
            )
        for what, value, own in reaching:
            if not value.is_even:
                how = f" ({value.by})" if value.by else ""
                return Locality(PER_LEAF, f"{what} depends on the whole of {self.names[own]}{how}")
        return Locality(ELEMENTWISE)

    def _is_of_a_weight(self, path: str) -> bool:
        """Returns whether the path of a part of the state holds that of a weight; params that are one array have no path."""
        return self.names == [""] or any(f"/{name}/" in f"/{path}/" for name in self.names)

    def alike(self) -> list[int]:
        """Returns a number for each weight, equal for weights that an update which is not global updates by the same operations.

        All weights are followed through the update. A value's number stands for the operation that made it and the numbers of what that
        read, and the gradients of weights of one shape begin as one number.
        """
        numbers: dict[Any, int] = {}

        def number(*key: Any) -> int:
            return numbers.setdefault(key, len(numbers))

        def apply(eqn: jex.JaxprEqn, inputs: list[int]) -> list[int]:
            # JAX 0.12 leaves calls of `jax.jit(inline=True)` in, as of bias corrections
            if (called := traces.called(eqn)) is not None:
                return traces.run(called, inputs, apply, constant)
            consts = [id(const) for inner in traces.programs(eqn) for const in traces.constants(inner)]
            made = number(eqn.primitive.name, str(eqn.params), *consts, *inputs)
            return [number(made, n, str(var.aval)) for n, var in enumerate(eqn.outvars)]

        def constant(value: Any, aval: Any) -> int:
            return number(str(aval), np.asarray(value).tobytes() if np.size(value) == 1 else id(value))

        names = frozenset(self.names)
        owners = [_owner(path, names) for path in self.state_paths]
        jaxpr = traces.opened(self.update)[0]
        roles = ["gradient"] * len(self.names)
        roles += [path if own is None else path.replace(own, "") for path, own in zip(self.state_paths, owners)]
        roles += ["weight"] * len(self.names)
        given = [number(role, str(var.aval)) for role, var in zip(roles, jaxpr.invars, strict=True)]
        made = traces.run(self.update, given, apply, constant)
        by_name: dict[str, list[int]] = {name: [made[n]] for n, name in enumerate(self.names)}
        for own, value in zip(owners, made[len(self.names) :]):
            if own is not None:
                by_name[own].append(value)
        return [number(*by_name[name]) for name in self.names]

    def is_like(self, other: "_Traced") -> bool:
        """Returns whether both are the same operations with the same constants, but for shapes."""
        return _same(self.init, other.init) and _same(self.update, other.update)


_DRAWS = frozenset("random_bits random_gamma rng_bit_generator rng_uniform".split())
_IN_PLACE = traces.ELEMENTWISE | {"broadcast_in_dim", "reshape", "copy"}
_OF_EQUAL_ELEMENTS = traces.ELEMENTWISE | traces.MOVES | {"dynamic_slice"} | traces.REDUCTIONS


class _Walk:
    """Derives the dependences of a program's results from those of its arguments.

    Args:
      shapes: of the weights.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self._shapes = shapes

    def run(self, program: traces.Program, inputs: Sequence[_Value]) -> list[_Value]:
        """Returns the results of a jaxpr, closed or not."""

        def settled(eqn: jex.JaxprEqn, values: list[_Value]) -> list[_Value]:
            return [self._settle(*pair) for pair in zip(self._results(eqn, values), eqn.outvars)]

        return traces.run(program, inputs, settled, lambda value, _: _constant(value))

    def _settle(self, value: _Value, var: jex.Var) -> _Value:
        """Returns the value with what its shape implies."""
        shape = tuple(getattr(var.aval, "shape", ()))
        if np.prod(shape) == 1 and all(self._shapes[number] == shape for number in value.leaves):
            # A weight of one element is updated elementwise whatever happens to it.
            return value if len(value.leaves) > 1 else dataclasses.replace(value, is_even=True)
        return value

    def _results(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return inputs
        if name in ("cond", "while", "scan"):
            return {"cond": self._cond, "while": self._while, "scan": self._scan}[name](eqn, inputs)
        if (inner := traces.called(eqn)) is not None:
            return self.run(inner, inputs)
        shape = getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
        depends = any(value.leaves for value in inputs)
        # With a weight, each operand that depends on it must be in place: of the result's shape, and not moved.
        is_even = name in (_IN_PLACE if depends else _OF_EQUAL_ELEMENTS)
        is_even &= all(atom.aval.shape == shape for atom, value in zip(eqn.invars, inputs) if value.leaves)
        return [_join(inputs, is_even=is_even, by=name)] * len(eqn.outvars)

    def _cond(self, eqn: jex.JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        chosen, *operands = inputs
        by_branch = [self.run(branch, operands) for branch in eqn.params["branches"]]
        decided = [_mixed(chosen, "cond")] if chosen.leaves else []
        return [_join([*values, *decided], is_even=True) for values in zip(*by_branch)]

    def _while(self, eqn: jex.JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        split = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        condition, body, carried = inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]
        while True:
            (goes_on,) = self.run(eqn.params["cond_jaxpr"], [*condition, *carried])
            decided = [_mixed(goes_on, "while")] if goes_on.leaves else []
            after = self.run(eqn.params["body_jaxpr"], [*body, *carried])
            joined = [_join([*pair, *decided], is_even=True) for pair in zip(carried, after)]
            if joined == carried:
                return carried
            carried = joined

    def _scan(self, eqn: jex.JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        first, count = traces.scan_counts(eqn)
        consts, carried, given = inputs[:first], inputs[first : first + count], inputs[first + count :]
        rows = [_mixed(value, "scan") if value.leaves else value for value in given]
        while True:
            after = self.run(eqn.params["jaxpr"], [*consts, *carried, *rows])
            joined = [_join(pair, is_even=True) for pair in zip(carried, after)]
            if joined == carried:
                return [*carried, *(_mixed(value, "scan") for value in after[len(carried) :])]
            carried = joined


def _constant(value: Any) -> _Value:
    array = value if isinstance(value, (np.ndarray, np.generic)) else None
    is_even = np.size(value) <= 1 or (array is not None and bool(np.all(array == array.flat[0])))
    return _Value(is_even=is_even, by="" if is_even else "a constant array")


def _mixed(value: _Value, by: str) -> _Value:
    return _Value(value.leaves, is_even=False, by=value.by or by)


def _join(values: Sequence[_Value], *, is_even: bool, by: str = "") -> _Value:
    leaves = frozenset().union(*(value.leaves for value in values))
    uneven = next((value for value in values if not value.is_even), None)
    if len(leaves) > 1 or not is_even or uneven is not None:
        return _Value(leaves, is_even=False, by=uneven.by if uneven is not None and uneven.by else by)
    return _Value(leaves)


def _same(a: Any, b: Any) -> bool:
    """Returns whether two programs are the same operations with the same constants, but for shapes."""
    (a, a_consts), (b, b_consts) = traces.opened(a), traces.opened(b)
    if len(a_consts) != len(b_consts) or not all(map(_equal, a_consts, b_consts)):
        return False
    if len(a.eqns) != len(b.eqns) or not _same_constants(a.outvars, b.outvars):
        return False
    return all(
        x.primitive.name == y.primitive.name
        and _same_constants(x.invars, y.invars)
        and all(map(_same, traces.programs(x), traces.programs(y)))
        for x, y in zip(a.eqns, b.eqns)
    )


def _same_constants(a: Sequence[Any], b: Sequence[Any]) -> bool:
    values = [[None if traces.is_var(atom) else atom.val for atom in atoms] for atoms in (a, b)]
    return len(a) == len(b) and all(map(_equal, *values))


def _equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    is_scalar = np.size(a) == 1 and np.size(b) == 1  # larger constants have the shapes of weights
    return not is_scalar or bool(np.all((a == b) | ((a != a) & (b != b))))  # two NaNs are the same constant


def _owner(path: str, names: Collection[str]) -> str | None:
    """Returns which of the weights a part of the state belongs to."""
    parts = path.split("/")
    spans = (parts[a:b] for a in range(len(parts)) for b in range(len(parts), a, -1))
    return next((name for name in map("/".join, spans) if name in names), None)
