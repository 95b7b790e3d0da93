"""Evaluates a run that learns answers, and reports what it learnt. This module holds what happens between two evaluations: a round.

A round is an epoch if the config counts epochs. At its end the log, metrics.jsonl and TensorBoard get the training loss and perplexity of
the round, the held-out loss, the share of right answers, answers beside labels, and the memory of both phases. The log has the answers of
the first and the last evaluation alone: the first show a user that prompts and labels are as meant, the last what was learnt.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from zerojax import display
from zerojax.launch import signals
from zerojax.trainer import recorder as recorder_lib
from zerojax.trainer.tuning import answers as answers_lib
from zerojax.trainer.tuning import phases
from zerojax.tree import PyTree

LARGEST = 709.0  # exp of more is no float


class Rounds:
    """Follows the steps of a run, and evaluates after each round.

    Args:
      recorder: where everything is logged and shown.
      held_out_loss: (params) -> the loss, or None if nothing is held out.
      answer: (params) -> a score, or None for no answers; see `answers.make`.
      ends: the steps at which epochs end; () if the config counts no epochs.
      has_loss: whether a step's loss is a mean over labels.
    """

    def __init__(
        self,
        recorder: recorder_lib.Recorder,
        held_out_loss: Callable[[Any], float | None],
        answer: Callable[[Any], answers_lib.Score] | None,
        ends: tuple[int, ...] = (),
        has_loss: bool = True,
    ):
        self._recorder, self._held_out_loss, self._answer, self._ends = recorder, held_out_loss, answer, ends
        self._total = self._labels = 0.0
        self._phase: phases.Phase | None = None
        self._is_told = False  # whose memory is not known
        self._untold: answers_lib.Score | None = None  # the last score whose answers are not shown
        self._is_first = True  # whether no answers are shown yet
        if has_loss:
            recorder.listen(self._add)

    def begin(self) -> None:
        """Begins the first phase of training."""
        self._phase = phases.Phase()

    def evaluate(self, step: int, params: PyTree) -> float | None:
        """Ends a round after `step`: logs and shows it, and returns the held-out loss, or None if nothing is held out.

        Raises:
          signals.Stopped: the run is to stop. What is known of the training is logged.
        """
        name = f"epoch {self._ends.index(step) + 1}" if step in self._ends else f"step {step}"
        numbers = self._of_training(name)
        try:
            with phases.measured() as memory:
                loss = self._held_out_loss(params)
                score = None if self._answer is None else self._answer(params)
        except signals.Stopped:  # the run that resumes evaluates, and does not know the round's training
            self._recorder.log(step, numbers)
            raise
        if loss is not None:
            self._recorder.evaluated(step, loss)
            numbers["eval_perplexity"] = perplexity(loss)
        if score is not None:
            numbers[f"eval_{score.name}"] = score.share
            self._recorder.say(f"{name}: {score.line}")
            self._untold = score
            if self._is_first:
                self.tell_last()
            self._is_first = False
            self._recorder.note(step, "answers", score.records, answers_lib.as_rows(score.records))
        self._tell_memory(name, "evaluation", memory, numbers)
        self._recorder.log(step, numbers)
        self._recorder.resume()
        self.begin()
        return loss

    def tell_last(self) -> None:
        """Shows the answers of the last evaluation, if they are not shown yet."""
        if self._untold is not None:
            self._recorder.say(display.as_text(self._untold.table))
            self._untold = None

    def end(self) -> None:
        """Ends the thread of a phase that no evaluation ended."""
        if self._phase is not None:
            self._phase.end()
            self._phase = None

    def _add(self, values: Mapping[str, float]) -> None:
        """Adds a step's loss, which is a mean over its labels; not that of a step that overflowed."""
        if math.isfinite(values["loss"]):
            self._total += values["loss"] * values.get("labels", 1.0)
            self._labels += values.get("labels", 1.0)

    def _of_training(self, name: str) -> dict[str, Any]:
        """Ends the training phase and returns its numbers."""
        numbers: dict[str, Any] = {}
        memory = self._phase.end() if self._phase is not None else {}
        if self._labels:
            loss = self._total / self._labels
            numbers = {"train_loss": loss, "train_perplexity": perplexity(loss)}
            self._recorder.say(f"{name}: training loss {loss:.4f}, perplexity {numbers['train_perplexity']:.4g}")
            self._tell_memory(name, "training", memory, numbers)
        self._total = self._labels = 0.0
        return numbers

    def _tell_memory(self, name: str, phase: str, memory: dict[str, int], numbers: dict[str, Any]) -> None:
        for line in phases.lines(f"{name}, {phase}", memory):
            self._recorder.say(line)
        if not self._is_told:
            self._is_told = True
            for line in phases.unreported(memory):
                self._recorder.say(line)
        numbers |= {f"memory/{phase}_{kind}": number for kind, number in memory.items()}


def perplexity(loss: float) -> float:
    """Returns exp(loss), with the loss bounded so that a float can hold the result."""
    return math.exp(min(loss, LARGEST))
