"""Says in which dtypes a run stores and computes. This module also keeps float32 master weights beside 16-bit ones.

Bytes a parameter with Adam and float32 moments, N-way `data` (ZeRO, arXiv:1910.02054, section 3.1, with K = 12 for master, mu and nu):

    precision    stage 0   stages 1, 2   stage 3
    fp32         12        4 + 8/N       12/N      the weights are their own master
    bf16, fp16   2 + 12    2 + 12/N      12/N      stage 3 keeps no 16-bit copy: it casts, then gathers
    bf16_sr      2 + 8     2 + 8/N       10/N      no master: 16-bit weights are updated, and rounded at random

Moments take 4 bytes fewer in bf16, and about 6 fewer in int8; `report.bytes_per_parameter` counts any of these.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.errors import UserError

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which dtypes a run computes and keeps its weights; updates are always computed in float32.

    Attributes:
      compute_dtype: of forward and backward arithmetic.
      weight_dtype: of the weights that updates are added to. In 16 bits most updates are smaller than half a last place, so they
        are rounded up or down at random, and add up in the mean (Gupta et al., arXiv:1502.02551).
      scales_loss: whether gradients need a loss scale to fit `compute_dtype`.
    """

    compute_dtype: Any
    weight_dtype: Any = jnp.float32
    scales_loss: bool = False

    @property
    def rounds_stochastically(self) -> bool:
        """Says whether updated weights are rounded at random."""
        return self.weight_dtype != jnp.float32

    def copy_dtype(self, *, splits_params: bool) -> Any:
        """Returns the dtype of a copy kept beside the weights for computing, or None.

        Where params are split, none is kept: what is gathered is cast first.
        """
        return None if splits_params or self.compute_dtype == self.weight_dtype else self.compute_dtype


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(compute_dtype=jnp.float32),
    "bf16": Precision(compute_dtype=jnp.bfloat16),
    "fp16": Precision(compute_dtype=jnp.float16, scales_loss=True),
    "bf16_sr": Precision(compute_dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16),
}


# The dtype in which gradients are summed over devices, by its name in a config.
DTYPES: dict[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


class OnePass(optax.GradientTransformationExtraArgs):
    """An optax transformation with a form that does all of a step's update while it reads memory once, beside optax's own.

    `apply(grads, state, params, *, scale, finite, shardings, copy_dtype=None) -> (params, state, copies)`; see `fused.fused_adamw`.
    """

    apply: Callable[..., tuple[Any, Any, Any]]


class MasterWeightsState(NamedTuple):
    """float32 weights and the state of the transformation that updates them."""

    master: PyTree
    inner: optax.OptState


def with_master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that it updates a float32 copy of 16-bit params, which then are that copy, rounded.

    The returned updates are float32 and bridge the stored params to the new master, so that `optax.apply_updates`, and with
    it any TrainState, ends on `master.astype(params.dtype)` up to a last-place tie (Micikevicius et al., arXiv:1710.03740, 3.1).
    Where `inner` has a one-pass form, so has the result.

    >>> tx = with_master_weights(optax.adamw(1e-3))
    """
    apply_inner: Any = inner.apply if isinstance(inner, OnePass) else None
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> MasterWeightsState:
        # A copy, never an alias: state and params are donated as separate buffers.
        master = jax.tree.map(lambda p: jnp.array(p, dtype=_widened(p.dtype), copy=True), params)
        return MasterWeightsState(master, inner.init(master))

    def update(
        grads: PyTree, state: MasterWeightsState, params: PyTree, **extra: Any
    ) -> tuple[PyTree, MasterWeightsState]:
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, state.master)
        updates, inner_state = inner.update(grads, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        bridge = jax.tree.map(lambda m, p: m - p.astype(m.dtype), master, params)
        return bridge, MasterWeightsState(master, inner_state)

    def apply(grads: PyTree, state: MasterWeightsState, params: PyTree, **how: Any) -> tuple[PyTree, Any, None]:
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
        copy_dtype = dtypes.pop() if len(dtypes) == 1 else None
        master, inner_state, copies = apply_inner(grads, state.inner, state.master, copy_dtype=copy_dtype, **how)
        if copies is None:
            copies = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        return copies, MasterWeightsState(master, inner_state), None

    if apply_inner is None:
        return optax.GradientTransformationExtraArgs(init, update)
    one_pass = OnePass(init, update)
    one_pass.apply = apply
    return one_pass


def to_logical(state: PyTree) -> PyTree:
    """Returns a TrainState without its 16-bit copy: params are the master weights. Checkpoints store this form.

    The form is the same for every stage and precision, so that each restores into any other; only its dtypes differ, and
    are cast on the way.
    """
    if not isinstance(state.opt_state, MasterWeightsState):
        return state
    params = jax.tree.map(_master_of, state.opt_state.master, state.params, is_leaf=_is_frozen)
    return state.replace(params=params, opt_state=state.opt_state.inner)


def from_logical(logical: PyTree, copy_dtype: Any, like: PyTree = None) -> PyTree:
    """Undoes `to_logical`: params become a copy of the master weights in `copy_dtype`; None keeps no copy.

    Args:
      logical: what `to_logical` returned.
      copy_dtype: the dtype of the copy.
      like: a state of the wanted form, whose frozen weights have no master weights; None: none are frozen.
    """
    if copy_dtype is None:
        return logical
    master = logical.params
    if like is not None:
        master = jax.tree.map(
            lambda own, leaf: own if _is_frozen(own) else leaf, like.opt_state.master, master, is_leaf=_is_frozen
        )
    params = cast_floating(logical.params, copy_dtype)
    return logical.replace(params=params, opt_state=MasterWeightsState(master, logical.opt_state))


def _master_of(master: Any, param: Any) -> Any:
    return param if _is_frozen(master) else master


def _is_frozen(node: Any) -> bool:
    """Says whether a node of master weights stands for a frozen weight, which has none."""
    return isinstance(node, optax.MaskedNode)


def floating(name: str, dtype: Any) -> Any:
    """Returns the dtype of an argument, floating and of 16 bits or more; None stays None.

    Raises:
      UserError: it is another; the line names the argument.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise UserError(f"{name}: must be a floating dtype of at least 16 bits, such as jnp.bfloat16, and is {dtype!r}")
    return found


def cast_floating(values: PyTree, dtype: Any) -> PyTree:
    """Casts floating leaves to `dtype`; None and other leaves pass through."""

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, values)


def at_least_float32(dtype: Any) -> Any:
    """Returns a dtype that sums may be made in: the same, or float32 where it holds less."""
    return _widened(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def _widened(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype
