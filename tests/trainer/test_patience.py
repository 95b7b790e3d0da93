"""Counts evaluations, and ends runs by the count. This module tests zerojax.trainer.patience."""

import json

import pytest
import runs

from zerojax import train
from zerojax.errors import UserError
from zerojax.trainer import metrics, patience, workdir
from zerojax.trainer import program as program_lib

LOSSES = [3.0, 2.0, 2.5, 1.0, 1.0, 1.5, 0.5, 0.4]  # of evaluations after each second step
ENDS = {"evaluate__every": 2, "steps": 16, "checkpoint__every": 0, "evaluate__patience": 2, **runs.EVALUATED}


def test_only_a_lower_loss_counts_anew_and_no_loss_is_no_evaluation():
    counted = patience.EarlyStop(2)
    assert [counted.count(loss) for loss in (None, *LOSSES[:5])] == [False, True, True, False, True, False]
    assert not counted.is_over and counted.count(1.5) is False and counted.is_over
    again = patience.EarlyStop.resumed(3, json.loads(json.dumps(counted.as_meta())))
    assert (again.lowest, again.since, again.is_over) == (1.0, 2, False)
    assert patience.EarlyStop.resumed(2, {"padded": {}}) == patience.EarlyStop(2)
    off = patience.EarlyStop(0)
    assert not any(off.count(loss) for loss in LOSSES) and not off.is_over and off.as_meta() == {}


@pytest.fixture
def evaluated(monkeypatch):
    """Gives the evaluations of runs the losses above; returns the steps whose weights the results are of."""
    monkeypatch.setattr(program_lib, "held_out_loss", lambda program, streams, params, check: next(losses))
    monkeypatch.setattr(
        train, "_write_results", lambda config, program, tokenizer, pairs, state, folder: results.append(state)
    )
    results, losses = [], iter(LOSSES)
    return results, lambda given: losses.__setstate__(given)


def test_a_run_ends_after_that_many_evaluations_and_its_results_are_those_of_the_best(
    tmp_path, cache_dir, evaluated, capsys
):
    results, at = evaluated
    whole = runs.run(tmp_path / "whole", **ENDS)
    out = capsys.readouterr().out
    assert "step 12: 2 evaluations without a loss below 1.0000: the run ends (config.evaluate.patience=2)" in out
    assert "the results are those of step 8, which has the lowest evaluation loss" in out and "done: " in out
    assert list(runs.losses(whole)) == list(range(1, 13))
    assert sorted(path.name for path in (whole / "checkpoints").iterdir() if path.name.isdigit()) == ["12", "8"]
    assert int(results.pop().step) == 8

    runs.run(whole, **ENDS)  # again: writes the results alone
    assert int(results.pop().step) == 8 and "starts at step 12 of 16" in capsys.readouterr().out
    at(6)
    runs.run(whole, **ENDS | {"evaluate__patience": 3})  # goes on
    assert list(runs.losses(whole)) == list(range(1, 17)) and int(results.pop().step) == 16


@runs.LONG  # the run that goes on counts on, and the count that a checkpoint has is tested above
def test_a_run_that_resumes_ends_where_one_in_one_piece_does(tmp_path, cache_dir, evaluated):
    _, at = evaluated
    whole = runs.run(tmp_path / "whole", **ENDS)
    at(0)
    runs.run(tmp_path / "part", **ENDS | {"steps": 10})  # one evaluation after the lowest loss
    at(5)
    runs.run(tmp_path / "part", **ENDS)
    assert list(runs.losses(tmp_path / "part")) == list(range(1, 13))
    kept = [
        [line for line in metrics.read(folder) if "loss" in line and line["step"] <= 12]
        for folder in (whole, tmp_path / "part")
    ]
    assert [line["loss"] for line in kept[0]] == [line["loss"] for line in kept[1]]


def test_patience_without_a_best_checkpoint_is_refused():
    with pytest.raises(
        UserError, match=r"^config\.evaluate\.patience: is 2, and .*; set --config\.checkpoint\.keep_best=1$"
    ):
        runs.config(evaluate__patience=2, checkpoint__keep_best=0)
    assert "evaluate" in workdir.FREE  # it may change when a run resumes
