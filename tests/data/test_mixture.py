"""Checks the stream of rows of several sources. This module tests zerojax.data.mixture."""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json

import fsspec
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from zerojax.data import batches, damaged, mixture, objectives, tokenizer
from zerojax.data.pairs import tasks
from zerojax.errors import UserError

BYTES = tokenizer.ByteTokenizer()
ROWS, LENGTH = 8, 64
FORM = tasks.RowForm(False, LENGTH, 8, 0, 256, 256, (256,))
CHAT = tasks.TaskSettings("chat", "", "", (), "messages", "plain")
OF_TEXT = {"tokens": LENGTH + 1, "sources": LENGTH + 1}
MIXED = dict.fromkeys(("tokens", "labeled", "segments", "sources"), LENGTH + 1)
ROUNDING = 1.5 / ROWS  # a batch has whole rows, and shares are shifted towards what is missing


def write(folder, name, count, letter):
    """Writes documents that hold their source and number: "a012 aaa"."""
    texts = [f"{letter}{number:03d} {letter * (number * 7 % 23)}" for number in range(count)]
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def source(path, title="", **how):
    return mixture.MixedSource(title or path.stem, batches.Places("", "", "", "", str(path)), **how)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Two texts and conversations."""
    folder = tmp_path_factory.mktemp("three")
    write(folder, "a.jsonl", 300, "a")
    write(folder, "b.jsonl", 40, "b")
    chats = [
        [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "c" * (1 + n % 7)}] for n in range(50)
    ]
    (folder / "c.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return [
        source(folder / "a.jsonl", weight=((0, 3.0), (20, 1.0))),
        source(folder / "b.jsonl", weight=((0, 1.0), (20, 2.0))),
        source(folder / "c.jsonl", task=CHAT),
    ]


def maker(lengths=OF_TEXT, **how):
    return mixture.RowMaker(BYTES, objectives.NextToken().form(BYTES, LENGTH), FORM, lengths, **how)


def mixed(sources, lengths=MIXED, num_rows=ROWS, **how):
    return mixture.SourceMixture(sources, maker(lengths), num_rows, **how)


@contextlib.contextmanager
def opened(found, own=range(ROWS), num_rows=ROWS, seed=3, is_train=True):
    made = found.open(is_train, list(own), num_rows, seed)
    try:
        yield made
    finally:
        made.close()


def take(found, steps, own=range(ROWS), state=None, **how):
    """Takes batches and returns them with the state after the last."""
    with opened(found, own, **how) as made:
        if state is not None:
            made.set_state(json.loads(json.dumps(state)))
        return list(itertools.islice(made, steps)), made.get_state()


def hashed(taken):
    """Returns a hash of each row of each step: of all its arrays."""
    return [
        [
            hashlib.sha256(b"".join(batch[name][row].tobytes() for name in sorted(batch))).hexdigest()
            for row in range(len(batch["tokens"]))
        ]
        for batch in taken
    ]


def text_of(rows):
    """Returns the documents of a row's windows, but the last, which may be cut."""
    tokens = np.concatenate(rows).tolist()
    return "".join(chr(token) for token in tokens).split(chr(BYTES.bos_id))[1:-1]


# ---- the same stream, wherever and whenever it is read


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    stops=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    hosts=st.lists(st.permutations(range(ROWS)), min_size=6, max_size=6),
    cuts=st.lists(st.sets(st.integers(1, ROWS - 1), max_size=4), min_size=6, max_size=6),
    by=st.sampled_from(mixture.BY),
)
def test_a_mixture_that_stops_and_goes_on_with_other_hosts_is_the_same_stream_hash_for_hash(
    three, stops, hosts, cuts, by
):
    whole, _ = take(mixed(three, by=by), sum(stops) + 3)
    expected, state, step = hashed(whole), None, 0
    for count, rows, cut in zip([*stops, 3], hosts, cuts):
        ends = [0, *sorted(cut), ROWS]
        found, states = {}, {}
        for begin, end in itertools.pairwise(ends):  # each host has its own rows, in any order
            own = list(rows[begin:end])
            taken, after = take(mixed(three, by=by), count, own, state)
            states |= after
            for at, row in enumerate(own):
                found[row] = [hashes[at] for hashes in hashed(taken)]
        for at in range(count):
            assert [found[row][at] for row in range(ROWS)] == expected[step + at]
        state, step = states, step + count


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_stream_does_not_depend_on_the_number_of_workers(three, monkeypatch, workers):
    plain = batches.Batches.__init__

    def with_workers(self, *arguments):
        plain(self, *arguments, workers=workers)

    expected = hashed(take(mixed(three), 12)[0])
    monkeypatch.setattr(batches.Batches, "__init__", with_workers)
    assert hashed(take(mixed(three), 12)[0]) == expected


def test_a_source_has_the_same_documents_whatever_is_mixed_with_it(three):
    alone, _ = take(mixed(three[:1], OF_TEXT), 40)
    both, _ = take(mixed(three[:2], OF_TEXT), 40)
    for row in range(ROWS):
        own = [batch["tokens"][row] for batch in both if batch["sources"][row, 0] == 1]
        found, expected = text_of(own), text_of([batch["tokens"][row] for batch in alone])
        assert len(found) > 10 and found == expected[: len(found)]


def test_a_state_of_other_sources_or_settings_is_refused(three):
    _, state = take(mixed(three), 2)
    for other, key in (
        (mixed(three[:2]), "source_2"),
        (mixed(three[::-1]), "source_0"),
        (mixed(three, by="examples"), "mixed_by"),
    ):
        if key == "source_2":
            with opened(other) as made:  # fewer sources: the rest of a position is not read
                made.set_state(state)
            continue
        with opened(other) as made, pytest.raises(UserError, match=f"row 0 was saved with {key}="):
            made.set_state(state)


# ---- shares


@pytest.mark.parametrize("by", mixture.BY)
def test_each_batch_has_its_sources_in_their_shares_while_weights_change(three, by):
    sources = [dataclasses.replace(one, task=None) for one in three[:2]]
    taken, _ = take(mixed(sources, OF_TEXT, by=by), 60)
    shares = np.array([[np.mean(batch["sources"] == number) for number in (1, 2)] for batch in taken])
    weights = np.array([[one.weight_at(step) for one in sources] for step in range(60)])
    expected = weights / weights.sum(1, keepdims=True)
    if by == "tokens":
        assert abs(shares - expected).max() < ROUNDING
        np.testing.assert_allclose(shares.mean(0), expected.mean(0), atol=0.02)
    begun = collections.Counter(
        int(number) for batch in taken for number in batch["sources"][batch["tokens"] == BYTES.bos_id]
    )
    if by == "examples":
        assert abs(begun[1] / begun.total() - expected.mean(0)[0]) < 0.03


def test_by_tokens_padding_does_not_count(three):
    found = mixed([dataclasses.replace(one, weight=((0, 1.0),)) for one in three])
    taken, _ = take(found, 160)
    read = [sum(int(np.sum(batch["sources"] == number)) for batch in taken) for number in (1, 2, 3)]
    np.testing.assert_allclose(np.array(read) / sum(read), 1 / 3, atol=0.02)
    assert any((batch["sources"] == 0).any() for batch in taken), "some rows have padding"


def test_by_examples_each_source_begins_as_many(three):
    equal = [dataclasses.replace(one, weight=((0, 1.0),)) for one in three]
    taken, _ = take(mixed(equal, by="examples"), 150)
    begun = collections.Counter()
    for batch in taken:
        for row in range(ROWS):
            number = int(batch["sources"][row].max())
            of_text = int((batch["tokens"][row] == BYTES.bos_id).sum())
            begun[number] += int(batch["segments"][row].max()) if number == 3 else of_text
    np.testing.assert_allclose(np.array([begun[n] for n in (1, 2, 3)]) / begun.total(), 1 / 3, atol=0.03)


@pytest.mark.parametrize("step, weight", [(0, 4.0), (9, 4.0), (10, 4.0), (15, 3.0), (20, 2.0), (10**6, 2.0)])
def test_weights_are_linear_between_their_steps_and_constant_outside(tmp_path, step, weight):
    assert source(tmp_path / "x", weight=((10, 4.0), (20, 2.0))).weight_at(step) == weight


def test_a_source_without_weight_is_not_read(three):
    sources = [
        dataclasses.replace(three[0], weight=((0, 1.0),)),
        dataclasses.replace(three[1], weight=((4, 0.0), (5, 1.0))),
    ]
    taken, _ = take(mixed(sources, OF_TEXT), 8)
    assert [int(batch["sources"].max()) for batch in taken] == [1, 1, 1, 1, 1, 2, 2, 2]


# ---- rows


def test_every_document_is_read_once_in_an_epoch_over_all_rows(tmp_path):
    texts = write(tmp_path, "a.jsonl", 400, "a")
    found = mixed([source(tmp_path / "a.jsonl")], {"tokens": LENGTH + 1})
    tokens = sum(len(text) + 1 for text in texts)
    taken, _ = take(found, tokens // (ROWS * (LENGTH + 1)) + 2)
    read = collections.Counter(
        text for row in range(ROWS) for text in text_of([batch["tokens"][row] for batch in taken])
    )
    assert set(read) <= set(texts) and len(read) > 0.95 * len(texts)
    assert max(read.values()) <= 2, "a row may begin the next epoch before others end this one"


def test_rows_of_a_task_are_whole_examples_with_their_labels_and_segments(three):
    (batch, *_), _ = take(mixed(three[2:]), 1)
    for row in range(ROWS):
        tokens, labeled, segments = (batch[name][row] for name in ("tokens", "labeled", "segments"))
        for segment in range(1, segments.max() + 1):
            text = BYTES.decode(tokens[segments == segment])
            assert text.startswith("### user\nq") and text.rstrip().endswith("c")
            answer = tokens[(segments == segment) & (labeled > 0)]
            assert BYTES.decode(answer).strip("c") == "" and answer[-1] == 256
        assert not labeled[segments == 0].any()
        np.testing.assert_array_equal(batch["sources"][row], segments > 0)


def test_rows_of_text_beside_those_of_a_task_have_all_their_tokens_labeled(three):
    taken, _ = take(mixed(three), 4)
    rows = [(batch, row) for batch in taken for row in range(ROWS) if batch["sources"][row].max() < 3]
    assert rows and all(batch["labeled"][row].all() and (batch["segments"][row] == 1).all() for batch, row in rows)


def test_without_packing_a_row_has_one_example(three):
    make = maker({"tokens": LENGTH + 1, "labeled": LENGTH + 1}, packs=False)
    taken, _ = take(mixture.SourceMixture(three[2:], make, ROWS), 3)
    assert all(BYTES.decode(row).count("### user") == 1 for batch in taken for row in batch["tokens"])


def test_held_out_examples_are_in_stored_order_and_the_same_each_time(tmp_path):
    write(tmp_path, "a.jsonl", 30, "a")
    texts = write(tmp_path, "b.jsonl", 30, "b")
    one = source(tmp_path / "a.jsonl")
    one = dataclasses.replace(one, places=dataclasses.replace(one.places, eval_file=str(tmp_path / "b.jsonl")))
    found = mixed([one, source(tmp_path / "a.jsonl", "other")], OF_TEXT, num_rows=1)
    assert found.held_out == [one]
    taken, _ = take(found, 12, [0], num_rows=1, is_train=False)
    read = text_of([batch["tokens"][0] for batch in taken])
    assert read == (2 * texts)[: len(read)] and len(read) > 30


def test_one_of_several_processes_reads_the_blocks_of_its_rows_alone(tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl", 2000, "a")
    found, read = mixed([source(tmp_path / "a.jsonl")], {"tokens": LENGTH + 1}), []
    plain = type(found._train[0]).several
    monkeypatch.setattr(
        type(found._train[0]), "several", lambda self, indices: read.extend(indices) or plain(self, indices)
    )
    take(found, 3, [5])
    assert len(read) <= 2 * found._train[0].group < len(found._train[0]) / 4


# ---- what cannot be read


def damage(folder, *, at, kind="json"):
    lines = (folder / "a.jsonl").read_text().splitlines()
    lines[at] = '{"text": ' if kind == "json" else '{"body": 1}'
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("kind, line", [("json", "is not JSON"), ("field", "has no text in field 'text'")])
def test_a_malformed_line_is_told_with_file_and_number_after_the_batches_before_it(tmp_path, kind, line):
    write(tmp_path, "a.jsonl", 400, "a")
    damage(tmp_path, at=123, kind=kind)
    with opened(mixed([source(tmp_path / "a.jsonl")], {"tokens": LENGTH + 1})) as made:
        taken, told_at = 0, None
        with pytest.raises(UserError, match=rf"a\.jsonl:124: {line}.*; or set `on_bad=skip` to go on without"):
            for _ in range(200):
                next(made)
                taken += 1
                if made.failure is not None and told_at is None:
                    told_at = taken
    assert told_at is not None and taken - told_at == batches.IN_HAND - 1, (
        "all processes can save before the last batch"
    )


@pytest.mark.parametrize("kind", ["json", "field"])
def test_a_malformed_line_is_skipped_and_counted_and_the_rest_is_as_before(tmp_path, kind):
    texts = write(tmp_path, "a.jsonl", 400, "a")
    damage(tmp_path, at=123, kind=kind)
    found = mixed([source(tmp_path / "a.jsonl")], {"tokens": LENGTH + 1}, on_bad=damaged.SKIP)
    taken, _ = take(found, 80)
    read = {text for row in range(ROWS) for text in text_of([batch["tokens"][row] for batch in taken])}
    assert texts[123] not in read and len(read) > 390
    with opened(found) as made:
        (line,) = found.summary(made)
    assert (
        line.startswith("documents that could not be read and were skipped since the start: 1; ")
        and "a.jsonl:124" in line
    )


@pytest.mark.parametrize("what", ["missing", "empty", "blank"])
def test_a_source_that_is_missing_or_empty_is_one_line_or_left_out(tmp_path, three, what):
    path = tmp_path / "gone.jsonl"
    if what != "missing":
        path.write_text("" if what == "empty" else "\n \n" * 50)
    sources = [three[0], source(path, where="config.data.sources[1].")]
    with pytest.raises(
        UserError, match=r"^config\.data\.sources\[1\]\.train_file: .*(there is no file|has no examples)"
    ):
        mixed(sources)
    found = mixed(sources, OF_TEXT, on_bad=damaged.SKIP)
    assert len(found.notes) == 1 and found.notes[0].startswith(
        "source gone is left out: config.data.sources[1].train_file"
    )
    taken, state = take(found, 3)
    assert all((batch["sources"] == 1).all() for batch in taken)
    assert not any(key.startswith("source_1") for key in state["0"])
    with pytest.raises(UserError, match=r"^sources: none of them can be read"):
        mixed(sources[1:], on_bad=damaged.SKIP)


def test_a_run_goes_on_without_a_source_that_was_lost(tmp_path, three):
    write(tmp_path, "b.jsonl", 40, "b")
    sources = [three[0], source(tmp_path / "b.jsonl")]
    _, state = take(mixed(sources, OF_TEXT), 3)
    (tmp_path / "b.jsonl").unlink()
    taken, _ = take(mixed(sources, OF_TEXT, on_bad=damaged.SKIP), 2, state=state)
    assert all((batch["sources"] == 1).all() for batch in taken)


def test_a_source_of_nothing_but_damaged_lines_ends_the_run_also_where_they_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "_MOST_BAD", 20)
    (tmp_path / "a.jsonl").write_text("{\n" * 100)
    found = mixed([source(tmp_path / "a.jsonl")], {"tokens": LENGTH + 1}, on_bad=damaged.SKIP)
    with pytest.raises(UserError, match=r"^source a: \d+ documents in succession cannot be read \(.*is not JSON"):
        take(found, 1)


def test_a_file_that_vanishes_in_the_middle_is_one_line(tmp_path):
    write(tmp_path, "a.jsonl", 3000, "a")
    with opened(mixed([source(tmp_path / "a.jsonl")], {"tokens": LENGTH + 1})) as made:
        next(made)
        (tmp_path / "a.jsonl").unlink()
        with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(No such file or directory\)"):
            for _ in range(1000):
                next(made)


# ---- elsewhere, and what is told


def test_a_source_elsewhere_gives_the_stream_of_the_same_file_here(tmp_path, monkeypatch):
    from zerojax.data import blocks

    monkeypatch.setattr(blocks, "_LEAST_REMOTE", blocks._LEAST)
    write(tmp_path, "a.jsonl", 200, "a")
    fsspec.filesystem("memory").pipe("/mix/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
    there = mixture.MixedSource("a", batches.Places("", "", "", "", "memory://mix/*.jsonl"))
    streams = [take(mixed([one], {"tokens": LENGTH + 1}), 10) for one in (source(tmp_path / "a.jsonl"), there)]
    assert hashed(streams[0][0]) == hashed(streams[1][0]) and streams[0][1] == streams[1][1]


def test_it_is_told_how_often_each_source_is_read(tmp_path):
    texts = {name: write(tmp_path, f"{name}.jsonl", count, name) for name, count in (("a", 2000), ("b", 60))}
    found = mixed([source(tmp_path / f"{name}.jsonl") for name in "ab"], OF_TEXT)
    steps = 100
    lines = found.told(steps)
    for line, name in zip(lines, "ab"):
        tokens = sum(len(text) + 1 for text in texts[name])
        times = float(line.partition("read ")[2].partition(" times")[0])
        assert line.startswith(f"source {name}: 50.0% of the tokens; about ") and ("upsampled" in line) == (name == "b")
        np.testing.assert_allclose(times, steps * ROWS * (LENGTH + 1) / 2 / tokens, rtol=0.2)  # of a sample
    with opened(found) as made:
        for _ in range(steps):
            next(made)
        (line,) = found.summary(made)
    read = dict(zip("ab", (float(part.split()[-2]) for part in line.split(": ")[1].split(", "))))
    for name in "ab":
        tokens = sum(len(text) + 1 for text in texts[name])
        np.testing.assert_allclose(
            read[name], steps * ROWS * (LENGTH + 1) / 2 / tokens, rtol=0.3
        )  # of groups of blocks
