"""Draws conversations with a model in training. This module puts what the user's environment says between its answers.

A conversation whose answer is done waits for its environment, which runs in a thread, while tokens of other conversations are drawn. Only
the model's tokens are learned.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from zerojax.data.pairs import environments, templates
from zerojax.errors import UserError
from zerojax.trainer.tuning import drawing


@dataclasses.dataclass
class Conversation:
    """A conversation so far.

    Attributes:
      row: of the batch.
      messages: the prompt, and what was said since.
      tokens: int, of all of it.
      learned: whether each token is the model's, and not one that it always gives.
      log_probs: of each token, as it was drawn; 0 for those of others.
      begin: where the last answer begins.
      answers: how many there are.
      reward: of the environment.
      is_late: whether the environment took too long, which ended it.
    """

    row: int
    messages: list[templates.Message]
    tokens: list[int]
    learned: list[bool]
    log_probs: list[float]
    begin: int = 0
    answers: int = 0
    reward: float = 0.0
    is_late: bool = False

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], learned: Sequence[bool]) -> None:
        """Adds tokens at the end."""
        self.begin = len(self.tokens)
        self.tokens += tokens
        self.log_probs += log_probs
        self.learned += learned


@dataclasses.dataclass(frozen=True)
class Rules:
    """How conversations go on.

    Attributes:
      environment, name: what is called after each answer, and its name; None for one answer alone.
      turns: the most answers of a conversation.
      seconds: the most that a call of the environment may take; later, the conversation ends without its reward.
      answer: the most tokens of an answer.
      room: the most tokens of a conversation.
      text_of: f(tokens of an answer) -> its text.
      follow: f(messages of the environment, the last token before them) -> their tokens, with what begins the next answer.
      learned: f(an answer) -> whether each of its tokens is learned.
    """

    environment: environments.Environment | None
    name: str
    turns: int
    seconds: float
    answer: int
    room: int
    text_of: Callable[[Sequence[int]], str]
    follow: Callable[[Sequence[templates.Message], int], list[int]]
    learned: Callable[[drawing.DrawnAnswer], np.ndarray]


def run(
    drawer: drawing.Drawer, prompts: Sequence[np.ndarray], texts: Sequence[str], first: int, rules: Rules
) -> list[Conversation]:
    """Returns a conversation for each prompt.

    Args:
      drawer: has the weights.
      prompts: int32[length] each.
      texts: those of the prompts.
      first: the number of the first conversation of a run, from which the streams of draws follow.
      rules: how they go on.

    Raises:
      UserError: the environment fails.
    """
    return _Round(drawer, prompts, texts, first, rules).run()


class _Round:
    """The conversations of a batch."""

    def __init__(
        self, drawer: drawing.Drawer, prompts: Sequence[np.ndarray], texts: Sequence[str], first: int, rules: Rules
    ):
        self._drawer, self._rules, self._first = drawer, rules, first
        self._talks = [
            Conversation(
                row, [{"role": templates.USER, "content": text}], ids.tolist(), [False] * len(ids), [0.0] * len(ids)
            )
            for row, (ids, text) in enumerate(zip(prompts, texts))
        ]
        self._drawn: list[tuple[Conversation, drawing.DrawnAnswer]] = []
        self._asked: dict[int, float] = {}  # row -> the time until which its environment may answer
        self._said: queue.SimpleQueue[tuple[int, environments.Found | UserError]] = queue.SimpleQueue()

    def run(self) -> list[Conversation]:
        for talk in self._talks:
            self._draw(talk)
        while self._drawn or self._asked:
            if self._drawn:
                self._drawer.step()
            done = [pair for pair in self._drawn if pair[1].is_done]
            self._drawn = [pair for pair in self._drawn if not pair[1].is_done]
            for talk, answer in done:
                self._answered(talk, answer)
            self._hear(waits=not self._drawn)
        return self._talks

    def _draw(self, talk: Conversation) -> None:
        """Asks for the next answer of a conversation."""
        rules, prompt = self._rules, list(talk.tokens)
        stream = ((self._first + talk.row) * rules.turns + talk.answers) % 2**32
        answer = drawing.DrawnAnswer(talk.row, prompt, stream, rules.answer)
        talk.answers += 1
        self._drawn.append((talk, answer))
        self._drawer.submit(answer)

    def _answered(self, talk: Conversation, answer: drawing.DrawnAnswer) -> None:
        """Adds an answer to its conversation, and asks the environment, if there is one."""
        rules = self._rules
        talk.add(answer.tokens, answer.log_probs, rules.learned(answer).tolist())
        talk.messages.append({"role": templates.ASSISTANT, "content": rules.text_of(answer.tokens)})
        if rules.environment is None:
            return
        self._asked[talk.row] = time.monotonic() + rules.seconds
        # No pool: it would wait at the end of the process for a call that never returns.
        call = threading.Thread(target=self._call, args=(rules.environment, talk.row, list(talk.messages)), daemon=True)
        call.start()

    def _call(self, environment: environments.Environment, row: int, messages: Sequence[templates.Message]) -> None:
        try:
            self._said.put((row, environments.answer(environment, self._rules.name, messages)))
        except UserError as error:
            self._said.put((row, error))

    def _hear(self, *, waits: bool) -> None:
        """Goes on with conversations whose environment has answered, and ends those whose environment is late."""
        while self._asked:
            left = min(self._asked.values()) - time.monotonic()
            try:
                row, found = self._said.get(timeout=max(left, 0)) if waits else self._said.get_nowait()
            except queue.Empty:
                self._end_late()
                return
            if isinstance(found, UserError):
                raise found
            if self._asked.pop(row, None) is not None:  # what comes late is not heard
                self._go_on(self._talks[row], *found)
                waits = False

    def _end_late(self) -> None:
        now = time.monotonic()
        for row in [row for row, until in self._asked.items() if until <= now]:
            del self._asked[row]
            self._talks[row].is_late = True

    def _go_on(self, talk: Conversation, more: Sequence[templates.Message] | None, reward: float) -> None:
        """Adds what the environment says, and asks for another answer if that has room."""
        talk.reward += reward
        if more is None or talk.answers == self._rules.turns:
            return
        tokens = self._rules.follow(more, talk.tokens[-1])
        if len(talk.tokens) + len(tokens) + self._rules.answer > self._rules.room:
            return
        begin = talk.begin
        talk.messages += more
        talk.add(tokens, [0.0] * len(tokens), [False] * len(tokens))
        talk.begin = begin
        self._draw(talk)
