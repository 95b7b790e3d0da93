"""Documents to token batches, the same on any number of processes. This module shuffles, packs, prefetches.

A global batch has `num_rows` rows. Row r is a stream of its own: it reads documents r, r + num_rows,
r + 2 * num_rows, ... of the endless order (every epoch a new permutation), puts the separator before each,
joins them and cuts windows, which an objective turns into rows of arrays. A process
reads only its own rows, so each document is tokenized once globally and no batch depends on who reads it.

A row's position, a few integers, is its only state. (grain's own concat-then-split would pack too, but its
state holds tuples: after a round trip through JSON it drops a document, silently.)
"""

import functools
import numbers
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from zerojax.data import objectives
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError

PREFETCHED = 2  # batches that wait for the device
RANDOM = "random"  # the data.name of random tokens
# grain's index_shuffle needs no memory, but walks through blocks of 2**16: 4 us an index of a large source,
# 5 ms one of 13 documents. Up to this many documents an epoch is permuted in memory instead.
SMALL = 2**14

Position = tuple[int, ...]
# (row, position) -> (the window there: int32[window], the position behind it)
ReadWindow = Callable[[int, Position], tuple[np.ndarray, Position]]
# (row, position) -> (the arrays made of the window there, the position behind it)
ReadRow = Callable[[int, Position], tuple[dict[str, np.ndarray], Position]]


class Batches:
    """Hands out {name: int32[len(rows), length]} for ever, made ahead in a background thread."""

    def __init__(self, read: ReadRow, start: dict[int, Position], fields: tuple[str, ...], settings: dict[str, int]):
        """Starts each row of `start` at its position, whose integers are called `fields`.

        `settings` say what a saved position means; `set_state` refuses a state saved with others.
        """
        self._rows = tuple(start)
        self._fields = fields
        self._settings = settings
        self._open = [grain.experimental.ThreadPrefetchDatasetIterator(_Rows(read, start), PREFETCHED)]
        # Runs at close(), when self is collected, or at exit while threads can be joined: whichever is first.
        self._finalizer = weakref.finalize(self, _close, self._open)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns the next batch, in the order of `rows`."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the positions behind the last batch handed out, by row ("0", "1", ...); ready for JSON.

        States of processes that read different rows merge with `|` into the global state.
        """
        positions = self._iterator.get_state()
        return {str(row): dict(zip(self._fields, positions[row], strict=True)) | self._settings for row in self._rows}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on behind the positions in `state`, which may hold more rows than are read here.

        Raises:
          UserError: a row is missing, or the state was saved with other settings.
        """
        self._iterator.set_state({row: self._position(row, state) for row in self._rows})

    def close(self) -> None:
        """Stops the background thread; `next` fails from then on."""
        self._finalizer()

    @property
    def _iterator(self) -> grain.experimental.ThreadPrefetchDatasetIterator:
        if not self._open:
            raise ValueError("these batches are closed; make new ones")
        return self._open[0]

    def _position(self, row: int, state: dict[str, Any]) -> Position:
        """Reads the position of `row` out of `state`, checked."""
        saved = state.get(str(row)) if isinstance(state, Mapping) else "no table"
        if saved is None:
            raise UserError(
                f"data state: row {row} is not among the {len(state)} saved; restore the merged state of all processes"
            )
        is_table = isinstance(saved, Mapping)
        for key, value in self._settings.items() if is_table else ():
            if saved.get(key) != value:
                raise UserError(
                    f"data state: row {row} was saved with {key}={saved.get(key)} and this run has "
                    f"{key}={value}; resume with the saved {key}, or start anew without the state"
                )
        if not is_table or not all(isinstance(saved.get(field), numbers.Integral) for field in self._fields):
            raise UserError(
                f"data state: row {row} does not say {' and '.join(self._fields)}; restore an undamaged state, or start anew without it"
            )
        return tuple(int(saved[field]) for field in self._fields)


def open_batches(
    name: str,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    text_key: str,
    split: str,
    data_dir: str | os.PathLike,
    rows: Sequence[int],
    num_rows: int,
    seq_len: int,
    seed: int,
    shuffle: bool = True,
    objective: objectives.Objective = objectives.OBJECTIVES["next_token"],
) -> Batches:
    """Returns the batches of a name: of a prepared dataset's `split`, or of random tokens.

    Args:
      name: a dataset's name, or RANDOM.
      tokenizer: for random tokens only its numbers count: vocab_size and sentinels.
      text_key: the feature that holds the text.
      split: a split of the dataset; random tokens have none.
      data_dir: where `source.prepare` has put the dataset.
      rows: the rows that this process reads, in the order of its batches.
      num_rows: rows of the global batch.
      seq_len: tokens a sequence.
      seed: of the order of documents, or of the random tokens.
      shuffle: False reads documents in their stored order, every epoch.
      objective: what windows become.

    Raises:
      UserError: see `source.open_source`, `make_batches` and the objective's `form`.
    """
    form = objective.form(tokenizer, seq_len)
    sizes: dict[str, Any] = {"rows": rows, "num_rows": num_rows, "seq_len": seq_len, "seed": seed, "form": form}
    if name == RANDOM:
        return random_batches(tokenizer.vocab_size, **sizes)
    source = source_lib.open_source(name, split, data_dir)
    return make_batches(source, tokenizer, text_key=text_key, shuffle=shuffle, **sizes)


def make_batches(
    source: source_lib.Source,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    text_key: str,
    rows: Sequence[int],
    num_rows: int,
    seq_len: int,
    seed: int,
    shuffle: bool = True,
    form: objectives.Form | None = None,
) -> Batches:
    """Returns batches of the documents source[i][text_key]; arguments as in `open_batches`.

    `form` says what windows become; None: windows of seq_len + 1 tokens, as they are.

    Raises:
      UserError: the source is empty, or its examples have no text at `text_key`.
    """
    if len(source) == 0:
        raise UserError("config.data: the split has no documents; choose another split")
    _check_text(source[0], text_key)
    order = functools.partial(_shuffled, size=len(source), seed=seed) if shuffle else lambda n: n % len(source)

    def encode(document: int) -> np.ndarray:
        text = source[order(document)][text_key]
        return np.concatenate([np.array([tokenizer.bos_id], np.int32), tokenizer.encode(text)])

    form = form or objectives.NextToken().form(tokenizer, seq_len)
    read = _rows(_packing_reader(encode, num_rows, form.window), form, seed)
    settings = {
        "num_rows": num_rows,
        "seq_len": seq_len,
        "seed": seed,
        "shuffle": int(shuffle),
        "documents": len(source),
        "vocab_size": tokenizer.vocab_size,
    }
    return Batches(read, {row: (row, 0) for row in rows}, ("document", "offset"), settings)


def random_batches(
    vocab_size: int,
    *,
    rows: Sequence[int],
    num_rows: int,
    seq_len: int,
    seed: int,
    form: objectives.Form | None = None,
) -> Batches:
    """Returns batches of uniform tokens below `vocab_size`; a window depends on (seed, row, index) alone."""
    form = form or objectives.NextToken().form(None, seq_len)

    def read(row: int, position: Position) -> tuple[np.ndarray, Position]:
        (index,) = position
        rng = np.random.default_rng([seed, row, index])
        return rng.integers(vocab_size, size=form.window, dtype=np.int32), (index + 1,)

    settings = {"num_rows": num_rows, "seq_len": seq_len, "seed": seed, "vocab_size": vocab_size}
    return Batches(_rows(read, form, seed), dict.fromkeys(rows, (0,)), ("index",), settings)


def _close(open_iterators: list[grain.experimental.ThreadPrefetchDatasetIterator]) -> None:
    """Stops the thread and forgets the iterator, whose __del__ would fail while the interpreter goes down."""
    while open_iterators:
        open_iterators.pop().close()


class _Rows:
    """Reads one window a row at each step: what the prefetch runs, with grain's get_state and set_state."""

    def __init__(self, read: ReadRow, start: dict[int, Position]):
        self._read = read
        self._positions = start

    def __next__(self) -> dict[str, np.ndarray]:
        pairs = {row: self._read(row, position) for row, position in self._positions.items()}
        # A fresh dict: the prefetch keeps the state behind each batch that waits.
        self._positions = {row: position for row, (_, position) in pairs.items()}
        rows = [row for row, _ in pairs.values()]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def get_state(self) -> dict[int, Position]:
        return self._positions

    def set_state(self, state: dict[int, Position]) -> None:
        self._positions = state


def _rows(read: ReadWindow, form: objectives.Form, seed: int) -> ReadRow:
    """Returns the reader of the arrays that a form makes of windows; they depend on (seed, row, position) alone."""

    def read_row(row: int, position: Position) -> tuple[dict[str, np.ndarray], Position]:
        window, behind = read(row, position)
        return form.arrays(window, (seed, row, *position)), behind

    return read_row


def _packing_reader(encode: Callable[[int], np.ndarray], num_rows: int, length: int) -> ReadWindow:
    """Returns a reader of windows of `length` tokens from the documents of a row, joined.

    A position is (document, offset): a place in the endless order of documents, and a token in that document.
    """
    # row -> (document, its tokens): encoded once, cut many times
    current: dict[int, tuple[int, np.ndarray]] = {}

    def read(row: int, position: Position) -> tuple[np.ndarray, Position]:
        document, offset = position
        parts, missing = [], length
        while missing:
            if current.get(row, (-1,))[0] != document:
                current[row] = (document, encode(document))
            tokens = current[row][1]
            part = tokens[offset : offset + missing]
            parts.append(part)
            missing -= len(part)
            offset += len(part)
            if offset >= len(tokens):
                document, offset = document + num_rows, 0
        return np.concatenate(parts), (document, offset)

    return read


def _shuffled(n: int, *, size: int, seed: int) -> int:
    """Returns the source index of document `n` of the endless order: each epoch a new permutation."""
    epoch, index = divmod(n, size)
    if size <= SMALL:
        return int(_permutation(size, seed, epoch)[index])
    epoch_seed = (_spread(seed) + epoch) % 2**32
    return grain.experimental.index_shuffle(index, max_index=size - 1, seed=epoch_seed, rounds=4)


@functools.lru_cache(maxsize=64)  # rows of one batch may be in different epochs
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns int64[size]; by RandomState, whose results never change between versions of numpy."""
    return np.random.RandomState(np.random.PCG64([seed, epoch])).permutation(size)


@functools.cache
def _spread(seed: int) -> int:
    """Hashes `seed` to 32 bits, lest epoch 1 of seed 0 be epoch 0 of seed 1."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def _check_text(example: Any, text_key: str) -> None:
    """Checks that `example` has text at `text_key`."""
    if text_key not in example:
        raise UserError(f"config.data.text_key: no feature {text_key!r}; features: {', '.join(example)}")
    if not isinstance(example[text_key], str | bytes):
        kind = type(example[text_key]).__name__
        texts = [key for key, value in example.items() if isinstance(value, str | bytes)]
        raise UserError(
            f"config.data.text_key: feature {text_key!r} is {kind}, not text; features with text: "
            f"{', '.join(texts) or 'none, choose another dataset'}"
        )
