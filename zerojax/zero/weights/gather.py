"""Gathers a device's shard of a weight where it is used. This module holds the collectives of explicit steps, inside `jax.shard_map`.

A weight is stored sharded and used gathered, and its gradient is sharded again (ZeRO, arXiv:1910.02054, section 5; FSDP, arXiv:2304.11277,
section 3):

    forward   w_used = all_gather(cast(w_stored))        2 bytes an element are sent in bf16
    backward  g = reduce_scatter(g_used)                 an all-reduce where gradients stay replicated

Gradients are summed over devices in a chosen dtype, and the sum may wait until the last of several passes. `where_used.gathered` is the
same for global arrays, by collectives that the compiler inserts.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import precision, specs
from zerojax.tree import PyTree
from zerojax.zero.weights import tpu_slices
from zerojax.zero.weights.placement import Placement

SMALL = 2**16  # elements, whose sum takes no longer than one of a few
STATE = specs.entry(mesh_lib.STATE)  # over which most weights are gathered, as collectives name it


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a gradient is summed over devices.

    Attributes:
      dtype: the dtype of the sum.
      at_once: whether every backward pass sums. If not, replicated gradients stay unsummed until `reduce_rest`.
      small_at_once: whether it sums those of at most `SMALL` elements too. An all-reduce between the blocks' reduce-scatters is queued
        behind the one that was sent before, and may make the arithmetic wait for it.
    """

    dtype: Any
    at_once: bool = True
    small_at_once: bool = True

    def waits(self, placement: Placement) -> bool:
        """Returns whether a pass leaves this weight's gradient unsummed."""
        if placement.grad != placement.used or placement.overwritten:
            return False
        return not self.at_once or (not self.small_at_once and math.prod(placement.shape or ()) <= SMALL)

    def target(self, placement: Placement) -> NamedSharding:
        """Returns the sharding of this weight's gradient after a pass."""
        return placement.used if self.waits(placement) else placement.update


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardAndSink:
    """One device's shard of a weight, and the array that receives the weight's gradient.

    Attributes:
      stored: the shard, as in `Placement.stored`.
      sink: zeros of the gradient's shape and dtype on this device (`sink`). The loss is differentiated with respect to the sink, because a
        gradient and its weight differ in shape where only one of them is sharded. A frozen weight has none: `optax.MaskedNode()`.
      unsent: what its wire did not send of earlier gradients. The backward pass returns in its place what it does not send now.
    """

    stored: jax.Array
    sink: Any
    unsent: Any = None


class Feedback:
    """How a step keeps what wires do not send of gradients. This one keeps nothing; `wires.unsent` has the other."""

    def specs(self) -> dict[str, Any]:
        """Returns the specs of the fields of the state that are renewed."""
        return {}

    def state_specs(self, state: Any) -> PyTree:
        """Returns the specs of a state, or of its parts, over the devices of an explicit step."""
        return P()

    def fields(self, state: Any) -> dict[str, Any]:
        """Returns those fields of a state."""
        return {}

    def rows(self, state: Any) -> Mapping[str, jax.Array]:
        """Returns `ShardAndSink.unsent` of each weight that has one, by path below the params, on one device."""
        return {}

    def value_and_grad(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `jax.value_and_grad` of `loss(inputs, batch, state) -> (loss, aux)`, with the renewed fields in `aux["state"]`."""
        return jax.value_and_grad(loss, has_aux=True)


NO_FEEDBACK = Feedback()


def sink(placement: Placement, reduction: Reduction) -> PyTree:
    """Returns zeros of the shape and dtype of a weight's gradient on this device; see `ShardAndSink`."""
    if not placement.trainable:
        return optax.MaskedNode()
    assert placement.shape is not None
    return jnp.zeros(local_shape(placement.shape, reduction.target(placement)), placement.wire.grad_dtype)


def local_shape(shape: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """Returns the shape of a device's shard inside a `jax.shard_map` over the axes of `mesh.manual`."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return NamedSharding(mesh, specs.only(sharding.spec, mesh_lib.manual(mesh))).shard_shape(shape)


# JAX's own transpose of a gather is a reduce-scatter in the gathered dtype. This one sums in `reduction.dtype`, sharded as the update.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_shard(
    weight: ShardAndSink, placement: Placement, dtype: DTypeLike | None, reduction: Reduction
) -> jax.Array:
    """Returns a weight gathered and in `dtype` from this device's shard; call it inside `jax.shard_map`.

    The gradient is that of `weight.sink`: the sum over devices, sharded as `placement.update`, or this device's own term if
    `reduction.waits`.
    """
    return all_gather(weight.stored, placement, dtype)


def all_gather(stored: jax.Array, placement: Placement, dtype: DTypeLike | None) -> jax.Array:
    """Returns a weight gathered and in `dtype` from this device's shard."""
    weight, dim = cast(stored, placement, dtype), data_dim(placement.stored, placement.over)
    if dim is not None:
        collective = functools.partial(jax.lax.all_gather, axis_name=specs.entry(placement.over), axis=dim, tiled=True)
        weight = of_shards(collective, placement)(weight)
    return without_padding(weight, placement)


def of_shards(collective: Callable[[jax.Array], jax.Array], placement: Placement) -> Callable[..., jax.Array]:
    """Returns a collective of a weight, or its gradient, that does not gather it over the axes that the compiler shards."""
    if not mesh_lib.rest():
        return collective
    entries = [specs.names(entry) for entry in placement.stored.spec]
    if any({*names} & {*mesh_lib.STATE} and {*names} & {*mesh_lib.COMPILER} for names in entries):
        return collective  # the parts of a device's shard over the compiler's axes are not in a row, and XLA must arrange them
    spec = specs.only(placement.stored.spec, mesh_lib.COMPILER)
    return mesh_lib.manual_over_rest(collective, spec, spec)


def is_gathered(placement: Placement) -> bool:
    """Returns whether a weight is stored sharded and used gathered."""
    return data_dim(placement.stored, placement.over) is not None


def reduce_rest(grad: jax.Array, placement: Placement, reduction: Reduction) -> jax.Array:
    """Sums over devices a gradient that the passes left unsummed."""
    return _sum(grad, placement, reduction.dtype).astype(jnp.float32) if reduction.waits(placement) else grad


def _sum(grad: jax.Array, placement: Placement, dtype: DTypeLike | None) -> jax.Array:
    """Returns the sum over devices in `dtype`, sharded as `placement.update`; of what overwrites its weight, the largest, in float32."""
    if placement.overwritten:
        return jax.lax.pmax(grad.astype(jnp.float32), mesh_lib.SUMMED)
    return of_shards(functools.partial(_sum_shards, placement=placement), placement)(grad.astype(dtype))


def _sum_shards(grad: jax.Array, placement: Placement) -> jax.Array:
    over, mesh = placement.over, placement.update.mesh
    dim = data_dim(placement.update, over)
    if dim is None:
        return sum_over_copies(grad, mesh, but=tuple(axis for axis in mesh_lib.STATE if axis not in over))
    if mesh_lib.size(mesh, over) > 1:
        scatter = tpu_slices.scatter if mesh_lib.platform(mesh) == "tpu" else _scatter
        grad = scatter(grad, dim, over, mesh)
    return sum_over_copies(grad, mesh)


def sum_over_copies(grad: jax.Array, mesh: Mesh | AbstractMesh, but: tuple[str, ...] = mesh_lib.STATE) -> jax.Array:
    """Returns the sum of gradients over all axes that sums run over but those of `but`."""
    axes = tuple(axis for axis in mesh_lib.SUMMED if axis not in but and mesh.shape[axis] > 1)
    return jax.lax.psum(grad, axes) if axes else grad


def _scatter(grad: jax.Array, dim: int, over: tuple[str, ...], mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns this device's shard, along `dim`, of the sum over some axes."""
    return jax.lax.psum_scatter(grad, specs.entry(over), scatter_dimension=dim, tiled=True)


def shard_backward(
    placement: Placement, dtype: DTypeLike | None, reduction: Reduction, unsent: Any, grad: jax.Array
) -> tuple[Any]:
    """Returns the gradient of a `ShardAndSink` from that of the weight that was made of it."""
    wire = placement.wire
    total, unsent = (
        wire.home(wire.leave(grad, placement, reduction), placement, reduction, unsent)
        if placement.trainable
        else (optax.MaskedNode(), None)
    )
    return (ShardAndSink(None, total, unsent),)  # type: ignore[arg-type]  # None: no gradient


gather_shard.defvjp(
    lambda weight, placement, dtype, _: (all_gather(weight.stored, placement, dtype), weight.unsent), shard_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def own_shard(weight: ShardAndSink, placement: Placement, dtype: DTypeLike | None, reduction: Reduction) -> jax.Array:
    """Returns this device's shard in `dtype`, to be read by sums that add up over `placement.over`.

    The gradient of such a sum is the same on all of these devices, so that of `weight.sink` needs no collective over them.
    """
    return cast(weight.stored, placement, dtype)


def _own_shard_backward(
    placement: Placement, dtype: DTypeLike | None, reduction: Reduction, _: None, grad: jax.Array
) -> tuple[Any]:
    if not placement.trainable:
        return (ShardAndSink(None, optax.MaskedNode()),)  # type: ignore[arg-type]
    mesh = placement.update.mesh
    assert isinstance(mesh, Mesh)
    total = sum_over_copies(grad.astype(reduction.dtype), mesh, but=placement.over)
    return (ShardAndSink(None, total.astype(placement.wire.grad_dtype)),)  # type: ignore[arg-type]


own_shard.defvjp(lambda weight, placement, dtype, _: (cast(weight.stored, placement, dtype), None), _own_shard_backward)


def has_own_shard(weight: ShardAndSink, placement: Placement) -> bool:
    """Returns whether `own_shard` is one part of the weight, whose gradient is sharded alike and sent by no wire of its own."""
    is_plain = type(placement.wire) is Plain and weight.unsent is None and not placement.overwritten
    return is_plain and is_gathered(placement) and not placement.padding and placement.stored == placement.update


@dataclasses.dataclass(frozen=True)
class Plain:
    """The wire of a weight that is sent in the dtype in which it is used; see `placement.Wire`. Others differ from it in what they say."""

    grad_dtype: Any = jnp.float32

    def known(self, shards: Mapping[str, jax.Array]) -> Mapping[str, Any]:
        return {}

    def around(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read_as(self, first: str, path: str) -> bool:
        return True

    def near(self, shard: jax.Array, placement: Placement, dtype: DTypeLike | None) -> PyTree:
        return None

    def send(self, shard: Any, known: Any, placement: Placement, dtype: DTypeLike | None) -> PyTree:
        return all_gather(shard, placement, dtype)

    def differentiated(self, sent: PyTree, dtype: DTypeLike | None) -> jax.Array:
        return sent

    def used(self, path: str, sent: PyTree, differentiated: jax.Array) -> contextlib.AbstractContextManager[jax.Array]:
        return contextlib.nullcontext(differentiated)

    def leave(self, grad: jax.Array, placement: Placement, reduction: Reduction) -> PyTree:
        return grad

    def home(
        self, grad: jax.Array, placement: Placement, reduction: Reduction, unsent: Any = None
    ) -> tuple[jax.Array, Any]:
        grad = with_padding(grad, placement)
        grad = grad if reduction.waits(placement) else _sum(grad, placement, reduction.dtype)
        return grad.astype(self.grad_dtype), unsent

    def outside(
        self, path: str, weight: ShardAndSink, placement: Placement, dtype: DTypeLike | None, reduction: Reduction
    ) -> jax.Array:
        return gather_shard(weight, placement, dtype, reduction)

    def received(self, placement: Placement) -> Mapping[str, float]:
        return {}


PLAIN = Plain()


def data_dim(sharding: NamedSharding, over: tuple[str, ...] = mesh_lib.STATE) -> int | None:
    """Returns the dim sharded over these axes."""
    return next(iter(specs.dims_of(sharding.spec, over)), None)


def cast(weight: jax.Array, placement: Placement, dtype: DTypeLike | None) -> jax.Array:
    """Returns a weight in the dtype of the forward pass."""
    return weight if placement.overwritten else precision.cast_floating(weight, dtype)


def without_padding(weight: jax.Array, placement: Placement) -> jax.Array:
    """Returns a weight without the zeros of `Placement.padding`."""
    if not placement.padding:
        return weight
    return jax.lax.slice(weight, (0,) * weight.ndim, [n - p for n, p in zip(weight.shape, placement.padding)])


def with_padding(grad: jax.Array, placement: Placement) -> jax.Array:
    """Returns a gradient of what the model sees with the zeros of `Placement.padding`."""
    return jnp.pad(grad, [(0, extra) for extra in placement.padding]) if placement.padding else grad
