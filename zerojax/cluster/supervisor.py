"""Runs a command on all hosts until it ends. This module shows its output, passes signals on, and restarts it after a failure.

An attempt is one life of all processes. Each has a fresh agent on each host. After a failure all processes are ended, and the next
attempt takes the hosts that answer.
"""

import contextlib
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from zerojax.cluster import attempt as attempt_lib
from zerojax.cluster import connection, hosts
from zerojax.launch import early

# Seconds after a host is lost, until its processes are surely gone: its agent counts as long as the launcher
FENCE_SECONDS = 10.0
UNHEARD_STATUS = 2  # of a run that was stopped because stdout is closed, as of the trainer alone
MOST_LINES = 100_000  # that wait for a slow terminal


class Screen:
    """Prints lines, and never keeps a process waiting. A stdout that is closed stops the run."""

    def __init__(self, closed: Callable[[], None]):
        self._lines: queue.Queue[tuple[Any, str] | None] = queue.Queue(MOST_LINES)
        self._closed, self._dropped = closed, 0
        self._thread = threading.Thread(target=self._print, name="screen", daemon=True)
        self._thread.start()

    def out(self, line: str) -> None:
        """Prints a line to stdout."""
        self._put(sys.stdout, line)

    def say(self, line: str) -> None:
        """Prints a line of the launcher to stderr."""
        self._put(sys.stderr, f"{attempt_lib.LAUNCHER}: {line}")

    def close(self, seconds: float = 5.0) -> None:
        """Waits for what is to be printed."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=seconds)
            self._thread.join(seconds)

    def _put(self, stream: Any, line: str) -> None:
        try:
            self._lines.put_nowait((stream, line))
        except queue.Full:
            self._dropped += 1

    def _print(self) -> None:
        is_open = {sys.stdout: True, sys.stderr: True}
        while (item := self._lines.get()) is not None:
            stream, line = item
            if self._dropped and self._lines.empty():
                line, self._dropped = f"{line}\n{attempt_lib.LAUNCHER}: {self._dropped} lines were not shown", 0
            try:
                if is_open.get(stream, True):
                    print(line, file=stream, flush=True)
            except (OSError, ValueError):
                is_open[stream] = False
                if stream is sys.stdout:
                    self._closed()


class Supervisor:
    """Runs an order. Make one, and call `run` once, in the main thread."""

    def __init__(
        self,
        order: attempt_lib.Order,
        *,
        hear: Callable[[int, str], bool] | None = None,
        tell: Callable[[attempt_lib.Failure], None] | None = None,
    ):
        """Prepares a run.

        Args:
          order: what to run where.
          hear: is called with each line of a process, and returns whether to show it.
          tell: is called with the first failure of an attempt; by default it is printed.
        """
        self._order, self._hear = order, hear
        self._screen = Screen(self._unheard)
        self._inbox: queue.SimpleQueue[connection.Message] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._around = attempt_lib.Around(
            self.connect, self.show, tell or self._tell, self.signals, secrets.token_hex(8), secrets.token_hex(32)
        )
        self._stopped_by = 0  # the first signal that this process got
        self._is_unheard = False
        self.clocks: dict[str, float] = {}  # host -> its time minus this host's, in seconds

    def stop(self, number: int) -> None:
        """Passes a signal on to every process. No attempt follows."""
        self._stopped_by = self._stopped_by or number
        self._signals.put(number)

    def _unheard(self) -> None:
        """Stops the run, since stdout is closed."""
        self._is_unheard = True
        self._screen.say("stdout is closed: the run is stopped")
        self.stop(signal.SIGTERM)

    def run(self) -> int:
        """Runs attempts until one succeeds or none is left, and returns the exit status.

        That is the status of the first failed process; 2 if none failed, but the run was stopped because stdout is closed; else 0.
        """
        with self._signal_handlers():
            try:
                return self._run() or (UNHEARD_STATUS if self._is_unheard else 0)
            finally:
                self._screen.close()

    def _run(self) -> int:
        order, number, left = self._order, 0, list(self._order.hosts)
        while True:
            attempt = attempt_lib.Attempt(self._around, order, left, number)
            failure = attempt.run()
            self.clocks |= attempt.clocks
            if failure is None:
                return 0
            if self._stopped_by or number >= order.max_restarts:
                return failure.status
            if why := attempt_lib.FINAL.get(failure.status):
                self._screen.say(
                    f"status {failure.status} is {why}, which another attempt would meet again; not restarted"
                )
                return failure.status
            number += 1
            if failure.is_lost:
                self._sleep(FENCE_SECONDS)
            answering = self._answering(failure)
            if self._stopped_by:
                return attempt_lib.shell_status(-self._stopped_by)
            if len(answering) < max(1, order.min_nodes or len(order.hosts)):
                missing = ", ".join(host.name for host in order.hosts if host not in answering)
                least = order.min_nodes or len(order.hosts)
                self._screen.say(f"not restarted: {missing} does not answer, and --min_nodes is {least}")
                return failure.status
            left = answering
            fewer = f", on {len(left)} of {len(order.hosts)} hosts" if len(left) < len(order.hosts) else ""
            self._screen.say(f"restart {number} of {order.max_restarts}{fewer}")

    def _answering(self, failure: attempt_lib.Failure) -> list[hosts.Node]:
        """Returns the hosts whose agents start, and waits for all of them for `rejoin_seconds`."""
        deadline = time.monotonic() + self._order.rejoin_seconds
        found: dict[str, bool] = {}
        while not self._stopped_by:
            waiting = [host for host in self._order.hosts if host.name not in found]
            inbox: queue.SimpleQueue[connection.Message] = queue.SimpleQueue()
            probes = [self.connect(host.name, inbox) for host in waiting]
            until = min(time.monotonic() + 30, max(deadline, time.monotonic() + 10))
            pending = {host.name for host in waiting}
            while pending and time.monotonic() < until and not self._stopped_by:
                with contextlib.suppress(queue.Empty):
                    message = inbox.get(timeout=0.2)
                    pending.discard(message.host)
                    if "hello" in message.frame:
                        found[message.host] = True
            for probe in probes:
                probe.close()
            for probe in probes:
                probe.wait(0.5)
            if len(found) == len(self._order.hosts) or time.monotonic() > deadline:
                break
            self._sleep(2)
        return [host for host in self._order.hosts if host.name in found]

    def connect(self, name: str, inbox: "queue.SimpleQueue[connection.Message]") -> connection.Connection:
        """Starts the agent of a host."""
        return connection.Connection(name, inbox, python=self._order.python, ssh_options=self._order.ssh_options)

    def _tell(self, failure: attempt_lib.Failure) -> None:
        """Prints the first failure of an attempt."""
        self._screen.say(failure.line)
        for line in failure.details:
            self._screen.say(f"    {line}")

    def show(self, host: str, rank: int, text: str) -> None:
        """Prints a line of a process."""
        if self._hear is None or self._hear(rank, text):
            self._screen.out(f"[{host}:{rank}] {text}")

    def say(self, line: str) -> None:
        """Prints a line of the launcher."""
        self._screen.say(line)

    def signals(self) -> Iterator[int]:
        """Yields the signals to pass on."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._signals.get_nowait()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stopped_by:
            time.sleep(0.1)

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Passes signals on inside the block: SIGQUIT kills. A stop by the terminal (Ctrl-Z) would cut the hosts off, and is ignored."""

        def forward(number: int, frame: object) -> None:
            self.stop(int(signal.SIGKILL if number == signal.SIGQUIT else number))

        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        former = {number: signal.signal(number, forward) for number in handled if early.listens_for(number)}
        former[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
