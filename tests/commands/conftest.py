"""Runs commands for the tests of this folder."""

import sys

import pytest


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Returns f(module of a command, words) -> (status, stdout, stderr)."""

    def run(module, *words):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        with pytest.raises(SystemExit) as end:
            module.main()
        return (end.value.code, *capsys.readouterr())

    return run
