"""Updates weights and moments in one pass, in place. This module holds the kernel, its twin, and how leaves are divided among launches.

A kernel reads gradient, weight and moments of a tile once, and writes weight, moments and the 16-bit copy over the old ones.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import blockwise, rounding
from pallas_kernels import tiles as tiles_lib
from pallas_kernels.rules import Operands, Rule, Scalars, Updated, advance
from pallas_kernels.tiles import Launch, Spot, Tiles


@dataclasses.dataclass(frozen=True)
class Shard:
    """The static properties of one leaf's shard.

    Attributes:
      decays: whether it takes weight decay.
      sharded_dims: for each sharded dim, last dim first, the elements of one local run along it and the number of shards. They turn an
        index in the local array into one in the global array.
      joins: mesh axes over which devices share blocks of 8-bit moments; empty if each block is on one device.
    """

    decays: bool = False
    sharded_dims: tuple[tuple[int, int], ...] = ()
    joins: tuple[str, ...] = ()


# Lines stay in the L2 cache between read and write: some 2% faster (docs/benchmarks/optimizer.md).
KEEP = "evict_last"
# Launches by the kind of a leaf's update: for each kind the fastest of those measured on an H200.
LAUNCHES = {
    "plain": Launch(group=48, joins=True),
    "rounded": Launch(),
    "blocks": Launch(num_warps=4),
}


def update_leaves(
    rule: Rule,
    leaves: Sequence[Operands],
    shards: Sequence[Shard],
    scalars: Scalars,
    seeds: Sequence[jax.Array],
    *,
    implementation: str = "jnp",
    launch: Launch | None = None,
) -> list[Updated]:
    """Updates every leaf (see rules for the equations).

    Args:
      rule: which update.
      leaves: for each weight the gradient (float32 or 16-bit), the weight, and its moments, all of one shape; any shape.
      shards: one for each leaf.
      scalars: float32 scalars.
      seeds: for each leaf uint32[1 + sharded dims]: the seed of its random bits, then this device's index along each sharded dim.
      implementation: a key of IMPLEMENTATIONS.
      launch: how the kernel is launched; None: as in LAUNCHES.

    Returns:
      The new arrays of each leaf. Under jit with donated inputs they reuse the memory of the old ones.
    """
    scalars = Scalars(*[jnp.asarray(s, jnp.float32) for s in scalars])
    return IMPLEMENTATIONS[implementation](rule, leaves, shards, scalars, seeds, launch)


def _update_by_twin(
    rule: Rule,
    leaves: Sequence[Operands],
    shards: Sequence[Shard],
    scalars: Scalars,
    seeds: Sequence[jax.Array],
    _: Any,
) -> list[Updated]:
    return [update_ref(rule, scalars, shard, leaf, seed) for leaf, shard, seed in zip(leaves, shards, seeds)]


def update_ref(rule: Rule, scalars: Scalars, shard: Shard, leaf: Operands, seed: jax.Array) -> Updated:
    """Updates one leaf in plain jnp: the kernel's twin."""
    shape = leaf.param.shape
    noise = None
    if rule.stochastic:
        index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        noise = _noise(index, shard, [seed[i] for i in range(1 + len(shard.sharded_dims))])
    if not isinstance(leaf.mu, tuple):
        return advance(rule, scalars, shard.decays, leaf, noise)
    blocks = blockwise.BlockView(shape, shard.joins)

    def split(stored: Any) -> Any:
        return (
            (blocks.split(stored[0]), blocks.local_scales(stored[1]))
            if isinstance(stored, tuple)
            else blocks.split(stored)
        )

    split_leaf = Operands(*[None if part is None else split(part) for part in leaf])
    noise = None if noise is None else tuple(blocks.split(bits) for bits in noise)
    done = advance(rule, scalars, shard.decays, split_leaf, noise, blocks.scales_of)

    def join(stored: Any) -> Any:
        return (
            (blocks.join(stored[0]), blocks.row_scales(stored[1])) if isinstance(stored, tuple) else blocks.join(stored)
        )

    return Updated(*[None if part is None else join(part) for part in done])


def _noise(index: jax.Array, shard: Shard, words: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns random bits for elements of a shard; they are those of the same elements in the global array."""
    seed, *positions = words
    for (run, ways), position in zip(shard.sharded_dims, positions):
        outer, inner = index // jnp.uint32(run), index % jnp.uint32(run)
        index = (outer * jnp.uint32(ways) + position) * jnp.uint32(run) + inner
    return rounding.noise(index, seed)


def _update_by_kernel(
    rule: Rule,
    leaves: Sequence[Operands],
    shards: Sequence[Shard],
    scalars: Scalars,
    seeds: Sequence[jax.Array],
    launch: Launch | None,
    *,
    interpret: bool,
    in_groups: bool = False,
) -> list[Updated]:
    """Updates leaves by the kernel; with `in_groups` the twin updates large leaves and those that are launched alone."""
    rule_of_kernel = dataclasses.replace(rule, native=not interpret)
    alike: dict[tuple, list[int]] = {}
    results: dict[int, Updated] = {}
    for n, leaf in enumerate(leaves):
        if tiles_lib.fits(leaf.param.size) and not shards[n].joins:
            alike.setdefault(_traits(n, leaf, shards[n], rule), []).append(n)
        else:
            results[n] = update_ref(rule, scalars, shards[n], leaf, seeds[n])
    for (kind, *_), numbers in alike.items():
        how = launch or (tiles_lib.INTERPRETED if interpret else LAUNCHES[kind])
        for group in tiles_lib.groups([leaves[n].param.size for n in numbers], how):
            members = [numbers[index] for index in group]
            if in_groups and not how.gathers([leaves[n].param.size for n in members]):
                for n in members:
                    results[n] = update_ref(rule, scalars, shards[n], leaves[n], seeds[n])
                continue
            done = _launch(
                rule_of_kernel,
                [leaves[n] for n in members],
                shards[members[0]],
                jnp.stack(scalars),
                jnp.stack([seeds[n] for n in members]) if rule.stochastic else None,
                launch=how,
                interpret=interpret,
            )
            results.update(zip(members, done))
    return [results[n] for n in range(len(leaves))]


def _traits(number: int, leaf: Operands, shard: Shard, rule: Rule) -> tuple:
    """Returns the kind of a leaf's update, and the other properties that the leaves of one launch share."""
    dtypes = tuple(part.dtype for part in jax.tree.leaves(leaf))
    if not isinstance(leaf.mu, tuple):
        return "rounded" if rule.stochastic else "plain", shard, dtypes
    is_flat = leaf.param.shape[-1] % blockwise.BLOCK == 0
    return "blocks", shard, dtypes, None if is_flat else number  # blocks that end inside rows have tiles of their own


@functools.partial(jax.jit, static_argnames=("rule", "shard", "launch", "interpret"))
def _launch(
    rule: Rule,
    leaves: Sequence[Operands],
    shard: Shard,
    scalars: jax.Array,
    seeds: jax.Array | None,
    *,
    launch: Launch,
    interpret: bool,
) -> list[Updated]:
    """Runs the kernel over one leaf, or a group of similar ones. Seeds are uint32 [leaves, words]."""
    elements = launch.tile_of([leaf.param.size for leaf in leaves])
    tiles = tuple(
        tiles_lib.in_blocks(leaf.param.shape, elements)
        if isinstance(leaf.mu, tuple)
        else tiles_lib.flat(leaf.param.size, elements)
        for leaf in leaves
    )

    inputs = [jax.tree.map(jnp.ravel, leaf) for leaf in leaves]
    outputs = [_output(rule, leaf) for leaf in inputs]
    kept = [Operands(None, None if rule.changes else leaf.param, leaf.mu, leaf.nu) for leaf in inputs]
    aliases = _aliases((scalars, seeds, inputs), outputs, kept)
    call = pl.pallas_call(
        functools.partial(_kernel, rule, shard, tiles, (scalars, seeds, inputs), outputs),
        out_shape=jax.tree.leaves(outputs),
        grid=(sum(tile.programs for tile in tiles),),
        input_output_aliases=aliases,
        compiler_params=launch.params,
        interpret=interpret,
        name=f"{rule.name}_update",
    )
    done = jax.tree.unflatten(jax.tree.structure(outputs), call(*jax.tree.leaves((scalars, seeds, inputs))))
    return [_shaped(updated, leaf) for updated, leaf in zip(done, leaves)]


def _output(rule: Rule, leaf: Operands) -> Updated:
    """Returns the shapes and dtypes of the kernel's outputs for a leaf."""
    like = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    shape = leaf.param.shape
    copy = None if rule.copy_dtype is None else jax.ShapeDtypeStruct(shape, rule.copy_dtype)
    param = jax.ShapeDtypeStruct(shape, jnp.float32) if rule.changes else like(leaf.param)
    return Updated(param, like(leaf.mu), like(leaf.nu), copy)


def _shaped(updated: Updated, leaf: Operands) -> Updated:
    """Reshapes results to the shapes of the arrays that they replace."""
    like = Updated(leaf.param, leaf.mu, leaf.nu, None if updated.copy is None else leaf.param)
    return jax.tree.map(lambda x, old: x.reshape(old.shape), updated, like)


def _aliases(arguments: Any, outputs: list[Updated], kept: list[Operands]) -> dict[int, int]:
    """Returns {index of an argument: index of the result that reuses its memory}."""
    inside = {id(x): number for number, x in enumerate(jax.tree.leaves(arguments))}
    olds = [Updated(leaf.param, leaf.mu, leaf.nu, updated.copy and None) for leaf, updated in zip(kept, outputs)]
    aliases, number = {}, 0
    for old, updated in zip(olds, outputs):
        for source, target in zip(old, updated):
            for part in range(len(jax.tree.leaves(target))):
                if source is not None:
                    aliases[inside[id(jax.tree.leaves(source)[part])]] = number
                number += 1
    return aliases


def _kernel(rule: Rule, shard: Shard, tiles: tuple[Tiles, ...], arguments: Any, outputs: Any, *refs: Any) -> None:
    """Each program finds its leaf and its tile, and updates it."""
    counts = len(jax.tree.leaves(arguments))
    scalars_ref, seeds_ref, inputs = jax.tree.unflatten(jax.tree.structure(arguments), refs[:counts])
    results = jax.tree.unflatten(jax.tree.structure(outputs), refs[counts:])

    def work(own: jax.Array, choose: tiles_lib.Choose) -> None:
        spot = tiles[0].at(own)
        leaf, words = choose(functools.partial(load, spot))
        noise = _noise(spot.elements.astype(jnp.uint32), shard, words) if rule.stochastic else None
        scalars = Scalars(*[scalars_ref[field] for field in range(len(Scalars._fields))])
        done = advance(rule, scalars, shard.decays, leaf, noise)
        choose(lambda number, masked: _store(tiles[number], spot, masked, results[number], done))

    def load(spot: Spot, number: int, masked: bool) -> tuple[Operands, list[jax.Array]]:
        words = [seeds_ref[number, word] for word in range(1 + len(shard.sharded_dims))] if rule.stochastic else []
        return _load(tiles[number], spot, masked, inputs[number]), words

    # The last tile first, because the L2 cache still holds the end of what the norm read.
    tiles_lib.run(tiles, pl.num_programs(0) - 1 - pl.program_id(0), work)


def _load(tile: Tiles, spot: Spot, masked: bool, leaf: Operands) -> Operands:
    """Reads one tile of a leaf."""
    numbers, masks = (spot.elements, spot.scales), tile.masks(spot, masked)

    def load(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(tiles_lib.load(*each, KEEP) for each in zip(part, numbers, masks))
        return None if part is None else tiles_lib.load(part, numbers[0], masks[0], KEEP)

    return Operands(*map(load, leaf))


def _store(tile: Tiles, spot: Spot, masked: bool, result: Updated, done: Updated) -> None:
    """Writes one tile of a leaf's results."""
    numbers, masks = (spot.elements, spot.scales), tile.masks(spot, masked)
    for part, values in zip(result, done):
        if part is not None:
            refs, arrays = (part, values) if isinstance(part, tuple) else ((part,), (values,))
            for ref, array, where, mask in zip(refs, arrays, numbers, masks):
                pltriton.store(ref.at[where], array, mask=mask)


IMPLEMENTATIONS: dict[str, Callable[..., list[Updated]]] = {
    "jnp": _update_by_twin,
    "pallas": functools.partial(_update_by_kernel, interpret=False),
    "grouped": functools.partial(_update_by_kernel, interpret=False, in_groups=True),
    "interpret": functools.partial(_update_by_kernel, interpret=True),
}
