"""Runs forward and backward pass on each device's own examples. This module says every collective of them itself, in a dtype of choice.

The loss sees one device's examples, and its means are averaged over devices, as DDP, FSDP and DeepSpeed do. Against leaving collectives to
the compiler this gives three things: gradients are summed in float32 whatever the products' dtype, several passes can add up before
the sum, and a block's collectives are put where they hide behind its neighbours' arithmetic:

    forward    gather(i + 1) beside block i       it may start when block i does, and not before
    backward   gather(i - 1) beside block i       likewise
               reduce(i)     beside block i - 1   it ends before block i - 1's backward pass does

So about two blocks' weights and one block's gradients are whole at any time, whatever the compiler's scheduler would rather do.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import accumulate, gather, tree, used
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError

Body = Callable[..., Any]


def value_and_grad(
    loss_fn: Callable[..., Any],
    partition: Any,
    *,
    passes: int,
    reduce_dtype: Any,
    compute_dtype: Any,
    blocks: str,
    heads: str,
    remat: str,
    recompute: str,
) -> Callable[..., Any]:
    """Returns f(params, batch, state) -> ((loss, aux), grads), the mean over devices and over `passes` micro-batches.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> (mean loss, aux)`, called with one device's examples and whole weights. Random keys in
        `state` differ between devices.
      partition: the placement.
      passes: micro-batches; with 1 the batch is taken whole, else its leaves are [passes, ...].
      reduce_dtype: the dtype in which gradients are summed over devices.
      compute_dtype, blocks, heads, remat, recompute: see `used.where_used`.

    Gradients come in float32, laid out as the optimizer state. Where they stay whole (stages 0 and 1) several passes add up on each
    device and are summed over devices once. Floating values of `aux` are averaged over devices.
    """
    reduction = gather.Reduction(reduce_dtype, at_once=passes == 1)
    find = _finder(partition)
    axes = _manual_axes(partition.mesh)
    how = {"blocks": blocks, "heads": heads, "remat_name": remat, "recompute": recompute}
    device_loss = _device_loss(loss_fn, partition, reduction, compute_dtype, **how)

    def on_device(params: Any, batch: Any, state: Any) -> Any:
        sinks = tree.map_with_path(lambda path, leaf: gather.sink(find(path, leaf), reduction), params)

        def of_sinks(inputs: tuple[Any, _Tokens], batch: Any, state: Any) -> tuple[jax.Array, Any]:
            sinks, tokens = inputs
            return device_loss(jax.tree.map(gather.Weight, params, sinks), tokens, batch, state)

        gradients = accumulate.value_and_grad(of_sinks, passes)
        (loss, aux), (grads, tokens) = gradients((sinks, _no_tokens()), batch, _with_own_keys(state))
        loss = loss + tokens.start + tokens.end  # zeros; what nothing reads, the compiler drops, and with it the order
        grads = tree.map_with_path(lambda path, grad: gather.reduce_rest(grad, find(path, None), reduction), grads)
        return (jax.lax.psum(loss, mesh_lib.BATCH_AXES), jax.tree.map(_average, aux)), grads

    def gradients(params: Any, batch: Any, state: Any) -> Any:
        if used.variables(params):
            raise UserError(
                "reduce_dtype: NNX params with other variables (batch statistics, random counts) would change on each device alone; "
                "leave reduce_dtype away"
            )
        grad_specs = tree.map_with_path(lambda path, _: _by_hand(find(path, None).opt_state.spec, axes), params)
        run = _mapped(on_device, partition, params, batch, 0 if passes == 1 else 1, ((P(), P()), grad_specs))
        return run(params, batch, state)

    return gradients


def mean(
    loss_fn: Callable[..., Any], partition: Any, *, compute_dtype: Any, blocks: str, heads: str
) -> Callable[[Any, Any], jax.Array]:
    """Returns f(params, batch) -> the loss averaged over devices, forward only; `loss_fn(params, batch)` is a mean."""
    reduction, find = gather.Reduction(jnp.float32), _finder(partition)

    def with_aux(params: Any, batch: Any, _: Any) -> tuple[jax.Array, dict]:
        return loss_fn(params, batch), {}

    how = {"blocks": blocks, "heads": heads, "remat_name": "full", "recompute": ""}
    device_loss = _device_loss(with_aux, partition, reduction, compute_dtype, **how)

    def on_device(params: Any, batch: Any, _: Any) -> jax.Array:
        weights = tree.map_with_path(lambda path, leaf: gather.Weight(leaf, gather.sink(find(path, leaf), reduction)), params)
        return jax.lax.psum(device_loss(weights, _no_tokens(), batch, None)[0], mesh_lib.BATCH_AXES)

    return lambda params, batch: _mapped(on_device, partition, params, batch, 0, P())(params, batch, None)


def _device_loss(
    loss_fn: Callable[..., Any],
    partition: Any,
    reduction: gather.Reduction,
    compute_dtype: Any,
    **how: str,
) -> Callable[..., Any]:
    """Returns the loss of one device's `Weight`s, divided by the number of devices so that a sum over them is the mean."""
    find = _finder(partition)

    def gather_leaf(path: str, weight: gather.Weight) -> jax.Array:
        with jax.named_scope(path):
            return gather.gather_shard(weight, find(path, weight.stored), compute_dtype, reduction)

    def loss_of(weights: Any, tokens: _Tokens, *args: Any) -> tuple[jax.Array, Any]:
        chain = _Chain(find, compute_dtype, reduction, tokens)
        wrapped = used.wrap(
            loss_fn,
            gather_leaf,
            moves=used.moves(partition.placements),
            run=chain,
            is_weight=lambda node: isinstance(node, gather.Weight),
            **how,
        )
        loss, aux = wrapped(weights, *args)
        return chain.end(loss / mesh_lib.ways(partition.mesh)), aux

    return loss_of


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """One block's call: what it computes, and how its weights move."""

    body: Body
    placements: Mapping[str, gather.Placement]
    dtype: Any
    reduction: gather.Reduction
    policy: Any

    def gather(self, stored: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: self._whole(path, shard) for path, shard in stored.items()}

    def _whole(self, path: str, shard: jax.Array) -> jax.Array:
        with jax.named_scope(path):
            return gather.whole(shard, self.placements[path], self.dtype)

    def reduce(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: self._sum(path, grad) for path, grad in grads.items()}

    def _sum(self, path: str, grad: jax.Array) -> jax.Array:
        with jax.named_scope(path):  # traces and ledgers name the weight that a collective moves
            return gather.reduce_pass(grad, self.placements[path], self.reduction)


class _Chain:
    """Runs blocks so that each one's collectives wait for, and end before, what its neighbours do.

    Two tokens, scalar zeros, pass through the blocks in their order, and their cotangents in the opposite one. `start` leaves a block as
    soon as the block's input has arrived, and the next block's gather waits for it. The cotangent of `end` leaves a block when its
    gradients are summed, and the end of the next block's backward pass waits for it.
    """

    def __init__(
        self,
        find: Callable[[str, Any], gather.Placement],
        dtype: Any,
        reduction: gather.Reduction,
        tokens: "_Tokens",
    ):
        self._find, self._dtype, self._reduction = find, dtype, reduction
        self._tokens, self._trace = tokens, _trace()

    def __call__(self, body: Body, weights: dict[str, gather.Weight], arrays: list[jax.Array], policy: Any) -> Any:
        placements = {path: self._find(path, weight.stored) for path, weight in weights.items()}
        plan = _Plan(body, placements, self._dtype, self._reduction, policy)
        if _trace() != self._trace:  # inside a transformation of the model's own: tokens cannot pass in and out
            return _block(plan, weights, _no_tokens(), tuple(arrays))[0]
        outputs, self._tokens = _block(plan, weights, self._tokens, tuple(arrays))
        return outputs

    def end(self, loss: jax.Array) -> jax.Array:
        """Returns the loss, which the tokens are now part of."""
        return loss + 0.0 * (self._tokens.start + self._tokens.end)


def _trace() -> Any:
    return jax.extend.core.get_opaque_trace_state(convention="zerojax")


class _Tokens(NamedTuple):
    """See `_Chain`."""

    start: jax.Array
    end: jax.Array


def _no_tokens() -> _Tokens:
    return _Tokens(jnp.zeros(()), jnp.zeros(()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(plan: _Plan, weights: dict[str, gather.Weight], tokens: _Tokens, arrays: tuple) -> tuple[Any, _Tokens]:
    whole, tokens, arrays = _begin(plan, {path: weight.stored for path, weight in weights.items()}, tokens, arrays)
    return plan.body(whole, *arrays), tokens


def _begin(plan: _Plan, stored: dict[str, jax.Array], tokens: _Tokens, arrived: Any) -> tuple[dict, _Tokens, Any]:
    """Gathers a block's weights once the block before it has begun, and lets the next one gather."""
    stored, start = jax.lax.optimization_barrier((stored, tokens.start))
    start, arrived = jax.lax.optimization_barrier((start, arrived))
    return plan.gather(stored), tokens._replace(start=start), arrived


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
    """What a block's backward pass needs: the vjp function's leaves, but for whole weights, and the weights as stored."""

    stored: dict[str, jax.Array]
    leaves: list[jax.Array | None]
    paths: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})  # the weight that a leaf was
    structure: Any = dataclasses.field(metadata={"static": True})


def _block_forward(plan: _Plan, weights: dict[str, gather.Weight], tokens: _Tokens, arrays: tuple) -> tuple[Any, _Kept]:
    stored = {path: weight.stored for path, weight in weights.items()}
    whole, tokens, arrays = _begin(plan, stored, tokens, arrays)
    body = plan.body if plan.policy is None else jax.checkpoint(plan.body, policy=plan.policy)
    outputs, pull = jax.vjp(body, whole, *arrays)
    leaves, structure = jax.tree.flatten(pull)
    path_of = {id(weight): path for path, weight in whole.items()}
    paths = tuple(path_of.get(id(leaf)) for leaf in leaves)
    kept = [leaf if path is None else None for leaf, path in zip(leaves, paths)]
    return (outputs, tokens), _Kept(stored, kept, paths, structure)


def _block_backward(plan: _Plan, kept: _Kept, cotangents: tuple[Any, _Tokens]) -> tuple[Any, _Tokens, Any]:
    whole, tokens, arrived = _begin(plan, kept.stored, cotangents[1], cotangents[0])
    leaves = [leaf if path is None else whole[path] for leaf, path in zip(kept.leaves, kept.paths)]
    grads, *inputs = jax.tree.unflatten(kept.structure, leaves)(arrived)
    inputs = [jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, tangent) for tangent in inputs]
    # All products are made, and the block after this one has its gradients summed, before the block before this one begins.
    grads, inputs, end = jax.lax.optimization_barrier((grads, inputs, tokens.end))
    sums, end = jax.lax.optimization_barrier((plan.reduce(grads), end))
    sinks = {path: gather.Weight(None, total) for path, total in sums.items()}  # type: ignore[arg-type]  # no gradient
    return sinks, tokens._replace(end=end), tuple(inputs)


_block.defvjp(_block_forward, _block_backward)


def _mapped(run: Callable, partition: Any, params: Any, batch: Any, batch_dim: int, out_specs: Any) -> Callable:
    """Returns `run(params, batch, state)` on each device's shards, `state` whole."""
    axes, find = _manual_axes(partition.mesh), _finder(partition)
    param_specs = tree.map_with_path(lambda path, _: _by_hand(find(path, None).stored.spec, axes), params)
    batch_spec = P(*[None] * batch_dim, mesh_lib.BATCH_AXES)
    batch_specs = jax.tree.map(lambda leaf: batch_spec if leaf.ndim > batch_dim else P(), batch)
    return jax.shard_map(
        run,
        mesh=partition.mesh,
        in_specs=(param_specs, batch_specs, P()),
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,
    )


def _finder(partition: Any) -> Callable[[str, Any], gather.Placement]:
    """Returns f(path, shard or None) -> the weight's placement."""

    def wanted(place: gather.Placement) -> Any:
        return gather.local_shape(place.shape or (), place.stored)

    return used.finder(partition.placements, lambda leaf: leaf.shape, wanted)  # type: ignore[return-value]


def _manual_axes(mesh: Any) -> set[str]:
    """Returns the axes whose collectives are said here; `model` is left to the compiler where it splits anything."""
    return {axis for axis, size in mesh.shape.items() if axis in mesh_lib.BATCH_AXES or size == 1}


def _by_hand(spec: P, axes: set[str]) -> P:
    """Returns the part of a spec that names `axes`."""

    def keep(entry: Any) -> Any:
        names = tuple(name for name in ((entry,) if isinstance(entry, str) else entry or ()) if name in axes)
        return names[0] if len(names) == 1 else names or None

    return P(*[keep(entry) for entry in spec])


def _with_own_keys(state: Any) -> Any:
    """Folds the device's number into random keys, so that devices draw apart."""
    number = jax.lax.axis_index(mesh_lib.BATCH_AXES)

    def fold(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(leaf, number) if is_key and leaf.ndim == 0 else leaf

    return jax.tree.map(fold, state)


def _average(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UserError("loss_fn: returned a random key, which would differ between devices; derive keys from state.step")
    return jax.lax.pmean(leaf, mesh_lib.BATCH_AXES) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
