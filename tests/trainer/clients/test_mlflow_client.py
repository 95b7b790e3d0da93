"""Checks what is told to mlflow, with a stand-in for the package. This module tests zerojax.trainer.clients.mlflow_client."""

import collections
import pathlib
import sys
import types

import pytest

from zerojax.trainer.clients import mlflow_client, run_info

INFO = run_info.RunInfo("zerojax", "mine", pathlib.Path("/runs/mine"), "", False, {f"place.{n}": n for n in range(250)})
Metric = collections.namedtuple("Metric", "key value timestamp step")
Param = collections.namedtuple("Param", "key value")


class Failure(Exception):
    error_code = "RESOURCE_DOES_NOT_EXIST"


class Store:
    """A tracking server with one experiment's runs."""

    def __init__(self):
        self.uri, self.experiments, self.runs = "unset", {}, {}

    def __call__(self, tracking_uri):
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name, artifact_location):
        self.experiments[name] = types.SimpleNamespace(experiment_id="1", where=artifact_location)
        return "1"

    def create_run(self, experiment, run_name):
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "status": "RUNNING", "metrics": [], "params": []}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        if run_id not in self.runs:
            raise Failure("Run not found")
        self.runs[run_id]["status"] = status

    set_terminated = update_run

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] += params


@pytest.fixture
def store(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = Store()
    entities = types.SimpleNamespace(Metric=Metric, Param=Param)
    package = types.SimpleNamespace(MlflowClient=found, MlflowException=Failure, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return found


def changed(**values):
    return run_info.RunInfo(**{**vars(INFO), **values})


def test_a_run_has_all_settings_and_each_step_and_ends(store):
    client = mlflow_client.open_run(INFO)
    client.write(7, 12.5, {"loss": 2, "grad_norm": 1.0})
    client.close(is_failed=False)
    (run,) = store.runs.values()
    assert (run["name"], run["status"], len(run["params"])) == ("mine", "FINISHED", 250)
    assert run["metrics"] == [("loss", 2.0, 12500, 7), ("grad_norm", 1.0, 12500, 7)]
    assert store.uri == "sqlite:////runs/mine/mlflow.db" and store.experiments["zerojax"].where.startswith(
        "file:///runs/mine/"
    )


def test_a_later_start_continues_the_run_without_writing_its_settings_again(store):
    first = mlflow_client.open_run(INFO)
    first.close(is_failed=True)
    assert store.runs[first.run_id]["status"] == "FAILED"
    again = mlflow_client.open_run(changed(run_id=first.run_id))
    assert again.run_id == first.run_id and len(store.runs) == 1 and len(store.runs[first.run_id]["params"]) == 250
    assert store.runs[first.run_id]["status"] == "RUNNING"


def test_a_run_that_is_gone_is_made_anew_unless_the_user_named_it(store):
    assert mlflow_client.open_run(changed(run_id="gone")).run_id == "run0"
    with pytest.raises(Failure):
        mlflow_client.open_run(changed(run_id="gone", is_chosen=True))


def test_a_tracking_server_of_the_environment_is_used(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    mlflow_client.open_run(INFO)
    assert store.uri is None and store.experiments["zerojax"].where is None
