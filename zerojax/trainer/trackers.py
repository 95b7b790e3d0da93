"""Sends metrics to the clients that `config.metrics.to` names. This module keeps a client that hangs or fails from touching the run."""

import contextlib
import importlib.util
import json
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zerojax import bounded, errors, files
from zerojax.errors import UserError
from zerojax.launch import ending
from zerojax.trainer.clients import mlflow_client, run_info, wandb_client

if TYPE_CHECKING:
    from zerojax.trainer import settings as settings_lib

TENSORBOARD = "tensorboard"
CLIENTS: dict[str, Callable[[run_info.RunInfo], run_info.Client]] = {  # the package's name -> what opens a run
    "wandb": wandb_client.open_run,
    "mlflow": mlflow_client.open_run,
}
NAMES = (TENSORBOARD, *CLIENTS)
FILE = "clients.json"  # in the run's folder: {client: id of its run}
MOST_WAITING = 10_000  # steps of a client that is behind
CLOSE_SECONDS = 30.0  # for what is left at the end of a run
END_SECONDS = 3.0  # the same where the process ends at once


def names(to: Iterable[Any]) -> tuple[str, ...]:
    """Returns the names in `config.metrics.to`, which may hold comma lists.

    Raises:
      UserError: one is unknown.
    """
    found: list[str] = []
    for item in to:
        for word in (part.strip() for part in item.split(",")) if isinstance(item, str) else (item,):
            if word and word not in NAMES:
                raise UserError(
                    f"config.metrics.to: must name some of {', '.join(NAMES)}, and names {errors.shown(word)}; "
                    f"{errors.choose(word, NAMES)}"
                )
            found += [word] if word and word not in found else []
    return tuple(found)


def check(group: "settings_lib.MetricsSettings") -> None:
    """Checks the settings `config.metrics`.

    Raises:
      UserError: a name is unknown, or an id is given for two clients.
    """
    asked = [name for name in names(group.to) if name in CLIENTS]
    if group.resume_id and len(asked) > 1:
        raise UserError(
            f"config.metrics.resume_id: is {group.resume_id!r}, and is the id of one client's run; "
            f"name one of {', '.join(asked)} in config.metrics.to, or omit it: a run's folder keeps its ids"
        )


def check_installed(to: Iterable[Any]) -> None:
    """Checks that the packages of the clients are there. Imports none of them.

    Raises:
      UserError: one is not installed. The line has the command that installs it.
    """
    for name in names(to):
        if name in CLIENTS and importlib.util.find_spec(name) is None:
            raise UserError(
                f"config.metrics.to: names {name}, which is not installed; pip install {name}, or omit it from config.metrics.to"
            )


class Outlets:
    """The clients of a run. Opened once, by its first process."""

    def __init__(
        self,
        group: "settings_lib.MetricsSettings",
        workdir: pathlib.Path,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """Takes `config.metrics`, the run's folder, its settings by dotted place, and what prints a line."""
        self._workdir, self._say, self._lock = workdir, say, threading.Lock()
        self._ids = _read_ids(workdir)
        self._waiting = [
            _Outlet(
                name,
                run_info.RunInfo(
                    project=group.project,
                    name=group.name or workdir.name,
                    folder=pathlib.Path(group.dir or workdir).absolute(),
                    run_id=group.resume_id or self._ids.get(name, ""),
                    is_chosen=bool(group.resume_id),
                    settings=settings,
                ),
                self._failed,
                self._opened,
            )
            for name in names(group.to)
            if name in CLIENTS
        ]
        self._forget: Callable[[], object] = lambda: None

    def open(self) -> None:
        """Starts the clients in the background."""
        self._forget = ending.before_end(lambda status, _: self.close(is_failed=status != 0, seconds=END_SECONDS))
        for outlet in self._waiting:
            outlet.start()

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Hands over a step's numbers, and returns at once."""
        for outlet in self._waiting:
            outlet.put((step, time.time(), dict(values)))

    def close(self, *, is_failed: bool, seconds: float = CLOSE_SECONDS) -> None:
        """Ends the clients' runs, and waits up to `seconds` for all of them together. Does nothing the second time."""
        self._forget()
        closing, self._waiting = self._waiting, []
        for outlet in closing:
            outlet.end(is_failed=is_failed)
        deadline = time.monotonic() + seconds
        for outlet in closing:
            if not outlet.wait(max(0.0, deadline - time.monotonic())):
                self._failed(outlet.name, f"did not end within {seconds:.0f} s")

    def _failed(self, name: str, why: str) -> None:
        self._say(f"metrics: {name} failed ({why}); the run goes on without it, and metrics.jsonl holds what is logged")

    def _opened(self, name: str, run_id: str) -> None:
        """Keeps the id of a client's run, by which the next start continues it."""
        with self._lock, contextlib.suppress(OSError):
            self._ids[name] = run_id
            files.replace(self._workdir / FILE, json.dumps(self._ids) + "\n")


class _Outlet:
    """One client and its thread."""

    def __init__(
        self, name: str, info: run_info.RunInfo, failed: Callable[[str, str], None], opened: Callable[[str, str], None]
    ) -> None:
        self.name = name
        self._info, self._failed, self._opened = info, failed, opened
        self._steps: queue.Queue[tuple[int, float, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self._is_over, self._is_failed_run = threading.Event(), False
        self._once = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, step: tuple[int, float, dict[str, float]]) -> None:
        if self._is_over.is_set():
            return
        try:
            self._steps.put_nowait(step)
        except queue.Full:
            self._fail(f"it is {MOST_WAITING} steps behind")

    def end(self, *, is_failed: bool) -> None:
        self._is_failed_run = is_failed
        with contextlib.suppress(queue.Full):
            self._steps.put_nowait(None)

    def wait(self, seconds: float) -> bool:
        """Returns whether the thread is done, or has failed before."""
        if self._thread.ident is not None:
            self._thread.join(0 if self._is_over.is_set() else seconds)
        return not self._thread.is_alive() or self._is_over.is_set()

    def _serve(self) -> None:
        try:
            self._info.folder.mkdir(parents=True, exist_ok=True)
            client = CLIENTS[self.name](self._info)
            self._opened(self.name, client.run_id)
            while (step := self._steps.get()) is not None:
                client.write(*step)
            client.close(is_failed=self._is_failed_run)
        except BaseException as error:  # a client may end its thread by SystemExit
            self._fail(errors.first_line(error))

    def _fail(self, why: str) -> None:
        """Prints once that the client failed. From then on it gets nothing."""
        with self._once:
            if self._is_over.is_set():
                return
            self._is_over.set()
        self._failed(self.name, why)


def _read_ids(workdir: pathlib.Path) -> dict[str, str]:
    """Returns the ids of earlier starts. A file that is lost or damaged means new runs."""
    with contextlib.suppress(OSError, ValueError):
        found = bounded.parse_json(bounded.read_bytes(workdir / FILE))
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            return found
    return {}
