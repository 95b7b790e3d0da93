"""Checks the mesh and the sharding of batches. This module tests zerojax.mesh."""

import compile_only
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError

DEVICES = 8
SIZES = st.sampled_from([1, 2, 3, 4, 8])


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(SIZES, SIZES | st.just(-1), SIZES, SIZES)
def test_a_mesh_takes_every_device_once_or_is_refused_with_a_reason(replica, data, context, model):
    left = DEVICES // (replica * context * model) if data == -1 else data
    if replica * left * context * model != DEVICES:
        with pytest.raises(UserError, match=r"^mesh: replica .*but there are 8; choose"):
            mesh_lib.make_mesh(replica, data, model, context=context)
        return
    mesh = mesh_lib.make_mesh(replica, data, model, context=context)
    sizes = {"replica": replica, "data": left, "context": context, "model": model}
    assert dict(mesh.shape) == {axis.name: sizes.get(axis.name, 1) for axis in mesh_lib.AXES}
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())
    assert mesh_lib.ways(mesh) == replica * left


@pytest.mark.parametrize("sizes", [{"replica": 2, "data": 2, "model": 2}, {"data": 2, "context": 2, "model": 2}])
def test_neighbours_are_along_model_then_context_then_data_and_replicas_are_farthest(sizes):
    mesh = mesh_lib.make_mesh(**sizes)
    assert [device.id for device in mesh.devices.flat] == [device.id for device in jax.devices()]
    assert tuple(mesh.shape) == tuple(axis.name for axis in mesh_lib.AXES)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_experts_live_on_neighbours_along_data_and_context(data, context, model, expert):
    if data * context * model > DEVICES:
        return
    devices = jax.devices()[: data * context * model]
    if data * context % expert:
        with pytest.raises(
            UserError, match=rf"^mesh: expert {expert} does not divide data {data} x context {context} = "
        ):
            mesh_lib.make_mesh(data=data, context=context, model=model, expert=expert, devices=devices)
        return
    mesh = mesh_lib.make_mesh(data=data, context=context, model=model, expert=expert, devices=devices)
    plain = mesh_lib.make_mesh(data=data, context=context, model=model, devices=devices)
    assert list(mesh.devices.flat) == devices and mesh_lib.size(mesh, mesh_lib.EXPERT) == expert
    for axes in (
        mesh_lib.EXAMPLES,
        mesh_lib.TOKENS,
        mesh_lib.STATE,
    ):  # an array over them is where it is without experts
        assert NamedSharding(mesh, P(axes)).is_equivalent_to(NamedSharding(plain, P(axes)), 1)
        assert mesh_lib.text(mesh, axes) == mesh_lib.text(plain, axes) or mesh_lib.size(plain, axes) == 1
    named = {"replica": 1, "data": data, "context": context, "model": model} | (
        {"expert": expert} if expert > 1 else {}
    )
    assert mesh_lib.sizes(mesh) == named and {**mesh_lib.sizes(plain), **named} == named
    assert mesh_lib.text(mesh, mesh_lib.EXPERT) == f"expert={expert}"
    own = mesh_lib.with_parts(mesh, P(("replica", "data"), "context"))
    assert NamedSharding(mesh, own).is_equivalent_to(NamedSharding(plain, P(("replica", "data"), "context")), 2)


def test_each_group_of_a_pipeline_has_all_experts():
    groups = mesh_lib.groups(mesh_lib.make_mesh(pipe=2, expert=2))
    assert [mesh_lib.sizes(group) for group in groups] == [
        mesh_lib.sizes(mesh_lib.make_mesh(expert=2, devices=jax.devices()[:4]))
    ] * 2


def test_a_mesh_may_take_some_devices():
    assert mesh_lib.make_mesh(data=2, devices=jax.devices()[2:4]).devices.flat[0] == jax.devices()[2]


@pytest.mark.parametrize("sizes", [(0, -1, 1), (1, 0, 1), (1, -2, 1), (1, 8, 0), (-1, 8, 1), (1, 8, 1, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(UserError, match="axis sizes must be above 0"):
        mesh_lib.make_mesh(*sizes[:3], context=(*sizes, 1)[3])


def test_a_mesh_larger_than_the_machine_names_both_numbers():
    with pytest.raises(UserError, match=r"= 16 devices, but there are 8"):
        mesh_lib.make_mesh(data=16)
    with pytest.raises(UserError, match=r'jax\.config\.update\("jax_num_cpu_devices", 16\)` before JAX starts'):
        mesh_lib.make_mesh(data=16)
    for options in ({"data": 4}, {"data": 2, "devices": jax.devices()[:1]}):
        with pytest.raises(UserError, match=r"or pass the devices to use$"):
            mesh_lib.make_mesh(**options)
    with pytest.raises(UserError, match=r"^devices: .* name one twice"):
        mesh_lib.make_mesh(devices=jax.devices()[:1] * 2)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_a_batch_is_sharded_over_replica_and_data_only(batch_dim):
    mesh = mesh_lib.make_mesh(replica=2, data=2, model=2)
    shape = (1,) * batch_dim + (8, 3)
    batch = jax.device_put(jnp.zeros(shape), mesh_lib.batch_sharding(mesh, batch_dim))
    assert {s.data.shape for s in batch.addressable_shards} == {(1,) * batch_dim + (2, 3)}
    with pytest.raises(UserError, match=rf"^batch_dim: must be .* and is {batch_dim - 2}"):
        mesh_lib.batch_sharding(mesh, batch_dim - 2)
    assert len({str(s.index) for s in batch.addressable_shards}) == mesh_lib.ways(mesh)


def test_a_platform_has_one_name_for_all_kinds_of_devices():
    here = mesh_lib.make_mesh()
    gpus = mesh_lib.make_mesh(devices=compile_only.devices())
    assert [mesh_lib.platform(where) for where in (None, here, here.devices.flat[0])] == ["cpu"] * 3
    assert [mesh_lib.platform(where) for where in (gpus, gpus.devices.flat[0])] == ["gpu"] * 2


@pytest.mark.parametrize(
    "shape, axes, expected",
    [
        ((8,), ("data",), ("replica", "data", "expert", "context", "expert_context", "model")),
        ((2, 4), ("replica", "data"), ("replica", "data", "expert", "context", "expert_context", "model")),
        ((4, 2), ("data", "model"), ("replica", "data", "model", "expert", "context", "expert_context")),
        ((2, 4), ("own", "data"), ("replica", "own", "data", "expert", "context", "expert_context", "model")),
        ((2, 4), ("data", "context"), ("replica", "data", "context", "expert", "expert_context", "model")),
    ],
)
def test_a_users_mesh_gets_the_axes_that_it_lacks_and_keeps_its_devices(shape, axes, expected):
    devices = np.asarray(jax.devices()[::-1]).reshape(shape)
    for kind in (AxisType.Auto, AxisType.Explicit):
        own = jax.sharding.Mesh(devices, axes, axis_types=(kind,) * len(axes))
        mesh = mesh_lib.completed(own)
        sizes = dict(zip(axes, shape))
        assert list(mesh.shape.items()) == [(name, sizes.get(name, 1)) for name in expected] and set(
            mesh.axis_types
        ) == {AxisType.Auto}
        assert list(mesh.devices.flat) == list(devices.flat)
        for spec in (P("data"), P(None, axes), P()):
            assert NamedSharding(mesh, spec).is_equivalent_to(NamedSharding(own, spec), 2)
    assert mesh_lib.completed(mesh) is mesh


@pytest.mark.parametrize("mesh", [None, "data", 8, jax.devices()])
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(UserError, match=r"^mesh: needs an axis named 'data', and has "):
        mesh_lib.completed(mesh)


@pytest.mark.parametrize("context", [1, 4])
def test_tokens_of_a_batch_are_sharded_where_devices_have_their_own(context):
    mesh = mesh_lib.make_mesh(context=context)
    batch = jax.device_put(jnp.zeros((1, 8, 12, 5)), mesh_lib.batch_sharding(mesh, 1, has_tokens=True))
    assert {s.data.shape for s in batch.addressable_shards} == {(1, context, 12 // context, 5)}
    rows = jax.device_put(jnp.zeros((8, 12)), mesh_lib.row_sharding(mesh))
    assert {s.data.shape for s in rows.addressable_shards} == {(1, 12)}


def test_what_has_examples_or_tokens_of_its_own_is_summed_and_the_rest_is_the_compilers():
    """A gradient over an axis along which examples differ, and that no sum runs over, would be that of one device."""
    for axis in mesh_lib.AXES:
        assert axis.summed == (axis.examples or axis.tokens) and not (axis.examples and axis.tokens), axis
        assert axis.compiler != axis.summed, axis
    mesh = mesh_lib.make_mesh(replica=2, data=2, model=2)
    assert tuple(mesh.shape) == tuple(axis.name for axis in mesh_lib.AXES)
    assert mesh_lib.manual(mesh) == set(mesh.shape) - set(mesh_lib.COMPILER)
    assert mesh_lib.ways(mesh) == mesh_lib.size(mesh, mesh_lib.EXAMPLES) == 4
