"""Checks that rows hold each example once. This module tests zerojax.data.pairs.rows."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from zerojax.data import tokenizer
from zerojax.data.pairs import rows, tasks
from zerojax.errors import UserError

BYTES = tokenizer.load_tokenizer("bytes")
ONE = tasks.RowForm(False, 16, 4, 0, 256, 256, (256,))
PAIR = tasks.RowForm(True, 16, 4, 0, 256, None, (256,))
SETTINGS = tasks.TaskSettings("seq2seq", "{text}", "{label}", (), "", "")


def examples(form, count=9):
    source = [{"text": "abcdefgh"[: i % 7], "label": str(i)} for i in range(count)]
    return tasks.encode(source, BYTES, SETTINGS, form, name="f").examples


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 40).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.integers(1, most)))))
def test_packing_holds_each_index_once_and_never_opens_a_group_that_another_has_room_for(case):
    most, sizes = case
    groups = rows.pack(sizes, most)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    filled = [sum(sizes[index] for index in group) for group in groups]
    assert all(total <= most for total in filled)
    assert all(one + other > most for i, one in enumerate(filled) for other in filled[:i])


def test_a_packed_row_gives_back_its_examples():
    given = examples(ONE)
    made = rows.Rows(given, ONE, packs=True)
    assert len(made) < len(given)
    found = []
    for number in range(len(made)):
        row = made.arrays(number)
        assert {name: array.shape for name, array in row.items()} == dict.fromkeys(
            ("tokens", "labeled", "segments"), (17,)
        )
        for segment in range(1, row["segments"].max() + 1):
            part = row["segments"] == segment
            found.append((tuple(row["tokens"][part]), tuple(row["labeled"][part])))
        assert not row["labeled"][row["segments"] == 0].any()
    assert sorted(found) == sorted((tuple(e.inputs), tuple(e.labeled.astype(int))) for e in given)


@pytest.mark.parametrize("form", [ONE, PAIR], ids=["decoder", "encoder-decoder"])
def test_a_pair_is_both_rows_of_one_prompt_beside_each_other(form):
    chosen = examples(form)
    rejected = [example._replace(labeled=example.labeled & False) for example in chosen]
    made, (one, other) = (
        rows.Pairs(chosen, rejected, form),
        (rows.Rows(e, form, packs=False) for e in (chosen, rejected)),
    )
    made.reference[:] = np.arange(18, dtype=np.float32).reshape(9, 2) / 7
    for number in (0, 8, 9):
        found, a, b = made.arrays(number), one.arrays(number), other.arrays(number)
        assert {name: len(array) for name, array in found.items()} == rows.of_pair(rows.lengths(form, packs=False), 2)
        for name in a:
            wanted = a[name] if name in ("inputs", "mask") else np.concatenate([a[name], b[name]])
            np.testing.assert_array_equal(found[name], wanted)
        np.testing.assert_array_equal(found["reference"].view(np.float32), made.reference[number % 9])


@pytest.mark.parametrize("form", [ONE, PAIR], ids=["decoder", "encoder-decoder"])
def test_a_third_answer_is_that_of_the_next_example_to_this_ones_prompt(form):
    given = examples(form)
    made = rows.Pairs(given, given, form, 3)
    for number in (0, 8):
        own, other, third = given[number], given[(number + 1) % 9], made.answers[2].examples[number]
        if form.is_encoder_decoder:
            assert third[:3] == (own.inputs, other.targets, other.labeled)
            continue
        wanted = [*own.inputs[: own.prompt], *other.inputs[other.prompt :]]
        assert third.inputs.tolist() == wanted[:17]
        assert third.labeled[: own.prompt].sum() == 0 and third.labeled[own.prompt :].all()
    found = made.arrays(3)
    assert {name: len(array) for name, array in found.items()} == rows.of_pair(rows.lengths(form, packs=False), 3)


def test_a_third_answer_is_never_one_to_the_same_prompt():
    first, *_, last = examples(PAIR)
    given = [first, first, last, first]
    made = rows.Pairs(given, given, PAIR, 3)
    others = [example.targets.tolist() for example in made.answers[2].examples]
    assert others == [one.targets.tolist() for one in (last, last, first, last)]
    for few in ([first], [first, first]):
        with pytest.raises(UserError, match=f"the {len(few)} pairs have one prompt"):
            rows.Pairs(few, few, PAIR, 3)


def test_an_encoder_decoders_row_is_padded_with_a_mask():
    given = examples(PAIR)
    row = rows.Rows(given, PAIR, packs=True).arrays(4)
    assert {name: len(array) for name, array in row.items()} == {"inputs": 16, "mask": 16, "targets": 5, "labeled": 5}
    np.testing.assert_array_equal(row["inputs"][row["mask"] > 0], given[4].inputs)
    np.testing.assert_array_equal(row["targets"][row["labeled"] > 0], given[4].targets[1:])
    made = rows.Rows(given, PAIR, packs=True)
    assert made.filled() == np.mean([made.arrays(number)["mask"] for number in range(len(made))])


def test_an_epoch_reads_each_row_once_and_held_out_rows_end_without_labels():
    made = rows.Rows(examples(PAIR, 8), PAIR, packs=False)
    train = rows.open_batches(made, range(4), 4, 0, shuffle=True, settings={})
    batches = [next(train)["targets"] for _ in range(4)]
    train.close()
    epochs = [sorted(map(tuple, np.concatenate(batches[at : at + 2]))) for at in (0, 2)]
    assert epochs[0] == epochs[1] and len(set(epochs[0])) == 8 and not np.array_equal(batches[0], batches[2])
    held = rows.open_batches(
        rows.Rows(examples(PAIR, 6), PAIR, packs=False), range(4), 4, 0, shuffle=False, settings={}
    )
    labeled = [next(held)["labeled"].any(axis=1).tolist() for _ in range(2)]
    held.close()
    assert labeled == [[True] * 4, [True, True, False, False]]
