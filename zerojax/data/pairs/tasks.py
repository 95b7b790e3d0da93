"""Turns examples into tokens whose labels are the answers. This module holds the tasks, and encodes all examples of a split.

A decoder reads the prompt and its answer as one text, of which the answer and the token that ends it are labels. An encoder-decoder
reads the prompt, and its decoder learns the answer. A classifier reads the prompt and learns its class. Prompt and answer are texts, or
messages of a conversation. All examples are encoded once, before anything is compiled, so that a damaged one is
an error then, and what had to be cut is known.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerojax import errors
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import preferences, spans, templates
from zerojax.errors import UserError

TEXT, SEQ2SEQ, CLASSIFICATION, CHAT = "text", "seq2seq", "classification", "chat"
DPO, REWARD, GRPO, EMBED = "dpo", "reward", "grpo", "embed"
PAIRED = (DPO, REWARD)  # whose examples have two answers
BETWEEN_WORDS = " \n\t"
_NO_TEXT = ("image", "images", "video", "videos", "audio", "audios")  # fields of examples that are no text
_SAID = "zq9"  # stands for an answer that was drawn
_WORD = "a"  # stands for the first word of an answer that is not known


class Task(NamedTuple):
    """A task of a run."""

    reads: tuple[str, ...]  # the settings, or groups of them, that not every task reads
    compares: bool = False  # whether it compares answers


_TEMPLATES = ("data.prompt", "data.answer", "data.labels")
_ROWS = ("data.chat_template", "data.learn", "data.answer_len")
_LOSS, _ASKED = ("evaluate.batches", "evaluate.patience", "checkpoint.keep_best"), "evaluate.answers"
_LABELS = (*_LOSS, "distill")
TASKS: Mapping[str, Task] = {
    TEXT: Task(("data.text_key", "sample", *_LABELS)),
    SEQ2SEQ: Task((*_TEMPLATES, *_ROWS, "data.pack", *_LABELS, _ASKED)),
    CLASSIFICATION: Task((*_TEMPLATES, *_ROWS, "data.pack", *_LABELS, _ASKED)),
    CHAT: Task(("data.messages", *_ROWS, "data.pack", *_LABELS, _ASKED)),
    DPO: Task((*_TEMPLATES, "data.rejected", *_ROWS, *_LOSS, "dpo"), compares=True),
    REWARD: Task((*_TEMPLATES, "data.rejected", *_ROWS, *_LOSS), compares=True),
    EMBED: Task((*_TEMPLATES[:2], *_LOSS, "embedding"), compares=True),
    GRPO: Task((*_TEMPLATES, *_ROWS, _ASKED, "grpo"), compares=True),
}
ANSWERS = tuple(name for name, task in TASKS.items() if task.compares)


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """What a task reads of an example.

    Attributes:
      task: one of TASKS but TEXT.
      prompt, answer: templates; see `templates.Template`. A chat does not read them. A field alone may hold messages. The answer of DPO is
        the chosen one; "" reads pairs in the forms of `preferences`.
      labels: the text of each number in the answer's field; () takes the dataset's own names, if it has some.
      messages: the field with a conversation.
      chat_template: see `templates.chat_of`.
      rejected: the template of the other answer of a pair, or of a text that is no answer to an embedding's query.
      learn: which answers of a conversation are learned; see `spans.LEARNED`.
      now: the time that a chat template is told, in seconds since 1970; None for the clock's, which differs when a run resumes.
    """

    task: str
    prompt: str
    answer: str
    labels: tuple[str, ...]
    messages: str
    chat_template: str
    rejected: str = ""
    learn: str = spans.ALL
    now: float | None = None


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
    ends_with_start: bool = (
        False  # whether an encoder-decoder's answer ends with `start` too, after `end`, as mBART's labels do
    )

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
    ends: tuple[int, ...] = ()  # the special tokens with which chat templates end the answers, the most frequent first
    template: str = ""  # of Jinja, that writes the conversations as they are learned; "" for none

    def fingerprint(self) -> str:
        """Returns the CRC-32 of all tokens and labels, in hexadecimal."""
        found = 0
        for example in self.examples:
            for array in (example.inputs, example.targets, example.labeled):
                found = zlib.crc32(array.tobytes(), found)
        return f"{zlib.crc32(str(len(self.examples)).encode(), found):08x}"


class Piece(NamedTuple):
    """A prompt with its answer."""

    prompt: str
    answer: str
    is_learned: bool = True


class Chatted(NamedTuple):
    """A conversation as a chat template of the tokenizer writes it."""

    text: str
    learned: list[spans.Part]


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
    chosen = {"chat_template": settings.chat_template, "learn": settings.learn}
    for key, usual in (("chat_template", templates.AUTO), ("learn", spans.ALL)):
        if chosen[key] != usual and not encoder.notes:
            notes.append(f"`{key}={chosen[key]}` has no effect: {name} has no conversation")
    return Encoded(
        found, tuple(answers), notes, tuple(number for number, _ in encoder.ends.most_common()), encoder.template()
    )


def chat_of(
    tokenizer: tokenizer_lib.Tokenizer, settings: TaskSettings, form: RowForm, folder: pathlib.Path | None
) -> tuple[tuple[int, ...], str]:
    """Returns the tokens that end the answers of a chat, and its template, as `Encoded` has them, without any example."""
    encoder = _Encoder(tokenizer, settings, form, folder, None)
    encoder.find_template()
    return encoder.chat_ends(), encoder.template()


class Shown(NamedTuple):
    """An example as it is learned."""

    example: Example
    text: str  # of which its tokens are; what is cut is in it too
    notes: list[str]  # lines about it


def show(
    examples: source_lib.Source,
    tokenizer: tokenizer_lib.Tokenizer,
    settings: TaskSettings,
    form: RowForm,
    *,
    name: str,
    folder: pathlib.Path | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Shown]:
    """Yields one example after the other with its text. Takes the arguments of `encode`, and raises as it does."""
    encoder = _Encoder(tokenizer, settings, form, folder, names)
    for index in range(len(examples)):
        counts = _Counts(name, form)
        example = encoder.encode(examples[index], source_lib.place_of(examples, index, f"{name}, example"), counts)
        yield Shown(example, encoder.text, [*encoder.notes, *counts.notes(1)])


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
    ends: tuple[int, ...] = ()  # the special tokens with which the chat template ends an answer


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
    notes = [*encoder.notes, *counts.notes(len(found))]
    return Asked([ids for ids, _ in found], [label for _, label in found], notes, encoder.chat_ends())


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
            "shared": "prompts end within a token that their answers begin with, so the model is asked otherwise than it learns",
            "system": "examples have a field 'system', which nothing reads: write it as the first message",
            "parts": "conversations have lists of texts as contents, which the chat template does not write: they are joined",
            "tools": "conversations offer tools, which the chat template never writes",
            "dropped": "conversations have a message whose content the chat template leaves out",
            "thoughts": "conversations have reasoning that the chat template leaves out, as of earlier answers",
            "calls": "conversations have calls of tools that the chat template leaves out",
            "quoted": "conversations have calls whose arguments are texts of JSON, which the chat template writes in quotes: give tables",
            "endless": "conversations have an answer that ends with no special token, so its end is not learned",
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
        self.text = ""  # of the last example
        self.ends: collections.Counter[int] = collections.Counter()
        self._folder = folder
        self._has_known_form = settings.task in PAIRED and not settings.answer
        if settings.task == CHAT:
            return
        if self._has_known_form:
            prompt, chosen, rejected = (f"{{{field}}}" for field in preferences.FIELDS)
            settings = dataclasses.replace(settings, prompt=prompt, answer=chosen, rejected=rejected)
            self._settings = settings
        # Of an embedding each text is read alone
        self._prompt = templates.Template("" if settings.task == EMBED else settings.prompt, "prompt")
        others = ("answer", "rejected") if settings.task in PAIRED else ()
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
        chat, note = templates.chat_of(self._folder, self._settings.chat_template, self._settings.now)
        self.notes.append(note)
        return chat

    @functools.cached_property
    def _places(self) -> spans.Places:
        return _places(self._tokenizer)

    def encode(self, example: Mapping[str, Any], place: str, counts: _Counts) -> Example:
        """Returns an example in the form of the model's rows."""
        told = f"task={self._settings.task!r}: {place}"
        example = self._known(example, told)
        if self._settings.task == CHAT:
            talk: tuple[list[templates.Message], int] | None = (self._messages(example, told), 0)
        else:
            talk = self._talk(example, told)
        is_led = talk is not None and talk[0][0]["role"] == templates.SYSTEM
        if (self._settings.task == CHAT or self._has_known_form) and example.get(templates.SYSTEM) and not is_led:
            counts.add("system", place)
        if talk is None:
            prompt, text = self._texts(example, told)
            answer = text or ""
            self.text = prompt + answer
            if not answer.strip():
                counts.add("empty", place)
            with errors.below(f"{place}: "):
                if self._form.classes:
                    return self._classified(prompt, answer, place, counts)
                if self._form.is_encoder_decoder:
                    return self._two_arrays(self._whole(prompt, False), answer, place, counts)
                return self._one_array([Piece(prompt, answer)], answer, place, counts)
        with errors.below(f"{told}: "):
            return self._conversation(*talk, example, place, counts)

    def _known(self, example: Mapping[str, Any], told: str) -> Mapping[str, Any]:
        """Returns an example under the names that the templates read.

        Raises:
          UserError: it has images or the like.
        """
        for name in _NO_TEXT if self._settings.task in (CHAT, *PAIRED) else ():
            if name in example and templates.plain(example[name]):
                raise UserError(
                    f"{told}: has {name!r}, and models read text alone here; remove the field, or the example"
                )
        if self._settings.task in PAIRED and self._has_known_form:
            return preferences.pair_of(example, told)
        return example

    def _conversation(
        self, messages: list[templates.Message], begin: int, example: Mapping[str, Any], place: str, counts: _Counts
    ) -> Example:
        """Returns a conversation in the form of the model's rows; messages before `begin` are no answers."""
        numbers = spans.wanted(messages, begin, self._settings.learn)
        if not numbers:
            raise UserError(
                "all messages of the assistant have a weight of 0, so there is no answer to learn; remove the example"
            )
        given = self._given(messages, example, place, counts)
        messages = self._joined(messages, given, place, counts)
        last = messages[numbers[-1]]
        answer = templates.text_of(last)
        if not answer.strip() and not last.get(templates.TOOL_CALLS):
            counts.add("empty", place)
        if self._form.reads_prompt:
            prompt = self._rendered(messages[: numbers[-1]], given, is_answered=True)
            self.text = prompt + answer
            if self._form.classes:
                return self._classified(prompt, answer, place, counts)
            return self._two_arrays(self._whole(prompt, self._has_special), answer, place, counts)
        if not isinstance(self._chat, templates.JinjaChat):
            pieces = self._plain(messages, numbers)
            self.text = "".join(piece.prompt + piece.answer for piece in pieces)
            return self._one_array(pieces, answer, place, counts)
        talk = spans.Talk(self._chat, messages, given, self._places)
        self.text = talk.text
        for kind in self._left_out(talk.text, messages, given):
            counts.add(kind, place)
        learned = talk.learned(numbers, self._settings.learn)
        if not learned:
            raise UserError("the chat template marks no answer of it, so there is none to learn; remove the example")
        return self._one_array(Chatted(talk.text, learned), answer, place, counts)

    def _left_out(self, text: str, messages: Sequence[templates.Message], given: Mapping[str, Any]) -> Iterator[str]:
        """Yields the kinds of things in messages that their text has not, or has in quotes; those of `_Counts`."""
        if not all(_has(text, templates.text_of(message)) for message in messages):
            yield "dropped"
        thoughts = (message.get(name) for message in messages for name in templates.REASONING)
        if any(isinstance(thought, str) and thought.strip() not in text for thought in thoughts):
            yield "thoughts"
        calling = [number for number, message in enumerate(messages) if message.get(templates.TOOL_CALLS)]
        for number in calling:  # a template may write the first call alone, or none beside a content
            *calls, _ = messages[number][templates.TOOL_CALLS]
            fewer = {key: value for key, value in messages[number].items() if key != templates.TOOL_CALLS}
            fewer |= {templates.TOOL_CALLS: calls} if calls else {}
            with contextlib.suppress(UserError):
                if self._rendered([*messages[:number], fewer, *messages[number + 1 :]], given) == text:
                    yield "calls"
                    break
        functions = (
            call.get("function", call) for number in calling for call in messages[number][templates.TOOL_CALLS]
        )
        arguments = (own.get("arguments") for own in functions if isinstance(own, Mapping))
        if any(
            isinstance(own, str) and '"' in own and json.dumps(own, ensure_ascii=False) in text for own in arguments
        ):
            yield "quoted"

    def _given(
        self, messages: Sequence[templates.Message], example: Mapping[str, Any], place: str, counts: _Counts
    ) -> dict[str, Any]:
        """Returns the variables of the chat template that an example has.

        Raises:
          UserError: it has what the template does not write.
        """
        given: dict[str, Any] = {}
        more = templates.plain(example.get(templates.VARIABLES))
        if more is not None and not isinstance(more, Mapping):
            raise UserError(
                f"{templates.VARIABLES} is {errors.shown(more)}, and must be a table of the template's variables"
            )
        given |= {name: value for name, value in (more or {}).items() if value is not None}
        if odd := {"messages", "add_generation_prompt"} & {*given}:
            raise UserError(f"{templates.VARIABLES} has {min(odd)!r}, which the example itself decides; remove it")
        tools = templates.tools_of(example.get(templates.TOOLS))
        if tools is not None:
            given[templates.TOOLS] = tools
        if tools and not self._reads(templates.TOOLS, given):
            counts.add("tools", place)
        calls = any(message.get(templates.TOOL_CALLS) for message in messages)
        thinks = any(message.get(name) for message in messages for name in templates.REASONING)
        earlier = any(message.get(templates.FUNCTION_CALL) for message in messages)
        for has, names, told in (
            (calls, [templates.TOOL_CALLS], "calls tools"),
            (earlier, [templates.FUNCTION_CALL], "calls a function"),
            (thinks, templates.REASONING, "has reasoning"),
        ):
            if has and not any(self._reads(name, given) for name in names):
                raise UserError(
                    f"a message {told}, which the chat template never writes; remove the field {names[0]!r} of messages, or give the "
                    "tokenizer a chat template that does"
                )
        return given

    def _reads(self, name: str, given: Mapping[str, Any]) -> bool:
        return isinstance(self._chat, templates.JinjaChat) and self._chat.reads(name, given)

    def _joined(
        self, messages: list[templates.Message], given: Mapping[str, Any], place: str, counts: _Counts
    ) -> list[templates.Message]:
        """Returns messages with texts as contents, if the template does not write lists of texts."""
        if not any(isinstance(message.get("content"), list) for message in messages):
            return messages
        if isinstance(self._chat, templates.JinjaChat):
            with contextlib.suppress(UserError):
                text = self._rendered(messages, given)
                lists = (message["content"] for message in messages if isinstance(message.get("content"), list))
                if "{'type': 'text'" not in text and all(_has(text, part["text"]) for parts in lists for part in parts):
                    return messages
            counts.add("parts", place)
        return [
            {**message, "content": templates.text_of(message)} if isinstance(message.get("content"), list) else message
            for message in messages
        ]

    def _rendered(
        self, messages: Sequence[templates.Message], given: Mapping[str, Any], *, is_answered: bool = False
    ) -> str:
        if isinstance(self._chat, templates.JinjaChat):
            return self._chat.render(messages, is_answered=is_answered, given=given).text
        return self._chat(messages, is_answered)

    @property
    def _has_special(self) -> bool:
        return isinstance(self._chat, templates.JinjaChat)

    def _plain(self, messages: Sequence[templates.Message], numbers: Sequence[int]) -> list[Piece]:
        """Returns a conversation in the plain template, in pieces that end where an answer ends. Nothing follows the last learned one."""
        done, pieces = "", []
        for number, message in enumerate(messages[: numbers[-1] + 1]):
            if message["role"] == templates.ASSISTANT:
                before, answer = self._chat(messages[:number], True), templates.text_of(message)
                pieces.append(Piece(before[len(done) :], answer, number in numbers))
                done = before + answer
        return pieces

    def ask(self, example: Mapping[str, Any], place: str, counts: _Counts) -> tuple[np.ndarray, str | None]:
        """Returns the tokens of an example's prompt, and its label; None if it has none."""
        told = f"task={self._settings.task!r}: {place}"
        with contextlib.suppress(UserError):  # one without answers is asked too
            example = self._known(example, told)
        label: str | None = None
        if self._settings.task == CHAT:
            messages = self._messages(example, told, is_answered=False)
            talk: tuple[list[templates.Message], int] | None = (messages, len(messages))
        else:
            talk = self._talk(example, told, is_answered=False)
        if talk is None:
            prompt, label = self._texts(example, told, is_answered=False)
            with errors.below(f"{place}: "):
                if self._form.classes:
                    return self._read_prompt(prompt, place, counts), label
                if self._form.is_encoder_decoder:
                    return self._two_arrays(self._whole(prompt, False), "", place, counts).inputs, label
                return self._asked(self._prompt_ids(prompt), place, counts), label
        messages, begin = talk
        if not messages:
            raise UserError(
                f"{told}: has no prompt, and no `{self._answer.key}` whose messages begin with one; its fields: "
                f"{', '.join(map(str, example))}"
            )
        begin -= begin == len(messages) and messages[-1]["role"] == templates.ASSISTANT
        label = templates.text_of(messages[begin]) if len(messages) == begin + 1 else None
        with errors.below(f"{told}: "):
            given = self._given(messages[:begin], example, place, counts)
            messages = self._joined(messages[:begin], given, place, counts)
            if self._form.reads_prompt or self._has_special:
                ids = self._whole(self._rendered(messages, given, is_answered=True), self._has_special)
                if self._form.is_encoder_decoder:
                    return self._two_arrays(ids, "", place, counts).inputs, label
                return self._asked(ids, place, counts), label
            answered = [n for n, message in enumerate(messages) if message["role"] == templates.ASSISTANT]
            pieces = self._plain([*messages, {"role": templates.ASSISTANT, "content": ""}], [*answered, len(messages)])
            return self._asked(self._encoded(pieces).tokens[:-1], place, counts), label

    def template(self) -> str:
        """Returns the template of the conversations that were read. The plain one has the tokens that stand around its answers."""
        if "_chat" not in self.__dict__ or self._form.reads_prompt:
            return ""
        if isinstance(self._chat, templates.JinjaChat):
            return self._chat.sources.get(templates.DEFAULT, "")
        name = self._tokenizer.name_of
        return templates.plain_source("".join(map(name, self._head("a").tolist())), name(self._form.end))

    def find_template(self) -> None:
        """Looks for the chat template, as the first conversation does."""
        _ = self._chat

    def chat_ends(self) -> tuple[int, ...]:
        """Returns the special tokens with which the chat template ends an answer, if it was read and says so."""
        chat = self.__dict__.get("_chat")
        return chat_ends(chat, self._tokenizer) if isinstance(chat, templates.JinjaChat) else ()

    def _texts(self, example: Mapping[str, Any], place: str, *, is_answered: bool = True) -> tuple[str, str | None]:
        """Returns the texts of the prompt and of the answer, which may be missing if `is_answered` is not set.

        Pairs without a template of the prompt have the words with which both answers begin as their prompt.
        """
        is_told = self._settings.prompt and not (
            self._settings.task in PAIRED and self._has_known_form and preferences.PROMPT not in example
        )
        if self._settings.task in PAIRED and not is_told:
            both = [template.fill(example, place, self._names) for template in self._answers]
            shared = both[0][: _shared(both)]
            end = max(0, *map(shared.rfind, BETWEEN_WORDS))
            if not end and self._has_known_form:
                raise UserError(
                    f"{place}: has no {preferences.PROMPT!r}, and its answers begin with no words alike; its fields: "
                    f"{', '.join(map(str, example))}; name them in `prompt`, `answer` and `rejected` (`prompt=` for none)"
                )
            return both[0][:end], both[0][end:]
        has_answer = is_answered or _fits(self._answer, example)
        answer = self._answer.fill(example, place, self._names) if has_answer else None
        return self._prompt.fill(example, place, self._names), answer

    def _talk(
        self, example: Mapping[str, Any], place: str, *, is_answered: bool = True
    ) -> tuple[list[templates.Message], int] | None:
        """Returns the messages of the prompt and of the answer, and how many are the prompt's; None where all are texts.

        The prompt is the messages of its field, else those with which all answers begin, else its text as the user's message.
        """
        prompt, *answers = (template.messages(example, place) for template in (self._prompt, *self._answers))
        if prompt is None and not any(answers):
            return None
        found: list[list[templates.Message]] = [[]]
        if is_answered or _fits(self._answer, example):
            found = [
                messages or [{"role": templates.ASSISTANT, "content": template.fill(example, place, self._names)}]
                for template, messages in zip(self._answers, answers)
                if is_answered or _fits(template, example)
            ]
        shared = found[0][: _shared([messages[:-1] for messages in found])]
        if prompt is None:
            begin = len(shared)
            text = "" if shared else self._prompt.fill(example, place, self._names)
            prompt = shared or ([{"role": templates.USER, "content": text}] if text else [])
        else:
            begin = len(prompt) if shared[: len(prompt)] == prompt else 0  # a field with the whole conversation
        answer = found[0][begin:]
        if is_answered and all(message["role"] != templates.ASSISTANT for message in answer):
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

    def _messages(self, example: Mapping[str, Any], place: str, *, is_answered: bool = True) -> list[templates.Message]:
        """Returns the conversation of an example."""
        key = self._settings.messages
        if key not in example:
            raise UserError(
                f"{place}: has no field {key!r}, which `messages` names; its fields: {', '.join(map(str, example))}"
            )
        return templates.messages_of(example[key], place, key, is_answered=is_answered)

    def _two_arrays(self, inputs: np.ndarray, answer: str, place: str, counts: _Counts) -> Example:
        f = self._form
        if len(inputs) > f.seq_len:
            counts.add("prompt", place)
            last = inputs[-1:] if inputs[-1] in f.stops else inputs[:0]  # a tokenizer's own end stays
            inputs = np.concatenate([inputs[: f.seq_len - len(last)], last])
        ids = self._whole(answer, False)
        last = np.array([f.start] if f.ends_with_start and f.start != f.end else [], np.int32)
        if len(last):  # the tokenizer's own end has the language of prompts
            ids = ids[: len(ids) - len(self._tokenizer.around.after)]
        ids = ids if len(ids) and ids[-1] == f.end else np.append(ids, f.end)
        if len(ids) + len(last) > f.answer_len:
            counts.add("answer", place)
            ids = ids[: f.answer_len - len(last)]
        ids = np.concatenate([ids, last])
        targets = np.concatenate([[f.start], ids]).astype(np.int32)
        inputs = inputs if len(inputs) else np.array([f.end], np.int32)
        return Example(inputs.astype(np.int32), targets, np.arange(len(targets)) > 0, 0, answer)

    def _classified(self, prompt: str, answer: str, place: str, counts: _Counts) -> Example:
        classes = self._form.classes
        if answer.strip() not in classes:
            raise UserError(
                f"the answer {answer.strip()!r} is none of the model's {len(classes)} classes "
                f"({', '.join(map(repr, classes[:8]))}); mend it, or set `labels`"
            )
        targets = np.array([classes.index(answer.strip())], np.int32)
        inputs = self._read_prompt(prompt, place, counts)
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

    def _one_array(self, said: "list[Piece] | Chatted", answer: str, place: str, counts: _Counts) -> Example:
        """Returns a row of a decoder, cut to its length: the prompt's beginning first, of the answer only its end."""
        row = self._chatted(said, place, counts) if isinstance(said, Chatted) else self._encoded(said)
        if row.is_shared:
            counts.add("shared", place)
        tokens, marks, prompt = row.tokens, row.marks, row.prompt
        marks = marks & (np.arange(len(marks)) > 0)  # nothing is before the first token, from which it could be told
        most, first = self._form.seq_len + 1, self._kept(tokens)
        if len(tokens) > most:
            # No answer is behind its last label. What a reward compares with is no part of a row, which holds the model's own answer
            tokens = tokens[: 1 + (prompt if self._settings.task == GRPO else np.flatnonzero(marks)[-1])]
        if len(tokens) - prompt > most - first - 1:
            counts.add("answer", place)
            tokens = tokens[: prompt + most - first - 1]
        cut = max(0, len(tokens) - most)
        if cut:
            counts.add("prompt", place)
            tokens = np.concatenate([tokens[:first], tokens[first + cut :]])
            marks = np.concatenate([marks[:first], marks[first + cut :]])
        marks = marks[: len(tokens)] & (np.arange(len(tokens)) > 0)  # what was before the first token may be cut
        return Example(tokens, tokens[:0], marks, prompt - cut, answer)

    def _asked(self, ids: np.ndarray, place: str, counts: _Counts) -> np.ndarray:
        """Returns the ids of a decoder's prompt, of which the beginning is cut."""
        most, first = self._form.seq_len, self._kept(ids)
        if len(ids) <= most:
            return ids.astype(np.int32)
        counts.add("prompt", place)
        return np.concatenate([ids[:first], ids[len(ids) - most + first :]]).astype(np.int32)

    def _kept(self, ids: np.ndarray) -> int:
        """Returns how many tokens at the beginning stay when a prompt is cut: those that begin every text."""
        head = self._tokenizer.around.before
        starts = {*head, self._form.bos, self._tokenizer.bos_id}
        most = max(1, len(head))
        return next((at for at, token in enumerate(ids[:most].tolist()) if token not in starts), min(most, len(ids)))

    def _chatted(self, said: Chatted, place: str, counts: _Counts) -> "_Row":
        """Returns the tokens of a text that a chat template wrote. A token is learned that has a character of an answer."""
        ids, places = self._tokenizer.encode_places(said.text, is_special=True)
        marks, is_endless = np.zeros(len(ids), bool), False
        for begin, end in said.learned:
            own = (places[:, 0] < end) & (places[:, 1] > begin)
            marks |= own
            special = [token for token in ids[own].tolist() if token in self._tokenizer.special_ids]
            if special:
                self.ends[special[-1]] += 1
            is_endless |= not special
        if is_endless:
            counts.add("endless", place)
        begin, _ = said.learned[-1]
        inside = np.flatnonzero(marks & (places[:, 1] > begin))
        if not len(inside):
            raise UserError(
                "no token of its last answer is in the text of the chat template, so there is none to learn; remove the example"
            )
        return _Row(ids, marks, int(inside[0]), False)

    def _encoded(self, pieces: list[Piece]) -> "_Row":
        """Returns the tokens of prompts with their answers. Both are one text to the tokenizer, which the end follows. A token is learned
        that has a character of the answer."""
        tokens = [self._head(pieces[0].prompt)]
        marks, is_shared, prompt = [np.zeros(len(tokens[0]), bool)], False, 0
        for before, answer, is_learned in pieces:
            ids, places = self._tokenizer.encode_places(before + answer, is_special=False)
            own = places[:, 1] > len(before)
            is_shared |= any(before[at:].strip() for at in places[own & (places[:, 0] < len(before)), 0])
            prompt = sum(map(len, tokens)) + int((~own).sum())
            tokens += [ids, np.array([self._form.end], np.int32)]
            marks += [own & is_learned, np.array([is_learned])]
        return _Row(np.concatenate(tokens).astype(np.int32), np.concatenate(marks), prompt, is_shared)

    def _prompt_ids(self, prompt: str) -> np.ndarray:
        """Returns the ids of a decoder's prompt, without the space at its end that belongs to the first word of an answer."""
        ids, places = self._tokenizer.encode_places(prompt, is_special=False)
        if prompt[-1:].isspace():
            ids, places = self._tokenizer.encode_places(prompt + _WORD, is_special=False)
            ids = ids[places[:, 1] <= len(prompt)]
        return np.concatenate([self._head(prompt), ids]).astype(np.int32)

    def _head(self, text: str) -> np.ndarray:
        """Returns the ids that begin a decoder's text, which never is without any token before its answer."""
        f, head = self._form, [*self._tokenizer.around.before]
        if f.bos is not None and head[:1] != [f.bos]:
            head = [f.bos, *head]
        if not head and not text:
            head = [f.end]
        return np.array(head, np.int32)

    def _whole(self, text: str, has_special: bool) -> np.ndarray:
        """Returns the ids of a text with those that the tokenizer adds, or with those that the text itself names."""
        return self._tokenizer.encode_special(text) if has_special else self._tokenizer.encode_whole(text)


class _Row(NamedTuple):
    """The tokens of a decoder's row."""

    tokens: np.ndarray  # int32[length]
    marks: np.ndarray  # bool[length], whether each is learned
    prompt: int  # how many are before the last answer
    is_shared: bool  # whether a token has letters of a prompt and of its answer


def chat_ends(chat: templates.JinjaChat, tokenizer: tokenizer_lib.Tokenizer) -> tuple[int, ...]:
    """Returns the special token with which a chat template ends an answer; () where it has none, or refuses a short conversation."""
    talk = [{"role": templates.USER, "content": "a"}, {"role": templates.ASSISTANT, "content": "b"}]
    try:
        ((begin, end),) = spans.Talk(chat, talk, {}, _places(tokenizer)).learned([1], spans.ALL)
        text = chat.render(talk).text
    except (UserError, ValueError):
        return ()
    ids = tokenizer.encode_special(text[begin:end]).tolist()
    return tuple([token for token in ids if token in tokenizer.special_ids][-1:])


def following(
    chat: templates.Chat, tokenizer: tokenizer_lib.Tokenizer, end: int, messages: Sequence[templates.Message], last: int
) -> list[int]:
    """Returns the tokens of messages after an answer, with what begins the next answer.

    Args:
      chat: writes conversations.
      tokenizer: encodes them.
      end: ends an answer in the plain template.
      messages: after the answer.
      last: the answer's last token: where it is the one that ends an answer, that is not repeated.
    """
    talk = [{"role": templates.USER, "content": "a"}, {"role": templates.ASSISTANT, "content": _SAID}]
    text = chat([*talk, *messages], True).partition(_SAID)[2]
    own, said = [], tokenizer.encode_special
    if not isinstance(chat, templates.JinjaChat):
        own, said = [end], tokenizer.encode
    ids = [*own, *said(text).tolist()]
    return ids[1:] if ids[:1] == [last] else ids


def _places(tokenizer: tokenizer_lib.Tokenizer) -> spans.Places:
    """Returns the function from a text to the places of its special tokens."""
    special = np.array(sorted(tokenizer.special_ids), np.int32)

    def places(text: str) -> np.ndarray:
        ids, found = tokenizer.encode_places(text, is_special=True)
        return found[np.isin(ids, special)]

    return places


def _has(text: str, part: str) -> bool:
    """Returns whether a rendered text has a content, as it is or in JSON. What has reasoning in it may be written otherwise."""
    own = part.strip()
    return "</think>" in own or own in text or json.dumps(own, ensure_ascii=False)[1:-1] in text


def _fits(template: templates.Template, example: Mapping[str, Any]) -> bool:
    return all(templates.nested(example, field) is not None for field in template.fields)


def _shared(several: Sequence[Sequence[Any]]) -> int:
    """Returns with how many equal elements all begin."""
    least = min(map(len, several))
    return next((at for at in range(least) if any(one[at] != several[0][at] for one in several)), least)


def prompts(examples: Sequence[Example], form: RowForm) -> Iterator[np.ndarray]:
    """Yields what the model is asked of each example."""
    for example in examples:
        yield example.inputs if form.reads_prompt else example.inputs[: example.prompt]
