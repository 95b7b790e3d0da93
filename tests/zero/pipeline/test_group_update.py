"""Checks which states groups can update by themselves, and updates from host memory. This module tests zerojax.zero.pipeline.group_update;
test_step has the other updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from pipelines import PASSES, TENSOR, Net, State, abstract, assert_equal, batch_of, prepared, trained

import zerojax
from zerojax import display, roles, tree
from zerojax.errors import UserError
from zerojax.plan import report, step_plan
from zerojax.zero import state_bytes
from zerojax.zero.host import budget, memory_kind, settings
from zerojax.zero.host.disk import store
from zerojax.zero.pipeline import group_update, state
from zerojax.zero.update import update
from zerojax.zero.weights import gather

HOST = settings.Offload(optimizer="host", chunk_bytes=2048, in_flight=2)
ROUNDED = 1e-6  # a program for each weight may contract other products and sums than one for all


def test_an_optimizer_that_mixes_weights_is_refused():
    with pytest.raises(UserError, match="pipe: each group of devices updates its own weights, and with this optimizer"):
        prepared(
            {"pipe": 2}, shard=abstract, schedule="1f1b", tx=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
        )


def test_a_state_that_applies_gradients_in_its_own_way_is_refused():
    class Own(State):
        def apply_gradients(self, **given):
            return super().apply_gradients(**given)

    (held, partition), _ = prepared({"pipe": 2}, shard=abstract, schedule="1f1b")
    own = Own(**{field.name: getattr(held, field.name) for field in dataclasses.fields(held)})
    with pytest.raises(UserError, match="the state is Own, whose own apply_gradients may read leaves together"):
        group_update.check(dataclasses.replace(partition, abstract_state=own))


def test_each_trained_weight_is_updated_by_one_group_which_reads_its_own_leaves_alone():
    (_, partition), _ = prepared({"pipe": 4}, shard=abstract, schedule="1f1b", has_target=True)
    groups = [
        group_update.GroupUpdate(
            partition.pipeline, number, gather.Reduction(jnp.float32), update.Unscaled(), update.Clip(), donate=True
        )
        for number in range(4)
    ]
    trained = [path for group in groups for path in group.trained]
    paths = [f"params/{path}" for path, _ in tree.flatten(partition.abstract_state.params)]
    assert sorted(trained) == sorted(paths)
    assert all(group.trained for group in groups)
    homes = partition.pipeline.homes
    for number, group in enumerate(groups):
        assert {homes[path] for path in group.reads} == {number, state.EVERYWHERE}
    assert sum(path.startswith("target/") for group in groups for path in group.reads) == len(paths)
    assert jax.tree.structure(partition.abstract_state) == jax.tree.structure(partition.shardings)


SCALED = {"loss_scale": zerojax.DynamicLossScale(init_scale=2.0**126)}  # the first step overflows


@pytest.mark.parametrize(
    "mesh, stage, how",
    [
        ({"pipe": 2, "data": 2}, 2, {"net": Net(layers=1), **SCALED}),
        pytest.param({"pipe": 2, "data": 2}, 1, {"schedule": "interleaved", "chunks": 2}, marks=runs.LONG),
        pytest.param({"pipe": 2, "data": 2}, 3, {"schedule": "zero_bubble", **SCALED}, marks=runs.LONG),
        pytest.param({"pipe": 4, "data": 2}, 3, {"trainable": "up|head"}, marks=runs.LONG),
        pytest.param({"pipe": 2, "data": 2, "model": 2}, 2, {"overrides": TENSOR}, marks=runs.LONG),
        pytest.param({"pipe": 2, "replica": 2, "data": 2}, 1, {"donate": False}, marks=runs.LONG),
        pytest.param({"pipe": 2, "context": 2}, 3, {"tx": optax.adafactor(1e-2)}, marks=runs.LONG),
        pytest.param(
            {"pipe": 2, "data": 2}, 2, {"state_offload": settings.Offload("host", fraction=0.5)}, marks=runs.LONG
        ),
    ],
)
def test_a_state_in_host_memory_is_updated_as_one_on_the_devices(mesh, stage, how):
    how = {"schedule": "1f1b", "state_offload": HOST} | how
    metrics, params, state = trained(mesh, stage, **how)
    expected = trained(mesh, stage, **{**how, "state_offload": None})[:2]
    for row in (*metrics, *expected[0]):
        row["grad_norm"] = np.nan_to_num(row["grad_norm"])  # of a step that is skipped
    assert_equal((metrics, params), expected, ROUNDED)
    if "loss_scale" in how:
        assert [row["skipped_steps"] for row in metrics] == [1, 2], "all groups skip a step"
    leaves = jax.tree.leaves(state.opt_state)
    far = [leaf for leaf in leaves if memory_kind.is_on_host(leaf)]
    assert far, "some state is in host memory"
    meshes = {leaf.sharding.mesh for leaf in far}
    assert len(meshes) == mesh["pipe"], "each group has its own"


@pytest.mark.long
def test_each_group_has_a_file_for_a_state_on_a_disk(tmp_path):
    disk = dataclasses.replace(HOST, optimizer="nvme", nvme_path=str(tmp_path))
    how = {"mesh": {"pipe": 2, "data": 2}, "stage": 2, "schedule": "1f1b"}
    metrics, params, state = trained(**how, state_offload=disk)
    assert_equal((metrics, params), trained(**how)[:2], ROUNDED)
    found = [leaf for leaf in jax.tree.leaves(state.opt_state) if isinstance(leaf, store.DiskArray)]
    assert len({leaf.sharding.mesh for leaf in found}) == len({id(leaf.store) for leaf in found}) == 2


def test_bytes_in_host_memory_are_those_of_the_group_that_has_the_most():
    (_, partition), step = prepared(
        {"pipe": 2, "data": 2}, 2, net=Net(layers=2), shard=abstract, schedule="1f1b", state_offload=HOST
    )
    host = [
        sum(
            tree.shard_bytes(leaf)
            for path, leaf in tree.flatten(partition.abstract_state)
            if path in partition.on_host and partition.pipeline.homes[path] == group
        )
        for group in range(2)
    ]
    assert state_bytes.bytes_elsewhere(partition) == {roles.HOST: max(host)}
    assert budget.pool_bytes(partition) >= 2 * sum(host), "two devices a group"
    how = {"mesh": partition.mesh, "target": "cpu", "placement": partition, "passes": PASSES, "by_hand": True}
    plan = step_plan.plan_step(step, partition.abstract_state, jax.eval_shape(lambda: batch_of(0)), **how)
    assert [*report.groups_table(plan).columns[-1].cells] == [display.human(count) for count in host]
    rows = {row.role: row for row in plan.memory}
    assert [held.host for held in plan.pipeline.memory] == host
    assert rows[roles.HOST].assigned == rows[roles.HOST].arithmetic == host[plan.pipeline.largest]
    assert rows[roles.MOMENTS].assigned == rows[roles.MOMENTS].arithmetic == 4, "a count"
    assert sum(row.assigned for row in plan.memory if row.role != roles.HOST) == plan.peak


@pytest.mark.parametrize(
    "offload, message",
    [
        ({"optimizer": "host", "params": "host"}, "offload.params: is 'host', and a pipeline reads weights from"),
        ({"optimizer": "host", "late_norm": True}, "offload.late_norm: is True, and the groups of a pipeline"),
        ({"optimizer": "host", "by_block": "on"}, "offload.by_block: is 'on', and the stages of a pipeline"),
    ],
)
def test_other_offloads_are_refused(offload, message):
    with pytest.raises(UserError, match=message):
        prepared({"pipe": 2}, 3, shard=abstract, schedule="1f1b", state_offload=offload)
