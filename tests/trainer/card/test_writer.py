"""Checks the card of a run at its checkpoints and at its end, however it ends. This module tests zerojax.trainer.card.writer."""

import json

import pytest
import runs

from zerojax import train
from zerojax.errors import UserError
from zerojax.trainer import run_totals
from zerojax.trainer.card import document, writer

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture(scope="module")
def run(cache_dir, tmp_path_factory):
    """Returns the folder of a run of six steps that saved at step 3."""
    return runs.run(tmp_path_factory.mktemp("run"), checkpoint__every=3)


def test_a_finished_run_and_each_of_its_checkpoints_have_a_card(run):
    card = document.read(run)
    assert (card["status"], card["line"], card["step"], card["resumes"], card["skipped_steps"]) == (
        "finished",
        "",
        6,
        0,
        0,
    )
    assert card["loss"] == runs.losses(run)[6] and card["planned_peak_bytes"] > 0
    assert card["config"] == json.loads((run / "config.json").read_text())
    assert card["mesh"]["data"] == card["devices"]["count"] == 8 and card["stage"] == 3
    assert card["received_bytes"]["by_kind"]["all-gather"] > 0 and card["timed_steps"] == 4
    assert sum(card["received_bytes"]["by_kind"].values()) == pytest.approx(
        sum(card["received_bytes"]["by_role"].values()), abs=9
    )
    early = document.read(run / "checkpoints" / "3")
    assert (early["status"], early["step"], early["loss"]) == ("running", 3, runs.losses(run)[3])
    assert card["losses"]["sha256"] != early["losses"]["sha256"]


def test_a_resumed_run_has_the_hash_of_one_in_one_piece_and_tells_of_its_starts(run, tmp_path):
    runs.run(tmp_path, steps=2)
    runs.run(tmp_path, steps=6)
    card = document.read(tmp_path)
    assert card["losses"] == document.read(run)["losses"] and card["resumes"] == 1
    told = [(part["first_step"], part["last_step"], part["status"]) for part in card["parts"]]
    assert told == [(1, 2, "finished"), (3, 6, "finished")]
    runs.run(tmp_path, steps=6)  # writes the results again
    assert document.read(tmp_path) == card


def test_another_seed_has_another_hash(run, tmp_path):
    runs.run(tmp_path, seed=1)
    assert document.read(tmp_path)["losses"]["sha256"] != document.read(run)["losses"]["sha256"]


def test_a_run_that_fails_leaves_a_card_with_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_first_state", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path)
    card = document.read(tmp_path)
    assert (card["status"], card["line"], card["step"]) == ("failed", "ZeroDivisionError: division by zero", 0)


def test_a_refused_start_leaves_the_card_as_it_was(run):
    before = (run / "run.json").read_text()
    with pytest.raises(UserError, match=r"config\.seed"):
        runs.run(run, seed=3)
    assert (run / "run.json").read_text() == before


def opened(folder, **changes):
    return writer.Card(folder, **{"steps": 9, "tally": run_totals.Tally(), "enabled": True, **changes})


def test_a_start_that_was_killed_is_told_by_the_next_one(tmp_path):
    opened(tmp_path).begin({"processes": 2}, dict, tmp_path)
    opened(tmp_path).begin({"processes": 1}, dict, tmp_path)
    found = document.read(tmp_path)["parts"]
    assert [(part["status"], part["processes"]) for part in found] == [("killed", 2), ("running", 1)]


@pytest.mark.parametrize("status, how", [(143, "stopped"), (2, "failed")])
def test_the_end_of_the_process_ends_the_card(tmp_path, status, how):
    with opened(tmp_path) as card:
        card.begin({}, dict, tmp_path)
        card._interrupted(status, "zerojax: process 1 is gone")
        assert (document.read(tmp_path)["status"], document.read(tmp_path)["line"]) == (how, "process 1 is gone")
        card.end(document.STOPPED)  # of another thread, later
    assert len(document.read(tmp_path)["parts"]) == 1


def test_a_process_that_is_not_the_first_writes_nothing(tmp_path):
    with opened(tmp_path, enabled=False) as card:
        card.begin({}, dict, tmp_path)
        assert card.checkpoint() == ""
        card.end(document.FINISHED)
    assert not list(tmp_path.iterdir())
