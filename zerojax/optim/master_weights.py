"""Keeps float32 master weights beside 16-bit params. This module wraps any optax transformation so that it updates them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax import precision
from zerojax.optim import one_pass

PyTree = Any


class MasterWeightsState(NamedTuple):
    """float32 weights and the state of the transformation that updates them."""

    master: PyTree
    inner: optax.OptState


def with_master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that it updates a float32 copy of 16-bit params, which become that copy, rounded.

    The returned updates are float32 differences between the new master and the stored params. `optax.apply_updates`, and so any
    TrainState, then returns `master.astype(params.dtype)` up to a last-place tie (Micikevicius et al., arXiv:1710.03740, 3.1). A step of
    `make_train_step` returns exactly that.
    If `inner` has a one-pass form, the result has one too.

    >>> tx = with_master_weights(optax.adamw(1e-3))
    """
    whole: Any = inner if isinstance(inner, one_pass.OnePass) else None
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> MasterWeightsState:
        # A copy, never an alias: state and params are donated as separate buffers.
        master = jax.tree.map(lambda p: jnp.array(p, dtype=precision.widened(p.dtype), copy=True), params)
        return MasterWeightsState(master, inner.init(master))

    def update(
        grads: PyTree, state: MasterWeightsState, params: PyTree, **extra: Any
    ) -> tuple[PyTree, MasterWeightsState]:
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, state.master)
        updates, inner_state = inner.update(grads, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        difference = jax.tree.map(lambda m, p: m - p.astype(m.dtype), master, params)
        return difference, MasterWeightsState(master, inner_state)

    def apply(grads: PyTree, state: MasterWeightsState, params: PyTree, **how: Any) -> tuple[PyTree, Any, None]:
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
        copy_dtype = dtypes.pop() if len(dtypes) == 1 else None
        master, inner_state, copies = whole.apply(grads, state.inner, state.master, copy_dtype=copy_dtype, **how)
        if copies is None:
            copies = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        return copies, MasterWeightsState(master, inner_state), None

    return one_pass.around(whole, init, update, apply)
