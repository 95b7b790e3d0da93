"""Checks the study of losses with packed wires. This module tests scripts/study_wires.py."""

import json
import pathlib
import sys
import time
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import study_wires

TINY = ["--devices", "4", "--seeds", "1", "seq_len=16", "global_batch_size=8", "model.num_layers=1"]


def rows(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_losses_are_compared_over_the_last_steps_that_all_runs_of_a_seed_have_done(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study_wires, "train", lambda given: None)
    done = {("plain", 0): [1.0] * 20 + [9.0] * 10, ("packed", 0): [1.0] * 18 + [1.5] * 2, ("plain", 1): [2.0] * 30}
    for (kind, seed), losses in done.items():
        folder = tmp_path / f"{kind}_30_{seed}"
        folder.mkdir()
        lines = [json.dumps({"step": step + 1, "loss": loss}) for step, loss in enumerate(losses)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    study_wires.main(["--steps", "30", "--seeds", "2", "--kinds", "plain", "packed", "--folder", str(tmp_path)])
    found = rows(capsys)
    assert found[1] == ["0", "20", "1.0000", "1.5000", "+0.5000"]
    assert found[2] == ["1", "0"] and found[3] == ["mean", "+0.5000"]
    assert found[-1][:4] == ["2", "runs", "are", "not"]


@pytest.mark.long
def test_runs_stop_at_a_limit_and_the_same_command_continues_them(tmp_path, capsys, monkeypatch):
    """The limit is reached when both runs have done a step more."""
    words = ["--steps", "100000", "--kinds", "packed", "plain", "--folder", str(tmp_path), *TINY]
    runs, done = types.SimpleNamespace(folder=tmp_path, steps=100_000), [0]

    def clock():
        steps = min(len(study_wires.losses(runs, kind, 0)) for kind in ("packed", "plain"))
        return 1e9 if steps > done[-1] else 0.0

    monkeypatch.setattr(study_wires, "time", types.SimpleNamespace(monotonic=clock, sleep=time.sleep))
    for _ in range(2):
        study_wires.main(words)
        done.append(int(rows(capsys)[1][1]))
    assert 0 < done[1] < done[2]
    for kind in ("plain", "packed"):
        log = (tmp_path / f"{kind}_100000_0" / "log.txt").read_text()
        assert "emulating 4 CPU devices" in log and log.count("saved; the same command resumes") == 2
