"""Scales the loss so that float16 gradients neither vanish nor overflow. This module follows DeepSpeed's scaler, step for step.

    scale     d(scale * loss): small gradients become representable (Micikevicius et al., arXiv:1710.03740, section 3.2)
    unscale   g = g_scaled / scale, in float32
    verdict   an inf or NaN in any gradient, on any device, is an overflow: the step is skipped
    adjust    see `DynamicLossScale`

`Scaled` is its part of a step. All of it is compiled into the step. Every device sees the same sums, so all devices skip the same steps and
none waits for the host.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zerojax import errors, train_state, tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.update import update

ON_MINIMUM = ("raise", "hold")
VERDICT = ("overflow_leaf", "is_exhausted")  # metrics that are not measurements
# The largest power of two whose reciprocal is a normal float32; DeepSpeed's ceiling is that of float64
LARGEST = 2.0**126


class LossScaleState(NamedTuple):
    """A loss scale's state between steps, as scalars.

    Attributes:
      scale: float32[], the factor of the next step's loss.
      hysteresis: int32[], the overflows until the scale halves.
      good_steps: int32[], steps since the last overflow, or since the first step.
      skipped_steps: int32[], overflows so far.
      is_exhausted: bool[], whether the last step overflowed at the smallest scale, and the run must stop.
    """

    scale: jax.Array
    hysteresis: jax.Array
    good_steps: jax.Array
    skipped_steps: jax.Array
    is_exhausted: jax.Array


class LossScale(Protocol):
    """The protocol of `make_train_step`'s `loss_scale`."""

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Returns the state after a step whose gradients were all finite (bool[]), or were not."""


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """Multiplies the loss by a constant. A step that overflows is skipped, and the next one is tried at the same scale.

    Attributes:
      scale: above 0; a power of two is exact.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale("scale", self.scale)

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return _first(self.scale, hysteresis=1)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Returns the state after a step whose gradients were all finite (bool[]), or were not."""
        return _counted(state, finite)._replace(scale=jnp.asarray(self.scale, jnp.float32))


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Halves the scale when gradients overflow, and doubles it after good steps: DeepSpeed's `DynamicLossScaler`.

    An overflow with hysteresis h > 1 only sets h to h - 1; at h = 1 the scale becomes max(scale / 2, min_scale). A good step after n
    good ones in a row, where n > 0 is a multiple of `window`, doubles the scale and refills h.

    Attributes:
      init_scale: the first scale.
      window: good steps between two doublings, at least 1.
      hysteresis: h when it is full, at least 1.
      consecutive_hysteresis: whether every good step refills h, so that only overflows in a row halve the scale.
      min_scale: the smallest scale.
      on_minimum: the effect of an overflow with h = 1 and the scale at `min_scale`. "raise" marks the state exhausted and changes nothing
        else in it (see `raise_if_exhausted`). "hold" continues at this scale.

    >>> scaler = DynamicLossScale()
    >>> state = TrainState.create(..., loss_scale=scaler.init())
    >>> train_step = make_train_step(loss_fn, partition, compute_dtype=jnp.float16, loss_scale=scaler)
    """

    init_scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    on_minimum: str = "raise"

    def __post_init__(self) -> None:
        _check_scale("init_scale", self.init_scale)
        _check_scale("min_scale", self.min_scale)
        for name in ("window", "hysteresis"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value < 2**31:
                raise UserError(f"loss_scale.{name}: must be an integer from 1 to 2**31 - 1, and is {value!r}")
        if not isinstance(self.consecutive_hysteresis, bool):
            raise UserError(
                f"loss_scale.consecutive_hysteresis: must be True or False, and is {self.consecutive_hysteresis!r}"
            )
        if self.min_scale > self.init_scale:
            raise UserError(
                f"loss_scale.min_scale: {self.min_scale} is above init_scale={self.init_scale}; set it to that or less"
            )
        errors.one_of("loss_scale.on_minimum", self.on_minimum, ON_MINIMUM)

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return _first(self.init_scale, self.hysteresis)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Returns the state after a step whose gradients were all finite (bool[]), or were not."""
        doubles = (state.good_steps > 0) & (state.good_steps % self.window == 0)
        refills = jnp.logical_or(self.consecutive_hysteresis, doubles)
        halves = jnp.minimum(state.hysteresis, self.hysteresis) <= 1  # a restored state may hold more
        grown = jnp.where(doubles, jnp.minimum(state.scale * 2, LARGEST), state.scale)
        shrunk = jnp.where(halves, jnp.maximum(state.scale / 2, self.min_scale), state.scale)
        after = _counted(state, finite)._replace(
            scale=jnp.where(finite, grown, shrunk),
            hysteresis=jnp.where(
                finite,
                jnp.where(refills, self.hysteresis, state.hysteresis),
                jnp.where(halves, state.hysteresis, state.hysteresis - 1),
            ),
        )
        stops = ~jnp.asarray(finite) & halves & (state.scale <= self.min_scale) & (self.on_minimum == "raise")
        stopped = state._replace(skipped_steps=after.skipped_steps, is_exhausted=jnp.ones((), bool))
        return jax.tree.map(lambda at_end, else_: jnp.where(stops, at_end, else_), stopped, after)


def overflow(metrics: Mapping[str, Any], params: PyTree) -> str | None:
    """Returns a text that names the first gradient that was not finite, and the scale; None if the step was not skipped.

    Args:
      metrics: of a train step; this waits for them.
      params: a tree of the weights, abstract or not.
    """
    index = int(metrics.get("overflow_leaf", -1))
    if index < 0:
        return None
    return f"the gradient of params/{tree.flatten(params)[index][0]} is not finite at loss scale {float(metrics['loss_scale']):g}"


def raise_if_exhausted(metrics: Mapping[str, Any], params: PyTree) -> None:
    """Stops a run whose gradients overflow at the smallest scale; call it with every step's metrics.

    Raises:
      UserError: the step overflowed at the smallest scale; the line names the first gradient that was not finite.
    """
    if metrics.get("is_exhausted", False):
        raise UserError(
            f"{overflow(metrics, params)}, which is the smallest; lower the learning rate, compute in bf16, or look at the data; "
            "DynamicLossScale(on_minimum='hold') goes on and skips such steps"
        )


def _first(scale: float, hysteresis: int) -> LossScaleState:
    zero = jnp.zeros((), jnp.int32)
    # Copies, because leaves that share a buffer cannot be donated.
    return LossScaleState(
        jnp.asarray(scale, jnp.float32), jnp.asarray(hysteresis, jnp.int32), zero, zero.copy(), jnp.zeros((), bool)
    )


def _counted(state: LossScaleState, finite: jax.Array) -> LossScaleState:
    """Counts a step as good or as skipped."""
    return state._replace(
        good_steps=jnp.where(finite, state.good_steps + 1, 0),
        skipped_steps=jnp.where(finite, state.skipped_steps, state.skipped_steps + 1),
        is_exhausted=jnp.zeros((), bool),
    )


def _check_scale(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 1 / LARGEST <= value <= LARGEST:
        raise UserError(f"loss_scale.{name}: must be a number from 2**-126 to 2**126, such as 65536, and is {value!r}")


@dataclasses.dataclass(frozen=True)
class Scaled(update.Unscaled):
    """Loss scaling inside a train step; the train state's field `loss_scale` holds its state."""

    scaler: LossScale

    def scale(self, state: State) -> jax.Array:
        """Returns the factor of the loss."""
        return state.loss_scale.scale

    def verdict(self, squares: PyTree) -> update.Verdict:
        """Judges a step by its gradients' sums of squares, unscaled and over all devices: a tree of float32[].

        A sum is not finite if an element is not, or exceeds 1e19, which float16 cannot hold.
        """
        is_bad = ~jnp.isfinite(jnp.stack(jax.tree.leaves(squares)))
        finite = ~jnp.any(is_bad)
        return update.Verdict(finite, jnp.where(finite, -1, jnp.argmax(is_bad)))

    def adjust(self, state: State, verdict: update.Verdict) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the train state with the scale adjusted, and metrics."""
        adjusted = self.scaler.update(state.loss_scale, verdict.finite)
        return state.replace(loss_scale=adjusted), {
            "loss_scale": state.loss_scale.scale,
            "skipped_steps": adjusted.skipped_steps,
            "overflow_leaf": verdict.leaf,
            "is_exhausted": adjusted.is_exhausted,
        }


def in_step(loss_scale: LossScale | None, abstract_state: State) -> update.Unscaled:
    """Returns the loss scaling of a train step; None is no scaling.

    Raises:
      UserError: the state is no train state, has no field for the scale, or has one that is never read.
    """
    lacking = [name for name in ("params", "apply_gradients", "replace") if not hasattr(abstract_state, name)]
    if lacking:
        raise UserError(
            f"make_train_step: the state is a {type(abstract_state).__name__} without {' and '.join(lacking)}; "
            f"{train_state.way_to_one(abstract_state)}"
        )
    if loss_scale is not None and not callable(getattr(loss_scale, "update", None)):
        raise UserError(
            f"make_train_step: loss_scale must be a DynamicLossScale or a StaticLossScale, and is {loss_scale!r}; "
            "for a constant one pass StaticLossScale(1024.0)"
        )
    has_scale = isinstance(getattr(abstract_state, "loss_scale", None), LossScaleState)
    if loss_scale is None and has_scale:
        raise UserError(
            "make_train_step: the state has a loss scale, and `loss_scale` is None; pass loss_scale=, or create the state without one"
        )
    if loss_scale is not None and not has_scale:
        raise UserError(
            "make_train_step: loss scaling needs a field `loss_scale` in the train state; declare `loss_scale: Any` in your TrainState "
            "and create it with loss_scale=scaler.init()"
        )
    return update.Unscaled() if loss_scale is None else Scaled(loss_scale)
