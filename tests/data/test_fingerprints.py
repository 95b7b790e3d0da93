"""Checks that another text or vocabulary has another fingerprint. This module tests zerojax.data.fingerprints."""

import dataclasses

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from zerojax.data import fingerprints, token_files, tokenizer

NOTHING = token_files.read("nowhere/tokenizer.json", {})


def source(texts):
    return [{"text": text, "other": 0} for text in texts]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=30), st.data())
def test_a_change_of_any_document_or_of_their_order_or_number_shows(texts, data):
    before = fingerprints.of_text(source(texts), "text")
    at = data.draw(st.integers(0, len(texts) - 1))
    changed = [*texts[:at], texts[at] + b"x", *texts[at + 1 :]]
    for other in (changed, [*texts, b""], [*changed, *texts]):
        assert fingerprints.of_text(source(other), "text") != before
    if texts != texts[::-1]:
        assert fingerprints.of_text(source(texts[::-1]), "text") != before
    assert fingerprints.of_text(source(list(texts)), "text") == before


def test_of_a_large_source_only_some_documents_are_read():
    class Large:
        read = 0

        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            self.read += 1
            return {"text": str(index)}

    large = Large()
    fingerprints.of_text(large, "text")
    assert large.read == fingerprints.SAMPLED


def test_text_is_its_utf8_bytes():
    assert fingerprints.of_text(source(["ä"]), "text") == fingerprints.of_text(source(["ä".encode()]), "text")


def file_tokenizer(words, merges=(), bos="<s>"):
    vocabulary = {word: index for index, word in enumerate(["<s>", *words])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(merges)))
    return tokenizer.FileTokenizer(
        model, dataclasses.replace(NOTHING, named={"bos_token": bos}, source={"bos_token": "f"})
    )


@pytest.mark.parametrize(
    "other",
    [
        file_tokenizer(["t", "h", "e", "he", "th"], [("h", "e"), ("t", "h")]),  # the same words with other ids
        file_tokenizer(["t", "h", "e", "th", "he"], [("t", "h"), ("h", "e")]),  # the same ids, merged in another order
        file_tokenizer(["t", "h", "e", "th", "hi"], [("t", "h")]),
        file_tokenizer(["t", "h", "e", "th", "he"], [("h", "e"), ("t", "h")], bos="t"),
        tokenizer.ByteTokenizer(),
    ],
)
def test_another_tokenizer_of_the_same_size_shows(other):
    here = file_tokenizer(["t", "h", "e", "th", "he"], [("h", "e"), ("t", "h")])
    again = file_tokenizer(["t", "h", "e", "th", "he"], [("h", "e"), ("t", "h")])
    assert fingerprints.of_tokenizer(here) == fingerprints.of_tokenizer(again) != fingerprints.of_tokenizer(other)
