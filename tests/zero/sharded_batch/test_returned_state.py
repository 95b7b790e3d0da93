"""Checks the values that a state gets from a loss. This module tests zerojax.zero.sharded_batch.returned_state; `test_outputs` trains."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero.sharded_batch import returned_state

BEFORE = types.SimpleNamespace(seen={"mean": jnp.zeros((), jnp.bfloat16), "count": jnp.int32(5)})


def test_values_of_the_whole_batch_keep_the_dtypes_of_the_state():
    returned = {"seen": {"mean": zerojax.Mean(jnp.float32(6), jnp.float32(4)), "count": zerojax.Sum(jnp.int32(7))}}
    new = returned_state.of_batch(returned, BEFORE)["seen"]
    assert (new["mean"], new["count"]) == (1.5, 7)
    assert (new["mean"].dtype, new["count"].dtype) == (jnp.bfloat16, jnp.int32)


@pytest.mark.parametrize(
    "seen, message",
    [
        ({"mean": jnp.float32(1)}, "returned state.seen without seen/count, and a state keeps its structure"),
        ({"mean": jnp.ones(2), "count": jnp.int32(1)}, "state/seen/mean as float32.2., and the state holds bfloat16"),
    ],
)
def test_another_structure_or_shape_is_refused(seen, message):
    with pytest.raises(UserError, match=message):
        returned_state.of_batch({"seen": seen}, BEFORE)


def test_over_devices_floats_are_averaged_means_weighed_and_what_a_sum_adds_is_added():
    mesh = mesh_lib.make_mesh(data=2, devices=jax.devices()[:2])
    before = types.SimpleNamespace(average=jnp.float32(0), weighed=jnp.float32(0), total=jnp.float32(10))

    def on_device(x):
        own = {"average": x[0], "weighed": zerojax.Mean(x[0] * x[0], x[0]), "total": zerojax.Sum(before.total + x[0])}
        return returned_state.of_devices(own, before, program=None)

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P(mesh_lib.SUMMED), out_specs=P(), check_vma=False)
    new = run(jnp.array([1.0, 3.0]))
    assert {name: float(value) for name, value in new.items()} == {"average": 2.0, "weighed": 2.5, "total": 14.0}
