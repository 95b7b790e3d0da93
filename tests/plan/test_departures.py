import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import pytest
from compile_only import compile_plain, mesh, plain, plain_state, plain_step, read, staged
from jax.sharding import PartitionSpec as P

from zerojax.plan import departures, ledger

ROUNDING = 1e-6  # of the parameters: numbers of elements are integers


def test_departures_add_up_to_the_difference_from_theory():
    _, found = plain(P("fsdp"), P("fsdp"), True)
    listed = departures.departures(found, tolerance=0)
    expected = ledger.theory(found.weights, found.ways)
    differs = sum(found.totals()[role]["params"] for role in expected) - sum(expected.values())
    assert sum(d.found - d.expected for d in listed) == pytest.approx(differs, abs=ROUNDING)
    assert {d.why for d in listed if abs(d.found - d.expected) > ROUNDING} == {"kept from the forward pass"}


def test_theory_knows_a_weight_that_the_backward_pass_does_not_read(monkeypatch):
    on = mesh()

    class First(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(256, use_bias=False, dtype=jnp.bfloat16, name="first")(x)

    monkeypatch.setattr("compile_only.Net", First)
    state = plain_state(on)
    found = read(compile_plain(plain_step, state, on), state, on)
    assert found.read_once == {*found.weights} and found.theory()["weights backward"] == 0.0
    assert departures.departures(found) == ()


def test_replicated_gradients_with_sharded_moments_are_explained():
    found, _ = staged(1, grad_accum=4)
    assert {d.why for d in departures.departures(found, passes=4)} <= {
        "moved in every iteration of a loop",
        "all-reduced, which moves twice as much as a reduce-scatter",
    }
    assert departures.departures(found, passes=4)


def test_a_program_with_replicated_weights_is_explained():
    _, found = plain(P(), P("fsdp"), True)
    assert any("the weight is replicated in the program" in d.why for d in departures.departures(found))


def test_a_weight_whose_one_gather_carries_the_name_of_the_backward_pass_is_not_called_replicated():
    _, found = plain(P("fsdp"), P("fsdp"), True)
    later = [
        dataclasses.replace(row, role="weights backward") if row.role == "weights forward" else row
        for row in found.rows
    ]
    listed = departures.departures(dataclasses.replace(found, rows=tuple(later)))
    assert {d.why for d in listed if d.role == "weights forward"} == {"gathered once for both passes"}
