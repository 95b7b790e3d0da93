"""Runs each pass of a block as one nested function of the traced step. This module marks where `cut` cuts the step.

The forward pass of a block and its backward pass are each one `jax.jit` inside the trace, whose name begins with `NAME`. In one
compiled program the nested functions are inlined and change nothing. Cut apart, each is a program that reads the weights of one block.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import optax

from zerojax.errors import UserError
from zerojax.tree import PyTree
from zerojax.zero.blocks import alike, overlap
from zerojax.zero.weights import gather, placement

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

    def shard_leaf(self, path: str, weight: gather.ShardAndSink) -> None:
        """Returns None: each program reads what it gathers."""

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return _block(plan, None, weights, arrays)


class AheadBlocks(NestedBlocks):
    """The same with a nested function of its own for each gather and each reduction, which `cut.ahead` puts beside other blocks' passes.

    Blocks that are alike have the functions of the first one, with its names, so each is traced once.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._functions: dict[alike.FirstBlock, _Functions] = {}
        self._gathers: dict[placement.Placement, Callable[[gather.ShardAndSink], jax.Array]] = {}

    def gather_owned(self, path: str, weight: gather.ShardAndSink) -> jax.Array:
        """Returns the same by one nested function for all weights that are sharded alike, which is traced once."""
        own = self._find(path, weight.stored)
        if type(own.wire) is not gather.Plain:  # others note the path
            return self.gather_leaf(path, weight)
        if own not in self._gathers:
            self._gathers[own] = jax.jit(functools.partial(self.gather_leaf, path))
        return self._gathers[own](weight)

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return _block(plan, self._apart(plan), weights, arrays)

    def _apart(self, plan: overlap.BlockCall) -> "_Apart":
        own = _Functions(plan)
        first = own if plan.shared is None else self._functions.setdefault(plan.shared.first, own)
        return _Apart(own, first, plan.shared)


class ForwardBlocks(NestedBlocks):
    """The same for a trace that is never differentiated: there, a function with a rule for its gradient would hide the nested one."""

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return _only_forward(plan, weights, arrays)


def _only_forward(plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
    def run(stored: dict[str, jax.Array], arrays: tuple) -> Any:
        return _run_of(plan, stored, plan.gather(stored), arrays)

    return _nested("forward", run)({path: weight.stored for path, weight in weights.items()}, arrays)


def _run_of(plan: overlap.BlockCall, stored: dict[str, jax.Array], sent: dict[str, Any], arrays: tuple) -> Any:
    return plan.run({}, sent, plan.differentiated(stored, sent), *arrays)


class ForwardAheadBlocks(AheadBlocks):
    """The same as `AheadBlocks` for a trace that is never differentiated."""

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return self._apart(plan).only_forward({path: weight.stored for path, weight in weights.items()}, arrays)


class _Functions:
    """The functions of a block's passes, each nested, of weights by path."""

    def __init__(self, plan: overlap.BlockCall):
        def backward(sent: dict[str, Any], pull: overlap.Pull, cotangents: PyTree) -> tuple[Any, list[Any]]:
            return (plan.shared or plan).pulled(pull.of(sent), cotangents)

        self.gather, self.reduce = _nested(GATHER, plan.gather), _nested(REDUCE, lambda grads: plan.reduce(grads)[0])
        self.only_forward = _nested("forward", functools.partial(_run_of, plan))
        self.forward = _nested("forward", functools.partial(_forward_of, plan))
        self.backward = _nested("backward", backward)


@dataclasses.dataclass(frozen=True, eq=False)
class _Apart:
    """The functions of a block that is called: its own, and those of the first block that is alike."""

    own: _Functions
    first: _Functions
    shared: alike.SharedPasses | None

    def gather(self, stored: dict[str, jax.Array]) -> dict[str, Any]:
        if self.shared is None:
            return self.own.gather(stored)
        return self.shared.as_own(self.first.gather(self.shared.as_first(stored)))

    def only_forward(self, stored: dict[str, jax.Array], arrays: tuple) -> Any:
        return self._run(self.own.only_forward, self.first.only_forward, stored, arrays)

    def forward(self, stored: dict[str, jax.Array], arrays: tuple) -> tuple[Any, overlap.Pull]:
        return self._run(self.own.forward, self.first.forward, stored, arrays)

    def _run(self, own: Any, first: Any, stored: dict[str, jax.Array], arrays: tuple) -> Any:
        """Runs the first block's function, or the block's own where that one reads other arrays."""
        sent, shared = self.gather(stored), self.shared
        if shared is None:
            return own(stored, sent, arrays)
        as_first = shared.as_first(stored), shared.as_first(sent), arrays
        shared.traced(first, *as_first)
        return own(stored, sent, arrays) if shared.reads_others else first(*as_first)

    def backward(
        self, stored: dict[str, jax.Array], pull: overlap.Pull, cotangents: PyTree
    ) -> tuple[dict[str, Any], list[Any]]:
        """Returns the sums of the gradients, and the gradients of the block's arrays."""
        sent, shared = self.gather(stored), self.shared
        if shared is None or shared.reads_others:
            grads, inputs = self.own.backward(sent, pull, cotangents)
            return self.own.reduce(grads), inputs
        grads, inputs = self.first.backward(shared.as_first(sent), pull, cotangents)
        return shared.as_own(self.first.reduce(grads)), inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _block(
    plan: overlap.BlockCall, apart: _Apart | None, weights: dict[str, gather.ShardAndSink], arrays: tuple
) -> PyTree:
    return _only_forward(plan, weights, arrays) if apart is None else _forward(plan, apart, weights, arrays)[0]


def _forward(
    plan: overlap.BlockCall, apart: _Apart | None, weights: dict[str, gather.ShardAndSink], arrays: tuple
) -> tuple[Any, Any]:
    stored = {path: weight.stored for path, weight in weights.items()}
    for sink in jax.tree.leaves([weight.sink for weight in weights.values()])[:1]:
        _constant(sink)

    def whole(stored: dict[str, jax.Array], arrays: tuple) -> tuple[Any, overlap.Pull]:
        return _forward_of(plan, stored, plan.gather(stored), arrays)

    outputs, pull = apart.forward(stored, arrays) if apart else _nested("forward", whole)(stored, arrays)
    return outputs, (stored, pull)


def _forward_of(
    plan: overlap.BlockCall, stored: dict[str, jax.Array], sent: dict[str, Any], arrays: tuple
) -> tuple[Any, overlap.Pull]:
    outputs, pull = (plan.shared or plan).vjp(stored, sent, arrays)
    return outputs, overlap.Pull.without(sent, pull)


def _backward(
    plan: overlap.BlockCall, apart: _Apart | None, residuals: tuple[dict, overlap.Pull], cotangents: PyTree
) -> tuple[Any, Any]:
    def whole(stored: dict[str, jax.Array], pull: overlap.Pull, cotangents: PyTree) -> tuple[Any, list[Any]]:
        # A program may have several blocks: nothing of one is computed again before its turn.
        pull, cotangents = pull.behind(cotangents)
        grads, inputs = (plan.shared or plan).pulled(pull.of(plan.gather(stored)), cotangents)
        return plan.reduce(grads)[0], inputs

    stored, pull = residuals
    run = apart.backward if apart else _nested("backward", whole)
    sums, inputs = run(stored, pull, cotangents)
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
