"""Checks rows, prompts and answers of each objective. This module tests zerojax.data.objectives."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from zerojax.data import batches, objectives, tokenizer
from zerojax.errors import UserError

BYTES = tokenizer.load_tokenizer("bytes")
SPANS = objectives.OBJECTIVES["span_corruption"]
FOUR_ROWS = {"num_rows": 4, "seq_len": 32, "seed": 7}


def restored(inputs, targets):
    """Puts the spans of `targets` back into `inputs`."""
    spans, current = {}, None
    for token in targets[1:].tolist():
        if token in BYTES.sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [found for token in inputs.tolist() for found in spans.get(token, [token])]


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.integers(2, 700), st.integers(0, 10**6))
def test_spans_put_back_give_the_window_and_lengths_are_fixed(seq_len, position):
    form = SPANS.form(BYTES, seq_len)
    window = np.random.default_rng(0).integers(256, size=form.window, dtype=np.int32)
    row = form.arrays(window, (0, 1, position))
    assert {name: len(array) for name, array in row.items()} == objectives.lengths(SPANS.row(seq_len))
    assert all(array.dtype == np.int32 for array in row.values())
    assert row["targets"][0] == objectives.START
    assert restored(row["inputs"], row["targets"]) == window.tolist()


def test_a_sixth_of_a_window_is_cut_out_in_spans_of_three_tokens():
    form = SPANS.form(BYTES, 512)
    row = form.arrays(np.zeros(form.window, np.int32), (0, 0, 0))
    marks = np.isin(row["inputs"], BYTES.sentinels)
    noise = form.window - (~marks).sum()
    assert abs(noise / form.window - objectives.NOISE_DENSITY) < 0.5 / form.window
    assert abs(noise / marks.sum() - objectives.MEAN_SPAN) < 0.1
    expected = np.arange(257, 257 + marks.sum())
    np.testing.assert_array_equal(row["inputs"][marks], expected)
    in_targets = row["targets"][np.isin(row["targets"], BYTES.sentinels)]
    np.testing.assert_array_equal(in_targets, [*expected, expected[-1] + 1])


@pytest.mark.parametrize("seq_len", [*range(2, 40), 511])
def test_a_window_is_the_longest_whose_inputs_fit_with_a_token_kept_and_one_cut_at_least(seq_len):
    def sizes(window):
        noise = min(max(round(0.15 * window), 1), window - 1)
        return noise, max(round(noise / 3), 1)

    fitting = [n for n in range(2, 2 * seq_len + 2) if n - sizes(n)[0] + sizes(n)[1] == seq_len]
    assert SPANS.form(BYTES, seq_len).window == max(fitting)
    assert objectives.lengths(SPANS.row(seq_len)) == {"inputs": seq_len, "targets": sum(sizes(max(fitting))) + 2}


def test_spans_depend_only_on_the_key_and_differ_between_keys():
    form, window = SPANS.form(BYTES, 64), np.arange(200, dtype=np.int32)
    window = window[: form.window]
    rows = [
        form.arrays(window, key)["inputs"].tolist() for key in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 4), (1, 1, 2, 3))
    ]
    assert rows[0] == rows[1] and rows[0] not in rows[2:] and rows[2] != rows[3]


def test_every_partition_is_drawn():
    random = np.random.RandomState(0)
    drawn = {tuple(objectives._partition(random, 5, 3)) for _ in range(200)}
    assert drawn == {(1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)}


@pytest.mark.parametrize("text", [True, False], ids=["text", "random tokens"])
def test_batches_of_spans_resume_exactly_with_other_processes_reading_the_rows(text):
    form = SPANS.form(BYTES, FOUR_ROWS["seq_len"])

    def opened(rows):
        if text:
            documents = [{"text": "x" * n} for n in range(1, 40)]
            return batches.make_batches(documents, BYTES, text_key="text", rows=rows, **FOUR_ROWS, form=form)
        return batches.random_batches(256, rows=rows, **FOUR_ROWS, form=form)

    every = opened(range(4))
    next(every)
    state, second = every.get_state(), next(every)
    for rows in ([0, 1], [2, 3]):
        part = opened(rows)
        part.set_state(state)
        for name, array in next(part).items():
            np.testing.assert_array_equal(array, second[name][rows])
        part.close()
    every.close()


def test_a_length_that_cannot_be_corrupted_is_an_error():
    with pytest.raises(UserError, match=r"^seq_len: must be 2 or more for span corruption, and is 1"):
        SPANS.row(1)
    with pytest.raises(UserError, match=r"^tokenizer: .* sentinels, and the tokenizer has 63"):
        SPANS.form(BYTES, 4096)


def test_gaps_of_a_prompt_become_sentinels_and_answers_fill_them():
    inputs, start = SPANS.prompt(BYTES, "a ___ c ___")
    assert inputs["inputs"].tolist() == [*b"a ", 257, *b" c ", 258] and start.tolist() == [objectives.START]
    answer = np.array([0, 257, *b"bb", 258, *b"d", 259, *b"rest"])
    assert SPANS.answer(BYTES, "a ___ c ___", answer) == "a bb c d"
    assert SPANS.answer(BYTES, "a ___ c ___", answer[:4]) == "a bb c ___"


def test_more_gaps_than_sentinels_are_refused():
    with pytest.raises(UserError, match=r"^text: has 64 gaps \(___\), and the tokenizer has 63 sentinels"):
        SPANS.prompt(BYTES, "a___" * 64)


def test_a_prompt_without_a_gap_is_continued():
    inputs, _ = SPANS.prompt(BYTES, "def ")
    assert inputs["inputs"].tolist() == [*b"def ", 257]
    assert SPANS.answer(BYTES, "def ", np.array([0, 257, *b"f", 258])) == "def f"


def test_the_first_answer_to_a_sentinel_counts():
    assert SPANS.answer(BYTES, "___", np.array([0, 257, *b"x", 257, *b"y"])) == "x"


def test_next_token_rows_are_the_windows():
    following = objectives.OBJECTIVES["next_token"]
    assert objectives.lengths(following.row(8)) == {"tokens": 9}
    form = following.form(BYTES, 8)
    window = np.arange(form.window)
    assert form.arrays(window, (0,))["tokens"] is window
    inputs, start = following.prompt(BYTES, "ab")
    assert inputs == {} and start.tolist() == [256, *b"ab"]
    assert following.answer(BYTES, "ab", np.array([256, *b"abc"])) == "abc"


@dataclasses.dataclass(frozen=True)
class NoSentinels:
    sentinels: tuple = ()


def test_next_tokens_need_no_sentinels():
    assert objectives.OBJECTIVES["next_token"].form(NoSentinels(), 8).window == 9
