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
import optax

from zerojax.errors import UserError
from zerojax.tree import PyTree
from zerojax.zero import gather, overlap

NAME = "zerojax_block"
AGAIN = (
    "blocks: the loss reads a derivative of its blocks, and here each pass of a block is a program of its own, differentiated once; "
    "keep params on the device, and omit `late_norm`, `by_block` and `pipe`"
)


class NestedBlocks(overlap.Chain):
    """Runs the blocks of a loss like `overlap.Chain`, but as nested functions without an order of their own. Wires know shards alone."""

    def __call__(
        self,
        body: overlap.Body,
        weights: dict[str, gather.ShardAndSink],
        arrays: list[jax.Array],
        policy: Callable[..., Any] | None,
    ) -> Any:
        assert not self._known
        placements = {path: self._find(path, weight.stored) for path, weight in weights.items()}
        return self._run(
            overlap.BlockCall(body, placements, self._dtype, self._reduction, policy), weights, tuple(arrays)
        )

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return _block(plan, weights, arrays)


class ForwardBlocks(NestedBlocks):
    """The same for a trace that is never differentiated: there, a function with a rule for its gradient would hide the nested one."""

    def _run(self, plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
        return _only_forward(plan, weights, arrays)


def _only_forward(plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
    def run(stored: dict[str, jax.Array], arrays: tuple) -> Any:
        sent = plan.gather(stored)
        return plan.run({}, sent, plan.differentiated(stored, sent), *arrays)

    return _nested("forward", run)({path: weight.stored for path, weight in weights.items()}, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> PyTree:
    return _only_forward(plan, weights, arrays)


def _forward(plan: overlap.BlockCall, weights: dict[str, gather.ShardAndSink], arrays: tuple) -> tuple[Any, Any]:
    stored = {path: weight.stored for path, weight in weights.items()}
    static: dict[str, Any] = {}
    for sink in jax.tree.leaves([weight.sink for weight in weights.values()])[:1]:
        _constant(sink)

    def run(stored: dict[str, jax.Array], arrays: tuple) -> tuple[Any, list[jax.Array]]:
        outputs, leaves, arrivals, structure = plan.vjp(stored, plan.gather(stored), arrays)
        static.update(structure=structure, arrivals=arrivals)
        return outputs, [leaf for leaf, own in zip(leaves, arrivals) if own is None]

    outputs, residuals = _nested("forward", run)(stored, arrays)
    return outputs, _Saved(stored, residuals, static["arrivals"], static["structure"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Saved:
    """The stored weights of a block, and the leaves of its vjp function that are nothing that arrived; `arrivals` tells which those are."""

    stored: dict[str, jax.Array]
    leaves: list[jax.Array]
    arrivals: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})


def _backward(plan: overlap.BlockCall, residuals: _Saved, cotangents: PyTree) -> tuple[Any, Any]:
    def run(stored: dict[str, jax.Array], leaves: list[jax.Array], cotangents: PyTree) -> tuple[Any, list[Any]]:
        again, rest = jax.tree.leaves(plan.gather(stored)), iter(leaves)
        filled = [next(rest) if own is None else again[own] for own in residuals.arrivals]
        grads, inputs = plan.pulled(residuals.structure, filled, cotangents)
        return plan.reduce(grads)[0], inputs

    sums, inputs = _nested("backward", run)(residuals.stored, residuals.leaves, cotangents)
    totals = {**dict.fromkeys(residuals.stored, optax.MaskedNode()), **sums}
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
