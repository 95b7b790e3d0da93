"""Checks what speaks between answers of a model in training. This module tests zerojax.data.pairs.environments."""

import sys

import pytest

from zerojax.data.pairs import environments
from zerojax.errors import UserError

ASKED = {"role": "user", "content": "12*3//10%10="}
CALL = {"role": "assistant", "content": "?"}


def test_the_calculator_answers_one_call_with_the_value_of_the_prompt():
    found, reward = environments.calculator([ASKED, CALL])
    assert found == [{"role": "tool", "content": "3"}] and reward == 0.5
    assert environments.calculator([ASKED, {**CALL, "content": "3"}]) == (None, 0.0)
    assert environments.calculator([ASKED, CALL, *found, {**CALL, "content": "3"}]) == (None, 0.0)
    assert environments.calculator([ASKED, CALL, *found, dict(CALL)]) == (None, -0.5)


@pytest.mark.parametrize("text", ["2**9", "__import__('os')", "1.5+1", "7//0", "(", "True+1"])
def test_nothing_but_sums_of_whole_numbers_has_a_value(text):
    with pytest.raises(ValueError, match=r"value|more than"):
        environments.value(text)


@pytest.mark.parametrize(
    "environment",
    [
        lambda messages: 1 / 0,
        lambda messages: sys.exit(1),
        lambda messages: None,
        lambda messages: ("text", 1.0),
        lambda messages: ([{"role": "tool"}], 1.0),
        lambda messages: (None, float("inf")),
        lambda messages: (None, "1.0"),
    ],
)
def test_an_environment_that_fails_or_returns_something_else_is_one_line(environment):
    with pytest.raises(UserError, match=r"^environment: mine ") as caught:
        environments.answer(environment, "mine", [ASKED, CALL])
    assert "\n" not in str(caught.value)


def test_an_environment_is_a_row_or_a_function_and_gets_a_copy_of_the_messages():
    assert environments.find("calculator") is environments.calculator
    with pytest.raises(UserError, match=r"^environment: must be one of calculator, or module:function"):
        environments.find("calculators")
    messages = [dict(ASKED), dict(CALL)]

    def changes(given):
        given[0]["content"] = "other"
        return [{"role": "tool", "content": "x"}], 1

    assert environments.answer(changes, "mine", messages) == ([{"role": "tool", "content": "x"}], 1.0)
    assert messages[0] == ASKED
