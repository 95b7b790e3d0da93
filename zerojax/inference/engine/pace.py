"""Foretells when the devices will lack work. This module measures how long programs run and how long the host takes to send a step.

The host sends a step while the devices run the one before, and a request that comes after that waits for both. So a server sends a step as
late as it can, and reads first what comes until then. How late follows from medians, since a program or the host is slow now and then.
"""

import collections
import statistics
import time

SOONEST = 0.9  # of its usual time a program may take
SENDS = 2.0  # times as long as usual a step may take to be sent
LAST = 16  # programs of a kind and steps that are remembered


class Pace:
    """The times of an engine's programs and steps, in seconds by the monotonic clock."""

    def __init__(self) -> None:
        self._runs: dict[object, collections.deque[float]] = {}
        self._sends: collections.deque[float] = collections.deque(maxlen=LAST)
        self._began = self._read = time.monotonic()

    def begin(self) -> None:
        """Notes that a step begins to be sent."""
        self._began = time.monotonic()

    def sent(self) -> None:
        """Notes that it was sent."""
        self._sends.append(time.monotonic() - self._began)

    def read(self, kind: object, *, was_done: bool = False) -> None:
        """Notes that the results of a program were read. The next program, if it was sent, runs since then.

        Args:
          kind: of the program.
          was_done: whether the results were there before the host came to read them. Then the program took less time than until now; it
            counts as half of that, lest a host that waits for slow programs go on to wait when they are faster.
        """
        now = time.monotonic()
        took = (now - self._read) / (2 if was_done else 1)
        self._runs.setdefault(kind, collections.deque(maxlen=LAST)).append(took)
        self._read = now

    def spare(self, kind: object) -> float:
        """Returns how long the host may wait before it sends the next step, where one program runs; 0 where few of its kind have run."""
        runs = self._runs.get(kind, ())
        if len(runs) < LAST:
            return 0.0
        busy = SOONEST * statistics.median(runs) - SENDS * statistics.median(self._sends)
        return max(0.0, self._read + busy - time.monotonic())
