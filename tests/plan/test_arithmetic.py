"""Checks estimates against closed forms. This module tests zerojax.plan.arithmetic."""

import dataclasses

import pytest

from zerojax import roles
from zerojax.clock import kernels, rates
from zerojax.plan import arithmetic, scale

H200 = rates.of("h200")
LAYER = {kernels.KernelWork(kernels.MATMUL, "bf16", 2.0 * 8192**3, 0.0, (1, 8192, 8192, 8192)): 3.0}
STATE = {roles.PARAMS: 4e9, roles.GRADIENTS: 4e9, roles.OPT_STATE: 8e9}
WORK = arithmetic.ModelWork(16, LAYER, {}, 6e7, 0.0, {"none": 4e9, "full": 2e8}, 0.0, 1e8, {True: STATE, False: STATE})
ONE = arithmetic.Candidate(stage=3, remat="none", micro_batch_size=1, grad_accum=8, replica=1)


def guess(candidate=ONE, cluster=None, per_host=8, work=WORK, data=1, **changes):
    candidate = dataclasses.replace(candidate, **changes)
    devices = data * candidate.replica * candidate.per_example
    own = H200 if cluster is None else scale.OnCluster("fake", H200.figures, {}, cluster, devices, devices)
    return arithmetic.guess(work, candidate, devices, own, per_host)


def test_one_device_waits_for_nothing_and_parts_add_up():
    found = guess()
    alone = 8 * 16 * 3 * (H200.seconds(next(iter(LAYER))) + H200.gap)
    assert found.parts[arithmetic.COMPUTE] == pytest.approx(alone)
    assert found.parts[arithmetic.TENSOR] == found.parts[arithmetic.WEIGHTS] == 0
    for sizes in ({"data": 8}, {"pipe": 4, "data": 2}, {"model": 8}, {"pipe": 2, "chunks": 2, "replica": 2}):
        own = guess(**sizes)
        assert sum(own.parts.values()) == pytest.approx(own.seconds) and min(own.parts.values()) >= 0


def test_a_ring_hides_what_a_layer_waits_for_where_the_layer_takes_as_long():
    """Beside a long layer what travels costs the slow-down, and the sum of two gradients; beside a short one the time it takes remains."""
    narrow, wide = (dataclasses.replace(WORK, width=width) for width in (2e7, 1e10))
    plain, ring = guess(model=2, work=narrow), guess(model=2, ring=True, work=narrow)
    hop = kernels.KernelWork(kernels.COLLECTIVE, "collective-permute", nbytes=narrow.width / 2, group=(0, 1))
    added = arithmetic.ADDED * WORK.weights / 2 / H200.figures["bandwidth"]
    travels = arithmetic.WAITS["model"] * H200.seconds(hop)
    paid = 8 * 16 * (arithmetic.SLOWED * travels + added)
    assert ring.parts[arithmetic.TENSOR] == pytest.approx(paid * (1 + H200.spread(2)))
    assert ring.seconds < plain.seconds
    assert guess(model=2, ring=True, work=wide).seconds > 8 * 16 * 100 * travels


def test_layers_wait_at_the_rate_of_collectives_that_nothing_hides():
    figures = {name: value for name, value in H200.figures.items() if not name.startswith("beta.alone")}
    slow = arithmetic.guess(WORK, dataclasses.replace(ONE, model=2), 2, dataclasses.replace(H200, figures=figures), 8)
    share = slow.parts[arithmetic.TENSOR] / guess(model=2).parts[arithmetic.TENSOR]
    assert share == pytest.approx(H200.figures["beta.alone.all-gather.2"] / H200.figures["beta"], rel=0.05)


def test_the_bubble_is_that_of_the_paper_and_chunks_shorten_it():
    for chunks in (1, 2):
        found = guess(pipe=4, chunks=chunks, data=2, per_host=64)
        share = found.parts[arithmetic.BUBBLE] / (found.parts[arithmetic.BUBBLE] + found.parts[arithmetic.COMPUTE])
        assert share == pytest.approx(3 / chunks / (8 + 3 / chunks), rel=0.1)


def test_slow_links_favour_replicas_and_pipelines():
    """Sharded over all hosts the weights of every pass travel between them; at stage 1 gradients once, of a pipeline activations alone."""
    fast, slow = scale.Network(adapter_gbps=400.0), scale.Network(adapter_gbps=25.0)
    small = dataclasses.replace(WORK, width=1e6)
    over_all, over_hosts, over_pipe = (
        [guess(cluster=own, work=small, **sizes).seconds for own in (fast, slow)]
        for sizes in (
            {"data": 64},
            {"data": 8, "replica": 8, "stage": 1},
            {"data": 8, "pipe": 8, "grad_accum": 64, "stage": 1},
        )
    )
    assert over_all[1] > 2 * over_all[0]
    assert over_hosts[1] - over_hosts[0] < 0.6 * (over_all[1] - over_all[0])
    assert over_pipe[1] < 1.1 * over_pipe[0]


def test_a_sum_over_replicas_makes_each_layer_wait_for_the_sum_before_it_and_edges_of_a_pass_hide_nothing():
    """As compiled (docs/benchmarks/clock.md, weak scaling): XLA starts the second sum as early as it can."""
    cluster = scale.Network()
    slow = dataclasses.replace(WORK, layer={kernel: 10 * times for kernel, times in LAYER.items()})
    one, two = (guess(cluster=cluster, work=slow, grad_accum=1, data=64 // count, replica=count) for count in (1, 8))
    rate = scale.OnCluster("fake", H200.figures, {}, cluster, 64, 64)
    links = arithmetic._Links(rate, 8)
    near = links.seconds("reduce-scatter", 4 * WORK.weights, 8, 1, is_alone=True)
    beside = links.seconds("all-reduce", 4 * WORK.weights / 8, 8, 8) - links.seconds(
        "all-gather", 2 * WORK.weights, 8, 1
    )
    gathers = 2 * links.seconds("all-gather", 2 * WORK.weights, 8, 1)
    edges = links.seconds("all-gather", 2 * WORK.weights, 8, 1, is_alone=True)
    edges += links.seconds("all-reduce", 4 * WORK.weights / 8, 8, 8)
    expected = 16 * (near + arithmetic.SLOWED * (gathers + max(0.0, beside))) + edges
    assert two.parts[arithmetic.WEIGHTS] == pytest.approx(expected * (1 + rate.spread(64)))
    travels = (
        links.seconds("all-gather", 2 * WORK.weights, 64, 1),
        links.seconds("reduce-scatter", 4 * WORK.weights, 64, 1),
    )
    expected = 16 * arithmetic.SLOWED * (2 * travels[0] + travels[1]) + sum(travels)
    assert one.parts[arithmetic.WEIGHTS] == pytest.approx(expected * (1 + rate.spread(64)))
    # Each pass sums sharded gradients, and one after the last pass the others.
    for stage, ratio in ((2, 4), (1, 1)):
        once, often = (
            guess(cluster=cluster, data=8, replica=8, stage=stage, grad_accum=count).parts for count in (2, 8)
        )
        assert often[arithmetic.WEIGHTS] / once[arithmetic.WEIGHTS] == pytest.approx(ratio)


def test_offloaded_state_leaves_the_device_and_waits_for_the_link_unless_a_pass_hides_it():
    plain, moments, params = guess(), guess(offload="host"), guess(offload="host", params="host")
    assert plain.peak - moments.peak == pytest.approx(STATE[roles.OPT_STATE])
    assert moments.peak - params.peak == pytest.approx(STATE[roles.PARAMS])
    link, update = STATE[roles.OPT_STATE] / H200.figures["link.both"], arithmetic.UPDATED * 16 * 6e7
    waits = link - update / H200.figures["bandwidth"]
    assert moments.seconds - plain.seconds == pytest.approx(waits) == moments.parts[arithmetic.HOST]
    # Params arrive twice in each pass: beside the forward pass, and beside the backward pass.
    a_pass, arriving = plain.parts[arithmetic.COMPUTE] / 8, STATE[roles.PARAMS] / H200.figures["link.from host"]
    more = 8 * sum(max(0.0, arriving - a_pass * share) for share in (1 / 3, 2 / 3))
    assert params.seconds - moments.seconds == pytest.approx(more) and more > 0
    early = guess(offload="host", work=dataclasses.replace(WORK, is_early=True))
    assert early.parts[arithmetic.HOST] == pytest.approx(max(0.0, link - a_pass * 2 / 3))
    half = guess(offload="host", work=dataclasses.replace(WORK, away=(0.5, 1.0)))
    assert plain.peak - half.peak == pytest.approx(STATE[roles.OPT_STATE] / 2)


def test_memory_is_that_of_the_stage_and_of_the_micro_batches_alive():
    whole = sum(STATE.values())
    held = 16 * WORK.kept["full"]
    assert guess(stage=0, remat="full").peak == pytest.approx(whole + held + WORK.kept["none"], rel=0.1)
    sharded = [guess(stage=stage, remat="full", data=8).peak for stage in (0, 1, 3)]
    assert sharded[0] > sharded[1] > sharded[2]
    # A group of n keeps n micro-batches of an n-th of the layers: as much as one device keeps of one.
    pipe = guess(stage=0, remat="full", pipe=4).peak
    assert pipe == pytest.approx(whole / 4 + held + WORK.kept["none"], rel=0.1)
    assert guess(stage=0, remat="full", pipe=4, grad_accum=2).peak < pipe


def test_a_table_has_a_row_for_each_way_and_a_column_for_each_part():
    ways = [
        arithmetic.AxisCost("pipe 4", guess(pipe=4, data=2), 8192.0),
        arithmetic.AxisCost("data 8", guess(data=8), 8192.0),
    ]
    table = arithmetic.table(ways)
    assert table.row_count == 2
    headers = [column.header for column in table.columns]
    assert headers[:2] == ["settings", "step"] and {*ways[0].guess.parts} <= {*headers}
