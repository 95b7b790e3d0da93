"""Turns examples into tokens whose labels are the answers. This module holds the tasks, and encodes all examples of a split.

A decoder reads the prompt and its answer as one text, of which the answer and the token that ends it are labels. An encoder-decoder
reads the prompt, and its decoder learns the answer. A classifier reads the prompt and learns its class. Prompt and answer are texts, or
messages of a conversation. All examples are encoded once, before anything is compiled, so that a damaged one is
an error then, and what had to be cut is known.
"""

import dataclasses
import functools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerojax import errors
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import templates
from zerojax.errors import UserError

TEXT, SEQ2SEQ, CLASSIFICATION, CHAT, DPO, GRPO = "text", "seq2seq", "classification", "chat", "dpo", "grpo"
TASKS = (TEXT, SEQ2SEQ, CLASSIFICATION, CHAT, DPO, GRPO)
BETWEEN_WORDS = " \n\t"
ANSWERS = {DPO: 2, GRPO: 1}  # of the tasks that compare answers: how many are beside each other in a row


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """What a task reads of an example.

    Attributes:
      task: one of TASKS but TEXT.
      prompt, answer: templates; see `templates.Template`. A chat does not read them. A field alone may hold messages. The answer of DPO is
        the chosen one.
      labels: the text of each number in the answer's field; () takes the dataset's own names, if it has some.
      messages: the field with a conversation.
      chat_template: see `templates.chat_of`.
      rejected: the template of DPO's other answer.
    """

    task: str
    prompt: str
    answer: str
    labels: tuple[str, ...]
    messages: str
    chat_template: str
    rejected: str = ""


@dataclasses.dataclass(frozen=True)
class RowForm:
    """The form of a model's rows."""

    is_encoder_decoder: bool  # whether prompt and answer are two arrays or one
    seq_len: int  # the most tokens that are read: of a prompt, or of a prompt with its answer
    answer_len: int  # the most tokens of an encoder-decoder's answer, with the token that ends it
    start: int  # begins an encoder-decoder's targets
    end: int  # ends an answer
    bos: int | None  # begins a decoder's text if the tokenizer does not begin it; None for none
    stops: tuple[int, ...]  # ids that end an answer
    classes: tuple[str, ...] = ()  # those of a classifier, whose prompt is read by an encoder; () for another model

    @property
    def reads_prompt(self) -> bool:
        """Returns whether the prompt is an array of its own, which an encoder reads."""
        return self.is_encoder_decoder or bool(self.classes)


class Example(NamedTuple):
    """An encoded example."""

    inputs: np.ndarray  # int32[length], what an encoder reads; of a decoder, the prompt and its answer
    # int32[length], an encoder-decoder's start token and answer, or the number of a class; empty for a decoder
    targets: np.ndarray
    labeled: np.ndarray  # bool, whether each token of `targets`, or of a decoder's `inputs`, is a label
    prompt: int  # the number of a decoder's tokens before its last answer
    answer: str  # the text of the last answer


@dataclasses.dataclass(frozen=True)
class Encoded:
    """All examples of a split."""

    examples: list[Example]  # in the order of the source
    answers: tuple[str, ...]  # the texts that occur as answers, for a classification
    notes: list[str]  # lines about what was cut, and what is empty

    def fingerprint(self) -> str:
        """Returns the CRC-32 of all tokens and labels, in hexadecimal."""
        found = 0
        for example in self.examples:
            for array in (example.inputs, example.targets, example.labeled):
                found = zlib.crc32(array.tobytes(), found)
        return f"{zlib.crc32(str(len(self.examples)).encode(), found):08x}"


# a text: whether it is an answer, and whether special tokens are recognised in it
Piece = tuple[str, bool, bool]


def encode(
    examples: source_lib.Source,
    tokenizer: tokenizer_lib.Tokenizer,
    settings: TaskSettings,
    form: RowForm,
    *,
    name: str,
    folder: pathlib.Path | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    known: tuple[str, ...] = (),
    answer: str = "answer",
) -> Encoded:
    """Encodes all examples of a source.

    Args:
      examples: the source. Its `place(index)`, if it has one, names an example in errors.
      tokenizer: encodes the texts.
      settings: the task.
      form: the model's rows.
      name: of the source, for errors and notes.
      folder: of the tokenizer's files; None for none.
      names: {feature: the names of its classes}.
      known: the answers that a classification may have; () for any.
      answer: the name of the setting that is the answer's template.

    Raises:
      UserError: an example is damaged or lacks a field, or an answer of a classification is not known. The line names its place.
    """
    encoder = _Encoder(tokenizer, settings, form, folder, names, answer)
    counts, found, answers = _Counts(name, form), [], dict[str, None]()
    for index in range(len(examples)):
        place = source_lib.place_of(examples, index, f"{name}, example")
        example = encoder.encode(examples[index], place, counts)
        if settings.task == CLASSIFICATION:
            if known and example.answer not in known:
                raise UserError(
                    f"{place}: the answer {example.answer!r} is none of the {len(known)} classes of the training examples "
                    f"({', '.join(map(repr, known[:8]))}); mend it, or set `task=seq2seq`"
                )
            answers[example.answer] = None
        found.append(example)
    notes = [*encoder.notes, *counts.notes(len(found))]
    if settings.chat_template != templates.AUTO and not encoder.notes:
        notes.append(f"`chat_template={settings.chat_template}` has no effect: {name} has no conversation")
    return Encoded(found, tuple(answers), notes)


def encoder(
    tokenizer: tokenizer_lib.Tokenizer,
    settings: TaskSettings,
    form: RowForm,
    *,
    name: str,
    folder: pathlib.Path | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Callable[[Mapping[str, Any], str], Example], Callable[[int], list[str]]]:
    """Returns (example, its place) -> what `encode` makes of it, and (the examples so far) -> lines about what was cut. For one thread."""
    made, counts = _Encoder(tokenizer, settings, form, folder, names), _Counts(name, form)
    return lambda example, place: made.encode(example, place, counts), lambda total: [
        *made.notes,
        *counts.notes(total),
    ]


class Asked(NamedTuple):
    """The prompts of examples that a model is to answer."""

    prompts: list[np.ndarray]  # int32[length] of each example
    labels: list[str | None]  # the text of each answer that the examples hold; None where there is none
    notes: list[str]  # lines about what was cut


def ask(
    examples: source_lib.Source,
    tokenizer: tokenizer_lib.Tokenizer,
    settings: TaskSettings,
    form: RowForm,
    *,
    name: str,
    folder: pathlib.Path | None = None,
) -> Asked:
    """Encodes the prompts of all examples, which need no answers. Takes the arguments of `encode`, and raises as it does."""
    encoder, counts = _Encoder(tokenizer, settings, form, folder, None), _Counts(name, form)
    found = [
        encoder.ask(examples[index], source_lib.place_of(examples, index, f"{name}, example"), counts)
        for index in range(len(examples))
    ]
    return Asked([ids for ids, _ in found], [label for _, label in found], [*encoder.notes, *counts.notes(len(found))])


class _Counts:
    """Counts what is told of a split, with the place of the first of each kind."""

    def __init__(self, name: str, form: RowForm):
        self._name, self._form = name, form
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, place: str) -> None:
        number, first = self._found.get(kind, (0, place))
        self._found[kind] = (number + 1, first)

    def notes(self, total: int) -> list[str]:
        f = self._form
        if f.reads_prompt:
            cut = f"prompts are longer than `seq_len={f.seq_len}` tokens, and their ends are cut"
        else:
            cut = f"prompts and their answers are longer than `seq_len={f.seq_len}` tokens, and the prompts' beginnings are cut"
        told = {
            "prompt": cut,
            "answer": f"answers are longer than {f.answer_len if f.is_encoder_decoder else f.seq_len} tokens, and their ends are cut",
            "empty": "answers are empty: there the model learns to end at once",
        }
        return [
            f"{self._name}: {number} of {total} {told[kind]}; the first: {place}"
            for kind, (number, place) in self._found.items()
        ]


class _Encoder:
    """Encodes one example after another."""

    def __init__(
        self,
        tokenizer: tokenizer_lib.Tokenizer,
        settings: TaskSettings,
        form: RowForm,
        folder: pathlib.Path | None,
        names: Mapping[str, Sequence[str]] | None,
        answer: str = "answer",
    ):
        self._tokenizer, self._settings, self._form = tokenizer, settings, form
        self.notes: list[str] = []
        self._folder = folder
        if settings.task == CHAT:
            return
        self._prompt = templates.Template(settings.prompt, "prompt")
        others = ("answer", "rejected") if settings.task == DPO else ()
        self._answers = [templates.Template(getattr(settings, key), key) for key in dict.fromkeys((answer, *others))]
        self._answer = self._answers[0]
        if not self._answer.fields:
            raise UserError(
                f"{answer}: {getattr(settings, answer)!r} names no field, so all answers would be one; write '{{label}}'"
            )
        self._names = dict(names or {})
        if settings.labels:
            self._names |= dict.fromkeys((field for own in self._answers for field in own.fields), settings.labels)

    @functools.cached_property
    def _chat(self) -> templates.Chat:
        """The template of conversations, which is looked for when the first one is read."""
        chat, note = templates.chat_of(self._folder, self._settings.chat_template)
        self.notes.append(note)
        return chat

    def encode(self, example: Mapping[str, Any], place: str, counts: _Counts) -> Example:
        """Returns an example in the form of the model's rows."""
        pieces, answer = self._pieces(example, place)
        if not answer.strip():
            counts.add("empty", place)
        with errors.below(f"{place}: "):
            if self._form.classes:
                return self._classified(pieces, answer, place, counts)
            if self._form.is_encoder_decoder:
                return self._two_arrays(pieces, answer, place, counts)
            return self._one_array(pieces, answer, place, counts)

    def ask(self, example: Mapping[str, Any], place: str, counts: _Counts) -> tuple[np.ndarray, str | None]:
        """Returns the tokens of an example's prompt, and its label; None if it has none."""
        told = f"task={self._settings.task!r}: {place}"
        label: str | None = None
        if self._settings.task == CHAT:
            messages = self._messages(example, told, is_answered=False)
            talk: tuple[list[tuple[str, str]], int] | None = (messages, len(messages))
        else:
            talk = self._talk(example, told, is_answered=False)
        if talk is None:
            prompt, label = self._texts(example, told, is_answered=False)
            pieces: list[Piece] = [(prompt, False, False)]
        else:
            messages, begin = talk
            if not messages:
                raise UserError(
                    f"{told}: has no prompt, and no `{self._answer.key}` whose messages begin with one; its fields: "
                    f"{', '.join(map(str, example))}"
                )
            begin -= begin == len(messages) and messages[-1][0] == templates.ASSISTANT
            label = messages[begin][1] if len(messages) == begin + 1 else None
            pieces = self._turns([*messages[:begin], (templates.ASSISTANT, "")], told)[0][:-1]
        with errors.below(f"{place}: "):
            if self._form.classes:
                return self._read_prompt(pieces[0][0], place, counts), label
            pieces = [*pieces, ("", True, False)]
            if self._form.is_encoder_decoder:
                return self._two_arrays(pieces, "", place, counts).inputs, label
            row = self._one_array(pieces, "", place, counts)
            return row.inputs[: row.prompt], label

    def _pieces(self, example: Mapping[str, Any], place: str) -> tuple[list[Piece], str]:
        """Returns an example's texts in order, and the last answer."""
        place = f"task={self._settings.task!r}: {place}"
        if self._settings.task == CHAT:
            return self._turns(self._messages(example, place), place)
        talk = self._talk(example, place)
        if talk is None:
            prompt, text = self._texts(example, place)
            return [(prompt, False, False), (text or "", True, False)], text or ""
        return self._turns(talk[0], place, talk[1])

    def _texts(self, example: Mapping[str, Any], place: str, *, is_answered: bool = True) -> tuple[str, str | None]:
        """Returns the texts of the prompt and of the answer, which may be missing if `is_answered` is not set.

        Pairs without a template of the prompt have the words with which both answers begin as their prompt.
        """
        if self._settings.task == DPO and not self._settings.prompt:
            both = [template.fill(example, place, self._names) for template in self._answers]
            shared = both[0][: _shared(both)]
            end = max(0, *map(shared.rfind, BETWEEN_WORDS))
            return both[0][:end], both[0][end:]
        has_answer = is_answered or _fits(self._answer, example)
        answer = self._answer.fill(example, place, self._names) if has_answer else None
        return self._prompt.fill(example, place, self._names), answer

    def _talk(
        self, example: Mapping[str, Any], place: str, *, is_answered: bool = True
    ) -> tuple[list[tuple[str, str]], int] | None:
        """Returns the messages of the prompt and of the answer, and how many are the prompt's; None where all are texts.

        The prompt is the messages of its field, else those with which all answers begin, else its text as the user's message.
        """
        prompt, *answers = (template.messages(example, place) for template in (self._prompt, *self._answers))
        if prompt is None and not any(answers):
            return None
        found: list[list[tuple[str, str]]] = [[]]
        if is_answered or _fits(self._answer, example):
            found = [
                messages or [(templates.ASSISTANT, template.fill(example, place, self._names))]
                for template, messages in zip(self._answers, answers)
                if is_answered or _fits(template, example)
            ]
        shared = found[0][: _shared([messages[:-1] for messages in found])]
        if prompt is None:
            begin = len(shared)
            text = "" if shared else self._prompt.fill(example, place, self._names)
            prompt = shared or ([(templates.USER, text)] if text else [])
        else:
            begin = len(prompt) if shared[: len(prompt)] == prompt else 0  # a field with the whole conversation
        answer = found[0][begin:]
        if is_answered and all(role != templates.ASSISTANT for role, _ in answer):
            raise UserError(
                f"{place}: no message of `{self._answer.key}` after the prompt is the {templates.ASSISTANT}'s, so there is no answer to "
                "learn; remove the example"
            )
        if self._form.reads_prompt and len(answer) > 1:
            raise UserError(
                f"{place}: `{self._answer.key}` has {len(answer)} messages after the prompt, and an encoder reads one prompt for one "
                "answer; end the conversation after the first, or train a decoder"
            )
        return [*prompt, *answer], len(prompt)

    def _messages(self, example: Mapping[str, Any], place: str, *, is_answered: bool = True) -> list[tuple[str, str]]:
        """Returns the conversation of an example."""
        key = self._settings.messages
        if key not in example:
            raise UserError(
                f"{place}: has no field {key!r}, which `messages` names; its fields: {', '.join(map(str, example))}"
            )
        return templates.messages_of(example[key], place, key, is_answered=is_answered)

    def _turns(self, messages: list[tuple[str, str]], place: str, begin: int = 0) -> tuple[list[Piece], str]:
        """Returns the texts of a conversation. Each message of the assistant from `begin` on is an answer, and nothing follows the last."""
        pieces: list[Piece] = []
        is_plain = self._chat is templates.plain_chat
        done, answer, has_special = "", "", not is_plain
        for number, (role, content) in enumerate(messages):
            if role != templates.ASSISTANT or number < begin:
                continue
            before = self._chat(messages[:number], True)
            after = before + content if is_plain else self._chat(messages[: number + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                raise UserError(
                    f"{place}: the tokenizer's chat template changes earlier messages when later ones follow, so its answers cannot "
                    "be told apart; set `chat_template=plain`"
                )
            pieces += [(before[len(done) :], False, has_special), (after[len(before) :], True, has_special)]
            done, answer = after, content
        return pieces, answer

    def _two_arrays(self, pieces: list[Piece], answer: str, place: str, counts: _Counts) -> Example:
        f = self._form
        prompt = "".join(text for text, *_ in pieces[:-1])
        inputs = self._whole(prompt, pieces[0][2])
        if len(inputs) > f.seq_len:
            counts.add("prompt", place)
            last = inputs[-1:] if inputs[-1] in f.stops else inputs[:0]  # a tokenizer's own end stays
            inputs = np.concatenate([inputs[: f.seq_len - len(last)], last])
        ids = self._whole(answer, False)
        ids = ids if len(ids) and ids[-1] == f.end else np.append(ids, f.end)
        if len(ids) > f.answer_len:
            counts.add("answer", place)
            ids = ids[: f.answer_len]
        targets = np.concatenate([[f.start], ids]).astype(np.int32)
        inputs = inputs if len(inputs) else np.array([f.end], np.int32)
        return Example(inputs.astype(np.int32), targets, np.arange(len(targets)) > 0, 0, answer)

    def _classified(self, pieces: list[Piece], answer: str, place: str, counts: _Counts) -> Example:
        classes = self._form.classes
        if answer.strip() not in classes:
            raise UserError(
                f"the answer {answer.strip()!r} is none of the model's {len(classes)} classes "
                f"({', '.join(map(repr, classes[:8]))}); mend it, or set `labels`"
            )
        targets = np.array([classes.index(answer.strip())], np.int32)
        inputs = self._read_prompt("".join(text for text, *_ in pieces[:-1]), place, counts)
        return Example(inputs, targets, np.ones(1, bool), 0, answer)

    def _read_prompt(self, text: str, place: str, counts: _Counts) -> np.ndarray:
        """Returns the ids that a classifier reads of a prompt; what the tokenizer puts at its end stays when it is cut."""
        f, ids, around = self._form, self._whole(text, False), self._whole("", False)
        if f.bos is not None and (not len(ids) or ids[0] != f.bos):
            ids = np.concatenate([[f.bos], ids])
        if len(ids) > f.seq_len:
            counts.add("prompt", place)
            last = ids[-1:] if len(around) and ids[-1] == around[-1] else ids[:0]
            ids = np.concatenate([ids[: f.seq_len - len(last)], last])
        return (ids if len(ids) else np.array([f.end])).astype(np.int32)

    def _one_array(self, pieces: list[Piece], answer: str, place: str, counts: _Counts) -> Example:
        f = self._form
        parts, labeled = [self._begin(*pieces[0])], [False]
        for text, is_answer, has_special in pieces[1:]:
            ids = self._tokenizer.encode_special(text) if has_special else self._tokenizer.encode(text)
            if is_answer and not np.isin(ids, f.stops).any():
                ids = np.append(ids, f.end)
            parts.append(ids)
            labeled.append(is_answer)
        most, last = f.seq_len + 1, parts[-1]
        first = parts[0][: 1 if len(parts[0]) and parts[0][0] in (f.bos, self._tokenizer.bos_id) else 0]
        if len(last) > most - len(first) - 1:
            counts.add("answer", place)
            parts[-1] = last[: most - len(first) - 1]
        tokens = np.concatenate(parts).astype(np.int32)
        marks = np.repeat(labeled, [len(part) for part in parts])
        prompt = len(tokens) - len(parts[-1])
        if len(tokens) > most:
            counts.add("prompt", place)
            cut = len(tokens) - most
            tokens = np.concatenate([first, tokens[len(first) + cut :]])
            marks, prompt = np.concatenate([marks[: len(first)], marks[len(first) + cut :]]), prompt - cut
        marks = marks & (np.arange(len(marks)) > 0)  # nothing is before the first token, from which it could be told
        return Example(tokens, tokens[:0], marks, prompt, answer)

    def _begin(self, text: str, is_answer: bool, has_special: bool) -> np.ndarray:
        """Returns the ids of a decoder's prompt, which never is without any token."""
        f = self._form
        ids = self._whole(text, has_special)
        if len(ids) > 1 and ids[-1] in f.stops and not has_special:
            ids = ids[:-1]  # the end that a tokenizer adds to a text
        if f.bos is not None and (not len(ids) or ids[0] != f.bos):
            ids = np.concatenate([[f.bos], ids])
        return ids if len(ids) else np.array([f.end])

    def _whole(self, text: str, has_special: bool) -> np.ndarray:
        """Returns the ids of a text with those that the tokenizer adds, or with those that the text itself names."""
        return self._tokenizer.encode_special(text) if has_special else self._tokenizer.encode_whole(text)


def _fits(template: templates.Template, example: Mapping[str, Any]) -> bool:
    return all(field in example for field in template.fields)


def _shared(several: Sequence[Sequence[Any]]) -> int:
    """Returns with how many equal elements all begin."""
    least = min(map(len, several))
    return next((at for at in range(least) if any(one[at] != several[0][at] for one in several)), least)


def prompts(examples: Sequence[Example], form: RowForm) -> Iterator[np.ndarray]:
    """Yields what the model is asked of each example."""
    for example in examples:
        yield example.inputs if form.reads_prompt else example.inputs[: example.prompt]
