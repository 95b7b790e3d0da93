import functools
import itertools
import json
import threading
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from zerojax.data import batches, tokenizer
from zerojax.data import source as source_lib
from zerojax.errors import UserError

BYTES = tokenizer.ByteTokenizer()
DOCUMENTS = [{"text": bytes([65 + i]) * (3 * i % 20)} for i in range(13)]  # of 0 to 19 bytes
SIZES = {"num_rows": 4, "seq_len": 8, "seed": 3}


def make(source=DOCUMENTS, rows=range(4), shuffle=True, **sizes):
    return batches.make_batches(source, BYTES, text_key="text", rows=list(rows), shuffle=shuffle, **(SIZES | sizes))


def make_random(rows=range(4), **sizes):
    return batches.random_batches(50, rows=list(rows), **(SIZES | sizes))


MAKERS = pytest.mark.parametrize("maker", [make, make_random], ids=["text", "random"])


def take(made, steps: int) -> list[np.ndarray]:
    """Takes `steps` batches and closes."""
    taken = [batch["tokens"] for batch in itertools.islice(made, steps)]
    made.close()
    return taken


def restored(made, state):
    made.set_state(json.loads(json.dumps(state)))
    return made


def documents_of(row: np.ndarray) -> list[bytes]:
    """Cuts one row's tokens at the separators; the last document may be cut off."""
    text = "".join(chr(token) for token in row)
    return [part.encode("latin-1") for part in text.split(chr(BYTES.bos_id))[1:]]


@MAKERS
@pytest.mark.parametrize("processes", [2, 4])
def test_rows_do_not_depend_on_the_number_of_processes(maker, processes):
    alone = take(maker(), 6)
    together = [take(maker(rows=range(i, 4, processes)), 6) for i in range(processes)]
    for step in range(6):
        for i in range(processes):
            np.testing.assert_array_equal(alone[step][i::processes], together[i][step])


@MAKERS
def test_rows_come_in_the_order_asked_for(maker):
    np.testing.assert_array_equal(take(maker(), 1)[0][[3, 1]], take(maker(rows=[3, 1]), 1)[0])


@MAKERS
@hypothesis.given(before=st.integers(0, 12), after=st.integers(1, 5))
@hypothesis.settings(max_examples=20, deadline=None)
def test_a_restored_state_continues_identically(maker, before, after):
    made = maker()
    for _ in range(before):
        next(made)
    state = made.get_state()
    expected = take(made, after)
    np.testing.assert_array_equal(expected, take(restored(maker(), state), after))


@MAKERS
def test_a_state_can_be_set_on_an_iterator_in_use(maker):
    made = maker()
    start = made.get_state()
    first = [next(made)["tokens"] for _ in range(3)]
    made.set_state(start)
    np.testing.assert_array_equal(first, take(made, 3))


@MAKERS
def test_a_global_state_restores_on_another_number_of_processes(maker):
    halves = [maker(rows=[0, 1]), maker(rows=[2, 3])]
    for half in halves:
        for _ in range(5):
            next(half)
    state = halves[0].get_state() | halves[1].get_state()
    expected = np.concatenate([take(half, 3) for half in halves], axis=1)
    np.testing.assert_array_equal(expected, take(restored(maker(), state), 3))
    for row in range(4):
        np.testing.assert_array_equal(expected[:, [row]], take(restored(maker(rows=[row]), state), 3))


@MAKERS
def test_the_state_is_that_of_the_last_returned_batch(maker):
    made = maker()
    states = [made.get_state()]
    for _ in range(4):
        next(made)
        time.sleep(0.02)  # the thread runs ahead
        states.append(made.get_state())
    made.close()
    assert len({json.dumps(state) for state in states}) == 5
    once = maker()
    next(once)
    assert once.get_state() == states[1]
    once.close()


def test_the_state_of_32_rows_is_small():
    made = make(rows=range(32), num_rows=32)
    next(made)
    assert list(made.get_state()) == [str(row) for row in range(32)]
    assert len(json.dumps(made.get_state())) < 8192
    made.close()


@pytest.mark.parametrize("small", [True, False], ids=["in memory", "index_shuffle"])
def test_an_epoch_is_a_permutation_and_the_next_another(small):
    size = 300 if small else batches.SMALL + 300
    order = functools.partial(batches.shuffled, size=size, seed=7)
    epochs = [list(map(order, range(epoch * size, (epoch + 1) * size))) for epoch in (0, 1, 5)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 3
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(size))
    assert epochs[1] != [batches.shuffled(n, size=size, seed=8) for n in range(size)]


@pytest.mark.parametrize("num_rows", [1, 4, 26])
def test_every_document_is_read_once_an_epoch(num_rows):
    source = [{"text": f"document {i:02d}"} for i in range(13)]
    epochs = 26 if num_rows == 1 else 2 * num_rows
    rows = np.concatenate(take(make(source, rows=range(num_rows), num_rows=num_rows, seq_len=11), epochs), axis=1)
    order = list(itertools.chain(*zip(*map(documents_of, rows))))  # each window has a separator and 11 bytes
    for start in range(0, len(order) - 12, 13):
        assert sorted(order[start : start + 13]) == [example["text"].encode() for example in source]
    if num_rows == 1:
        assert order[:13] != order[13:26], "each epoch is shuffled anew"


def test_without_shuffle_windows_are_the_concatenated_documents_in_order():
    stream = np.concatenate([[BYTES.bos_id, *example["text"]] for example in DOCUMENTS * 3])
    rows = np.concatenate(take(make(rows=[0], num_rows=1, shuffle=False), 20), axis=1)
    np.testing.assert_array_equal(rows[0], stream[: rows.shape[1]])


def test_row_r_reads_every_num_rows_th_document():
    for row in range(4):
        own = [DOCUMENTS[i % 13] for i in range(row, 200, 4)]
        stream = np.concatenate([[BYTES.bos_id, *example["text"]] for example in own])
        taken = np.concatenate(take(make(rows=[row], shuffle=False), 10), axis=1)
        np.testing.assert_array_equal(taken[0], stream[: taken.shape[1]])


def test_each_document_is_tokenized_once_an_epoch_over_all_processes():
    class Counting:
        vocab_size, document = BYTES.vocab_size, BYTES.document
        seen: list = []  # noqa: RUF012

        def encode(self, text):
            self.seen.append(text)
            return BYTES.encode(text)

    source = [{"text": f"{i:03d}" * 10} for i in range(400)]
    for rows in ([0, 1], [2, 3]):
        made = batches.make_batches(source, Counting(), text_key="text", rows=rows, **SIZES)
        take(made, 20)
    assert len(Counting.seen) > 20 and len(set(Counting.seen)) == len(Counting.seen)


def test_seeds_give_different_orders_and_epochs_do_not_repeat_a_neighbour():
    orders = {}
    for seed in (0, 1, 2, 2**40):
        source = [{"text": f"{i:03d}"} for i in range(50)]
        rows = np.concatenate(take(make(source, rows=[0], num_rows=1, seq_len=3, seed=seed), 100), axis=1)
        names = documents_of(rows[0])
        orders[seed, 0], orders[seed, 1] = tuple(names[:50]), tuple(names[50:])
    assert len(set(orders.values())) == len(orders)


@pytest.mark.parametrize("texts", [[""], [b"", "", b""], ["a"], ["long" * 500, ""]])
def test_very_short_and_very_long_documents_fill_every_window(texts):
    source = [{"text": text} for text in texts]
    for tokens in take(make(source), 5):
        assert tokens.shape == (4, 9) and tokens.dtype == np.int32
        assert tokens.min() >= 0 and tokens.max() <= BYTES.bos_id


def test_text_may_be_str_or_bytes():
    text, data = ([{"text": kind("some text")} for kind in kinds] for kinds in ([str], [str.encode]))
    np.testing.assert_array_equal(take(make(text), 3), take(make(data), 3))


def test_random_batches_depend_only_on_seed_row_and_index():
    made = make_random()
    for _ in range(3):
        next(made)
    state = made.get_state()["2"]
    fourth = take(made, 1)[0]
    assert state["index"] == 3
    expected = np.random.default_rng([3, 2, 3]).integers(50, size=9, dtype=np.int32)
    np.testing.assert_array_equal(fourth[2], expected)
    assert fourth.min() >= 0 and fourth.max() < 50
    assert not np.array_equal(fourth, take(make_random(seed=4), 4)[3])


@pytest.mark.parametrize("change", [{"num_rows": 5}, {"seq_len": 9}, {"seed": 4}])
@MAKERS
def test_a_state_of_other_settings_is_an_error(maker, change):
    made, other = maker(), maker(**change)
    ((key, value),) = change.items()
    with pytest.raises(UserError, match=f"row 0 was saved with {key}={value} and this run has {key}={SIZES[key]}"):
        made.set_state(other.get_state())
    made.close()
    other.close()


def test_a_state_of_other_data_is_an_error():
    made, others = make(), [make(DOCUMENTS[1:]), make(shuffle=False), make_random()]
    for other, key in zip(others, ("documents", "shuffle", "shuffle")):
        with pytest.raises(UserError, match=f"was saved with {key}="):
            made.set_state(other.get_state())
        other.close()
    made.close()


def test_a_state_without_a_row_is_an_error_and_changes_nothing():
    made = make()
    next(made)
    state = made.get_state()
    with pytest.raises(UserError, match="row 3 is not among the 3 saved rows"):
        made.set_state({row: state[row] for row in "012"})
    expected = take(restored(make(), state), 1)
    np.testing.assert_array_equal(expected, take(made, 1))


def test_an_empty_source_is_an_error():
    with pytest.raises(UserError, match="no documents"):
        make([])


def test_a_missing_text_key_shows_the_features():
    with pytest.raises(UserError, match="no feature 'text'; features: body, title"):
        make([{"body": "a", "title": "b"}])
    with pytest.raises(UserError, match="'text' is int, not text; features with text: title"):
        make([{"text": 3, "title": "b"}])


def test_an_error_in_the_thread_reaches_the_caller():
    class Broken(list):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    made = make(Broken(DOCUMENTS), shuffle=False)
    with pytest.raises(OSError, match="the disk is gone"):
        take(made, 50)
    made.close()


@MAKERS
def test_close_ends_the_thread_and_may_be_repeated(maker):
    before = threading.active_count()
    made = maker()
    next(made)
    assert threading.active_count() > before
    made.close()
    made.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(made)


def test_batches_that_are_dropped_end_their_thread():
    before = threading.active_count()
    made = make()
    next(made)
    del made
    assert threading.active_count() == before


def test_an_exit_with_open_batches_neither_hangs_nor_prints(commands):
    code = (
        "from zerojax.data import batches, tokenizer\n"
        "kept = batches.make_batches([{'text': 'abc'}] * 9, tokenizer.load_tokenizer('bytes'),\n"
        "    text_key='text', rows=range(64), num_rows=64, seq_len=512, seed=0)\n"
        "more = batches.random_batches(9, rows=[0], num_rows=1, seq_len=4, seed=0)\n"
        "next(kept), next(more)\n"
        "sys.exit()"
    )
    done = commands.python(code)
    assert (done.status, done.out, done.err) == (0, "", "")


def test_a_thousand_rows_are_workable():
    start = time.process_time()
    big, small = [{"text": "a"}] * (batches.SMALL + 1), [{"text": "a"}]
    take(make(big, rows=range(1024), num_rows=1024), 2)
    take(make(small, rows=range(1024), num_rows=1024), 2)
    tokens = take(make(rows=range(1024), num_rows=1024, seq_len=64), 2)
    assert tokens[1].shape == (1024, 65)
    assert time.process_time() - start < 10


def test_open_batches_opens_random_tokens_and_datasets_by_name(stdlib_dir):
    sizes = SIZES | {"rows": [0, 1], "text_key": "text", "is_train": False}
    random, stdlib = (
        batches.Places(name, stdlib_dir, "train", "validation") for name in (batches.RANDOM, "python_stdlib")
    )
    opened = batches.open_batches(random, BYTES, **sizes)
    expected = batches.random_batches(BYTES.vocab_size, rows=[0, 1], **SIZES)
    np.testing.assert_array_equal(take(opened, 2), take(expected, 2))
    stdlib = batches.open_batches(stdlib, BYTES, **sizes)
    opened = source_lib.open_source("python_stdlib", "validation", stdlib_dir)
    for row, tokens in enumerate(np.concatenate(take(stdlib, 4), axis=1)):
        stream = b"".join(opened[i]["text"] for i in range(row, len(opened), 4))
        assert stream.startswith(BYTES.decode(tokens).encode())


class Damaged(list):
    def __getitem__(self, index):
        if index == 5:
            raise UserError("data_dir: example 5 cannot be read")
        return super().__getitem__(index)


def test_an_example_that_cannot_be_read_raises_its_own_error_from_the_thread():
    made = make(Damaged(DOCUMENTS))
    with pytest.raises(UserError, match=r"example 5 cannot be read$"):
        for _ in range(20):
            next(made)
    made.close()


def test_a_document_that_no_tokenizer_reads_is_named():
    with pytest.raises(
        UserError, match=r"^document 1: a text holds half of a surrogate pair at its character 1, which"
    ):
        take(make([{"text": "a"}, {"text": "b\ud800"}], shuffle=False, num_rows=1, rows=[0]), 3)


@pytest.mark.parametrize("enough", [1, 50, 10**9])
def test_tokens_are_counted_up_to_what_is_enough(enough):
    made = make()
    assert made.count_tokens(enough) == min(enough, sum(1 + len(document["text"]) for document in DOCUMENTS))
    made.close()
    endless = make_random()
    assert endless.count_tokens(enough) == enough
    endless.close()


@pytest.mark.parametrize("key", ["train_file", "eval_file"])
def test_empty_documents_of_a_file_are_told_and_nothing_else_is_refused(tmp_path, key):
    path = tmp_path / "data.jsonl"
    sizes = {"text_key": "text", "rows": [0], "num_rows": 1, "seq_len": 8, "seed": 0}
    places = batches.Places("", "", "", "", train_file=str(path), eval_file=str(path))

    def opened(texts):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        batches.open_batches(places, BYTES, is_train=key == "train_file", **sizes).close()

    opened(["a", "b"])
    with pytest.warns(
        UserWarning, match=rf"^{key}: 2 of the first 3 documents have no text in 'text', such as .*:2; the model learns"
    ):
        opened(["a", "", " \n"])
    with pytest.raises(UserError, match=rf"^{key}: 2 of the first 2 documents have no text in 'text'"):
        opened(["", " "])
