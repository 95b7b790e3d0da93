"""Experts that live on different devices. This module sends tokens to their experts and back, inside `jax.shard_map`.

Each of N devices has E/N experts of every mixture. A token is one row for each of its K experts. A device puts its rows for another one
into a buffer of a fixed length, its `room`; two all-to-alls bring the rows there and the results back. Two more take the gradients
the same way, and one brings the rows again, which are not kept.

    rows --all-to-all--> sorted by expert --grouped matmuls--> sorted back --all-to-all--> added up by token

The room is `load` times what a balanced router sends, so memory and bytes do not depend on the router. No row is lost where one sends
more: further rounds of smaller rooms take what is left, as many as the fullest buffer of all devices needs, so that every device takes part
in each. Their backward pass is written by hand: it computes a round again, and keeps nothing of it. On CPUs one round has room for all that
is left (`Stack.loops`). A row's weight travels with it and multiplies between the matmuls, since down(w h) = w down(h): then no result is
read in the backward pass, and none is sent again.

Shapes: T tokens, D embed, E experts, K experts of a token, R = T K rows, N devices, e = E / N experts of a device, S = N room rows
that a device sends and gets in a round.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import roles, specs
from zerojax.errors import UserError
from zerojax.ops import columns, expert_matrices, quantized, stand_ins
from zerojax.ops.expert_matrices import Matrices, StoredMatrices, multiply
from zerojax.tree import PyTree

LOAD = 1.5  # a room, over what a balanced router sends
FEWER = 3  # times as many rows as a further round's room has the first one's: few are left
ALL = (
    "overrides: gate, up and down of experts are all to be sharded over `expert`, with their biases, adapters and codes, and some are not; "
    "name all, or use a mesh without `expert`"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """A device's experts' matrices of one kind.

    Attributes:
      shard: float[e, inputs, outputs], or what is in its place.
      axes: the mesh axes over which experts are sharded.
      specs: how the compiler shards each array of `shard` over its axes.
      load: see `LOAD`.
      parts: the tokens travel in as many parts, one beside the matmuls of another.
      loops: whether further rounds are a loop. On CPUs XLA (2026) starts collectives after a loop before those in it have ended. Those of
        several devices then mix: a step aborts, or returns wrong numbers. So there one round takes all that is left, needed or not.
    """

    shard: Matrices
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    specs: tuple[P, ...] = dataclasses.field(metadata={"static": True})
    load: float = dataclasses.field(default=LOAD, metadata={"static": True})
    parts: int = dataclasses.field(default=1, metadata={"static": True})
    loops: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def in_specs(self) -> PyTree:
        """Returns `specs` in the structure of `shard`."""
        return jax.tree.unflatten(jax.tree.structure(self.shard), self.specs)


_STACKS = stand_ins.StandIns[Stack](
    "expert: {} is read by no operation that can send tokens to their experts, such as zerojax.ops.experts.apply(x, routing, gate, up, "
    "down), called with the weight itself; omit `expert` from its override",
    "expert: {} is also computed with, beside an operation that sends tokens to their experts; a penalty on the weight needs all experts; "
    "omit `expert` from its override",
)
used, take_as = _STACKS.used, _STACKS.take_as


def take(matrices: Matrices) -> Stack | None:
    """Returns what this device has of a mixture's matrices, or None if it has all.

    Raises:
      UserError: of what is beside the matrices it has some, and all of the rest.
    """
    arrays, structure = jax.tree.flatten(matrices)
    stacks = [stack for stack in map(_STACKS.take, arrays) if stack is not None]
    if not stacks:
        return None
    if len(stacks) < len(arrays):
        raise UserError(ALL)
    shard = jax.tree.unflatten(structure, [stack.shard for stack in stacks])
    return dataclasses.replace(stacks[0], shard=shard, specs=tuple(stack.specs[0] for stack in stacks))


def add(path: str, share: Stack) -> jax.Array:
    """Returns what a model sees in place of a stack of arrays, and makes it known (`stand_ins`)."""
    ways = jax.lax.axis_size(share.axes)
    assert isinstance(share.shard, jax.Array)
    shape = (share.shard.shape[0] * ways, *share.shard.shape[1:])
    return _STACKS.add(path, share, share.shard, shape, share.shard.dtype)


def room(rows: int, ways: int, load: float, most: int | None = None) -> int:
    """Returns the rows that a device may send to another one in a round; `most` is what it sends at most, None: all of them."""
    return min(rows if most is None else most, -int(-load * rows // ways))


def cost(
    rows: int, dim: int, ways: int, load: float, itemsize: int, *, parts: int = 1, again: bool = True
) -> dict[str, int]:
    """Returns the bytes that a device receives of others in a layer's all-to-alls of rows, {"forward": ..., "backward": ...}, in one round.

    Args:
      rows: those of a device's tokens.
      dim, itemsize: elements of a row, and bytes of each.
      ways: the devices along `expert`.
      load, parts: of the `Stack`.
      again: whether the backward pass brings the rows again, because the forward pass does not keep them.
    """
    once = parts * (ways - 1) * room(rows // parts, ways, load)
    row, weight = dim * itemsize, 4
    return {"forward": once * (2 * row + weight), "backward": once * ((2 + again) * row + (1 + again) * weight)}


@dataclasses.dataclass(frozen=True)
class _Travel:
    """What rounds of a mixture share; `share` is the share of a bias that each device along the axes of `_width` adds, `begin` the first
    row for a device in round 0, and `loops` as of the `Stack`."""

    axes: tuple[str, ...]
    ways: int
    room: int
    over: float
    activation: Callable[..., jax.Array]
    has_up: bool
    share: float = 1.0
    begin: int = 0
    loops: bool = False
    scales_inputs: bool = False

    def sides(self, first: Matrices, second: Matrices, *rest: Matrices) -> tuple[tuple, tuple]:
        """Returns what comes before the activation, gate with up or with the bias of both, and what after it, down with its bias."""
        if self.has_up:
            return (first, second), rest
        inner, outer = rest or (None, None)
        return (first, inner), (second, outer)


class _Seats(NamedTuple):
    """Which rows of some tokens go where. A row's place is its number among those of this device for the same other one.

    Attributes:
      order_R: the rows, sorted by expert.
      first_N, count_N: the place in `order_R` of the first row for a device, and the number of rows.
      peer_R, place_R: the device that a row goes to (N: none), and its place.
      ends_Ne: of the rows that others send here, by device: the place after the last one of each expert.
    """

    order_R: jax.Array
    first_N: jax.Array
    count_N: jax.Array
    peer_R: jax.Array
    place_R: jax.Array
    ends_Ne: jax.Array


class _Plan(NamedTuple):
    """The seats of each part of the tokens, and the most rows that a device has of a part for another one: int32[]."""

    seats: tuple[_Seats, ...]
    fullest: jax.Array


def apply(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    gate: Stack,
    up: Stack | None,
    down: Stack,
    activation: Callable[..., jax.Array],
    *,
    capacity: int | None = None,
    biases: tuple[Stack, Stack] | None = None,
    scales_inputs: bool = False,
) -> jax.Array:
    """Returns `experts.apply` of this device's tokens: float[T, D].

    Args:
      x_TD: this device's tokens.
      experts_TK: int32, their experts; E for one that a token skips.
      weights_TK: float32.
      gate, up, down, biases: this device's experts.
      activation, scales_inputs: as of `experts.apply`.
      capacity: the most rows of an expert of one device; None: any.
    """
    ways, own = jax.lax.axis_size(gate.axes), gate.shard.shape[0]
    parts = gate.parts if len(x_TD) % gate.parts == 0 else 1
    rows = experts_TK.size // parts
    most = rows if capacity is None else min(rows, own * capacity)
    length = room(rows, ways, gate.load, most)
    width = _width(gate, up, down)
    share = 1.0 / mesh_lib.size(jax.sharding.get_abstract_mesh(), width)
    call = _Travel(gate.axes, ways, length, ways * length / rows, activation, up is not None, share)
    call = dataclasses.replace(call, scales_inputs=scales_inputs)

    def on_shards(x_TD: jax.Array, experts_TK: jax.Array, weights_TK: jax.Array, *matrices: Matrices) -> jax.Array:
        plan = _plan(call, jnp.split(experts_TK, parts), own)
        further_TD, first_TD = None, x_TD
        if call.room < most:
            left = -(-call.room // FEWER) if gate.loops else most - call.room
            rest = dataclasses.replace(call, room=left, begin=call.room, loops=gate.loops)
            further_TD = _later(rest, plan, x_TD, weights_TK, *matrices)
            # Backward, further rounds follow the first one, which then keeps nothing beside them.
            first_TD, further_TD = _backward_in_turn(x_TD, further_TD)
        y_TD = _round(call, plan, 0, first_TD, weights_TK, *matrices)
        y_TD = y_TD if further_TD is None else y_TD + further_TD
        return (jax.lax.psum(y_TD, width) if width else y_TD).astype(x_TD.dtype)

    stacks = [stack for stack in (gate, up, down, *(biases or ())) if stack is not None]
    in_specs = (P(), P(), P(), *[stack.in_specs for stack in stacks])
    with jax.named_scope("experts"):
        run = mesh_lib.manual_over_rest(on_shards, in_specs, P())
        return run(x_TD, experts_TK, weights_TK, *[stack.shard for stack in stacks])


def _width(gate: Stack, up: Stack | None, down: Stack) -> tuple[str, ...]:
    """Returns the axes over which the compiler shards the experts' width."""
    first, inner, last = map(_spec, (gate, gate if up is None else up, down))
    (entry,) = {*first[2:3]} or {None}
    if specs.axes(first) | specs.axes(inner) | specs.axes(last) and not (
        first == inner == P(None, None, entry) and last == P(None, entry)
    ):
        raise UserError(
            f"overrides: experts are sharded as {first}, {inner} and {last} beside `expert`; shard the width of all three, the "
            "last dim of gate and up and the middle one of down, or none"
        )
    return specs.names(entry)


def _spec(stack: Stack) -> P:
    """Returns how the compiler shards a stack's matrices [experts, inputs, outputs]. Codes and scales are sharded alike."""
    kernel: Any = stack.shard.kernel if isinstance(stack.shard, StoredMatrices) else stack.shard
    if not quantized.is_quantized(kernel):
        return stack.specs[0]
    own = stack.in_specs.kernel
    found = {name: [*own[name], *[None] * (part.ndim - len(own[name]))] for name, part in kernel.items()}
    if (kind := quantized.kind_of(kernel)) == quantized.MXFP4:  # inputs come last
        found = {name: [experts, entries[-1], *entries[:-1]] for name, (experts, *entries) in found.items()}
    codes, *others = (specs.trimmed(found[name]) for name in sorted(found, key=lambda name: name != kind))
    axes = specs.axes(codes).union(*map(specs.axes, others))
    if {*others} != {codes} and mesh_lib.size(jax.sharding.get_abstract_mesh(), axes) > 1:
        raise UserError(
            f"overrides: codes of experts in {kind} are sharded as {codes} and their scales as {others[0]} beside `expert`; shard both "
            f"alike, or use a mesh without {' and '.join(sorted(axes))}"
        )
    return codes


def _plan(call: _Travel, experts_TK: Sequence[jax.Array], own: int) -> _Plan:
    ways, parts = call.ways, len(experts_TK)
    sizes_E = [jnp.zeros(ways * own, jnp.int32).at[part.reshape(-1)].add(1, mode="drop") for part in experts_TK]
    with jax.named_scope(roles.EXPERT_PARALLEL):
        # An all-to-all: XLA would merge a gather with those of weights, and wait for both.
        all_sizes = columns.sent_to_all(jnp.concatenate(sizes_E), specs.entry(call.axes), ways)
    of_all = all_sizes.reshape(ways, parts, ways, own)
    here = jnp.take(of_all, jax.lax.axis_index(call.axes), axis=2)
    fullest = jnp.max(jnp.sum(of_all, axis=3))
    seats = [_seats(part.reshape(-1), sizes, here[:, i]) for i, (part, sizes) in enumerate(zip(experts_TK, sizes_E))]
    return _Plan(tuple(seats), fullest)


def _seats(expert_R: jax.Array, sizes_E: jax.Array, here_Ne: jax.Array) -> _Seats:
    ways, own = here_Ne.shape
    order_R = jnp.argsort(expert_R, stable=True)
    count_N = jnp.sum(sizes_E.reshape(ways, own), axis=1)
    first_N = jnp.cumsum(count_N) - count_N
    peer_R = expert_R // own
    place_R = jnp.argsort(order_R) - first_N.at[peer_R].get(mode="fill", fill_value=0)
    return _Seats(order_R, first_N, count_N, peer_R, place_R, jnp.cumsum(here_Ne, axis=1))


class _Part(NamedTuple):
    """What has arrived of a part's rows, by device, how experts sort them, and how results go back."""

    x_SD: jax.Array
    weight_S: jax.Array
    expert_S: jax.Array
    sizes_e: jax.Array
    order_S: jax.Array
    back_S: jax.Array
    row_S: jax.Array
    slot_TK: jax.Array


def _round(
    call: _Travel, plan: _Plan, number: int | jax.Array, x_TD: jax.Array, weights_TK: jax.Array, *matrices: Matrices
) -> jax.Array:
    """Returns what the rows of one round add to each token: float32[T, D].

    The matmuls of a part run after those of the part before, so that the results of this one, and the rows of the next, travel beside
    them. XLA would run all matmuls when all rows are there. The backward pass has the order reversed.
    """
    count = len(plan.seats)
    tokens = zip(plan.seats, jnp.split(x_TD, count), jnp.split(weights_TK, count))
    parts = [_arrived(call, seats, number, x, weights) for seats, x, weights in tokens]
    inner, outer = call.sides(*matrices)
    hidden = [_hidden(call, parts[0], *inner)]
    sent: list[jax.Array] = []
    for i, part in enumerate(parts):
        following = parts[i + 1] if i + 1 < count else None
        if following is not None:
            x_SD, hidden[i] = jax.lax.optimization_barrier((following.x_SD, hidden[i]))
        y_SD = _result(call, part, hidden[i], *outer)
        if sent:
            sent[-1], y_SD = jax.lax.optimization_barrier((sent[-1], y_SD))
        if following is not None:
            x_SD, y_SD = _backward_in_turn(x_SD, y_SD)
            hidden.append(_hidden(call, following._replace(x_SD=x_SD), *inner))
        sent.append(_sent(call, y_SD))
    return jnp.concatenate([added_up(y_SD, part.row_S, part.slot_TK) for part, y_SD in zip(parts, sent)])


@jax.custom_vjp
def _backward_in_turn(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both. Neither gradient is read before the other is there; the forward pass, and what is computed again, have no order."""
    return first, second


_backward_in_turn.defvjp(
    lambda first, second: ((first, second), None), lambda _, grads: jax.lax.optimization_barrier(grads)
)


def _arrived(call: _Travel, seats: _Seats, number: int | jax.Array, x_TD: jax.Array, weights_TK: jax.Array) -> _Part:
    """Returns the rows that come to this device in one round."""
    rows, begin, slots = seats.order_R.size, call.begin + number * call.room, call.ways * call.room
    # What a slot sends: a row, or R for none. Where a row is: a slot, or S for none.
    place = begin + jnp.arange(call.room)
    sorted_NS = jnp.where(place < seats.count_N[:, None], seats.first_N[:, None] + place, rows)
    row_S = seats.order_R.at[sorted_NS.reshape(-1)].get(mode="fill", fill_value=rows)
    in_round_R = (seats.place_R >= begin) & (seats.place_R < begin + call.room) & (seats.peer_R < call.ways)
    slot_R = jnp.where(in_round_R, seats.peer_R * call.room + seats.place_R - begin, slots)
    slot_TK = slot_R.reshape(weights_TK.shape)
    x_SD = _sent(call, spread(x_TD, row_S, slot_TK))
    weight_S = _sent(call, moved(weights_TK.reshape(-1), row_S, slot_R))
    # What has arrived is sorted by device, then by expert; slots of none are the last.
    ends_Ne = jnp.clip(seats.ends_Ne - begin, 0, call.room)
    expert_S = jnp.sum(jnp.arange(call.room)[:, None] >= ends_Ne[:, None], axis=2).reshape(-1)
    sizes_e = jnp.sum(jnp.diff(ends_Ne, axis=1, prepend=0), axis=0)
    order_S = jnp.argsort(expert_S, stable=True)
    back_S = jnp.argsort(order_S)
    return _Part(x_SD, weight_S, expert_S[order_S], sizes_e, order_S, back_S, row_S, slot_TK)


def _hidden(call: _Travel, part: _Part, gate: Matrices, inner: Matrices | None) -> jax.Array:
    """Returns what this device's experts make of its rows before their last matmul, times the rows' weights: float[S, F]."""
    x_SD, weight_S = (moved(values, part.order_S, part.back_S) for values in (part.x_SD, part.weight_S))
    if call.scales_inputs:
        x_SD, weight_S = (x_SD * weight_S[:, None]).astype(x_SD.dtype), jnp.ones_like(weight_S)
    with _room(call):
        if call.has_up:
            assert inner is not None
            gate_SF, up_SF = (multiply(x_SD, matrices, part.sizes_e) for matrices in (gate, inner))
            hidden_SF = call.activation(gate_SF) * up_SF
        elif len(gate.shape) == 3:
            hidden_SF = call.activation(multiply(x_SD, gate, part.sizes_e))
        else:
            assert not isinstance(inner, expert_matrices.StoredMatrices)
            both_SG = multiply(x_SD, expert_matrices.flat(gate), part.sizes_e)
            both_SF2 = both_SG.reshape(-1, *gate.shape[2:])
            if inner is not None:
                both_SF2 = (both_SF2 + _of_rows(inner, part)).astype(both_SF2.dtype)
            hidden_SF = call.activation(both_SF2[..., 0], both_SF2[..., 1])
    return (hidden_SF * weight_S[:, None]).astype(x_SD.dtype)


def _result(
    call: _Travel, part: _Part, hidden_SF: jax.Array, down: Matrices, bias: jax.Array | None = None
) -> jax.Array:
    """Returns the experts' results for a part's rows, by the device that sent them: float[S, D]."""
    with _room(call):
        y_SD = multiply(hidden_SF, down, part.sizes_e)
    if bias is not None:
        weight_S = moved(part.weight_S, part.order_S, part.back_S)
        y_SD = (y_SD + _of_rows(bias, part) * weight_S[:, None] * call.share).astype(y_SD.dtype)
    return moved(y_SD, part.back_S, part.order_S)


def _room(call: _Travel) -> AbstractContextManager[None]:
    """Returns the scope by which a plan knows how many rows are real."""
    return jax.named_scope(f"{roles.ROOM}_{call.over:.6g}")


def _of_rows(bias: jax.Array, part: _Part) -> jax.Array:
    """Returns each row's bias, 0 for a row of none; float32, in which its gradient is added up."""
    return bias.astype(jnp.float32).at[part.expert_S].get(mode="fill", fill_value=0)


def _sent(call: _Travel, x: jax.Array) -> jax.Array:
    """Returns what other devices have sent here, by device, in rooms."""
    by_device = x.reshape(call.ways, call.room, *x.shape[1:])
    with jax.named_scope(roles.EXPERT_PARALLEL):
        return jax.lax.all_to_all(by_device, specs.entry(call.axes), split_axis=0, concat_axis=0).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _later(call: _Travel, plan: _Plan, x_TD: jax.Array, *arrays: Any) -> jax.Array:
    """Returns the sum of all rounds but the first: float32[T, D]."""

    def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, y_TD = carry
        return number + 1, y_TD + _further(call, plan, number, x_TD, *arrays)

    return _repeated(call, plan, add, jnp.zeros(x_TD.shape, jnp.float32))


def _further(
    call: _Travel, plan: _Plan, number: jax.Array, x_TD: jax.Array, weights_TK: jax.Array, *matrices: Matrices
) -> jax.Array:
    """Returns what a turn of the loop over further rounds adds to each token, one part of the tokens a turn: float32[T, D]."""
    count = len(plan.seats)
    if not call.loops:
        return _round(call, plan, number, x_TD, weights_TK, *matrices)
    begin, length = number % count * (len(x_TD) // count), len(x_TD) // count
    seats = jax.tree.map(lambda *parts: jnp.stack(parts)[number % count], *plan.seats)
    x, weights = (jax.lax.dynamic_slice_in_dim(values, begin, length) for values in (x_TD, weights_TK))
    y = _round(call, plan._replace(seats=(seats,)), number // count, x, weights, *matrices)
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(x_TD.shape, jnp.float32), y, begin, 0)


def _repeated(
    call: _Travel, plan: _Plan, add: Callable[[tuple[jax.Array, Any]], tuple[jax.Array, Any]], sums: Any
) -> Any:
    """Returns `sums` after all turns of the loop over further rounds; `add` takes and returns the number of a turn, and sums."""
    begun = jnp.zeros_like(plan.fullest), sums
    with jax.named_scope(roles.FURTHER_ROUNDS):
        if not call.loops:
            return add(begun)[1]
        turns = len(plan.seats) * -(-jnp.maximum(plan.fullest - call.begin, 0) // call.room)
        return jax.lax.while_loop(lambda carry: carry[0] < turns, add, begun)[1]


def _later_backward(call: _Travel, saved: tuple[_Plan, tuple[Any, ...]], d_TD: jax.Array) -> tuple[Any, ...]:
    plan, given = saved
    leaves, structure = jax.tree.flatten(given)
    learned = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]  # codes have no gradient
    arrays = [leaves[i] for i in learned]

    def round_of(number: jax.Array, *arrays: jax.Array) -> jax.Array:
        own = dict(zip(learned, arrays))
        both = jax.tree.unflatten(structure, [own.get(i, leaf) for i, leaf in enumerate(leaves)])
        return _further(call, plan, number, *both)

    def add(carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        number, sums = carry
        _, pull = jax.vjp(functools.partial(round_of, number), *arrays)
        return number + 1, [total + own.astype(jnp.float32) for total, own in zip(sums, pull(d_TD))]

    sums = _repeated(call, plan, add, [jnp.zeros(array.shape, jnp.float32) for array in arrays])
    grads = {i: total.astype(array.dtype) for i, total, array in zip(learned, sums, arrays)}
    return None, *jax.tree.unflatten(structure, [grads.get(i) for i in range(len(leaves))])


_later.defvjp(lambda call, plan, *arrays: (_later(call, plan, *arrays), (plan, arrays)), _later_backward)


@jax.custom_vjp
def moved(values: jax.Array, where: jax.Array, back: jax.Array) -> jax.Array:
    """Returns `values[where]`, 0 beyond their end. No value is taken twice, so the gradient is moved by `back` alike."""
    return jnp.take(values, where, axis=0, mode="fill", fill_value=0)


moved.defvjp(
    lambda values, where, back: (moved(values, where, back), (where, back)),
    lambda saved, grad: (moved(grad, saved[1], saved[0]), None, None),
)


@jax.custom_vjp
def spread(x_TD: jax.Array, row_S: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """Returns each slot's token, 0 where it has none. The gradient of a token is a sum in float32."""
    return jnp.take(x_TD, row_S // slot_TK.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def added_up(y_SD: jax.Array, row_S: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """Returns the sum of each token's slots: float32[T, D]."""
    return jnp.sum(jnp.take(y_SD, slot_TK, axis=0, mode="fill", fill_value=0), axis=1, dtype=jnp.float32)


spread.defvjp(
    lambda x, row, slot: (spread(x, row, slot), (row, slot)),
    lambda saved, grad: (added_up(grad, *saved).astype(grad.dtype), None, None),
)
added_up.defvjp(
    lambda y, row, slot: (added_up(y, row, slot), (row, slot, jnp.zeros(0, y.dtype))),
    lambda saved, grad: (spread(grad, *saved[:2]).astype(saved[2].dtype), None, None),
)
