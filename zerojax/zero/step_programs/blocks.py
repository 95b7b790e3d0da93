"""Runs each pass of a block as one nested function of the traced step. This module marks where `cut` cuts the step.

The forward pass of a block and its backward pass are each one `jax.jit` inside the trace, whose name begins with `NAME`. In one
compiled program the nested functions are inlined and change nothing. Cut apart, each is a program that reads the weights of one block.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import optax

from zerojax.errors import UserError
from zerojax.tree import PyTree
from zerojax.zero.blocks import alike, overlap
from zerojax.zero.weights import gather

NAME = "zerojax_block"
GATHER, REDUCE = "gather", "reduce"
AGAIN = (
    "blocks: the loss reads a derivative of its blocks, and here each pass of a block is a program of its own, differentiated once; "
    "keep params on the device, and omit `late_norm`, `by_block`, `pipe` and programs='kinds'"
)


def pass_of(eqn: jex.JaxprEqn) -> str:
    """Returns "forward" or "backward" for a pass of a block, the name of another of its nested functions, or "" for another operation."""
    name = str(eqn.params.get("name", ""))
    return name.removeprefix(f"{NAME}_") if name.startswith(NAME) else ""


class NestedBlocks(overlap.Chain):
    """Runs the blocks of a loss like `overlap.Chain`, but as nested functions without an order of their own. Wires know shards alone."""

    def __call__(
        self,
        body: overlap.Body,
        weights: dict[str, gather.ShardAndSink],
        arrays: list[jax.Array],
        policy: Callable[..., Any] | None,
        own: alike.AlikeBlock | None = None,
    ) -> Any:
        assert not self._known
        return self._run(self._planned(body, weights, policy, own), weights, tuple(arrays))

    is_apart = False  # whether gathers and reductions are nested functions of their own

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return _block(plan, self.is_apart, weights, arrays)


class AheadBlocks(NestedBlocks):
    """The same with a nested function of its own for each gather and each reduction, which `cut.ahead` puts beside other blocks' passes."""

    is_apart = True


class ForwardBlocks(NestedBlocks):
    """The same for a trace that is never differentiated: there, a function with a rule for its gradient would hide the nested one."""

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return _only_forward(plan, weights, arrays)


def _only_forward(plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
    def run(stored: dict[str, jax.Array], arrays: tuple) -> Any:
        sent = plan.gather(stored)
        return plan.run({}, sent, plan.differentiated(stored, sent), *arrays)

    return _nested("forward", run)({path: weight.stored for path, weight in weights.items()}, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _block(plan: overlap.BlockCall, is_apart: bool, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
    return _forward(plan, is_apart, weights, arrays)[0] if is_apart else _only_forward(plan, weights, arrays)


def _forward(
    plan: overlap.BlockCall, is_apart: bool, weights: dict[str, gather.ShardAndSink], arrays: tuple
) -> tuple[Any, Any]:
    stored = {path: weight.stored for path, weight in weights.items()}
    for sink in jax.tree.leaves([weight.sink for weight in weights.values()])[:1]:
        _constant(sink)

    def run(stored: dict[str, jax.Array], sent: dict[str, Any], arrays: tuple) -> tuple[Any, overlap.Pull]:
        outputs, pull = (plan.shared or plan).vjp(stored, sent, arrays)
        return outputs, overlap.Pull.without(sent, pull)

    def whole(stored: dict[str, jax.Array], arrays: tuple) -> tuple[Any, overlap.Pull]:
        return run(stored, plan.gather(stored), arrays)

    if is_apart:
        outputs, pull = _nested("forward", run)(stored, _nested(GATHER, plan.gather)(stored), arrays)
    else:
        outputs, pull = _nested("forward", whole)(stored, arrays)
    return outputs, (stored, pull)


def _backward(
    plan: overlap.BlockCall, is_apart: bool, residuals: tuple[dict, overlap.Pull], cotangents: PyTree
) -> tuple[Any, Any]:
    def run(sent: dict[str, Any], pull: overlap.Pull, cotangents: PyTree) -> tuple[Any, list[Any]]:
        return (plan.shared or plan).pulled(pull.of(sent), cotangents)

    def reduce(grads: dict[str, Any]) -> dict[str, Any]:
        return plan.reduce(grads)[0]

    def whole(stored: dict[str, jax.Array], pull: overlap.Pull, cotangents: PyTree) -> tuple[Any, list[Any]]:
        # A program may have several blocks: nothing of one is computed again before its turn.
        pull, cotangents = pull.behind(cotangents)
        grads, inputs = run(plan.gather(stored), pull, cotangents)
        return reduce(grads), inputs

    stored, pull = residuals
    if is_apart:
        grads, inputs = _nested("backward", run)(_nested(GATHER, plan.gather)(stored), pull, cotangents)
        sums = _nested(REDUCE, reduce)(grads)
    else:
        sums, inputs = _nested("backward", whole)(stored, pull, cotangents)
    totals = {**dict.fromkeys(stored, optax.MaskedNode()), **sums}
    sinks = {path: gather.ShardAndSink(None, total) for path, total in totals.items()}  # type: ignore[arg-type]  # no gradient
    return sinks, tuple(inputs)


_block.defvjp(_forward, _backward)


@jax.custom_jvp
def _constant(sink: jax.Array) -> jax.Array:
    """Returns a sink that is not differentiated.

    JAX calls `_forward` with sinks that are constants. Where the loss differentiates a block itself they are variables of the step's own
    derivative, and neither pass of the block reads them: gradients of weights would be lost.
    """
    return sink


@_constant.defjvp
def _refuse(*_: Any) -> NoReturn:
    raise UserError(AGAIN)


@contextlib.contextmanager
def refused_if_differentiated_otherwise() -> Iterator[None]:
    """Turns JAX's error about derivatives of blocks in forward mode into a UserError."""
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        if "forward-mode autodiff" not in str(error) and "custom_lin" not in str(error):
            raise
        raise UserError(AGAIN) from error


def _nested(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as a nested one of the trace, which `cut` finds by its name."""

    def nested(*args: Any) -> Any:
        return run(*args)

    nested.__name__ = f"{NAME}_{name}"
    return jax.jit(nested)
