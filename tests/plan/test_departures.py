import flax.linen as nn
import jax.numpy as jnp
import pytest
from compile_only import compile_plain, mesh, plain_state, plain_step, read, staged
from jax.sharding import PartitionSpec as P

from zerojax.plan import departures, ledger

ROUNDING = 1e-6  # of the parameters: elements are whole numbers


def test_departures_account_for_all_that_differs_from_theory():
    on = mesh()
    state = plain_state(on)
    found = read(compile_plain(plain_step, state, on), state, on)
    listed = departures.departures(found, tolerance=0)
    expected = ledger.theory(found.weights, found.ways)
    differs = sum(found.totals()[role]["params"] for role in expected) - sum(expected.values())
    assert sum(d.found - d.expected for d in listed) == pytest.approx(differs, abs=ROUNDING)
    assert {d.why for d in listed if abs(d.found - d.expected) > ROUNDING} == {"kept from the forward pass"}


def test_a_weight_that_the_backward_pass_does_not_read_is_no_defect(monkeypatch):
    on = mesh()

    class First(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(256, use_bias=False, dtype=jnp.bfloat16, name="first")(x)

    monkeypatch.setattr("compile_only.Net", First)
    state = plain_state(on)
    found = read(compile_plain(plain_step, state, on), state, on)
    assert [(d.role, d.found, d.why) for d in departures.departures(found)] == [
        ("weights backward", 0.0, "the backward pass does not read the weight")
    ]


def test_whole_gradients_where_moments_are_split_are_explained():
    found, _ = staged(1, grad_accum=4)
    assert {d.why for d in departures.departures(found, passes=4)} <= {
        "moved in every turn of a loop",
        "all-reduced: twice what a reduce-scatter moves",
    }
    assert departures.departures(found, passes=4)


def test_a_program_that_takes_weights_whole_is_explained():
    on = mesh()
    planned = plain_state(on)
    given = planned.replace(params=plain_state(on, split=P()).params)
    found = read(compile_plain(plain_step, given, on), planned, on)
    assert any("takes the weight whole" in d.why for d in departures.departures(found))
