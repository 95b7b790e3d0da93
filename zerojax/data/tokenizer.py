"""Converts text to ids and back. This module has one small protocol for bytes and for Hugging Face tokenizer files."""

import base64
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors

from zerojax import bounded, errors, files
from zerojax.errors import UserError

_MOST_BYTES = 2**28  # of a tokenizer.json; the largest known ones have 2**25
_MOST_IDS = 2**24  # the most that a model's logits may have
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*("[^"]*")')
_MOST_STEPS, _MOST_GROWTH, _MOST_LETTERS = 100, 1000, 1000

# The first of these that is in the vocabulary separates documents.
SEPARATOR = "<|endoftext|>"  # its name in the file of the bytes tokenizer
SEPARATORS = ("<|begin_of_text|>", "<s>", "<|endoftext|>", "[BOS]", "</s>")


class Tokenizer(Protocol):
    """The interface of a tokenizer to the data pipeline and the sampler."""

    @property
    def vocab_size(self) -> int:
        """Returns the number of entries that an embedding needs: every id is below it."""

    @property
    def bos_id(self) -> int:
        """Returns the id of the separator, which precedes each document."""

    @property
    def sentinels(self) -> Sequence[int]:
        """Returns the ids that mark missing spans. No text encodes to them."""

    @property
    def vocabulary(self) -> Any:
        """Returns what determines the ids of text, as JSON values."""

    def file(self, *, begins: bool) -> dict[str, Any]:
        """Returns the contents of a tokenizer.json with the same ids; `begins`: whether the separator begins a whole text."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids of `text`, int32[length], without special tokens."""

    def encode_whole(self, text: str) -> np.ndarray:
        """Returns the ids of a whole text, with the special tokens that the tokenizer adds around one."""

    def encode_special(self, text: str) -> np.ndarray:
        """Returns the ids of a text in which special tokens are written out, as chat templates do."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`. Drops special and unknown ids."""


def load_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer that `spec` names: "bytes", or the path of a Hugging Face tokenizer.json.

    Raises:
      UserError: the file does not exist, it is not a tokenizer file, or its vocabulary has no document separator.
    """
    if spec == "bytes":
        return ByteTokenizer()
    subject = f"tokenizer: {spec!r}"
    if spec:
        files.check_path(spec, "tokenizer")
    if not pathlib.Path(spec).is_file():
        raise UserError(f'{subject} is not a file; set it to "bytes" or the path of a Hugging Face tokenizer.json')
    model = read_model(spec, subject)
    # The letters of a special token in a document are plain text.
    model.encode_special_tokens = True
    bos_id = next((found for name in SEPARATORS if (found := model.token_to_id(name)) is not None), None)
    if bos_id is None:
        raise UserError(f"{subject} has no document separator; add one of {', '.join(SEPARATORS)} to its vocabulary")
    return FileTokenizer(model, bos_id, subject)


def read_model(path: str | os.PathLike, subject: str) -> tokenizers.Tokenizer:
    """Returns the tokenizer in a tokenizer.json, without truncation and padding, which would corrupt a stream of tokens.

    Args:
      path: the file.
      subject: its name, for errors.

    Raises:
      UserError: it is no tokenizer file, or its steps could turn a short text into one that fills the memory.
    """
    with _refused(f"{subject} is not a readable tokenizer.json", "save it again or choose another"):
        content = bounded.read_bytes(path, _MOST_BYTES)
        _check_charsmaps(content)
        model = tokenizers.Tokenizer.from_str(content.decode())
        model.no_truncation()
        model.no_padding()
        parts = (model.normalizer, model.pre_tokenizer, model.decoder)
        steps = [step for part in parts if part is not None for step in _steps(json.loads(part.__getstate__()))]
        if len(steps) > _MOST_STEPS:
            raise ValueError(f"it has {len(steps)} steps, and at most {_MOST_STEPS} are read")
        growth = math.prod(1.0 + len(step.get("content") or step.get("prepend") or "") for step in steps)
        if growth > _MOST_GROWTH:
            raise ValueError(f"its steps make a text more than {_MOST_GROWTH} times as long")
        if getattr(model.model, "max_input_chars_per_word", 0) > _MOST_LETTERS:
            raise ValueError(f"it reads words of more than {_MOST_LETTERS} letters, in quadratic time")
        if max(model.get_vocab(with_added_tokens=True).values(), default=0) >= _MOST_IDS:
            raise ValueError(f"it has an id of {_MOST_IDS} or more")
    return model


def _check_charsmaps(content: bytes) -> None:
    """Refuses a table of characters that says it is longer than it is: the library allocates what it says, and a failure ends the process.

    Raises:
      ValueError: one does.
    """
    for found in _CHARSMAP.finditer(content):
        text = json.loads(found[1])
        size = int.from_bytes(base64.b64decode(text[:8])[:4], "little")
        if size > len(text):
            raise ValueError(f"precompiled_charsmap has {len(text)} characters, and says that {size} bytes follow")


def _steps(part: object) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normalizer, a pre-tokenizer or a decoder, in which sequences stand open."""
    if isinstance(part, Mapping):
        inner = [value for value in part.values() if isinstance(value, list)]
        if part.get("type") == "Sequence":
            for listed in inner:
                for step in listed:
                    yield from _steps(step)
        else:
            yield part


@contextlib.contextmanager
def _refused(what: str, way_out: str) -> Iterator[None]:
    """Turns all that the library may raise, plain Exception and panics of its Rust code, into a UserError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        why = getattr(error, "strerror", None) or errors.one_line(error)
        raise UserError(f"{what} ({why}); {way_out}") from error


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose ids 0..255 are bytes. Id 256 separates documents, and ids 257..319 are sentinels.

    The vocab size is 320, a multiple of 64, so that the embedding and the logits divide evenly over common numbers of devices.
    """

    vocab_size: int = 320
    bos_id: int = 256

    @property
    def sentinels(self) -> Sequence[int]:
        """Returns the ids above the separator."""
        return range(self.bos_id + 1, self.vocab_size)

    @property
    def vocabulary(self) -> Any:
        """Returns nothing: the ids are bytes."""
        return []

    def file(self, *, begins: bool) -> dict[str, Any]:
        """Returns the contents of a tokenizer.json whose tokens are single bytes, in GPT-2's letters for bytes."""
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        model = tokenizers.Tokenizer(tokenizers.models.BPE({letters[byte]: byte for byte in range(256)}, []))
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        model.add_special_tokens([SEPARATOR, *(f"<extra_id_{i}>" for i in range(len(self.sentinels)))])
        if begins:
            named = [(SEPARATOR, self.bos_id)]
            model.post_processor = tokenizers.processors.TemplateProcessing(f"{SEPARATOR} $A", special_tokens=named)
        return json.loads(model.to_str())

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the bytes of `text` as int32[length]. A str is encoded as UTF-8."""
        data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_whole(self, text: str) -> np.ndarray:
        """Returns the bytes of `text`, around which nothing is added."""
        return self.encode(text)

    def encode_special(self, text: str) -> np.ndarray:
        """Returns the bytes of `text`: no special token has a name."""
        return self.encode(text)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the UTF-8 text of `ids`. Drops ids above 255, and replaces invalid bytes by U+FFFD."""
        return bytes(_below(ids, 256)).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer from a Hugging Face tokenizer.json."""

    model: tokenizers.Tokenizer
    bos_id: int
    subject: str = "the tokenizer"

    @functools.cached_property
    def vocab_size(self) -> int:
        """Returns the largest id + 1. Ids need not be dense, so this can exceed the number of entries."""
        return max(self.model.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def sentinels(self) -> Sequence[int]:
        """Returns the ids of <extra_id_0>, <extra_id_1>, ..."""
        found: list[int] = []
        while (number := self.model.token_to_id(f"<extra_id_{len(found)}>")) is not None:
            found.append(number)
        return found

    @property
    def vocabulary(self) -> Any:
        """Returns the ids of all tokens, and the order of merges or the scores of tokens."""
        model = json.loads(self.model.to_str())["model"]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
        scores = model["vocab"] if isinstance(model.get("vocab"), list) else []
        return [sorted(self.model.get_vocab(with_added_tokens=True).items()), merges, scores]

    def file(self, *, begins: bool) -> dict[str, Any]:
        """Returns the contents of the file. It says itself what begins a text."""
        return json.loads(self.model.to_str())

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids of `text` as int32[length]. Bytes are decoded as UTF-8, with invalid bytes replaced."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self._ids(self.model, text, adds_special=False)

    def encode_whole(self, text: str) -> np.ndarray:
        """Returns the ids of `text` with those that the file's post-processor adds."""
        return self._ids(self.model, text, adds_special=True)

    def encode_special(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, in which the names of special tokens are these tokens."""
        return self._ids(self._naming, text, adds_special=False)

    def _ids(self, model: tokenizers.Tokenizer, text: str, *, adds_special: bool) -> np.ndarray:
        with _refused(
            f"{self.subject} cannot encode {errors.shown(text, 60)}", "mend the text, or choose another tokenizer"
        ):
            # One text at a time, but `encode` holds the lock of Python, so that threads would wait for each other
            return np.asarray(model.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids, np.int32)

    @functools.cached_property
    def _naming(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self.model.to_str())
        copy.encode_special_tokens = False
        return copy

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`. Drops special tokens and ids outside the vocabulary."""
        with _refused(f"{self.subject} cannot decode its ids", "choose another tokenizer"):
            return self.model.decode(_below(ids, self.vocab_size))


def _below(ids: Sequence[int] | np.ndarray, end: int) -> list[int]:
    """Returns those of `ids` that are in 0..end-1."""
    return [int(i) for i in ids if 0 <= i < end]
