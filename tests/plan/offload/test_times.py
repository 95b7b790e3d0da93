"""Tests of zerojax.plan.offload.times: phases against closed forms, and the traffic of sums against that of their programs."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax, traffic
from zerojax.plan import bound, targets
from zerojax.plan.offload import times
from zerojax.zero.step_programs import passes

FAKE = targets.Target(
    name="fake",
    kind="gpu",
    device_kind="fake",
    memory_bandwidth=targets.Figure(100.0, "test"),
    host_link=targets.Figure(10.0, "test"),
    host_duplex=targets.Figure(5.0, "test"),
    disk=targets.Figure(2.0, "test"),
)
WORK = times.Work(compute=3.0, collectives=1.0, traffic=400.0, foretold=7.0)


def test_work_takes_its_longest_term_at_least_and_is_estimated_as_foretold():
    assert WORK.least(100.0) == 4.0 and (WORK + WORK).least(100.0) == 8.0
    assert times.of([times.StepPhase("a", 3, WORK)], FAKE, is_least=True).seconds == 12.0
    assert times.of([times.StepPhase("a", 3, WORK, arriving=80.0)], FAKE).seconds == 24.0
    beside = times.of([times.StepPhase("a", 1, WORK, arriving=20.0)], FAKE)  # 2 seconds, in which kernels do less
    assert math.isclose(beside.seconds, 2.0 + (7.0 - 2.0 / times.SLOWED)) and not beside.exposed


def test_copies_hide_beside_their_own_phase_alone():
    phases = [times.StepPhase("a", 3, WORK, arriving=30.0), times.StepPhase("b", 1, WORK, arriving=20.0, leaving=50.0)]
    found = times.of(phases, FAKE, is_least=True)
    # Alone at 10 bytes a second; 20 each way at 5, and the other 30 alone.
    assert [phase.link for phase in found.phases] == [9.0, 7.0]
    assert [phase.seconds for phase in found.phases] == [12.0, 7.0] and found.seconds == 19.0
    assert [phase.exposed for phase in found.phases] == [0.0, 3.0] and found.exposed == 3.0


def test_no_copy_begins_before_the_first_program_of_a_phase_and_a_disk_may_take_longest():
    head = times.Work(compute=2.0)
    assert times.of([times.StepPhase("a", 1, WORK, arriving=30.0, first=head)], FAKE, is_least=True).seconds == 5.0
    found = times.of([times.StepPhase("a", 1, WORK, arriving=30.0, read=4.0, written=8.0)], FAKE, is_least=True)
    assert (found.link, found.disk, found.seconds) == (3.0, 6.0, 6.0)


def test_a_bound_has_the_traffic_of_all_phases_and_a_target_without_rates_no_times():
    first = bound.Bound({"compute": 12.0, "memory": 1.0, "collectives": 0.0})
    found = times.bounded(first, [times.StepPhase("a", 4, WORK, arriving=80.0, read=2.0)], FAKE)
    assert found.seconds == {"compute": 12.0, "memory": 16.0, "collectives": 0.0, "host link": 32.0, "disk": 4.0}
    assert found.binds == "host link" and found.step_seconds == 32.0
    assert times.of([times.StepPhase("a", 1, WORK)], targets.get("cpu")) is None


@pytest.mark.parametrize(
    ("dtype", "in_16_bits"), [(jnp.float32, False), (jnp.float32, True), (jnp.bfloat16, True)], ids=str
)
def test_the_traffic_of_sums_is_that_of_the_programs_that_add_gradients_up(dtype, in_16_bits):
    count, grads = 4, {"0": jnp.ones((64, 96), dtype), "1": jnp.ones((4096,), dtype)}
    numbers, seed = np.arange(2, dtype=np.uint32), np.uint32(3) if in_16_bits else None

    def moved(program, *args):
        compiled = program.lower(*args).compile()
        return traffic.memory_traffic(hlo_flow.flow(syntax.parse(compiled.as_text())))

    sums, total = (jax.eval_shape(passes._begun, grads, None, own, numbers) for own in (seed, None))
    begun = moved(passes._begun, grads, None, seed, numbers)
    added = moved(passes._added, sums, grads, None, seed, numbers)
    last_added = moved(passes._added_apart, sums, grads, None, None, numbers)
    divided = moved(passes._divided, total, count)
    nbytes = {n: leaf.nbytes for n, leaf in enumerate(jax.tree.leaves(grads))}
    one_pass = types.SimpleNamespace(
        schedule=types.SimpleNamespace(cut=types.SimpleNamespace(nbytes=nbytes.get)),
        grads={f"path {n}": n for n in nbytes},
        elements={n: leaf.size for n, leaf in enumerate(jax.tree.leaves(grads))},
    )
    before, last = times._sums(one_pass, count, in_16_bits=in_16_bits)
    scalars = 128  # constants that the programs read
    assert math.isclose(before.traffic, (begun + 2 * added) / 3, abs_tol=scalars)
    assert math.isclose(last.traffic, last_added + divided, abs_tol=scalars)
    assert times._sums(one_pass, 1, in_16_bits=False) == (times.Work(), times.Work())
