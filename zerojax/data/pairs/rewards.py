"""Rewards of answers that a model in training gives. This module holds a few, and finds a function by its name.

A reward is f(prompt, answer, label) -> a number, of texts: what was asked, what the model answered, and what the example's template of the
answer says. It must depend on these alone.
"""

import importlib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax import errors
from zerojax.errors import UserError

Reward = Callable[[str, str, str], float]


def exact(prompt: str, answer: str, label: str) -> float:
    """Returns 1 if the answer is the label, up to spaces around them, else 0."""
    return answer.strip() == label.strip()


def letters(prompt: str, answer: str, label: str) -> float:
    """Returns the share of the longer text's letters that both have at the same place."""
    same = sum(one == other for one, other in zip(answer, label))
    return same / max(len(answer), len(label), 1)


def regex(prompt: str, answer: str, label: str) -> float:
    """Returns 1 if the label, a regex, matches the whole answer, else 0."""
    return re.fullmatch(label, answer.strip()) is not None


MOST = float(np.finfo(np.float32).max)
REWARDS: Mapping[str, Reward] = {"exact": exact, "letters": letters, "regex": regex}


def is_folder(reward: str) -> bool:
    """Returns whether a reward is a model's folder. One that is named like a reward of the table is meant by a path: "./exact"."""
    return reward not in ("", *REWARDS) and pathlib.Path(reward).is_dir()


def find(name: str) -> Reward:
    """Returns a reward of the table, or the function that "module:function" names; modules of the current folder are found too.

    Raises:
      UserError: there is none. The line begins with "reward".
    """
    return found("reward", name, REWARDS, ("a prompt", "an answer", "a label"), ("", "", ""))


def found(setting: str, name: str, table: Mapping[str, Any], takes: Sequence[str], example: Sequence[Any]) -> Any:
    """Returns a row of a table of functions, or the function that "module:function" names; modules of the current folder are found too.

    Args:
      setting: what names it, for errors.
      name: of a row, or "module:function".
      table: the rows.
      takes: the function's arguments, in words.
      example: values of the arguments.

    Raises:
      UserError: there is none, or it takes other arguments. The line begins with `setting`.
    """
    if name in table:
        return table[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise UserError(
            f"{setting}: must be one of {', '.join(table)}, or module:function, and is {errors.shown(name)}"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        own = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module of a user may raise anything
        raise UserError(
            f"{setting}: {name} cannot be imported ({errors.one_line(error)}); name a function of a module that Python finds from here"
        ) from error
    words = f"{', '.join(takes[:-1])} and {takes[-1]}" if len(takes) > 1 else takes[0]
    if not callable(own):
        raise UserError(f"{setting}: {name} is no function; name one of {words}")
    try:
        inspect.signature(own).bind(*example)
    except TypeError as error:
        raise UserError(
            f"{setting}: {name} cannot be called with {words} ({errors.one_line(error)}); take these alone"
        ) from error
    except ValueError:  # a function of C without a signature
        pass
    return own


def score(reward: Reward, name: str, prompt: str, answer: str, label: str) -> float:
    """Returns the reward of an answer.

    Raises:
      UserError: the function fails, or gives no number that is finite in float32.
    """
    try:
        number = float(reward(prompt, answer, label))
    except Exception as error:
        raise UserError(
            f"reward: {name} failed for the answer {errors.shown(answer)} ({errors.one_line(error)}); mend it"
        ) from error
    if not abs(number) <= MOST:
        raise UserError(f"reward: {name} gave {number} for the answer {errors.shown(answer)}; mend it")
    return number
