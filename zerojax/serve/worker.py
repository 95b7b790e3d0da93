"""Runs an engine in a thread of its own. This module hands it requests and cancellations, between its steps."""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

from zerojax import errors
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import requests
from zerojax.launch import watch

ADD, CANCEL = "add", "cancel"
Action = tuple[str, requests.Request]  # what is asked of the engine, and the request


class Worker:
    """The thread that calls an engine. Other threads ask and cancel by this.

    Args:
      engine: which nobody else calls.
      on_failure: is called in the thread, once, if the engine raises; `failure` then says why.
      tell: is called in the thread before each step, with what is asked of the engine before it.

    Attributes:
      engine: of which others may call `request` and read `counts`.
      failure: one line; "" while the engine runs.
    """

    def __init__(
        self,
        engine: engine_lib.Engine,
        on_failure: Callable[[], None] = lambda: None,
        tell: Callable[[Sequence[Action]], None] = lambda actions: None,
    ):
        self.engine, self.failure, self._on_failure, self._tell = engine, "", on_failure, tell
        self._inbox: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, request: requests.Request) -> None:
        """Asks a request that `engine.request` has made."""
        self._inbox.put((ADD, request))

    def cancel(self, request: requests.Request) -> None:
        """Ends a request where it is."""
        self._inbox.put((CANCEL, request))

    def stop(self, seconds: float) -> None:
        """Ends the thread after its step, and waits for that, no longer than `seconds`."""
        self._inbox.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while (actions := self._asked()) is not None:
                watch.at(watch.ANSWER)
                self._tell(actions)
                for kind, request in actions:
                    (self.engine.add if kind == ADD else self.engine.cancel)(request)
                self.engine.step()
        except Exception as error:  # whatever: the caches are lost, and those who wait must be told
            self.failure = f"{type(error).__name__}: {errors.one_line(error)}"
            self._on_failure()

    def _asked(self) -> list[Action] | None:
        """Returns what was asked since the last step; waits for something to do if there is nothing, and as long as the devices have work
        for what is to go first. None: the thread is to end."""
        found: list[Action | None] = []
        with contextlib.suppress(queue.Empty):
            if self.engine.is_idle:
                watch.at(watch.IDLE)
                found.append(self._inbox.get())
            elif (spare := self.engine.spare_seconds) > 0:
                found.append(self._inbox.get(timeout=spare))
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return None if None in found else found  # type: ignore[return-value]
