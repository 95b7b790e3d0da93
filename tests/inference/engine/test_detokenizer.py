"""Checks texts that grow token by token against texts that are decoded whole. This module tests zerojax.inference.engine.detokenizer."""

import functools
import json

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings

from zerojax.data import tokenizer as tokenizer_lib
from zerojax.inference.engine import detokenizer

PIECES = ["<s>", "▁", "▁a", "a", "▁the", "é", ".", "▁▁", "<0xE2>", "<0x82>", "<0xAC>"]


@functools.cache
def decode(kind):
    """Returns a function from ids to text, and the number of ids."""
    if kind == "ids":
        return lambda ids: " ".join(map(str, ids)), 50
    if kind == "bytes":
        file = tokenizer_lib.ByteTokenizer().file(begins=True)
        return tokenizers.Tokenizer.from_str(json.dumps(file)).decode, 320
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({piece: n for n, piece in enumerate(PIECES)}, "<s>"))
    parts = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
    made.decoder = tokenizers.decoders.Sequence(parts)  # as Llama's
    made.add_special_tokens(["<s>"])
    return made.decode, len(PIECES)


@pytest.mark.parametrize("kind", ["ids", "bytes", "pieces"])
@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_a_text_that_grows_becomes_the_text_of_all_tokens(kind, data):
    text_of, count = decode(kind)
    first = 1 if kind == "pieces" else 0  # no special token between words: Llama's decoder strips a space after it
    tokens = data.draw(st.lists(st.integers(first, count - 1), max_size=40))
    made, sent = detokenizer.Growing(text_of), ""
    for number in range(1, len(tokens) + 1):
        sent += made.add(tokens[:number])
        assert sent == made.text and detokenizer.CUT not in sent[-1:]
    sent += made.add(tokens, is_end=True)
    whole = text_of(tokens)
    # Llama's decoder takes a letter back when bytes that are none follow it; what was sent stays.
    assert sent == made.text and (sent == whole or (kind == "pieces" and detokenizer.CUT in whole))


def test_few_tokens_are_decoded_at_a_time():
    lengths = []

    def text_of(ids):
        lengths.append(len(ids))
        return " ".join(map(str, ids))

    made = detokenizer.Growing(text_of)
    for number in range(1, 200):
        made.add(list(range(number)))
    assert max(lengths) <= 3
