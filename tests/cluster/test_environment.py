"""Checks variables for all hosts. This module tests zerojax.cluster.environment."""

import pytest

from zerojax.cluster import attempt, environment, hosts
from zerojax.errors import UserError


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


def test_a_file_may_begin_with_a_mark_of_its_encoding_and_may_be_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_bytes(b"\xef\xbb\xbfA=1\n")
    assert environment.read({}) == {"A": "1"}
    (tmp_path / ".deepspeed_env").write_text("")
    assert environment.read({}) == {}
    assert capsys.readouterr().err.endswith(f"0 variables of {tmp_path}/.deepspeed_env\n")


def test_variables_of_each_process_are_named_as_without_effect(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    order = attempt.Order(["x"], [hosts.Node("localhost", ("0",))], variables={})
    around = attempt.Around(None, None, None, None, "run", "secret")
    ranks = hosts.ranks(order.hosts, 0)
    own = attempt.Attempt(around, order, order.hosts, 0)._variables(ranks[0], ranks, 1, "127.0.0.1:1")
    (tmp_path / ".deepspeed_env").write_text("".join(f"{name}=1\n" for name in ["MINE", *own]))
    environment.read({})
    assert f"{', '.join(own)} of .deepspeed_env without effect" in capsys.readouterr().err


def test_a_folder_of_that_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").mkdir()
    with pytest.raises(UserError, match=r"\.deepspeed_env: cannot be read \(.*; correct or remove it$"):
        environment.read({})


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
