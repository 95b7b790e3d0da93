"""Mixes sources into one stream of rows. This module chooses the source of each row by weights, and reads its documents as they are needed.

Every row of a global batch is a stream of its own, and each of its windows is of one source: of text the next tokens of its documents,
of a task as many examples as fit. Which source is as in systematic sampling: each row has a point in [0, 1), the points of a batch are
equally far apart and move on together from step to step, and the shares of the sources divide [0, 1). So a batch has each source in its
share, whatever the weights of its step are. Rows of tasks have padding, and documents any length: a row's shares are shifted a little
towards the sources that are below theirs, in tokens or in examples, in what it has read so far.

A source is blocks of documents (`blocks`). The endless order has a new permutation of them for every epoch. Row r reads GROUP blocks at a
time, those from (r + n * num_rows) * GROUP on, and mixes their documents. So memory is bounded, a process reads what its rows need, and a
row's position is a few integers: the number of its windows, and of each source the group of blocks, the document in it, the token in
that, and by how much the source is below its share. All sums are of integers: any host continues exactly where another stopped.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import errors
from zerojax.data import batches, blocks, damaged, kept, locations, objectives
from zerojax.data import parts as parts_lib
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.batches import Batches, Position
from zerojax.data.damaged import HERE
from zerojax.data.pairs import rows, tasks
from zerojax.errors import UserError

SOURCES = "sources"  # an array of a row: of each token that is read the number of its source, from 1
TOKENS, EXAMPLES = "tokens", "examples"
BY = (TOKENS, EXAMPLES)  # what weights are shares of
_SCALE = 2**20  # of a share, which is a whole number
_GOLDEN = (
    648055  # of _SCALE: how far points move in a step, the golden ratio, so that those of one row are spread evenly too
)
_SHIFTED = 16  # rows: a source that is as many below its share has all of the next
_FIELDS = ("group", "document", "token", "below")  # of a position, for each source
_SAMPLED = 8  # blocks of a source of which so many documents each are read at the start
_MOST_BAD = 1000  # documents in a row that cannot be read, beside one for each block
_LOOKED = 1000  # steps of which the weights tell how often a source is read
_EQUAL = 5e-4  # a difference of shares that is not told

Example = Mapping[str, Any]
Weight = tuple[tuple[int, float], ...]  # (step, weight) at some steps, linear between two


@dataclasses.dataclass(frozen=True)
class MixedSource:
    """One source of a mixture.

    Attributes:
      title: names it in metrics and lines.
      places: where its training and its held-out examples come from.
      weight: its part of a batch, beside the weights of the others; at some steps, and linear between two of them.
      text_key: the field with the text of a document.
      task: what is learned of its examples; None for text.
      where: names it in errors.
    """

    title: str
    places: batches.Places
    weight: Weight = ((0, 1.0),)
    text_key: str = "text"
    task: tasks.TaskSettings | None = None
    where: str = ""

    def weight_at(self, step: int) -> float:
        """Returns the weight at a step; before the first and after the last of its steps it is constant."""
        steps = [at for at, _ in self.weight]
        after = bisect.bisect_right(steps, step)
        if after in (0, len(steps)):
            return self.weight[min(after, len(steps) - 1)][1]
        (begin, low), (end, high) = self.weight[after - 1 : after + 1]
        return low + (high - low) * (step - begin) / (end - begin)

    def open(self, is_train: bool, num_rows: int, cache: pathlib.Path | None) -> blocks.DocumentBlocks:
        """Opens the training or the held-out examples; see `blocks.open_files` for `num_rows` and `cache`.

        Raises:
          UserError: see `blocks.open_files`, `records.Files` and `Places.open`.
        """
        found, key = self.places.of(is_train)
        with errors.below(self.where):
            if self.places.train_file and (locations.is_remote(found) or blocks.is_known(found)):
                columns = () if self.task else (self.text_key,)
                return blocks.open_files(found, key, num_rows, columns=columns, cache=cache)
            source = self.places.open(is_train)
        if self.places.train_file:
            return blocks.of_source(source, found, lambda: blocks.fingerprint(locations.matching(found, key)))
        name = f"{self.places.name}, split {found!r}"
        return blocks.of_source(source, name, lambda: name)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Returns the names of the classes of a dataset's features."""
        return {} if self.places.train_file else source_lib.class_names(self.places.name, self.places.data_dir)


@dataclasses.dataclass(frozen=True)
class RowMaker:
    """What the rows of a run are made with.

    Attributes:
      tokenizer: encodes texts.
      text: turns windows of text into rows.
      form: the form of rows of examples with answers.
      lengths: of the arrays of a row, by name.
      packs: whether a row holds several examples.
      folder: of the tokenizer's files; None for none.
    """

    tokenizer: tokenizer_lib.Tokenizer
    text: objectives.Form
    form: tasks.RowForm | None
    lengths: Mapping[str, int]
    packs: bool = True
    folder: pathlib.Path | None = None


class SourceMixture:
    """The sources of a run, which are opened.

    Attributes:
      sources: all of them. Of those that cannot be opened nothing is read, if damaged data are skipped.
      notes: lines about them.
    """

    has_pairs = False

    def __init__(
        self,
        sources: Sequence[MixedSource],
        make: RowMaker,
        num_rows: int,
        *,
        by: str = TOKENS,
        on_bad: str = damaged.STOP,
        cache: pathlib.Path | None = None,
    ):
        """Opens the sources.

        Args:
          sources: at least one.
          make: makes rows.
          num_rows: rows in the global batch.
          by: what weights are shares of, one of BY.
          on_bad: what follows from a document or a source that cannot be read, one of `damaged.ON_BAD`.
          cache: a folder for what takes long to make; None for none.

        Raises:
          UserError: one cannot be opened, or is empty.
        """
        self.sources, self.notes = tuple(sources), list[str]()
        self._make, self._by, self._num_rows, self._cache = make, by, num_rows, cache
        self._bad = damaged.Damaged(on_bad)
        self._documents: dict[str, float] = {}  # of each source, about
        self._train = [self._opened(source) for source in sources]
        if not any(self._train):
            raise UserError("sources: none of them can be read; see the lines above")

    def _opened(self, source: MixedSource) -> "blocks.DocumentBlocks | None":
        try:
            found = self._open(source, True)
            self._check(source, found)
            return found
        except UserError as error:
            if not self._bad.skips:
                raise
            self.notes.append(f"source {source.title} is left out: {error}")
            return None

    def _open(self, source: MixedSource, is_train: bool) -> blocks.DocumentBlocks:
        return source.open(is_train, self._num_rows, self._cache)

    def _check(self, source: MixedSource, opened: blocks.DocumentBlocks) -> None:
        """Reads the first document of a source, so that one that is empty, or is not what its settings say, is known before the first step.

        Raises:
          UserError: it is.
        """
        for number in range(min(len(opened), _MOST_BAD)):
            block = opened[number]
            if len(block):
                try:
                    self._encoder(source)(block[0])
                except UserError as error:
                    if not self._bad.skips:
                        raise self._bad.refusal(block, 0, error) from error
                return
        found, key = source.places.of(True)
        raise UserError(f"{source.where}{key}: {found!r} has no examples; name one that has some")

    @property
    def held_out(self) -> "Sequence[MixedSource] | None":
        """Returns the sources that have held-out examples; None if none has."""
        return [source for source in self.sources if source.places.has_held_out] or None

    @functools.cached_property
    def _chat(self) -> tuple[tuple[int, ...], str]:
        make = self._make
        task = next((source.task for source in self.sources if source.task and source.task.task == tasks.CHAT), None)
        if task is None or make.form is None:
            return (), ""
        return tasks.chat_of(make.tokenizer, task, make.form, make.folder)

    @property
    def stops(self) -> tuple[int, ...]:
        """Returns the special tokens with which a chat template ends answers; () for none."""
        return self._chat[0]

    @property
    def template(self) -> str:
        """Returns the template of conversations, one of Jinja; "" for none."""
        return self._chat[1]

    @property
    def fingerprint(self) -> str:
        """Returns what tells the training examples apart from others; "" if a source is left out."""
        found = [opened.fingerprint() for opened in self._train if opened is not None]
        return "" if len(found) < len(self.sources) else kept.key(found)[:8]

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the number of terms of a batch's mean loss."""
        return jnp.sum(parts_lib.labeled(batch) > 0) if "labeled" in batch else jnp.ones(())

    def open(self, is_train: bool, own: Sequence[int], num_rows: int, seed: int) -> Batches:
        """Returns training batches, or held-out ones, which are in stored order and have as many tokens of each source.

        Args:
          is_train: which.
          own: the rows of a global batch that this process reads, in the order of its batches.
          num_rows: rows in the global batch.
          seed: of the order of documents.
        """
        if is_train:
            opened = self._train
            weights: list[Callable[[int], float]] = [source.weight_at for source in self.sources]
        else:
            opened = [self._open(source, False) if source.places.has_held_out else None for source in self.sources]
            weights = [lambda step: 1.0] * len(opened)
        readers = [
            None if found is None else self._reader(number, found, num_rows, seed, is_train)
            for number, found in enumerate(opened)
        ]
        chooser = _Chooser(weights, readers, self._by, num_rows, self._make.lengths)
        fields = ("step", *(f"{field}_{number}" for number in range(len(readers)) for field in _FIELDS))
        settings: dict[str, int | str] = {
            "num_rows": num_rows,
            "length": max(self._make.lengths.values()),
            "seed": seed,
            "shuffle": int(is_train),
            "vocab_size": self._make.tokenizer.vocab_size,
            "mixed_by": self._by,
            **{
                f"source_{number}": f"{len(found)} blocks, {found.fingerprint()}"
                for number, found in enumerate(opened)
                if found is not None and is_train
            },
        }
        return Batches(chooser.read, dict.fromkeys(own, (0,) * len(fields)), fields, settings)

    def batches(self, num_rows: int) -> int:
        """Returns how many batches an evaluation reads at most: a stream has no end."""
        return 2**31

    def _reader(
        self, number: int, opened: blocks.DocumentBlocks, num_rows: int, seed: int, shuffle: bool
    ) -> "_TextReader | _ExampleReader":
        source, make = self.sources[number], self._make
        documents = _Documents(opened, num_rows, seed, shuffle=shuffle)
        encode = functools.partial(_encoded, documents, self._encoder(source), self._bad, source)
        return (_TextReader if source.task is None else _ExampleReader)(number, documents, encode, make, seed)

    def _encoder(self, source: MixedSource) -> Callable[[Example], Any]:
        """Returns a function that encodes a document: to its tokens, or to a `tasks.Example`. Any thread may call it."""
        if source.task is None:
            return functools.partial(_text_ids, self._make.tokenizer, source.text_key)
        names, own = source.names(), threading.local()

        def encode(example: Example) -> tasks.Example:
            if not hasattr(own, "encode"):
                own.encode, _ = self._task_encoder(source, names)
            found: tasks.Example = own.encode(example, HERE)
            return found

        return encode

    def _task_encoder(self, source: MixedSource, names: Mapping[str, Sequence[str]]) -> tuple[Any, Any]:
        make = self._make
        assert source.task is not None and make.form is not None
        how: dict[str, Any] = {"name": source.title, "folder": make.folder, "names": names}
        return tasks.encoder(make.tokenizer, source.task, make.form, **how)

    def _sample(self, source: MixedSource, opened: blocks.DocumentBlocks) -> "_Sample":
        """Returns what some documents of a source tell about all. Those that cannot be read are told when they are read."""
        counts, sizes, notes = [], list[int](), list[str]()
        encode, notes_of = self._encoder(source), None
        if source.task is not None:
            one, notes_of = self._task_encoder(source, source.names())
            encode = functools.partial(_call, one)
        number = _SAMPLED if opened.group > 1 else _SAMPLED**2  # of blocks, which may have a document each
        for block in (opened[index] for index in sorted({at * len(opened) // number for at in range(number)})):
            counts.append(len(block))
            for index in range(0, len(block), max(1, len(block) // _SAMPLED)):
                with contextlib.suppress(UserError):
                    found = encode(block[index])
                    sizes.append(len(found) if source.task is None else len(found.inputs))
        if notes_of is not None:
            notes = [note.replace(f"; the first: {HERE}", "") for note in notes_of(len(sizes))]
        return _Sample(sum(counts) / len(counts) * len(opened), sum(sizes) / max(1, len(sizes)), notes)

    def told(self, steps: int) -> list[str]:
        """Returns a line for each source: its share, its size and how often a run of so many steps reads it, by a sample of it."""
        known = [(source, found) for source, found in zip(self.sources, self._train) if found is not None]
        samples = [self._sample(source, found) for source, found in known]
        self._documents = {source.title: found.documents for (source, _), found in zip(known, samples)}
        weights = np.array(
            [[source.weight_at(step) for source, _ in known] for step in range(0, steps, -(-steps // _LOOKED))]
        )
        shares = weights / np.maximum(weights.sum(1, keepdims=True), 1e-30)
        tokens = shares if self._by == TOKENS else shares * [found.tokens for found in samples]
        tokens = tokens / np.maximum(tokens.sum(1, keepdims=True), 1e-30)
        read = tokens.mean(0) * steps * self._num_rows * max(self._make.lengths.values())
        lines = []
        for number, ((source, _), found) in enumerate(zip(known, samples)):
            first, last, size = shares[0, number], shares[-1, number], found.documents * found.tokens
            share = f"{first:.1%}" if abs(first - last) < _EQUAL else f"{first:.1%} to {last:.1%}"
            times = read[number] / max(1.0, size)
            lines.append(
                f"source {source.title}: {share} of the {self._by}; about {_short(found.documents)} documents with {_short(size)} tokens, "
                f"read {times:.2g} times in {steps} steps{' (upsampled)' if times > 1 else ''}"
            )
            lines += found.notes
        return lines

    def summary(self, made: Batches) -> list[str]:
        """Returns lines about what was read and what was skipped since the start. All processes must call it."""
        positions = np.array(list(made.positions.values()), float)
        times = []
        for number, (source, found) in enumerate(zip(self.sources, self._train)):
            if found is not None:
                groups, documents = positions[:, 1 + number * len(_FIELDS) : 3 + number * len(_FIELDS)].mean(0)
                of_group = self._documents.get(source.title, 0.0) / len(found) * found.group
                read = groups + (min(1.0, documents / of_group) if of_group else 0.0)
                times.append(f"{source.title} {read * found.group * self._num_rows / len(found):.2g} times")
        lines = [f"sources were read about so often: {', '.join(times)}"] if len(times) > 1 else []
        return lines + self._bad.summary()


class _Sample(NamedTuple):
    documents: float  # about so many in all
    tokens: float  # the mean of a document's
    notes: list[str]


class _Documents:
    """The documents of a source in the endless order, by row and place: (group of blocks, document)."""

    def __init__(self, opened: blocks.DocumentBlocks, num_rows: int, seed: int, *, shuffle: bool):
        self._blocks, self._num_rows, self._seed, self._shuffle = opened, num_rows, seed, shuffle
        self._held: dict[int, _Group] = {}
        self.nothing = collections.Counter[int]()  # how many places of a row in succession had no document
        self.most_nothing = _MOST_BAD + len(opened)

    def find(
        self, row: int, place: Position, bad: Callable[[int, UserError], None]
    ) -> tuple[source_lib.Source, int, int] | None:
        """Returns the block, the index and the block's number of a document, or None where the group has none."""
        held = self._held.get(row)
        if held is None or held.number != place[0]:
            held = self._held[row] = self._group(row, place[0], bad)
        if place[1] >= len(held.order):
            return None
        at = int(held.order[place[1]])
        block = int(np.searchsorted(held.starts, at, side="right")) - 1
        return held.blocks[block], at - int(held.starts[block]), held.numbers[block]

    def following(self, row: int, place: Position) -> Position:
        """Returns the place after one that was found."""
        held = self._held[row]
        group, document = place
        return (group, document + 1) if document + 1 < len(held.order) else (group + 1, 0)

    def _group(self, row: int, number: int, bad: Callable[[int, UserError], None]) -> "_Group":
        size, found, numbers = self._blocks.group, [], []
        first = (number * self._num_rows + row) * size
        parts = [self._order(index) for index in range(first, first + size)]
        for part, block in zip(parts, self._blocks.several(parts)):
            if isinstance(block, UserError):
                bad(part, block)
            else:
                found.append(block)
                numbers.append(part)
        starts = np.cumsum([0, *map(len, found)])
        order = np.arange(starts[-1])
        if self._shuffle and size > 1:
            order = np.random.RandomState(np.random.PCG64([self._seed, first])).permutation(len(order))
        return _Group(number, found, numbers, starts, order)

    def _order(self, index: int) -> int:
        count = len(self._blocks)
        return batches.shuffled(index, size=count, seed=self._seed) if self._shuffle else index % count


class _Group(NamedTuple):
    """The blocks of a row that are in memory."""

    number: int
    blocks: list[source_lib.Source]
    numbers: list[int]  # of the blocks
    starts: np.ndarray  # the number of the first document of each
    order: np.ndarray  # of the documents


def _encoded(
    documents: _Documents,
    encode: Callable[[Example], Any],
    bad: damaged.Damaged,
    source: MixedSource,
    row: int,
    place: Position,
) -> Any:
    """Returns the encoded document at a row's place, or None if there is none, or it is skipped.

    Raises:
      UserError: it cannot be read and is not skipped, or far too many cannot.
    """
    found = documents.find(row, place, lambda part, error: bad.add((source.title, part), None, 0, error))
    failed = None
    if found is not None:
        try:
            made = encode(found[0][found[1]])
            documents.nothing[row] = 0
            return made
        except UserError as error:
            block, index, number = found
            bad.add((source.title, number, index), block, index, error)
            failed = error
    documents.nothing[row] += 1
    if documents.nothing[row] > documents.most_nothing:
        why = (
            f"{documents.nothing[row]} documents in succession cannot be read ({failed})"
            if failed
            else "has no documents"
        )
        raise UserError(f"source {source.title}: {why}; mend it, or omit it")
    return None


def _call(encode: Callable[[Example, str], Any], example: Example) -> Any:
    return encode(example, HERE)


def _text_ids(tokenizer: tokenizer_lib.Tokenizer, key: str, example: Example) -> np.ndarray:
    text = example.get(key)
    if not isinstance(text, str | bytes):
        fields = ", ".join(map(str, example))
        raise UserError(f"{HERE}: has no text in field {key!r}, which `text_key` names; its fields: {fields}")
    return batches.document_ids(tokenizer, text)


class _Window(NamedTuple):
    """A row of one source."""

    arrays: dict[str, np.ndarray]
    position: Position  # in the source, after it
    examples: int  # that begin in it


class _TextReader:
    """Reads windows of text."""

    def __init__(self, number: int, documents: _Documents, encode: Callable[..., Any], make: RowMaker, seed: int):
        def tokens(row: int, place: Position) -> np.ndarray:
            found = encode(row, place)
            return np.zeros(0, np.int32) if found is None else found

        self._read = batches.packing_reader(tokens, documents.following, make.text.window)
        self._number, self._make, self._seed = number, make, seed

    def read(self, row: int, position: Position) -> _Window:
        """Returns the window at a position, whose tokens are all labels."""
        window, following, begun = self._read(row, position)
        arrays = self._make.text.arrays(window, (self._seed, row, self._number, *position))
        for name in ("labeled", "segments", "mask"):
            if name in self._make.lengths and name not in arrays:
                arrays[name] = np.ones(self._make.lengths[name], np.int32)
        read = arrays["inputs" if "inputs" in arrays else "tokens"]
        return _Window({**arrays, SOURCES: np.full(len(read), self._number + 1, np.int32)}, following, begun)


class _ExampleReader:
    """Reads rows of examples: as many, one after the other, as fit."""

    def __init__(self, number: int, documents: _Documents, encode: Callable[..., Any], make: RowMaker, seed: int):
        self._number, self._documents, self._encode, self._make = number, documents, encode, make
        # row -> (place, the example there), so that one that found no room is not encoded again
        self._current: dict[int, tuple[Position, tasks.Example | None]] = {}

    def read(self, row: int, position: Position) -> _Window:
        """Returns the row at a position."""
        make, place, room = self._make, position[:2], max(self._make.lengths.values())
        assert make.form is not None
        found: list[tasks.Example] = []
        while not found or (make.packs and not make.form.reads_prompt):
            if self._current.get(row, (None,))[0] != place:
                self._current[row] = (place, self._encode(row, place))
            example = self._current[row][1]
            if example is not None:
                if len(example.inputs) > room and found:
                    break
                found.append(example)
                room -= len(example.inputs)
            place = self._documents.following(row, place)
        lengths = {name: length for name, length in make.lengths.items() if name != SOURCES}
        arrays = rows.filled(found, make.form, lengths)
        read = arrays["mask"] if "mask" in arrays else np.arange(len(arrays["tokens"])) < len(arrays["tokens"]) - room
        return _Window({**arrays, SOURCES: (self._number + 1) * read.astype(np.int32)}, (*place, 0), len(found))


class _Chooser:
    """Chooses the source of each row.

    Args:
      weights: (step) -> the weight of each source.
      readers: of each source; None if it is left out.
      by: what shares are of.
      num_rows: rows in the global batch.
      lengths: of the arrays of a row, by name.
    """

    def __init__(
        self,
        weights: Sequence[Callable[[int], float]],
        readers: "Sequence[_TextReader | _ExampleReader | None]",
        by: str,
        num_rows: int,
        lengths: Mapping[str, int],
    ):
        self._weights, self._readers, self._by, self._lengths = weights, readers, by, lengths
        self._num_rows, self._unit = num_rows, max(lengths.values()) if by == TOKENS else 1
        # step -> the share of each source, in 1 / _SCALE; rows of a batch may be at different steps
        self._shares = functools.lru_cache(maxsize=64)(self._shares_at)

    def _shares_at(self, step: int) -> tuple[int, ...]:
        weights = [0.0 if reader is None else weight(step) for weight, reader in zip(self._weights, self._readers)]
        total = sum(weights)
        if not total:
            raise UserError(f"sources: none that can be read has a weight at step {step}; give one a weight there")
        found = [int(weight / total * _SCALE) for weight in weights]
        found[max(range(len(found)), key=found.__getitem__)] += _SCALE - sum(found)
        return tuple(found)

    def read(self, row: int, position: Position) -> tuple[dict[str, np.ndarray], Position]:
        """Returns the arrays of a row at a position, and the position after it."""
        step, *rest = position
        size = len(_FIELDS)
        states = [rest[at : at + size] for at in range(0, len(rest), size)]
        below, shares = [state[-1] for state in states], self._shares(step)
        number = self._chosen(row, step, below, shares)
        reader = self._readers[number]
        assert reader is not None
        window = reader.read(row, tuple(states[number][:-1]))
        cost = int(np.count_nonzero(window.arrays[SOURCES])) if self._by == TOKENS else window.examples
        below = [short + share * cost for short, share in zip(below, shares)]
        below[number] -= _SCALE * cost
        places = [window.position if at == number else state[:-1] for at, state in enumerate(states)]
        after = itertools.chain.from_iterable((*place, short) for place, short in zip(places, below))
        return {name: window.arrays[name] for name in self._lengths}, (step + 1, *after)

    def _chosen(self, row: int, step: int, below: Sequence[int], shares: Sequence[int]) -> int:
        shifted = [share and max(0, share + short // (self._unit * _SHIFTED)) for short, share in zip(below, shares)]
        ends = list(itertools.accumulate(shifted if any(shifted) else shares))
        point = (row * _SCALE // self._num_rows + step * _GOLDEN) % _SCALE
        return bisect.bisect_right(ends, point * ends[-1] // _SCALE)


def _short(count: float) -> str:
    """Returns a count in three digits: 12.3k, 4.56G."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
