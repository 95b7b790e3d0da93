"""Checks the sub-commands. This module tests zerojax.__main__."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tomllib

import programs
import pytest
import runs

import zerojax
from zerojax import __main__ as cli

KNOWN = ", ".join(cli.COMMANDS)
OF_A_STEP = {"jax", "flax", "optax", "numpy", "rich", "yaml", "absl"}  # flax imports the last three
HEAVY = OF_A_STEP | {
    "orbax",
    "orbax.checkpoint",
    "tensorflow_datasets",
    "array_record",
    "grain",
    "pyarrow",
    "tokenizers",
    "datasets",
}
HEAVY |= {"huggingface_hub", "transformers", "ml_collections", "matplotlib", "tensorboardX", "tensorflow", "pandas"}


@pytest.fixture(scope="module")
def ends():
    """Returns how commands end, {name: (`zerojax NAME --help`, `MODULE --help`)}, and a refused one under ""."""
    pairs = [(["zerojax", name, "--help"], [module, "--help"]) for name, (module, _) in cli.COMMANDS.items()]
    refused = ["zerojax", "plan", "--config=configs/zero3.py", "--target=h300"]
    found = iter(programs.modules([*(words for pair in pairs for words in pair), refused]))
    return {name: (next(found), next(found)) for name in cli.COMMANDS} | {"": next(found)}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_sub_command_is_a_module_that_python_m_also_starts_and_its_help_says_how(ends, name):
    (through, direct), module = ends[name], cli.COMMANDS[name][0]
    assert through == direct and through.err == ""
    how = f"python -m {module} " if name in ("train", "plan") else f"usage: zerojax {name} "
    assert how in through.out
    assert name != "train" or all(f"--config.{place}=" in through.out for place in ("seed", "zero.stage", "metrics.to"))


def test_a_refused_input_ends_a_sub_command_in_one_line_with_status_2(ends):
    status, _, err = ends[""]
    assert status == 2 and err.count("\n") == 1 and "target: must be one of" in err


def test_help_lists_every_command_and_imports_none(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerojax", "--help"])
    monkeypatch.setattr(cli.runpy, "run_module", pytest.fail)
    cli.main()
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and what in out for name, (_, what) in cli.COMMANDS.items())


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerojax", "--version"])
    cli.main()
    project = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"zerojax {project['version']}\n"
    assert zerojax.__version__ == project["version"]


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_a_full_disk_behind_stdout_ends_in_one_line_with_status_2(monkeypatch, capsys, word):
    monkeypatch.setattr(sys, "argv", ["zerojax", word])
    with open("/dev/full", "w") as full, pytest.raises(SystemExit, match=r"^2$"):
        monkeypatch.setattr(sys, "stdout", full)
        try:
            cli.main()
        finally:
            monkeypatch.undo()
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what it still holds
    err = capsys.readouterr().err
    assert err.startswith("zerojax: ") and "space left on" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], f"a command is missing; give one of {KNOWN}"),
        (["trian"], "'trian' is not a command; did you mean 'train'?"),
        (["xyz"], f"'xyz' is not a command; known: {KNOWN}"),
        (["--config=configs/zero3.py"], f"is not a command; known: {KNOWN}"),
    ],
)
def test_an_unknown_command_ends_in_one_line_with_status_2(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["zerojax", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1 and line.startswith("zerojax: ") and words in line


@pytest.mark.parametrize(
    ("words", "absent"),
    {
        "the library": (["-c", "import zerojax"], HEAVY),
        "its step": (["-c", "import zerojax; zerojax.make_mesh, zerojax.make_train_step"], HEAVY - OF_A_STEP),
        "the help": (["-m", "zerojax", "--help"], HEAVY),
        "an unknown command": (["-m", "zerojax", "trian"], HEAVY),
        "the configs": (["-m", "zerojax", "configs"], HEAVY),
        "a completion": (["-m", "zerojax", "completion", "bash"], HEAVY),
        "a card": (["-m", "zerojax", "show", "no/such/run"], HEAVY - {"rich"}),
        "checkpoints": (["-m", "zerojax", "verify-checkpoint", "no/such/run"], HEAVY - {"rich"}),
        "a launch": (["-m", "zerojax", "launch", "--help"], HEAVY),
    }.values(),
)
def test_nothing_heavy_is_imported_before_it_is_used(words, absent):
    command = [sys.executable, "-Ximporttime", *words]
    ended = subprocess.run(
        command, cwd=runs.ROOT, env=programs.environment(), capture_output=True, text=True, timeout=programs.LIMIT
    )
    imported = {
        line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")
    }
    assert "zerojax" in imported and not imported & absent


def test_the_console_script_and_the_table_name_what_is_there():
    scripts = tomllib.loads(pathlib.Path(runs.ROOT, "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"zerojax": "zerojax.__main__:main"}
    assert all(importlib.util.find_spec(module) for module, _ in cli.COMMANDS.values())
