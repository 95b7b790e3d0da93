"""Checks the thread of an engine. This module tests zerojax.serve.worker."""

import threading

import small_engine

from zerojax.launch import watch
from zerojax.serve import worker


def test_requests_are_answered_and_cancelled_between_steps_and_an_idle_engine_waits(monkeypatch):
    phases = []
    monkeypatch.setattr(watch, "at", phases.append)
    engine, done = small_engine.engine(), threading.Semaphore(0)
    made = worker.Worker(engine)
    made.start()

    def told(request):
        if request.finish:
            done.release()

    first = engine.request([9, 11], max_tokens=4, ignores_end=True, on_change=told)
    second = engine.request([9, 12], max_tokens=60, ignores_end=True, on_change=told)
    made.add(first)
    made.add(second)
    made.cancel(second)
    assert done.acquire(timeout=60) and done.acquire(timeout=60)
    made.stop(60)
    engine.run()  # what was on its way when the thread ended
    assert (len(first.tokens), first.finish, second.finish, made.failure) == (4, "length", "cancelled", "")
    assert phases[0] == watch.IDLE and set(phases) == {watch.IDLE, watch.ANSWER}
    assert engine.is_idle and not made._thread.is_alive()


def test_a_request_goes_first_that_comes_while_the_devices_have_work():
    class Busy:
        is_idle, spare_seconds = False, 60.0

        def add(self, request):
            self.spare_seconds = 0.0
            asked.append(request)

        def step(self):
            found.append(list(asked))
            stepped.set()

    asked, found, stepped = [], [], threading.Event()
    made = worker.Worker(Busy())
    made.start()
    made.add("it")
    assert stepped.wait(30)
    made.stop(60)
    assert found[0] == ["it"]


def test_an_engine_that_fails_is_told_once_in_one_line():
    class Broken:
        is_idle, spare_seconds = False, 0.0

        def step(self):
            raise RuntimeError("no\nmemory")

    told = threading.Event()
    made = worker.Worker(Broken(), told.set)
    made.start()
    assert told.wait(60)
    made.stop(60)
    assert made.failure == "RuntimeError: no memory"
