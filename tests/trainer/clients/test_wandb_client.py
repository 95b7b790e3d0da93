"""Checks what is told to wandb, with a stand-in for the package. This module tests zerojax.trainer.clients.wandb_client."""

import pathlib
import sys
import types
from unittest import mock

import pytest

from zerojax.trainer.clients import run_info, wandb_client

INFO = run_info.RunInfo("zerojax", "mine", pathlib.Path("/runs/mine"), "", False, {"zero.stage": 3})


@pytest.fixture(params=["old", "new"])
def wandb(monkeypatch, request):
    """Returns a stand-in for an older wandb, or for one whose login can be told not to ask."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    package = mock.Mock(spec=["api", "init", "login", "Settings"])
    package.api = types.SimpleNamespace(api_key="a key")

    def old(key=None, relogin=None):
        raise AssertionError("it would ask")

    def new(key=None, prompt=True, verify=True):
        assert not prompt and not verify
        return package.api.api_key is not None

    package.login = {"old": old, "new": new}[request.param]
    package.init.side_effect = lambda **how: mock.Mock(id=how["id"])
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_a_new_run_gets_an_id_and_a_later_start_continues_it(wandb):
    first = wandb_client.open_run(INFO)
    assert len(first.run_id) == 8
    how = wandb.init.call_args.kwargs
    assert how["resume"] == "allow" and how["config"] == {"zero.stage": 3} and how["dir"] == "/runs/mine"
    again = wandb_client.open_run(run_info.RunInfo(**{**vars(INFO), "run_id": first.run_id}))
    assert again.run_id == first.run_id


def test_steps_are_an_axis_of_their_own_so_that_a_resumed_run_may_repeat_some(wandb):
    client = wandb_client.open_run(INFO)
    client.write(7, 0.0, {"loss": 2.0})
    client.close(is_failed=True)
    run = client._run
    run.define_metric.assert_any_call("*", step_metric="step")
    run.log.assert_called_once_with({"step": 7, "loss": 2.0})
    run.finish.assert_called_once_with(exit_code=1)


def test_nothing_asks_for_a_key_on_the_terminal(wandb, monkeypatch):
    wandb.api.api_key = None
    with pytest.raises(RuntimeError, match="run `wandb login` once, or set WANDB_MODE=offline"):
        wandb_client.open_run(INFO)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_client.open_run(INFO).run_id
