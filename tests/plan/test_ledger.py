import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from compile_only import plain, staged
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.plan import attribution, departures, ledger
from zerojax.roles import GRADIENTS, SENT_OF_WEIGHTS, UPDATED_WEIGHTS, WEIGHTS_BACKWARD, WEIGHTS_FORWARD

PAPER = 0.01  # of the amount that a stage sends: the norms' scales stay replicated, and are all-reduced
SENT = {  # by stage and role, in units of (N - 1)/N parameters: section 7 of the paper
    0: {GRADIENTS: 2},
    1: {GRADIENTS: 1, UPDATED_WEIGHTS: 1},
    2: {GRADIENTS: 1, UPDATED_WEIGHTS: 1},
    3: {GRADIENTS: 1, WEIGHTS_FORWARD: 1, WEIGHTS_BACKWARD: 1},
}
ROUNDING = 1e-6  # of the parameters: numbers of elements are integers


def weight(used, *, stored=1, grad=1, moments=1):
    """Returns a weight of `used` elements; `stored`, `grad` and `moments` are the numbers of shards."""
    return attribution.WeightDims("w", (used,), (used,), (used // stored,), (used // grad,), (used // moments,))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(ways=st.integers(2, 64), layers=st.integers(1, 5))
def test_theory_is_the_papers_if_every_leaf_is_sharded(ways, layers):
    stages = {
        0: (2, {}),
        1: (2, {"moments": ways}),
        2: (2, {"moments": ways, "grad": ways}),
        3: (3, {"moments": ways, "grad": ways, "stored": ways}),
    }
    for params, shards in stages.values():
        weights = {str(i): weight(ways * (i + 1), **shards) for i in range(layers)}
        np.testing.assert_allclose(sum(ledger.theory(weights, ways).values()), params * (ways - 1) / ways)


def test_theory_counts_a_reduction_over_replicas_of_each_shard():
    # 8 devices as 2 replicas of 4 shards: 3/4 for the reduce-scatter, then 2 * 1/2 of a quarter for the all-reduce
    found = ledger.theory({"w": weight(64, moments=4, grad=4)}, ways=8)
    assert found[GRADIENTS] == pytest.approx(3 / 4 + 1 / 4)


def test_theory_gathers_and_scatters_in_every_pass_and_sums_replicated_gradients_once():
    sharded, replicated = weight(64, stored=8, grad=8, moments=8), weight(64)
    assert ledger.theory({"w": sharded}, 8, passes=4)[WEIGHTS_FORWARD] == pytest.approx(4 * 7 / 8)
    assert ledger.theory({"w": sharded}, 8, passes=4)[GRADIENTS] == pytest.approx(4 * 7 / 8)
    assert ledger.theory({"w": replicated}, 8, passes=4)[GRADIENTS] == pytest.approx(2 * 7 / 8)


def test_theory_gathers_frozen_weights_and_neither_reduces_nor_updates_them():
    frozen = dataclasses.replace(weight(64, stored=8), trainable=False)
    found = ledger.theory({"w": frozen, "v": weight(64, stored=8, grad=8, moments=8)}, 8)
    assert found[WEIGHTS_FORWARD] == found[WEIGHTS_BACKWARD] == pytest.approx(7 / 8)
    assert found[GRADIENTS] == pytest.approx(7 / 16) and found[UPDATED_WEIGHTS] == 0


def test_weights_passed_as_arrays_are_gathered_over_data_and_stay_sharded_over_other_axes():
    on = zerojax.make_mesh(data=4, model=2, devices=jax.devices()[:8])
    leaf = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(on, P("data", "model")))
    found = ledger.weights_of({"w": leaf}, on)["w"]
    assert (found.used, found.stored) == ((16, 16), (4, 16))


EIGHT = [pytest.param(stage, 8, marks=runs.LONG if stage < 2 else ()) for stage in SENT]  # 1 compiles as 2 does
SIXTY_FOUR = [pytest.param(stage, 64, marks=runs.LONG) for stage in SENT]  # a step of 70B on 64 is compiled by default


@pytest.mark.parametrize(("stage", "count"), [*EIGHT, *SIXTY_FOUR])
def test_stages_send_the_papers_amounts_in_16_bits(stage, count):
    found, _ = staged(stage, count)
    totals = found.totals()
    assert not departures.departures(found)
    for unit, size in (("params", 1), ("bytes", 2 * found.params)):
        paper = {role: units * (count - 1) / count * size for role, units in SENT[stage].items()}
        assert {role: totals[role][unit] for role in paper} == pytest.approx(paper, rel=PAPER)
        assert sum(total[unit] for total in totals.values()) == pytest.approx(sum(paper.values()), rel=PAPER)


@pytest.mark.parametrize(("stage", "count"), [*EIGHT[1:], *SIXTY_FOUR[1:]])
def test_stages_1_to_3_scatter_gradients_and_gather_in_16_bits(stage, count):
    found, partition = staged(stage, count)
    kernels = {path for path in partition.placements if path.endswith("kernel")}
    scattered = {p for row in found.rows if row.kind == "reduce-scatter" and row.role == GRADIENTS for p in row.weights}
    assert scattered == kernels
    gathered = [row for row in found.rows if row.kind == "all-gather" and row.role in SENT_OF_WEIGHTS]
    assert {row.role for row in gathered} == ({WEIGHTS_FORWARD, WEIGHTS_BACKWARD} if stage == 3 else {UPDATED_WEIGHTS})
    assert {row.dtype for row in gathered} == {"bf16"}
    for role in {row.role for row in gathered}:
        assert {path for row in gathered if row.role == role for path in row.weights} == kernels


@pytest.mark.parametrize(
    ("stage", "count"),
    [
        (3, 8),
        *(pytest.param(stage, count, marks=runs.LONG) for stage, count in ((1, 8), (2, 8), (1, 64), (2, 64), (3, 64))),
    ],
)
def test_gradients_summed_in_float32_take_twice_the_bytes_and_no_more_elements(stage, count):
    found, partition = staged(stage, count, reduce_dtype=jnp.float32)
    totals = found.totals()
    assert not departures.departures(found)
    paper = {role: units * (count - 1) / count for role, units in SENT[stage].items()}
    assert {role: totals[role]["params"] for role in paper} == pytest.approx(paper, rel=PAPER)
    scattered = [row for row in found.rows if row.role == GRADIENTS and row.kind == "reduce-scatter"]
    assert {row.dtype for row in scattered} == {"f32"}
    assert {path for row in scattered for path in row.weights} == {
        p for p in partition.placements if p.endswith("kernel")
    }
    assert {row.dtype for row in found.rows if row.kind == "all-gather" and row.role in SENT_OF_WEIGHTS} == {"bf16"}


@runs.LONG
def test_a_stage_with_replicated_gradients_sums_them_once_over_all_passes():
    found, _ = staged(1, grad_accum=4, reduce_dtype=jnp.float32)
    scattered = [row for row in found.rows if row.role == GRADIENTS]
    assert {row.times for row in scattered} == {1}
    assert found.totals()[GRADIENTS]["params"] == pytest.approx(7 / 8, rel=PAPER)


def test_rows_of_a_replicated_mesh_name_the_axes_they_run_over():
    found, _ = staged(3, replica=2)
    matrices = [row for row in found.rows if any(path.endswith("kernel") for path in row.weights)]
    axes = {(row.kind, row.axes) for row in matrices}
    assert axes == {("all-gather", ("data",)), ("reduce-scatter", ("data",)), ("all-reduce", ("replica",))}
    assert not departures.departures(found)


@runs.LONG
def test_accumulation_multiplies_the_bytes_that_a_loop_sends():
    found, _ = staged(2, grad_accum=4)
    expected = ledger.theory(found.weights, found.ways, passes=4)
    for role in (GRADIENTS, UPDATED_WEIGHTS):
        assert found.totals()[role]["params"] == pytest.approx(expected[role], abs=ROUNDING)
    assert {row.times for row in found.rows if row.kind == "reduce-scatter"} == {4}


def test_a_plain_step_is_read_without_scopes():
    _, found = plain(P("fsdp"), P("fsdp"), True)
    totals, expected = found.totals(), ledger.theory(found.weights, found.ways)
    for role in (WEIGHTS_FORWARD, GRADIENTS):
        assert totals[role]["params"] == pytest.approx(expected[role], abs=ROUNDING)
    assert {row.axes for row in found.rows} == {("fsdp",)}
    assert all(row.overlaps for row in found.rows if row.role == WEIGHTS_FORWARD and row.is_async)
    assert all("compile_only.py" in row.source for row in found.rows if row.role == WEIGHTS_FORWARD)
