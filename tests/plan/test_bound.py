"""Checks the least time of a step. This module tests zerojax.plan.bound against closed forms."""

import dataclasses
import math

import compile_only
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.clock import kernels, rates, walk
from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax
from zerojax.plan import bound, targets

ROUNDING = 1e-12  # sums of integers that float64 holds exactly, times rates


FAKE = targets.Target(
    name="fake",
    kind="gpu",
    device_kind="fake",
    memory_bandwidth=targets.Figure(10.0, "test"),
    matrix_rates={"bf16": targets.Figure(100.0, "test"), "fp32": targets.Figure(50.0, "test")},
    link=targets.Figure(4.0, "test"),
    network=targets.Figure(1.0, "test"),
    host_link=targets.Figure(2.0, "test"),
)


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


class FakeMesh:
    """A mesh of hosts, with the attributes that the bound reads."""

    def __init__(self, shape, per_host):
        ids = np.arange(math.prod(shape))
        self.devices = np.array([Device(i, i // per_host) for i in ids], object).reshape(shape)
        self.axis_names, self.size = ("replica", "data", "model"), ids.size


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(*[st.floats(0.1, 1e6)] * 4, st.just(0) | st.floats(0.1, 1e6))
def test_the_longest_term_binds(bf16, fp32, moved, received, host):
    found = bound.least_step(
        FAKE,
        FakeMesh((1, 8, 1), 8),
        flops={"bf16": bf16, "fp32": fp32},
        traffic=moved,
        received={("data",): received},
        host=host,
    )
    terms = {"compute": bf16 / 8 / 100 + fp32 / 8 / 50, "memory": moved / 10, "collectives": received / 4}
    terms |= {"host link": host / 2} if host else {}
    assert found.seconds == pytest.approx(terms, rel=ROUNDING)
    assert found.step_seconds == pytest.approx(max(terms.values()), rel=ROUNDING)
    assert terms[found.binds] == pytest.approx(found.step_seconds, rel=ROUNDING)
    assert found.most_tokens_per_second(64) == pytest.approx(64 / max(terms.values()), rel=ROUNDING)


# Hosts of 4 devices; each adapter carries one byte/s. `data` is inside a host, so the link carries all bytes. Over `replica`, each device's
# own adapter does. Over both axes, the four rings of a host share its four adapters.
@pytest.mark.parametrize("axes, seconds", [(("data",), 12 / 4), (("replica",), 12 / 1), (("replica", "data"), 12 / 4)])
def test_bytes_between_hosts_travel_over_the_network(axes, seconds):
    found = bound.least_step(FAKE, FakeMesh((2, 4, 1), 4), flops={}, traffic=0, received={axes: 12.0})
    assert found.seconds["collectives"] == seconds


def test_offloaded_residuals_move_to_the_host_once_and_back_once():
    for offload, blocks in (("", 0), (r"block_\d/wide", 2)):
        text = compile_only.staged_text(3, jnp.float32, offload)
        kept = blocks * 16 * compile_only.HIDDEN * 2  # a device's 16 examples, bf16
        flow = hlo_flow.flow(syntax.parse(text))
        assert bound.host_traffic(flow) == (kept, kept)
        foretold = walk.walk(flow, rates.of("h200"), 8)
        assert {kind: kind in foretold.busy for kind in kernels.COPIES} == dict.fromkeys(kernels.COPIES, blocks > 0)
        assert (
            sum(foretold.parts.values()) == pytest.approx(foretold.seconds, rel=ROUNDING)
            and foretold.busy["collective"]
        )


def test_a_dtype_without_a_rate_runs_as_16_bit_and_a_target_without_rates_has_no_bound():
    found = bound.least_step(FAKE, FakeMesh((1, 8, 1), 8), flops={"fp8": 800.0}, traffic=0, received={})
    assert found.seconds["compute"] == 1.0
    arguments = {"flops": {}, "traffic": 1, "received": {}}
    assert bound.least_step(targets.get("cpu"), FakeMesh((1, 8, 1), 8), **arguments) is None
