"""Checks steps on more hosts against sums by hand, and checkpoint intervals against a simulation. This module tests zerojax.plan.scale."""

import json
import types

import numpy as np
import pytest

import zerojax
from zerojax.clock import kernels, rates, walk
from zerojax.hlo import flow, syntax
from zerojax.plan import scale

H200 = rates.of("h200")
CLUSTER = scale.Network(adapter_gbps=100.0, hop_us=10.0, near_hop_us=1.0)
FAR = 100 / 8 * 1e9 * scale.REACHED  # bytes a second of a GPU between hosts


def seconds(gpus, ways, received, per_host, cluster=CLUSTER):
    """Returns the time of a collective of a program of 16 GPUs in a job of so many."""
    work = kernels.KernelWork(kernels.COLLECTIVE, "all-gather", nbytes=received, group=tuple(range(ways)))
    return scale.OnCluster("fake", H200.figures, {}, cluster, gpus, 16).seconds(work, per_host)


def test_a_gather_over_more_hosts_brings_the_same_array_over_more_hops():
    whole = 16e9
    for gpus in (16, 512):
        received = whole * (gpus - 1) / gpus
        hops = (gpus // 8 - 1) * 10e-6 + (gpus - gpus // 8) * 1e-6
        assert seconds(gpus, 16, whole * 15 / 16, 8) == pytest.approx(hops + received / 8 / FAR, rel=1e-9)
        # Between devices of the same place in their hosts: one device a host, and no hop inside it.
        received, hops = whole * (gpus // 8 - 1) / (gpus // 8), (gpus // 8 - 1) * 10e-6
        assert seconds(gpus, 2, whole / 2, 1) == pytest.approx(hops + received / FAR, rel=1e-9)


def test_an_all_to_all_sends_directly_to_some_at_a_time():
    kernel = kernels.KernelWork(kernels.COLLECTIVE, "all-to-all", nbytes=1.0, group=(0, 1))
    times = [scale.OnCluster("fake", H200.figures, {}, CLUSTER, gpus, 16).seconds(kernel, 1) for gpus in (16, 512)]
    hops = [scale.LL_HOP * count * 10e-6 for count in (1, 8)]  # one host, and 63 others
    assert times == pytest.approx(hops, rel=1e-3)


def test_a_collective_inside_a_host_and_links_of_one_part_of_the_network_stay_what_they_are():
    work = kernels.KernelWork(kernels.COLLECTIVE, "all-gather", nbytes=1e9, group=tuple(range(8)))
    assert seconds(4096, 8, 1e9, 0) == H200.seconds(work)
    pods = scale.Network(pod_hosts=8, oversubscription=2.0, hop_us=1e-9, near_hop_us=1e-9, adapter_gbps=100.0)
    slower = [seconds(gpus, 16, 15e9, 8, pods) / seconds(gpus, 16, 15e9, 8) for gpus in (64, 128)]
    assert slower == pytest.approx([1.0, 2.0], rel=0.01)


def test_the_best_interval_is_that_of_a_simulation():
    save, restart, between = 60.0, 300.0, 4 * 3600.0
    interval, useful = scale.best_interval(save, restart, between)
    random = np.random.default_rng(0)

    def simulated(every):
        """Returns the share of useful time in a long job whose failures come at random."""
        done, clock = 0.0, 0.0
        for left in random.exponential(between, 4000):
            rounds = int(left // (every + save))
            done += rounds * every
            clock += left + restart
        return done / clock

    assert useful == pytest.approx(simulated(interval), abs=0.01)
    assert simulated(interval) > max(simulated(interval / 4), simulated(interval * 4))


TEXT = """HloModule m, is_scheduled=true

ENTRY %main (a: bf16[1000000]) -> bf16[16000000] {
  %a = bf16[1000000]{0} parameter(0)
  ROOT %g = bf16[16000000]{0} all-gather(%a), replica_groups=[1,16]<=[16], dimensions={0}
}
"""


def plan_of(hosts=2, size=8):
    devices = [types.SimpleNamespace(process_index=number // size) for number in range(hosts * size)]
    mesh = types.SimpleNamespace(devices=np.asarray(devices, object), axis_names=("data",))
    own = flow.flow(syntax.parse(TEXT))
    return types.SimpleNamespace(
        foretold=walk.walk(own, H200, 16, 8),
        rates=H200,
        pipeline=None,
        devices=hosts * size,
        tokens=16 * 2048,
        ledger=types.SimpleNamespace(mesh=mesh, flow=own),
    )


def test_a_curve_falls_with_the_hosts_and_a_table_shows_it():
    plan = plan_of()
    assert scale.counts_of(plan) == [16, 64, 128, 256, 512, 1024, 2048, 4096]
    points = scale.curve(plan, CLUSTER, scale.counts_of(plan))
    times = [point.seconds for point in points]
    assert times == sorted(times) and times[-1] > 1.5 * times[0]
    assert [point.useful for point in points] == sorted((point.useful for point in points), reverse=True)
    assert scale.table(plan, points).row_count == len(points)


@pytest.mark.parametrize(("hosts", "size"), [(1, 8), (2, 4)])
def test_hosts_that_are_not_those_of_the_cluster_are_refused(hosts, size):
    with pytest.raises(zerojax.UserError, match="--topology 2x8"):
        scale.curve(plan_of(hosts, size), CLUSTER, [64])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ([], "must hold a JSON object"),
        ({"adapter_gps": 1}, "'adapter_gps' is not known; did you mean"),
        ({"adapter_gbps": 0}, "adapter_gbps must be above 0"),
        ({"gpus_per_host": 7.5}, "gpus_per_host must be a whole number"),
        ({"save_seconds": True}, "save_seconds must be above 0"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(content, line, tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps(content))
    with pytest.raises(zerojax.UserError) as refused:
        scale.read(tmp_path / "cluster.json")
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_sets_what_it_names(tmp_path):
    (tmp_path / "cluster.json").write_text('{"adapter_gbps": 100, "pod_hosts": 32}')
    assert scale.read(tmp_path / "cluster.json") == scale.Network(adapter_gbps=100, pod_hosts=32)
    with pytest.raises(zerojax.UserError, match="cannot be read"):
        scale.read(tmp_path / "none.json")
