"""Checks the hash of losses and the median step. This module tests zerojax.trainer.run_totals."""

import hashlib
import json
import math

import numpy as np
import pytest

from zerojax.trainer import run_totals

LOSSES = [float(np.float32(loss)) for loss in (3.25, 0.1, math.inf, math.nan, -2.0)]


def added(found, steps):
    for step in steps:
        found.add(step, LOSSES[step - 1], 1.0, is_skipped=step == 3)
    return found


def test_the_hash_is_a_chain_over_the_bits_of_each_loss():
    expected = b""
    for loss in LOSSES:
        expected = hashlib.sha256(expected + np.float32(loss).astype("<f4").tobytes()).digest()
    assert added(run_totals.Tally(), range(1, 6)).curve == run_totals.LossCurve(1, 5, expected.hex())


@pytest.mark.parametrize("at", range(5))
def test_a_resumed_tally_is_that_of_a_run_in_one_piece(at):
    whole, before = added(run_totals.Tally(), range(1, 6)), added(run_totals.Tally(), range(1, at + 1))
    meta = json.loads(json.dumps({"tally": before.as_meta()}))
    after = added(run_totals.Tally.resumed(at, meta), range(at + 1, 6))
    assert after.as_meta() == whole.as_meta() and after.skipped == 1


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        {"tally": 3},
        {"tally": {**run_totals.Tally(4).as_meta(), "losses_sha256": "zz"}},
        {"tally": run_totals.Tally(3).as_meta()},
    ],
)
def test_a_checkpoint_without_a_sound_tally_begins_a_new_hash(saved):
    assert run_totals.Tally.resumed(4, saved).as_meta() == run_totals.Tally(4).as_meta()


def test_one_bit_of_one_loss_changes_the_hash():
    one, other = run_totals.Tally(), run_totals.Tally()
    one.add(1, 1.0, 1.0)
    other.add(1, float(np.nextafter(np.float32(1), np.float32(2))), 1.0)
    assert one.curve.sha256 != other.curve.sha256


def test_the_median_step_leaves_out_the_first_two_and_the_profiled_ones():
    found = run_totals.Tally(10)
    for step, seconds in enumerate((90, 80, 1, 2, 60, 3), 11):
        found.add(step, 1.0, seconds, is_timed=seconds != 60)
    assert found.timing(tokens=100) == {"timed_steps": 3, "step_seconds": 2, "tokens_per_second": 50}
    assert run_totals.Tally().timing(100)["step_seconds"] is None
