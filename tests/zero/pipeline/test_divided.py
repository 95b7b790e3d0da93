"""Checks what waits in a divided backward pass. This module tests zerojax.zero.pipeline.divided; test_step runs its programs."""

import collections

import pytest
from pipelines import Net, abstract, batch_of, prepared

from zerojax import traces
from zerojax.zero.pipeline import order


@pytest.fixture(scope="module")
def programs():
    found = {}
    for schedule in ("1f1b", "zero_bubble"):
        how = {"net": Net(layers=2), "schedule": schedule, "shard": abstract}
        (_, partition), step = prepared({"pipe": 2, "data": 2}, 3, **how)
        found[schedule] = step.programs(step.micro(batch_of(0)))
    return found, partition


def count(program):
    found = collections.Counter()
    for call in program.part.calls:
        found.update(eqn.primitive.name for eqn in traces.equations(call.closed))
    return found


def test_matmuls_of_weights_wait_and_none_is_done_twice(programs):
    found, partition = programs
    for stage in (0, 1):
        one = count(found["1f1b"].programs[order.BACKWARD, stage])
        early, late = (count(found["zero_bubble"].programs[kind, stage]) for kind in (order.BACKWARD, order.WEIGHTS))
        assert early["dot_general"] + late["dot_general"] == one["dot_general"]
        assert late["reduce_scatter"] > 0
    kernels = {path for path in partition.placements if "block_1" in path and path.endswith("kernel")}
    divided = found["zero_bubble"].programs
    assert kernels <= set(divided[order.WEIGHTS, 1].sums)
    assert early["dot_general"] and not kernels & set(divided[order.BACKWARD, 1].sums)


def test_no_gathered_weight_is_kept_and_no_other_group_waits(programs):
    found, partition = programs
    divided = found["zero_bubble"]
    for stage in (0, 1):
        first, second = divided.programs[order.BACKWARD, stage], divided.programs[order.WEIGHTS, stage]
        assert not [n for n in second.writes if set(divided.readers[n]) - {stage}]
        shapes = {weight.shape for weight in partition.placements.values()}
        own = [number for number in first.writes if list(divided.readers[number]) == [stage]]
        assert own and not [n for n in own if divided.values[n].shape[1:] in shapes - {(16,), (32,)}]
