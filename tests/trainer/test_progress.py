"""Checks the display of a run. This module tests zerojax.trainer.progress."""

import io

from zerojax.trainer import progress


def test_a_disabled_display_writes_nothing():
    out = io.StringIO()
    with progress.Progress(10, enabled=False, out=out) as shown:
        shown.update(1, seconds=1.0, loss=1.0)
        shown.print("hello")
    assert not out.getvalue()


def test_without_a_terminal_there_is_one_line_an_interval_and_one_at_the_end():
    out = io.StringIO()
    with progress.Progress(7, log_every=3, out=out) as shown:
        shown.print("[bold] is kept")
        for step in range(1, 8):
            shown.update(step, seconds=0.1, loss=2.0, tokens_per_second=12345.0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[bold] is kept"
    assert [line.split("  ")[0] for line in lines[1:]] == ["step 3/7", "step 6/7", "step 7/7"]
    assert "loss 2  tokens_per_second 12.35k  eta 0:00:00" in lines[1]


def test_a_run_that_logs_seldom_prints_a_line_a_minute(monkeypatch):
    out, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.Progress(100, log_every=2000, out=out) as shown:
        for step in range(1, 101):
            shown.update(step, seconds=7.0, loss=2.0)
            clock[0] += 7.0
    told = [int(line.split("/")[0].removeprefix("step ")) for line in out.getvalue().splitlines()]
    assert told == [*range(10, 100, 9), 100]  # 9 steps of 7 seconds are the first above a minute


def test_a_terminal_gets_a_bar_with_text_above_it(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat any file as a terminal
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    with progress.Progress(4, out=out) as shown:
        shown.print("[bold] is kept")
        shown.update(2, seconds=1.0, loss=2.5)
    assert "[bold] is kept" in out.getvalue() and "2/4" in out.getvalue() and "loss 2.5" in out.getvalue()


def test_the_eta_is_of_steps_and_of_pauses_like_those_after_the_first():
    out, etas = io.StringIO(), {}
    with progress.Progress(100, out=out) as shown:
        for step in range(1, 62):
            # The first step compiles, and so does the first evaluation; later ones take 5 seconds, after every 10th step.
            paused = {11: 58.0}.get(step, 5.0) if step % 10 == 1 and step > 1 else 0.0
            shown.update(step, seconds=30.0 if step == 1 else 1.0, paused=paused)
            etas[step] = out.getvalue().splitlines()[-1].split("eta ")[1]
    assert etas[1] == "?"
    assert etas[10] == "0:01:30"
    assert etas[11] == "0:01:29", "what the first pause took is not a rate of steps, and not that of later pauses"
    assert etas[61] == "0:00:58", "39 steps of 1 s, and 6 pauses of 5 s in 60 steps"
