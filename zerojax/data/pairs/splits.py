"""Opens the training and the held-out examples of a run. This module reads them from a dataset or from files, and encodes them.

Every process has all examples, so that the rows of a batch, and the prompts whose answers are generated, are the same on all of them.
One process of a host encodes them, and the others, and later starts, read what it kept.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zerojax import errors
from zerojax.data import batches, parts
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import encoded as encoded_lib
from zerojax.data.pairs import rows, tasks
from zerojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Splits:
    """The rows of a run.

    Attributes:
      train, held_out: the rows of both splits; `held_out` is None where there is none.
      settings, form: the task, and the form of the rows.
      answers: the answers of a classification by generation; () for another task.
      notes: lines that tell about the examples.
      fingerprint, of_held_out: of the training examples and of the held-out ones; "" for none.
      stops: the special tokens with which a chat template ends the training answers; () for none.
      template: of Jinja, of their conversations; see `tasks.Encoded`.
    """

    train: rows.Rows
    held_out: rows.Rows | None
    settings: tasks.TaskSettings
    form: tasks.RowForm
    answers: tuple[str, ...]
    notes: list[str]
    fingerprint: str
    of_held_out: str = ""
    stops: tuple[int, ...] = ()
    template: str = ""

    def open(self, is_train: bool, own: Sequence[int], num_rows: int, seed: int) -> batches.Batches:
        """Returns batches of a split; see `rows.open_batches`."""
        chosen = self.train if is_train else self.held_out
        assert chosen is not None
        return rows.open_batches(chosen, own, num_rows, seed, shuffle=is_train, settings={"seq_len": self.form.seq_len})

    @property
    def has_pairs(self) -> bool:
        """Returns whether a row is a pair of answers."""
        return isinstance(self.train, rows.Pairs)

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the number of terms of a batch's mean loss: its labels, or its pairs."""
        labels = parts.labeled(batch)
        return jnp.sum(jnp.any(labels > 0, axis=-1) if self.has_pairs else labels)

    def batches(self, num_rows: int) -> int:
        """Returns the number of batches that read all held-out examples once."""
        return 0 if self.held_out is None else math.ceil(len(self.held_out) / num_rows)

    def ends(self, epochs: float, num_rows: int) -> tuple[int, ...]:
        """Returns the step at which each epoch ends, the last one perhaps before all examples were read; () for no epochs."""
        whole = [self.steps(epoch, num_rows) for epoch in range(1, math.floor(epochs) + 1)]
        return tuple(dict.fromkeys([*whole, self.steps(epochs, num_rows)])) if epochs else ()

    def steps(self, epochs: float, num_rows: int) -> int:
        """Returns the number of steps after which the training examples were read `epochs` times; the last step may begin another time."""
        return max(1, math.ceil(epochs * len(self.train) / num_rows))


def load(
    places: batches.Places,
    tokenizer: tokenizer_lib.Tokenizer,
    settings: tasks.TaskSettings,
    form: tasks.RowForm,
    *,
    packs: bool,
    folder: pathlib.Path | None,
    cache: pathlib.Path | None = None,
    compared: int = 1,
) -> Splits:
    """Reads and encodes the examples of both splits. All processes must call it.

    Args:
      places: where they come from.
      tokenizer, settings, form, folder: see `tasks.encode`.
      packs: see `rows.Rows`.
      cache: a folder for encoded examples; None for none.
      compared: the answers of a row; see `rows.Pairs`.

    Raises:
      UserError: a file or a split cannot be read, an example is damaged, both splits share examples, or processes read different ones.
    """
    names: Mapping[str, Sequence[str]] = {}
    if not places.train_file:
        names = source_lib.class_names(places.name, places.data_dir)
    plain = functools.partial(
        tasks.encode, tokenizer=tokenizer, settings=settings, form=form, folder=folder, names=names
    )

    def encoder(is_train: bool) -> encoded_lib.Encode:
        return encoded_lib.cached(plain, cache, places.files(is_train) if cache is not None else ())

    encode = encoder(True)

    def with_others(encoded: tasks.Encoded, source: source_lib.Source, name: str) -> tuple[rows.Rows, str]:
        """Returns the rows of a split and their fingerprint."""
        own = encoded.fingerprint()
        if compared == 1:
            return rows.Rows(encoded.examples, form, packs=packs), own
        if settings.task == tasks.EMBED:
            names_of_others = ["prompt", *(["rejected"] if settings.rejected else [])]
            found = [encode(source, name=name, answer=other) for other in names_of_others]
            notes.extend(note for one in found for note in one.notes if note not in notes)
            query, *wrong = (one.examples for one in found)
            return rows.Texts([query, encoded.examples, *wrong], form), own + "".join(
                one.fingerprint() for one in found
            )
        others = encode(source, name=name, answer="rejected")
        notes.extend(note for note in others.notes if note not in notes)
        both = zip(encoded.examples, others.examples)
        alike = sum(all(map(np.array_equal, one[:2], other[:2])) for one, other in both)
        if alike:
            notes.append(
                f"{name}: {alike} of {len(others.examples)} pairs have two equal answers, of which nothing is learned"
            )
        with errors.below(f"{name}: "):
            return rows.Pairs(encoded.examples, others.examples, form, compared), own + others.fingerprint()

    source, name = places.open(True), _named(places, True)
    held_source = places.open(False) if places.has_held_out else None
    train = encode(source, name=name)
    notes = list(train.notes)
    made, fingerprint = with_others(train, source, name)
    own, of_own = None, ""
    known = () if form.classes else train.answers
    if held_source is not None:
        name, encode = _named(places, False), encoder(False)
        held_out = encode(held_source, name=name, known=known)
        notes += [note for note in held_out.notes if note not in notes]
        notes += _shared(train.examples, held_out.examples)
        own, of_own = with_others(held_out, held_source, name)
    _check_same(fingerprint + of_own)
    notes.append(_summary(made, own))
    return Splits(made, own, settings, form, known, notes, fingerprint, of_own, train.ends, train.template)


def _named(places: batches.Places, is_train: bool) -> str:
    """Returns the name of a split, for errors and notes."""
    found, _ = places.of(is_train)
    return found if places.train_file else f"{places.name}, split {found!r}"


def _shared(train: Sequence[tasks.Example], held_out: Sequence[tasks.Example]) -> list[str]:
    """Returns a line if held-out examples are trained on."""

    def key(example: tasks.Example) -> tuple[bytes, bytes]:
        return example.inputs.tobytes(), example.targets.tobytes()

    known = set(map(key, train))
    number = sum(key(example) in known for example in held_out)
    return [f"{number} of {len(held_out)} held-out examples are training examples too"] if number else []


def _summary(train: rows.Rows, held_out: rows.Rows | None) -> str:
    packed = "" if len(train) == len(train.examples) else f" in {len(train)} rows"
    told = f"{len(train.examples)} training examples{packed}, {train.filled():.0%} of the tokens are no padding"
    return told + (f"; {len(held_out.examples)} held-out examples" if held_out else "; no held-out examples")


def _check_same(fingerprint: str) -> None:
    """Raises a UserError if processes read different examples: their programs would wait for each other."""
    if jax.process_count() == 1:
        return
    own = np.frombuffer(fingerprint.ljust(32).encode(), np.uint8)
    every = np.asarray(multihost_utils.process_allgather(own))
    odd = [number for number, other in enumerate(every) if (other != every[0]).any()]
    if odd:
        raise UserError(
            f"data: process {odd[0]} read other examples than process 0; give all hosts the same files, or a folder that they share"
        )
