"""Makes what a loss function returns equal on all devices. This module holds the rule for the loss, metrics and values of the state.

Each device and each pass computes the loss on its own examples. The mean of such means is the mean over the batch only if all have the same
weight, so a mean over a mask is returned as its two sums, which are added over devices and passes before the division. What leaves the step
is one value:

    Mean(total, weight)           sum of totals / sum of weights
    Sum(total)                    sum of totals
    Max(value)                    of metrics: the largest value
    floating, complex             the mean over devices (of metrics also over passes)
    integer, reads no example     the value for the whole batch: a step, a count of calls, the number of rows, a split random key
    integer, a sum over examples  the sum: a metric is added over devices and passes, in the state what is added to the old value is
    anything else                 refused, since no rule can be right

Nothing is looked at but types, unless an integer, a boolean, a random key or an array in the metrics is returned. Then `dependence` reads
the loss's traced program.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.sharded_batch import dependence

WAY_OUT = "return zerojax.Mean(total, weight) or zerojax.Sum(total), or a floating value, which is averaged"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean of weighted terms, as the two sums over the examples that the loss function sees.

    Return it as the loss, a metric or a value of the state. Over all devices and passes its value is sum of totals / sum of weights, and 0
    where the weights add up to 0. No gradient flows through `weight`.

    Attributes:
      total: float[...], the sum of weight * term.
      weight: the sum of the weights, such as the number of tokens that are not padding; of the shape of `total`, or a scalar.

    >>> loss = Mean(jnp.sum(mask * losses), jnp.sum(mask))
    """

    total: Any
    weight: Any


def weighted_mean(terms: jax.Array, weights: jax.Array) -> Mean:
    """Returns the mean of terms, whose weights have their shape."""
    return Mean(jnp.sum(terms * weights), jnp.sum(weights))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over the examples that the loss function sees: a loss, a metric or a value of the state; added over devices and passes.

    In the state it is the old value plus a sum, and what is added to the old value is summed.

    Attributes:
      total: a number or an array.

    >>> metrics = {"correct": Sum(jnp.sum(predicted == labels))}
    """

    total: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A metric that is the largest of the values over devices and passes.

    Attributes:
      value: float[], the largest of the examples that the loss function sees.
    """

    value: Any


Value = Mean | Sum | jax.Array  # of a loss
# Metrics of a step that a loss function may not return, but the loss itself.
_OWN = ("loss", "grad_norm", "clipped_norm", "loss_scale", "skipped_steps", "overflow_leaf", "is_exhausted")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Same:
    """A metric that is equal on all devices and in all passes, so the last one is taken."""

    value: Any


def with_aux(loss_fn: Callable[..., Any], scale: Callable[[Any], Any]) -> Callable[..., tuple[Any, dict]]:
    """Returns a loss function that always returns (scaled loss, aux); the unscaled loss is a metric. Both may be a `Mean` or a `Sum`.

    Raises:
      UserError: the loss function takes other arguments, or returned anything else, than make_train_step's docstring says.
    """
    try:
        taken = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a function of C may tell nothing
        taken = inspect.signature(lambda *_: None)
    try:
        taken.bind(None, None, None)
    except TypeError as error:
        raise UserError(
            f"loss_fn: is called as loss_fn(params, batch, state), and takes {taken}; give it these three arguments"
        ) from error

    def with_aux(params: PyTree, batch: PyTree, state: State) -> tuple[Any, dict]:
        with _axes_named():
            loss, aux = _read(loss_fn(params, batch, state), state)
        metrics = {**aux.get("metrics", {}), "loss": in_float32(loss)}
        loss = metrics["loss"]
        return times(loss, scale(state)), {**aux, "metrics": metrics}

    return with_aux


def terms(metrics: PyTree, before: State, program: Callable[[], dependence.TracedLoss], passes: int) -> PyTree:
    """Returns metrics of one of `passes` as terms that can be put together over passes and devices: floating arrays, `Mean`, `Sum`, `Max`,
    `Same`."""

    def term(path: str, leaf: Leaf) -> Leaf:
        name = f"metrics/{path}"
        if any(map(jnp.ndim, jax.tree.leaves(leaf))):
            dependence.refuse_rows(name, leaf, program())
        leaf = jax.tree.map(lambda part: without_gradient(jnp.asarray(part)), leaf)
        if is_term(leaf) or jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        kind = program().kind(name)
        if kind == dependence.SAME and not (passes > 1 and program().reads(name)):
            return Same(dependence.of_whole_batch(program(), name, before, leaf))
        dependence.refuse_repeated(name, kind, program())
        if kind == dependence.COUNT and jnp.issubdtype(leaf.dtype, jnp.integer):
            return Sum(leaf)
        raise UserError(
            f"loss_fn: returned {name}, {type_of(leaf)}, which differs between devices or passes and is no sum over examples; {WAY_OUT}"
        )

    return tree.map_with_path(term, metrics, is_leaf=is_term)


def values(metrics: PyTree) -> PyTree:
    """Returns the values of metrics given as `terms` of all devices."""

    def of_term(term: Leaf) -> Leaf:
        return term.value if isinstance(term, Max | Same) else value(term)

    return jax.tree.map(of_term, metrics, is_leaf=is_term)


def of_all_devices(metrics: PyTree) -> PyTree:
    """Returns metrics given as `terms`, added over devices, as `terms`; call it inside `jax.shard_map`."""

    def added_up(term: Leaf) -> Leaf:
        if isinstance(term, Same):
            return term
        if isinstance(term, Max):
            return Max(jax.lax.pmax(term.value, mesh_lib.SUMMED))
        return psum(term) if is_total(term) else jax.lax.pmean(term, mesh_lib.SUMMED)

    return jax.tree.map(added_up, metrics, is_leaf=is_term)


def loss_over_devices(loss: Value, ways: int) -> Value:
    """Returns a device's loss such that the sum over devices of what `objective` makes of it is the loss."""
    if isinstance(loss, Mean):
        weight = jax.lax.stop_gradient(jnp.asarray(loss.weight, jnp.float32))
        return Mean(loss.total, jax.lax.psum(weight, mesh_lib.SUMMED))
    return loss if isinstance(loss, Sum) else loss / ways


def is_total(node: PyTree) -> bool:
    """Returns whether a node is a `Mean` or a `Sum`."""
    return isinstance(node, (Mean, Sum))


def value(node: PyTree) -> Any:
    """Returns the value of a `Mean` or a `Sum` of which nothing more is to come, and other values unchanged."""
    if isinstance(node, Mean):
        return ratio(node.total, node.weight)
    return node.total if isinstance(node, Sum) else node


def ratio(total: Leaf, weight: Leaf) -> jax.Array:
    """Returns total / weight, and 0 where the weight is 0."""
    weight = jnp.asarray(weight, jnp.result_type(total, jnp.float32))
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def objective(loss: Value, passes: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the scalar to differentiate in one of several passes, and {"weight": its weight among them} if they differ.

    A `Mean` must have its weight over all devices already. Each pass is a mean, so that 16-bit gradients stay in range.
    """
    if isinstance(loss, Mean):
        weight = jax.lax.stop_gradient(jnp.asarray(loss.weight, jnp.float32))
        return ratio(loss.total, weight), {"weight": weight}
    return (loss.total * passes if isinstance(loss, Sum) else loss), {}


def in_float32(loss: Value) -> Value:
    """Returns a loss, which may be a `Mean` or a `Sum`, in float32.

    Raises:
      UserError: it is not a real scalar, or an array of integers, of which JAX has no gradient.
    """
    parts = [loss.total, *([loss.weight] if isinstance(loss, Mean) else [])] if isinstance(loss, Mean | Sum) else [loss]
    for part in parts:
        is_number = isinstance(part, (jax.Array, np.ndarray, np.generic, int, float))
        if not is_number or jnp.shape(part) or jnp.iscomplexobj(part):
            inside = f" in zerojax.{type(loss).__name__}" if isinstance(loss, Mean | Sum) else ""
            raise UserError(
                f"loss_fn: returned {type_of(part)}{inside} as the loss, and it must be a real scalar; take its mean"
            )
    if hasattr(parts[0], "dtype") and not jnp.issubdtype(parts[0].dtype, jnp.floating):
        raise UserError(
            f"loss_fn: returned {type_of(parts[0])} as the loss, which has no gradient; return a floating value"
        )
    if isinstance(loss, Mean | Sum):
        return dataclasses.replace(loss, total=jnp.asarray(loss.total, jnp.float32))
    return jnp.asarray(loss, jnp.float32)


def times(loss: Value, factor: jax.Array | float) -> Value:
    """Returns a loss, which may be a `Mean` or a `Sum`, times a number."""
    return dataclasses.replace(loss, total=loss.total * factor) if isinstance(loss, Mean | Sum) else loss * factor


@contextlib.contextmanager
def _axes_named() -> Iterator[None]:
    """Raises a UserError for an axis that does not exist where the loss runs."""
    try:
        yield
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise UserError(
            f"loss_fn: {str(error).split('. ')[0]}; the axes replica and data exist where each device runs the loss on its own examples: "
            "pass reduce_dtype=jnp.float32 and name these, or sum over no axis"
        ) from error


def _read(result: Any, state: State) -> tuple[Any, Mapping[str, Any]]:
    """Returns (loss, aux) from what a loss function returned."""
    form = "return loss, or (loss, {'metrics': {...}, 'state': {field: value}})"
    if isinstance(result, (tuple, list)) and len(result) != 2:
        raise UserError(f"loss_fn: returned {len(result)} values; {form}")
    loss, aux = result if isinstance(result, (tuple, list)) else (result, {})
    if not isinstance(aux, Mapping):
        raise UserError(f"loss_fn: returned {type_of(aux)} beside the loss, and needs a dict; {form}")
    if unknown := set(aux) - {"state", "metrics"}:
        raise UserError(
            f"loss_fn: returned {sorted(map(str, unknown))} beside the loss; allowed are 'state' and 'metrics': {form}"
        )
    for name, part in aux.items():
        if not isinstance(part, Mapping):
            raise UserError(f"loss_fn: returned {type_of(part)} as {name!r}, and it must be a dict; {form}")
    for name, metric in aux.get("metrics", {}).items():
        if name in _OWN and metric is not loss:
            raise UserError(f"loss_fn: returned metrics/{name}, a name of the step's own metrics; choose another name")
    for path, leaf in tree.flatten(aux):
        if callable(leaf) or isinstance(leaf, (str, bytes)):
            raise UserError(f"loss_fn: returned {path}, {type_of(leaf)}, and needs numbers; {form}")
    for field in aux.get("state", {}):
        if field == "params":
            raise UserError(
                "loss_fn: returned a value for state.params, which the optimizer updates; keep it in another field"
            )
        if state is None or not hasattr(state, field):
            raise UserError(
                f"loss_fn: returned a value for state.{field}, and the train state has no such field; declare `{field}: Any` in your "
                "TrainState, and create it with a value"
            )
    return loss, aux


def psum(values: PyTree) -> PyTree:
    """Returns values added over devices; of booleans, their number."""

    def total(leaf: Leaf) -> Leaf:
        leaf = jnp.asarray(leaf)
        return jax.lax.psum(leaf.astype(jnp.int32) if leaf.dtype == bool else leaf, mesh_lib.SUMMED)

    return jax.tree.map(total, values)


def without_gradient(leaf: Leaf) -> Leaf:
    """Returns a value through which no gradient flows."""
    is_inexact = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.lax.stop_gradient(leaf) if is_inexact else leaf


def is_term(node: PyTree) -> bool:
    """Returns whether a node of `terms` is one that is no array."""
    return is_total(node) or isinstance(node, Max | Same)


def type_of(value: Any) -> str:
    """Returns the type of a value as text: `int32[4]` for arrays."""
    return (
        f"{value.dtype}{list(value.shape)}"
        if hasattr(value, "dtype") and hasattr(value, "shape")
        else type(value).__name__
    )
