"""Checks batches, and the mean over held-out ones. This module tests zerojax.data.feed."""

import numpy as np
import pytest
import runs

from zerojax.data import parts, source, tokenizer
from zerojax.errors import UserError
from zerojax.trainer import program

BYTES = tokenizer.load_tokenizer("bytes")


def opened(folder, **changes):
    built = program.build(runs.config(**changes), tokenizer_vocab=BYTES.vocab_size)
    return program.open_feed(built, BYTES, folder)


@pytest.mark.parametrize("changes", [{}, {"grad_accum": 2, "global_batch_size": 16}], ids=["one pass", "two passes"])
def test_the_global_batch_has_every_row_once_and_the_steps_batch_sharding(tmp_path, changes):
    streams = opened(tmp_path, **changes)
    tokens = streams.next()["tokens"]
    built = program.build(runs.config(**changes), tokenizer_vocab=BYTES.vocab_size)
    assert tokens.sharding == built.batch_sharding
    rows = np.asarray(tokens).reshape(-1, tokens.shape[-1])
    assert rows.shape == (built.sizes.global_batch_size, 33) and len(np.unique(rows, axis=0)) == len(rows)
    assert set(streams.position()) == {str(row) for row in range(len(rows))}
    streams.close()


def test_moving_back_repeats_the_same_batches(tmp_path):
    streams = opened(tmp_path)
    start = streams.position()
    first = [np.asarray(streams.next()["tokens"]) for _ in range(2)]
    streams.move_to(start)
    again = [np.asarray(streams.next()["tokens"]) for _ in range(2)]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    streams.close()


def test_without_a_held_out_split_there_is_no_evaluation_loss(tmp_path):
    streams = opened(tmp_path)
    assert streams.held_out_mean(lambda batch: batch["tokens"].mean(), 1) is None
    streams.close()


def test_the_feed_counts_how_often_an_evaluation_reads_its_text(stdlib_dir):
    text = {"data__name": "python_stdlib", "data__eval_split": "validation"}
    rare, often = (opened(stdlib_dir, **text, evaluate__batches=count) for count in (1, 4000))
    held_out = source.open_source("python_stdlib", "validation", stdlib_dir)
    held = sum(1 + len(held_out[index]["text"]) for index in range(len(held_out)))
    assert rare.times == 1 and often.times == 4000 * 8 * 33 / held > 1
    with pytest.raises(
        UserError, match=r"^config\.evaluate\.batches: 1000000 batches of 264 tokens would read .*batches=\d+$"
    ) as caught:
        opened(stdlib_dir, **text, evaluate__batches=10**6)
    offered = int(str(caught.value).rpartition("=")[2])
    exact = opened(stdlib_dir, **text, evaluate__batches=offered)
    assert offered == held // (8 * 33) and exact.times == 1
    hundred = opened(stdlib_dir, **text, evaluate__batches=100 * held // (8 * 33))
    with pytest.raises(UserError, match="would read"):
        opened(stdlib_dir, **text, evaluate__batches=100 * held // (8 * 33) + 1)
    for streams in (rare, often, exact, hundred):
        streams.close()


TASKS = {
    "decoder": {"data__task": "seq2seq", "data__pack": False},
    "packed": {"data__task": "seq2seq", "data__pack": True},
    "encoder-decoder": {"data__task": "seq2seq", "model__preset": "bart_test"},
    "classifier": {"data__task": "classification", "model__preset": "bert_test", "data__labels": ("0", "1", "2")},
    "pairs of answers": {"data__task": "dpo", "data__answer": "{label}", "data__rejected": "{text}n"},
}


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("name", TASKS)
def test_an_evaluations_mean_is_that_of_all_labels_whatever_batches_they_are_in(tmp_path, name, accum):
    """Answers are of several lengths, and the last batch is not full. Of pairs the mean is that of the pairs."""
    lines = [{"text": "x" * (n % 4), "label": n % 3 if name == "classifier" else "y" * (1 + n % 6)} for n in range(45)]
    files = dict.fromkeys(("data__train_file", "data__eval_file"), runs.write_lines(tmp_path / "a.jsonl", lines))
    settings = {**files, "data__answer": "{label}", "data__answer_len": 8, "data__prompt": "{text}", **TASKS[name]}
    _, streams, found = runs.opened(**settings, grad_accum=accum, global_batch_size=8 * accum)
    seen = []

    def measure(batch):
        labels = np.asarray(parts.labeled(batch))
        values = np.asarray(batch["labels" if "labels" in batch else "targets" if "targets" in batch else "tokens"])
        terms = np.arange(1, labels.size + 1).reshape(labels.shape) + values[..., -labels.shape[-1] :]
        if found.has_pairs:
            labels, terms = labels.any(axis=-1), terms[:, 0]
        seen.append((terms[labels > 0].sum(), (labels > 0).sum()))
        return seen[-1][0] / seen[-1][1]

    mean = streams.held_out_mean(measure, 0)
    counts = [count for _, count in seen]
    assert sum(counts) == len(lines) if found.has_pairs else sum(int(e.labeled.sum()) for e in found.train.examples)
    assert len(seen) > 1 and len(set(counts)) > 1, "batches of one size would not tell the two means apart"
    assert mean == pytest.approx(sum(total for total, _ in seen) / sum(counts), rel=1e-6)
    streams.close()


def test_an_evaluations_mean_of_text_is_that_of_its_batches(tmp_path, stdlib_dir):
    streams = opened(stdlib_dir, data__name="python_stdlib", data__eval_split="validation", evaluate__batches=3)
    values = iter([1.0, 2.0, 6.0])
    assert streams.held_out_mean(lambda batch: next(values), 3) == 3.0
    streams.close()


@pytest.mark.parametrize("accum", [1, 2])
def test_parts_of_rows_on_devices_are_the_rows_of_a_feed_without_parts(tmp_path, accum):
    sizes = {"grad_accum": accum, "global_batch_size": 16}
    whole, cut = (opened(tmp_path, **sizes, **mesh) for mesh in ({}, {"mesh__data": 2, "mesh__context": 4}))
    rows, parts = np.asarray(whole.next()["tokens"]), cut.next()
    np.testing.assert_array_equal(parts["tokens"], rows[..., :-1])
    np.testing.assert_array_equal(parts["labels"], rows[..., 1:])
    built = program.build(runs.config(**sizes, mesh__data=2, mesh__context=4), tokenizer_vocab=BYTES.vocab_size)
    assert {name: (a.shape, a.dtype, a.sharding) for name, a in parts.items()} == {
        name: (a.shape, a.dtype, a.sharding) for name, a in built.abstract_batch.items()
    }
    assert {shard.data.shape[-2:] for shard in parts["tokens"].addressable_shards} == {(16 // accum // 2, 8)}
    for streams in (whole, cut):
        streams.close()
