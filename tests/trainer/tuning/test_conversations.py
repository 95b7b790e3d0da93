"""Checks conversations with an environment, drawn by a stand-in. This module tests zerojax.trainer.tuning.conversations."""

import threading
import time

import numpy as np
import pytest

from zerojax.data.pairs import environments
from zerojax.errors import UserError
from zerojax.trainer.tuning import conversations


class Drawer:
    """Draws the number of an answer's stream, twice, one token a step; `steps` counts."""

    def __init__(self):
        self.asked, self.steps = [], 0

    def submit(self, answer):
        self.asked.append(answer)

    def step(self):
        self.steps += 1
        for answer in self.asked:
            answer.tokens.append(100 + answer.stream)
            answer.log_probs.append(-0.5 * len(answer.tokens))
            answer.is_done = len(answer.tokens) == 2
        self.asked = [answer for answer in self.asked if not answer.is_done]
        return bool(self.asked)


def drawn(environment, prompts=((1, 2), (3,)), drawer=None, **changes):
    rules = {
        "environment": environment,
        "name": "mine",
        "turns": 3,
        "seconds": 20.0,
        "answer": 2,
        "room": 40,
        "text_of": str,
        "follow": lambda messages, last: [len(message["content"]) for message in messages],
        "learned": lambda answer: np.ones(len(answer.tokens), bool),
    }
    texts = [str(prompt) for prompt in prompts]
    arrays = [np.array(prompt) for prompt in prompts]
    return conversations.run(drawer or Drawer(), arrays, texts, 0, conversations.Rules(**rules | changes))


def says(messages):
    """Returns a tool's message, of as many letters as there are messages; the last of these ends the conversation of the second prompt."""
    if messages[0]["content"] == "(3,)" and len(messages) > 2:
        return None, 1.0
    return [{"role": "tool", "content": "x" * len(messages)}], 1.0


def test_only_the_tokens_of_the_model_are_learned_and_rewards_add_up():
    one, other = drawn(says)
    assert one.tokens == [1, 2, 100, 100, 2, 101, 101, 4, 102, 102] and other.tokens == [3, 103, 103, 2, 104, 104]
    assert one.learned == [token >= 100 for token in one.tokens]
    assert one.log_probs == [-0.5 * n for n in (0, 0, 1, 2, 0, 1, 2, 0, 1, 2)]
    assert (one.answers, one.reward, one.begin) == (3, 3.0, 8) and (other.answers, other.reward, other.begin) == (
        2,
        2.0,
        4,
    )
    assert [message["role"] for message in other.messages] == ["user", "assistant", "tool", "assistant"]


def test_without_an_environment_there_is_one_answer_and_its_streams_are_those_of_the_rows():
    one, other = drawn(None, turns=1)
    assert one.tokens == [1, 2, 100, 100] and other.tokens == [3, 101, 101] and one.reward == 0


def test_a_conversation_ends_where_another_answer_has_no_room():
    one, _ = drawn(says, room=8)
    assert one.tokens == [1, 2, 100, 100, 2, 101, 101] and one.messages[-1]["role"] == "assistant"


def test_other_texts_are_drawn_while_an_environment_thinks_and_a_late_one_ends_its_conversation():
    heard, drawer = threading.Event(), Drawer()

    def slow(messages):
        if messages[0]["content"] == "(3,)":
            heard.wait(20)  # until the other conversation is over
            return None, 5.0
        if len(messages) == 6:
            heard.set()
        return says(messages)

    one, other = drawn(slow, drawer=drawer)
    assert one.answers == 3 and other.reward == 5.0 and not other.is_late

    def late(messages):
        if messages[0]["content"] == "(3,)":
            time.sleep(1.0)
        return says(messages)

    began = time.monotonic()
    one, other = drawn(late, seconds=0.2)
    assert time.monotonic() - began < 0.9
    assert other.is_late and (other.answers, other.reward) == (1, 0.0) and not one.is_late


def test_an_environment_that_fails_ends_the_run():
    with pytest.raises(UserError, match=r"^environment: mine failed"):
        drawn(lambda messages: 1 / 0)
    assert environments.ENVIRONMENTS
