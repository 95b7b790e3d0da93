"""Checks the loss scale against DeepSpeed's own traces and a plain Python scaler.
This module tests zerojax.zero.update.loss_scale."""

import functools
import json
import math
import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.zero.update import loss_scale

# DeepSpeed 0.19.8's dynamic loss scaler run on seeded overflow sequences; the file says so too.
TRACES = json.loads((pathlib.Path(__file__).parents[2] / "golden" / "loss_scale_traces.json").read_text())["traces"]


@functools.partial(jax.jit, static_argnums=0)
def run(scaler, overflows):
    """Returns the states after each step of a bool[steps] sequence, stacked."""

    def step(state, overflow):
        state = scaler.update(state, ~overflow)
        return state, state

    return jax.lax.scan(step, scaler.init(), overflows)[1]


def scaler_of(config):
    return loss_scale.DynamicLossScale(
        init_scale=config["init_scale"],
        window=config["scale_window"],
        hysteresis=config["delayed_shift"],
        consecutive_hysteresis=config["consecutive_hysteresis"],
        min_scale=config["min_scale"],
        on_minimum="raise" if config["raise_error_at_min_scale"] else "hold",
    )


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_every_trace_of_deepspeed_is_reproduced_exactly(trace):
    steps, scaler = trace["steps"], scaler_of(trace["config"])
    overflows = np.array([bool(step["overflow"]) for step in steps])
    states = run(scaler, overflows)
    used = np.concatenate([[scaler.init_scale], np.asarray(states.scale)[:-1]])
    assert used.tolist() == [step["scale_used"] for step in steps]
    assert states.scale.tolist() == [step["scale_after"] for step in steps]
    assert states.hysteresis.tolist() == [step["hysteresis_after"] for step in steps]
    assert states.skipped_steps.tolist() == np.cumsum(overflows).tolist()
    assert not states.is_exhausted.any()
    if trace["error"] is not None:  # raised by the step after the last one recorded
        assert trace["error"]["step"] == len(steps)
        last = jax.tree.map(lambda leaf: leaf[-1], states)
        after = scaler.update(last, False)
        assert after.is_exhausted and (after.scale, after.hysteresis) == (last.scale, last.hysteresis)


def plain(scaler, overflows):
    """Yields (scale, hysteresis) by DeepSpeed's rule in Python numbers; ends where that raises."""
    scale, hysteresis, last = scaler.init_scale, scaler.hysteresis, -1
    for step, overflow in enumerate(overflows):
        if overflow:
            if hysteresis > 1:
                hysteresis -= 1
            elif scale == scaler.min_scale and scaler.on_minimum == "raise":
                return
            else:
                scale = max(scale / 2, scaler.min_scale)
            last = step
        else:
            stable = step - last - 1
            ends_window = stable > 0 and stable % scaler.window == 0
            if scaler.consecutive_hysteresis or ends_window:
                hysteresis = scaler.hysteresis
            if ends_window:
                scale *= 2
        yield scale, hysteresis


SCALERS = st.builds(
    lambda minimum, more, **rest: loss_scale.DynamicLossScale(
        init_scale=2.0 ** (minimum + more), min_scale=2.0**minimum, **rest
    ),
    minimum=st.integers(-3, 3),
    more=st.integers(0, 4),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    consecutive_hysteresis=st.booleans(),
    on_minimum=st.sampled_from(loss_scale.ON_MINIMUM),
)


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(SCALERS, st.lists(st.booleans(), min_size=40, max_size=40))
def test_any_sequence_gives_what_the_rule_gives(scaler, overflows):
    expected = list(plain(scaler, overflows))
    states = run(scaler, np.array(overflows))
    found = list(zip(states.scale.tolist(), states.hysteresis.tolist()))
    assert found[: len(expected)] == expected
    exhausted = np.flatnonzero(states.is_exhausted)
    if len(expected) < len(overflows):
        assert exhausted[0] == len(expected)
    else:
        assert exhausted.size == 0


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(SCALERS, st.lists(st.booleans(), min_size=40, max_size=40), st.integers(0, 40))
def test_a_state_is_all_that_a_run_needs_to_continue(scaler, overflows, cut):
    """A sequence may be cut anywhere, as a checkpoint cuts it."""
    uninterrupted = run(scaler, np.array(overflows))
    state = scaler.init()
    for overflow in overflows[:cut]:
        state = scaler.update(state, not overflow)
    state = jax.tree.map(jnp.asarray, jax.device_get(state))
    for overflow in overflows[cut:]:
        state = scaler.update(state, not overflow)
    assert [leaf.item() for leaf in state] == [leaf[-1].item() for leaf in uninterrupted]


def test_a_scale_that_never_overflows_stops_growing_where_its_reciprocal_would_lose_bits():
    state = loss_scale.DynamicLossScale(window=1).init()._replace(scale=jnp.float32(2.0**125), good_steps=jnp.int32(1))
    for _ in range(3):
        state = loss_scale.DynamicLossScale(window=1).update(state, True)
    assert float(state.scale) == 2.0**126 and float(1 / state.scale) == 2.0**-126


def test_a_static_scale_counts_and_stays():
    scaler = loss_scale.StaticLossScale(1000.0)
    states = run(scaler, np.array([False, True, True, False]))
    assert states.scale.tolist() == [1000.0] * 4
    assert states.skipped_steps.tolist() == [0, 1, 2, 2] and states.good_steps.tolist() == [1, 0, 0, 1]
    # Restored from a run whose scale was another.
    other = loss_scale.DynamicLossScale().init()
    assert float(scaler.update(other, True).scale) == 1000.0


def test_both_scales_have_one_form_of_state():
    dynamic, static = loss_scale.DynamicLossScale().init(), loss_scale.StaticLossScale(8.0).init()
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), dynamic) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), static
    )
    for scaler, state in ((loss_scale.DynamicLossScale(), dynamic), (loss_scale.StaticLossScale(8.0), static)):
        assert jax.tree.map(lambda leaf: leaf.dtype, scaler.update(state, True)) == jax.tree.map(
            lambda leaf: leaf.dtype, state
        )


def test_no_two_leaves_of_a_first_state_share_memory():
    pointers = [leaf.unsafe_buffer_pointer() for leaf in loss_scale.DynamicLossScale().init()]
    assert len(set(pointers)) == len(pointers)


BAD = {
    "scale 0": (
        lambda: loss_scale.StaticLossScale(0.0),
        r"^loss_scale\.scale: must be a number from 2\*\*-126 to 2\*\*126",
    ),
    "not a number": (lambda: loss_scale.DynamicLossScale(init_scale=math.nan), r"^loss_scale\.init_scale: must be "),
    "minimum": (lambda: loss_scale.DynamicLossScale(min_scale=-1.0), r"^loss_scale\.min_scale: must be a number from"),
    "window": (
        lambda: loss_scale.DynamicLossScale(window=0),
        r"^loss_scale\.window: must be an integer from 1 to 2\*\*31 - 1, and is 0$",
    ),
    "half a step": (lambda: loss_scale.DynamicLossScale(window=2.5), r"^loss_scale\.window: must be an integer"),
    "hysteresis": (
        lambda: loss_scale.DynamicLossScale(hysteresis=0),
        r"^loss_scale\.hysteresis: must be an integer from 1",
    ),
    "order": (
        lambda: loss_scale.DynamicLossScale(init_scale=2.0, min_scale=4.0),
        r"^loss_scale\.min_scale: 4\.0 is above init_scale=2\.0; set it to that or less$",
    ),
    "word": (
        lambda: loss_scale.DynamicLossScale(on_minimum="stop"),
        r"^loss_scale\.on_minimum: must be one of raise, hold",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name):
    make, message = BAD[name]
    with pytest.raises(UserError, match=message):
        make()


def test_the_leaf_that_overflowed_is_named():
    params = {"a": {"w": 1.0}, "b": 2.0}
    metrics = {"loss_scale": 1.0, "overflow_leaf": 1, "is_exhausted": False}
    assert loss_scale.overflow(metrics, params) == "the gradient of params/b is not finite at loss scale 1"
    assert loss_scale.overflow({"overflow_leaf": -1}, params) is None
    assert loss_scale.overflow({}, params) is None
    loss_scale.raise_if_exhausted(metrics, params)
    with pytest.raises(
        UserError, match=r"^the gradient of params/b is not finite at loss scale 1, which is the smallest; low"
    ):
        loss_scale.raise_if_exhausted({**metrics, "is_exhausted": True}, params)
