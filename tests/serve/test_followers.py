"""Checks what other processes are told. This module tests zerojax.serve.followers; tests/commands/test_serve.py runs two processes."""

import json
import types

import small_engine

from zerojax.launch import watch
from zerojax.serve import followers, worker


class Recorded:
    """An engine that notes what it is asked."""

    def __init__(self):
        self.done = []

    @property
    def is_idle(self):
        return not self.done

    def submit(self, prompt, **settings):
        self.done.append((prompt, settings))
        return types.SimpleNamespace(finish="stop" if len(prompt) == 1 else "")

    def cancel(self, request):
        self.done.append("cancel")

    def step(self):
        self.done.append("step")


def test_others_ask_the_same_of_their_engines_before_the_same_steps(monkeypatch):
    phases = []
    monkeypatch.setattr(watch, "at", phases.append)
    orders, engine = [], small_engine.engine()
    leader = followers.Leader(lambda what: orders.append(json.loads(json.dumps(what))))
    settings = {
        "stop_ids": (3, 5),
        "stop_strings": ("a\ud83d", "é"),
        "temperature": 0.1,
        "seed": 2**32 - 1,
        "logprobs": 0,
    }
    short, long = engine.request([9], max_tokens=4), engine.request([9, 11], **settings)
    leader.tell([(worker.ADD, short), (worker.ADD, long)])
    leader.tell([])
    leader.tell([(worker.CANCEL, short), (worker.CANCEL, long)])
    leader.end()
    other = Recorded()
    followers.follow(other, iter(orders).__next__)
    assert phases == [watch.IDLE, *[watch.ANSWER] * 3]
    (first, asked), (second, again), *rest = other.done
    assert (first, second, rest) == (
        [9],
        [9, 11],
        ["step", "step", "cancel", "step"],
    )  # what has ended is not cancelled
    assert engine.request(first, **asked).settings == short.settings
    assert engine.request(second, **again).settings == long.settings
