"""Checks the command `zerojax data`. This module tests zerojax.commands.data."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from zerojax.data import tokenizer

WORDS = "user assistant hi good bad".split()
TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
TALKS = [
    [("user", "hi"), ("assistant", "good"), ("user", "hi"), ("assistant", "bad")],
    [("user", "bad"), ("assistant", "good")],
]


@pytest.fixture
def chats(tmp_path):
    """Returns the flags of a run on chats, with a tokenizer that has a template."""
    model = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(["?", *WORDS])}, "?"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<s>", "</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    lines = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in TALKS]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"messages": 3}])))
    data = {"task": "chat", "train_file": tmp_path / "chats.jsonl", "tokenizer": tmp_path / "tokenizer.json"}
    return ["--config", "zero3", *(f"--config.data.{name}={value}" for name, value in data.items())]


def run(commands, *arguments):
    argv = ["zerojax data", *map(str, arguments)]
    code = f"sys.argv = {argv!r}; runpy.run_module('zerojax.commands.data', run_name='__main__')"
    return commands.python(f"import sys, runpy; {code}")


@pytest.mark.slow
def test_ids_and_what_is_learned_are_lines_of_json(commands, chats, tmp_path):
    done = run(commands, *chats, "--show", "2", "--json")
    assert (done.status, done.err) == (0, "")
    own = tokenizer.load_tokenizer(str(tmp_path / "tokenizer.json"))
    for line, talk in zip(map(json.loads, done.out.splitlines()), TALKS, strict=True):
        assert line["text"] == "".join(f"<s>{role} {content}</s>" for role, content in talk)
        assert line["ids"] == own.encode_special(line["text"]).tolist()
        assert line["learned"] == [int(role == "assistant") * part for role, _ in talk for part in (0, 0, 1, 1)]


@pytest.mark.slow
def test_learned_tokens_stand_out_and_special_tokens_have_an_origin(commands, chats):
    done = run(commands, *chats, "--show=1")
    assert (done.status, done.err) == (0, "")
    assert "<s>|user|hi|</s>|<s>|assistant|*good|*</s>|" in done.out and "ids: 6 1 3 7 6 2 4 7" in done.out
    assert "'</s>' (7): the chat template's text (tokenizer_config.json names it eos_token)" in done.out
    done = run(commands, *chats, "--show=3")
    assert done.status == 2 and "chats.jsonl:3: messages must be a list" in done.err
    done = run(commands, "--config=zero3", "--show=1", "--config.data.name=random")
    assert done.status == 2 and done.err.startswith("zerojax: config.data.name: is 'random', whose tokens are no text")


@pytest.mark.slow
def test_a_document_is_shown_with_what_stands_around_it(commands, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hi\\u4e2d"}')
    done = run(commands, "--config=zero3", f"--config.data.train_file={tmp_path / 'a.jsonl'}", "--json")
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out) == {"ids": [256, 104, 105, 228, 184, 173], "learned": [1] * 6, "text": "hi\u4e2d"}
