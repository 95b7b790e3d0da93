import numpy as np
import pytest
import runs

from zerojax.data import source, tokenizer
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
