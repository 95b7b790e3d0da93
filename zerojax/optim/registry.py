"""Optimizers by name. This module makes those of optax, and of `fused` where stochastic rounding is needed, each with its own fields."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import optax

from zerojax import errors, kinds
from zerojax.errors import UserError
from zerojax.optim import fused, muon, schedules
from zerojax.optim import one_pass as one_pass_lib
from zerojax.train_state import State
from zerojax.tree import PyTree

Rate = float | schedules.Schedule  # of learning
Mask = Callable[[Any], Any] | None  # of the leaves that take weight decay; it costs a tree walk at trace time only
DECAYS: dict[str, Mask] = {"matrices": kinds.decayed, "all": None}  # by config.optimizer.weight_decay_on
MOST_RATE = 100.0  # a factor of a learning rate
OWN_DECAY = 0.1  # of an optimizer that has weight decay, if none is given


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer. Its fields are what it reads beside the learning rate, and have the names of settings.

    One with a method `fused`, which returns a `OnePass`, takes moments in 16 or 8 bits, and weights of 16 bits, rounded stochastically.
    """

    takes_rates: ClassVar[bool] = False  # whether `plain` reads its `rates`

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        """Returns it with moments in float32. `how` is what multiplies the rate of each leaf (`rates`), and the `dtype` of its matmuls."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    b1: float
    b2: float
    eps: float

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        return optax.adam(rate, self.b1, self.b2, self.eps)

    def fused(self, rate: Rate, mask: Mask, **how: Any) -> one_pass_lib.OnePass:
        return fused.fused_adamw(rate, self.b1, self.b2, self.eps, 0.0, **how)


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    weight_decay: float = OWN_DECAY

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        return optax.adamw(rate, **vars(self), mask=mask)

    def fused(self, rate: Rate, mask: Mask, **how: Any) -> one_pass_lib.OnePass:
        return fused.fused_adamw(rate, **vars(self), mask=mask, **how)


@dataclasses.dataclass(frozen=True)
class Adafactor(Optimizer):
    weight_decay: float = OWN_DECAY

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        return optax.adafactor(rate, weight_decay_rate=self.weight_decay or None, weight_decay_mask=mask)


@dataclasses.dataclass(frozen=True)
class Lamb(Optimizer):
    b1: float
    b2: float
    eps: float
    weight_decay: float = OWN_DECAY

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        return optax.lamb(rate, **vars(self), mask=mask)


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    b1: float
    b2: float
    weight_decay: float = OWN_DECAY

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        return optax.lion(rate, **vars(self), mask=mask)

    def fused(self, rate: Rate, mask: Mask, **how: Any) -> one_pass_lib.OnePass:
        return fused.fused_lion(rate, **vars(self), mask=mask, **how)


@dataclasses.dataclass(frozen=True)
class Sgd(Optimizer):
    b1: float

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        return optax.sgd(rate, momentum=self.b1 or None)


@dataclasses.dataclass(frozen=True)
class Muon(Optimizer):
    b1: float
    b2: float
    eps: float
    weight_decay: float = OWN_DECAY
    momentum: float = 0.95
    adamw_on: str = ""  # "": `muon.ADAMW`
    takes_rates = True

    def plain(self, rate: Rate, mask: Mask, **how: Any) -> optax.GradientTransformation:
        own = {**vars(self), "adamw_on": self.adamw_on or muon.ADAMW}
        return muon.muon(rate, **own, mask=mask, **how)


_KNOWN: tuple[type[Optimizer], ...] = (Adam, AdamW, Adafactor, Lamb, Lion, Sgd, Muon)
OPTIMIZERS = {own.__name__.lower(): own for own in _KNOWN}
FUSED = tuple(name for name, own in OPTIMIZERS.items() if hasattr(own, "fused"))
# name -> what it reads beside the learning rate
READS = {name: tuple(field.name for field in dataclasses.fields(own)) for name, own in OPTIMIZERS.items()}
READ_BY_SOME = frozenset(itertools.chain(*READS.values()))


def own_weight_decay(name: str) -> float:
    """Returns the weight decay of an optimizer if none is given: 0 for one that has none."""
    return getattr(OPTIMIZERS[name], "weight_decay", 0.0)


def make_optimizer(
    optimizer: str,
    learning_rate: Rate,
    *,
    moments: str = "fp32",
    rounds_weights: bool = False,
    weight_decay_on: str = "matrices",
    rates: str = "",
    in_float32: bool = False,
    **fields: Any,
) -> optax.GradientTransformation:
    """Returns the optax transformation of that name.

    Args:
      optimizer: a key of OPTIMIZERS.
      learning_rate: a number, or a schedule: f(steps taken before).
      moments: how moments are stored: "fp32", "bf16" or "int8" (see `fused`); the last two are rounded stochastically.
      rounds_weights: whether weights are stored in bf16 and rounded stochastically.
      weight_decay_on: the weights that take weight decay: "matrices" (`kinds.decayed`: all but biases, norms and vectors) or "all".
      rates: factors of the learning rate by kinds of weights; see `factors_of`.
      in_float32: whether Muon's matmuls are in float32, and not in bfloat16.
      **fields: b1, b2, eps, weight_decay and others, of some optimizer; those that this one does not read are ignored.

    Raises:
      UserError: the name is unknown; the optimizer has no weight decay; it cannot round 16-bit weights or moments; or a rate is none.
    """
    errors.one_of("optimizer", optimizer, OPTIMIZERS)
    if odd := fields.keys() - READ_BY_SOME:
        raise TypeError(f"make_optimizer() got an unexpected keyword argument {min(odd)!r}")
    own = {name: value for name, value in fields.items() if name in READS[optimizer]}
    if fields.get("weight_decay") and "weight_decay" not in own:
        raise UserError(
            f"weight_decay: `optimizer={optimizer}` applies none, and it is {fields['weight_decay']}; set `weight_decay=0`, or use adamw"
        )
    chosen, factors = OPTIMIZERS[optimizer](**own), factors_of(rates)

    def by_leaf(params: PyTree) -> PyTree:
        return jax.tree.map(lambda kind: factors.get(kind, 1.0), kinds.weight_kinds(params))

    mask, rates_of = DECAYS[weight_decay_on], by_leaf if factors else None
    plain = chosen.plain(learning_rate, mask, rates=rates_of, dtype="float32" if in_float32 else "bfloat16")
    plain = _with_rates(plain, by_leaf) if factors and not chosen.takes_rates else plain
    if moments == "fp32" and not rounds_weights:
        return plain
    if not hasattr(chosen, "fused"):
        needs = f"moments: {moments} needs" if moments != "fp32" else "rounds_weights: stochastic rounding needs"
        raise UserError(f"{needs} an optimizer among {', '.join(FUSED)}, and `optimizer` is {optimizer!r}")
    return _with_state_of(
        plain, chosen.fused(learning_rate, mask, rates=rates_of, moments=moments, stochastic_rounding=True)
    )


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

    return one_pass_lib.around(one_pass, lambda params: put(plain.init(params), one_pass.init(params)), update, apply)
