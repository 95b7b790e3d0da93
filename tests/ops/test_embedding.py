"""Checks rows and their gradients against numpy. This module tests zerojax.ops.embedding."""

import functools

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.models import layers
from zerojax.ops import columns

VOCAB, EMBED = 50, 8


def table(dtype):
    return arrays.normal(0, (VOCAB, EMBED), dtype)


def gradient(lookup, tokens, grad, dtype):
    return jax.grad(lambda t: jnp.sum(lookup(t, tokens).astype(jnp.float32) * grad))(table(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(), (7,), (2, 0), (3, 5, 2)])
def test_rows_are_those_of_take(dtype, shape):
    tokens = arrays.integers(1, shape, 0, VOCAB)
    rows = zerojax.embedding_lookup(table(dtype), tokens)
    np.testing.assert_array_equal(rows, jnp.take(table(dtype), tokens, axis=0))


def test_gradients_of_common_tokens_add_up_in_float32():
    """In bfloat16 the gradient of a text's most common token stops changing after some hundreds of examples."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(np.minimum(rng.zipf(1.3, 20_000) - 1, VOCAB - 1))
    grad = jnp.asarray(1 + 0.1 * rng.standard_normal((20_000, EMBED)), jnp.bfloat16).astype(jnp.float32)
    exact = np.zeros((VOCAB, EMBED))
    np.add.at(exact, np.asarray(tokens), np.asarray(grad, np.float64))

    def error(lookup):
        found = np.asarray(gradient(lookup, tokens, grad, jnp.bfloat16), np.float64)
        return np.max(np.abs(found - exact) / np.maximum(np.abs(exact), 1))

    assert error(zerojax.embedding_lookup) < 2**-8  # one rounding
    assert error(lambda t, i: jnp.take(t, i, axis=0)) > 0.3


def test_float32_gradients_are_those_of_take():
    tokens = arrays.integers(1, (400,), 0, VOCAB)
    grad = arrays.normal(2, (400, EMBED))
    ours, jaxs = (
        gradient(f, tokens, grad, jnp.float32) for f in (zerojax.embedding_lookup, lambda t, i: jnp.take(t, i, axis=0))
    )
    np.testing.assert_allclose(ours, jaxs, rtol=1e-5, atol=1e-5)


def test_tokens_outside_the_table_give_nan_and_no_gradient():
    tokens = jnp.asarray([1, VOCAB])
    rows = zerojax.embedding_lookup(table(jnp.float32), tokens)
    assert not jnp.isnan(rows[0]).any() and jnp.isnan(rows[1]).all()
    found = gradient(zerojax.embedding_lookup, tokens, jnp.ones((2, EMBED)), jnp.float32)
    np.testing.assert_array_equal(jnp.flatnonzero(found.any(-1)), [1])


def test_the_models_table_reads_as_flaxs():
    tokens = jnp.asarray([[3, 1], [4, 1]])
    ours, flaxs = layers.Embed(VOCAB, EMBED), nn.Embed(VOCAB, EMBED)
    params = flaxs.init(jax.random.key(0), tokens)
    np.testing.assert_array_equal(ours.apply(params, tokens), flaxs.apply(params, tokens))
    assert jax.tree.structure(ours.init(jax.random.key(0), tokens)) == jax.tree.structure(params)


def test_it_differentiates_in_every_mode_as_take_does():
    tokens, direction = jnp.asarray([3, 1, 3, -1]), jnp.cos(jnp.arange(VOCAB * EMBED, dtype=jnp.float32))

    def energy(lookup, t):
        return jnp.sum(jnp.sin(lookup(t.reshape(VOCAB, EMBED), tokens)) ** 2)

    def along(lookup):
        def slope(t):
            return jax.jvp(functools.partial(energy, lookup), (t,), (direction,))[1]

        return jax.grad(slope)(table(jnp.float32).ravel())

    ours, jaxs = along(zerojax.embedding_lookup), along(lambda t, i: jnp.take(t, i, axis=0))
    assert np.abs(jaxs).max() > 0.1
    np.testing.assert_allclose(ours, jaxs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
@pytest.mark.parametrize("shape", [(VOCAB,), (VOCAB, 3, 2)])
def test_tables_of_any_shape_and_dtype(dtype, shape):
    values = arrays.normal(0, shape).astype(dtype)
    with jax.numpy_dtype_promotion("strict"):
        rows = zerojax.embedding_lookup(values, jnp.asarray([[4, -2], [0, 4]]))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, values[np.asarray([[4, -2], [0, 4]])])


def test_rows_of_each_devices_tokens_in_a_shard_map():
    mesh = zerojax.make_mesh()
    tokens = jnp.arange(16) % 5

    def total(t, tokens):
        return jax.lax.psum(jnp.sum(jnp.sin(zerojax.embedding_lookup(t, tokens).astype(jnp.float32))), "data")

    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=jax.sharding.PartitionSpec())
    unsharded = jax.grad(lambda t: jnp.sum(jnp.sin(zerojax.embedding_lookup(t, tokens).astype(jnp.float32))))
    np.testing.assert_allclose(
        jax.jit(jax.grad(sharded))(table(jnp.bfloat16), tokens).astype(jnp.float32),
        unsharded(table(jnp.bfloat16)).astype(jnp.float32),
        rtol=2**-7,
    )


def test_rows_of_a_table_that_devices_use_by_columns():
    """Their gradients add up over all devices' tokens."""
    ways, spec, split = 8, jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec(None, "data")
    tokens = arrays.integers(1, (ways, 6), -VOCAB, VOCAB + 3)
    grad = arrays.normal(2, (ways, 6, EMBED))

    def on_device(sink, shard, tokens):
        with columns.used():
            seen = columns.add("table", columns.Columns(shard, "data", ways), sink)
            return zerojax.embedding_lookup(seen, tokens)

    mesh = zerojax.make_mesh(data=ways)
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(split, split, spec), out_specs=spec, check_vma=False)

    @functools.partial(jax.jit, static_argnums=0)
    def rows_and_gradient(rows, at):
        found, pull = jax.vjp(rows, at)
        return found, pull(grad)[0]

    sink = jnp.zeros((VOCAB, EMBED))
    found, summed = rows_and_gradient(lambda sink: mapped(sink, table(jnp.float32), tokens), sink)
    expected, added = rows_and_gradient(lambda t: jnp.take(t, tokens, axis=0), table(jnp.float32))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(summed, added, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [8, pytest.param(3, marks=pytest.mark.long)])
def test_rows_of_a_table_that_the_compiler_shards_are_those_of_take(length):
    """Tokens out of range too; gradients of equal tokens add up."""
    tokens = arrays.integers(1, (4, length), -VOCAB - 5, VOCAB + 5)
    rows, weight = table(jnp.float32)[:48], arrays.normal(2, (4, length, EMBED))

    def total(lookup):
        def of_table(rows, tokens, weight):
            found = lookup(rows, tokens)
            return jnp.sum(jnp.where(jnp.isnan(found), 0, found * weight)), found

        return jax.value_and_grad(of_table, has_aux=True)

    def of_device(rows, tokens, weight):
        (_, found), grad = total(zerojax.embedding_lookup)(rows, tokens, weight)
        return found, jax.lax.psum(grad, "data")

    own = P("data")
    mapped = jax.shard_map(
        of_device,
        mesh=zerojax.make_mesh(data=2, model=4),
        in_specs=(P(), own, own),
        out_specs=(own, P()),
        axis_names={"replica", "data"},
        check_vma=False,
    )
    found, grad = jax.jit(mapped)(rows, tokens, weight)
    (_, expected), grads = total(functools.partial(jnp.take, axis=0))(rows, tokens, weight)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(grad, grads, rtol=1e-6)  # sums in another order
