"""Makes rows of encoded examples. This module packs several short ones into a row, and pads rows to one length.

The arrays of a row are int32. Of a decoder, with `length` = seq_len + 1:

    tokens[length]      inputs are tokens[:-1], labels tokens[1:]
    labeled[length]     1 where a token is a label
    segments[length]    1, 2, ... for the examples of a row, 0 for padding; only if rows are packed

Of an encoder-decoder: inputs[seq_len], mask[seq_len] (0 for padding), targets[answer_len + 1], labeled[answer_len + 1]. Of a classifier:
inputs[seq_len], mask[seq_len], labels[1] (the number of the class), labeled[1].

A pair of answers has the arrays of the chosen one, each followed by those of the other answers (but inputs and mask, which all
share), and reference[answers], see `Pairs`.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from zerojax.data import batches
from zerojax.data.pairs import tasks
from zerojax.errors import UserError

PROMPT = ("inputs", "mask")  # the arrays of what an encoder reads
REFERENCE = "reference"


class Rows:
    """The rows of a split.

    Args:
      examples: encoded.
      form: the form of the model's rows.
      packs: whether a decoder's rows hold several examples.
    """

    def __init__(self, examples: Sequence[tasks.Example], form: tasks.RowForm, *, packs: bool):
        self.examples, self.form = examples, form
        self._lengths = lengths(form, packs=packs)
        self._rows: list[list[int]]
        if "segments" in self._lengths:
            self._rows = pack([len(example.inputs) for example in examples], self._lengths["tokens"])
        else:
            self._rows = [[number] for number in range(len(examples))]

    def __len__(self) -> int:
        return len(self._rows)

    def arrays(self, number: int) -> dict[str, np.ndarray]:
        """Returns the arrays of a row. Rows after the last are like the first, without labels."""
        if number >= len(self._rows):
            return {**self.arrays(0), "labeled": np.zeros(self._lengths["labeled"], np.int32)}
        return filled([self.examples[index] for index in self._rows[number]], self.form, self._lengths)

    def filled(self) -> float:
        """Returns the share of the rows' tokens that are not padding."""
        read = sum(len(example.inputs) for example in self.examples)
        return read / (len(self) * self._lengths["inputs" if self.form.reads_prompt else "tokens"])


def filled(examples: Sequence[tasks.Example], form: tasks.RowForm, lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Returns the arrays of a row with some examples, which have room in it; `lengths` are those of its arrays, by name."""
    found = {name: np.zeros(length, np.int32) for name, length in lengths.items()}
    at = 0
    for segment, example in enumerate(examples, 1):
        if form.reads_prompt:
            found["inputs"][: len(example.inputs)] = example.inputs
            found["mask"][: len(example.inputs)] = 1
            found["labels" if form.classes else "targets"][: len(example.targets)] = example.targets
            found["labeled"][: len(example.targets)] = example.labeled
            continue
        part = slice(at, at + len(example.inputs))
        found["tokens"][part], found["labeled"][part] = example.inputs, example.labeled
        if "segments" in found:
            found["segments"][part] = segment
        at = part.stop
    return found


class Pairs(Rows):
    """The rows of a split whose prompts have two answers each, or three, of which the last is the chosen one of the next example with
    another prompt.

    Args:
      chosen, rejected: the same examples with either answer.
      form: the form of the model's rows.
      answers: of a row, 2 or 3.

    Attributes:
      reference: float32[rows, answers], the log-probabilities of the answers under the run's first weights. Rows hold their bits.

    Raises:
      UserError: a third answer is asked for, and there is one prompt.
    """

    def __init__(
        self,
        chosen: Sequence[tasks.Example],
        rejected: Sequence[tasks.Example],
        form: tasks.RowForm,
        answers: int = 2,
    ):
        super().__init__(chosen, form, packs=False)
        several = [chosen, rejected]
        if answers > len(several):
            several.append([_answered(other, example, form) for other, example in zip(_others(chosen, form), chosen)])
        self.answers = [Rows(examples, form, packs=False) for examples in several]
        self.reference = np.zeros((len(chosen), answers), np.float32)

    def arrays(self, number: int) -> dict[str, np.ndarray]:
        """Returns the arrays of a pair. Pairs after the last are like the first, without labels."""
        several = [answers.arrays(number) for answers in self.answers]
        found = {
            name: array if name in PROMPT else np.concatenate([one[name] for one in several])
            for name, array in several[0].items()
        }
        return {**found, REFERENCE: self.reference[number if number < len(self) else 0].view(np.int32)}


class Texts(Pairs):
    """The rows of a split whose examples have several texts of their own: a query, its answer, and perhaps one that is none.

    Args:
      several: the examples of each, in this order.
      form: the form of the model's rows.
    """

    def __init__(self, several: Sequence[Sequence[tasks.Example]], form: tasks.RowForm):
        super().__init__(several[0], several[1], form)
        self.answers = [Rows(examples, form, packs=False) for examples in several]
        self.reference = np.zeros((len(self), len(several)), np.float32)


def _others(examples: Sequence[tasks.Example], form: tasks.RowForm) -> list[tasks.Example]:
    """Returns for each example the next one with another prompt; the first ones follow the last."""
    prompts = [prompt.tobytes() for prompt in tasks.prompts(examples, form)]
    if len(set(prompts)) < 2:
        raise UserError(
            f"an answer is compared with one to another prompt, and the {len(prompts)} pairs have one prompt; add pairs with another, or "
            "choose a loss of pairs that compares no others (sigmoid)"
        )
    found, after = list(examples), 0
    for number in reversed(range(2 * len(prompts))):
        at, following = number % len(prompts), (number + 1) % len(prompts)
        after = after if prompts[following] == prompts[at] else following
        found[at] = examples[after]
    return found


def _answered(other: tasks.Example, example: tasks.Example, form: tasks.RowForm) -> tasks.Example:
    """Returns the prompt of an example with the last answer of another, of which the end is cut where the row has no room."""
    if form.reads_prompt:
        return example._replace(targets=other.targets, labeled=other.labeled)
    own, answer = slice(example.prompt), slice(other.prompt, None)
    tokens = np.concatenate([example.inputs[own], other.inputs[answer]])[: form.seq_len + 1]
    labeled = np.concatenate([np.zeros(example.prompt, bool), other.labeled[answer]])[: form.seq_len + 1]
    return example._replace(inputs=tokens, labeled=labeled)


def of_pair(lengths: Mapping[str, int], answers: int) -> dict[str, int]:
    """Returns the lengths of the arrays of a pair, by name, from those of rows with one answer."""
    found = {name: length if name in PROMPT else answers * length for name, length in lengths.items()}
    return {**found, REFERENCE: answers}


def lengths(form: tasks.RowForm, *, packs: bool) -> dict[str, int]:
    """Returns the lengths of a row's arrays, by name."""
    if form.classes:
        return {"inputs": form.seq_len, "mask": form.seq_len, "labels": 1, "labeled": 1}
    if form.is_encoder_decoder:
        answer = form.answer_len + 1
        return {"inputs": form.seq_len, "mask": form.seq_len, "targets": answer, "labeled": answer}
    names = ("tokens", "labeled", *(("segments",) if packs else ()))
    return dict.fromkeys(names, form.seq_len + 1)


def pack(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Returns groups of indices whose sizes add up to `most` or less: the largest first, each into the fullest group that has room.

    >>> pack([3, 5, 2, 4], 8)
    [[1, 0], [3, 2]]
    """
    groups: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(most + 1)]  # groups by the room that is left
    rooms = 0  # bit r is set where by_room[r] is not empty
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            group = by_room[room].pop()
            rooms &= ~(1 << room) if not by_room[room] else ~0
        else:
            room, group = most, len(groups)
            groups.append([])
        groups[group].append(index)
        by_room[room - size].append(group)
        rooms |= 1 << (room - size)
    return groups


def open_batches(
    rows: Rows, own: Sequence[int], num_rows: int, seed: int, *, shuffle: bool, settings: Mapping[str, int]
) -> batches.Batches:
    """Returns batches of rows: training batches in a new order in each epoch, or in the stored order, with empty rows after the last.

    Args:
      rows: of the split.
      own: the rows of a global batch that this process reads.
      num_rows: rows in the global batch.
      seed: of the order.
      shuffle: whether rows are shuffled and repeated.
      settings: what the meaning of a position depends on, beside the arguments.
    """
    order = functools.partial(batches.shuffled, size=len(rows), seed=seed) if shuffle else lambda number: number

    def read(row: int, position: batches.Position) -> tuple[dict[str, np.ndarray], batches.Position]:
        (number,) = position
        return rows.arrays(order(number)), (number + num_rows,)

    known = {"num_rows": num_rows, "seed": seed, "shuffle": int(shuffle), "rows": len(rows), **settings}
    return batches.Batches(read, {row: (row,) for row in own}, ("row",), known)
