"""Checks how cards are printed and compared. This module tests zerojax.commands.show."""

import functools
import json
import pathlib

import pytest

from zerojax.commands import show
from zerojax.trainer.card import document

CARD = {
    "schema": 1,
    "status": "finished",
    "line": "",
    "step": 2,
    "steps": 2,
    "loss": 2.5,
    "losses": {"first_step": 1, "last_step": 2, "sha256": "ab" * 32},
    "tokens_per_second": 20000.0,
    "step_seconds": 0.5,
    "timed_steps": 4,
    "mfu": 0.4213,
    "foretold_step_seconds": 0.4912,
    "planned_peak_bytes": 2**30,
    "received_bytes": {"by_kind": {"all-gather": 2**20}, "by_role": {}},
    "config": {"seed": 0, "zero": {"stage": 3}},
    "hosts": ["a", "b"],
}


@pytest.fixture
def call(run_main):
    return functools.partial(run_main, show)


def folder(path: pathlib.Path, logged=(3.0, 2.5), /, **changes):
    path.mkdir(parents=True)
    document.write(path, {**CARD, **changes})
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(logged, 1)]
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


def test_a_card_is_a_table_and_what_it_lacks_is_a_dash(call, tmp_path):
    status, out, _ = call(folder(tmp_path / "a"))
    found = dict(line.split("  ", 1) for line in out.splitlines())
    found = {name: text.strip() for name, text in found.items()}
    assert (
        status == 0
        and found["MFU"] == "42.1%"
        and found["peak, planned"] == "1.00 GiB"
        and found["step, foretold"] == "491.2 ms"
    )
    assert found["tokens/s"] == "20,000, the median of 4 steps (0.5 s)" and found["peak, measured"] == "-"
    assert found["received a step"] == "all-gather 1.00 MiB" and found["losses"] == "of steps 1 to 2: abababababababab"
    assert json.loads(call(tmp_path / "a", "--json")[1]) == CARD
    assert dict(show.rows({**CARD, "timed_steps": 1}))["tokens/s"] == "20,000, of 1 step (0.5 s)"


def test_the_sizes_of_a_batch_multiply_to_it(call, tmp_path):
    sizes = {"global_batch_size": 48, "micro_batch_size": 3, "grad_accum": 2}
    path = folder(tmp_path / "a", mesh={"replica": 2, "data": 4, "model": 1}, **sizes)
    assert "48 = micro-batch 3 x accumulation 2 x 8 ways" in call(path)[1]


def test_any_card_is_shown(call, tmp_path):
    """Fields of another kind than expected are shown, not refused."""
    for number, name in enumerate(CARD):
        for value in (None, "text", 1.5, [1], {"x": {"y": [None]}}):
            if name != "schema":
                assert call(folder(tmp_path / f"{number}{value!r:.3}".replace("/", "_"), **{name: value}))[0] == 0


def test_two_equal_runs_are_told_so(call, tmp_path):
    _, out, _ = call(folder(tmp_path / "a"), folder(tmp_path / "b"))
    assert out.endswith("The losses of all steps are the same, bit for bit.\n") and "config.seed" not in out


@pytest.mark.parametrize(
    "losses, words",
    [
        ((3.0, 2.4), "The losses differ from step 2 on."),
        ((3.0,), "The losses of the 1 steps that both have logged are the same, and the runs have other steps too."),
        ((), "The losses differ; no logged step tells where."),
    ],
)
def test_two_runs_that_differ_are_told_where(call, tmp_path, losses, words):
    other = {
        "losses": {"first_step": 1, "last_step": 2, "sha256": "cd" * 32},
        "config": {"seed": 1, "zero": {"stage": 3}},
    }
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", losses, **other)
    _, out, _ = call(a, b)
    assert out.endswith(f"{words}\n") and "config.seed  A" in out and "config.zero" not in out
    found = json.loads(call(a / "run.json", b, "--json")[1])
    assert found["settings"] == {"seed": {"a": 0, "b": 1}} and not found["same_losses"]


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "the following arguments are required: RUN"),
        (["nowhere"], "nowhere: there is no run card"),
        (["a", "b", "c"], "RUN: 3 are given"),
        ([""], "RUN: is empty; name a path"),
        (["gs://bucket/run"], "RUN: 'gs://bucket/run' is a URL"),
        (["--jsn", "a"], "unrecognized arguments: --jsn"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(call, words, expected):
    status, out, err = call(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and expected in err
