"""Runs a model's blocks so that collectives hide behind the neighbours' arithmetic. This module orders them by hand.

    forward    gather(i + 1) beside block i       it may start when block i does, and not before
    backward   gather(i - 1) beside block i       likewise
               reduce(i)     beside block i - 1   it ends before block i - 1's backward pass does

So about two blocks' weights and one block's gradients are whole at any time, whatever the compiler's scheduler would rather do: left to
itself it puts off weight gradients to the end, and with them everything that they read.

A head's backward pass may be short, as it has kept all: the block before it gathers beside the head's forward pass.

What a block keeps in the host's memory (`remat.for_host`) leaves the device beside the block after it, and comes back beside that one's
backward pass, or the one's before it.

The order is said by `jax.lax.optimization_barrier`, which XLA's scheduler keeps: what leaves a barrier waits for all that enters it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import optax

from zerojax import mesh as mesh_lib
from zerojax.zero import float32_grads, gather, placement, remat

Body = Callable[..., Any]


class Tokens(NamedTuple):
    """What passes through the blocks, see `Chain`: float32[], all 0."""

    start: jax.Array
    end: jax.Array
    sending: jax.Array
    sent: jax.Array


def no_tokens() -> Tokens:
    """Returns tokens that wait for nothing."""
    return Tokens(*[jnp.zeros((), jnp.float32)] * len(Tokens._fields))


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """One block's call: what it computes, and how its weights move."""

    body: Body
    placements: Mapping[str, placement.Placement]
    dtype: Any
    reduction: gather.Reduction
    policy: Any

    def gather(self, stored: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: self._whole(path, shard) for path, shard in stored.items()}

    def _whole(self, path: str, shard: jax.Array) -> jax.Array:
        with jax.named_scope(path):
            return gather.whole(shard, self.placements[path], self.dtype)

    def parted(self, weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the weights that have gradients, and the frozen ones."""
        frozen = {path: weight for path, weight in weights.items() if not self.placements[path].trainable}
        return {path: weight for path, weight in weights.items() if path not in frozen}, frozen

    def reduce(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: self._sum(path, grad) for path, grad in grads.items()}

    def _sum(self, path: str, grad: jax.Array) -> jax.Array:
        with jax.named_scope(path):  # traces and ledgers name the weight that a collective moves
            return gather.reduce_pass(grad, self.placements[path], self.reduction)


class Chain:
    """Runs blocks so that each one's collectives wait for, and end before, what its neighbours do.

    Two tokens, scalar zeros, pass through the blocks in their order, and their cotangents in the opposite one. `start` leaves a block as
    soon as the block's input has arrived, and the next block's gather waits for it. The cotangent of `end` leaves a block when its
    gradients are summed, and the end of the next block's backward pass waits for it. `tokens` are those that the last block let go: they
    and their cotangents hold the order as long as something that is kept reads them.
    """

    def __init__(
        self,
        find: Callable[[str, Any], placement.Placement],
        dtype: Any,
        reduction: gather.Reduction,
        tokens: Tokens,
    ):
        self._find, self._dtype, self._reduction = find, dtype, reduction
        self.tokens, self._trace = tokens, _trace()

    def __call__(
        self, body: Body, weights: dict[str, gather.ShardAndSink], arrays: list[jax.Array], policy: Any
    ) -> Any:
        if _trace() != self._trace:
            return self._unordered(body, weights, arrays, policy)
        placements = {path: self._find(path, weight.stored) for path, weight in weights.items()}
        plan = _Plan(body, placements, self._dtype, self._reduction, policy)
        outputs, self.tokens = _block(plan, weights, self.tokens, tuple(arrays))
        return outputs

    def gather_leaf(self, path: str, weight: gather.ShardAndSink) -> jax.Array:
        """Returns one weight whole, without a place in the order."""
        with jax.named_scope(path):
            return gather.gather_shard(weight, self._find(path, weight.stored), self._dtype, self._reduction)

    def _unordered(
        self, body: Body, weights: dict[str, gather.ShardAndSink], arrays: list[jax.Array], policy: Any
    ) -> Any:
        """Runs a block without its place in the order: inside a transformation of the model's own tokens cannot pass in and out.

        It may be differentiated in every way, such as for the gradient of a gradient's norm.
        """

        def run(weights: dict[str, gather.ShardAndSink], *arrays: jax.Array) -> Any:
            return body({path: self.gather_leaf(path, weight) for path, weight in weights.items()}, *arrays)

        if policy is not None:
            run = jax.checkpoint(run, policy=remat.without_offload(policy))
        return run(weights, *arrays)


def _trace() -> Any:
    return jax.extend.core.get_opaque_trace_state(convention="zerojax")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(plan: _Plan, weights: dict[str, gather.ShardAndSink], tokens: Tokens, arrays: tuple) -> tuple[Any, Tokens]:
    stored = {path: weight.stored for path, weight in weights.items()}
    whole, tokens, arrays, _ = _begin(plan, stored, tokens, arrays)
    return plan.body(whole, *arrays), tokens


def _begin(
    plan: _Plan, stored: dict[str, jax.Array], tokens: Tokens, arrived: Any, away: Any = None
) -> tuple[dict, Tokens, Any, Any]:
    """Gathers a block's weights once the block before it has begun, and lets the next one gather when this one's are there.

    So a block's gathers stand alone in the order, and XLA makes them one collective (`xla_options`).

    Returns the whole weights, the tokens, what arrived and what is `away`: on the host, and may be fetched as early as the weights.
    """
    (stored, away), start = jax.lax.optimization_barrier(((stored, away), tokens.start))
    start, arrived, whole = jax.lax.optimization_barrier((start, arrived, plan.gather(stored)))
    return whole, tokens._replace(start=start), arrived, away


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
    """What a block's backward pass needs: the weights as stored, and the vjp function's other leaves, here and on the host."""

    stored: dict[str, jax.Array]
    here: list[jax.Array | None]
    away: list[jax.Array | None]
    begun: jax.Array | None  # the token of a head's forward pass; None for other blocks
    paths: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})  # the weight that a leaf was
    structure: Any = dataclasses.field(metadata={"static": True})


def _block_forward(
    plan: _Plan, weights: dict[str, gather.ShardAndSink], tokens: Tokens, arrays: tuple
) -> tuple[Any, _Kept]:
    stored = {path: weight.stored for path, weight in weights.items()}
    whole, tokens, arrays, _ = _begin(plan, stored, tokens, arrays)
    # The barrier in `_begin` keeps apart what both passes compute; jax.checkpoint's own would hold back what comes from the host.
    body = plan.body if plan.policy is None else jax.checkpoint(plan.body, policy=plan.policy, prevent_cse=False)
    trained, frozen = plan.parted(whole)
    outputs, pull = jax.vjp(lambda trained, *arrays: body({**trained, **frozen}, *arrays), trained, *arrays)
    leaves, structure = jax.tree.flatten(pull)
    path_of = {id(weight): path for path, weight in whole.items()}
    paths = tuple(path_of.get(id(leaf)) for leaf in leaves)
    here = [leaf if path is None and not _is_on_host(leaf) else None for leaf, path in zip(leaves, paths)]
    away = [leaf if path is None and _is_on_host(leaf) else None for leaf, path in zip(leaves, paths)]
    # A copy to the host has the time of two blocks: it may take as long as a block's forward pass.
    outputs, _ = jax.lax.optimization_barrier((outputs, tokens.sent))
    away, sending = jax.lax.optimization_barrier((away, tokens.sending))
    tokens = tokens._replace(sent=tokens.sending, sending=sending)
    begun = tokens.start if plan.policy is None else None
    return (outputs, tokens), _Kept(stored, here, away, begun, paths, structure)


def _is_on_host(leaf: jax.Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _block_backward(plan: _Plan, kept: _Kept, cotangents: tuple[Any, Tokens]) -> tuple[Any, Tokens, Any]:
    outputs, tokens = cotangents
    whole, tokens, (arrived, here), away = _begin(plan, kept.stored, tokens, (outputs, kept.here), kept.away)
    if kept.begun is not None:
        tokens = tokens._replace(start=kept.begun)
    leaves = [
        whole[path] if path is not None else near if far is None else far
        for path, near, far in zip(kept.paths, here, away)
    ]
    pull = jax.tree.unflatten(kept.structure, leaves)
    if jnp.dtype(plan.reduction.dtype) == jnp.float32 and plan.placements:
        mesh = next(iter(plan.placements.values())).stored.mesh
        pull = float32_grads.in_float32(pull, platform=mesh_lib.platform(mesh))
    grads, *inputs = pull(arrived)
    inputs = [
        jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, tangent) for tangent in inputs
    ]
    # All products are made, and the block after this one has its gradients summed, before the block before this one begins.
    grads, inputs, end = jax.lax.optimization_barrier((grads, inputs, tokens.end))
    sums, end = jax.lax.optimization_barrier((plan.reduce(grads), end))
    totals = {**dict.fromkeys(kept.stored, optax.MaskedNode()), **sums}
    sinks = {path: gather.ShardAndSink(None, total) for path, total in totals.items()}  # type: ignore[arg-type]  # no gradient
    return sinks, tokens._replace(end=end), tuple(inputs)


_block.defvjp(_block_forward, _block_backward)
