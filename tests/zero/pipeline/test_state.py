"""Checks where the leaves of a state live. This module tests zerojax.zero.pipeline.state."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import Net, abstract, prepared

import zerojax
from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero import state_bytes
from zerojax.zero.pipeline import state


def test_a_weight_its_moments_and_its_gradient_live_on_one_group_and_counts_on_all():
    (_, partition), _ = prepared({"pipe": 2, "data": 2}, 3, shard=abstract, schedule="1f1b")
    homes = partition.pipeline.homes
    assert homes["params/embed/embedding"] == homes["params/block_0/up/kernel"] == 0
    assert homes["params/head/kernel"] == homes["params/block_2/up/kernel"] == 1
    for path in partition.placements:
        assert homes[f"opt_state/0/mu/{path.removeprefix('params/')}"] == homes[path]
    assert homes["step"] == homes["opt_state/0/count"] == state.EVERYWHERE
    groups = mesh_lib.groups(partition.mesh)
    for path, sharding in tree.flatten(partition.shardings):
        assert sharding.mesh == (partition.mesh if homes[path] == state.EVERYWHERE else groups[homes[path]])


def test_calls_of_blocks_are_those_of_all_stages_of_a_group():
    placed = state.Placed(None, None, [None] * 2, {}, [0, 1, 1, 2, 3])  # type: ignore[arg-type,list-item]
    assert [placed.calls(group) for group in (0, 1)] == [2, 3]


def test_factored_moments_live_with_their_weight():
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    (_, partition), _ = prepared({"pipe": 2}, shard=abstract, schedule="1f1b", tx=tx)
    homes = partition.pipeline.homes
    rows = [path for path in homes if "/v_row/" in path]
    assert rows and all(homes[path] == homes[f"params/{path.split('/v_row/')[1]}"] for path in rows)


def test_an_array_over_all_groups_is_seen_by_each_without_a_copy():
    mesh = mesh_lib.make_mesh(pipe=2, data=2, devices=jax.devices()[:4])
    x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("data")))
    parts = [state.view(x, group) for group in mesh_lib.groups(mesh)]
    for part in parts:
        np.testing.assert_array_equal(part, x)
        held = {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
        assert {shard.data.unsafe_buffer_pointer() for shard in part.addressable_shards} < held
    back = state.joined(parts, mesh)
    assert back.sharding == x.sharding
    np.testing.assert_array_equal(back, x)


def test_bytes_are_those_of_the_group_that_holds_the_most():
    (_, partition), _ = prepared({"pipe": 2, "data": 2}, 3, shard=abstract, schedule="1f1b")
    known = tree.flatten(partition.abstract_state)
    held = [sum(tree.shard_bytes(leaf) for _, leaf in partition.pipeline.held(group, known)) for group in (0, 1)]
    counted = state_bytes.bytes_per_device(partition)
    assert sum(counted.values()) - counted["gradients"] == max(held) < sum(tree.shard_bytes(leaf) for _, leaf in known)


def test_weights_of_several_groups_are_refused_where_one_program_reads_them():
    (_, partition), _ = prepared({"pipe": 2}, shard=abstract, schedule="1f1b")
    with pytest.raises(UserError, match="placements: the weights are on the groups of a pipeline"):
        zerojax.where_used(lambda params: 0.0, partition.placements)


def test_a_pipeline_without_groups_has_no_effect_and_says_so():
    with pytest.warns(UserWarning, match="pipeline: has no effect"):
        prepared({"data": 2}, shard=abstract, schedule="1f1b")


def test_a_batch_of_no_arrays_is_refused():
    for value in (3, "x", jax.numpy.float16):
        with pytest.raises(UserError, match=r"^batch/x: must be an array, and is "):
            zerojax.Pipeline(abs, {"x": value}, "layer")


@pytest.mark.parametrize(
    ("pipe", "order", "fewer"),
    [(4, {"schedule": "1f1b"}, "`pipe`,"), (2, {"schedule": "interleaved", "chunks": 2}, "`pipe` or `chunks`,")],
)
def test_fewer_blocks_than_stages_are_refused(pipe, order, fewer):
    with pytest.raises(UserError, match=f"the loss calls 2 blocks .* there are 4 stages; take a smaller {fewer}"):
        prepared({"pipe": pipe}, shard=abstract, net=Net(layers=1), **order)
