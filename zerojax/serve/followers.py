"""Lets several processes run one engine. This module tells the others what process 0 asks of its engine before each step.

    process 0    listens, and orders before each step: [["add", number, prompt, settings], ["cancel", number], ...]
    the others   ask the same of their own engines, and run the step

An engine decides who has a slot and who reads a prompt from what it was asked and the tokens that it has read, which are the same on all
processes. So all engines send the same programs in one order, and what is asked is all that travels: nothing for most steps. It goes by the
connection that tells of a process' end (`launch.peers`), not by a collective of the devices: while nothing is asked the others wait
without a program that runs, and an order has no fixed size.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import requests
from zerojax.launch import watch
from zerojax.serve import worker

END = "end"  # the last order


class Leader:
    """Process 0's side.

    Args:
      order: gives all others a value of JSON.
    """

    def __init__(self, order: Callable[[Any], None]):
        self._order, self._count = order, 0
        self._numbers: weakref.WeakKeyDictionary[requests.Request, int] = weakref.WeakKeyDictionary()

    def tell(self, actions: Sequence[worker.Action]) -> None:
        """Orders a step, before which engines do these actions."""
        self._order([self._described(*action) for action in actions])

    def end(self) -> None:
        """Orders the end."""
        self._order(END)

    def _described(self, kind: str, request: requests.Request) -> list[Any]:
        if kind == worker.CANCEL:
            return [kind, self._numbers[request]]
        self._count += 1
        self._numbers[request] = self._count
        return [kind, self._count, request.prompt.tolist(), dataclasses.asdict(request.settings)]


def follow(engine: engine_lib.Engine, next_order: Callable[[], Any]) -> None:
    """Runs the engine of another process, until the end is ordered.

    Args:
      engine: of the same model and sizes as process 0's.
      next_order: returns what process 0 orders next.
    """
    running: dict[int, requests.Request] = {}
    while True:
        if engine.is_idle:
            watch.at(watch.IDLE)
        if (order := next_order()) == END:
            return
        watch.at(watch.ANSWER)
        for kind, number, *asked in order:
            if kind == worker.CANCEL:
                if number in running:
                    engine.cancel(running[number])
                continue
            prompt, settings = asked
            tuples = {name: tuple(settings[name]) for name in ("stop_ids", "stop_strings")}
            running[number] = engine.submit(prompt, **settings | tuples)
        engine.step()
        running = {number: request for number, request in running.items() if not request.finish}
