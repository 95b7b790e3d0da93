"""Checks the questions, on a terminal and without one. This module tests zerojax.commands.config."""

import dataclasses
import pathlib
import re
import shutil
import sys

import programs
import pytest

from zerojax import configs, display
from zerojax.commands import config
from zerojax.errors import UserError
from zerojax.plan import arithmetic
from zerojax.trainer import config as config_lib

TINY = ("--quick", "--model", "test", "--target", "cpu", "--topology", "8")


@pytest.fixture
def run(monkeypatch, run_main, tmp_path):
    """Returns f(flags, answers) -> (status, stdout, stderr, the written settings or None). Answers mean a terminal."""

    def call(*flags, answers=None):
        told = iter(answers or ())
        monkeypatch.setattr(sys.stdin, "isatty", lambda: answers is not None, raising=False)
        monkeypatch.setattr(config, "_line", lambda prompt: print(prompt) or next(told))
        printed = run_main(config, "--out", tmp_path / "mine.py", *flags)
        names = {}
        if (tmp_path / "mine.py").exists():
            exec((tmp_path / "mine.py").read_text(), names)
            names = config_lib.from_dict(names["get_config"]())
        return (*printed, names or None)

    return call


def test_every_question_is_asked_and_wrong_answers_are_asked_again(run):
    answers = [
        "",
        "tst",
        "test",
        "4",
        "cpu",
        "2x4",
        "0",
        "100",
        "2",
        "2",
        "64",
        "-3",
        "16",
        "2",
        "0.5",
        "fp32",
        "",
        "",
        "2",
    ]
    status, out, errors, written = run("--quick", answers=answers)
    count = len(config.QUESTIONS)
    assert (status, errors) == (0, "") and count == 16
    assert "network: must be above 0" in out
    assert [f"{number}/{count} " in out for number in range(1, count + 1)] == [True] * count
    assert (
        "'tst' is not known; did you mean 'test'?" in out
        and "must be a whole number above 0 and below 2**31, and is '-3'" in out
    )
    assert out.index("What each stage needs on each device") < out.index(f"{count}/{count} Which ZeRO stage?")
    assert (written.model.preset, written.seq_len, written.global_batch_size) == ("test", 64, 16)
    assert (written.precision, written.zero.stage, written.emulate_devices) == ("fp32", 2, 8)
    assert (written.mesh.model, written.mesh.context) == (2, 2)
    assert (written.lora.r, written.export.format, written.grad_accum, written.optimizer.clip_norm) == (
        4,
        "peft",
        2,
        0.5,
    )


def test_a_folder_that_is_none_is_asked_again_at_once_and_numbers_count_what_is_asked(run):
    answers = ["/nowhere", "org/nowhere", "", "cpu", "8", "", "", "64", "16", "", "", "fp32", "", "", "", "test", "3"]
    status, out, errors, written = run("--quick", answers=answers)
    assert (status, written.model.preset, written.init_from) == (0, "test", ""), (out, errors)
    asked = [line.split()[0] for line in out.splitlines() if re.match(r"\d+/\d+ ", line)]
    first = ["1/16", "1/16", *(f"{number}/15" for number in range(2, 5)), *(f"{number}/14" for number in range(5, 15))]
    assert asked[: len(first) - 1] == first[:-1], "neither the model nor the network is asked"
    assert asked[len(first) - 1 :] == ["1/14", "2/15", "15/15"], "then the weights are asked again, and the model"


def test_answers_that_do_not_go_together_are_asked_again_and_the_others_are_kept(run):
    answers = [
        "",
        "test",
        "",
        "cpu",
        "1xq",
        "8",
        "3",
        "3",
        "64",
        "7",
        "",
        "",
        "fp32",
        "host",
        "",
        "2",
        "2",
        "16",
        "0",
        "none",
        "0",
    ]
    status, out, errors, written = run("--quick", answers=answers)
    assert (status, errors) == (0, ""), errors
    assert "topology: must be numbers joined by x, such as 1x8 or 4x4x8, and is '1xq'" in out
    assert "config.global_batch_size: 7 does not fit" in out and out.count("2/16 Which model?") == 1
    assert "config.mesh.model: 3 does not divide the 8 devices" in out
    assert "config.mesh.context: 3 does not divide the 4 devices" in out
    assert "offload.optimizer" in out.split("15/15 Which ZeRO stage?")[1]
    assert (written.global_batch_size, written.zero.stage, written.offload.optimizer) == (16, 0, "none")


@pytest.mark.filterwarnings("ignore:offload")  # no adapter of the tiny model has min_size elements
def test_peft_guides_answers_are_a_config(run, tmp_path):
    folder = tmp_path / "bart"
    shutil.copytree(pathlib.Path(__file__).parents[1] / "golden" / "huggingface" / "bart", folder)
    shutil.copyfile(configs.path("bart_tiny").parent / "short_reviews" / "tokenizer.json", folder / "tokenizer.json")
    flags = (
        "--init_from",
        str(folder),
        "--lora_r",
        "8",
        "--grad_accum",
        "1",
        "--clip_norm",
        "1.0",
        "--offload",
        "host",
    )
    status, _, errors, written = run(
        "--yes", *TINY[:1], *TINY[3:], *flags, "--offload_params", "host", "--seq_len", "16"
    )
    assert (status, errors) == (0, ""), errors
    assert (written.init_from, written.lora.r, written.export.format) == (str(folder), 8, "peft")
    assert (written.offload.optimizer, written.offload.params, written.zero.stage) == ("host", "host", 3)
    assert (written.grad_accum, written.optimizer.clip_norm) == (1, 1.0)
    status, _, errors, _ = run("--yes", "--force", *TINY, "--init_from", str(tmp_path / "gone"))
    assert status == 2 and errors.count("\n") == 1 and "config.init_from" in errors


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
        (("--precision", "bf61"), "did you mean 'bf16'?"),
        (("--topology", "many"), "topology: must be numbers joined by x"),
        (("--global_batch_size", "9"), "config.global_batch_size: 9 does not fit"),
        (("--stage", "4"), "stage: '4' is not known"),
    ],
)
def test_a_wrong_flag_is_one_line(run, flags, message):
    status, _, errors, written = run("--yes", *TINY, *flags)
    assert (status, written) == (2, None) and errors.count("\n") == 1 and message in errors


def fit(stage, micro=4, accum=1, remat="dots", peak=50.0):
    return config.Fit(stage, micro, accum, remat, 10.0, peak)


def test_a_stage_is_named_only_if_it_fits():
    held = {0: 90.0, 1: 50.0, 2: 40.0, 3: 20.0}
    fits = {1: fit(1, micro=2, accum=2), 2: fit(2), 3: fit(3)}
    found = config._advice(held, 60.0, fits, None)
    assert found.stage == 2 and "arithmetic's answer" in display.as_text(found.table)
    assert config._advice(held, 60.0, {3: fit(3, remat="full")}, None).stage == 3
    planned = dataclasses.replace(fit(3), tokens_per_second=7.0)
    found = config._advice(held, 60.0, {**fits, 3: planned}, planned)
    assert found.stage == 3 and "the plan's answer" in display.as_text(found.table)
    none = config._advice(held, 60.0, {}, None)
    assert (
        none.stage == 3
        and "answer" not in display.as_text(none.table)
        and "no stage is known to fit" in display.as_text(none.table)
    )
    assert "answer" not in display.as_text(config._advice(held, None, {}, None).table)


def test_a_plan_that_does_not_fit_gives_way_to_the_next(monkeypatch, capsys):
    tried = []

    def planned(config, target, devices, chosen):
        tried.append(chosen.stage)
        return dataclasses.replace(chosen, peak=70.0 if chosen.stage < 3 else 40.0)

    monkeypatch.setattr(config, "_planned", planned)
    fits, plan = config._plans(None, {"target": "h100"}, [], {number: fit(number) for number in (1, 2, 3)}, 60.0)
    assert tried == [1, 2, 3] and plan == fits[3] and set(fits) == {3}
    assert capsys.readouterr().out.count("does not fit: 10") == 2


def test_a_micro_batch_keeps_the_batch():
    sizes = config_lib.BatchSizes(32, 4, 1)
    assert config._micro_batches(sizes, 0, 8) == [4, 2, 1]
    assert config._micro_batches(sizes, 2, 8) == [2] and config._micro_batches(
        config_lib.BatchSizes(24, 3, 1), 0, 8
    ) == [1]


def test_quick_names_no_stage_that_needs_more_than_a_device_has(run):
    """8B on eight H100s of 72.8 GiB: a plan of the whole batch of 4 sequences of 8,192 tokens at once needs 121.5 GiB."""
    flags = (
        "--model",
        "llama3_8b",
        "--target",
        "h100",
        "--topology",
        "1x8",
        "--seq_len",
        "8192",
        "--global_batch_size",
        "32",
    )
    status, out, errors, written = run("--yes", "--quick", *flags)
    assert (status, errors) == (0, "") and "arithmetic's answer" in out
    assert (written.zero.stage, written.model.remat) == (3, "dots") and 0 < written.micro_batch_size < 4


@pytest.mark.parametrize("answered", [0, 2])
def test_the_end_of_the_input_ends_the_questions_in_one_line(monkeypatch, answered):
    asked = []

    def ends(prompt):
        asked.append(prompt)
        if len(asked) > answered:
            raise EOFError
        return ""

    monkeypatch.setattr("builtins.input", ends)
    with pytest.raises(UserError, match=r"config: the input ended at the question of the (init_from|lora_r)"):
        config._ask_all({question.name: None for question in config.QUESTIONS}, True, True)
    assert len(asked) == answered + 1


@pytest.mark.parametrize(
    ("model", "seq_len", "expected"),
    [("llama3_8b_1m", 65536, 8192), ("llama3_8b_1m", 8192, None), ("t5_tiny", 65536, None)],
)
def test_a_long_text_of_a_decoder_runs_in_tiles(model, seq_len, expected):
    settings = config._chosen({"model": model, "seq_len": seq_len})
    assert settings.get("model.tile_tokens") == expected


def test_several_hosts_are_told_which_axes_suit_their_network(run, monkeypatch):
    guess = arithmetic.Guess(2.0, 1.0, {})
    ways = [
        arithmetic.AxisCost("stage 3, replica 2", guess, 8192.0),
        arithmetic.AxisCost("pipe 2", dataclasses.replace(guess, seconds=1.0), 8192.0),
    ]
    seen = []
    monkeypatch.setattr(config.plans, "axes_config", lambda *given: seen.append(given[3].adapter_gbps) or ways)
    flags = ("--quick", "--yes", "--model", "test", "--target", "cpu", "--topology")
    status, out, *_ = run(*flags, "2x4", "--network", "100")
    assert status == 0 and seen == [100.0]
    assert out.index("pipe 2: 8,192 tokens/s/device") < out.index("stage 3, replica 2: 4,096 tokens/s/device")
    status, _, errors, _ = run(*flags, "8", "--network", "100", "--force")
    assert status == 2 and "--network: the topology has one host" in errors


@pytest.mark.parametrize(
    "seconds, axis, more, expected",
    [
        (1.0, "pipe", (), (2, 1, 4, 1)),
        (1.0, "replica", (), (1, 2, 4, 1)),
        (0.98, "pipe", (), (1, 1, 1, None)),  # arithmetic is no more exact
        (1.0, "pipe", ("--grad_accum", "2"), (1, 1, 2, None)),
        (1.0, "pipe", ("--tensor", "2"), (1, 1, 1, None)),
    ],
)
def test_axes_between_hosts_are_written_where_they_are_clearly_faster(run, monkeypatch, seconds, axis, more, expected):
    sizes = {f"mesh.{name}": 1 for name in ("pipe", "replica", "context", "model")}
    places = {"zero.stage": 1, "model.remat": "none", "micro_batch_size": 1, "grad_accum": 4}
    plain = arithmetic.AxisCost("plain", arithmetic.Guess(1.04 * seconds, 1.0, {}), 8192.0, {**sizes, **places})
    guess = arithmetic.Guess(1.0, 1.0, {})
    other = arithmetic.AxisCost("other", guess, 8192.0, {**sizes, **places, f"mesh.{axis}": 2})
    monkeypatch.setattr(config.plans, "axes_config", lambda *given: [plain, other])
    flags = ("--quick", "--yes", "--model", "test", "--target", "cpu", "--topology", "2x4", "--network", "100", *more)
    status, out, errors, written = run(*flags)
    assert (status, errors) == (0, "") and ("The config takes other" in out) == (expected[3] is not None)
    assert (written.mesh.pipe, written.mesh.replica, written.grad_accum) == expected[:3]
    assert expected[3] in (None, written.zero.stage)


# Asks forty times on a terminal of its own, and types Ctrl-C, or sends the signal, as soon as the question is there.
HURRIED = """
import os, pty, signal, time
from zerojax.commands import config

hung = 0
for number in range(40):
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        print("typed", config._line("question: "), flush=True)
        os._exit(0)
    said = b""
    while b"question: " not in said:
        said += os.read(terminal, 99)
    if number == 0:
        os.write(terminal, b"word\\n")
        while b"typed word" not in said:
            said += os.read(terminal, 99)
    elif number % 2:
        os.write(terminal, b"\\x03")
    else:
        os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + 2
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.002)
    if not ended[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    hung += not ended[0] or os.waitstatus_to_exitcode(ended[1]) != (130 if number else 0)
    os.close(terminal)
print("hung", hung)
"""


def test_ctrl_c_acts_at_once_also_just_as_a_question_appears():
    done = programs.python(HURRIED, JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout) == (0, "hung 0\n"), done.stderr
