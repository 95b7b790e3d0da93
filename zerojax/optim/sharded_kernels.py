"""Runs the kernels of `pallas_kernels` on each device's shard. This module derives the shards from the spec of a weight.

A kernel knows no mesh and XLA does not shard kernels, so each runs under `jax.shard_map`. A device updates its own shards. Only the largest
magnitudes of 8-bit blocks that several devices share are sent.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import rules, update
from zerojax import specs
from zerojax.optim import eight_bit
from zerojax.tree import Leaf


def mesh_of(shardings: Sequence[NamedSharding]) -> Any:
    """Returns the mesh that all shardings share."""
    return shardings[0].mesh


def update_leaves(
    rule: rules.Rule,
    leaves: Sequence[rules.Operands],
    decays: Sequence[bool],
    scalars: rules.Scalars,
    seeds: jax.Array,
    shardings: Sequence[NamedSharding],
    implementation: str,
) -> list[rules.Updated]:
    """Updates each device's shard of every leaf: `pallas_kernels.update.update_leaves` under shard_map.

    Args:
      rule: which update.
      leaves: global arrays, as there.
      decays: for each leaf, whether it decays.
      scalars: as there.
      seeds: uint32 [leaves], one for each leaf.
      shardings: of each leaf's gradient, weight and moments.
      implementation: a key of update.IMPLEMENTATIONS.
    """
    mesh = mesh_of(shardings)
    sharded_dims = [_sharded_dims(sharding.spec, leaf.param.shape, mesh) for leaf, sharding in zip(leaves, shardings)]
    shards = [
        update.Shard(
            decay,
            tuple((run, ways) for run, ways, _ in dims),
            eight_bit.shared_axes(sharding.spec, leaf.param.shape, mesh) if isinstance(leaf.mu, tuple) else (),
        )
        for leaf, decay, dims, sharding in zip(leaves, decays, sharded_dims, shardings)
    ]
    leaf_specs = [_leaf_specs(leaf, sharding.spec, mesh) for leaf, sharding in zip(leaves, shardings)]
    copies = rule.copy_dtype is not None
    out_specs = [rules.Updated(spec.param, spec.mu, spec.nu, spec.param if copies else None) for spec in leaf_specs]

    def update_shards(leaves: list[rules.Operands], scalars: rules.Scalars, seeds: jax.Array) -> list[rules.Updated]:
        words = [
            jnp.stack([seeds[number], *[jax.lax.axis_index(names).astype(jnp.uint32) for _, _, names in dims]])
            for number, dims in enumerate(sharded_dims)
        ]
        return update.update_leaves(rule, leaves, shards, scalars, words, implementation=implementation)

    return jax.shard_map(
        update_shards,
        mesh=mesh,
        in_specs=(leaf_specs, jax.tree.map(lambda _: P(), scalars), P()),
        out_specs=out_specs,
        check_vma=False,
    )(list(leaves), jax.tree.map(lambda s: jnp.asarray(s, jnp.float32), scalars), seeds)


def _leaf_specs(leaf: rules.Operands, spec: P, mesh: Mesh) -> rules.Operands:
    """Returns the specs of a leaf's arrays; scales of 8-bit blocks have a spec of their own."""

    def of(part: Leaf) -> Any:
        return (spec, eight_bit.scales_spec(spec, part[0].shape, mesh)) if isinstance(part, tuple) else spec

    return rules.Operands(*[None if part is None else of(part) for part in leaf])


def _sharded_dims(spec: P, shape: Sequence[int], mesh: Mesh) -> list[tuple[int, int, tuple[str, ...]]]:
    """Returns for each sharded dim, last first, the elements of one local run along it, the number of shards, and the axes."""
    found = []
    for dim in reversed(range(len(spec))):
        names = specs.names(spec[dim])
        ways = math.prod(mesh.shape[name] for name in names)
        if ways > 1:
            found.append((math.prod(shape[dim:]) // ways, ways, names))
    return found
