"""Optimizers by name. This module maps names to optax, and to `fused` where stochastic rounding is needed."""

import functools
import math
from collections.abc import Callable, Mapping
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
MOST_RATE = 100.0  # a factor of a learning rate
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
    rates: str = "",
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
      rates: factors of the learning rate by kinds of weights; see `factors_of`.

    Raises:
      UserError: the name is unknown; the optimizer has no weight decay; it cannot round 16-bit weights or moments; or a rate is none.
    """
    errors.one_of("optimizer", optimizer, OPTIMIZERS)
    if weight_decay and "weight_decay" not in READS[optimizer]:
        raise UserError(
            f"weight_decay: `optimizer={optimizer}` applies none, and it is {weight_decay}; set `weight_decay=0`, or use adamw"
        )
    mask, factors = DECAYS[weight_decay_on], factors_of(rates)
    by_leaf = functools.partial(_factors, factors) if factors else None
    own: dict[str, Any] = {"momentum": momentum, "adamw_on": adamw_on, "dtype": "float32" if in_float32 else "bfloat16"}
    own = {**own, "rates": by_leaf} if optimizer == "muon" else {}
    plain = OPTIMIZERS[optimizer](learning_rate, b1, b2, eps, weight_decay, mask, **own)
    plain = _with_rates(plain, by_leaf) if by_leaf and optimizer != "muon" else plain
    if moments == "fp32" and not rounds_weights:
        return plain
    if optimizer not in FUSED:
        needs = f"moments: {moments} needs" if moments != "fp32" else "rounds_weights: stochastic rounding needs"
        raise UserError(f"{needs} an optimizer among {', '.join(FUSED)}, and `optimizer` is {optimizer!r}")
    rounding = FUSED[optimizer](
        learning_rate, b1, b2, eps, weight_decay, mask, rates=by_leaf, moments=moments, stochastic_rounding=True
    )
    return _with_state_of(plain, rounding)


def factors_of(rates: str) -> dict[str, float]:
    """Returns {kind of weights: what multiplies its learning rate}.

    Raises:
      UserError: the text has another form, or a kind is unknown.

    >>> factors_of("embedding=0.1,head=0.5")
    {'embedding': 0.1, 'head': 0.5}
    """
    found: dict[str, float] = {}
    known = [kind for kind, *_ in kinds.KINDS]
    for part in filter(None, rates.split(",")):
        kind, _, number = part.partition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if kind.strip() not in known or not 0 <= factor <= MOST_RATE:
            raise UserError(
                f"rates: {part!r} is no kind of weights and a factor from 0 to {MOST_RATE:g}; write 'embedding=0.1', with kinds among "
                f"{', '.join(known)}"
            )
        found[kind.strip()] = factor
    return found


def _factors(factors: Mapping[str, float], params: PyTree) -> PyTree:
    return jax.tree.map(lambda kind: factors.get(kind, 1.0), kinds.weight_kinds(params))


def _with_rates(
    inner: optax.GradientTransformation, by_leaf: Callable[[PyTree], PyTree]
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose updates are multiplied by leaf, with the same state."""
    inner = optax.with_extra_args_support(inner)

    def update(grads: PyTree, state: State, params: PyTree = None, **how: Any) -> tuple[Any, Any]:
        updates, state = inner.update(grads, state, params, **how)
        return jax.tree.map(lambda own, factor: own if factor == 1 else factor * own, updates, by_leaf(updates)), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


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
