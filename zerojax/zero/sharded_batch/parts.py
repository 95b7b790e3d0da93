"""Tells whether a loss stays the same when devices have parts of its sequences. This module reads the loss's traced program.

The loss is traced with a device's tokens and with those of all n devices: a dim that is n times as long counts tokens, and so does a number
that is n times as large. With v what device i computes and V the same of whole sequences, every value of the trace is

    same      v = V n^-p: it reads no token
    tokens    v = V n^-p of the device's tokens
    linear    the mean of v over devices is V n^-p: sums (p = 1) and means (p = 0) over tokens
    own       the loss knows the mesh axis: what it sums or gathers over it, or reads of the device's place, is the user's own matter
    grown     its old value in the state plus what is linear
    other     anything else: a token reads its neighbours, counts positions from 0, or reads a sum over the device's tokens

`other` is refused where the loss returns it, with the line of code that made it. `linear` and `same` with their p say by which power of n
a result is to be multiplied, so that sums and means are right whether a leaf of the batch has a dim of tokens or not.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax import traces, tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.sharded_batch import constraints, dependence, inputs, outputs

SAME, TOKENS, LINEAR, GROWN, OWN, OTHER = "same", "tokens", "linear", "grown", "own", "other"

_ATTEND = "tokens are compared with those of one device alone; attend with zerojax.attention"
_NEIGHBOURS = "tokens of other devices are missing in {}"
_COUNTS = "each device counts its tokens from 0; take positions, labels and masks from the batch, and attend with zerojax.attention"
_OTHERWISE = (
    "other operations run with one device's tokens than with those of all; take positions from the batch, and exchange no "
    "tokens but by zerojax.attention"
)
_OF_DEVICE = (
    "a sum or mean over one device's tokens is used; return zerojax.Mean(total, weight) for a weighted mean, and give batch norm "
    'axis_name=("replica", "data", "context")'
)
_MIXED = "a sum over tokens is added to what has none of them, which all devices add; take their means"
_LENGTH = "the number of one device's tokens is used"
_DRAWN = "numbers are drawn for examples, and other ones on each device; draw them where batches are made"
_UNKNOWN = "{} may read tokens of other devices"


class Refused(UserError):
    """A loss that is another one where tokens are sharded."""


class Kind(NamedTuple):
    """What a value is.

    Attributes:
      form: one of SAME, TOKENS, LINEAR, GROWN, OWN, OTHER.
      power: the p of the module's docstring.
      why, line: of OTHER: what made it so, and the line of code.
      is_zero: whether it is 0, so that p has no meaning.
      is_old: whether it is a value of the state.
    """

    form: str
    power: int = 0
    why: str = ""
    line: str = ""
    is_zero: bool = False
    is_old: bool = False


class Checked:
    """A loss of `outputs.with_aux` that is read before it runs on parts of sequences.

    Args:
      loss_fn: runs on each device.
      plain: is read; the same without fp8, whose scales are those of a device's tokens.
      ways: the number of devices that have tokens of the same examples.
    """

    def __init__(self, loss_fn: Callable[..., Any], plain: Callable[..., Any], ways: int):
        self._loss_fn, self._plain, self._ways = loss_fn, plain, ways
        self._powers: Mapping[str, int] = {}

    def read(self, params: PyTree, batch: PyTree, state: State, layout: inputs.Layout) -> None:
        """Reads the trace; see `powers`."""
        self._powers = powers(self._plain, params, batch, state, layout)

    def __call__(self, params: PyTree, batch: PyTree, state: State) -> tuple[Any, Any]:
        loss, aux = self._loss_fn(params, batch, state)
        return exact(self._powers, self._ways, loss, aux, state)


def checked(loss_fn: Callable[..., Any], plain: Callable[..., Any], layout: inputs.Layout) -> Callable[..., Any]:
    """Returns a `Checked` loss where each device has tokens of its own, and `loss_fn` itself anywhere else."""
    ways = mesh_lib.size(layout.mesh, mesh_lib.TOKENS)
    return Checked(loss_fn, plain, ways) if layout.by_device and ways > 1 else loss_fn


def powers(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, state: State, layout: inputs.Layout
) -> dict[str, int]:
    """Returns the power of the number of devices by which each result is to be multiplied, by path: `metrics/loss`.

    So multiplied, the mean over devices is the value for whole sequences; of both parts of a `Mean` the sums are as many times too large.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> (loss, aux)` of `outputs.with_aux`.
      params: abstract, as the loss sees them.
      batch, state: arrays; the batch was placed by `layout`.

    Raises:
      UserError: a result is another one where tokens are sharded, or the loss takes no part of a sequence.
    """
    ways = mesh_lib.size(layout.mesh, mesh_lib.TOKENS)
    params, state = (jax.tree.map(tree.bare, part) for part in (params, state))
    whole, part = (
        dependence.of_examples(layout, batch, dependence.examples(layout, batch), tokens_of=tokens_of)
        for tokens_of in (1, ways)
    )

    def aux_of(params: PyTree, batch: PyTree, state: State) -> Any:
        return loss_fn(params, batch, state)[1]

    def traced(batch: PyTree) -> tuple[Any, Any]:
        trace = jax.make_jaxpr(aux_of, axis_env=[*layout.mesh.shape.items()], return_shape=True)
        with constraints.dropped(layout.mesh.shape), traces.reading():
            return trace(params, batch, state)

    program, shapes = traced(whole)
    try:
        own, own_shapes = traced(part)
        if [path for path, _ in tree.flatten(own_shapes)] != [path for path, _ in tree.flatten(shapes)]:
            raise ValueError("it returns other results")
    except UserError:
        raise
    except Exception as error:
        what = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise Refused(
            f"{_begin(layout)}, since with one device's tokens it fails with {type(error).__name__}: {what[:200]}; "
            "make what it adds to tokens from positions in the batch"
        ) from error
    apart = dependence.has_tokens(layout, batch)
    of_params = [Kind(SAME)] * len(jax.tree.leaves(params))
    of_state = [Kind(SAME, is_old=True)] * len(jax.tree.leaves(state))
    of_batch = [Kind(TOKENS if apart[path] else SAME) for path, _ in tree.flatten(batch)]
    kinds = _Reader(ways).run(own, program, [*of_params, *of_batch, *of_state])
    found = {}
    for (path, leaf), kind in zip(tree.flatten(shapes), kinds):
        is_count = path.startswith("state/") and (
            path.endswith("/total") or not jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
        if kind.form in (OTHER, TOKENS) or (kind.form == GROWN and not is_count):
            of_tokens = "has a value for each token; return their mean or their sum"
            why = kind.why or (of_tokens if kind.form == TOKENS else _MIXED)
            at = f"{kind.line}: " if kind.line else ""
            name = "" if path.partition("/")[2].split("/")[0] == "loss" else f"{path}: "
            raise Refused(
                f"{_begin(layout)}: {name}{at}{why}; pass check_context=False if zerojax.compare_context finds no difference"
            )
        if kind.form != OWN:
            found[path] = kind.power
    return found


def exact(powers: Mapping[str, int], ways: int, loss: Any, aux: Any, before: Any) -> tuple[Any, Any]:
    """Returns a loss and its aux of one device, multiplied so that `outputs` makes of them the values for whole sequences.

    Args:
      powers: as `powers` returns them.
      ways: the number of devices that have tokens of the same examples.
      loss, aux: of `outputs.with_aux`.
      before: the train state that the loss was called with.
    """

    def one(path: str, value: Any, old: Any = 0) -> Any:
        if isinstance(value, outputs.Mean):
            total, weight = (powers.get(f"{path}/{name}") for name in ("total", "weight"))
            if total is None or weight is None:
                return value
            return outputs.Mean(value.total * _factor(ways, total - weight), value.weight)
        is_sum = isinstance(value, outputs.Sum)
        power = powers.get(f"{path}/total" if is_sum else path)
        if power is None or power == is_sum:
            return value
        if is_sum:  # is added up over devices
            own = jnp.asarray(value.total - old)
            if not jnp.issubdtype(own.dtype, jnp.inexact):  # all devices have the same count
                return outputs.Sum(old + jnp.where(jax.lax.axis_index(mesh_lib.TOKENS) == 0, own, 0))
            return outputs.Sum(old + own * _factor(ways, power - 1))
        return value * _factor(ways, power) if jnp.issubdtype(jnp.result_type(value), jnp.inexact) else value

    def of_field(field: str, value: object) -> PyTree:
        old = dict(tree.flatten({field: getattr(before, field)}))
        return tree.map_with_path(
            lambda path, leaf: one(f"state/{path}", leaf, old[path]), {field: value}, is_leaf=outputs.is_total
        )[field]

    metrics = tree.map_with_path(
        lambda path, leaf: one(f"metrics/{path}", leaf), aux["metrics"], is_leaf=outputs.is_total
    )
    fields = {field: of_field(field, value) for field, value in aux.get("state", {}).items()}
    return one("metrics/loss", loss), {**aux, "metrics": metrics, **({"state": fields} if fields else {})}


def _factor(ways: int, power: int) -> float:
    return float(ways) ** power


def _begin(layout: inputs.Layout) -> str:
    return f"loss_fn: is another one where tokens are sharded over {mesh_lib.text(layout.mesh, mesh_lib.TOKENS)}"


_LOOPS = 10  # rounds after which the kinds that a loop carries no longer change
_MOVES = frozenset(
    "squeeze expand_dims transpose copy copy_p device_put optimization_barrier random_unwrap random_wrap".split()
)
_SUMS_AND_CASTS = frozenset("neg real imag reduce_precision".split()) | traces.MARKS
_ORDERED = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis"}
_ALONG = {**_ORDERED, "sort": "dimension", "split": "axis", "concatenate": "dimension", "top_k": "axis"}
_KEPT = _MOVES | _SUMS_AND_CASTS | traces.MOVES | {traces.CAST, "add", "add_any"}
_KEYS = frozenset("random_seed random_fold_in random_split random_clone random_gamma threefry2x32".split())
_OVER_DEVICES = frozenset(
    "psum psum_invariant pmax pmin all_gather all_gather_invariant all_to_all ppermute reduce_scatter psum_scatter axis_index "
    "pbroadcast pvary".split()
)


class _Reader:
    """Reads a trace with a device's tokens beside that with all of them."""

    def __init__(self, ways: int):
        self._ways, self._lines = ways, [""]

    def run(self, program: traces.Program, twin: traces.Program, kinds: Sequence[Kind]) -> list[Kind]:
        """Returns the kinds of a program's results, of those of its arguments."""
        (jaxpr, consts), (other, others) = traces.opened(program), traces.opened(twin)
        pairs = itertools.zip_longest(jaxpr.eqns, other.eqns)
        apart = [pair for pair in pairs if len({eqn and eqn.primitive for eqn in pair}) == 2]
        if apart:
            with self._at(next(eqn for eqn in apart[0] if eqn is not None)):
                return [self._other(_OTHERWISE)] * len(jaxpr.outvars)
        known: dict[Any, Kind] = dict(zip(jaxpr.invars, kinds))
        for var, const, of_twin in zip(jaxpr.constvars, consts, others):
            known[var] = self._constant(const, of_twin)

        def read(atom: Any, of_twin: Any) -> Kind:
            return known[atom] if traces.is_var(atom) else self._constant(atom.val, of_twin.val)

        for eqn, of_twin in zip(jaxpr.eqns, other.eqns):
            with self._at(eqn):
                given = [read(*pair) for pair in zip(eqn.invars, of_twin.invars)]
                known.update(zip(eqn.outvars, self._equation(eqn, of_twin, given)))
        return [read(*pair) for pair in zip(jaxpr.outvars, other.outvars)]

    @contextlib.contextmanager
    def _at(self, eqn: jex.JaxprEqn) -> Iterator[None]:
        self._lines.append(traces.line(eqn) or self._lines[-1])
        try:
            yield
        finally:
            self._lines.pop()

    def _other(self, why: str) -> Kind:
        return Kind(OTHER, why=why, line=self._lines[-1])

    def _constant(self, value: object, of_twin: traces.Atom) -> Kind:
        own, all_tokens = np.asarray(value), np.asarray(of_twin)
        if own.shape == all_tokens.shape and (own == all_tokens).all():
            return Kind(SAME, is_zero=not own.any())
        if own.shape and own.size and all_tokens.size and (own.flat[0] == own).all():
            return Kind(TOKENS) if (all_tokens == own.flat[0]).all() else self._other(_LENGTH)
        if not own.shape and own.dtype.kind in "iuf":
            for power in (1, -1, 2, -2):
                if math.isclose(float(all_tokens), float(own) * float(self._ways) ** power, rel_tol=1e-6):
                    return Kind(SAME, power)
            return self._other(_LENGTH)
        return self._other(_COUNTS)

    def _dims(self, atom: Any, of_twin: Any) -> list[int] | None:
        """Returns the dims of a value that count tokens; None if one is longer with all tokens, but not as many times."""
        pairs = [*zip(atom.aval.shape, of_twin.aval.shape)]
        apart = [dim for dim, (own, other) in enumerate(pairs) if own != other]
        return apart if all(pairs[dim][1] == self._ways * pairs[dim][0] for dim in apart) else None

    def _equation(self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if (inner := traces.called(eqn)) is not None:
            if name not in traces.CHECKPOINTS and eqn.params.get("name") == traces.EXCHANGE:
                return [self._exchanged(eqn, twin, kinds)] * count
            return self.run(inner, traces.called(twin), kinds)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, twin, kinds)
        if name in _OVER_DEVICES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            if set(mesh_lib.TOKENS) & set(axes if isinstance(axes, tuple) else (axes,)):
                return [Kind(OWN)] * count
            return [Kind(SAME)] * count if name == "axis_index" else kinds
        if any(kind.form == OWN for kind in kinds):
            return [Kind(OWN)] * count
        if (bad := next((kind for kind in kinds if kind.form == OTHER), None)) is not None:
            return [bad if bad.line else bad._replace(line=self._lines[-1])] * count  # a constant has no line
        made = [self._dims(var, of_twin) for var, of_twin in zip(eqn.outvars, twin.outvars)]
        if None in made:
            return [self._other(_NEIGHBOURS.format("a result that has not as many tokens"))] * count
        if any(kind.form == GROWN for kind in kinds) and name not in _KEPT:
            return [self._other(_OF_DEVICE)] * count
        if any(len(dims or ()) > 1 for dims in made):
            return [self._other(_ATTEND)] * count
        given = [self._dims(atom, of_twin) or [] for atom, of_twin in zip(eqn.invars, twin.invars)]
        case = _Case(eqn, kinds, given, [dims or [] for dims in made])
        return [self._result(name, case)] * count

    def _result(self, name: str, case: "_Case") -> Kind:
        """Returns the kind of an operation's results, none of whose arguments is OWN or OTHER."""
        if name == "random_bits":
            return Kind(TOKENS) if case.made[0] else self._other(_DRAWN)
        if name in ("mul", "div"):
            return self._product(case, -1 if name == "div" else 1)
        if name in ("add", "sub", "add_any"):
            return self._sum(case.kinds)
        if name == "select_n":
            pred, *cases = case.kinds
            if pred.form == LINEAR or pred.power:
                return self._other(_OF_DEVICE)
            if pred.form == TOKENS:
                cases = [Kind(TOKENS) if one == Kind(SAME) else one for one in cases]
            return self._sum(cases)
        if name in _SUMS_AND_CASTS or name == traces.CAST:
            (kind, *_), (atom, *_), (var, *_) = case.kinds, case.eqn.invars, case.eqn.outvars
            rounds = np.issubdtype(atom.aval.dtype, np.inexact) and not jnp.issubdtype(var.aval.dtype, np.inexact)
            return self._elementwise(case) if rounds and name == traces.CAST else kind
        if name in traces.ELEMENTWISE:
            return self._elementwise(case)
        if all(kind.form == SAME for kind in case.kinds) and not any(case.made):
            return case.kinds[0] if name in _MOVES or name in traces.MOVES else self._elementwise(case)
        if name in _MOVES or name == "reshape":
            return case.kinds[0]
        if name in traces.REDUCTIONS:
            return self._reduced(name, case)
        if name in _ALONG:
            return self._along(case, _ALONG[name])
        if name in _KEYS:
            return self._elementwise(case)
        if name.startswith("reduce_window") or name == "reduce_precision":
            return self._windows(case)
        if name == "scatter-add":
            return self._scatter_add(case)
        handler = getattr(self, f"_{name}", None)
        return self._other(_UNKNOWN.format(name)) if handler is None else handler(case)

    def _sum(self, kinds: Sequence[Kind]) -> Kind:
        """Returns the kind of a sum, or of one of some values."""
        own = [kind for kind in kinds if not kind.is_zero]
        if not own:
            return kinds[0]
        forms = {kind.form for kind in kinds}
        form = next((form for form in (GROWN, LINEAR, TOKENS) if form in forms), SAME)
        if TOKENS in forms and forms & {LINEAR, GROWN}:
            return self._other(_OF_DEVICE)
        added = [kind for kind in own if not kind.is_old]
        if (
            len({kind.power for kind in own}) > 1
            and form in (LINEAR, GROWN)
            and len({kind.power for kind in added}) == 1
        ):
            return Kind(GROWN, added[0].power)
        if len({kind.power for kind in own}) > 1:
            return self._other(_MIXED if LINEAR in forms else _LENGTH)
        return Kind(form, own[0].power, is_old=form == SAME and len(own) == 1 and own[0].is_old)

    def _product(self, case: "_Case", sign: int) -> Kind:
        first, second = case.kinds
        forms = [first.form, second.form]
        if LINEAR in forms and (TOKENS in forms or forms == [LINEAR, LINEAR] or (sign < 0 and second.form == LINEAR)):
            return self._other(_OF_DEVICE)
        if first.is_zero or (second.is_zero and sign > 0):
            return Kind(TOKENS if case.made[0] else SAME, is_zero=True)
        form = next((form for form in (LINEAR, TOKENS) if form in forms), SAME)
        return Kind(form, first.power + sign * second.power)

    def _elementwise(self, case: "_Case") -> Kind:
        """Returns the kind of a function of values one by one."""
        if any(kind.form == LINEAR for kind in case.kinds):
            return self._other(_OF_DEVICE)
        if any(kind.power for kind in case.kinds):
            return self._other(_LENGTH)
        return Kind(TOKENS) if any(kind.form == TOKENS for kind in case.kinds) else Kind(SAME)

    def _reduced(self, name: str, case: "_Case") -> Kind:
        (kind, *_), (dims, *_) = case.kinds, case.given
        if set(dims) & set(case.eqn.params["axes"]):
            if name != "reduce_sum":
                return self._other(_NEIGHBOURS.format(f"the {name.removeprefix('reduce_')} over tokens"))
            return Kind(LINEAR, kind.power + 1)
        return kind if name == "reduce_sum" else self._elementwise(case)

    def _along(self, case: "_Case", param: str) -> Kind:
        dim = case.eqn.params.get(param, len(case.eqn.invars[0].aval.shape) - 1)
        if any(dim in dims for dims in (*case.given, *case.made)):
            return self._other(_NEIGHBOURS.format(f"{case.eqn.primitive.name} along tokens"))
        if case.eqn.primitive.name in ("concatenate", "split"):
            return self._sum(case.kinds)
        return self._elementwise(case)

    def _broadcast_in_dim(self, case: "_Case") -> Kind:
        kind = case.kinds[0]
        if kind.form == LINEAR and case.made[0]:
            return self._other(_OF_DEVICE)
        return Kind(TOKENS, kind.power, is_zero=kind.is_zero) if case.made[0] else kind

    def _iota(self, case: "_Case") -> Kind:
        return self._other(_COUNTS) if case.eqn.params["dimension"] in case.made[0] else Kind(TOKENS)

    def _rev(self, case: "_Case") -> Kind:
        if set(case.given[0]) & set(case.eqn.params["dimensions"]):
            return self._other(_NEIGHBOURS.format("tokens in reverse"))
        return case.kinds[0]

    def _slice(self, case: "_Case") -> Kind:
        return self._cut(case, case.eqn.outvars[0].aval.shape)

    def _dynamic_slice(self, case: "_Case") -> Kind:
        _, *starts = case.kinds
        if any(start != Kind(SAME) and not start.is_zero for start in starts):
            return self._other(_NEIGHBOURS.format("a slice"))
        return self._cut(case, case.eqn.params["slice_sizes"])

    def _cut(self, case: "_Case", sizes: Sequence[int]) -> Kind:
        """Returns the kind of a slice: all tokens must be in it."""
        shape = case.eqn.invars[0].aval.shape
        if case.made[0] and not case.given[0]:
            return self._other(_COUNTS)
        if any(shape[dim] != sizes[dim] for dim in case.given[0]):
            return self._other(_NEIGHBOURS.format("a slice of tokens"))
        return case.kinds[0]

    def _dynamic_update_slice(self, case: "_Case") -> Kind:
        operand, update, *starts = case.kinds
        shapes = [atom.aval.shape for atom in case.eqn.invars[:2]]
        if any(shapes[0][dim] != shapes[1][dim] for dim in case.made[0]) or any(
            start != Kind(SAME) and not start.is_zero for start in starts
        ):
            return self._other(_NEIGHBOURS.format("a slice of tokens"))
        return self._sum([operand, update])

    def _pad(self, case: "_Case") -> Kind:
        if any(any(case.eqn.params["padding_config"][dim]) for dim in (*case.given[0], *case.made[0])):
            return self._other(_NEIGHBOURS.format("tokens with padding"))
        return self._sum(case.kinds)

    def _fft(self, case: "_Case") -> Kind:
        dims = len(case.eqn.invars[0].aval.shape)
        if any(dim >= dims - len(case.eqn.params["fft_lengths"]) for dim in case.given[0]):
            return self._other(_NEIGHBOURS.format("a Fourier transform over tokens"))
        return self._elementwise(case)

    def _dot_general(self, case: "_Case") -> Kind:
        contracted, batch = case.eqn.params["dimension_numbers"]
        forms, power = [kind.form for kind in case.kinds], sum(kind.power for kind in case.kinds)
        if LINEAR in forms:
            return (
                self._other(_OF_DEVICE) if forms != [LINEAR, SAME] and forms != [SAME, LINEAR] else Kind(LINEAR, power)
            )
        own = [set(dims) & set(sides) for dims, sides in zip(case.given, contracted)]
        if all(own):
            return Kind(LINEAR, power + 1)
        both = [set(dims) & set(sides) for dims, sides in zip(case.given, batch)]
        return self._other(_ATTEND) if any(own) or any(both) != all(both) else Kind(TOKENS, power)

    def _conv_general_dilated(self, case: "_Case") -> Kind:
        params, (lhs, rhs) = case.eqn.params, [atom.aval.shape for atom in case.eqn.invars]
        numbers = params["dimension_numbers"]
        if case.given[1] or any(kind.form == LINEAR for kind in case.kinds):
            return self._other(_OF_DEVICE)
        for dim in case.given[0]:
            place = numbers.lhs_spec.index(dim)
            if place == 0:
                continue
            window = place > 1 and (
                rhs[numbers.rhs_spec[place]],
                params["window_strides"][place - 2],
                tuple(params["padding"][place - 2]),
                params["lhs_dilation"][place - 2],
                params["rhs_dilation"][place - 2],
            )
            if not window or not _is_apart(lhs[dim], *window):
                return self._other(_NEIGHBOURS.format("a convolution over tokens"))
        return Kind(TOKENS, sum(kind.power for kind in case.kinds))

    def _windows(self, case: "_Case") -> Kind:
        names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
        rows = [*zip(*(case.eqn.params[name] for name in names))]
        shape = case.eqn.invars[0].aval.shape
        if not all(
            _is_apart(shape[dim], size, step, tuple(pad), *by)
            for dim in case.given[0]
            for size, step, pad, *by in [rows[dim]]
        ):
            return self._other(_NEIGHBOURS.format("a window over tokens"))
        return self._elementwise(case)

    def _gather(self, case: "_Case") -> Kind:
        numbers, sizes = case.eqn.params["dimension_numbers"], case.eqn.params["slice_sizes"]
        (operand, indices), (dims, of_indices) = case.kinds, case.given
        if indices.form == LINEAR or indices.power or (operand.form == LINEAR and indices.form != SAME):
            return self._other(_OF_DEVICE)
        shape = case.eqn.invars[0].aval.shape
        for dim in dims:
            if dim in numbers.operand_batching_dims:
                place = numbers.operand_batching_dims.index(dim)
                is_kept = numbers.start_indices_batching_dims[place] in of_indices
            else:
                is_kept = sizes[dim] == shape[dim] and not of_indices
            if not is_kept:
                return self._other(_NEIGHBOURS.format("tokens taken by number"))
        return operand._replace(form=TOKENS) if case.made[0] else operand

    def _scatter_add(self, case: "_Case") -> Kind:
        operand, _, updates = case.kinds
        if case.given[0] or not (case.given[1] or case.given[2]):
            return self._other(_UNKNOWN.format("scatter-add"))
        return self._sum([operand, Kind(LINEAR, updates.power + 1)])

    def _exchanged(self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, kinds: list[Kind]) -> Kind:
        """Returns the kind of what attention over all devices' tokens returns."""
        if (bad := next((kind for kind in kinds if kind.form in (OTHER, OWN)), None)) is not None:
            return bad
        if any(kind.form != TOKENS for kind in kinds[:3]):
            return self._other(
                "zerojax.attention gets what all devices have the same of; use jax.nn.dot_product_attention"
            )
        return Kind(TOKENS) if not any(kind.power or kind.form == LINEAR for kind in kinds) else self._other(_OF_DEVICE)

    def _scan(self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        params = eqn.params
        if params["length"] != twin.params["length"]:
            if (bad := next((kind for kind in kinds if kind.form in (OTHER, OWN)), None)) is not None:
                return [bad] * len(eqn.outvars)
            return [self._other(_NEIGHBOURS.format("a scan over tokens"))] * len(eqn.outvars)
        first, count = traces.scan_counts(eqn)
        last = first + count

        def body(carry: list[Kind]) -> list[Kind]:
            return self.run(params["jaxpr"], twin.params["jaxpr"], [*kinds[:first], *carry, *kinds[last:]])

        carry = self._carried(kinds[first:last], lambda carry: body(carry)[:count])
        return [*carry, *body(carry)[count:]]

    def _while(self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        both = of_cond + of_body

        def run(name: str, consts: list[Kind], carry: list[Kind]) -> list[Kind]:
            return self.run(eqn.params[name], twin.params[name], [*consts, *carry])

        carry = self._carried(kinds[both:], lambda carry: run("body_jaxpr", kinds[of_cond:both], carry))
        (again,) = run("cond_jaxpr", kinds[:of_cond], carry)
        return (
            carry if again == Kind(SAME) else [again if again.form == OTHER else self._other(_OF_DEVICE)] * len(carry)
        )

    def _carried(self, carry: list[Kind], step: Callable[[list[Kind]], list[Kind]]) -> list[Kind]:
        for _ in range(_LOOPS):
            after = [self._joined(pair) for pair in zip(carry, step(carry))]
            if after == carry:
                return carry
            carry = after
        return [self._other(_LENGTH)] * len(carry)

    def _cond(self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, kinds: list[Kind]) -> list[Kind]:
        pred, *given = kinds
        if pred != Kind(SAME):
            return [pred if pred.form in (OTHER, OWN) else self._other(_OF_DEVICE)] * len(eqn.outvars)
        branches = zip(eqn.params["branches"], twin.params["branches"])
        found = [self.run(own, of_twin, given) for own, of_twin in branches]
        return [self._joined(pair) for pair in zip(*found)]

    def _joined(self, kinds: Sequence[Kind]) -> Kind:
        for form in (OTHER, OWN):
            if (one := next((kind for kind in kinds if kind.form == form), None)) is not None:
                return one
        joined = self._sum(kinds)
        return joined if all(kind.is_zero for kind in kinds) else joined._replace(is_zero=False)


class _Case(NamedTuple):
    """An operation, the kinds of its arguments, and the dims that count tokens of these and of its results."""

    eqn: Any
    kinds: list[Kind]
    given: list[list[int]]
    made: list[list[int]]


def _is_apart(length: int, size: int, stride: int, padding: tuple[int, ...], base: int, dilation: int) -> bool:
    """Returns whether no two windows share a token, and none has another device's."""
    if size == 1:
        return stride == 1 and not any(padding) and base == 1
    return size == stride and not any(padding) and base == dilation == 1 and length % size == 0
