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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors

from zerojax import bounded, errors, files
from zerojax.data import token_files
from zerojax.errors import UserError

_MOST_IDS = 2**24  # the most that a model's logits may have
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*("[^"]*")')
_MOST_STEPS, _MOST_GROWTH, _MOST_LETTERS = 100, 1000, 1000

SEPARATOR = "<|endoftext|>"  # the name of the token that separates documents, in the file of the bytes tokenizer
_PROBE = "a"  # a text, to see what a tokenizer adds around one
_POST_PROCESSOR = "the post-processor of tokenizer.json adds it"


class TextFrame(NamedTuple):
    """What stands around a text.

    Attributes:
      before, after: ids.
      why: what says so.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    why: str


class Tokenizer(Protocol):
    """The interface of a tokenizer to the data pipeline and the sampler."""

    @property
    def vocab_size(self) -> int:
        """Returns the number of entries that an embedding needs: every id is below it."""

    @property
    def bos_id(self) -> int | None:
        """Returns the id that begins a text, as the tokenizer's files name it; None if they name none."""

    @property
    def end_id(self) -> int | None:
        """Returns the id that ends a text; None if the files name none."""

    @property
    def around(self) -> TextFrame:
        """Returns what the tokenizer itself puts around a text (`encode_whole`)."""

    @property
    def document(self) -> TextFrame:
        """Returns what stands around each document of a stream.

        Raises:
          UserError: the tokenizer's files name no token for that.
        """

    @property
    def special_ids(self) -> frozenset[int]:
        """Returns the ids of special tokens."""

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

    def encode_places(self, text: str, *, is_special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of `encode_special(text)` or of `encode(text)`, and where each is: int32[length, 2], its first character and
        the one after its last."""

    def name_of(self, token: int) -> str:
        """Returns the letters of a token in the vocabulary."""

    def why(self, token: int) -> str:
        """Returns what says that a token is special; "" for one that is not."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`. Drops special and unknown ids."""


def load_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer that `spec` names: "bytes", or the path of a Hugging Face tokenizer.json.

    Raises:
      UserError: the file does not exist, or it or one beside it is not a tokenizer's file.
    """
    if spec == "bytes":
        return ByteTokenizer()
    subject = f"tokenizer: {spec!r}"
    if spec:
        files.check_path(spec, "tokenizer")
    if not pathlib.Path(spec).is_file():
        raise UserError(f'{subject} is not a file; set it to "bytes" or the path of a Hugging Face tokenizer.json')
    model, beside = _read(spec, subject)
    # The letters of a special token in a document are plain text.
    model.encode_special_tokens = True
    return FileTokenizer(model, beside, subject)


def told(tokenizer: Tokenizer) -> str:
    """Returns a line that tells what stands around each document of a stream, and why."""
    frame = tokenizer.document

    def names(ids: tuple[int, ...]) -> str:
        return " ".join(f"{tokenizer.name_of(token)!r} ({token})" for token in ids)

    parts = [f"{verb} {names(ids)}" for verb, ids in (("begins with", frame.before), ("ends with", frame.after)) if ids]
    return f"each document {' and '.join(parts)}: {frame.why}"


def read_model(path: str | os.PathLike[str], subject: str) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the tokenizer in a tokenizer.json, without truncation and padding, which would corrupt a stream of tokens, and whether its
    texts are to be `cleaned`.

    Args:
      path: the file.
      subject: its name, for errors.

    Raises:
      UserError: it or a file beside it is no tokenizer file, or its steps could turn a short text into one that fills the memory.
    """
    model, beside = _read(path, subject)
    return model, beside.cleans


# clean_up_tokenization of transformers 5.24, in its order
_SPACES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def cleaned(text: str) -> str:
    """Returns a decoded text without spaces before marks, as transformers does where `clean_up_tokenization_spaces` is true."""
    for part in _SPACES:
        text = text.replace(part, part.strip())
    return text


def settled(text: str) -> str:
    """Returns the beginning of a text of which what follows changes nothing in `cleaned`."""
    parts = (*_SPACES, "  ' ve", "  ' re")  # of the last two, the fifth leaves " 've" and " 're"
    while kept := max((n for part in parts for n in range(1, len(part) + 1) if text.endswith(part[:n])), default=0):
        text = text[:-kept]
    return text


def _read(path: str | os.PathLike[str], subject: str) -> tuple[tokenizers.Tokenizer, token_files.Beside]:
    """Returns the tokenizer in a tokenizer.json with the tokens that the files beside it name, and what these say."""
    with refused(f"{subject} is not a readable tokenizer.json", "save it again or choose another"):
        content = bounded.read_bytes(path, token_files.MOST_BYTES)
        _check_charsmaps(content)
        parsed = json.loads(content)
        beside = token_files.read(path, parsed if isinstance(parsed, Mapping) else {})
        if (as_run := token_files.as_run(parsed, beside.kind, beside.settings)) is not parsed:
            content = json.dumps(as_run).encode()
        model = tokenizers.Tokenizer.from_str(content.decode())
        token_files.add(model, beside)
        model.encode_special_tokens = beside.splits_special
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
    return model, beside


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
def refused(what: str, way_out: str) -> Iterator[None]:
    """Turns all that the library may raise, plain Exception and panics of its Rust code, into a UserError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, UserError):
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
    def around(self) -> TextFrame:
        """Returns nothing."""
        return TextFrame((), (), "")

    @property
    def end_id(self) -> int:
        """Returns the separator."""
        return self.bos_id

    @property
    def document(self) -> TextFrame:
        """Returns the separator before a document."""
        return TextFrame((self.bos_id,), (), "the separator of the bytes tokenizer")

    @property
    def special_ids(self) -> frozenset[int]:
        """Returns the ids that are no bytes."""
        return frozenset(range(self.bos_id, self.vocab_size))

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
        data = _bytes_of(text) if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_whole(self, text: str) -> np.ndarray:
        """Returns the bytes of `text`, around which nothing is added."""
        return self.encode(text)

    def encode_special(self, text: str) -> np.ndarray:
        """Returns the bytes of `text`: no special token has a name."""
        return self.encode(text)

    def encode_places(self, text: str, *, is_special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of `text`, and the character of each."""
        sizes = [len(_bytes_of(character)) for character in text]
        at = np.repeat(np.arange(len(text), dtype=np.int32), sizes)
        return self.encode(text), np.stack([at, at + 1], axis=1)

    def name_of(self, token: int) -> str:
        """Returns the letters of a byte, or the number of another id in angle brackets."""
        if token == self.bos_id:
            return SEPARATOR
        return chr(token) if token < 128 else f"<{token}>" if token >= 256 else f"<0x{token:02X}>"

    def why(self, token: int) -> str:
        """Returns what the separator is."""
        return self.document.why if token == self.bos_id else ""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the UTF-8 text of `ids`. Drops ids above 255, and replaces invalid bytes by U+FFFD."""
        return bytes(_below(ids, 256)).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer from a Hugging Face tokenizer.json, and what the files beside it say."""

    model: tokenizers.Tokenizer
    files: token_files.Beside
    subject: str = "the tokenizer"

    @functools.cached_property
    def bos_id(self) -> int | None:
        """Returns the id of bos_token, or the one that begins a text by the post-processor, or bos_token_id of the model's files."""
        return next((found for found, _ in self._named("bos", self.around.before[:1])), None)

    @functools.cached_property
    def end_id(self) -> int | None:
        """Returns the id of eos_token, or the one that ends a text by the post-processor, or eos_token_id of the model's files."""
        return next((found for found, _ in self._named("eos", self.around.after[-1:])), None)

    def _named(self, role: str, around: tuple[int, ...]) -> Iterator[tuple[int, str]]:
        """Yields the ids that the files name for a role, the best first, each with what names it."""
        key, known = f"{role}_token", self._known
        name = self.files.named.get(key)
        if name is not None and (found := self.model.token_to_id(name)) is not None:
            yield found, f"{self.files.source[key]} names it {key}"
        for found in around:
            yield found, _POST_PROCESSOR
        ids = self.files.ids.get(f"{key}_id")
        for value in ids if isinstance(ids, list) else [ids]:
            if isinstance(value, int) and not isinstance(value, bool) and value in known:
                yield value, f"the model's config names it {key}_id"

    @functools.cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self.model.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def around(self) -> TextFrame:
        """Returns what the file's post-processor adds to a text."""
        bare, whole = (self.encode(_PROBE).tolist(), self.encode_whole(_PROBE).tolist())
        if len(bare) == len(whole):
            return TextFrame((), (), "")
        starts = range(len(whole) - len(bare) + 1)
        at = next((start for start in starts if whole[start : start + len(bare)] == bare), 0)
        return TextFrame(tuple(whole[:at]), tuple(whole[at + len(bare) :]), _POST_PROCESSOR)

    @functools.cached_property
    def document(self) -> TextFrame:
        """Returns what the post-processor adds, or else bos_token, or else eos_token, before each document."""
        if self.around.before or self.around.after:
            return self.around
        for found, why in [*self._named("bos", ()), *self._named("eos", ())]:
            return TextFrame((found,), (), why)
        raise UserError(
            f"{self.subject} names no token that separates documents: name one as bos_token or eos_token in a "
            f"{token_files.TOKENIZER_CONFIG} beside it"
        )

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Returns the ids of the added tokens that are special."""
        added = self.model.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

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
        """Returns the ids of `text` as int32[length]. Bytes are decoded as UTF-8."""
        if isinstance(text, bytes):
            with errors.below("a text "):
                text = bounded.decoded(text)
        return self._ids(self.model, text, adds_special=False)

    def encode_whole(self, text: str) -> np.ndarray:
        """Returns the ids of `text` with those that the file's post-processor adds."""
        return self._ids(self.model, text, adds_special=True)

    def encode_special(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, in which the names of special tokens are these tokens."""
        return self._ids(self._naming, text, adds_special=False)

    def encode_places(self, text: str, *, is_special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text and their first and last characters; see `Tokenizer`."""
        model = self._naming if is_special else self.model
        found = self._encoding(model.encode_batch, text, adds_special=False)
        return np.asarray(found.ids, np.int32), np.asarray(found.offsets, np.int32).reshape(-1, 2)

    def name_of(self, token: int) -> str:
        """Returns a token's letters in the vocabulary."""
        return self.model.id_to_token(token) or f"<{token}>"

    def why(self, token: int) -> str:
        """Returns what names a token, the post-processor if it adds it; "" for one that is not special."""
        if token in (*self.around.before, *self.around.after):
            return _POST_PROCESSOR
        for role in ("bos", "eos"):
            for found, why in self._named(role, ()):
                if found == token:
                    return why
        return f"an added token of {token_files.TOKENIZER}" if token in self.special_ids else ""

    def _ids(self, model: tokenizers.Tokenizer, text: str, *, adds_special: bool) -> np.ndarray:
        return np.asarray(self._encoding(model.encode_batch_fast, text, adds_special=adds_special).ids, np.int32)

    def _encoding(self, encode: Callable[..., Any], text: str, *, adds_special: bool) -> tokenizers.Encoding:
        """Encodes a text by a function for several: `encode` of one holds the lock of Python, so threads would wait for each other."""
        with refused(
            f"{self.subject} cannot encode {errors.shown(text, 60)}", "mend the text, or choose another tokenizer"
        ):
            found: tokenizers.Encoding = encode([text], add_special_tokens=adds_special)[0]
            return found

    @functools.cached_property
    def _naming(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self.model.to_str())
        copy.encode_special_tokens = self.files.splits_special
        return copy

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`. Drops special tokens and ids outside the vocabulary."""
        with refused(f"{self.subject} cannot decode its ids", "choose another tokenizer"):
            text = self.model.decode(_below(ids, self.vocab_size))
            return cleaned(text) if self.files.cleans else text


def _bytes_of(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"a text holds half of a surrogate pair at its character {error.start}, which is no letter; mend the text"
        ) from error


def _below(ids: Sequence[int] | np.ndarray, end: int) -> list[int]:
    """Returns those of `ids` that are in 0..end-1."""
    return [int(i) for i in ids if 0 <= i < end]
