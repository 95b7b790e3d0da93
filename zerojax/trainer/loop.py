"""The training loop. This module feeds batches to the compiled train step, and evaluates, saves and profiles when due."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax import display
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import feed
from zerojax.launch import signals, start_up, watch
from zerojax.plan import step_plan
from zerojax.profile import compared, profiler
from zerojax.train_state import State
from zerojax.trainer import patience as patience_lib
from zerojax.trainer import recorder as recorder_lib
from zerojax.trainer import setting_names
from zerojax.tree import PyTree

UNEVALUATED = "unevaluated"  # in `meta`: whether the evaluation that was due at this step was given up


@dataclasses.dataclass(frozen=True)
class When:
    """The steps after which the loop logs, evaluates and saves. An interval of 0 means never.

    Attributes:
      steps: the last step.
      log_every, evaluate_every, save_every: steps between log lines, evaluations and checkpoints.
      saves_at_end: whether the last step is saved.
      epoch_ends: the steps at which epochs end; if there are some, these are evaluated.
      publish_every: steps between publications of weights.
      stops_every: a signal waits for a multiple of it, since a run that resumes elsewhere would go on otherwise than this one.
    """

    steps: int
    log_every: int
    evaluate_every: int
    save_every: int
    saves_at_end: bool
    epoch_ends: tuple[int, ...] = ()
    publish_every: int = 0
    stops_every: int = 1

    def logs(self, step: int) -> bool:
        """Returns whether a step is logged."""
        return step == self.steps or _is_due(step, self.log_every)

    def evaluates(self, step: int) -> bool:
        """Returns whether the weights are evaluated after a step."""
        is_due = step in self.epoch_ends if self.epoch_ends else _is_due(step, self.evaluate_every)
        return step == self.steps or is_due

    def saves(self, step: int) -> bool:
        """Returns whether the state is saved after a step."""
        return self.saves_at_end if step == self.steps else _is_due(step, self.save_every)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """How states are saved.

    Attributes:
      saver: the checkpointer.
      meta: saved with each.
      card: returns the run card that is saved beside it.
      form: of a state that is saved.
      batch: (the next step, the params before it) -> what is saved of its batch, which a run that resumes cannot make.
    """

    saver: checkpointer.Checkpointer
    meta: Mapping[str, Any]
    card: Callable[[], str] = str
    form: Callable[[Any], Any] = logical_lib.to_logical
    batch: Callable[[int, PyTree], Mapping[str, np.ndarray]] = lambda step, params: {}


class End(NamedTuple):
    """The end of a run: the last step, the state after it, which is saved if a signal stopped the run there."""

    state: Any
    step: int
    is_stopped: bool


def run(
    plan: step_plan.Plan | None,
    first_state: Callable[[], Any],
    step: int,
    *,
    when: When,
    streams: feed.Feed,
    evaluate: Callable[[int, Any], float | None],
    recorder: recorder_lib.Recorder,
    profile: profiler.Profiler,
    checkpoints: Checkpoints,
    stop: signals.StopSignal,
    patience: patience_lib.EarlyStop,
    next_batch: Callable[[int, State], Any] | None = None,
    beside: Callable[[], Mapping[str, float]] = dict,
    publish: Callable[[int, State], None] = lambda step, state: None,
    is_unevaluated: bool = False,
) -> End:
    """Trains from `step` until the last step or a signal. A signal gives up an evaluation, which the run that resumes begins with.

    Args:
      plan: holds the compiled train step; None if no step is left.
      first_state: returns the state at `step`. The loop creates it, so that nothing else holds buffers that each step donates.
      evaluate: (step, params) -> the held-out loss, which it records, or None if nothing is held out. Raises `signals.Stopped` to give up.
      patience: ends the run after evaluations without a lower loss. A step with the lowest loss so far is then saved.
      next_batch: (step, state before it) -> its batch; None: the next of `streams`.
      beside: returns metrics of the step whose batch was made last, which the host measured.
      publish: (step, state after it); called when due.
      is_unevaluated: whether the evaluation at `step` was given up.

    Raises:
      UserError: numbers are not finite, the disk is full, or the first batches cannot be read. A later one that cannot be read stops the
        run before it.
    """
    state = first_state()
    is_stopped = False
    if profile.is_missed(step):
        recorder.say(f"nothing is profiled: step {profile.first} was done before this run")
    is_due = is_unevaluated and when.evaluates(step)
    if plan is None and not is_due:
        checkpoints.saver.trim()
        return End(state, step, is_stopped)
    stop.saves()
    recorder.begin()
    is_over = False
    if is_due:
        eval_loss, is_stopped = _evaluate(evaluate, step, state.params)
        patience.count(eval_loss)
        is_over = signals.agreed(patience.is_over)
    start_up.spare_collector()
    while step < when.steps and not is_stopped and not is_over:
        step += 1
        if profile.begins(step):
            recorder.settle(state)
            profile.start()
        watch.at(watch.DATA, step)
        batch = streams.next() if next_batch is None else next_batch(step, state)
        watch.at(watch.STEP, step)
        assert plan is not None
        with jax.profiler.StepTraceAnnotation("train", step_num=step), recorder.away():
            state, numbers = plan.compiled(state, batch)
        numbers |= beside()
        if profile.holds(step):
            numbers["profiled"] = 1  # slower than other steps, so timings leave it out
        recorder.push(step, numbers)
        if _is_due(step, when.publish_every):
            recorder.flush()
            watch.at(watch.CHECKPOINT)
            publish(step, state)
            recorder.resume()
        if profile.ends(step):
            _end_profile(profile, plan, state, recorder)
        if streams.failure is not None and not stop.requested:
            line = setting_names.in_config(str(streams.failure))
            stop.request(line, f"zerojax: {line}", 2)
        is_stopped = stop.agreed() and step % when.stops_every == 0
        eval_loss, is_given_up, is_best = None, False, False
        if when.evaluates(step):
            recorder.flush()
            eval_loss, is_given_up = _evaluate(evaluate, step, state.params)
            is_stopped |= is_given_up
            is_best = patience.count(eval_loss)
            is_over = step < when.steps and signals.agreed(patience.is_over)
        if is_over:
            recorder.say(f"step {step}: {patience.line}")
        if when.saves(step) or is_stopped or is_best or (is_over and when.saves_at_end):
            about = {UNEVALUATED: True} if is_given_up else {}
            _save(checkpoints, streams, state, step, eval_loss, recorder, about | patience.as_meta())
    watch.at(watch.CHECKPOINT)
    checkpoints.saver.wait()
    return End(state, step, is_stopped)


def _evaluate(evaluate: Callable[[int, Any], float | None], step: int, params: PyTree) -> tuple[float | None, bool]:
    """Returns the held-out loss, and whether the evaluation was given up, since the run is to stop."""
    watch.at(watch.EVALUATE)
    try:
        return evaluate(step, params), False
    except signals.Stopped:
        return None, True


def _end_profile(
    profile: profiler.Profiler, plan: step_plan.Plan, state: State, recorder: recorder_lib.Recorder
) -> None:
    """Writes the trace and prints the time of its steps by phase."""
    recorder.settle(state)
    breakdown = profile.stop(plan.ledger, plan.pipeline.programs if plan.pipeline else ())
    if breakdown is not None:
        recorder.say(display.as_text(profiler.table(breakdown)))
        recorder.say(f"the trace is in {profile.folder}")
        if breakdown.shares and plan.foretold is not None:
            most = compared.largest(breakdown, plan.foretold)
            recorder.differs = None if most is None else most._asdict()
            recorder.say(compared.line(breakdown, plan.foretold, most))
    recorder.resume()


def _save(
    checkpoints: Checkpoints,
    streams: feed.Feed,
    state: State,
    step: int,
    eval_loss: float | None,
    recorder: recorder_lib.Recorder,
    more: Mapping[str, Any],
) -> None:
    """Saves the state with `more` in its `meta`, after checking that it and the metrics of its step are finite."""
    batch = checkpoints.batch(step + 1, state.params)  # first: other devices make it while these train
    logical = checkpoints.form(state)
    recorder.flush()
    watch.at(watch.CHECKPOINT)
    recorder.check(step, logical)
    about = {**checkpoints.meta, "logged": recorder.logged, "tally": recorder.tally.as_meta(), **more}
    card = checkpoints.card()
    checkpoints.saver.save(step, logical, streams.position(), meta=about, eval_loss=eval_loss, card=card, batch=batch)
    recorder.saved()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
