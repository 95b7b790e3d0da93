"""Generates answers to held-out examples and compares them with the labels. This module holds a run's generator and its table of answers.

All processes generate the same batches, whose number is known beforehand, so none can wait for another.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from zerojax import display
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import splits, tasks
from zerojax.inference import generate, texts
from zerojax.launch import watch
from zerojax.trainer import examples
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree

SHOWN = 10  # rows of the table
MOST_LETTERS = 60  # of a prompt in the table; its end is shown


@dataclasses.dataclass(frozen=True)
class Answer:
    """One example's prompt, the generated answer and the label, as text."""

    prompt: str
    found: str
    label: str

    @property
    def is_right(self) -> bool:
        """Returns whether the answer is the label, up to spaces around them."""
        return self.found == self.label


@dataclasses.dataclass(frozen=True)
class Score:
    """The answers of an evaluation."""

    answers: list[Answer]  # of the examples, in order
    name: str  # "accuracy" of a classification, else "exact_match"
    classes: tuple[str, ...]  # the labels of a classification; () for another task

    @property
    def share(self) -> float:
        """Returns the share of right answers."""
        return sum(answer.is_right for answer in self.answers) / len(self.answers)

    @property
    def line(self) -> str:
        """Returns the score as text."""
        right = sum(answer.is_right for answer in self.answers)
        text = f"{self.name.replace('_', ' ')} {self.share:.1%} ({right} of {len(self.answers)} held-out answers)"
        odd = sum(answer.found not in self.classes for answer in self.answers) if self.classes else 0
        return text + (f"; {odd} answers are none of the {len(self.classes)} classes" if odd else "")

    @property
    def table(self) -> Table:
        """Returns the first answers beside their labels."""
        title = f"Answers beside labels, {min(SHOWN, len(self.answers))} of {len(self.answers)}"
        columns = ("prompt", "answer", "label", "")
        table = display.table(title, columns, columns, overflow="fold")
        for answer in self.answers[:SHOWN]:
            table.add_row(*_shown(answer), "right" if answer.is_right else "wrong")
        return table

    @property
    def records(self) -> list[dict[str, Any]]:
        """Returns the rows of the table, ready for JSON."""
        return [dataclasses.asdict(answer) | {"is_right": answer.is_right} for answer in self.answers[:SHOWN]]


def make(
    program: program_lib.Program,
    tokenizer: tokenizer_lib.Tokenizer,
    pairs: splits.Splits,
    check: Callable[[], object] = lambda: None,
) -> Callable[[Any], Score] | None:
    """Returns f(params) -> the score of the first `evaluate.answers` held-out examples; None if none are to be answered.

    All processes must call f. It compiles one program at its first call. It calls `check` before each batch, which may raise to give up.
    """
    held, most = pairs.held_out, program.config.evaluate.answers
    if held is None or not most:
        return None
    chosen = held.examples[:most]
    read = (_classes if pairs.form.classes else _texts)(program, tokenizer, pairs)
    batches = list(_batches(chosen, pairs.form, program.sizes.global_batch_size // program.forward.passes))
    name = "accuracy" if pairs.settings.task == tasks.CLASSIFICATION else "exact_match"
    known = pairs.form.classes or tuple(map(str.strip, pairs.answers))

    def answer(params: PyTree) -> Score:
        found, held = [], program.forward.params(params)
        for ids, mask in batches:
            watch.at(watch.EVALUATE)
            check()
            found += read(held, ids, mask)
        prompts = (tokenizer.decode(ids) for ids in tasks.prompts(chosen, pairs.form))
        answers = [Answer(prompt, own, example.answer.strip()) for prompt, own, example in zip(prompts, found, chosen)]
        return Score(answers, name, known)

    return answer


Read = Callable[[PyTree, np.ndarray, np.ndarray], list[str]]  # (params, ids, mask) -> the answers to prompts


def _texts(program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer, pairs: splits.Splits) -> Read:
    """Returns a function that generates answers."""
    special = examples.special_tokens(program.family, program.weights.source, tokenizer, pairs.stops)
    generator = generate.make_generator(
        program.family,
        program.model,
        program.forward.partition,
        new_tokens=program.config.data.answer_len,
        special=special,
        compute_dtype=program.config.policy.compute_dtype,
    )

    def read(params: PyTree, ids: np.ndarray, mask: np.ndarray) -> list[str]:
        tokens = generator(params, ids, mask)[:, 1 if pairs.form.is_encoder_decoder else ids.shape[1] :]
        return [text_of(tokenizer, special.stops, row) for row in tokens]

    return read


def _classes(program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer, pairs: splits.Splits) -> Read:
    """Returns a function that names the likeliest classes, of a classifier."""
    dtype = program.config.policy.compute_dtype
    scores = texts.make_classifier(program.family, program.model, program.forward.partition, compute_dtype=dtype)
    return lambda params, ids, mask: [pairs.form.classes[number] for number in scores(params, ids, mask).argmax(axis=1)]


def _batches(chosen: Sequence[tasks.Example], form: tasks.RowForm, size: int) -> Any:
    """Yields the ids and the masks of prompts, all of one shape: the last batch repeats its first prompt."""
    prompts = list(tasks.prompts(chosen, form))
    longest = max(map(len, prompts))
    for at in range(0, len(prompts), size):
        yield padded(prompts[at : at + size], size, longest)


def padded(prompts: Sequence[np.ndarray], size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts as int32[size, length], and the mask of their tokens. Missing rows repeat the first prompt."""
    ids, mask = (np.zeros((size, length), np.int32) for _ in range(2))
    for row, prompt in enumerate([*prompts, *([prompts[0]] * (size - len(prompts)))]):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    return ids, mask


def text_of(tokenizer: tokenizer_lib.Tokenizer, stops: tuple[int, ...], tokens: np.ndarray) -> str:
    """Returns the text of new tokens up to the one that ends them."""
    ends = np.flatnonzero(np.isin(tokens, stops))
    return tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens).strip()


def _shown(answer: Answer) -> tuple[str, str, str]:
    """Returns the three texts on one line each."""
    prompt, found, label = (repr(text)[1:-1] for text in (answer.prompt, answer.found, answer.label))
    return prompt[-MOST_LETTERS:], found, label


def as_rows(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the records of a table as Markdown, for TensorBoard."""
    names = ("prompt", "found", "label", "is_right")
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    return "\n".join(
        [*lines, *(" | ".join(str(record[name]).replace("|", "/") for name in names) for record in records)]
    )
