"""Training objectives on text. This module turns windows of tokens into rows, prompts into model inputs, and model outputs into text.

An objective declares the arrays of a row. They depend only on `seq_len`, so a batch needs neither padding nor a mask.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np

from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError

NOISE_DENSITY, MEAN_SPAN = 0.15, 3  # tokens (arXiv:1910.10683, section 3.1.4)
START = 0  # the padding id in that paper, and not a byte of text
GAP = "___"  # marks a missing span in a prompt
_SPANS = 1910_10683  # makes the draws of spans differ from other draws with the same seed, row and position


Row = Mapping[str, jax.ShapeDtypeStruct]  # the arrays of one row, by name; the first dim of each counts its tokens


class Form(NamedTuple):
    """Turns a window into a row.

    Attributes:
      window: the number of tokens of text in a row.
      arrays: (window: int32[window], key) -> {name: int32[length]}. `key` is a few integers, unique to each window.
    """

    window: int
    arrays: Callable[[np.ndarray, tuple[int, ...]], dict[str, np.ndarray]]


class Objective(Protocol):
    """The interface of an objective to the feed, the program and the sampler."""

    def row(self, seq_len: int) -> Row:
        """Declares the arrays of a row."""

    def form(self, tokenizer: tokenizer_lib.Tokenizer, seq_len: int) -> Form:
        """Returns the form that turns windows into rows."""

    def prompt(self, tokenizer: tokenizer_lib.Tokenizer, text: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns a prompt's inputs by name, and the tokens that the model continues: int32[length]."""

    def answer(self, tokenizer: tokenizer_lib.Tokenizer, text: str, tokens: np.ndarray) -> str:
        """Returns the text for a prompt and the model's tokens, which include those that it continued."""


class NextToken:
    """A row is {"tokens": int32[seq_len + 1]}: inputs are tokens[:-1], labels tokens[1:]."""

    def row(self, seq_len: int) -> Row:
        """Declares `tokens`."""
        return integers({"tokens": seq_len + 1})

    def form(self, tokenizer: tokenizer_lib.Tokenizer | None, seq_len: int) -> Form:
        """Returns the form whose rows are the windows. The tokenizer is unused."""
        return Form(seq_len + 1, lambda window, key: {"tokens": window})

    def prompt(self, tokenizer: tokenizer_lib.Tokenizer, text: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns no inputs, and the text after what begins a document."""
        return {}, np.concatenate([tokenizer.document.before, tokenizer.encode(text)]).astype(np.int32)

    def answer(self, tokenizer: tokenizer_lib.Tokenizer, text: str, tokens: np.ndarray) -> str:
        """Returns the prompt and its continuation."""
        return tokenizer.decode(tokens[len(tokenizer.document.before) :])


class SpanCorruption:
    """A row is {"inputs": int32[seq_len], "targets": int32[length]}: `inputs` omit spans of the text, and `targets` contain them.

    About 0.15 n of a window's n tokens are cut out, in spans of 3 tokens on average. A sentinel replaces each span in `inputs`. `targets`
    begin with START, have each sentinel before its span, and end with one more sentinel:

        text     Thank you for inviting me to your party last week
        inputs   Thank you <0> me to your party <1> week
        targets  START <0> for inviting <1> last <2>

    A decoder reads targets[:-1] and learns targets[1:]. A window begins with text that is kept and ends with a span.
    """

    def row(self, seq_len: int) -> Row:
        """Declares both arrays.

        Raises:
          UserError: `seq_len` is too short for a token and a sentinel.
        """
        _, noise, spans = _sizes(seq_len)
        return integers({"inputs": seq_len, "targets": 1 + noise + spans + 1})

    def form(self, tokenizer: tokenizer_lib.Tokenizer, seq_len: int) -> Form:
        """Returns the form that cuts spans out of windows.

        Raises:
          UserError: the tokenizer has fewer sentinels than a row needs.
        """
        window, noise, spans = _sizes(seq_len)
        sentinels = np.asarray(tokenizer.sentinels, np.int32)
        if len(sentinels) < spans + 1:
            raise UserError(
                f"tokenizer: span corruption of `seq_len={seq_len}` tokens needs {spans + 1} sentinels, and the tokenizer "
                f'has {len(sentinels)}; shorten `seq_len`, or choose "bytes" or a tokenizer with <extra_id_0>, <extra_id_1>, ...'
            )

        def arrays(tokens: np.ndarray, key: tuple[int, ...]) -> dict[str, np.ndarray]:
            # RandomState's results are the same in all versions of numpy.
            random = np.random.RandomState(np.random.PCG64([*key, _SPANS]))
            kept, cut = (_partition(random, count, spans) for count in (window - noise, noise))
            pieces = np.split(tokens, np.cumsum(np.stack([kept, cut], axis=1).ravel())[:-1])
            marks = [sentinels[i : i + 1] for i in range(spans + 1)]
            inputs = [part for pair in zip(pieces[::2], marks) for part in pair]
            targets = [part for pair in zip(marks, pieces[1::2]) for part in pair]
            start = np.array([START], np.int32)
            return {"inputs": np.concatenate(inputs), "targets": np.concatenate([start, *targets, marks[-1]])}

        return Form(window, arrays)

    def prompt(self, tokenizer: tokenizer_lib.Tokenizer, text: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the text with a sentinel for each GAP, and the first target token. A text without a GAP gets one at its end."""
        pieces = _pieces(text)
        if len(pieces) - 1 > len(tokenizer.sentinels):
            raise UserError(
                f"text: has {len(pieces) - 1} gaps ({GAP}), and the tokenizer has {len(tokenizer.sentinels)} sentinels; "
                "use fewer gaps"
            )
        marked = [tokenizer.encode(pieces[0])]
        for piece, sentinel in zip(pieces[1:], tokenizer.sentinels):
            marked += [np.array([sentinel]), tokenizer.encode(piece)]
        return {"inputs": np.concatenate(marked).astype(np.int32)}, np.array([START], np.int32)

    def answer(self, tokenizer: tokenizer_lib.Tokenizer, text: str, tokens: np.ndarray) -> str:
        """Returns the prompt with each gap filled by the span after its sentinel. A gap without a span remains."""
        pieces, ids = _pieces(text), tokens.tolist()
        ends = [i for i, token in enumerate(ids) if token in set(tokenizer.sentinels)] + [len(ids)]
        spans = {ids[at]: tokenizer.decode(ids[at + 1 : end]) for at, end in reversed(list(itertools.pairwise(ends)))}
        filled = [pieces[0]]
        for piece, sentinel in zip(pieces[1:], tokenizer.sentinels):
            filled += [spans.get(sentinel, GAP), piece]
        return "".join(filled)


OBJECTIVES: Mapping[str, Objective] = {"next_token": NextToken(), "span_corruption": SpanCorruption()}


def integers(lengths: Mapping[str, int]) -> Row:
    """Declares a row of integers of these lengths."""
    return {name: jax.ShapeDtypeStruct((length,), np.int32) for name, length in lengths.items()}


def lengths(row: Row) -> dict[str, int]:
    """Returns the lengths of a row's arrays, by name."""
    return {name: array.shape[0] for name, array in row.items()}


def _pieces(text: str) -> list[str]:
    return text.split(GAP) if GAP in text else [text, ""]


@functools.cache
def _sizes(seq_len: int) -> tuple[int, int, int]:
    """Returns the length of the longest window whose inputs have length `seq_len`, and the numbers of its cut tokens and spans."""

    def cut(window: int) -> tuple[int, int]:
        noise = min(max(round(window * NOISE_DENSITY), 1), window - 1)
        return noise, max(round(noise / MEAN_SPAN), 1)

    def inputs(window: int) -> int:
        noise, spans = cut(window)
        return window - noise + spans

    if seq_len < inputs(2):
        raise UserError(f"seq_len: must be 2 or more for span corruption, and is {seq_len}; set `seq_len=128`")
    # Inputs grow by 0 or 1 with each token, so every length occurs, and the windows of one length are neighbours.
    window = bisect.bisect_right(range(2 * seq_len + 2), seq_len, lo=2, key=inputs) - 1
    return window, *cut(window)


def _partition(random: np.random.RandomState, count: int, parts: int) -> np.ndarray:
    """Returns positive sizes that add up to `count`, uniformly random: int64[parts]."""
    cuts = np.sort(random.permutation(count - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [count]]))
