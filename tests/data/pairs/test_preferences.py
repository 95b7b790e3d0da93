"""Checks the forms of preferences. This module tests zerojax.data.pairs.preferences."""

import numpy as np
import pytest

from zerojax.data.pairs import preferences
from zerojax.errors import UserError


def test_a_pair_stays_as_it_is_and_scores_choose_the_best_and_the_worst():
    pair = {"chosen": "a", "rejected": "b"}
    assert preferences.pair_of(pair, "f:1") is pair
    usual = {"text": "c", "label": "a", "rejected": "b"}
    assert preferences.pair_of(usual, "f:1") == {**usual, "prompt": "c", "chosen": "a"}
    assert preferences.pair_of({**usual, "prompt": "d"}, "f:1")["prompt"] == "d"
    asked = {"messages": ["q"], "tools": [{"function": {"name": "f"}}]}
    openai = preferences.pair_of({"input": asked, "preferred_output": "a", "non_preferred_output": "b"}, "f:1")
    assert (openai["prompt"], openai["tools"]) == (asked["messages"], asked["tools"])
    rated = {"responses": np.array(["a", "b", "c", "d"], object), "ratings": np.array([2.0, 7.0, 7.0, 0.5])}
    found = preferences.pair_of(rated, "f:1")
    assert (found["chosen"], found["rejected"]) == ("b", "d")


@pytest.mark.parametrize("scores", ["x", None, [1, "2"], [float("nan"), float("nan")], [3, 3]])
def test_scores_that_choose_nothing_are_refused_with_their_place(scores):
    with pytest.raises(UserError, match=r"^f:1: .*scores"):
        preferences.pair_of({"answers": ["a", "b"], "scores": scores}, "f:1")
