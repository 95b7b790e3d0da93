"""Checks where an answer's next token is read. This module tests zerojax.trainer.tuning.drawing, and `test_rollouts` what it draws."""

import pytest

from zerojax.trainer.tuning import drawing


@pytest.mark.parametrize("tokens", [[], [7], [7, 8]])
def test_a_token_is_drawn_after_the_last_one_of_its_text(tokens):
    answer = drawing.DrawnAnswer(0, [4, 5, 6], 0, 3, tokens)
    assert drawing._last(answer, is_pair=False) == len([4, 5, 6, *tokens]) - 1
    assert drawing._last(answer, is_pair=True) == len(["start", *tokens]) - 1
