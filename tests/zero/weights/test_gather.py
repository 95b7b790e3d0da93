"""Checks the gather in its two forms against numpy. This module tests zerojax.zero.weights.gather."""

import dataclasses
from typing import Any

import arrays
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.zero.weights import gather
from zerojax.zero.weights.placement import Placement

MESHES = {"8": (1, 8), "2 x 4": (2, 4), "8 replicas": (8, 1)}


def placement(mesh: Any, stored: P, grad: P, opt_state: P, padding: tuple[int, ...] = ()) -> Placement:
    specs = [NamedSharding(mesh, spec) for spec in (stored, P(), grad, opt_state)]
    return Placement(*specs, update=specs[-1], wire=gather.PLAIN, padding=padding, shape=(16, 24))


STAGES = {
    "0": (P(), P(), P()),
    "1": (P(), P(), P("data")),
    "2": (P(), P(None, "data"), P(None, "data")),
    "3": (P("data"), P("data"), P("data")),
}


def explicit(weight: jax.Array, place: Placement, reduction: gather.Reduction, dtype: Any) -> tuple:
    """Returns (the used weight, the summed gradient); device i's own gradient is (i + 1) * the weight's positions."""
    mesh = place.stored.mesh
    seen_shape = tuple(n - p for n, p in zip(weight.shape, place.padding or (0, 0)))
    own = jnp.arange(np.prod(seen_shape), dtype=jnp.float32).reshape(seen_shape) % 7

    def on_device(shard):
        factor = 1.0 + jax.lax.axis_index(mesh_lib.EXAMPLES)

        def loss(sink):
            used = gather.gather_shard(gather.ShardAndSink(shard, sink), place, dtype, reduction)
            return jnp.sum(used.astype(jnp.float32) * own * factor), used

        grad, used = jax.grad(loss, has_aux=True)(gather.sink(place, reduction))
        return used, gather.reduce_rest(grad, place, reduction)

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=place.stored.spec, out_specs=(P(), place.opt_state.spec), check_vma=False
    )
    used, grad = jax.jit(mapped)(jax.device_put(weight, place.stored))
    return used, grad, own


@hypothesis.settings(deadline=None, derandomize=True, max_examples=12)
@hypothesis.given(
    st.sampled_from(list(STAGES)),
    st.sampled_from(list(MESHES)),
    st.booleans(),
    st.sampled_from([None, jnp.bfloat16]),
    st.sampled_from([(), (0, 3), (2, 0)]),
)
def test_a_shard_is_gathered_and_its_gradient_summed(stage, mesh, at_once, dtype, padding):
    place = placement(mesh_lib.make_mesh(*MESHES[mesh]), *STAGES[stage], padding=padding)
    weight = jnp.arange(16.0 * 24).reshape(16, 24)
    used, grad, own = explicit(weight, place, gather.Reduction(jnp.float32, at_once), dtype)
    rows, columns = own.shape
    np.testing.assert_array_equal(used, weight[:rows, :columns].astype(dtype or jnp.float32))
    expected = np.zeros((16, 24))
    expected[:rows, :columns] = 36 * np.asarray(own)  # 1 + 2 + ... + 8; integers, exact in any order
    np.testing.assert_array_equal(grad, expected)
    assert grad.dtype == jnp.float32


def test_the_sum_is_made_in_the_dtype_asked_for():
    place = placement(mesh_lib.make_mesh(), *STAGES["3"])

    def sums(dtype):
        jaxpr = jax.make_jaxpr(lambda w: explicit(w, place, gather.Reduction(dtype), jnp.bfloat16)[:2])(
            jnp.ones((16, 24))
        )
        return [line for line in str(jaxpr).splitlines() if "reduce_scatter[" in line]

    assert all(":f32" in line for line in sums(jnp.float32)) and len(sums(jnp.float32)) == 1
    assert all(":bf16" in line for line in sums(jnp.bfloat16)) and len(sums(jnp.bfloat16)) == 1


@pytest.mark.parametrize("mesh", list(MESHES))
def test_of_what_overwrites_a_weight_the_largest_of_all_devices_is_taken_also_in_one_of_several_passes(mesh):
    place = dataclasses.replace(placement(mesh_lib.make_mesh(*MESHES[mesh]), P(), P(), P()), overwritten=True)
    values = (
        np.random.default_rng(0).normal(size=(8, 16, 24)).astype(np.float32)
    )  # each device has the largest somewhere
    reduction = gather.Reduction(jnp.bfloat16, at_once=False)
    found = jax.shard_map(
        lambda own: gather.PLAIN.home(own[0], place, reduction)[0],
        mesh=place.stored.mesh,
        in_specs=P(mesh_lib.EXAMPLES),
        out_specs=P(),
        check_vma=False,
    )(values)
    np.testing.assert_array_equal(found, values.max(axis=0))


@pytest.mark.parametrize(("stage", "waits"), [("0", True), ("1", True), ("2", False), ("3", False)])
def test_replicated_gradients_wait_for_the_last_pass(stage, waits):
    place = placement(mesh_lib.make_mesh(), *STAGES[stage])
    assert gather.Reduction(jnp.float32, at_once=False).waits(place) == waits
    assert not gather.Reduction(jnp.float32).waits(place)
    shape = gather.sink(place, gather.Reduction(jnp.float32, at_once=False)).shape
    assert shape == ((16, 24) if waits else place.opt_state.shard_shape((16, 24)))


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(("replica", "data")), P()])
def test_a_local_shape_is_that_of_the_sharding(spec):
    mesh = mesh_lib.make_mesh(1, 8)
    assert gather.local_shape((16, 24), NamedSharding(mesh, spec)) == NamedSharding(mesh, spec).shard_shape((16, 24))


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_reduce_scatter_in_parts_gives_each_device_its_own_shard(sizes, dim):
    mesh, spec = mesh_lib.make_mesh(context=2), P(*[None] * dim, gather.STATE)
    grads = arrays.normal(0, (8, 16, 24))
    run = jax.shard_map(
        lambda g: gather._scatter(g[0], dim, mesh_lib.STATE, sizes),
        mesh=mesh,
        in_specs=P(gather.STATE),
        out_specs=spec,
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(run)(grads), grads.sum(0), rtol=1e-5, atol=1e-5)
