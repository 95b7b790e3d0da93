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
    found, count = first(SCORES[0], np.ones(ROWS, np.int32), np.uint32(0)), 1
    while goes_on(found):
        found, count = add(found, SCORES[count], np.uint32(0)), count + 1
    assert count == max(ends) + 1 and min(ends) < max(ends)
    for row, end in enumerate(ends):
        wanted = [*likeliest[: end + 1, row], *[9] * (NEW - end - 1)]
        assert found.tokens[row].tolist() == wanted
