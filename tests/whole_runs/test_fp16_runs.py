"""Checks float16 runs of the trainer: overflows, resuming, other precisions. This module tests loss scaling from config to checkpoint."""

import json
import pathlib
import re
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
import runs

from zerojax.errors import UserError
from zerojax.trainer import metrics, program
from zerojax.zero.update import loss_scale

# The initial scale is far too large for float16, and halves at once.
OVERFLOWING = {"precision": "fp16", "loss_scale__init_scale": 2.0**24, "loss_scale__hysteresis": 1, "steps": 12}
SCALED = ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped_steps")

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture(scope="module")
def overflowed(cache_dir, tmp_path_factory):
    """Returns the folder of a run that begins with overflows."""
    return runs.run(tmp_path_factory.mktemp("overflowed"), **OVERFLOWING)


@runs.LONG
def test_overflows_skip_steps_and_the_run_learns_by_the_steps_taken(overflowed):
    lines = metrics.read(overflowed)
    assert [line["step"] for line in lines] == list(range(1, 13))  # a skipped step uses up its batch
    is_skipped = np.array([line["grad_norm"] is None for line in lines])
    assert is_skipped[0] and 2 <= is_skipped.sum() <= 8 and not is_skipped[-1]
    assert [line["skipped_steps"] for line in lines] == np.cumsum(is_skipped).tolist()
    overflows_before = np.cumsum(is_skipped) - is_skipped
    assert [line["loss_scale"] for line in lines] == (2.0**24 / 2.0**overflows_before).tolist()
    # The schedule counts steps taken: the warm-up of two steps begins with the first one.
    taken_before = np.arange(12) - overflows_before
    assert [line["learning_rate"] for line in lines] == pytest.approx((0.005 * np.minimum(taken_before, 2)).tolist())
    _, state = runs.restored(overflowed, 12, **OVERFLOWING)
    assert int(state.step) == 12 - is_skipped.sum()
    assert not {"overflow_leaf", "is_exhausted"} & lines[0].keys()


@runs.LONG  # tests/mission resumes a run of DeepSpeed's introduction among its overflows
@pytest.mark.parametrize("cut", [2, 9])  # among the overflows, and after them
def test_a_run_resumed_halfway_gives_the_numbers_and_scales_of_one_run(tmp_path, overflowed, cut):
    runs.run(tmp_path, **{**OVERFLOWING, "steps": cut})
    runs.run(tmp_path, **OVERFLOWING)
    assert runs.numbers(tmp_path, names=SCALED) == runs.numbers(overflowed, names=SCALED)


@pytest.fixture(scope="module")
def plain(cache_dir, tmp_path_factory):
    """Returns the folder of two steps in float32; copy it."""
    return runs.run(tmp_path_factory.mktemp("plain"), precision="fp32", steps=2)


@runs.LONG
def test_a_checkpoint_moves_into_and_out_of_float16(tmp_path, overflowed, plain):
    _, state = runs.restored(overflowed, 12, **{**OVERFLOWING, "zero__stage": 1})
    assert isinstance(state.loss_scale, loss_scale.LossScaleState) and int(state.loss_scale.skipped_steps) > 0
    weights = jax.tree.map(np.asarray, state.opt_state.master)
    _, out = runs.restored(overflowed, 12, precision="fp32", steps=12)
    assert out.loss_scale == ()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, out.params), weights)

    _, fresh = runs.restored(plain, 2, **OVERFLOWING)
    assert (float(fresh.loss_scale.scale), int(fresh.loss_scale.skipped_steps)) == (2.0**24, 0)
    assert jax.tree.leaves(fresh.loss_scale)[0].sharding.is_fully_replicated
    folder = shutil.copytree(plain, tmp_path / "run")
    runs.run(folder, precision="fp16", loss_scale__hysteresis=1, steps=4)
    assert np.isfinite(list(runs.losses(folder).values())).all() and len(runs.losses(folder)) == 4


def test_a_checkpoint_moves_into_weights_without_a_master(plain):
    """Each weight is rounded to nearest. Moments do not change."""
    _, first = runs.restored(plain, 2, precision="fp32")
    _, rounded = runs.restored(plain, 2, precision="bf16_sr", zero__stage=1)
    for weight, full in zip(jax.tree.leaves(rounded.params), jax.tree.leaves(first.params)):
        assert weight.dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(weight, full.astype(jax.numpy.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, rounded.opt_state, first.opt_state)


@runs.LONG  # the tests above move a checkpoint into it, and tests/trainer/test_steps.py trains so
def test_a_run_goes_on_without_a_master_and_its_checkpoint_moves_out_of_that(tmp_path, plain):
    folder = shutil.copytree(plain, tmp_path / "run")
    runs.run(folder, precision="bf16_sr", steps=4)
    assert np.isfinite(list(runs.losses(folder).values())).all() and len(runs.losses(folder)) == 4
    _, trained = runs.restored(folder, 4, precision="bf16_sr")
    built, out = runs.restored(folder, 4, precision="bf16", zero__stage=2)
    assert jax.tree.map(lambda leaf: leaf.sharding, out) == built.partition.shardings
    for master, weight in zip(jax.tree.leaves(out.opt_state.master), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_array_equal(np.asarray(master), np.asarray(weight, np.float32))


@runs.LONG
def test_at_the_smallest_scale_the_run_stops_by_name_or_holds(tmp_path, capsys):
    stuck = {**OVERFLOWING, "loss_scale__min_scale": 2.0**23, "checkpoint__every": 1}
    runs.run(tmp_path, **{**stuck, "loss_scale__on_minimum": "hold", "steps": 3, "log_every": 5})
    lines = metrics.read(tmp_path)
    assert [line["skipped_steps"] for line in lines] == [1, 2, 3]  # skipped steps are logged for any log_every
    told = [line for line in capsys.readouterr().out.splitlines() if ": skipped" in line]
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 1 and first["not_finite"].keys() == {"grad_norm"}
    assert told[0].startswith("step 1: skipped, the gradient of params/")
    assert told[0].endswith(" is not finite at loss scale 1.67772e+07")
    with pytest.raises(UserError) as stopped:
        runs.run(tmp_path, **stuck)
    # The checkpoint of step 3, from which it resumed, is not known to give a finite loss.
    assert re.fullmatch(
        r"step 4: the gradient of params/\S+ is not finite at loss scale 8.38861e\+06, which is the smallest; "
        r"the last good checkpoint is of step 2 in \S+; lower config.loss_scale.min_scale \(now 8.38861e\+06\), or the state "
        r"was restored from step 3: .*",
        str(stopped.value),
    )


@runs.LONG
def test_a_resumed_run_takes_a_new_initial_scale_from_its_config(tmp_path, capsys):
    """And no new one with another window. A static scale stays."""

    def scales_of(last, **changes):
        runs.run(tmp_path, precision="fp16", steps=last, **changes)
        return [line["loss_scale"] for line in metrics.read(tmp_path)], capsys.readouterr().out.count(
            "loss scale is reset"
        )

    large = {"loss_scale__init_scale": 2.0**26, "loss_scale__hysteresis": 1}
    assert scales_of(2, **large) == ([2.0**26, 2.0**25], 0)
    _, other_window = runs.restored(tmp_path, 2, precision="fp16", **large, loss_scale__window=7)
    assert float(other_window.loss_scale.scale) == 2.0**24
    assert scales_of(4, loss_scale__static=2.0**9) == ([2.0**26, 2.0**25, 2.0**9, 2.0**9], 1)
    assert scales_of(5, loss_scale__init_scale=2.0**12, loss_scale__hysteresis=1)[0][2:] == [2.0**9, 2.0**9, 2.0**12]
    assert [line["skipped_steps"] for line in metrics.read(tmp_path)][-2:] == [2, 2]  # and the count goes on


@runs.LONG
def test_a_run_killed_before_its_first_checkpoint_resets_its_scale_again(tmp_path, overflowed, monkeypatch):
    folder = pathlib.Path(shutil.copytree(overflowed, tmp_path / "run"))
    changes = {**OVERFLOWING, "loss_scale__init_scale": 2.0**12, "steps": 14}
    with monkeypatch.context() as killed, pytest.raises(InterruptedError):
        killed.setattr(metrics.MetricsLog, "open", mock.Mock(side_effect=InterruptedError))
        runs.run(folder, **changes)
    runs.run(folder, **changes)
    scales = [line["loss_scale"] for line in metrics.read(folder)]
    assert scales[11] > 2.0**12 and scales[12:] == [2.0**12] * 2


def test_a_run_that_took_no_step_says_so(tmp_path, capsys):
    runs.run(tmp_path, **{**OVERFLOWING, "loss_scale__init_scale": 2.0**40, "steps": 2})
    assert "\n2 steps were skipped, since their gradients overflowed; no step was taken" in capsys.readouterr().out


BAD = {
    "not fp16": (
        {"precision": "bf16", "loss_scale__window": 5},
        r"^config\.loss_scale\.window: is 5 and cannot take effect, since config\.precision is not fp16; leave it at 1000$",
    ),
    "static in fp32": (
        {"precision": "fp32", "loss_scale__static": 8.0},
        r"^config\.loss_scale\.static: is 8\.0 and can",
    ),
    "static and dynamic": (
        {"precision": "fp16", "loss_scale__static": 8.0, "loss_scale__hysteresis": 1},
        r"^config\.loss_scale\.hysteresis: is 1 and cannot take effect, since config\.loss_scale\.static is set",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_setting_that_cannot_take_effect_is_refused(name):
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message):
        program.build(runs.config(**changes), tokenizer_vocab=320)
