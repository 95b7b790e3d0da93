"""Makes token batches of documents, the same on any number of processes. This module shuffles, packs and prefetches.

A global batch has `num_rows` rows. Each row is an independent stream. Row r reads documents r, r + num_rows, r + 2 * num_rows, ... of
the endless order, which has a new permutation for every epoch. It puts around each document what the tokenizer says
(`Tokenizer.document`), concatenates them and cuts windows. An objective turns each window into a row of arrays. A process reads only its
own rows, so each document is tokenized once globally, and a batch does not depend on the process that reads it.

A row's only state is its position, a few integers. (grain's concat-then-split would pack too. But its state has tuples, and after a
round trip through JSON it silently drops a document.) Rows are independent, so several threads make them, and any number of threads
makes the same batch.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import numbers
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from zerojax import errors
from zerojax.data import damaged as damaged_lib
from zerojax.data import objectives
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import records
from zerojax.errors import UserError

PREFETCHED = 2  # batches that are made ahead
# Batches after the one that is returned that are made, or cannot be. So a run learns of the latter a step before it: its processes agree
# on a stop a step late.
IN_HAND = 2
WORKERS = min(8, os.cpu_count() or 1)  # threads that make rows; to encode a text needs no lock of Python
LOOKED = 1000  # documents of which empty ones are told
USUAL = 0.1  # the share of empty ones that a dataset may have, such as the empty files among the source of a library
RANDOM = "random"  # the data.name of random tokens
# grain's index_shuffle needs no memory, but walks through blocks of 2**16. It takes 4 us an index for a large source,
# and 5 ms for one of 13 documents. Up to this many documents, an epoch is permuted in memory instead.
SMALL = 2**14

Position = tuple[int, ...]
# (row, position) -> (the window there: int32[window], the position after it, the number of documents that begin in it)
ReadWindow = Callable[[int, Position], tuple[np.ndarray, Position, int]]
# (row, position) -> (the arrays of the window there, the position after it)
ReadRow = Callable[[int, Position], tuple[dict[str, np.ndarray], Position]]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the training and the held-out examples of a run come from.

    Attributes:
      name: a dataset's name, or RANDOM for random tokens.
      data_dir: the directory in which `source.prepare` wrote the dataset.
      train_split, eval_split: of the dataset; "" for no held-out examples. Random tokens ignore them.
      train_file, eval_file: paths, URLs or patterns, which are read instead if the first is not "".
    """

    name: str
    data_dir: str | os.PathLike[str]
    train_split: str
    eval_split: str
    train_file: str = ""
    eval_file: str = ""

    @property
    def is_random(self) -> bool:
        """Returns whether tokens are random."""
        return self.name == RANDOM and not self.train_file

    @property
    def has_held_out(self) -> bool:
        """Returns whether examples are held out."""
        return bool(self.eval_file if self.train_file else self.eval_split)

    def of(self, is_train: bool) -> tuple[str, str]:
        """Returns the split or the file of training or held-out examples, and the argument that names it."""
        kind = "file" if self.train_file else "split"
        place = f"{'train' if is_train else 'eval'}_{kind}"
        return getattr(self, place), place

    def files(self, is_train: bool) -> list[str]:
        """Returns the files that hold the examples, which are found."""
        found, key = self.of(is_train)
        return records.matching(found) if self.train_file else source_lib.files(self.name, found, self.data_dir, key)

    def open(self, is_train: bool, needs: str = "") -> source_lib.Source:
        """Opens the examples. Those of files must have text in the field `needs`, if that is not "".

        Raises:
          UserError: see `source.open_source` and `records.Files`; held-out examples are training examples too.
        """
        found, key = self.of(is_train)
        if self.train_file:
            return records.Files(found, key, needs)
        if not is_train:
            source_lib.check_held_out(self.name, self.train_split, self.eval_split, self.data_dir)
        return source_lib.open_source(self.name, found, self.data_dir, key)


class Batches:
    """Yields {name: int32[len(rows), length]} endlessly. Background threads make batches ahead.

    Attributes:
      count_tokens: (enough) -> the most tokens that the documents can have, counted up to `enough`; random tokens have no end.
      failure: why fewer than IN_HAND batches come after the one that was returned; None as long as they do.
    """

    count_tokens: Callable[[int], int] = staticmethod(lambda enough: enough)

    def __init__(
        self,
        read: ReadRow,
        start: dict[int, Position],
        fields: tuple[str, ...],
        settings: Mapping[str, int | str],
        workers: int = WORKERS,
    ):
        """Starts each row of `start` at its position.

        Args:
          read: reads one row. Several threads call it, each for other rows.
          start: the first position of each row.
          fields: the names of a position's integers.
          settings: the settings on which the meaning of a position depends. `set_state` rejects a state with others.
          workers: the threads that make rows.
        """
        self._rows = tuple(start)
        self._fields = fields
        self._settings = settings
        self._state, self._in_hand = start, collections.deque[tuple[dict[str, np.ndarray], dict[int, Position]]]()
        self.failure: UserError | None = None
        made = _Rows(read, start, workers)
        self._open: list[Any] = [made, grain.experimental.ThreadPrefetchDatasetIterator(made, PREFETCHED)]
        # Runs at close(), when self is garbage-collected, or at exit while threads can still be joined: whichever is first.
        self._finalizer = weakref.finalize(self, _close, self._open)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns the next batch, in the order of `rows`.

        Raises:
          UserError: there is none, since a document cannot be read; see `failure`.
        """
        iterator = self._iterator
        while self.failure is None and len(self._in_hand) <= IN_HAND:
            try:
                self._in_hand.append((next(iterator), iterator.get_state()))
            except UserError as error:
                self.failure = error
        if not self._in_hand:
            assert self.failure is not None
            raise self.failure
        found, self._state = self._in_hand.popleft()
        return found

    def get_state(self) -> dict[str, Any]:
        """Returns the positions after the last returned batch, by row ("0", "1", ...), as JSON values.

        The union (`|`) of the states of all processes is the global state.
        """
        positions = self._state
        return {
            str(row): {**dict(zip(self._fields, positions[row], strict=True)), **self._settings} for row in self._rows
        }

    @property
    def positions(self) -> Mapping[int, Position]:
        """Returns the position of each row after the last returned batch."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from the positions in `state`, which may have more rows than this process reads.

        Raises:
          UserError: a row is missing, or the state was saved with other settings.
        """
        self._state = {row: self._position(row, state) for row in self._rows}
        self._in_hand.clear()
        self.failure = None
        self._iterator.set_state(self._state)

    def close(self) -> None:
        """Stops the background threads. `next` fails after that."""
        self._finalizer()

    @property
    def _iterator(self) -> grain.experimental.ThreadPrefetchDatasetIterator:
        if not self._open:
            raise ValueError("these batches are closed; make new ones")
        return self._open[-1]

    def _position(self, row: int, state: dict[str, Any]) -> Position:
        """Returns the position of `row` in `state`, and checks it."""
        saved = state.get(str(row)) if isinstance(state, Mapping) else "no table"
        if saved is None:
            raise UserError(
                f"data state: row {row} is not among the {len(state)} saved rows; restore the merged state of all processes"
            )
        is_table = isinstance(saved, Mapping)
        for key, value in self._settings.items() if is_table else ():
            if saved.get(key) != value:
                raise UserError(
                    f"data state: row {row} was saved with {key}={saved.get(key)} and this run has "
                    f"{key}={value}; resume with the saved {key}, or start without the state"
                )
        if not is_table or not all(isinstance(saved.get(field), numbers.Integral) for field in self._fields):
            raise UserError(
                f"data state: row {row} does not have {' and '.join(self._fields)}; restore an undamaged state, or start without it"
            )
        return tuple(int(saved[field]) for field in self._fields)


def open_batches(
    places: Places,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    is_train: bool,
    text_key: str,
    rows: Sequence[int],
    num_rows: int,
    seq_len: int,
    seed: int,
    objective: objectives.Objective = objectives.OBJECTIVES["next_token"],
    damaged: damaged_lib.Damaged | None = None,
) -> Batches:
    """Returns batches of a prepared dataset's split, of files, or of random tokens.

    Args:
      places: where the text comes from.
      tokenizer: the tokenizer. For random tokens, only vocab_size and sentinels are used.
      is_train: reads the training text, in a new order in every epoch; or else the held-out text, in stored order.
      text_key: the feature with the text.
      rows: the rows that this process reads, in the order of its batches.
      num_rows: rows in the global batch.
      seq_len: tokens in a sequence.
      seed: the seed of the order of documents, or of the random tokens.
      objective: turns windows into rows.
      damaged: what follows from a document that cannot be read; None: it raises.

    Raises:
      UserError: see `Places.open`, `make_batches` and the objective's `form`.
    """
    form = objective.form(tokenizer, seq_len)
    sizes: dict[str, Any] = {"rows": rows, "num_rows": num_rows, "seq_len": seq_len, "seed": seed, "form": form}
    if places.is_random:
        return random_batches(tokenizer.vocab_size, **sizes)
    source = damaged_lib.Readable(places.open(is_train, text_key), text_key, damaged or damaged_lib.Damaged())
    _check_filled(source, text_key, places.of(is_train)[1], usual=0.0 if places.train_file else USUAL)
    return make_batches(source, tokenizer, text_key=text_key, shuffle=is_train, **sizes)


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
    """Returns batches of the documents source[i][text_key]. The arguments are those of `open_batches`.

    Without `shuffle` documents are read in stored order in every epoch. `form` turns windows into rows; if None, rows are windows of
    seq_len + 1 tokens.

    Raises:
      UserError: the source is empty, or its examples have no text at `text_key`.
    """
    if len(source) == 0:
        raise UserError("train_split: the split has no documents; choose another split")
    _check_text(source[0], text_key)
    order = functools.partial(shuffled, size=len(source), seed=seed) if shuffle else lambda n: n % len(source)

    def encode(row: int, place: Position) -> np.ndarray:
        index = order(place[0])
        text = source[index][text_key]
        if isinstance(text, damaged_lib.Absent):
            return np.zeros(0, np.int32)
        with errors.below(f"{source_lib.place_of(source, index, 'document')}: "):
            return document_ids(tokenizer, text)

    form = form or objectives.NextToken().form(tokenizer, seq_len)
    read = _rows(packing_reader(encode, lambda row, place: (place[0] + num_rows,), form.window), form, seed)
    settings = {
        "num_rows": num_rows,
        "seq_len": seq_len,
        "seed": seed,
        "shuffle": int(shuffle),
        "documents": len(source),
        "vocab_size": tokenizer.vocab_size,
    }
    made = Batches(read, {row: (row, 0) for row in rows}, ("document", "offset"), settings)
    made.count_tokens = functools.partial(_count_tokens, source, text_key)
    return made


def document_ids(tokenizer: tokenizer_lib.Tokenizer, text: str | bytes) -> np.ndarray:
    """Returns the ids of a document in a stream of documents, int32[length], with what stands around it there."""
    before, after, _ = tokenizer.document
    return np.concatenate([np.array(before, np.int32), tokenizer.encode(text), np.array(after, np.int32)])


def random_batches(
    vocab_size: int, *, rows: Sequence[int], num_rows: int, seq_len: int, seed: int, form: objectives.Form | None = None
) -> Batches:
    """Returns batches of uniformly random tokens below `vocab_size`. A window depends only on (seed, row, index)."""
    form = form or objectives.NextToken().form(None, seq_len)

    def read(row: int, position: Position) -> tuple[np.ndarray, Position, int]:
        (index,) = position
        rng = np.random.default_rng([seed, row, index])
        return rng.integers(vocab_size, size=form.window, dtype=np.int32), (index + 1,), 0

    settings = {"num_rows": num_rows, "seq_len": seq_len, "seed": seed, "vocab_size": vocab_size}
    return Batches(_rows(read, form, seed), dict.fromkeys(rows, (0,)), ("index",), settings)


def _close(open_iterators: list[Any]) -> None:
    """Stops the threads and drops the iterator, whose __del__ would fail while the interpreter shuts down."""
    while open_iterators:
        open_iterators.pop().close()


class _Rows:
    """Reads one window per row at each step. The prefetch thread runs it, and uses grain's get_state and set_state."""

    def __init__(self, read: ReadRow, start: dict[int, Position], workers: int):
        self._read = read
        self._positions = start
        self._workers = max(1, min(workers, len(start)))
        self._pool = concurrent.futures.ThreadPoolExecutor(self._workers, "rows")

    def __next__(self) -> dict[str, np.ndarray]:
        rows = list(self._positions.items())
        shares = [rows[worker :: self._workers] for worker in range(self._workers)]

        def read(share: list[tuple[int, Position]]) -> list[tuple[int, tuple[dict[str, np.ndarray], Position]]]:
            return [(row, self._read(row, position)) for row, position in share]

        made = read(rows) if self._workers == 1 else [pair for part in self._pool.map(read, shares) for pair in part]
        found = dict(made)
        # A new dict, because the prefetch keeps the state after each batch that it made ahead.
        self._positions = {row: found[row][1] for row, _ in rows}
        arrays = [found[row][0] for row, _ in rows]
        return {name: np.stack([row[name] for row in arrays]) for name in arrays[0]}

    def get_state(self) -> dict[int, Position]:
        return self._positions

    def set_state(self, state: dict[int, Position]) -> None:
        self._positions = state

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _rows(read: ReadWindow, form: objectives.Form, seed: int) -> ReadRow:
    """Returns a reader of the arrays that a form makes of windows. Their random draws depend only on (seed, row, position)."""

    def read_row(row: int, position: Position) -> tuple[dict[str, np.ndarray], Position]:
        window, next_position, _ = read(row, position)
        return form.arrays(window, (seed, row, *position)), next_position

    return read_row


def packing_reader(
    encode: Callable[[int, Position], np.ndarray], following: Callable[[int, Position], Position], length: int
) -> ReadWindow:
    """Returns a reader of windows of `length` tokens from the concatenated documents of a row.

    A position is (*place, offset): the place of a document in the endless order, and the index of a token in that document.

    Args:
      encode: (row, place) -> the document's tokens: int32[length], which may be none.
      following: (row, place) -> the place of the row's document after it, once it is encoded.
      length: the tokens of a window.
    """
    # row -> (place, the tokens there), so that a document is encoded once
    current: dict[int, tuple[Position, np.ndarray]] = {}

    def read(row: int, position: Position) -> tuple[np.ndarray, Position, int]:
        *first, offset = position
        place, parts, missing, begun = tuple(first), [], length, 0
        while missing:
            if current.get(row, (None,))[0] != place:
                current[row] = (place, encode(row, place))
            tokens = current[row][1]
            part = tokens[offset : offset + missing]
            begun += bool(len(part)) and not offset
            parts.append(part)
            missing -= len(part)
            offset += len(part)
            if offset >= len(tokens):
                place, offset = following(row, place), 0
        return np.concatenate(parts), (*place, offset), begun

    return read


def shuffled(n: int, *, size: int, seed: int) -> int:
    """Returns the source index of document `n` of the endless order. Each epoch is a new permutation."""
    epoch, index = divmod(n, size)
    if size <= SMALL:
        return int(_permutation(size, seed, epoch)[index])
    epoch_seed = (_spread(seed) + epoch) % 2**32
    return grain.experimental.index_shuffle(index, max_index=size - 1, seed=epoch_seed, rounds=4)


@functools.lru_cache(maxsize=64)  # rows of one batch may be in different epochs
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation, int64[size]. It uses RandomState, whose results are the same in all versions of numpy."""
    return np.random.RandomState(np.random.PCG64([seed, epoch])).permutation(size)


@functools.cache
def _spread(seed: int) -> int:
    """Hashes `seed` to 32 bits, so that epoch 1 of seed 0 is not epoch 0 of seed 1."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def _count_tokens(source: source_lib.Source, text_key: str, enough: int) -> int:
    """Returns an upper bound of the tokens in a source: its bytes and separators. Stops reading where it reaches `enough`."""
    count = 0
    for index in range(len(source)):
        if count >= enough:
            break
        count += 1 + len(source[index][text_key])
    return min(count, enough)


def _check_filled(source: source_lib.Source, text_key: str, key: str, *, usual: float) -> None:
    """Warns if a larger share than `usual` of the first documents is empty: the model learns a separator of each.

    Raises:
      UserError: all of them are empty.
    """
    looked = min(len(source), LOOKED)
    if not looked:
        return
    _check_text(source[0], text_key)
    empty = [index for index in range(looked) if not source[index].get(text_key, " ").strip()]
    if len(empty) <= usual * looked:
        return
    first = source_lib.place_of(source, empty[0], "document")
    told = f"{key}: {len(empty)} of the first {looked} documents have no text in {text_key!r}, such as {first}"
    if len(empty) == looked:
        raise UserError(f"{told}; name the feature with the text (`text_key`), or other data")
    warnings.warn(f"{told}; the model learns a separator of each, so remove them", stacklevel=3)


def _check_text(example: Any, text_key: str) -> None:
    """Raises a UserError if `example` has no text at `text_key`."""
    if text_key not in example:
        raise UserError(f"text_key: no feature {text_key!r}; features: {', '.join(example)}")
    if not isinstance(example[text_key], str | bytes):
        kind = type(example[text_key]).__name__
        texts = [key for key, value in example.items() if isinstance(value, str | bytes)]
        raise UserError(
            f"text_key: feature {text_key!r} is {kind}, not text; features with text: "
            f"{', '.join(texts) or 'none, choose another dataset'}"
        )
