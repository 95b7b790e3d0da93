"""Checks the questions, on a terminal and without one. This module tests zerojax.commands.config."""

import sys

import jax
import pytest

from zerojax.commands import config
from zerojax.errors import UserError
from zerojax.plan import search
from zerojax.trainer import config as config_lib
from zerojax.trainer import program

TINY = ("--quick", "--model", "test", "--target", "cpu", "--topology", "8")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Returns f(flags, answers) -> (status, stdout, stderr, the written settings or None). Answers mean a terminal."""

    def call(*flags, answers=None):
        told = iter(answers or ())
        monkeypatch.setattr(sys, "argv", ["config", "--out", str(tmp_path / "mine.py"), *flags])
        monkeypatch.setattr(sys.stdin, "isatty", lambda: answers is not None, raising=False)
        monkeypatch.setattr("builtins.input", lambda prompt: print(prompt) or next(told))
        with pytest.raises(SystemExit) as end:
            config.main()
        names = {}
        if (tmp_path / "mine.py").exists():
            exec((tmp_path / "mine.py").read_text(), names)
            names = config_lib.from_dict(names["get_config"]())
        return end.value.code, *capsys.readouterr(), names or None

    return call


def test_eight_questions_are_asked_and_wrong_answers_are_asked_again(run):
    answers = ["tst", "test", "cpu", "8", "64", "-3", "16", "fp32", "", "2"]
    status, out, errors, written = run("--quick", answers=answers)
    assert (status, errors) == (0, "") and len(config.QUESTIONS) == 8
    assert [f"{number}/8 " in out for number in range(1, 9)] == [True] * 8
    assert (
        "'tst' is not known; did you mean test?" in out
        and "must be a whole number above 0 and below 2**31, and is '-3'" in out
    )
    assert out.index("What each stage needs on each device") < out.index("8/8 Which ZeRO stage?")
    assert (written.model.preset, written.seq_len, written.global_batch_size) == ("test", 64, 16)
    assert (written.precision, written.zero.stage, written.emulate_devices) == ("fp32", 2, 8)
    built = program.build(written, tokenizer_vocab=320, devices=jax.devices()[:8])
    assert built.sizes.micro_batch_size == 2


def test_answers_that_do_not_go_together_are_asked_again_and_the_others_are_kept(run):
    answers = ["test", "cpu", "1xq", "8", "64", "7", "fp32", "host", "16", "0", "none", "0"]
    status, out, errors, written = run("--quick", answers=answers)
    assert (status, errors) == (0, ""), errors
    assert "topology: must be numbers joined by x, such as 1x8 or 4x4x8, and is '1xq'" in out
    assert "config.global_batch_size: 7 does not fit" in out and out.count("1/8 Which model?") == 1
    assert "offload.optimizer" in out.split("8/8 Which ZeRO stage?")[1]
    assert (written.global_batch_size, written.zero.stage, written.offload.optimizer) == (16, 0, "none")


def test_a_file_that_exists_is_kept_unless_it_is_to_be_replaced(run, tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nraise SystemExit\n")
    monkey = (tmp_path / "mine.py").read_text()
    with pytest.raises(SystemExit):
        run("--yes", *TINY)
    assert (tmp_path / "mine.py").read_text() == monkey
    assert run("--yes", *TINY, "--force")[0] == 0 and (tmp_path / "mine.py").read_text() != monkey


def test_questions_fit_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for question in config.QUESTIONS:
        lines = config._wrapped(f"1/8 {question.text} [default]: ").split("\n")
        assert all(len(line) < 40 for line in lines) and "".join(lines) == f"1/8 {question.text} [default]: "


def test_without_a_terminal_it_is_one_line_or_flags(run):
    status, out, errors, written = run(*TINY)
    assert (status, out, written) == (2, "", None)
    assert errors.count("\n") == 1 and "stdin is not a terminal; add --yes" in errors
    status, _, errors, written = run("--yes", *TINY, "--offload", "host")
    assert (status, errors) == (0, "") and written.zero.stage == 3 and written.offload.optimizer == "host"


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--model", "llama9"), "model: 'llama9' is not known"),
        (("--precision", "bf61"), "did you mean bf16?"),
        (("--topology", "many"), "topology: must be numbers joined by x"),
        (("--global_batch_size", "9"), "config.global_batch_size: 9 does not fit"),
        (("--stage", "4"), "stage: '4' is not known"),
    ],
)
def test_a_wrong_flag_is_one_line(run, flags, message):
    status, _, errors, written = run("--yes", *TINY, *flags)
    assert (status, written) == (2, None) and errors.count("\n") == 1 and message in errors


def test_the_plan_recommends_the_fastest_that_fits():
    def outcome(stage, rate, reason=""):
        return search.Outcome(search.Candidate(stage, "dots", 4, 1, 1), 10, rate, reason, is_compiled=True)

    held = {0: 90, 1: 50, 2: 40, 3: 20}
    outcomes = {
        1: outcome(1, 5.0, "does not fit: 1 B too much"),
        2: outcome(2, 9.0),
        3: outcome(3, 7.0, "fits, 22% slower"),
    }
    found = config._advice(held, 60, [1, 2, 3], outcomes)
    assert (found.stage, found.micro_batch_size) == (2, 4)
    assert config._advice(held, 60, [], {}).stage == 3
    assert config._advice(held, None, list(held), {}).stage == 3  # unknown memory: the least


@pytest.mark.parametrize(("usable", "stage"), [(200, 0), (110, 1), (90, 2), (60, 3), (30, 3)])
def test_bytes_alone_recommend_the_lowest_stage_that_leaves_half_of_the_memory_to_activations(usable, stage):
    held = {0: 90, 1: 50, 2: 40, 3: 20}
    assert config._advice(held, usable, [number for number in held if held[number] <= usable], {}).stage == stage


@pytest.mark.parametrize("answered", [0, 2])
def test_the_end_of_the_input_ends_the_questions_in_one_line(monkeypatch, answered):
    asked = []

    def ends(prompt):
        asked.append(prompt)
        if len(asked) > answered:
            raise EOFError
        return ""

    monkeypatch.setattr("builtins.input", ends)
    with pytest.raises(UserError, match=r"config: the input ended at the question of the (model|topology)"):
        config._ask_all({question.name: None for question in config.QUESTIONS}, True, True)
    assert len(asked) == answered + 1
