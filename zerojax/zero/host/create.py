"""Makes a train state whose offloaded leaves never exist on the device all at once. This module is used where a state begins.

The init function is traced once. Offloaded leaves are computed a few at a time and moved to the host, and the rest after them. A leaf
that is filled with one value, as moments are, needs no other part of the init function. Where the weights come part by part, what is made
of a part is made before the next one: float32 weights of a large model would take more than the state that is trained.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import traces, tree
from zerojax.optim import pieces
from zerojax.tree import Leaf, PyTree
from zerojax.zero.host import budget, memory_kind, storage
from zerojax.zero.weights import partition as partition_lib

MOST_BYTES = 1 << 30  # of offloaded leaves on a device at once


def begin(partition: partition_lib.Partition) -> storage.Keep:
    """Returns f(array, abstract leaf of `partition.abstract_state`) that brings an array to where it lives; see `storage.keeper`.

    Raises:
      UserError: the host or the disk cannot hold what is offloaded.
    """
    budget.check(partition)
    return storage.keeper(partition)


def from_init(init: Callable[..., Any], args: Sequence[Any], wanted: PyTree, keep: storage.Keep) -> list[Any]:
    """Returns the leaves of `init(*args)` in the form and with the shardings of `wanted`.

    Args:
      init: returns the state, or a part of it, with nothing in pieces, padded as stored.
      args: its arguments, pytrees of arrays.
      wanted: that part of the partition's `abstract_state`.
      keep: from `begin`.
    """
    return from_parts(
        lambda args: init(*args), list(args), [dict(enumerate(jax.tree.leaves(list(args))))], wanted, keep
    )


def from_parts(
    init: Callable[[Any], Any],
    like: PyTree,
    parts: Iterable[dict[int, jax.Array]],
    wanted: PyTree,
    keep: storage.Keep,
    *,
    donate: bool = False,
) -> list[Any]:
    """Returns the same of `init(arg)`, whose argument's leaves come in parts. What a part makes is made before the next is asked for.

    Args:
      init: see `from_init`.
      like: the argument, of arrays or abstract.
      parts: the leaves of the argument by number, each leaf once. One that nothing needs any more is dropped.
      wanted, keep: see `from_init`.
      donate: whether the memory of the leaves may be reused.
    """
    traced = jax.make_jaxpr(lambda arg: jax.tree.leaves(init(arg)))(like)
    wanted = jax.tree.leaves(wanted, is_leaf=pieces.is_pieces)
    slices = _Slices(traced, wanted)
    made: dict[int, Any] = {}
    for number, leaf in enumerate(wanted):
        value = _fill_value(traced, number) if memory_kind.is_on_host(leaf) else None
        if value is not None:
            made[number] = jax.tree.map(functools.partial(_filled, keep, value), leaf)
    needs = {number: own for number, own in enumerate(traces.needs(traced.jaxpr)) if number not in made}
    held: dict[int, jax.Array] = {}
    for part in parts:
        assert all(_is_like(leaf, traced.in_avals[number]) for number, leaf in part.items()), "not as traced"
        held |= part
        del part
        ready = [number for number, needed in needs.items() if needed <= held.keys()]
        on_host = [number for number in ready if memory_kind.is_on_host(wanted[number])]
        nbytes_of = lambda number: sum(map(tree.shard_bytes, jax.tree.leaves(wanted[number])))  # noqa: E731
        for run in tree.runs(on_host, nbytes_of, MOST_BYTES):
            for number, found in zip(run, slices.evaluated(run, held)):
                like = jax.tree.leaves(wanted[number])
                moved = [keep(piece, abstract) for piece, abstract in zip(found, like)]
                made[number] = jax.tree.unflatten(jax.tree.structure(wanted[number]), moved)
            jax.block_until_ready([made[number] for number in run])
        needs = {number: needed for number, needed in needs.items() if number not in ready}
        last = held.keys() - set().union(*needs.values())
        resident = [number for number in ready if number not in made]
        if resident:
            results = slices.evaluated(resident, held, donated=last if donate else ())
            made |= {number: own[0] for number, own in zip(resident, results)}
        held = {number: leaf for number, leaf in held.items() if number not in last}
    return jax.tree.leaves([made[number] for number in range(len(wanted))])


def _is_like(leaf: Leaf, told: Any) -> bool:
    own = jax.typeof(leaf)
    return (own.shape, own.dtype) == (told.shape, told.dtype)


class _Slices:
    """The operations that make some results of a traced function.

    Args:
      traced: the function.
      wanted: the abstract form of each of its results; those in pieces are sliced.
    """

    def __init__(self, traced: jex.ClosedJaxpr, wanted: Sequence[Any]):
        self._traced, self._wanted = traced, wanted
        self._place = {var: number for number, var in enumerate(traced.jaxpr.invars)}
        self._compiled: dict[Any, Callable[..., Any]] = {}  # by text: equal parts share a program

    def evaluated(
        self, numbers: Sequence[int], held: Mapping[int, jax.Array], donated: Collection[int] = ()
    ) -> list[list[jax.Array]]:
        """Returns for each number the pieces of that result on the device, or the result itself.

        Args:
          numbers: of results.
          held: the arguments that they need, by number.
          donated: the numbers of arguments whose memory may be reused.
        """
        own = traces.trimmed(self._traced, [self._traced.jaxpr.outvars[number] for number in numbers])
        read = [self._place[var] for var in own.jaxpr.invars]
        like = [self._wanted[number] for number in numbers]
        places = tuple(place for place, number in enumerate(read) if number in donated)
        key = (str(own.jaxpr), *map(id, traces.constants(own)), str(list(map(jax.tree.leaves, like))), places)
        if key not in self._compiled:

            def run(*args: Any) -> list[list[Any]]:
                return [_slices(result, leaf) for result, leaf in zip(jex.jaxpr_as_fun(own)(*args), like)]

            shardings = [[memory_kind.on_device(piece.sharding) for piece in jax.tree.leaves(leaf)] for leaf in like]
            self._compiled[key] = jax.jit(run, out_shardings=shardings, donate_argnums=places)
        return self._compiled[key](*(held[number] for number in read))


def from_leaves(
    leaves: Sequence[Any], wanted: PyTree, keep: storage.Keep, to_device: Callable[[Any, Any], jax.Array]
) -> list[Any]:
    """Returns the leaves of a state in the form and with the shardings of `wanted`; offloaded ones move piece by piece.

    Args:
      leaves: of the state with nothing in pieces, padded as stored.
      wanted, keep: see `from_init`.
      to_device: f(array, sharding) -> a copy of the array with that sharding.
    """
    made: list[jax.Array] = []
    for leaf, like in zip(leaves, jax.tree.leaves(wanted, is_leaf=pieces.is_pieces), strict=True):
        for part, piece in zip(_slices(leaf, like), jax.tree.leaves(like), strict=True):
            copied = to_device(part, memory_kind.on_device(piece.sharding))
            made.append(jax.block_until_ready(keep(copied, piece)) if memory_kind.is_on_host(piece) else copied)
    return made


def copied(leaf: Leaf, like: PyTree) -> jax.Array:
    """Returns a leaf that may be on the host and in pieces as one array on the device, with the dtype and the sharding of `like`."""
    dim = leaf.dim if pieces.is_pieces(leaf) else 0
    stored = jax.tree.leaves(leaf)
    in_memory = [part.to_host() if storage.is_on_disk(part) else part for part in stored]
    parts = memory_kind.moved(in_memory, [memory_kind.on_device(part.sharding) for part in stored])
    return jax.block_until_ready(_joined(dim, jnp.dtype(like.dtype), like.sharding)(parts))


@functools.lru_cache
def _joined(
    dim: int, dtype: DTypeLike | None, sharding: jax.sharding.Sharding
) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(lambda parts: jnp.concatenate(parts, dim).astype(dtype), out_shardings=sharding)


def _filled(keep: storage.Keep, value: Leaf, like: PyTree) -> Leaf:
    filled = _fill(like.shape, jnp.dtype(like.dtype), memory_kind.on_device(like.sharding))(value)
    return jax.block_until_ready(keep(filled, like))  # so that the device holds one at a time


@functools.lru_cache
def _fill(
    shape: tuple[int, ...], dtype: DTypeLike | None, sharding: jax.sharding.Sharding
) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda value: jnp.full(shape, value, dtype), out_shardings=sharding)


def _slices(array: jax.Array, like: PyTree) -> list[Any]:
    return pieces.slices(like.lengths, like.dim, array) if pieces.is_pieces(like) else [array]


def _fill_value(traced: jex.ClosedJaxpr, number: int) -> Any:
    """Returns the scalar that fills a result of a traced function; None if it is not filled with a constant."""
    _, atom = traces.Frame(traced).origin(traced.jaxpr.outvars[number], traces.MOVES | traces.MARKS | {traces.CAST})
    return None if traces.is_var(atom) else atom.val
