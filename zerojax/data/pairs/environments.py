"""What answers a model in training between its own answers. This module holds an example, and finds a function by its name.

An environment is f(messages) -> (more messages or None, reward). It is called after each answer with the conversation so far: the prompt as
the user's message, answers as the assistant's, and what it returned itself. None ends the conversation. The rewards of its calls are added
to that of the last answer (`rewards`). It is called in threads, for several conversations at once.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax import errors
from zerojax.data.pairs import rewards, templates
from zerojax.errors import UserError

Found = tuple[list[templates.Message] | None, float]
Environment = Callable[[list[templates.Message]], Found]

CALL = "?"  # what asks the calculator
_OF_CALL = 0.5  # the reward of the first call
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(messages: list[templates.Message]) -> Found:
    """Answers the first "?" with the value of the prompt, whole numbers with + - * // % and a "=" behind them, and rewards it with 0.5.

    A second one costs as much, so that a model which always asks learns to say what it heard.
    """
    calls = [message for message in messages if message["content"].strip() == CALL]
    if not calls or messages[-1] is not calls[-1]:
        return None, 0.0
    if len(calls) > 1:
        return None, -_OF_CALL
    return [{"role": "tool", "content": str(value(messages[0]["content"].strip().removesuffix("=")))}], _OF_CALL


def value(text: str) -> int:
    """Returns the value of whole numbers with + - * // %.

    Raises:
      ValueError: the text is another, or divides by 0.
    """

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](of(node.left), of(node.right)))
        raise ValueError(f"{text!r} is more than whole numbers with + - * // %")

    try:
        return of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{text!r} has no value") from error


ENVIRONMENTS: Mapping[str, Environment] = {"calculator": calculator}


def find(name: str) -> Environment:
    """Returns an environment of the table, or the function that "module:function" names.

    Raises:
      UserError: there is none. The line begins with "environment".
    """
    return rewards.found("environment", name, ENVIRONMENTS, ("a list of messages",), ([],))


def answer(environment: Environment, name: str, messages: Sequence[templates.Message]) -> Found:
    """Returns what an environment says to a conversation.

    Raises:
      UserError: it fails, or returns something else than messages or None with a number. The line begins with "environment".
    """
    try:
        found: Any = environment([dict(message) for message in messages])
        more, reward = found
        reward = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (
        Exception,
        SystemExit,
    ) as error:  # a function of a user may raise anything, and sys.exit would end its thread alone
        raise UserError(
            f"environment: {name} failed after the answer {errors.shown(messages[-1]['content'])} ({errors.one_line(error)}); mend it"
        ) from error
    is_told = more is None or (isinstance(more, list | tuple) and all(map(_is_message, more)))
    if not is_told or not abs(reward) <= rewards.MOST:
        raise UserError(
            f'environment: {name} gave {errors.shown(found)}; return ([{{"role": ..., "content": ...}}, ...] or None, a finite number)'
        )
    return (None if more is None else list(more)), reward


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
