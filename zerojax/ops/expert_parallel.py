"""Experts that live on different devices. This module sends tokens to their experts and back, inside `jax.shard_map`.

Each of N devices has E/N experts of every mixture. A token is one row for each of its K experts. A device puts its rows for another one
into a buffer of a fixed length, its `room`; two all-to-alls bring the rows there and the results back. Two more take the gradients
the same way, and one brings the rows again, which are not kept.

    rows --all-to-all--> sorted by expert --grouped matmuls--> sorted back --all-to-all--> added up by token

The room is `load` times what a balanced router sends, so memory and bytes do not depend on the router. No row is lost where one sends
more: further rounds take what is left, as many as the fullest buffer of all devices needs, so that every device takes part in each. Their
backward pass is written by hand: it computes a round again, and keeps nothing of it. A row's weight travels with it and multiplies
between the matmuls, since down(w h) = w down(h): then no result is read in the backward pass, and none is sent again.

Shapes: T tokens, D embed, E experts, K experts of a token, R = T K rows, N devices, e = E / N experts of a device, S = N room rows
that a device sends and gets in a round.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped
from zerojax import mesh as mesh_lib
from zerojax import specs
from zerojax.errors import UserError
from zerojax.ops import columns, stand_ins

LOAD = 1.5  # a room, over what a balanced router sends


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """A device's experts' matrices of one kind.

    Attributes:
      shard: float[e, inputs, outputs].
      axes: the mesh axes over which experts are sharded.
      spec: how the compiler shards the matrices over its axes.
      load: see `LOAD`.
    """

    shard: jax.Array
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    spec: P = dataclasses.field(metadata={"static": True})
    load: float = dataclasses.field(default=LOAD, metadata={"static": True})


_STACKS = stand_ins.StandIns[Stack](
    "expert: {} is read by no operation that can send tokens to their experts, such as zerojax.ops.experts.apply(x, routing, gate, up, "
    "down), called with the weight itself; omit `expert` from its override",
    "expert: {} is also computed with, beside an operation that sends tokens to their experts; a penalty on the weight needs all experts; "
    "omit `expert` from its override",
)
used, take = _STACKS.used, _STACKS.take


def add(path: str, share: Stack) -> jax.Array:
    """Returns what a model sees in place of a stack of matrices, and makes it known (`stand_ins`)."""
    ways = jax.lax.axis_size(share.axes)
    shape = (share.shard.shape[0] * ways, *share.shard.shape[1:])
    return _STACKS.add(path, share, share.shard, shape, share.shard.dtype)


def room(rows: int, ways: int, load: float, most: int | None = None) -> int:
    """Returns the rows that a device may send to another one in a round; `most` is what it sends at most, None: all of them."""
    return min(rows if most is None else most, -int(-load * rows // ways))


def cost(rows: int, dim: int, ways: int, load: float, itemsize: int) -> dict[str, int]:
    """Returns the bytes that a device receives of others in a layer's all-to-alls, {"forward": ..., "backward": ...}, in one round."""
    once = (ways - 1) * room(rows, ways, load)
    return {"forward": once * (2 * dim * itemsize + 4), "backward": once * (3 * dim * itemsize + 8)}


@dataclasses.dataclass(frozen=True)
class _Travel:
    """What all rounds of a mixture share."""

    axes: tuple[str, ...]
    ways: int
    room: int
    activation: Callable[[jax.Array], jax.Array]


class _Seats(NamedTuple):
    """Which rows go where. A row's place is its number among those of this device for the same other one.

    Attributes:
      order_R: the rows, sorted by expert.
      first_N, count_N: the place in `order_R` of the first row for a device, and the number of rows.
      peer_R, place_R: the device that a row goes to (N: none), and its place.
      ends_Ne: of the rows that others send here, by device: the place after the last one of each expert.
      rounds: int32[], of all devices.
    """

    order_R: jax.Array
    first_N: jax.Array
    count_N: jax.Array
    peer_R: jax.Array
    place_R: jax.Array
    ends_Ne: jax.Array
    rounds: jax.Array


def apply(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    activation: Callable[[jax.Array], jax.Array],
    *,
    capacity: int | None = None,
) -> jax.Array:
    """Returns `experts.apply` of this device's tokens: float[T, D].

    Args:
      x_TD: this device's tokens.
      experts_TK: int32, their experts; E for one that a token skips.
      weights_TK: float32.
      gate, up, down: this device's experts.
      activation: of the gate.
      capacity: the most rows of an expert of one device; None: any.
    """
    ways, rows, own = jax.lax.axis_size(gate.axes), experts_TK.size, len(gate.shard)
    most = rows if capacity is None else min(rows, own * capacity)
    call = _Travel(gate.axes, ways, room(rows, ways, gate.load, most), activation)
    width = _width(gate, up, down)

    def on_shards(x_TD: jax.Array, experts_TK: jax.Array, weights_TK: jax.Array, *matrices: jax.Array) -> jax.Array:
        plan = _plan(call, experts_TK, own)
        y_TD = _round(call, plan, 0, x_TD, weights_TK, *matrices)
        if call.room < most:
            y_TD += _later(call, plan, x_TD, weights_TK, *matrices)
        return (jax.lax.psum(y_TD, width) if width else y_TD).astype(x_TD.dtype)

    matrices = (gate.shard, up.shard, down.shard)
    in_specs = (P(), P(), P(), *[share.spec for share in (gate, up, down)])
    with jax.named_scope("experts"):
        return mesh_lib.manual_over_rest(on_shards, in_specs, P())(x_TD, experts_TK, weights_TK, *matrices)


def _width(gate: Stack, up: Stack, down: Stack) -> tuple[str, ...]:
    """Returns the axes over which the compiler shards the experts' width."""
    axes = [specs.axes(share.spec) for share in (gate, up, down)]
    (entry,) = {*gate.spec[2:3]} or {None}
    if any(axes) and not (gate.spec == up.spec == P(None, None, entry) and down.spec == P(None, entry)):
        raise UserError(
            f"overrides: experts are sharded as {gate.spec}, {up.spec} and {down.spec} beside `expert`; shard the width of all three, the "
            "last dim of gate and up and the middle one of down, or none"
        )
    return specs.names(entry)


def _plan(call: _Travel, experts_TK: jax.Array, own: int) -> _Seats:
    expert_R, ways = experts_TK.reshape(-1), call.ways
    order_R = jnp.argsort(expert_R, stable=True)
    sizes_E = jnp.zeros(ways * own, jnp.int32).at[expert_R].add(1, mode="drop")
    sizes_Ne = sizes_E.reshape(ways, own)
    count_N = jnp.sum(sizes_Ne, axis=1)
    first_N = jnp.cumsum(count_N) - count_N
    peer_R = expert_R // own
    place_R = jnp.argsort(order_R) - first_N.at[peer_R].get(mode="fill", fill_value=0)
    # An all-to-all: XLA would merge a gather with those of weights, and wait for both.
    of_all_NNe = columns.sent_to_all(sizes_E, specs.entry(call.axes), ways).reshape(ways, ways, own)
    here_Ne = jnp.take(of_all_NNe, jax.lax.axis_index(call.axes), axis=1)
    fullest = jnp.max(jnp.sum(of_all_NNe, axis=2))
    rounds = -(-fullest // call.room)
    return _Seats(order_R, first_N, count_N, peer_R, place_R, jnp.cumsum(here_Ne, axis=1), rounds)


def _round(
    call: _Travel,
    plan: _Seats,
    number: int | jax.Array,
    x_TD: jax.Array,
    weights_TK: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Returns what the rows of one round add to each token: float32[T, D]."""
    rows, begin, slots = plan.order_R.size, number * call.room, call.ways * call.room
    # What a slot sends: a row, or R for none. Where a row is: a slot, or S for none.
    place = begin + jnp.arange(call.room)
    sorted_NS = jnp.where(place < plan.count_N[:, None], plan.first_N[:, None] + place, rows)
    row_S = plan.order_R.at[sorted_NS.reshape(-1)].get(mode="fill", fill_value=rows)
    in_round_R = (plan.place_R >= begin) & (plan.place_R < begin + call.room) & (plan.peer_R < call.ways)
    slot_R = jnp.where(in_round_R, plan.peer_R * call.room + plan.place_R - begin, slots)
    slot_TK = slot_R.reshape(weights_TK.shape)
    x_SD = _sent(call, _spread(x_TD, row_S, slot_TK))
    weight_S = _sent(call, _moved(weights_TK.reshape(-1), row_S, slot_R))
    # What has arrived is sorted by device, then by expert; slots of none are the last.
    ends_Ne = jnp.clip(plan.ends_Ne - begin, 0, call.room)
    expert_S = jnp.sum(jnp.arange(call.room)[:, None] >= ends_Ne[:, None], axis=2).reshape(-1)
    sizes_e = jnp.sum(jnp.diff(ends_Ne, axis=1, prepend=0), axis=0)
    order_S = jnp.argsort(expert_S, stable=True)
    back_S = jnp.argsort(order_S)
    x_SD, weight_S = _moved(x_SD, order_S, back_S), _moved(weight_S, order_S, back_S)
    hidden_SF = call.activation(_grouped(x_SD, gate, sizes_e)) * _grouped(x_SD, up, sizes_e)
    hidden_SF = (hidden_SF * weight_S[:, None]).astype(x_SD.dtype)
    y_SD = _sent(call, _moved(_grouped(hidden_SF, down, sizes_e), back_S, order_S))
    return _added_up(y_SD, row_S, slot_TK)


def _sent(call: _Travel, x: jax.Array) -> jax.Array:
    """Returns what other devices have sent here, by device, in rooms."""
    by_device = x.reshape(call.ways, call.room, *x.shape[1:])
    return jax.lax.all_to_all(by_device, specs.entry(call.axes), split_axis=0, concat_axis=0).reshape(x.shape)


def _grouped(x: jax.Array, matrices: jax.Array, sizes_e: jax.Array) -> jax.Array:
    return grouped.grouped_matmul(x, matrices, sizes_e, grouped.BY_PLATFORM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _later(call: _Travel, plan: _Seats, *arrays: jax.Array) -> jax.Array:
    """Returns the sum of all rounds but the first: float32[T, D]."""

    def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, y_TD = carry
        return number + 1, y_TD + _round(call, plan, number, *arrays)

    first = (jnp.ones_like(plan.rounds), jnp.zeros(arrays[0].shape, jnp.float32))
    return jax.lax.while_loop(lambda carry: carry[0] < plan.rounds, add, first)[1]


def _later_backward(call: _Travel, saved: tuple[_Seats, tuple[jax.Array, ...]], d_TD: jax.Array) -> tuple[Any, ...]:
    plan, arrays = saved

    def add(carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        number, sums = carry
        _, pull = jax.vjp(lambda *arrays: _round(call, plan, number, *arrays), *arrays)
        return number + 1, [total + own.astype(jnp.float32) for total, own in zip(sums, pull(d_TD))]

    first = (jnp.ones_like(plan.rounds), [jnp.zeros(array.shape, jnp.float32) for array in arrays])
    sums = jax.lax.while_loop(lambda carry: carry[0] < plan.rounds, add, first)[1]
    return None, *[total.astype(array.dtype) for total, array in zip(sums, arrays)]


_later.defvjp(lambda call, plan, *arrays: (_later(call, plan, *arrays), (plan, arrays)), _later_backward)


@jax.custom_vjp
def _moved(values: jax.Array, where: jax.Array, back: jax.Array) -> jax.Array:
    """Returns `values[where]`, 0 beyond their end. No value is taken twice, so the gradient is moved by `back` alike."""
    return values.at[where].get(mode="fill", fill_value=0)


_moved.defvjp(
    lambda values, where, back: (_moved(values, where, back), (where, back)),
    lambda saved, grad: (_moved(grad, saved[1], saved[0]), None, None),
)


@jax.custom_vjp
def _spread(x_TD: jax.Array, row_S: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """Returns each slot's token, 0 where it has none. The gradient of a token is a sum in float32."""
    return x_TD.at[row_S // slot_TK.shape[1]].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _added_up(y_SD: jax.Array, row_S: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """Returns the sum of each token's slots: float32[T, D]."""
    return jnp.sum(y_SD.at[slot_TK].get(mode="fill", fill_value=0), axis=1, dtype=jnp.float32)


_spread.defvjp(
    lambda x, row, slot: (_spread(x, row, slot), (row, slot)),
    lambda saved, grad: (_added_up(grad, *saved).astype(grad.dtype), None, None),
)
_added_up.defvjp(
    lambda y, row, slot: (_added_up(y, row, slot), (row, slot, jnp.zeros(0, y.dtype))),
    lambda saved, grad: (_spread(grad, *saved[:2]).astype(saved[2].dtype), None, None),
)
