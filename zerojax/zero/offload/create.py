"""Makes a train state whose offloaded leaves never exist on the device all at once. This module is used where a state begins.

The init function is traced once. Offloaded leaves are computed a few at a time and moved to the host; one program computes the rest. A leaf
that is filled with one value, as moments are, needs no other part of the init function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.optim import pieces
from zerojax.zero import placement
from zerojax.zero.offload import budget, kept, layout, transfer

MOST_BYTES = 1 << 30  # of offloaded leaves on a device at once


def from_init(
    init: Callable[..., Any], args: Sequence[Any], partition: placement.Partition, *, donate: bool = False
) -> list[Any]:
    """Returns the leaves of `init(*args)` in the form and with the shardings of `partition.abstract_state`.

    Args:
      init: returns the state with nothing in pieces, padded as stored.
      args: its arguments, pytrees of arrays.
      partition: the state's.
      donate: whether the memory of `args` may be reused.

    Raises:
      UserError: the host cannot hold what is offloaded.
    """
    budget.check(partition)
    keep = kept.keeper(partition)
    traced = jax.make_jaxpr(lambda *args: jax.tree.leaves(init(*args)))(*args)
    flat = jax.tree.leaves(args)
    wanted = jax.tree.leaves(partition.abstract_state, is_leaf=pieces.is_pieces)
    made: dict[int, Any] = {}
    computed = []
    for number, leaf in enumerate(wanted):
        if not layout.is_on_host(leaf):
            continue
        value = _fill_value(traced.jaxpr, traced.jaxpr.outvars[number])
        if value is None:
            computed.append(number)
        else:
            made[number] = jax.tree.map(functools.partial(_filled, keep, value), leaf)
    for run in _runs(computed, wanted):
        found = _evaluated(traced, run, wanted)(*flat)
        for number, parts in zip(run, found):
            like = jax.tree.leaves(wanted[number])
            moved = [keep(part, piece) for part, piece in zip(parts, like)]
            made[number] = jax.tree.unflatten(jax.tree.structure(wanted[number]), moved)
        jax.block_until_ready([made[number] for number in run])
    resident = [number for number in range(len(wanted)) if number not in made]
    rest = _evaluated(traced, resident, wanted, donate=range(len(flat)) if donate else ())(*flat)
    made |= {number: parts[0] for number, parts in zip(resident, rest)}
    return jax.tree.leaves([made[number] for number in range(len(wanted))])


def from_leaves(
    leaves: Sequence[Any], partition: placement.Partition, to_device: Callable[[Any, Any], jax.Array]
) -> list[Any]:
    """Returns the leaves of a state in the form and with the shardings of `partition.abstract_state`; offloaded ones move piece by piece.

    Args:
      leaves: of the state with nothing in pieces, padded as stored.
      partition: the state's.
      to_device: f(array, sharding) -> a copy of the array with that sharding.
    """
    budget.check(partition)
    keep = kept.keeper(partition)
    wanted = jax.tree.leaves(partition.abstract_state, is_leaf=pieces.is_pieces)
    made: list[jax.Array] = []
    for leaf, like in zip(leaves, wanted, strict=True):
        for part, piece in zip(_slices(leaf, like), jax.tree.leaves(like), strict=True):
            copied = to_device(part, layout.on_device(piece.sharding))
            made.append(jax.block_until_ready(keep(copied, piece)) if layout.is_on_host(piece) else copied)
    return made


def copied(leaf: Any, like: Any) -> jax.Array:
    """Returns a leaf that may be on the host and in pieces as one array on the device, with the dtype and the sharding of `like`."""
    dim = leaf.dim if pieces.is_pieces(leaf) else 0
    stored = jax.tree.leaves(leaf)
    parts = transfer.moved(
        [kept.in_memory(part) for part in stored], [layout.on_device(part.sharding) for part in stored]
    )
    return jax.block_until_ready(_joined(dim, jnp.dtype(like.dtype), like.sharding)(parts))


@functools.lru_cache
def _joined(dim: int, dtype: Any, sharding: Any) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(lambda parts: jnp.concatenate(parts, dim).astype(dtype), out_shardings=sharding)


def _filled(keep: kept.Keep, value: Any, like: Any) -> Any:
    filled = _fill(like.shape, jnp.dtype(like.dtype), layout.on_device(like.sharding))(value)
    return jax.block_until_ready(keep(filled, like))  # so that the device holds one at a time


@functools.lru_cache
def _fill(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda value: jnp.full(shape, value, dtype), out_shardings=sharding)


def _evaluated(
    traced: Any, numbers: Sequence[int], wanted: Sequence[Any], donate: Sequence[int] = ()
) -> Callable[..., Any]:
    """Returns f(*flat arguments) -> for each number, the slices of that result, on the device. Other results are not computed."""

    def run(*flat: Any) -> list[list[Any]]:
        results = jex.jaxpr_as_fun(traced)(*flat)
        return [_slices(results[number], wanted[number]) for number in numbers]

    shardings = [[layout.on_device(piece.sharding) for piece in jax.tree.leaves(wanted[number])] for number in numbers]
    return jax.jit(run, out_shardings=shardings, donate_argnums=tuple(donate))


def _slices(array: Any, like: Any) -> list[Any]:
    return pieces.slices(like.lengths, like.dim, array) if pieces.is_pieces(like) else [array]


def _runs(numbers: Sequence[int], wanted: Sequence[Any]) -> list[list[int]]:
    """Returns the numbers in runs of leaves of at most `MOST_BYTES` on a device, or of one leaf."""
    runs: list[list[int]] = []
    held = 0
    for number in numbers:
        count = sum(layout.shard_bytes(piece) for piece in jax.tree.leaves(wanted[number]))
        if not runs or held + count > MOST_BYTES:
            runs.append([])
            held = 0
        runs[-1].append(number)
        held += count
    return runs


def _fill_value(jaxpr: Any, var: Any) -> Any:
    """Returns the scalar that fills a result of a traced function; None if it is not filled with a constant."""
    if isinstance(var, jex.Literal):
        return var.val
    for eqn in jaxpr.eqns:
        if var not in eqn.outvars:
            continue
        name, inner = eqn.primitive.name, eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "sharding_constraint"):
            return _fill_value(jaxpr, eqn.invars[0])
        if name in ("pjit", "jit", "closed_call") and inner is not None:
            body = getattr(inner, "jaxpr", inner)
            return _fill_value(body, body.outvars[eqn.outvars.index(var)])
        return None
    return None
