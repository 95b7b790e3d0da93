"""Checks the completion in a bash. This module tests zerojax.commands.completion; tests/project/test_installed.py runs the command."""

import shutil
import subprocess
import sys

import programs
import pytest
import runs

from zerojax import __main__ as cli
from zerojax import configs
from zerojax.commands import completion

STAGES = ["0", "1", "2", "3"]


@pytest.fixture(scope="module")
def complete():
    """Returns f(word, ...) -> what bash offers for the last word. Bash splits words at "="."""
    if not (bash := shutil.which("bash")):
        pytest.skip("there is no bash")

    def run(*words):
        line = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _zerojax 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
        command = [bash, "--norc", "-c", f"{completion.script()}\n{line}", "bash", "zerojax", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=runs.LIMIT)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    return run


@pytest.mark.parametrize(
    ("words", "offered"),
    {
        "a command": (["sh"], ["show"]),
        "all commands": ([""], list(cli.COMMANDS)),
        "a flag": (["train", "--workd"], ["--workdir"]),
        "a flag of another command": (["show", "--w"], []),
        "a config": (["train", "--config", "zero"], ["zero0", "zero1", "zero2", "zero3"]),
        "a config after =": (["train", "--config", "=", "zero3"], ["zero3"]),
        "all configs": (["train", "--config", "="], configs.names()),
        "a setting": (["train", "--config.zero.st"], ["--config.zero.stage="]),
        "its values": (["train", "--config.zero.stage", "="], STAGES),
        "its values in one word, as in zsh": (["train", "--config.zero.stage="], [f"--config.zero.stage={n}" for n in STAGES]),
        "a truth": (["train", "--config.data.pack", "=", "T"], ["True"]),
        "a setting of a launched command": (["launch", "--", "zerojax", "train", "--config.seq"], ["--config.seq_len="]),
        "a file, which bash itself completes": (["show", "ru"], []),
        "a file after =": (["train", "--workdir", "=", "ru"], []),
        "a config to print": (["configs", "lora_t"], ["lora_tiny"]),
    }.values(),
)  # fmt: skip
def test_bash_offers_what_may_stand_there(complete, words, offered):
    assert complete(*words) == offered


def test_the_script_has_the_flags_and_the_settings_of_today(tmp_path):
    """If it fails: python scripts/write_completion.py."""
    command = [sys.executable, "scripts/write_completion.py", tmp_path / "written"]
    subprocess.run(command, cwd=runs.ROOT, env=programs.environment(), check=True, timeout=programs.LIMIT)
    assert completion.SCRIPT.read_text() == (tmp_path / "written").read_text()


def test_an_unknown_shell_is_told_in_one_line(run_main):
    status, out, errors = run_main(completion, "fish")
    assert (status, out, errors.count("\n")) == (2, "", 1) and "bash" in errors and "zsh" in errors
