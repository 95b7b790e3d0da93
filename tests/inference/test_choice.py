"""Checks the choice of tokens row by row against a loop in NumPy. This module tests zerojax.inference.choice."""

import jax
import numpy as np

from zerojax.inference import choice, sampling
from zerojax.models import family

ROWS, VOCAB, NEW = 3, 11, 6
SCORES = np.random.default_rng(0).normal(size=(NEW, ROWS, VOCAB)).astype(np.float32)


def test_rows_end_at_stop_tokens_and_the_loop_when_all_have_ended():
    likeliest = SCORES.argmax(axis=-1)
    stops = int(likeliest[1, 0]), int(likeliest[3, 1]), int(likeliest[2, 2])
    ends = [next((n for n in range(NEW) if likeliest[n, row] in stops), NEW - 1) for row in range(ROWS)]
    picked = choice.Choice(NEW, family.SpecialTokens(stops=stops, pad=9), sampling.Sampling())
    first, add, goes_on = map(jax.jit, (picked.first, picked.add, picked.goes_on))
    part = choice.AnswerPart(np.zeros(ROWS, np.int32), np.full(ROWS, NEW, np.int32))
    found, count = first(SCORES[0], np.ones(ROWS, np.int32), part, np.uint32(0)), 1
    while goes_on(found):
        found, count = add(found, SCORES[count], part, np.uint32(0)), count + 1
    assert count == max(ends) + 1 and min(ends) < max(ends)
    for row, end in enumerate(ends):
        wanted = [*likeliest[: end + 1, row], *[9] * (NEW - end - 1)]
        assert found.tokens[row].tolist() == wanted


def test_rows_that_are_read_in_two_parts_draw_what_they_draw_in_one():
    picked = choice.Choice(NEW, family.SpecialTokens(forced_last=7), sampling.Sampling(temperature=1.0))
    first, add = map(jax.jit, (picked.first, picked.add))

    def drawn(begun, most):
        """Returns the tokens that each row adds, the scores of which are those of their numbers in the answer."""
        part = choice.AnswerPart(np.array(begun, np.int32), np.array(most, np.int32))
        own = [
            np.stack([SCORES[min(number + at, NEW - 1), row] for row, at in enumerate(begun)]) for number in range(NEW)
        ]
        found = first(own[0], np.full(ROWS, 4, np.int32), part, np.uint32(3))
        for number in range(1, NEW):
            found = add(found, own[number], part, np.uint32(3))
        return [found.tokens[row, :count].tolist() for row, count in enumerate(most)]

    once, cuts = drawn([0] * ROWS, [NEW] * ROWS), [1, 3, NEW - 1]
    parts = zip(drawn([0] * ROWS, cuts), drawn(cuts, [NEW - cut for cut in cuts]))
    assert [before + after for before, after in parts] == once
    assert [row[-1] for row in once] == [7] * ROWS
