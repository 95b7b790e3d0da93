"""Checks rewards of answers. This module tests zerojax.data.pairs.rewards."""

import sys

import pytest

from zerojax.data.pairs import rewards
from zerojax.errors import UserError


@pytest.mark.parametrize(
    "name, answer, label, wanted",
    [
        ("exact", " yes ", "yes", 1.0),
        ("exact", "yes!", "yes", 0.0),
        ("letters", "abd", "abc", 2 / 3),
        ("letters", "ab", "abcd", 0.5),
        ("letters", "abcd", "ab", 0.5),
        ("letters", "", "", 0.0),
        ("regex", "42", r"\d+", 1.0),
        ("regex", "42a", r"\d+", 0.0),
    ],
)
def test_a_reward_compares_the_answer_with_the_label(name, answer, label, wanted):
    assert rewards.score(rewards.find(name), name, "prompt", answer, label) == pytest.approx(wanted)


def test_a_function_is_found_by_its_module_and_name_also_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text("def long(prompt, answer, label): return len(answer)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.path", [place for place in sys.path if place]
    )  # "", of `python -m`, is the current folder too
    assert rewards.find("my_rewards_here:long")("", "abc", "") == 3


@pytest.mark.parametrize(
    "name, words",
    [
        ("exactly", "must be one of exact, letters, regex, or module:function"),
        ("no_such_module_here:f", "cannot be imported"),
        ("math:no_such", "cannot be imported"),
        ("math:pi", "is no function"),
        ("operator:add", "cannot be called with a prompt, an answer and a label"),
    ],
)
def test_a_reward_that_is_not_there_is_one_line(name, words):
    with pytest.raises(UserError, match=words) as caught:
        rewards.find(name)
    assert str(caught.value).startswith("reward: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "reward", [lambda *texts: 1 / 0, lambda *texts: float("nan"), lambda *texts: 1e300, lambda *texts: "much"]
)
def test_a_reward_that_fails_or_is_no_number_ends_in_one_line(reward):
    with pytest.raises(UserError, match=r"reward: mine .*; mend it"):
        rewards.score(reward, "mine", "a", "b", "c")
