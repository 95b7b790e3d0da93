"""Checks that clients get every step, and that none of them can stop a run. This module tests zerojax.trainer.trackers."""

import json
import threading
import time
import types

import pytest
import runs

from zerojax.errors import UserError
from zerojax.trainer import metrics, setting_names, trackers


class Kept:
    """A client that keeps what it is told."""

    def __init__(self, info):
        self.info, self.steps, self.ended = info, [], None
        self.run_id = info.run_id or "new"

    def write(self, step, seconds, values):
        self.steps.append((step, values))

    def close(self, *, is_failed):
        self.ended = is_failed


def group(**changes):
    return types.SimpleNamespace(
        **{"to": ("wandb",), "project": "p", "name": "", "dir": "", "resume_id": "", **changes}
    )


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Returns f(client, settings) -> (opened trackers, printed lines, clients)."""

    def start(client=Kept, **settings):
        said, clients = [], []

        def open_run(info):
            clients.append(client(info))
            return clients[-1]

        monkeypatch.setattr(trackers, "CLIENTS", {"wandb": open_run, "mlflow": open_run})
        found = trackers.Outlets(group(**settings), tmp_path, {"seed": 0}, said.append)
        found.open()
        return found, said, clients

    return start


def test_each_client_gets_each_step_and_its_id_is_kept_for_the_next_start(started, tmp_path):
    found, said, clients = started(to=("wandb", "mlflow"))
    for step in (1, 2):
        found.write(step, {"loss": 1 / step})
    found.close(is_failed=False)
    found.close(is_failed=True)
    assert [client.steps for client in clients] == [[(1, {"loss": 1.0}), (2, {"loss": 0.5})]] * 2
    assert [client.ended for client in clients] == [False, False] and said == []
    assert json.loads((tmp_path / trackers.FILE).read_text()) == {"wandb": "new", "mlflow": "new"}
    (tmp_path / trackers.FILE).write_text('{"wandb": "old"}')
    client = ended(started())
    assert (client.info.run_id, client.info.is_chosen, client.info.name) == ("old", False, tmp_path.name)
    client = ended(started(resume_id="mine", name="n", dir=str(tmp_path / "sub")))
    assert (client.info.run_id, client.info.is_chosen, client.info.name) == ("mine", True, "n")
    assert (tmp_path / "sub").is_dir()


def ended(opened):
    """Returns the client of trackers that are closed."""
    found, _, clients = opened
    found.close(is_failed=False)
    return clients[0]


def fails(where):
    def fail(*_, **__):
        raise ConnectionError("network is unreachable\nsecond line")

    return type("Fails", (Kept,), {where: fail})


@pytest.mark.parametrize("where", ["__init__", "write", "close"])
def test_a_client_that_fails_is_told_once_and_left_alone(started, where):
    found, said, _ = started(fails(where))
    for step in range(5):
        found.write(step, {"loss": 1.0})
        time.sleep(0.01)
    found.close(is_failed=False)
    (line,) = said
    assert line.startswith("metrics: wandb failed (network is unreachable); the run goes on")


def test_a_client_that_hangs_holds_neither_a_step_nor_the_end(started, monkeypatch):
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    hang = threading.Event()
    found, said, _ = started(type("Hangs", (Kept,), {"write": lambda *_: hang.wait()}))
    began = time.monotonic()
    found.write(1, {})
    found.close(is_failed=False, seconds=0.1)
    assert "did not end within 0 s" in said[0]
    found, said, _ = started(type("Hangs", (Kept,), {"write": lambda *_: hang.wait()}))
    for step in range(9):
        found.write(step, {})
    found.close(is_failed=False)
    assert said == [
        "metrics: wandb failed (it is 3 steps behind); the run goes on without it, and metrics.jsonl holds what is logged"
    ]
    assert time.monotonic() - began < 5
    hang.set()


@pytest.mark.parametrize(
    "to, expected",
    [
        ((), ()),
        (("",), ()),
        (("wandb,mlflow",), ("wandb", "mlflow")),
        (("tensorboard", " mlflow , tensorboard"), ("tensorboard", "mlflow")),
    ],
)
def test_names_come_as_a_tuple_or_as_a_comma_list(to, expected):
    assert trackers.names(to) == expected


def test_wrong_settings_are_refused_before_the_run(monkeypatch):
    with pytest.raises(
        UserError, match=r"config.metrics.to: must name some of .* and names 'wandbb'; did you mean 'wandb'\?"
    ):
        runs.config(metrics__to=("wandbb",))
    with pytest.raises(UserError, match=r"config.metrics.to: must name some of .* and names 3"):
        runs.config(metrics__to=(3,))
    with pytest.raises(UserError, match=r"config.metrics.resume_id: is 'a', and is the id of one client's run"):
        runs.config(metrics__to=("wandb", "mlflow"), metrics__resume_id="a")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="names mlflow, which is not installed; pip install mlflow"):
        trackers.check_installed(("tensorboard,mlflow",))
    trackers.check_installed(("tensorboard",))


@pytest.mark.parametrize("to, files", [(("tensorboard",), True), ((), False)])
def test_tensorboard_is_written_where_it_is_named(tmp_path, to, files):
    found = trackers.Outlets(group(to=to), tmp_path, {}, print)
    with metrics.MetricsLog(tmp_path, enabled=True, tensorboard=trackers.TENSORBOARD in to, clients=found) as log:
        log.open()
        log.write(1, {"loss": 2.0})
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 2.0}] and (tmp_path / "tensorboard").exists() == files


@pytest.mark.usefixtures("cache_dir")
def test_a_run_sends_its_steps_and_its_settings(tmp_path, monkeypatch):
    clients = []
    monkeypatch.setitem(trackers.CLIENTS, "mlflow", lambda info: clients.append(Kept(info)) or clients[-1])
    monkeypatch.setattr(trackers, "check_installed", lambda to: None)
    runs.run(tmp_path, metrics__to=("mlflow",), steps=3)
    (client,) = clients
    assert [(step, values["loss"]) for step, values in client.steps] == [*runs.losses(tmp_path).items()]
    assert json.loads(json.dumps(client.info.settings)) == setting_names.flat(
        json.loads((tmp_path / "config.json").read_text())
    )
    assert client.ended is False
    assert not (tmp_path / "tensorboard").exists()
