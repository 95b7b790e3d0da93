"""Describes how one weight is sharded and sent. This module holds it as a value, and finds that of a weight in a tree.

A `Placement` has one sharding for the stored optimizer state and one for the update, because the two may differ.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import specs as specs_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.tree import Leaf, PyTree


class OneProgram(NamedTuple):
    """Why a step with some setting is one program: pipelines, and steps block by block, have a program for each stage or block."""

    argument: str
    why: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.argument} {self.why}; {self.way_out}"


class Wire(Protocol):
    """How explicit collectives send a weight, and how its gradient comes home. A new wire is a class in a module of its own, like those of
    `wires`, and a value of `Placement.wire`. `gather.Plain` is the one that others differ from.

    In a block, what `send` returns arrives. The block is differentiated with respect to `differentiated`, and its body is given `used`.
    `home` makes of that gradient the one of the weight's sink. What arrives is not kept for the backward pass, but sent again: from the
    shard, or from `near`, which is kept.
    """

    @property
    def grad_dtype(self) -> DTypeLike:
        """Returns the dtype of the gradient that comes home."""

    def known(self, shards: Mapping[str, jax.Array]) -> Mapping[str, Any]:
        """Returns what `send` must know of weights beside their shards, by path; called once a step, for all weights of this wire."""

    def around(self) -> AbstractContextManager[None]:
        """Returns a context of the trace of the loss on a device."""

    def read_as(self, first: str, path: str) -> bool:
        """Notes that a weight is read as that of the first of alike blocks was, whose trace serves its block too. False: each is traced."""

    def near(self, shard: jax.Array, placement: "Placement", dtype: DTypeLike | None) -> PyTree:
        """Returns what a device keeps of a weight from the forward to the backward pass, nearer to all that is sent; None: its shard."""

    def send(self, shard: Any, known: Any, placement: "Placement", dtype: DTypeLike | None) -> PyTree:
        """Returns what arrives of a weight, a pytree, from its shard or from `near`; `dtype` is that of the forward pass, or None for the
        shard's own."""

    def differentiated(self, sent: PyTree, dtype: DTypeLike | None) -> jax.Array:
        """Returns the array that gets a block's gradient: what arrived, or zeros."""

    def used(self, path: str, sent: PyTree, differentiated: jax.Array) -> AbstractContextManager[jax.Array]:
        """Returns a context of the trace of a block, with the array that the model is given."""

    def leave(self, grad: jax.Array, placement: "Placement", reduction: Any) -> PyTree:
        """Returns what `home` takes from the gradient of `differentiated`, after what is sent of it at once: beside the backward pass of
        its block. `reduction` is a `gather.Reduction`."""

    def home(self, grad: Any, placement: "Placement", reduction: Any, unsent: Any = None) -> tuple[jax.Array, Any]:
        """Returns the gradient of a weight's sink from what left; it is sent beside the backward pass of the block before. `unsent` is what
        was not sent of earlier gradients, and what is not sent now is returned beside (`gather.ShardAndSink`)."""

    def outside(
        self, path: str, weight: Any, placement: "Placement", dtype: DTypeLike | None, reduction: Any
    ) -> jax.Array:
        """Returns the array that a model is given outside of blocks, from a `gather.ShardAndSink`, whose sink gets its gradient."""

    def received(self, placement: "Placement") -> Mapping[str, float]:
        """Returns the elements that a device receives in one pass, by role of `roles.SENT_OF_WEIGHTS`, where they are not those of a
        weight that is sent element by element."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The shardings of one weight, its gradient and its optimizer state.

    Attributes:
      stored: of the weight between two steps.
      used: of the weight in the forward pass.
      grad: of the gradient that a backward pass returns.
      opt_state: of the moments and the master weight between two steps, with their memory kind.
      update: of the gradient, the moments and the weight during the update.
      wire: how explicit collectives send it.
      padding: for each dim, the elements by which the stored array is longer than the one that the model sees; () for none.
      shape: of the stored array; a leaf of another shape is refused. None fits any.
      trainable: whether the weight has a gradient and an update. If not, `grad`, `opt_state` and `update` are not read.
      overwritten: whether its gradient is its new value (`is_overwritten`).
      layer_dims: how many of its first dims count layers (`layer_stacks.counts`).
    """

    stored: NamedSharding
    used: NamedSharding
    grad: NamedSharding
    opt_state: NamedSharding
    update: NamedSharding
    wire: Wire
    padding: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    trainable: bool = True
    overwritten: bool = False
    layer_dims: int = 0

    @property
    def over(self) -> tuple[str, ...]:
        """Returns the axes over which the stage shards it: experts are not gathered over those along which they live."""
        own = specs_lib.axes(self.used.spec)
        return tuple(axis for axis in mesh_lib.STATE if axis not in own)

    @property
    def is_experts(self) -> bool:
        """Returns whether a device has some of the matrices of a stack and never the others."""
        return len(self.over) < len(mesh_lib.STATE)


def is_overwritten(path: str) -> bool:
    """Returns whether a weight's gradient is its new value, as flax's TrainState does it: statistics of fp8 matmuls.

    Such a gradient is neither summed, clipped nor scaled: over devices and passes it is the maximum.
    """
    return OVERWRITE_WITH_GRADIENT in path.split("/")


def is_frozen(node: PyTree) -> bool:
    """Returns whether a node of a trainable part is in the place of a frozen weight."""
    return isinstance(node, optax.MaskedNode)


def finder(
    placements: Mapping[str, Placement],
    expected: Callable[[Placement], Any],
    of_layer: Callable[[str, Placement], Placement],
) -> Callable[[str, Any], Placement | None]:
    """Returns f(path, leaf) -> the placement of that weight, or None. It refuses a leaf of another shape than `expected`, but for one
    layer of a stack, which may be one of several stacks: `of_layer(path, stack)` returns its placement."""
    index = tree.suffix_index(placements)

    def find(path: str, leaf: Leaf) -> Placement | None:
        found = tree.longest_suffix(index, path)
        if found is None:
            return None
        weight = placements[found]
        if leaf is None or weight.shape is None:
            return weight
        dims = len(weight.shape) - len(leaf.shape)
        if dims >= 0 and tuple(leaf.shape) == tuple(expected(weight)[dims:]):
            for _ in range(dims):
                weight = of_layer(found, weight)
            return weight
        raise UserError(
            f"{path}: has shape {leaf.shape}, and the weight stored as {found} has {expected(weight)}; where several "
            f"models share a state, pass the placements of this one alone; a block inside nn.vmap cannot be in `blocks`"
        )

    return find


def moves(placements: Mapping[str, Placement]) -> bool:
    """Returns whether any weight is gathered: its stored and its used sharding differ."""
    return any(weight.stored != weight.used for weight in placements.values())


def has_stacks(placements: Mapping[str, Placement]) -> bool:
    """Returns whether any weight is a stack of layers, known as such, that is gathered."""
    return any(weight.layer_dims and weight.stored != weight.used for weight in placements.values())
