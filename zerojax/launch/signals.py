"""Stops all processes of a run together when one of them gets a signal. This module turns signals into a decision that all share."""

import signal
import socket
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.launch import early, ending

SIGNAL = "a signal"


class Stopped(Exception):
    """Work that can be done later is given up, since the run is to stop."""


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGHUP into a request to stop after the step, or ends the process where it has nothing to save.

    A context manager for the main thread. Its exit restores the former handlers. A thread of its own reads the signals, so that one
    that arrives during a long call into C also takes effect.

    Attributes:
      requested: whether this process is to stop.
      cause: the reason: "a signal", or another that `request` named.
    """

    SIGNALS = early.STOPS

    def __init__(self, *, has_state: bool = True) -> None:
        """Begins where there is a state to save, or none yet, so that a signal ends the process; see `saves`."""
        self.requested, self.cause = False, SIGNAL
        self._saves, self._is_done = has_state, False
        self._line = ""
        self._former: dict[int, Any] = {}
        self._asked: jax.Array | None = None
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> "StopSignal":
        self._ends = socket.socketpair()
        self._ends[1].setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        numbers = filter(early.listens_for, self.SIGNALS)
        self._former = {number: signal.signal(number, self._handle) for number in numbers}
        threading.Thread(target=self._listen, args=(self._ends[0],), name="signals", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        assert self._ends is not None
        self._ends[1].close()  # the thread reads the end, and closes the other

    def saves(self) -> None:
        """From now on the first signal is a request, which the caller reads and follows by saving. A SIGINT after it ends the process."""
        self._saves = True

    def ends_at_once(self, why: str) -> None:
        """From now on a signal ends the process with a line that says `why`, and other requests have no effect: what it has is saved."""
        self._saves, self._is_done, self._line = False, True, f"zerojax: stopped by a signal: {why}"

    def request(self, cause: str, line: str, status: int) -> None:
        """Requests to stop for another reason than a signal. Where nothing is to be saved, ends the process with `line` and `status`."""
        if self._is_done:
            return
        self.requested, self.cause = True, cause
        if not self._saves:
            ending.leave(status, line)

    def agreed(self, *, at_once: bool = False) -> bool:
        """Returns on every process whether any process is to stop. Every process must call it once in a step.

        Each call dispatches a tiny reduction and reads the previous one, so that no device waits. The result is therefore one call
        late, unless `at_once` is True. With one process it is `requested`.
        """
        if jax.process_count() == 1:
            return self.requested
        if at_once:
            return agreed(self.requested)
        before, self._asked = self._asked, _any(self.requested)
        return before is not None and bool(jax.device_get(before))

    def check(self) -> None:
        """Raises Stopped on every process if any process is to stop. Every process must call it at the same places."""
        if self.agreed(at_once=True):
            raise Stopped

    def _handle(self, number: int, frame: object) -> None:
        self.requested = True

    def _listen(self, numbers: socket.socket) -> None:
        """Reads the numbers of signals, until the other end is closed."""
        is_second = False
        with numbers:
            while read := numbers.recv(1):
                number = read[0]
                if number not in self._former:
                    continue
                if not self._saves or (is_second and number == signal.SIGINT):
                    line = early.line(number) if is_second or not self._line else self._line
                    ending.leave(early.status(number), line)
                is_second = True


def agreed(stop: bool) -> bool:
    """Returns whether any process passed True. Every process must call it at the same step.

    It waits for the devices to finish all dispatched work. In a loop, use `StopSignal.agreed`.
    """
    return stop if jax.process_count() == 1 else bool(jax.device_get(_any(stop)))


def _any(stop: bool) -> jax.Array:
    """Dispatches a reduction of `stop` over all processes. The result is bool[], replicated."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    sharding = jax.NamedSharding(mesh, jax.P("all"))
    with jax.transfer_guard("allow"):  # one byte a device
        stops = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.full(1, stop))
    return jax.jit(jnp.any, out_shardings=jax.NamedSharding(mesh, jax.P()))(stops)
