"""Fingerprints of a run's text and tokenizer. This module tells whether they are still those of a checkpoint.

A position in the data means another text if documents were exchanged, and ids mean other words with another vocabulary of the same size.
Neither shows in a count.
"""

import json
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError

SAMPLED = 1024  # documents that are read: all of a small source, else as many at even distances
# Words, numbers, letters of several scripts and spaces, which tokenizers of the same vocabulary may cut differently.
PROBE = (
    "The quick brown fox\tjumps over 1234.5 lazy dogs;  naïve Straße, любовь, 東京 🙂\n\ndef f(x):\n    return x**2\n"
)


def of_text(source: source_lib.Source, text_key: str) -> str:
    """Returns the CRC-32 of up to SAMPLED documents and of their number, in hexadecimal. Each process reads its share of them."""
    number = len(source)
    chosen = sorted({index * number // SAMPLED for index in range(SAMPLED)})
    found = np.zeros(len(chosen), np.uint32)
    for at in range(jax.process_index(), len(chosen), jax.process_count()):
        text = source[chosen[at]][text_key]
        found[at] = zlib.crc32(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    if jax.process_count() > 1:
        found = multihost_utils.process_allgather(found).sum(axis=0, dtype=np.uint32)
    return _hex(str(number).encode() + found.astype("<u4").tobytes())


def of_tokenizer(tokenizer: tokenizer_lib.Tokenizer) -> str:
    """Returns the CRC-32 of a tokenizer's vocabulary, of the ids of a short text and of those around a document, in hexadecimal."""
    ids = tokenizer.encode(PROBE).tolist()
    try:
        before, after, _ = tokenizer.document
        separator: object = before[0] if len(before) == 1 and not after else [before, after]
    except UserError:
        separator = None  # no text is learned with it
    return _hex(json.dumps([tokenizer.vocabulary, ids, tokenizer.vocab_size, separator]).encode())


def _hex(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
