"""Runs forward and backward pass on each device's own examples. This module calls their collectives itself, in a chosen dtype.

The loss function sees one device's examples, and means are averaged over devices, as in DDP, FSDP and DeepSpeed (`sharded_batch`; a
weighted mean returns its two sums and is exact). This has three benefits
over collectives inserted by the compiler. Gradients are summed in float32 whatever the dtype of the matmuls. Several passes can add up
before the sum. A block's collectives overlap its neighbours' arithmetic (`overlap`).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import specs, tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import block_settings, intercept, lifted_blocks, nnx_blocks, overlap, where_used
from zerojax.zero.blocks import stored as stored_lib
from zerojax.zero.gradients import accumulate
from zerojax.zero.sharded_batch import constraints, dependence, inputs, keys, outputs, parts, returned_state
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib

Program = Callable[[], dependence.TracedLoss]
LEAKED = (
    "blocks: with reduce_dtype, a module that matches reads an array that is neither its weight nor its argument (a global, or an "
    "attribute set outside); make it an argument, name other blocks, or omit reduce_dtype"
)


def value_and_grad(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    how: block_settings.Blocks,
    *,
    passes: int,
    reduce_dtype: DTypeLike | None,
    compute_dtype: DTypeLike | None,
    layout: inputs.Layout,
    in_16_bits: bool = False,
    feedback: gather.Feedback = gather.NO_FEEDBACK,
) -> Callable[..., Any]:
    """Returns f(params, batch, state) -> ((loss, aux), grads), over all devices and `passes` micro-batches.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> (loss, aux)` of `outputs.with_aux`, called with one device's examples and gathered
        weights. Random keys differ between devices and passes (`keys`).
      partition: how the train state is sharded.
      how: where weights are gathered, and which residuals are kept.
      passes: the number of micro-batches; above 1 the leaves of the batch are [passes, ...].
      reduce_dtype: the dtype in which gradients are summed over devices.
      compute_dtype: see `where_used.where_used`.
      layout: how the batch is sharded.
      in_16_bits: whether gradients of several passes add up in bf16.
      feedback: how what wires do not send of gradients is kept.

    Gradients are float32 and sharded as the optimizer state. If they stay replicated (stages 0 and 1), several passes add up on each
    device and are summed over devices once. Values of `aux` are made equal on all devices by the rule of `outputs`; `aux["state"]` also has
    the fields that hooks renew, and `aux["kept"]` those of `feedback`.
    """
    stays_replicated = all(own.grad == own.used for own in partition.placements.values())
    reduction = gather.Reduction(reduce_dtype, at_once=passes == 1, small_at_once=stays_replicated)
    of_device = OfDevice(loss_fn, partition, how, reduction, compute_dtype, passes, overlap.Chain, feedback)

    def on_device(program: Program, own_keys: keys.Paths, params: PyTree, batch: PyTree, state: State) -> PyTree:
        of_sinks = of_device.of_sinks(program, own_keys, params)
        gradients = feedback.value_and_grad(of_sinks)
        if passes > 1:
            device = jax.lax.axis_index(mesh_lib.SUMMED) if in_16_bits else 0
            gradients = accumulate.value_and_grad(
                of_sinks, passes, own_keys, in_16_bits=in_16_bits, device=device, one_pass=gradients
            )
        with leaks_named():
            given = [hook.inputs(state) for hook in how.hooks]
            (loss, aux), (grads, tokens, seen) = gradients((*of_device.sinks(params), given), batch, state)
        grads = with_tokens((tokens, aux.pop("tokens")), grads)
        seen = jax.tree.map(lambda leaf: jax.lax.pmax(leaf, mesh_lib.SUMMED), seen)
        grads = tree.map_with_path(
            lambda path, grad: gather.reduce_rest(grad, of_device.find(path, None), reduction), grads
        )
        fields = dict(aux.get("state", {}))
        for hook, own in zip(how.hooks, seen):
            fields |= hook.renewed(state, own)
        kept = {name: fields.pop(name) for name in feedback.specs()}
        aux = {"metrics": outputs.values(outputs.of_all_devices(aux["metrics"])), "state": fields, "kept": kept}
        return (jax.lax.psum(loss, mesh_lib.SUMMED), aux), grads

    of_aux = {"metrics": P(), "state": P(), "kept": feedback.specs()}
    return of_device.mapped(on_device, layout, of_aux=of_aux)


@dataclasses.dataclass(frozen=True)
class OfDevice:
    """What one device computes in a pass: the loss as a function of its gradients' sinks."""

    loss_fn: Callable[..., Any]
    partition: partition_lib.Partition
    how: block_settings.Blocks
    reduction: gather.Reduction
    compute_dtype: Any
    passes: int
    runner: Callable[..., Any]
    feedback: gather.Feedback = gather.NO_FEEDBACK

    @functools.cached_property
    def find(self) -> Callable[[str, Any], placement.Placement]:
        """Returns f(path, shard or None) -> the weight's placement."""
        return finder(self.partition)

    def sinks(self, params: PyTree) -> tuple[Any, overlap.Tokens]:
        """Returns what the loss is differentiated with respect to."""
        of_weight = lambda path, shard: gather.sink(self.find(path, shard), self.reduction)  # noqa: E731
        return tree.map_with_path(of_weight, params), overlap.no_tokens()

    def of_sinks(self, program: Program, own_keys: keys.Paths, params: PyTree) -> Callable[..., tuple[jax.Array, Any]]:
        """Returns f((sinks, tokens, inputs of the hooks), batch, state) -> (loss, aux) of one device's pass."""
        device = jax.lax.axis_index(mesh_lib.SUMMED)
        by_wire: dict[placement.Wire, dict[str, jax.Array]] = {}
        for path, shard in tree.flatten(params):
            by_wire.setdefault(self.find(path, shard).wire, {})[path] = shard
        known = {path: own for wire, shards in by_wire.items() for path, own in wire.known(shards).items()}

        def of_sinks(inputs: tuple[Any, overlap.Tokens, Any], batch: PyTree, state: State) -> tuple[jax.Array, Any]:
            sinks, tokens, given = inputs
            unsent = self.feedback.rows(state)

            def weight(path: str, shard: jax.Array, sink: Any) -> gather.ShardAndSink:
                return gather.ShardAndSink(shard, sink, unsent.get(path))

            chain = self.runner(self.find, self.compute_dtype, self.reduction, tokens, known)
            run = device_loss(self.loss_fn, self.partition, self.how, chain)
            own = [keys.fold(values, paths, device) for values, paths in zip((state, batch), own_keys)]
            with contextlib.ExitStack() as around:
                around.enter_context(keys.folded_in_flax(device))
                for hook, inputs_of_hook in zip(self.how.hooks, given):
                    around.enter_context(hook.known(inputs_of_hook))
                for wire in by_wire:
                    around.enter_context(wire.around())
                loss, aux = run(tree.map_with_path(weight, params, sinks), *reversed(own))
            ways = mesh_lib.size(self.partition.mesh, mesh_lib.SUMMED)
            fields = aux.get("state", {})
            if fields:
                fields = returned_state.of_devices(fields, state, program)
            fields = fields | self.feedback.fields(state)
            loss, of_pass = outputs.objective(outputs.loss_over_devices(loss, ways), self.passes)
            metrics = outputs.terms(aux["metrics"], state, program, self.passes)
            return loss, {"metrics": metrics, **of_pass, "state": fields, "tokens": chain.tokens}

        return of_sinks

    def mapped(
        self,
        on_device: Callable[..., Any],
        layout: inputs.Layout,
        of_grad: Callable[[placement.Placement], Any] = lambda found: found.update,
        of_aux: Any = P(),
    ) -> Callable[..., Any]:
        """Returns `on_device(program, own_keys, params, batch, state, ...)` over all devices, of (params, batch, state, ...).

        `of_grad` tells the sharding of a weight's gradient, and `of_aux` are the specs of what it returns beside the loss.
        """
        axes, find, partition = mesh_lib.manual(self.partition.mesh), self.find, self.partition
        freezes = partition.freezes
        nnx_blocks.check_summed(partition.abstract_state.params)

        def spec_of_grad(found: placement.Placement) -> Any:
            return specs.only(of_grad(found).spec, axes) if found.trainable else optax.MaskedNode()

        def trained(params: PyTree) -> PyTree:
            return intercept.unboxed(partition.trainable_part(params))

        def gradients(params: PyTree, batch: PyTree, state: State, *rest: Any) -> PyTree:
            used = functools.partial(where_used.abstract_used, params, partition, self.compute_dtype)
            program = functools.cache(lambda: dependence.of_loss(self.loss_fn, used(), batch, state, layout))
            if layout.is_unsure(batch):
                dependence.refuse_unsure(self.loss_fn, used(), batch, state, layout, trained(params))
            elif freezes:  # a loss that trains all weights is traced once
                dependence.refuse_unread(self.loss_fn, used(), batch, state, layout, trained(params))
            if isinstance(self.loss_fn, parts.Checked):
                self.loss_fn.read(used(), batch, state, layout)
            own_keys = keys.own(program, layout, batch, state)
            grad_specs = tree.map_with_path(lambda path, _: spec_of_grad(find(path, None)), params)
            run = functools.partial(on_device, program, own_keys)
            specs_of_state = self.feedback.state_specs(state)
            out_specs = ((P(), of_aux), grad_specs)
            over_devices = mapped(run, partition, params, layout.specs(batch), out_specs, len(rest), specs_of_state)
            return over_devices(params, batch, state, *rest)

        return gradients


def device_loss(
    loss_fn: Callable[..., Any], partition: partition_lib.Partition, how: block_settings.Blocks, chain: Any
) -> Callable[..., Any]:
    """Returns `loss_fn` as a function of `ShardAndSink`s on one device, whose blocks run in the chain's order."""
    stored = stored_lib.Stored(
        chain.gather_leaf,
        how,
        placement.moves(partition.placements),
        run=chain,
        is_weight=lambda node: isinstance(node, gather.ShardAndSink),
        has_stacks=placement.has_stacks(partition.placements),
        shard_leaf=chain.shard_leaf,
    )
    return where_used.wrap(loss_fn, stored)


def mapped(
    run: Callable,
    partition: partition_lib.Partition,
    params: PyTree,
    batch_specs: PyTree,
    out_specs: PyTree,
    num_rest: int = 0,
    state_specs: PyTree = P(),
) -> Callable:
    """Returns `run(params, batch, state, ...)` on each device's shards; the state, but for `state_specs`, and what follows it are
    replicated."""
    axes, find = mesh_lib.manual(partition.mesh), finder(partition)
    param_specs = tree.map_with_path(lambda path, _: specs.only(find(path, None).stored.spec, axes), params)
    batch_specs = jax.tree.map(lambda spec: specs.only(spec, axes), batch_specs, is_leaf=inputs.is_spec)
    # The state is an argument for losses that read it; what none reads is dropped, so no moments are gathered.
    return jax.shard_map(
        constraints.dropped(axes)(run),
        mesh=partition.mesh,
        in_specs=(param_specs, batch_specs, state_specs, *[P()] * num_rest),
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,
    )


def finder(partition: partition_lib.Partition) -> Callable[[str, Any], placement.Placement]:
    """Returns f(path, shard or None) -> the weight's placement."""
    expected: Callable[..., Any] = lambda weight: gather.local_shape(weight.shape or (), weight.stored)  # noqa: E731
    find = placement.finder(partition.placements, expected, lifted_blocks.of_layer)

    def find_weight(path: str, leaf: Leaf) -> placement.Placement:
        found = find(path, leaf)
        if found is None:
            raise UserError(
                f"reduce_dtype: params/{path} does not have the role of a weight (see `roles`); omit reduce_dtype"
            )
        return found

    return find_weight


def with_tokens(tokens: PyTree, values: PyTree) -> PyTree:
    """Adds the tokens' zeros to the smallest of `values`, because the compiler drops tokens that nothing reads, and their order."""
    leaves, structure = jax.tree.flatten(values)
    smallest = min(range(len(leaves)), key=lambda number: leaves[number].size)
    # Not to the loss: where it is a metric too, the compiler computes the metric without the tokens and drops the rest.
    leaves[smallest] += jnp.stack(jax.tree.leaves(tokens)).sum().astype(leaves[smallest].dtype)
    return jax.tree.unflatten(structure, leaves)


@contextlib.contextmanager
def leaks_named() -> Iterator[None]:
    """Names the cause where an array leaks into the trace of a block."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise UserError(LEAKED) from error
