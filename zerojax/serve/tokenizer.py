"""Turns texts and conversations into token ids, and ids into text. This module reads the tokenizer of a model's folder, if it has one."""

import contextlib
import functools
import itertools
import json
import pathlib
import re
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import tasks, templates
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import pretrained
from zerojax.serve import grammars
from zerojax.serve import tools as tools_lib

TOKENIZER = "tokenizer.json"
_IDS = re.compile(r"\s*[0-9]{1,9}(\s+[0-9]{1,9})*\s*", re.ASCII)
_WAY_OUT = "omit them, or give the tokenizer a chat template that does (chat_template.jinja)"
_LONGEST = 1 << 24  # tokens of a conversation; the engine refuses those that do not fit


class Words:
    """The texts of a model without a tokenizer: token ids, separated by spaces."""

    def ids_of(self, text: str) -> list[int]:
        """Returns the ids of a prompt. Raises UserError if it has none."""
        if not _IDS.fullmatch(text):
            raise UserError(
                "prompt: the model's folder has no tokenizer.json, so a prompt is token ids: a list, or a text of them separated by spaces"
            )
        return [int(word) for word in text.split()]

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of an answer's ids."""
        return " ".join(map(str, ids))

    def name_of(self, token: int) -> str:
        """Returns the text of one token, also of a special one."""
        return str(token)

    def before(self, token: int) -> str:
        """Returns what is between a prompt and an answer that begins with a token: a space, or nothing."""
        return ""

    def cleaned(self, text: str, *, is_over: bool) -> str:
        """Returns an answer's text so far, or the beginning of it that what follows does not change, without spaces that are none."""
        return text

    chat_template = ""  # "own" or "plain"; "" without conversations
    # tokens that end an answer of a conversation, beside those that the model's configs name
    chat_ends: tuple[int, ...] = ()
    grammar_of: grammars.Schemas | None = None  # for the engine
    call_form: tools_lib.CallForm | None = None  # in which the chat template writes calls of tools
    call_ids: Mapping[str, int] = types.MappingProxyType({})  # see `tools.grammar`

    def conversation(self, messages: templates.Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Returns the ids of a conversation that offers tools, after which an answer begins. Raises UserError if it has none."""
        raise UserError("messages: the model's folder has no tokenizer.json; ask /v1/completions with token ids")


class TokenizerWords(Words):
    """The texts of a tokenizer, as `zerojax generate` reads and writes them. Threads may share it.

    Args:
      folder: the model's.
      chat_template: "auto", "own" or "plain"; see `data.pairs.templates.chat_of`.

    Raises:
      UserError: the tokenizer or the chat template is damaged.
    """

    def __init__(self, folder: folder_lib.Folder, chat_template: str):
        path = folder.path / TOKENIZER
        self._folder, (self._model, self._cleans) = folder, tokenizer_lib.read_model(path, f"{path}:")
        self._chat, self.note = templates.chat_of(folder.path, chat_template)
        self.chat_template = "plain" if self._chat is templates.plain_chat else "own"
        self._lock, self.grammar_of = threading.Lock(), grammars.Schemas(path)
        self._marks: dict[int, str] = {}  # special tokens that are text
        if isinstance(self._chat, templates.JinjaChat):
            self.chat_ends = tasks.chat_ends(self._chat, self._tokenizer)
            with contextlib.suppress(UserError):  # which a conversation gets
                self.call_form = tools_lib.form_of(self._chat.source({templates.TOOLS: [{}]}))
            texts, special = self.call_form.texts if self.call_form else (), self._tokenizer.special_ids
            added = {str(own.content): token for token, own in self._model.get_added_tokens_decoder().items()}
            self.call_ids = {text: token for text, token in added.items() if text in texts or token not in special}
            self._marks = {token: text for text, token in added.items() if text in texts and token in special}

    def ids_of(self, text: str) -> list[int]:
        """Returns the ids of a prompt with those that the tokenizer adds. Raises UserError if there are none."""
        return _some(self._encode(text, adds_special=True), "prompt")

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of an answer's ids, without special tokens but for those that mark calls of tools."""
        if self._marks.keys().isdisjoint(ids):
            return self._decode(ids)
        parts = itertools.groupby(ids, self._marks.get)
        return "".join(mark * len([*part]) if mark else self._decode([*part]) for mark, part in parts)

    def name_of(self, token: int) -> str:
        """Returns the text of one token, also of a special one, with the space that some tokenizers leave out where a text begins."""
        return self._left_out(token) + self._decode([token], skips_special=False)

    def before(self, token: int) -> str:
        """Returns the space that some tokenizers leave out where a text begins; nothing where an answer is a text of its own."""
        return "" if self._folder.family.is_encoder_decoder else self._left_out(token)

    def cleaned(self, text: str, *, is_over: bool) -> str:
        """Returns an answer's text as `tokenizer.cleaned` has it, where the tokenizer's settings say so."""
        if not self._cleans:
            return text
        return tokenizer_lib.cleaned(text if is_over else tokenizer_lib.settled(text))

    def _left_out(self, token: int) -> str:
        alone = self.text_of([token])
        return " " if self.text_of([token, token]) == f"{alone} {alone}" else ""

    def conversation(self, messages: templates.Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Returns the ids of a conversation that offers tools, after which an answer begins.

        Raises:
          UserError: the template refuses it or leaves out tools, calls or their results, or it has no token.
        """
        own, given = self._chat, {templates.TOOLS: list(tools)} if tools else {}
        listed = [message for message in messages if isinstance(message, Mapping)]
        calls = any(message.get(templates.TOOL_CALLS) for message in listed)
        for name, field, is_there in (("tools", templates.TOOLS, tools), ("messages", templates.TOOL_CALLS, calls)):
            if is_there and not (isinstance(own, templates.JinjaChat) and own.reads(field, given)):
                raise UserError(f"{name}: the chat template writes no {field}; {_WAY_OUT}")
        if tools and self.call_form is None:
            known = ", ".join(tools_lib.FORMS)
            raise UserError(
                f"tools: the chat template writes calls in a form that is not read (known: {known}); omit them"
            )
        if not isinstance(own, templates.JinjaChat):
            return _some(self._plain(messages), "messages")
        with self._lock:  # the template's process answers one question after the other
            text = own.render(messages, is_answered=True, given=given).text
        for result in (message["content"] for message in listed if message["role"] == templates.TOOL):
            if result.strip() not in text and json.dumps(result, ensure_ascii=False)[1:-1] not in text:
                raise UserError(f"messages: the chat template writes no message of role tool; {_WAY_OUT}")
        return _some(self._encode(text, adds_special=False), "messages")

    def _plain(self, messages: templates.Messages) -> list[int]:
        """Returns the ids as the task `chat` of the trainer makes them, with an end after each answer."""
        tokenizer = self._tokenizer
        special = pretrained.special_tokens(self._folder)
        stops = (
            special.stops or tuple(token for token in (tokenizer.end_id, tokenizer.bos_id, 0) if token is not None)[:1]
        )
        form = tasks.RowForm(
            is_encoder_decoder=self._folder.family.is_encoder_decoder,
            seq_len=_LONGEST,
            answer_len=_LONGEST,
            start=special.start,
            end=stops[0],
            bos=None,
            stops=stops,
        )
        settings = tasks.TaskSettings(tasks.CHAT, "", "", (), "messages", "plain")
        example: dict[str, Any] = {"messages": [templates.tabled(message) for message in messages]}
        asked = tasks.ask([example], tokenizer, settings, form, name="messages")
        return asked.prompts[0].tolist()

    @functools.cached_property
    def _tokenizer(self) -> tokenizer_lib.Tokenizer:
        return tokenizer_lib.load_tokenizer(str(self._folder.path / TOKENIZER))

    def _encode(self, text: str, *, adds_special: bool) -> list[int]:
        with tokenizer_lib.refused("prompt: the tokenizer cannot encode it", "shorten the text, or mend the tokenizer"):
            return self._model.encode(text, add_special_tokens=adds_special).ids

    def _decode(self, ids: Sequence[int], *, skips_special: bool = True) -> str:
        with tokenizer_lib.refused(f"{self._folder.path / TOKENIZER}: cannot decode an answer", "mend the tokenizer"):
            return self._model.decode(list(ids), skip_special_tokens=skips_special)


def of_folder(folder: folder_lib.Folder, chat_template: str) -> Words:
    """Returns the words of a model's folder.

    Raises:
      UserError: a file is damaged, or a chat template is asked for that is not there.
    """
    if pathlib.Path(folder.path / TOKENIZER).is_file():
        return TokenizerWords(folder, chat_template)
    if chat_template != "auto":
        raise UserError(
            f"chat_template: is {chat_template!r}, and {folder.path} has no {TOKENIZER} to read a chat with; omit it"
        )
    return Words()


def _some(ids: list[int], name: str) -> list[int]:
    if not ids:
        raise UserError(f"{name}: a text without any token cannot be read; give at least one word")
    return ids
