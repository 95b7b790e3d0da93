"""Checks the sub-commands. This module tests zerojax.__main__."""

import importlib.util
import pathlib
import subprocess
import sys
import tomllib

import pytest
import runs

from zerojax import __main__ as cli

KNOWN = ", ".join(cli.COMMANDS)


def started(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=runs.ROOT, timeout=runs.LIMIT)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_sub_command_is_a_module_that_python_m_also_starts(name):
    module = cli.COMMANDS[name][0]
    through, direct = started("zerojax", name, "--help"), started(module, "--help")
    assert (through.returncode, through.stdout) == (direct.returncode, direct.stdout)
    assert f"python -m {module} " in through.stdout and through.stderr == ""


def test_a_refused_input_ends_a_sub_command_in_one_line_with_status_2():
    done = started("zerojax", "plan", "--config=configs/zero3.py", "--target=h300")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "target: must be one of" in done.stderr


def test_help_lists_every_command_and_imports_none(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerojax", "--help"])
    monkeypatch.setattr(cli.runpy, "run_module", pytest.fail)
    cli.main()
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and what in out for name, (_, what) in cli.COMMANDS.items())


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


def test_the_console_script_and_the_table_name_what_is_there():
    scripts = tomllib.loads(pathlib.Path(runs.ROOT, "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"zerojax": "zerojax.__main__:main"}
    assert all(importlib.util.find_spec(module) for module, _ in cli.COMMANDS.values())
