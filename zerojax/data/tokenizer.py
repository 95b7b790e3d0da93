"""Text to ids and back. This module gives bytes and Hugging Face tokenizer files one small protocol."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tokenizers

from zerojax.errors import UserError

# Looked up in this order: the first that the vocabulary holds separates documents.
SEPARATORS = ("<|begin_of_text|>", "<s>", "<|endoftext|>", "[BOS]", "</s>")


class Tokenizer(Protocol):
    """What the data pipeline and the sampler need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Returns a bound above every id: the entries that an embedding needs."""

    @property
    def bos_id(self) -> int:
        """Returns the id that stands before each document."""

    @property
    def sentinels(self) -> Sequence[int]:
        """Returns ids that no text encodes to, to mark missing spans with."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids of `text`, int32[length], without special tokens."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`; special and unknown ids are dropped."""


def load_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer that `spec` names: "bytes", or the path of a Hugging Face tokenizer.json.

    Raises:
      UserError: no such file, not a tokenizer file, or a vocabulary without a document separator.
    """
    if spec == "bytes":
        return ByteTokenizer()
    place = f"config.data.tokenizer: {spec!r}"
    if not pathlib.Path(spec).is_file():
        raise UserError(f'{place} is not a file; give "bytes" or the path of a Hugging Face tokenizer.json')
    try:
        model = tokenizers.Tokenizer.from_file(spec)
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())
        raise UserError(
            f"{place} is not a readable tokenizer.json ({reason}); save it again or give another"
        ) from error
    # A file may ask for truncation or padding; both would corrupt the stream of tokens.
    model.no_truncation()
    model.no_padding()
    # A document that spells out a special token means its letters.
    model.encode_special_tokens = True
    bos_id = next((found for name in SEPARATORS if (found := model.token_to_id(name)) is not None), None)
    if bos_id is None:
        raise UserError(f"{place} has no document separator; add one of {', '.join(SEPARATORS)} to its vocabulary")
    return FileTokenizer(model, bos_id)


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are bytes and 256 separates documents.

    The 257 ids are rounded up to 320, a multiple of 64, so that the embedding and the logits divide over any
    usual number of devices; ids 257..319 are sentinels.
    """

    vocab_size: int = 320
    bos_id: int = 256

    @property
    def sentinels(self) -> Sequence[int]:
        """Returns the ids behind the separator."""
        return range(self.bos_id + 1, self.vocab_size)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the bytes of `text`, of a str those of its UTF-8, as int32[length]."""
        data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the UTF-8 text of `ids`, invalid bytes replaced by a mark; ids above 255 are dropped."""
        return bytes(_below(ids, 256)).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A Hugging Face tokenizer.json behind the protocol."""

    model: tokenizers.Tokenizer
    bos_id: int

    @functools.cached_property
    def vocab_size(self) -> int:
        """Returns the largest id + 1: ids need not be dense, so counting entries is not enough."""
        return max(self.model.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def sentinels(self) -> Sequence[int]:
        """Returns the ids of <extra_id_0>, <extra_id_1>, ..., as files with sentinels name them."""
        found: list[int] = []
        while (number := self.model.token_to_id(f"<extra_id_{len(found)}>")) is not None:
            found.append(number)
        return found

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids of `text` (bytes are read as UTF-8, invalid ones replaced) as int32[length]."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return np.asarray(self.model.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`; special tokens and ids outside the vocabulary are dropped."""
        return self.model.decode(_below(ids, self.vocab_size))


def _below(ids: Sequence[int] | np.ndarray, end: int) -> list[int]:
    """Returns those of `ids` that lie in 0..end-1."""
    return [int(i) for i in ids if 0 <= i < end]
