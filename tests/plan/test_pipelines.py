"""Checks the plan of a step over a pipeline. This module tests zerojax.plan.pipelines."""

import compile_only
import context_costs
import jax
import pytest
import runs
from pipelines import PASSES, TENSOR, abstract, batch_of, prepared

from zerojax import roles, tree
from zerojax.plan import json_form, picture, pipelines, report, step_plan, targets
from zerojax.trainer import plans


def plan_of(stage, **how):
    (_, partition), step = prepared({"pipe": 2, "data": 2}, stage, shard=abstract, schedule="1f1b", **how)
    how = {"mesh": partition.mesh, "target": "cpu", "placement": partition, "passes": PASSES, "by_hand": True}
    return step_plan.plan_step(step, partition.abstract_state, jax.eval_shape(lambda: batch_of(0)), **how), partition


@pytest.fixture(scope="module")
def planned():
    return plan_of(stage=3)


def test_the_bubble_is_that_of_the_paper_and_layers_are_divided(planned):
    plan, _ = planned
    assert plan.pipeline.theory == pytest.approx(1 / (PASSES + 1))
    assert sum(plan.pipeline.calls) == 4, "three blocks and the head"
    assert not plan.pipeline.is_foretold and plan.foretold is None, "no rates of a CPU are known"


def test_memory_is_that_of_the_largest_group(planned):
    plan, partition = planned
    largest = max(plan.pipeline.memory, key=lambda held: held.peak)
    assert plan.peak == largest.peak
    rows = {row.role: row for row in plan.memory}
    own = pipelines.own(partition, plan.pipeline.largest)
    weights = sum(tree.shard_bytes(leaf) for _, leaf in tree.flatten(own.abstract_state.params))
    assert rows[roles.PARAMS].assigned == rows[roles.PARAMS].arithmetic == weights
    assert rows[roles.GRADIENTS].assigned == largest.sums
    assert sum(row.assigned for row in plan.memory) == plan.peak


def test_activations_in_host_memory_are_shown_and_are_not_in_the_peak():
    plan, _ = plan_of(0, remat="full", offload=r"block_\d+")
    first = plan.pipeline.memory[0]
    inputs = 4 * 4 * 4 * 16  # bytes of a block's input: the examples of a device, tokens, features
    assert first.kept_on_host >= 2 * plan.pipeline.calls[0] * inputs, "of the two micro-batches that wait"
    rows = {row.role: row for row in plan.memory}
    assert rows[roles.HOST].assigned == plan.pipeline.memory[plan.pipeline.largest].kept_on_host
    assert sum(row.assigned for row in plan.memory if row.role != roles.HOST) == plan.peak
    assert "kept on host" in [column.header for column in report.groups_table(plan).columns]


def test_each_weight_of_a_group_is_gathered_in_each_pass(planned):
    plan, partition = planned
    found = {}
    for row in plan.ledger.rows:
        for path in row.weights:
            if row.role == roles.WEIGHTS_FORWARD:
                found[path] = found.get(path, 0) + row.times
    blocks = [path for path in pipelines.own(partition, plan.pipeline.largest).placements if "block" in path]
    sharded = [path for path in blocks if partition.leaves[path].sharded and "kernel" in path]
    assert sharded and all(found[path] >= PASSES for path in sharded)
    assert plan.ledger.mesh.size == 2, "collectives run within a group"


def test_a_pipeline_of_few_micro_batches_is_a_finding_and_the_plan_is_shown(planned):
    plan, _ = planned
    assert not [found for found in plan.findings if found.rule.startswith("groups")], "they wait 20% of the time"
    text = report.text(plan)
    assert "Groups of the pipeline: 1f1b, 2 stages, 4 micro-batches" in text
    assert "bubble of 1f1b: 20.0% if all stages take equally long" in text
    shown = json_form.as_json(plan)["pipeline"]
    assert [group["at_once"] for group in shown["groups"]] == [2, 1]
    assert shown["bubble_theory"] == pytest.approx(0.2)


def test_the_picture_has_a_bar_for_each_pass(planned, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    plan, _ = planned
    drawn = []
    original = Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda *args, **kwargs: (drawn.append(args[1:3]), original(*args, **kwargs))[1])
    picture.draw(plan, tmp_path / "plan.png")
    assert len(drawn) == 2 * 2 * PASSES
    line = plan.pipeline.line
    assert sum(width for group, width in drawn if group == 0) == pytest.approx(line.busy[0])
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def gradients_are_summed_as_theory_says(plan, stage):
    rows = [row for row in plan.ledger.rows if row.role == roles.GRADIENTS and len([n for n in row.dims if n > 1]) > 1]
    assert {row.times for row in rows} == {PASSES if stage > 1 else 1}
    for role in (roles.GRADIENTS, roles.UPDATED_WEIGHTS, roles.WEIGHTS_FORWARD):
        assert plan.ledger.totals()[role]["params"] == pytest.approx(plan.theory[role], rel=1e-3), role
    assert not plan.departures


@runs.LONG
def test_gradients_that_stay_replicated_are_summed_once_a_step():
    plan, _ = plan_of(stage=1)
    gradients_are_summed_as_theory_says(plan, 1)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"data": 2}, {"context": 2}, {"model": 2}])
def test_operations_are_those_of_all_devices_of_a_group(axes):
    """So the least time of arithmetic is that of a device's share: a batch has as many operations on one device as on two."""
    counted = []
    for mesh in ({}, axes):
        how = {"overrides": TENSOR} if "model" in mesh else {}
        (_, partition), step = prepared({"pipe": 2, **mesh}, 0, shard=abstract, schedule="1f1b", **how)
        batch = jax.eval_shape(lambda: batch_of(0))
        read, found = pipelines.read(step, partition.abstract_state, batch, partition.mesh, targets.get("cpu"), None)
        counted.append((found.largest, read.operations))
    assert counted[0] == counted[1]


@pytest.mark.long
def test_every_byte_of_a_step_over_four_axes_is_that_of_arithmetic():
    """A device of 16 of pipe 2, data 2, context 2 and model 2 receives what its layers, its embedding and its weights need, and no more."""
    axes = {"mesh__pipe": 2, "mesh__context": 2, "mesh__model": 2}
    how = {"model__num_layers": 3, "model__remat": "full", "zero__stage": 1, "zero__min_size": 0, "precision": "bf16"}
    batch = {"seq_len": 512, "global_batch_size": 0, "micro_batch_size": 1, "grad_accum": PASSES}
    with compile_only.optimized():
        plan = plans.plan_config(runs.config(**axes, **how, **batch), "h200", "2x8")
    assert plan.mesh_shape["data"] == 2 and plan.pipeline.largest == 0, "the embedding is there"
    layers, tokens, width = plan.pipeline.calls[0], 512 // 2, 64
    sizes = {"batch": 1, "heads": 4 // 2, "kv_heads": 2 // 2, "head_dim": 16, "ways": 2, "length": 512}
    cost = context_costs.cost("ulysses", "contiguous", is_causal=True, **sizes)
    sent = 2 * tokens * width // 2  # 16 bits; a device has half of a layer's tokens, and gets or sums the other half
    found = {}
    for row in plan.ledger.rows:
        if row.role == roles.ACTIVATIONS:
            found[row.kind, row.axes] = found.get((row.kind, row.axes), 0) + row.nbytes
    assert found == {  # forward, again and backward; what is computed again needs no last sum, and embeds its tokens
        ("all-gather", ("model",)): PASSES * (layers * (2 + 2 + 2) + 1) * sent,
        ("reduce-scatter", ("model",)): PASSES * (layers * (2 + 1 + 2) + 2) * sent,
        ("all-to-all", ("context",)): PASSES * layers * (2 * cost.forward + cost.backward),
    }
    assert plan.pipeline.memory[0].sent == PASSES * sent
    received = dict.fromkeys((("model",), ("data", "context")), 0)
    for row in plan.ledger.rows:
        if row.role == roles.GRADIENTS:
            received[row.axes] += row.elements
    assert received["model",] == PASSES * layers * 2 * width, "norms of layers see other tokens on each device"
    assert received["data", "context"] == pytest.approx(plan.theory[roles.GRADIENTS] * plan.ledger.params)
    assert plan.ledger.totals()[roles.UPDATED_WEIGHTS]["params"] == pytest.approx(plan.theory[roles.UPDATED_WEIGHTS])
    assert not plan.departures


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
def test_on_gpus_too(stage):
    settings = {"zero__stage": stage, "mesh__pipe": 2, "model__num_layers": 3, "global_batch_size": 0}
    with compile_only.optimized():
        plan = plans.plan_config(runs.config(**settings, micro_batch_size=1, grad_accum=PASSES), "h200", "1x8")
    gradients_are_summed_as_theory_says(plan, stage)
