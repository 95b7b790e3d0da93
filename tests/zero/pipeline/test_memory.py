"""Checks the memory of a step against the arrays that are alive while one runs. This module tests zerojax.zero.pipeline.memory."""

import collections
import dataclasses
import functools
import gc
import math

import jax
import pytest
import runs
from pipelines import PASSES, Net, batch_of, prepared

import zerojax
from zerojax import tree
from zerojax.zero.host import memory_kind
from zerojax.zero.pipeline import memory, order, stage_programs

SCALARS = 512  # bytes: numbers of passes, and parts of metrics, which are not counted


def alive_on(device, *, is_far=False):
    """Returns the bytes of the buffers that arrays hold on a device, or in host memory beside it. Several arrays may hold one buffer."""
    arrays = [array for array in jax.live_arrays() if memory_kind.is_on_host(array) == is_far]
    shards = [shard.data for array in arrays for shard in array.addressable_shards if shard.device == device]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


CASES = {  # the mesh, the schedule, the chunks, the layers, and further arguments of `make_train_step`
    "1f1b": ({"pipe": 2, "data": 2}, "1f1b", 1, 2, {}),
    "1f1b, activations on the host": ({"pipe": 2}, "1f1b", 1, 3, {"remat": "full", "offload": r"block_\d+"}),
    "zero_bubble": ({"pipe": 2}, "zero_bubble", 1, 3, {}),
    "gpipe": ({"pipe": 4}, "gpipe", 1, 3, {}),
    "interleaved": ({"pipe": 2}, "interleaved", 2, 3, {}),
}


@functools.cache
def made(case):
    """Returns a state, its partition, and the step, whose programs are compiled once."""
    mesh, schedule, chunks, layers, further = CASES[case]
    how = {"net": Net(layers=layers), "schedule": schedule, "chunks": chunks, "donate": False, **further}
    return prepared(mesh, 3, shard=zerojax.shard_train_state, **how)


@pytest.mark.parametrize("case", runs.cases(CASES, long={*CASES} - {"1f1b"}))
def test_values_alive_between_programs_are_those_that_are_counted(case, monkeypatch):
    (state, partition), step = made(case)
    batch = batch_of(0)
    found = step.programs(step.micro(batch))
    leaves = tree.flatten(partition.abstract_state)
    counted = memory.of_groups(step.placed, step.sent, found, leaves, [0] * len(step.placed.groups))
    devices = [group.mesh.devices.flat[0] for group in step.placed.groups]
    most, most_kept = collections.Counter(), collections.Counter()

    def watched(own):
        def run(*args):
            made = own.run(*args)
            for group, device in enumerate(devices):
                most[group] = max(most[group], alive_on(device))
                most_kept[group] = max(most_kept[group], alive_on(device, is_far=True))
            return made

        return run

    programs = {key: dataclasses.replace(own, run=watched(own)) for key, own in found.programs.items()}
    watched_programs = dataclasses.replace(found, programs=programs)
    state, _ = step(state, batch)  # what is made once, such as numbers of passes, is there
    gc.collect()
    before, before_far = ([alive_on(device, is_far=is_far) for device in devices] for is_far in (False, True))
    monkeypatch.setattr(type(step), "programs", lambda *_: watched_programs)
    step(state, batch)
    held = [sum(tree.shard_bytes(leaf) for _, leaf in step.placed.held(group, leaves)) for group in range(len(devices))]
    for group, own in enumerate(counted):
        alive = most[group] - before[group] + held[group]  # before: what other tests hold
        expected = own.state + own.sums + own.batch // 2 + own.values
        # A program's results are alive before what it read is dropped, which is counted as a part of `peak`.
        assert expected - SCALARS <= alive <= own.peak + SCALARS, (group, own, alive)
        assert own.kept_on_host == most_kept[group] - before_far[group], (
            "the inputs of blocks of all micro-batches that wait"
        )
    assert any(own.kept_on_host for own in counted) == ("host" in case)


def test_1f1b_keeps_fewer_values_than_gpipe_and_sends_the_same():
    (_, partition), step = made("1f1b")  # whose programs are those of gpipe
    programs, leaves = step.programs(step.micro(batch_of(0))), tree.flatten(partition.abstract_state)
    assert isinstance(programs, stage_programs.StagePrograms)
    found = {}
    for schedule in ("1f1b", "gpipe"):
        sent = order.sent(order.make(schedule, 2, PASSES))
        found[schedule] = memory.of_groups(step.placed, sent, programs, leaves, [0, 0])
    assert step.sent == order.sent(order.make("1f1b", 2, PASSES))
    assert [own.sent for own in found["1f1b"]] == [own.sent for own in found["gpipe"]]
    activation = 4 * math.prod(
        (4, 4, 16)
    )  # bytes of a micro-batch's examples, tokens and features on a device; back comes its gradient
    assert all(PASSES * activation <= own.sent for own in found["1f1b"])
    assert all(a.values < b.values for a, b in zip(found["1f1b"], found["gpipe"]))
    assert order.make("1f1b", 2, 4).alive(1) == 1
