"""Checks a run against its tokenizer before it starts. This module tests zerojax.trainer.checks.texts."""

import pytest
import runs

from zerojax.data import tokenizer
from zerojax.errors import UserError
from zerojax.trainer import program
from zerojax.trainer.checks import texts

BYTES = tokenizer.ByteTokenizer()


def check(**changes):
    texts.check(program.build(runs.config(**changes), tokenizer_vocab=BYTES.vocab_size), BYTES)


def test_a_sample_up_to_the_last_position_is_allowed_and_no_longer_one():
    check(sample__prompt="x" * 11, sample__length=500)  # with the separator 512
    with pytest.raises(
        UserError,
        match=r"^config\.sample\.length: the prompt's 12 tokens and 501 more are over the 512 positions.*length=500 or less",
    ):
        check(sample__prompt="x" * 11, sample__length=501)
    with pytest.raises(UserError, match=r"the prompt's 601 tokens.*; shorten config\.sample\.prompt$"):
        check(sample__prompt="x" * 600, sample__length=1)
    check(sample__prompt="x" * 600, sample__length=0)


def test_a_sample_of_no_given_length_is_as_long_as_the_positions_allow():
    def length(**changes):
        built = program.build(runs.config(sample__length=-1, **changes), tokenizer_vocab=BYTES.vocab_size)
        texts.check(built, BYTES)
        return texts.sample_length(built, BYTES)

    assert length(sample__prompt="x") == 160
    assert length(sample__prompt="x" * 411) == 100  # with the separator 412 of 512
    assert length(sample__prompt="x" * 600) == 0
    answers = {"data__task": "seq2seq", "data__train_file": "none"}
    assert length(**answers) == 0, "a task with answers tells them"
    with pytest.raises(UserError, match=r"^config\.sample\.prompt: has 64 gaps"):
        length(model__preset="t5_test", sample__prompt="___" * 64)


def test_more_gaps_or_spans_than_sentinels_are_refused_before_a_run():
    check(model__preset="t5_test", sample__prompt="___" * 63, sample__length=4)
    with pytest.raises(UserError, match=r"^config\.sample\.prompt: has 64 gaps"):
        check(model__preset="t5_test", sample__prompt="___" * 64, sample__length=4)
    with pytest.raises(
        UserError, match=r"^config\.data\.tokenizer: span corruption of config\.seq_len=4096 tokens needs"
    ):
        check(model__preset="t5_test", seq_len=4096)
