"""Balances the load of experts without a loss. This module moves the biases by which a mixture's experts are chosen, beside any optimizer.

    bias[e] += rate * sign(mean over experts of the load - load[e])          (arXiv:2408.15664, algorithm 1)

The load of an expert is how many rows chose it in a step. It arrives as the bias' gradient (`ops.experts.route`), times
`ops.experts.COUNT`, so all devices and passes add it up as they do gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax import tree
from zerojax.optim import one_pass as one_pass_lib
from zerojax.tree import PyTree

BIAS = "choice_bias"  # the name of such a weight
State = Any


def with_balance(inner: optax.GradientTransformation, rate: float) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that weights named `BIAS` move by `rate` towards a balanced load. It keeps a one-pass form, if there is one.

    Wrap what updates float32 weights: `with_master_weights(with_balance(tx, 1e-3))`.
    """
    whole: Any = inner if isinstance(inner, one_pass_lib.OnePass) else None
    inner = optax.with_extra_args_support(inner)

    def step(load: jax.Array) -> jax.Array:
        load = load.astype(jnp.float32)
        return rate * jnp.sign(jnp.mean(load) - load)

    def update(grads: PyTree, state: State, params: PyTree = None, **how: Any) -> tuple[Any, Any]:
        updates, state = inner.update(_others(grads), state, params, **how)
        return tree.map_with_path(lambda path, own, load: step(load) if is_bias(path) else own, updates, grads), state

    def apply(
        grads: PyTree, state: State, params: PyTree, *, finite: jax.Array | None = None, **how: Any
    ) -> tuple[Any, Any, Any]:
        new, state, copies = whole.apply(_others(grads), state, params, finite=finite, **how)

        def moved(path: str, own: jax.Array, old: jax.Array, load: jax.Array) -> jax.Array:
            if not is_bias(path):
                return own
            found = old + step(load)
            return (found if finite is None else jnp.where(finite, found, old)).astype(own.dtype)

        copies = copies if copies is None else tree.map_with_path(moved, copies, params, grads)
        return tree.map_with_path(moved, new, params, grads), state, copies

    return one_pass_lib.around(whole, inner.init, update, apply)


def is_bias(path: str) -> bool:
    """Returns whether a weight is a bias of a choice of experts."""
    return path.rpartition("/")[2] == BIAS


def _others(grads: PyTree) -> PyTree:
    """Returns gradients without loads, so that no moment remembers them."""
    return tree.map_with_path(lambda path, grad: jnp.zeros_like(grad) if is_bias(path) else grad, grads)
