"""The loop over batches. This module feeds the compiled train step, and evaluates, saves and profiles when due."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from zerojax import display
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import feed
from zerojax.launch import signals
from zerojax.plan import step_plan
from zerojax.profile import profiler
from zerojax.trainer import recorder as recorder_lib


@dataclasses.dataclass(frozen=True)
class When:
    """After which steps what is done; every 0 steps is never.

    Attributes:
      steps: the last step.
      log_every, evaluate_every, save_every: steps between two lines of the log, evaluations and checkpoints.
      saves_at_end: whether the last step is saved.
    """

    steps: int
    log_every: int
    evaluate_every: int
    save_every: int
    saves_at_end: bool

    def logs(self, step: int) -> bool:
        """Says whether a step is logged."""
        return step == self.steps or _is_due(step, self.log_every)

    def evaluates(self, step: int) -> bool:
        """Says whether the weights are evaluated after a step."""
        return step == self.steps or _is_due(step, self.evaluate_every)

    def saves(self, step: int) -> bool:
        """Says whether the state is saved after a step."""
        return self.saves_at_end if step == self.steps else _is_due(step, self.save_every)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where states are saved, and the `meta` saved beside each."""

    saver: checkpointer.Checkpointer
    meta: Mapping[str, Any]


class End(NamedTuple):
    """Where a run ended: the state after `step`, and whether a signal stopped it there."""

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
    evaluate: Callable[[Any], float | None],
    recorder: recorder_lib.Recorder,
    profile: profiler.Profiler,
    checkpoints: Checkpoints,
    stop: signals.StopSignal,
) -> End:
    """Trains from `step` to the last step or to a signal.

    Args:
      plan: of the train step, which it holds compiled; None where no step is left.
      first_state: returns the state of `step`, which is made here: nobody else may keep what each step replaces.
      evaluate: (params) -> the held-out loss, or None where there is no text for it.

    Raises:
      UserError: numbers are not finite, or the disk is full.
    """
    state = first_state()
    is_stopped = plan is None and stop.agreed(at_once=True)
    if profile.is_missed(step) and not is_stopped:
        recorder.say(f"nothing is profiled: step {profile.first} was done before this run")
    if plan is None:
        return End(state, step, is_stopped)
    recorder.begin()
    while step < when.steps and not is_stopped:
        step += 1
        if profile.begins(step):
            recorder.settle(state)
            profile.start()
        batch = streams.next()
        with jax.profiler.StepTraceAnnotation("train", step_num=step), recorder.away():
            state, numbers = plan.compiled(state, batch)
        if profile.holds(step):
            numbers["profiled"] = 1  # slower, and not to be counted with others
        recorder.push(step, numbers)
        if profile.ends(step):
            _end_profile(profile, plan, state, recorder)
        is_stopped = stop.agreed()
        eval_loss = _evaluate(evaluate, state, step, recorder) if when.evaluates(step) else None
        if when.saves(step) or is_stopped:
            _save(checkpoints, streams, state, step, eval_loss, recorder)
    checkpoints.saver.wait()
    return End(state, step, is_stopped)


def _end_profile(profile: profiler.Profiler, plan: step_plan.Plan, state: Any, recorder: recorder_lib.Recorder) -> None:
    """Writes the trace and shows where the time of its steps went."""
    recorder.settle(state)
    found = profile.stop(plan.ledger)
    if found is not None:
        recorder.say(display.as_text(profiler.table(found)))
        recorder.say(f"the trace is in {profile.folder}")
    recorder.resume()


def _evaluate(
    evaluate: Callable[[Any], float | None], state: Any, step: int, recorder: recorder_lib.Recorder
) -> float | None:
    """Measures the held-out loss; returns None where there is no text for it."""
    recorder.flush()
    loss = evaluate(state.params)
    if loss is not None:
        recorder.evaluated(step, loss)
    return loss


def _save(
    checkpoints: Checkpoints,
    streams: feed.Feed,
    state: Any,
    step: int,
    eval_loss: float | None,
    recorder: recorder_lib.Recorder,
) -> None:
    """Saves a state whose numbers are known to be finite."""
    recorder.flush()
    logical = logical_lib.to_logical(state)
    checkpoints.saver.save(step, logical, streams.position(), meta=checkpoints.meta, eval_loss=eval_loss)
    recorder.saved()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
