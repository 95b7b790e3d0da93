"""Checks variables for all hosts. This module tests zerojax.launch.cluster.environment."""

import pytest

from zerojax.errors import UserError
from zerojax.launch.cluster import environment


def test_the_file_of_this_folder_comes_before_that_of_the_home_folder(tmp_path, monkeypatch, capsys):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / ".deepspeed_env").write_text("A=1\n\n# a comment\nB = x=y \n")
    (here / ".deepspeed_env").write_text("export B='a b'\nC=\n")
    assert environment.read({"HOME": str(tmp_path)}) == {"A": "1", "B": "a b", "C": ""}
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and f"2 variables of {tmp_path}/.deepspeed_env: A, B" in err
    (here / "mine").write_text("D=4\n")
    assert environment.read({"HOME": str(tmp_path), "DS_ENV_FILE": "mine"}) == {"D": "4"}


def test_without_a_file_there_are_no_variables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert environment.read({"HOME": str(tmp_path)}) == {} and not capsys.readouterr().err


@pytest.mark.parametrize("line", [b"A", b"=x", b"A B=c", b"1A=c", b"A=\0", b"A=\xff"])
def test_a_line_of_another_form_is_named(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_bytes(b"OK=1\n" + line + b"\n")
    with pytest.raises(UserError, match=r"\.deepspeed_env(:2: must be KEY=VALUE|: cannot be read)"):
        environment.read({})


def test_a_file_that_is_asked_for_and_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="DS_ENV_FILE: there is no file 'mine'"):
        environment.read({"DS_ENV_FILE": "mine"})
