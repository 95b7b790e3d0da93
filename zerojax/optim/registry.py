"""Optimizers by name. This module maps names to optax, and to `fused` where stochastic rounding is needed."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from zerojax import errors, kinds
from zerojax.errors import UserError
from zerojax.optim import fused, muon, schedules
from zerojax.optim import one_pass as one_pass_lib
from zerojax.train_state import State
from zerojax.tree import PyTree

# config.optimizer.weight_decay_on -> the mask of the leaves that take weight decay
DECAYS: dict[str, Callable[[Any], Any] | None] = {"matrices": kinds.decayed, "all": None}

# name -> f(learning rate or schedule, b1, b2, eps, weight decay, its mask). A mask costs a tree walk at trace time only.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": lambda lr, b1, b2, eps, wd, mask: optax.adam(lr, b1, b2, eps),
    "adamw": lambda lr, b1, b2, eps, wd, mask: optax.adamw(lr, b1, b2, eps, weight_decay=wd, mask=mask),
    "adafactor": lambda lr, b1, b2, eps, wd, mask: optax.adafactor(
        lr, weight_decay_rate=wd or None, weight_decay_mask=mask
    ),
    "lamb": lambda lr, b1, b2, eps, wd, mask: optax.lamb(lr, b1, b2, eps, weight_decay=wd, mask=mask),
    "lion": lambda lr, b1, b2, eps, wd, mask: optax.lion(lr, b1, b2, weight_decay=wd, mask=mask),
    "sgd": lambda lr, b1, b2, eps, wd, mask: optax.sgd(lr, momentum=b1 or None),
    "muon": lambda lr, b1, b2, eps, wd, mask, momentum, **own: muon.muon(
        lr, momentum, wd, b1=b1, b2=b2, eps=eps, mask=mask, **own
    ),
}
OF_MUON = ("momentum", "adamw_on")
# name -> the arguments that it reads, beside the learning rate
READS: dict[str, tuple[str, ...]] = {
    "adam": ("b1", "b2", "eps"),
    "adamw": ("b1", "b2", "eps", "weight_decay"),
    "adafactor": ("weight_decay",),
    "lamb": ("b1", "b2", "eps", "weight_decay"),
    "lion": ("b1", "b2", "weight_decay"),
    "sgd": ("b1",),
    "muon": ("b1", "b2", "eps", "weight_decay", *OF_MUON),
}
OWN_DECAY = 0.1  # of an optimizer that has weight decay, if none is given


def own_weight_decay(name: str) -> float:
    """Returns the weight decay of an optimizer if none is given: 0 for one that has none."""
    return OWN_DECAY if "weight_decay" in READS[name] else 0.0


# The same with moments in 16 or 8 bits, and with stochastically rounded 16-bit weights.
FUSED: dict[str, Callable[..., Any]] = {
    "adam": lambda lr, b1, b2, eps, wd, mask, **how: fused.fused_adamw(lr, b1, b2, eps, 0.0, **how),
    "adamw": lambda lr, b1, b2, eps, wd, mask, **how: fused.fused_adamw(lr, b1, b2, eps, wd, mask=mask, **how),
    "lion": lambda lr, b1, b2, eps, wd, mask, **how: fused.fused_lion(lr, b1, b2, wd, mask=mask, **how),
}


def make_optimizer(
    optimizer: str,
    learning_rate: float | schedules.Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    moments: str = "fp32",
    rounds_weights: bool = False,
    weight_decay_on: str = "matrices",
    momentum: float = 0.95,
    adamw_on: str = muon.ADAMW,
    in_float32: bool = False,
) -> optax.GradientTransformation:
    """Returns the optax transformation of that name.

    Args:
      optimizer: a key of OPTIMIZERS.
      learning_rate: a number, or a schedule: f(steps taken before).
      b1, b2, eps, weight_decay: of the optimizer; those that READS does not list for it are ignored.
      moments: how moments are stored: "fp32", "bf16" or "int8" (see `fused`); the last two are rounded stochastically.
      rounds_weights: whether weights are stored in bf16 and rounded stochastically.
      momentum, adamw_on: of `muon.muon`, whose `dtype` is float32 with `in_float32`, and bfloat16 otherwise.
      weight_decay_on: the weights that take weight decay: "matrices" (`kinds.decayed`: all but biases, norms and vectors) or "all".

    Raises:
      UserError: the name is unknown; the optimizer has no weight decay; or it cannot round 16-bit weights or moments.
    """
    errors.one_of("optimizer", optimizer, OPTIMIZERS)
    if weight_decay and "weight_decay" not in READS[optimizer]:
        raise UserError(
            f"weight_decay: `optimizer={optimizer}` applies none, and it is {weight_decay}; set `weight_decay=0`, or use adamw"
        )
    mask = DECAYS[weight_decay_on]
    own: dict[str, Any] = {"momentum": momentum, "adamw_on": adamw_on, "dtype": "float32" if in_float32 else "bfloat16"}
    own = own if optimizer == "muon" else {}
    plain = OPTIMIZERS[optimizer](learning_rate, b1, b2, eps, weight_decay, mask, **own)
    if moments == "fp32" and not rounds_weights:
        return plain
    if optimizer not in FUSED:
        needs = f"moments: {moments} needs" if moments != "fp32" else "rounds_weights: stochastic rounding needs"
        raise UserError(f"{needs} an optimizer among {', '.join(FUSED)}, and `optimizer` is {optimizer!r}")
    rounding = FUSED[optimizer](
        learning_rate, b1, b2, eps, weight_decay, mask, moments=moments, stochastic_rounding=True
    )
    return _with_state_of(plain, rounding)


def _with_state_of(plain: optax.GradientTransformation, one_pass: one_pass_lib.OnePass) -> one_pass_lib.OnePass:
    """Returns `one_pass` with the state tree of `plain`, so that a checkpoint of either restores into the other."""
    kinds = (optax.ScaleByAdamState, optax.ScaleByLionState)

    def is_part(node: PyTree) -> bool:
        return isinstance(node, (*kinds, optax.ScaleByScheduleState))

    def find(state: State) -> Any:
        return next(node for node in jax.tree.leaves(state, is_leaf=is_part) if isinstance(node, kinds))

    def put(state: State, inner: PyTree) -> Any:
        def replace(node: PyTree) -> Any:
            return inner if isinstance(node, kinds) else node._replace(count=inner.count) if is_part(node) else node

        return jax.tree.map(replace, state, is_leaf=is_part)

    def update(grads: PyTree, state: State, params: PyTree = None, **how: Any) -> tuple[Any, Any]:
        updates, inner = one_pass.update(grads, find(state), params, **how)
        return updates, put(state, inner)

    def apply(grads: PyTree, state: State, params: PyTree, **how: Any) -> tuple[Any, Any, Any]:
        params, inner, copies = one_pass.apply(grads, find(state), params, **how)
        return params, put(state, inner), copies

    result = one_pass_lib.OnePass(lambda params: put(plain.init(params), one_pass.init(params)), update)
    result.apply, result.kinds = apply, one_pass.kinds
    return result
