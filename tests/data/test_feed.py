import numpy as np
import pytest
import runs

from zerojax.data import tokenizer
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
