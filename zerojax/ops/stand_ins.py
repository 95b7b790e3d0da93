"""Arrays of which a device has a part while a model sees the whole. This module gives the model an array in the whole's place, and finds
the part again.

The array has the whole's shape, and nothing may compute with it: an operation that can do with the part recognises it by its identity and
takes the part instead. This relies on JAX and Flax passing a traced array on as the same Python object.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import traces
from zerojax.errors import UserError

Part = TypeVar("Part")


@dataclasses.dataclass
class _StandIn(Generic[Part]):
    """`part` is what a device has of the weight at `path`, and `seen` what the model has in its place."""

    path: str
    seen: jax.Array
    part: Part
    is_taken: bool = False


class StandIns(Generic[Part]):
    """The arrays of one kind that stand for others.

    Args:
      left: the error where no operation takes the part of one, with its path at "{}".
      computed: the error where a model computes with one.
    """

    def __init__(self, left: str, computed: str):
        self._left, self._computed = left, computed
        # The user's model calls the operation, and hands it the array alone.
        self._known: contextvars.ContextVar[list[_StandIn[Part]] | None] = contextvars.ContextVar("known", default=None)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Collects the arrays that are added while a model is traced in its body.

        Raises:
          UserError: at its end, no operation has taken the part of one.
        """
        known: list[_StandIn[Part]] = []
        with traces.held(self._known, known):
            yield
        if left := {one.path for one in known} - {one.path for one in known if one.is_taken}:
            raise UserError(self._left.format(min(left)))

    def add(self, path: str, part: Part, anchor: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns what a model sees in place of an array of that shape and dtype, and makes it known.

        A model that computes with it gets NaN. In the backward pass of one that does both that and an operation that takes the part, as
        with a tied weight, it raises UserError, since the gradient of what was computed would be lost. `anchor` is an array that has a
        gradient.
        """
        seen = _in_place_of(self._computed.format(path), tuple(shape), jnp.dtype(dtype), anchor)
        known = self._known.get()
        assert known is not None, "outside of used()"
        known.append(_StandIn(path, seen, part))
        return seen

    def take_as(self, first: str, path: str) -> None:
        """Notes that the part of the weight at `path` is taken if that at `first` was, whose trace is also that of the other."""
        known = self._known.get() or []
        is_taken = any(one.is_taken for one in known if one.path == first)
        for one in known:
            one.is_taken |= is_taken and one.path == path

    def take(self, array: jax.Array) -> Part | None:
        """Returns the part of an array that a model passes to an operation, or None if the device has all of it."""
        for one in self._known.get() or ():
            if one.seen is array:
                one.is_taken = True
                return one.part
        return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_place_of(computed: str, shape: tuple[int, ...], dtype: DTypeLike, anchor: jax.Array) -> jax.Array:
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)  # codes: their scales are NaN


def _forward(computed: str, shape: tuple[int, ...], dtype: DTypeLike, anchor: jax.Array) -> tuple[jax.Array, None]:
    return _in_place_of(computed, shape, dtype, anchor), None


def _backward(computed: str, *_: Any) -> Any:
    """Is traced if a gradient arrives, so if something has been computed with the array."""
    raise UserError(computed)


_in_place_of.defvjp(_forward, _backward)
