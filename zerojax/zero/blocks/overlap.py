"""Runs a model's blocks so that their collectives overlap the arithmetic of their neighbours. This module fixes the order of both.

    forward    gather(i + 1) beside block i       starts no earlier than block i
               near(i + 2)   beside block i       likewise, of wires that keep a copy nearer to all (`placement.Wire.near`)
    backward   gather(i - 1) beside block i       likewise
               reduce(i)     beside block i - 1   ends before the backward pass of block i - 1

At any time about two blocks' weights are gathered and one block's gradients are unreduced. Without this order XLA's scheduler puts weight
gradients off to the end, and keeps everything that they read.

A head's backward pass may be short, because the head is not rematerialised. The block before it gathers beside the head's forward pass.

Arrays that a block keeps in host memory (`marks.for_host`) are copied to the host beside the next block. They are copied back beside the
backward pass of the next block, or of the one before it.

`jax.lax.optimization_barrier` sets the order, and XLA's scheduler honours it: each output of a barrier waits for all of its inputs.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax.tree import PyTree
from zerojax.zero.blocks import alike, float32_grads, lifted_blocks, marks, remat
from zerojax.zero.weights import gather, placement

Body = Callable[..., Any]
NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Tokens(NamedTuple):
    """The tokens that pass through the blocks, see `Chain`: float32[], all 0."""

    before: jax.Array
    start: jax.Array
    end: jax.Array
    sending: jax.Array
    sent: jax.Array


def no_tokens() -> Tokens:
    """Returns tokens that wait for nothing."""
    return Tokens(*[jnp.zeros((), jnp.float32)] * len(Tokens._fields))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCall:
    """One block's call: its body, and how its weights are sent and reduced (`placement.Wire`).

    `shared` has its passes as traced for a block that is alike; None: they are traced for it alone.
    """

    body: Body
    placements: Mapping[str, placement.Placement]
    dtype: Any
    reduction: gather.Reduction
    policy: Any
    shared: alike.SharedPasses | None = None

    def near(self, stored: Mapping[str, jax.Array], after: jax.Array) -> dict[str, Any]:
        """Returns what is kept for the backward pass in place of shards, of the weights whose wires keep it; `after` is there before."""
        # XLA puts a collective and the one that needs it beside the same kernels, and waits for the first. So this starts a block ahead.
        stored, _ = jax.lax.optimization_barrier((dict(stored), after))
        found = self._by_wire(stored, lambda path, shard, own: own.wire.near(shard, own, self.dtype))
        return {path: kept for path, kept in found.items() if kept is not None}

    def gather(self, stored: Mapping[str, Any], known: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
        """Returns what arrives of the weights, from their shards or what is `near`; `known` is that of their wires."""
        return self._by_wire(stored, lambda path, shard, own: own.wire.send(shard, known.get(path), own, self.dtype))

    def differentiated(self, stored: Mapping[str, jax.Array], sent: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the arrays with respect to which the body is differentiated."""
        return {
            path: self.placements[path].wire.differentiated(own, self.dtype or stored[path].dtype)
            for path, own in sent.items()
        }

    def run(
        self,
        frozen: Mapping[str, jax.Array],
        sent: Mapping[str, Any],
        trained: Mapping[str, jax.Array],
        *arrays: jax.Array,
    ) -> Any:
        """Runs the body with what has arrived; `frozen` and `trained` together are the arrays of `differentiated`."""
        weights = {**trained, **frozen}
        with contextlib.ExitStack() as stack:
            used = {
                path: stack.enter_context(self.placements[path].wire.used(path, own, weights[path]))
                for path, own in sent.items()
            }
            return self.body(used, *arrays)

    def vjp(
        self, stored: Mapping[str, jax.Array], sent: Mapping[str, Any], arrays: tuple
    ) -> tuple[Any, Callable[..., Any]]:
        """Runs the body for a backward pass; returns what it returns, and the vjp function of its weights and arrays."""
        # Barriers or programs of their own prevent CSE of the two passes; those of jax.checkpoint would also delay copies from the host.
        body = self.run if self.policy is None else jax.checkpoint(self.run, policy=self.policy, prevent_cse=False)
        weights = self.differentiated(stored, sent)
        trained = {path: weight for path, weight in weights.items() if self.placements[path].trainable}
        frozen = {path: weight for path, weight in weights.items() if path not in trained}
        return jax.vjp(functools.partial(body, frozen, sent), trained, *arrays)

    def pulled(self, pull: Callable[..., Any], cotangents: PyTree) -> tuple[dict[str, jax.Array], list[Any]]:
        """Returns what is left for `reduce` of the gradients of `differentiated`, and the gradients of the body's arrays.

        What wires send of gradients at once is sent here, beside this block's own backward pass.

        Args:
          pull: the vjp function, as `vjp` returns it.
          cotangents: of what the body returned.
        """
        if jnp.dtype(self.reduction.dtype) == jnp.float32 and self.placements:
            mesh = next(iter(self.placements.values())).stored.mesh
            pull = float32_grads.in_float32(pull, platform=mesh_lib.platform(mesh))
        grads, *inputs = pull(cotangents)
        left = self._by_wire(grads, lambda path, grad, own: own.wire.leave(grad, own, self.reduction))
        return left, jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, inputs)

    def reduce(self, grads: Mapping[str, jax.Array], unsent: Mapping[str, Any] = NOTHING) -> tuple[dict, dict]:
        """Returns the gradients of the weights' sinks, and what is not sent of them; see `gather.ShardAndSink`."""
        home = self._by_wire(grads, lambda path, grad, own: own.wire.home(grad, own, self.reduction, unsent.get(path)))
        return {path: total for path, (total, _) in home.items()}, {path: rest for path, (_, rest) in home.items()}

    def _by_wire(
        self, values: Mapping[str, Any], run: Callable[[str, Any, placement.Placement], Any]
    ) -> dict[str, Any]:
        """Returns `run(path, value, placement)` of each, in a scope by which traces and ledgers name the weight of a collective."""
        found = {}
        for path, value in values.items():
            with jax.named_scope(path):
                found[path] = run(path, value, self.placements[path])
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pull:
    """A block's vjp function without what arrived of its weights, which is sent again for the backward pass."""

    leaves: list[Any]  # arrays, or None in the place of those that are kept elsewhere
    arrivals: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})  # which of what arrived a leaf is
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def without(cls, sent: PyTree, pull: Callable[..., Any]) -> "Pull":
        """Takes what arrived out of a vjp function."""
        leaves, structure = jax.tree.flatten(pull)
        number_of = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(sent))}
        arrivals = tuple(number_of.get(id(leaf)) for leaf in leaves)
        return cls([leaf for leaf, own in zip(leaves, arrivals) if own is None], arrivals, structure)

    def behind(self, arrays: PyTree) -> "tuple[Pull, PyTree]":
        """Returns the same with leaves that wait for these arrays, and the arrays. Those on the host do not: they are copied first."""
        near = [None if _is_on_host(leaf) else leaf for leaf in self.leaves]
        near, arrays = jax.lax.optimization_barrier((near, arrays))
        leaves = [leaf if own is None else own for own, leaf in zip(near, self.leaves)]
        return dataclasses.replace(self, leaves=leaves), arrays

    def of(self, sent: PyTree) -> Callable[..., Any]:
        """Returns the vjp function with what arrived."""
        again, rest = jax.tree.leaves(sent), iter(self.leaves)
        return jax.tree.unflatten(self.structure, [next(rest) if n is None else again[n] for n in self.arrivals])


class Chain:
    """Runs blocks so that each block's collectives overlap its neighbours' arithmetic in a fixed order.

    Tokens, scalar zeros, pass through the blocks in their order, and their cotangents in the reverse order. A block returns `start` once
    its input is there, and the next block's gather waits for it; `before` is the `start` of a block earlier, for which what is near waits.
    A block returns the cotangent of `end` once its gradients are summed, and
    the end of the next block's backward pass waits for it. `sending` and `sent` do the same for copies to the host. The attribute `tokens`
    holds the last block's tokens. The order is lost unless the program reads them and their cotangents.
    """

    def __init__(
        self,
        find: Callable[[str, Any], placement.Placement],
        dtype: DTypeLike | None,
        reduction: gather.Reduction,
        tokens: Tokens,
        known: Mapping[str, Any] = NOTHING,
    ):
        self._find, self._dtype, self._reduction, self._known = find, dtype, reduction, known
        self.tokens, self._before, self._trace = tokens, tokens, _trace()
        self._first: dict[Any, alike.FirstBlock] = {}  # of the blocks that are alike and sent alike
        self._with_unsent: list[Any] = []  # the arrays of `ShardAndSink.unsent` that blocks had
        # The trace and the arrays of the last block that ran in a transformation inside the model.
        self._last: tuple[Any, list[jax.Array]] = None, []

    def __call__(
        self,
        body: Body,
        weights: dict[str, gather.ShardAndSink],
        arrays: list[jax.Array],
        policy: remat.Policy,
        own: alike.AlikeBlock | None = None,
    ) -> Any:
        weights = {path: self._once(weight) for path, weight in weights.items()}
        if _trace() != self._trace:
            # Tokens cannot pass through a transformation inside the model.
            weights = self._behind_the_last(weights, arrays)
            return lifted_blocks.by_gathers(self.gather_leaf)(body, weights, arrays, marks.without_offload(policy))
        known = {path: self._known[path] for path in weights if path in self._known}
        plan = self._planned(body, weights, policy, own)
        outputs, self.tokens = _block(plan, weights, known, self.tokens, tuple(arrays))
        return outputs

    def _behind_the_last(
        self, weights: dict[str, gather.ShardAndSink], arrays: list[jax.Array]
    ) -> dict[str, gather.ShardAndSink]:
        """Returns weights whose shards wait for the arrays of the block before, if that ran in the same transformation of the model.

        Without it XLA may gather the weights of all blocks of a checkpoint before the first of them runs.
        """
        trace, begun = self._last
        self._last = _trace(), jax.lax.stop_gradient(arrays)
        if trace != self._last[0]:
            return weights
        stored, _ = jax.lax.optimization_barrier(({path: weight.stored for path, weight in weights.items()}, begun))
        return {path: dataclasses.replace(weight, stored=stored[path]) for path, weight in weights.items()}

    def _planned(
        self, body: Body, weights: dict[str, gather.ShardAndSink], policy: remat.Policy, own: alike.AlikeBlock | None
    ) -> BlockCall:
        placements = {path: self._find(path, weight.stored) for path, weight in weights.items()}
        plan = BlockCall(body, placements, self._dtype, self._reduction, policy)
        if own is None:
            return plan
        key = (own.kind, *(placements[path] for path in sorted(placements)))
        first = self._first.setdefault(key, alike.FirstBlock(own, plan))
        pairs = alike.renamed({path: path for path in weights}, own, first.own).items()
        if not all(placements[path].wire.read_as(of_first, path) for of_first, path in pairs):
            return plan
        return dataclasses.replace(plan, shared=alike.SharedPasses(first, own, plan))

    def restart(self) -> None:
        """Forgets the blocks that ran, because the loss is traced again."""
        self.tokens, self._with_unsent, self._last = self._before, [], (None, [])

    def gather_leaf(self, path: str, weight: gather.ShardAndSink) -> jax.Array:
        """Returns one gathered weight, outside of the order."""
        placement = self._find(path, weight.stored)
        with jax.named_scope(path):
            return placement.wire.outside(path, weight, placement, self._dtype, self._reduction)

    def gather_owned(self, path: str, weight: gather.ShardAndSink) -> jax.Array:
        """Returns the same of a weight of a block, which gathers it itself unless it reaches the block changed."""
        return self.gather_leaf(path, weight)

    def shard_leaf(self, path: str, weight: gather.ShardAndSink) -> tuple[jax.Array, tuple[str, ...]] | None:
        """Returns this device's shard of a weight and the axes over which sums of it add up; None if they could not."""
        placement = self._find(path, weight.stored)
        if not gather.has_own_shard(weight, placement):
            return None
        return gather.own_shard(weight, placement, self._dtype, self._reduction), placement.over

    def _once(self, weight: gather.ShardAndSink) -> gather.ShardAndSink:
        """Returns a weight whose `unsent` is zeros if an earlier block had it too: it is sent once, and what neither sends adds up."""
        own = weight.unsent
        if own is None:
            return weight
        if any(own is other for other in self._with_unsent):
            return dataclasses.replace(weight, unsent=own - jax.lax.stop_gradient(own))
        self._with_unsent.append(own)
        return weight


def _trace() -> Any:
    return jax.extend.core.get_opaque_trace_state(convention="zerojax")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(
    plan: BlockCall, weights: dict[str, gather.ShardAndSink], known: dict[str, Any], tokens: Tokens, arrays: tuple
) -> tuple[Any, Tokens]:
    """`known`: what wires know of weights beside their shards, by path."""
    stored = {path: weight.stored for path, weight in weights.items()}
    sent, tokens, arrays, *_ = _begin(plan, stored, known, tokens, arrays, sends_far=True)
    return plan.run({}, sent, plan.differentiated(stored, sent), *arrays), tokens


def _begin(
    plan: BlockCall,
    stored: dict[str, Any],
    known: dict,
    tokens: Tokens,
    arrived: Any,
    on_host: Any = None,
    sends_far: bool = False,
) -> tuple[dict, Tokens, Any, Any, dict]:
    """Gathers a block's weights once the block before it has begun; the next block's gather waits for them.

    The gathers of two blocks are thus never merged, and XLA merges those of one block into one collective (`xla_options`).

    Returns what arrives of the weights, the tokens, `arrived`, `on_host`, and what is near of the weights: {} unless `sends_far`. Arrays on
    the host may be fetched as early as the weights.
    """
    near = plan.near(stored, tokens.before) if sends_far else {}
    (stored, near, on_host), start = jax.lax.optimization_barrier(((stored, near, on_host), tokens.start))
    tokens = tokens._replace(before=start) if sends_far else tokens
    start, arrived, sent = jax.lax.optimization_barrier((start, arrived, plan.gather({**stored, **near}, known)))
    return sent, tokens._replace(start=start), arrived, on_host, near


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """A block's residuals: what its weights are sent from, what was not sent of their gradients, and the other leaves of the vjp function,
    on the device and on the host."""

    stored: dict[str, Any]
    unsent: dict[str, Any]
    known: dict[str, Any]
    pull: Pull  # with the leaves on the device
    on_host: list[jax.Array | None]
    begun: jax.Array | None  # the token of a head's forward pass; None for other blocks


def _block_forward(
    plan: BlockCall, weights: dict[str, gather.ShardAndSink], known: dict[str, Any], tokens: Tokens, arrays: tuple
) -> tuple[Any, _Residuals]:
    stored = {path: weight.stored for path, weight in weights.items()}
    sent, tokens, arrays, _, near = _begin(plan, stored, known, tokens, arrays, sends_far=True)
    outputs, vjp = (plan.shared or plan).vjp(stored, sent, arrays)
    pull = Pull.without(sent, vjp)
    on_host = [leaf if _is_on_host(leaf) else None for leaf in pull.leaves]
    pull = dataclasses.replace(pull, leaves=[None if _is_on_host(leaf) else leaf for leaf in pull.leaves])
    # A copy to the host may take as long as a block's forward pass, so it ends two blocks later.
    outputs, _ = jax.lax.optimization_barrier((outputs, tokens.sent))
    on_host, sending = jax.lax.optimization_barrier((on_host, tokens.sending))
    tokens = tokens._replace(sent=tokens.sending, sending=sending)
    begun = tokens.start if plan.policy is None else None
    unsent = {path: weight.unsent for path, weight in weights.items()}
    return (outputs, tokens), _Residuals({**stored, **near}, unsent, known, pull, on_host, begun)


def _is_on_host(leaf: jax.Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _block_backward(plan: BlockCall, residuals: _Residuals, cotangents: tuple[Any, Tokens]) -> tuple[Any, ...]:
    outputs, tokens = cotangents
    sent, tokens, (arrived, pull), on_host, _ = _begin(
        plan, residuals.stored, residuals.known, tokens, (outputs, residuals.pull), residuals.on_host
    )
    if residuals.begun is not None:
        # No matmul of a head that has made its gradients in the forward pass hides a gather, so the gather starts beside that pass.
        tokens = tokens._replace(start=residuals.begun)
    leaves = [near if far is None else far for near, far in zip(pull.leaves, on_host)]
    vjp = dataclasses.replace(pull, leaves=leaves).of(sent)
    grads, inputs = (plan.shared or plan).pulled(vjp, arrived)
    # The previous block begins once all matmuls here are done and the next block's gradients are summed.
    grads, inputs, end = jax.lax.optimization_barrier((grads, inputs, tokens.end))
    (sums, unsent), end = jax.lax.optimization_barrier((plan.reduce(grads, residuals.unsent), end))
    totals = {**dict.fromkeys(residuals.stored, optax.MaskedNode()), **sums}
    sinks = {path: gather.ShardAndSink(None, total, unsent.get(path)) for path, total in totals.items()}  # type: ignore[arg-type]
    return sinks, dict.fromkeys(residuals.known), tokens._replace(end=end), tuple(inputs)


_block.defvjp(_block_forward, _block_backward)
