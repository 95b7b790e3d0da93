"""Gradient accumulation. This module runs several forward and backward passes and returns their mean.

Sums are float32, or bf16 to halve their memory. Each new sum in bf16 is then rounded up or down at random, so that its expected value is
exact: rounded to nearest, a small gradient would leave a large sum as it was.
"""

import contextlib
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import precision, tree
from zerojax.errors import UserError
from zerojax.optim import rounded
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.sharded_batch import keys, outputs
from zerojax.zero.weights import placement

_NO_KEYS: keys.Paths = ((), ())
NOWHERE: Mapping[str, rounded.Place] = types.MappingProxyType({})


def checked_dtype(dtype: DTypeLike | None, passes: int) -> bool:
    """Returns whether `accum_dtype` is bf16. Warns where a step of one pass adds up nothing.

    Raises:
      UserError: it is neither None, float32 nor bfloat16.
    """
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except (TypeError, ValueError):  # ValueError: a text that is not UTF-8
        name = repr(dtype)
    if name not in (None, "float32", "bfloat16"):
        raise UserError(f"accum_dtype: must be float32 or bfloat16, and is {name}; pass jnp.bfloat16, or omit it")
    in_16_bits = name == "bfloat16"
    if in_16_bits and passes == 1:
        warnings.warn("accum_dtype: has no effect, because a step of one pass adds up nothing; omit it", stacklevel=3)
    return in_16_bits


def value_and_grad(
    loss_fn: Callable[..., Any],
    passes: int,
    own_keys: keys.Paths = _NO_KEYS,
    *,
    in_16_bits: bool = False,
    device: jax.Array | int = 0,
    one_pass: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns f(params, batch, *args) -> ((loss, aux), grads), the mean over `passes` micro-batches.

    Args:
      loss_fn: `loss_fn(params, batch, *args) -> (loss, aux)` of `outputs.objective`: passes count alike unless `aux` has a "weight".
      passes: the number of micro-batches, the first dim of the batch's leaves.
      own_keys: the paths of random keys in the state, and in the batch, into which the number of the pass is folded.
      in_16_bits: whether the sums of gradients are bf16.
      device: the number of this device, where the arrays are its own shards.
      one_pass: `jax.value_and_grad` of `loss_fn`, or what renews more of `aux["state"]`.

    Gradients add up in float32 or wider (see `in_16_bits`), with the sharding that each pass returns: a sharded gradient stays sharded.
    Each pass sees the `aux["state"]` of the one before, and the last is returned. The rest of `aux`, such as `metrics`, is that of
    `outputs.terms`.
    """
    one_pass = one_pass or jax.value_and_grad(loss_fn, has_aux=True)

    def accumulated(params: PyTree, batch: PyTree, state: State) -> PyTree:
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        loss, aux = jax.eval_shape(loss_fn, params, first, state)  # gradients have the types of the params
        fields = {name: getattr(state, name) for name in aux.pop("state", {})}
        sums = (*jax.tree.map(_zeros, (loss, aux)), zeros(params, in_16_bits=in_16_bits))

        def add(carry: PyTree, numbered: PyTree) -> Any:
            (loss_sum, aux_sum, grad_sum), fields = carry
            number, micro_batch = numbered
            before = state.replace(**fields) if fields else state
            with keys_of_pass(own_keys, fields, number):
                (loss, aux), grads = one_pass(params, *of_pass(micro_batch, before, own_keys, fields, number))
            fields, weight = aux.pop("state", {}), aux.get("weight")
            loss_sum += loss if weight is None else weight * loss
            seed = rounded.seed(getattr(state, "step", 0), number, device) if in_16_bits else None
            return ((loss_sum, added_terms(aux_sum, aux), added(grad_sum, grads, weight, seed)), fields), None

        (sums, fields), _ = jax.lax.scan(add, (sums, fields), (jnp.arange(passes), batch))
        loss, aux, grads = sums
        count = aux.pop("weight", passes)
        return (_over(loss, count), {**divided_terms(aux, passes), "state": fields}), averaged(grads, count)

    return accumulated


def of_pass(
    batch: PyTree, state: State, own_keys: keys.Paths, renewed: Collection[str], number: jax.Array
) -> tuple[Any, Any]:
    """Returns the batch and the state of one of several passes, with its number folded into random keys.

    Args:
      batch, state: of the pass.
      own_keys: see `value_and_grad`.
      renewed: fields of the state that the loss returns, and so renews the keys of.
      number: int32[], of the pass.
    """
    state_keys = [path for path in own_keys[0] if path.split("/")[0] not in renewed]
    return keys.fold(batch, own_keys[1], number), keys.fold(state, state_keys, number)


def keys_of_pass(
    own_keys: keys.Paths, renewed: Collection[str], number: jax.Array
) -> contextlib.AbstractContextManager[None]:
    """Folds the number of a pass into the keys that Flax draws with, unless the loss renews random keys of the state itself.

    A loss that splits the state's key and returns the rest has other keys in each pass already.
    """
    renews = any(path.split("/")[0] in renewed for path in own_keys[0])
    return contextlib.nullcontext() if renews else keys.folded_in_flax(number)


def zeros(grads: PyTree, *, in_16_bits: bool = False) -> PyTree:
    """Returns sums of gradients before the first pass."""

    def zero(path: str, leaf: Leaf) -> jax.Array:
        is_halved = in_16_bits and leaf.dtype in (jnp.float32, jnp.bfloat16) and not placement.is_overwritten(path)
        return jnp.zeros(leaf.shape, jnp.bfloat16) if is_halved else _zeros(leaf)

    return tree.map_with_path(zero, grads)


def added(
    sums: PyTree,
    grads: PyTree,
    weight: jax.Array | None,
    seed: jax.Array | None = None,
    numbers: jax.Array | Sequence[int] | None = None,
    places: Mapping[str, rounded.Place] = NOWHERE,
) -> PyTree:
    """Returns the sums of gradients with those of one more pass.

    Args:
      sums: from `zeros`, or of the passes before.
      grads: of the pass.
      weight: what they are multiplied by; None: passes count alike.
      seed: of the random bits that sums in bf16 are rounded with; None returns them in float32.
      numbers: uint32 of each leaf, which tells its random bits from those of others; None counts the leaves.
      places: where leaves that are shards are in their arrays, whose random bits they then have, by path.
    """
    paths = [path for path, _ in tree.flatten(sums)]
    order = dict(zip(paths, range(len(paths)) if numbers is None else numbers))

    def add(path: str, total: jax.Array, grad: jax.Array) -> jax.Array:
        if placement.is_overwritten(path):
            return jnp.maximum(total, grad)
        exact = total.astype(precision.at_least_float32(total.dtype))
        exact += grad if weight is None else weight.astype(exact.dtype) * grad
        if total.dtype != jnp.bfloat16 or seed is None:
            return exact
        return rounded.to_bfloat16(exact, rounded.seed(seed, order[path]), places.get(path))

    return tree.map_with_path(add, sums, grads)


def averaged(sums: PyTree, count: jax.Array | int) -> PyTree:
    """Returns the gradients of a step from their sums over passes; `count` is the number of passes, or the sum of their weights."""
    return tree.map_with_path(
        lambda path, total: total if placement.is_overwritten(path) else _over(total, count), sums
    )


def added_terms(sums: PyTree, new: PyTree) -> PyTree:
    """Returns the sum of two passes' `outputs.terms`."""

    def added(total: Any, term: Any) -> Any:
        if isinstance(term, outputs.Same):
            return term
        return jax.tree.map(jnp.maximum if isinstance(term, outputs.Max) else jnp.add, total, term)

    return jax.tree.map(added, sums, new, is_leaf=outputs.is_term)


def divided_terms(sums: PyTree, passes: int) -> PyTree:
    """Returns the `outputs.terms` of a step from their sum over passes: floating metrics are averaged."""
    return jax.tree.map(
        lambda total: total if outputs.is_term(total) else total / passes, sums, is_leaf=outputs.is_term
    )


def _over(total: jax.Array, count: jax.Array | int) -> jax.Array:
    total = total.astype(precision.at_least_float32(total.dtype)) if jnp.issubdtype(total.dtype, jnp.inexact) else total
    return total / count if isinstance(count, int) else outputs.ratio(total, count).astype(total.dtype)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jnp.zeros(leaf.shape, precision.at_least_float32(leaf.dtype) if is_inexact else leaf.dtype)
