"""Compares updates of shards with updates of global arrays. This module tests zerojax.optim.sharded_kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import blockwise, rules, update
from zerojax import mesh as mesh_lib
from zerojax.optim import sharded_kernels

SCALARS = rules.Scalars(0.5, 1.0, 0.01, 0.1, 0.9, 0.1, 0.95, 0.05, 1e-8, 3.0, 5.0)
SPECS = {
    P("data"): (8, 300),
    P(None, "data"): (3, 1024),  # full blocks: shards of 256
    P("replica", "data"): (6, 80),  # blocks are on 4 devices, and are ragged
    P(
        ("replica", "data"),
    ): (16, 257),
    P(None, ("replica", "data")): (5, 4096),  # shards of two blocks
    P(None, "data", "replica"): (3, 4, 600),  # two devices share each ragged row of blocks
    P(): (7, 9),
}


def leaf_of(shape, moments, seed):
    rng = np.random.default_rng(seed)
    grad, param, mu, nu = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(4))
    if moments == "int8":
        blocks = blockwise.BlockView(shape)

        def encoded(x, dtype):
            scales = blockwise.scales_of(blocks.split(x))
            return blocks.join(blockwise.encode(blocks.split(x), scales, dtype)), scales

        mu, nu = encoded(mu, jnp.dtype("int8")), encoded(nu**2, jnp.dtype("uint8"))
    else:
        mu, nu = mu.astype(moments), (nu**2).astype(moments)
    return rules.Operands(grad.astype(jnp.bfloat16), param.astype(jnp.bfloat16), mu, nu)


@pytest.mark.parametrize(
    ("moments", "implementation"), [("bfloat16", "interpret"), pytest.param("int8", "jnp", marks=pytest.mark.long)]
)
def test_shards_are_updated_as_the_global_array_with_the_same_random_bits(moments, implementation):
    rule = rules.Rule("adam", stochastic=True, copy_dtype=jnp.dtype("float16"))
    # Each spec takes a second to compile, with the interpreter more.
    specs = dict(list(SPECS.items())[slice(1, 6) if implementation == "jnp" else slice(None, None, 2)])
    mesh, leaves = mesh_lib.make_mesh(replica=2), [leaf_of(shape, moments, n) for n, shape in enumerate(specs.values())]
    seeds = jnp.arange(len(leaves), dtype=jnp.uint32) + 5
    decays = [n % 2 == 0 for n in range(len(leaves))]
    on_shards = functools.partial(
        sharded_kernels.update_leaves,
        rule,
        shardings=[NamedSharding(mesh, spec) for spec in specs],
        implementation=implementation,
    )
    found = jax.jit(lambda leaves, seeds: on_shards(leaves, decays, SCALARS, seeds))(leaves, seeds)
    update_global = functools.partial(update.update_leaves, rule, shards=[update.Shard(decay) for decay in decays])
    expected = jax.jit(
        lambda ls, seeds: update_global(ls, scalars=SCALARS, seeds=[seeds[n, None] for n in range(len(ls))])
    )(leaves, seeds)
    for spec, one, other in zip(specs, found, expected, strict=True):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
            assert a.shape == b.shape and a.dtype == b.dtype
            differs = np.asarray(a, np.float64) != np.asarray(b, np.float64)
            # XLA fuses products and sums differently in shards of another shape, and a last place of float32 may tip a random rounding.
            assert np.mean(differs) < (0.3 if a.dtype == jnp.float32 else 0.002), (spec, a.dtype)
            is_code = a.dtype in (jnp.int8, jnp.uint8)
            apart = (
                {"rtol": 0, "atol": 1} if is_code else {"rtol": 2**-7 if a.dtype != jnp.float32 else 1e-5, "atol": 1e-7}
            )
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), **apart)


def test_updates_of_shards_send_nothing_but_the_magnitudes_of_shared_blocks():
    mesh = mesh_lib.make_mesh(replica=2)
    for spec, shape in SPECS.items():
        leaf = leaf_of(shape, "int8", 0)
        sharding = NamedSharding(mesh, spec)

        def step(leaf, sharding=sharding):
            return sharded_kernels.update_leaves(
                rules.Rule("adam"), [leaf], [True], SCALARS, jnp.zeros(1, jnp.uint32), [sharding], "jnp"
            )

        scales = NamedSharding(mesh, sharded_kernels.eight_bit.scales_spec(spec, shape, mesh))
        shardings = rules.Operands(sharding, sharding, (sharding, scales), (sharding, scales))
        text = jax.jit(step, in_shardings=(shardings,)).lower(leaf).compile().as_text()
        assert ("all-gather" in text) == bool(sharded_kernels.eight_bit.shared_axes(spec, shape, mesh)), spec
        assert "all-to-all" not in text and "collective-permute" not in text
