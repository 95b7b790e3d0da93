# ruff: noqa: E402, E501
"""Feeds the readers files that are odd, damaged or hostile. This module makes the files and judges how each reading ends.

    python tests/support/odd_files.py                      # all cases
    python tests/support/odd_files.py --only "torch: "     # those whose names begin so, with tracebacks
    python tests/support/odd_files.py --share 5            # every fifth

Each case is read in a process of its own. It may be read, or end with a UserError of one line. Any other exception, more than SECONDS of
computing or WAIT of waiting, and more than GROWTH bytes of memory beyond those of the start are failures. A case depends on its name alone.
"""

import argparse
import base64
import contextlib
import functools
import gzip
import io
import json
import os
import pathlib
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    os.environ |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import pyarrow
import pyarrow.parquet

from zerojax.checkpoint import checksums
from zerojax.clock import rates
from zerojax.cluster import environment, hosts
from zerojax.commands import generate
from zerojax.data import token_files
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import records, tasks, templates
from zerojax.errors import UserError
from zerojax.interop import deltas, peft, tensor_files
from zerojax.interop import folder as folder_lib
from zerojax.migration import documents, torch_files, zero_checkpoint
from zerojax.plan import scale
from zerojax.serve import requests
from zerojax.trainer import workdir

GOLDEN = ROOT / "tests" / "golden"
SECONDS = 20  # of computing
SLOW = r"slow regex|1 GiB|GiB that|MiB|TiB|lies|MB|,000,000|many|1e|large|deep|long|nested|template: .*(range|power|macro|slow|spaces|cycler|lorem|sort)|copied|colliding|entries|20,000|tensors|digits|one text|sixties|quotes|newlines|bomb|columns|without end"
WAIT = 120  # of waiting, on a machine that others use too
GROWTH = 2**30  # bytes
ROOM = 6 * 2**30  # bytes of addresses, so that a failure harms nobody
LONGEST = 2100  # characters of an error line
TURNS = [
    ("system", "Be brief."),
    ("user", "Hi {{ x }}"),
    ("assistant", "Hello"),
    ("user", "Bye"),
    ("assistant", "\u4e2d"),
]

# name of a case -> what makes its file at a path
Makers = dict[str, Callable[[pathlib.Path], None]]


# ---- readers: each gets the path that a maker wrote


def read_template(path: pathlib.Path) -> None:
    chat, _ = templates.chat_of(path.parent, "own")
    for number in range(1, len(TURNS)):
        chat(TURNS[:number], True)


def read_tokenizer(path: pathlib.Path) -> None:
    found = tokenizer_lib.load_tokenizer(str(path))
    for text in ("", "hello world", "\u4e2d\u00e9 <s> \U0001f600" * 50, "a" * 20000):
        ids = found.encode(text)
        found.encode_whole(text)
        found.encode_special(text)
        found.decode(ids)
    assert found.vocab_size > 0
    found.vocabulary, found.sentinels, found.file(begins=True)


def read_beside(path: pathlib.Path) -> None:
    """Reads a tokenizer by the files beside it, and what begins and ends its texts."""
    token_files.named(path.parent)
    read_tokenizer(path.parent / token_files.TOKENIZER)
    found = tokenizer_lib.load_tokenizer(str(path.parent / token_files.TOKENIZER))
    found.bos_id, found.end_id, found.special_ids, found.document  # noqa: B018
    tokenizer_lib.read_model(path.parent / token_files.TOKENIZER, "it")[0].encode("a<s></s> hello")


def read_named_template(path: pathlib.Path) -> None:
    """Renders with the folder's default template, and with that for tools."""
    for file in (path, path.parent.parent / "chat_template.jinja"):
        read_template(file)
    chat, _ = templates.chat_of(path.parent.parent, "own")
    if isinstance(chat, templates.JinjaChat):
        chat.render(TURNS, given={templates.TOOLS: [{"name": "a"}]})


def read_tensors(path: pathlib.Path) -> None:
    for entry in tensor_files.read_folder(path.parent).values():
        if entry.dtype in tensor_files.DTYPES:
            tensor_files.is_equal(entry, entry)


def read_folder(path: pathlib.Path) -> None:
    folder_lib.fingerprint(folder_lib.open_folder(path.parent))


def read_torch(path: pathlib.Path) -> None:
    torch_files.read(path)


def read_deepspeed(path: pathlib.Path) -> None:
    zero_checkpoint.read(path.parent)


def read_document(path: pathlib.Path) -> None:
    documents.translated(documents.read(str(path)))


def read_records(path: pathlib.Path) -> None:
    found = records.Files(str(path), "config.data.train_file")
    for index in range(min(len(found), 1000)):
        found[index]


def read_conversations(path: pathlib.Path) -> None:
    settings = tasks.TaskSettings(tasks.CHAT, "", "", (), "messages", "plain")
    form = tasks.RowForm(
        is_encoder_decoder=False, seq_len=4096, answer_len=512, start=0, end=256, bos=None, stops=(256,)
    )
    source = records.Files(str(path), "config.data.train_file")
    tasks.encode(source, tokenizer_lib.ByteTokenizer(), settings, form, name="train_file")


def read_asked(path: pathlib.Path) -> None:
    for is_chat in (True, False):
        with contextlib.suppress(requests.NotAnswered):
            requests.read(path.read_bytes(), is_chat=is_chat)


def read_deltas(path: pathlib.Path) -> None:
    deltas._read(path)


def read_arrays(path: pathlib.Path) -> None:
    generate._read(str(path))


def read_adapter(path: pathlib.Path) -> None:
    peft.read_settings(path.parent, peft.read_config(path.parent))


def read_adapter_of_a_model(path: pathlib.Path) -> None:
    model = folder_lib.open_folder(GOLDEN / "huggingface" / "llama")
    peft.open_adapter(path.parent, model.family, model.model)


def read_workdir(path: pathlib.Path) -> None:
    workdir.check(path.parent, {"steps": 1, "zero": {"stage": 3}})


def read_hostfile(path: pathlib.Path) -> None:
    hosts.ranks(hosts.choose(hosts.read(str(path), ["0"])), 1)


def read_environment(path: pathlib.Path) -> None:
    environment.read({"DS_ENV_FILE": str(path)})


def read_record(path: pathlib.Path) -> None:
    try:
        checksums.read(path)
    except (OSError, ValueError) as error:  # which its callers expect
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error


# ---- files


def text(content: str | bytes, times: int = 1, end: str | bytes = "") -> Callable[[pathlib.Path], None]:
    """A file of a text, or of its repetitions and an end."""

    def make(path: pathlib.Path) -> None:
        with open(path, "wb") as file:
            for part, count in ((content, times), (end, 1)):
                file.write((part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")) * count)

    return make


def fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)


def link(target: str) -> Callable[[pathlib.Path], None]:
    return lambda path: path.symlink_to(target if target != "itself" else path.name)


def sparse(size: int) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        with open(path, "wb") as file:
            file.truncate(size)

    return make


# what no reader can use, under any name
NO_FILES: Makers = {
    "a pipe": fifo,
    "a link to /dev/zero": link("/dev/zero"),
    "a link to a terminal": link("/dev/tty"),
    "a link to itself": link("itself"),
    "a link to nothing": link("/nowhere/at/all"),
    "a folder": lambda path: path.mkdir(),
    "an empty file": text(b""),
    "a file of 8 TiB without content": sparse(8 << 40),
    "zeros": text(bytes(1 << 20)),
    "no UTF-8": text(b"\xff\xfe{}\x80"),
}

NESTED = 200_000


def _flat(path: pathlib.Path) -> None:
    path.write_text("[" + "[]," * 8_000_000 + "[]]")


JSON_TEXTS: dict[str, str] = {
    "a number of 5,000 digits": '{"model_type": ' + "9" * 5000 + "}",
    "infinity": '{"model_type": 1e999, "vocab_size": 1e999}',
    "NaN": '{"model_type": NaN, "vocab_size": NaN}',
    "a list": "[1, 2]",
    "a text": '"x"',
    "null": "null",
    "nested lists": "[" * NESTED + "]" * NESTED,
    "nested tables": '{"a":' * NESTED + "1" + "}" * NESTED,
    "a half of a surrogate": '{"model_type": "\\ud800", "chat_template": "\\ud800", "\\udfff": "\\udc00"}',
    "a null byte": '{"model_type": "\\u0000", "chat_template": "\\u0000"}',
    "a key twice": '{"model_type": "llama", "model_type": "t5"}',
    "cut off": '{"model_type": "lla',
    "a comment": '{"model_type": "llama"} // x',
    "a table of null": '{"weight_map": null, "model_type": null, "architectures": null, "chat_template": null, "bos_token": null}',
    "a table of lists": '{"weight_map": [], "model_type": [], "architectures": [[]], "chat_template": [1], "bos_token": [], "peft_type": {}}',
    "a table of tables": '{"weight_map": {"a": {}}, "model_type": {}, "architectures": {}, "chat_template": {"a": 1}, "bos_token": {"content": 1}}',
    "a long key": '{"' + "k" * 1_000_000 + '": 1}',
    "a long text": '{"model_type": "' + "x" * 10_000_000 + '", "peft_type": "' + "x" * 1_000_000 + '"}',
}


def json_makers(*left_out: str) -> Makers:
    found = {name: text(content) for name, content in JSON_TEXTS.items()} | {"many lists": _flat}
    return {name: make for name, make in found.items() if name not in left_out}


TEMPLATES = {
    "a text of 1e11 letters": "{{ 'a' * 10**11 }}",
    "a text of 1e9 letters": "{{ 'a' * 10**9 }}",
    "a text of 3e7 letters": "{{ 'a' * (3 * 10**7) }}",
    "a list of 1e9": "{{ [1] * 10**9 }}",
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "nested ranges that write": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "a range of 1e12": "{{ range(10**12)|list }}",
    "a power": "{{ 10**(10**9) }}",
    "powers of powers": "{{ 9**9**9**9 }}",
    "a large number as text": "{{ 10**5000 }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for a in [[[]]] recursive %}{{ loop([[a]]) }}{% endfor %}",
    "nested lists": "{% set x = [] %}{% set y = [x] * 100 %}" + "{% set y = [y] * 100 %}" * 50 + "{{ y }}",
    "doubling": "{% set n = namespace(t='a') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a wide format": "{{ '%0999999999999d' % 3 }}",
    "a wide format by a method": "{{ '{:>999999999999}'.format(1) }}",
    "a wide filter": "{{ 'a'|center(10**11) }}",
    "an indent": "{{ 'a\nb'|indent(10**10) }}",
    "replacing": "{{ ('a' * 10**5).replace('a', 'b' * 10**6) }}",
    "joining": "{{ (['a'] * 10**6)|join('b' * 10**6) }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "lorem": "{{ lipsum(n=10**9) }}",
    "a cycler": "{{ cycler(*range(99999)) }}",
    "sorting": "{{ range(99999)|sort(reverse=true)|list|string|length }}",
    "an attribute of a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an attribute by a filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "a format that reads attributes": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "an import": "{% import 'os' as os %}{{ os.system('x') }}",
    "an include": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'x' %}",
    "extends an object": "{% extends messages %}",
    "a changed list": "{% set _ = messages.append({'role': 'x'}) %}",
    "an unknown tag": "{% foo %}",
    "an unknown filter": "{{ 1|foo }}",
    "an unknown test": "{{ 1 is foo }}",
    "an unclosed tag": "{% if",
    "an unclosed block": "{% for m in messages %}",
    "a wrong end": "{% endfor %}",
    "division by zero": "{{ 1 // 0 }}",
    "a missing key": "{{ messages[99]['role'] }}",
    "a missing attribute's attribute": "{{ messages.x.y.z }}",
    "a number and a text": "{{ 1 + 'a' }}",
    "a call of a text": "{{ 'a'() }}",
    "an object as JSON": "{{ raise_exception|tojson }}",
    "JSON with a wide indent": "{{ messages|tojson(indent=10**9) }}",
    "a refusal": "{{ raise_exception('no\nsystem\trole') }}",
    "a long refusal": "{{ raise_exception('x' * 10**6) }}",
    "a refusal of an object": "{{ raise_exception(messages) }}",
    "no refusal's words": "{{ raise_exception() }}",
    "a refusal in a loop": "{% for m in messages %}{{ raise_exception(m) }}{% endfor %}",
    "a marked answer": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "an unclosed marked answer": "{% generation %}x",
    "a half of a surrogate": "{{ '\\ud800' }}",
    "a null byte": "{{ '\0' }}\0",
    "nothing": " ",
    "only a comment": "{# x #}",
    "an unclosed comment": "{# x",
    "a break": "{% for m in messages %}{% break %}{% endfor %}",
    "a break outside": "{% break %}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 90 + "]" * 90 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep filters": "{{ 'a'" + "|upper" * 50_000 + " }}",
    "many branches": "{% if 0 %}" + "{% elif 0 %}x" * 20_000 + "{% endif %}",
    "many variables": "".join(f"{{% set v{i} = {i} %}}" for i in range(20_000)),
    "a long line": "x" * 1_000_000,
    "a longer line": "x" * 3_000_000,
    "a long number": "{{ " + "9" * 5000 + " }}",
    "a long name": "{{ " + "a" * 500_000 + " }}",
    "many quotes": "{{ " + "'" * 200_001 + " }}",
    "spaces": "{{" + " " * 900_000,
    "many braces": "{{{{" * 200_000,
    "no text": "{{ none }}{{ undefined }}",
    "an undefined operation": "{{ undefined + 1 }}",
    "a set of a message": "{% for m in messages %}{% set m.role = 'x' %}{% endfor %}",
    "tools": "{% if tools is not none %}{{ tools[0].name }}{% endif %}ok",
    "the time": "{{ strftime_now('%Y') }}",
    "a filter block": "{% filter upper %}{{ 'a' * 10**10 }}{% endfilter %}",
    "a call block": "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ 'a' * 10**10 }}{% endcall %}",
    "a dict": "{{ dict(a=1)|dictsort|tojson }}",
    "an update": "{% set _ = {}.update(a=1) %}",
    "a global": "{% set range = 1 %}{{ range(3) }}",
    "random": "{{ range(99999)|random }}",
    "a slow comparison": "{{ ('a' * 10**7 in 'a' * 10**8) }}",
    "a slow regex of urlize": "{{ ('a.' * 10**6)|urlize }}",
    "striptags": "{{ ('<' * 10**6)|striptags }}",
    "wordwrap": "{{ ('a ' * 10**6)|wordwrap(1) }}",
    "xmlattr": "{{ {'a b': 1}|xmlattr }}",
    "truncate": "{{ 'a'|truncate(-10**20) }}",
    "round": "{{ 1.5|round(10**9) }}",
    "float": "{{ '9' * 10**7|float }}",
    "int": "{{ ('9' * 10**6)|int }}",
    "groupby": "{{ messages|groupby('nothing')|list }}",
    "sum": "{{ [[1]] * 10**4|sum(start=[]) }}",
    "tojson of a lazy list": "{{ messages|map(attribute='role')|tojson }}",
}


def jinja(source: str) -> Callable[[pathlib.Path], None]:
    return text(source)


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<s>": 0, "[UNK]": 1, "hello": 2, "a": 3}, "unk_token": "[UNK]"},
}


def tokenizer(**changes: Any) -> Callable[[pathlib.Path], None]:
    return text(json.dumps(TOKENIZER | changes))


def model(**changes: Any) -> Callable[[pathlib.Path], None]:
    return tokenizer(model=TOKENIZER["model"] | changes)


def replaced(count: int, content: str) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [step] * count}


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def added(**changes: Any) -> list[dict[str, Any]]:
    return [*TOKENIZER["added_tokens"], TOKENIZER["added_tokens"][0] | {"content": "<x>", "id": 4} | changes]


TOKENIZERS: Makers = {
    "the plain one": tokenizer(),
    "the largest id": model(vocab={"<s>": 0, "[UNK]": 1, "a": 2**32 - 1}),
    "an id beyond": model(vocab={"<s>": 0, "[UNK]": 1, "a": 2**32}),
    "a negative id": model(vocab={"<s>": -1}),
    "an id of 5,000 digits": text(json.dumps(TOKENIZER).replace('"hello": 2', '"hello": ' + "9" * 5000)),
    "two tokens of one id": model(vocab={"<s>": 0, "[UNK]": 0, "a": 0}),
    "no unknown token": model(vocab={"<s>": 0, "a": 3}),
    "an empty vocabulary": model(vocab={}),
    "no separator": tokenizer(added_tokens=[], model=TOKENIZER["model"] | {"vocab": {"[UNK]": 1}}),
    "a list for a vocabulary": model(vocab=[1, 2]),
    "an unknown model": model(type="Magic"),
    "no model": tokenizer(model=None),
    "BPE with merges of no tokens": model(type="BPE", merges=["x y", "q z"]),
    "BPE with a merge of three": model(type="BPE", merges=["a a a"]),
    "BPE with many merges": model(
        type="BPE",
        vocab={"<s>": 0, **{"a" * n: n for n in range(1, 500)}},
        merges=["a " + "a" * n for n in range(1, 498)],
    ),
    "BPE with a huge dropout": model(type="BPE", merges=[], dropout=9.0),
    "BPE with bytes that are not there": model(type="BPE", merges=[], byte_fallback=True, unk_token=None),
    "Unigram without scores": model(type="Unigram", vocab=[], unk_id=0),
    "Unigram with an unknown id beyond": model(type="Unigram", vocab=[["<s>", 0.0]], unk_id=9),
    "Unigram with a score of -1e308": model(type="Unigram", vocab=[["<s>", 0.0], ["a", -1e308]], unk_id=0),
    "Unigram with an empty token": model(type="Unigram", vocab=[["<s>", 0.0], ["", -1.0], ["a", -2.0]], unk_id=0),
    "WordPiece with an odd prefix": model(type="WordPiece", continuing_subword_prefix="", max_input_chars_per_word=0),
    "WordPiece with words of any length": model(
        type="WordPiece", continuing_subword_prefix="", max_input_chars_per_word=2**40
    ),
    "a doubling normalizer": tokenizer(normalizer=replaced(40, "aa")),
    "a normalizer with a long content": tokenizer(normalizer=replaced(1, "b" * 1_000_000)),
    "a decoder with a long content": tokenizer(
        decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_000_000}
    ),
    "a long prefix": tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 1_000_000}),
    "a table of characters that lies": tokenizer(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "/////////////w=="}
    ),
    "many normalizers": tokenizer(normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 20_000}),
    "a slow expression": tokenizer(pre_tokenizer=split_by("(a+)+$")),
    "another slow expression": tokenizer(pre_tokenizer=split_by("(a|a?)+b")),
    "a slow expression in a normalizer": tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x"}
    ),
    "a damaged expression": tokenizer(pre_tokenizer=split_by("(")),
    "a long expression": tokenizer(pre_tokenizer=split_by("(a{1,9999}){1,9999}")),
    "an empty expression": tokenizer(pre_tokenizer=split_by("")),
    "an unknown pre-tokenizer": tokenizer(pre_tokenizer={"type": "Magic"}),
    "nested pre-tokenizers": text(
        json.dumps(TOKENIZER | {"pre_tokenizer": "X"}).replace(
            '"X"', '{"type":"Sequence","pretokenizers":[' * 5000 + "]}" * 5000
        )
    ),
    "a precompiled normalizer of zeros": tokenizer(
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(64)).decode()}
    ),
    "a precompiled normalizer of ones": tokenizer(
        normalizer={
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(b"\x10\0\0\0" + b"\xff" * 60).decode(),
        }
    ),
    "a precompiled normalizer that is empty": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
    "a precompiled normalizer that is no base64": tokenizer(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "***"}
    ),
    "a template without its tokens": tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
    "a template of many tokens": tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0] * 1_000_000, "tokens": ["<s>"] * 1_000_000}},
        }
    ),
    "an added token with another id": tokenizer(added_tokens=added(id=2**32 - 1)),
    "an added token of no letters": tokenizer(added_tokens=added(content="")),
    "an added token of a million letters": tokenizer(added_tokens=added(content="x" * 1_000_000)),
    "many added tokens": tokenizer(
        added_tokens=[TOKENIZER["added_tokens"][0] | {"id": n, "content": f"<{n}>"} for n in range(50_000)] + added()
    ),
    "a truncation to nothing": tokenizer(
        truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}
    ),
    "a padding to 1e9": tokenizer(
        padding={
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<s>",
        }
    ),
    "many sentinels": model(vocab={"<s>": 0, "[UNK]": 1, **{f"<extra_id_{n}>": n + 2 for n in range(50_000)}}),
    "an unknown version": tokenizer(version="9.0"),
    "a byte-level decoder of odd letters": tokenizer(
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    ),
    "a CTC decoder": tokenizer(decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
    "a strip decoder": tokenizer(decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
    "a metaspace of a word": tokenizer(
        pre_tokenizer={"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always"}
    ),
    "a fixed length of 0": tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}),
}


def _named(**changes: Any) -> Callable[[pathlib.Path], None]:
    return text(json.dumps(changes))


def _token(content: Any, **flags: Any) -> dict[str, Any]:
    return {"content": content, "special": True, **flags}


BESIDE: Makers = {
    "names that are no tokens": _named(
        bos_token="<no>", eos_token="", unk_token="<s>", pad_token=" ", cls_token="\ud800"
    ),
    "tables of tokens": _named(bos_token=_token("<s>"), eos_token=_token(["a"]), pad_token={}, mask_token=_token(3)),
    "a name of a million letters": _named(bos_token="x" * 1_000_000),
    "names of odd keys": _named(
        **{"_token": "a", "x_token": {"content": "b"}, "\0_token": "c", "a" * 9999 + "_token": "d"}
    ),
    "flags that are texts": _named(bos_token=_token("<s>", lstrip="no", single_word=0)),
    "50,000 more tokens": _named(additional_special_tokens=[f"<{n}>" for n in range(50_000)]),
    "more tokens of all kinds": _named(additional_special_tokens=["a", None, 3, [], {}, _token("b"), "", "<s>", " "]),
    "more tokens by name": _named(extra_special_tokens={"a": "<a>", "b": 3, "c": {"content": None}, "d": ["x"]}),
    "more tokens that are a text": _named(additional_special_tokens="<a>", extra_special_tokens=3),
    "tokens by id": _named(
        added_tokens_decoder={"0": _token("<s>"), "3": _token("a", special=False), "9": _token("<x>")}
    ),
    "an id of 5,000 digits as a key": _named(added_tokens_decoder={"9" * 5000: _token("<x>")}),
    "ids that are no numbers": _named(added_tokens_decoder={"-1": _token("<x>"), "\u0664": _token("<y>"), "1.5": 3}),
    "an odd digit as a key": _named(added_tokens_decoder={"\u00b2": _token("<x>"), "\u0664": _token("<y>")}),
    "an id of 2**64": _named(added_tokens_decoder={str(2**64): _token("<x>")}),
    "tokens that are texts": _named(added_tokens_decoder={"1": "a", "2": None}),
    "a token of no letters by id": _named(added_tokens_decoder={"1": _token(""), "2": _token(None), "3": {}}),
    "half a letter by id": _named(added_tokens_decoder={"1": _token("\ud83d")}),
    "100,000 tokens by id": _named(added_tokens_decoder={str(n): _token(f"<{n}>") for n in range(100_000)}),
    "a list for tokens by id": _named(added_tokens_decoder=[_token("<x>")]),
    "a class that is a list": _named(tokenizer_class=["LlamaTokenizer"], model_type={}),
    "a class of a million letters": _named(tokenizer_class="x" * 1_000_000, model_type="y" * 1_000_000),
    "an unknown class": _named(tokenizer_class="MagicTokenizerFast", model_type="qwen2"),
    "the class that puts a space": _named(tokenizer_class="LlamaTokenizer", legacy="yes", add_prefix_space=[]),
    "flags that are null": _named(tokenizer_class="LlamaTokenizer", legacy=None, split_special_tokens=None),
    "texts for flags": _named(split_special_tokens="false"),
    "ids of all kinds": _named(bos_token_id=[0, "a", None, 1e9, True, -1], eos_token_id={"a": 1}, pad_token_id="0"),
    "an id beyond": _named(bos_token_id=2**70, eos_token_id=[2**31]),
    "the longest text": _named(model_max_length=10**30),
    "tokens of the older file": _named(**{"<a>": 3, "": 4, "\ud800": 5, "b" * 100_000: 6, "<c>": "x"}),
}
TEMPLATES_BY_NAME: Makers = {
    "two": _named(chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]),
    "no default": _named(chat_template=[{"name": "tool_use", "template": "b"}]),
    "one name twice": _named(
        chat_template=[{"name": "default", "template": "a"}, {"name": "default", "template": "b"}]
    ),
    "no names": _named(
        chat_template=[{"template": "a"}, {"name": None, "template": "b"}, {"name": [], "template": "c"}]
    ),
    "no templates": _named(chat_template=[{"name": "default"}, {"name": "x", "template": 3}]),
    "texts": _named(chat_template=["a", "b"]),
    "numbers": _named(chat_template=3),
    "an empty list": _named(chat_template=[]),
    "a damaged one beside a sound one": _named(
        chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "{% if"}]
    ),
    "10,000": _named(chat_template=[{"name": f"t{n}", "template": "a"} for n in range(10_000)]),
    "many large ones": _named(chat_template={f"t{n}": "x" * 900_000 for n in range(40)} | {"default": "a"}),
    "half a letter": _named(chat_template={"default": "\ud800"}),
}


def safetensors(header: Any, data: int = 0, length: int | None = None) -> Callable[[pathlib.Path], None]:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return text(struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data))


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw_tensor(offsets: str, shape: str = "[2]") -> bytes:
    return f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}'.encode()


SAFETENSORS: Makers = {
    "the plain one": safetensors({"a": tensor()}, 8),
    "offsets of 1e999": safetensors(raw_tensor("[0, 1e999]"), 8),
    "offsets of NaN": safetensors(raw_tensor("[NaN, 8]"), 8),
    "offsets of 5,000 digits": safetensors(raw_tensor("[0, " + "9" * 5000 + "]"), 8),
    "offsets of 4,000 digits": safetensors(raw_tensor("[0, " + "9" * 4000 + "]"), 8),
    "offsets as texts": safetensors({"a": tensor(offsets=["0", "8"])}, 8),
    "offsets as True": safetensors({"a": tensor(offsets=[False, True])}, 8),
    "three offsets": safetensors({"a": tensor(offsets=[0, 4, 8])}, 8),
    "offsets backwards": safetensors({"a": tensor(offsets=[8, 0])}, 8),
    "negative offsets": safetensors({"a": tensor(offsets=[-8, 0])}, 8),
    "offsets as a table": safetensors({"a": tensor(offsets={"0": 1, "8": 2})}, 8),
    "a shape of large numbers": safetensors({"a": tensor(shape=[2**62, 4])}, 8),
    "a shape of 4,000 digits": safetensors(raw_tensor("[0, 8]", "[" + ",".join(["9" * 4000] * 2000) + "]"), 8),
    "a shape of 1e5 dims": safetensors({"a": tensor(shape=[1] * 100_000 + [2])}, 8),
    "a shape of 100 dims": safetensors({"a": tensor(shape=[1] * 100 + [2])}, 8),
    "a shape as a number": safetensors({"a": tensor(shape=2)}, 8),
    "a shape as a text": safetensors({"a": tensor(shape="2")}, 8),
    "an empty shape with zeros": safetensors({"a": tensor(shape=[0, 2**62], offsets=[0, 0])}),
    "an unknown dtype": safetensors({"a": tensor(dtype="Q9")}, 8),
    "a dtype as a list": safetensors({"a": tensor(dtype=[])}, 8),
    "tensors that overlap": safetensors({"a": tensor(), "b": tensor()}, 8),
    "a gap": safetensors({"a": tensor(), "b": tensor(offsets=[16, 24])}, 24),
    "bytes after the last": safetensors({"a": tensor()}, 9),
    "no bytes": safetensors({"a": tensor()}),
    "a header of 2**63 bytes": safetensors(b"{}", 8, 2**63),
    "a header longer than the file": safetensors(b"{}", 8, 10_000),
    "a header of brackets": lambda path: safetensors(b"[" + b"[]," * 10_000_000 + b"[]]")(path),
    "a header of nested brackets": safetensors(b"[" * 1_000_000),
    "a header of 20,000 tensors": lambda path: safetensors(
        {f"t{n}": tensor(offsets=[8 * n, 8 * n + 8]) for n in range(20_000)}, 160_000
    )(path),
    "a header of no table": safetensors([1]),
    "a tensor of no table": safetensors({"a": 3}),
    "metadata of no table": safetensors({"__metadata__": 3, "a": tensor()}, 8),
    "a name with a newline": safetensors({"a\nb\x1b[31m": tensor(shape=[3])}, 8),
    "a name of a million letters": safetensors({"a" * 1_000_000: tensor(shape=[3])}, 8),
    "a half of a surrogate": safetensors(b'{"\\ud800": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', 8),
    "a header in UTF-16": safetensors(json.dumps({"a": tensor()}).encode("utf-16"), 8),
    "a pointer of Git LFS": text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
    "a pickle": text(pickle.dumps({"a": 1})),
    "two bytes": text(b"{}"),
}


def zipped(entries: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", how) as archive:
            warnings.simplefilter("ignore")
            for name, content in entries.items():
                archive.writestr(name, content)

    return make


def bomb(
    name: str, megabytes: int, entries: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED
) -> Callable[[pathlib.Path], None]:
    """A file in which one entry is that many megabytes of zeros when unpacked."""

    def make(path: pathlib.Path) -> None:
        with zipfile.ZipFile(path, "w", how) as archive:
            for other, content in entries.items():
                archive.writestr(other, content)
            with archive.open(name, "w", force_zip64=True) as file:
                for _ in range(megabytes):
                    file.write(bytes(1 << 20))

    return make


def lying(maker: Callable[[pathlib.Path], None], name: bytes, size: int) -> Callable[[pathlib.Path], None]:
    """The same file, whose directory says another size of an entry."""

    def make(path: pathlib.Path) -> None:
        maker(path)
        content = bytearray(path.read_bytes())
        at = content.rindex(name) - 46
        content[at + 24 : at + 28] = struct.pack("<I", size)
        path.write_bytes(content)

    return make


def pickled(opcodes: bytes) -> Callable[[pathlib.Path], None]:
    return zipped({"a/data.pkl": b"\x80\x02" + opcodes + b"."}, zipfile.ZIP_DEFLATED)


def storage_of(kind: bytes, key: bytes, elements: int) -> bytes:
    """The opcodes of a tensor of float32, whose storage has that key."""
    pid = (
        b"(X\x07\0\0\0storagectorch\n"
        + kind
        + b"\nX"
        + struct.pack("<I", len(key))
        + key
        + b"X\x03\0\0\0cpuJ"
        + struct.pack("<i", elements)
        + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\0J" + struct.pack("<i", elements) + b"\x85K\x01\x85\x89}tR"
    )


PICKLE = b"\x80\x02}."
BIG = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
COLLIDING = (
    b"}(" + b"".join(b"\x8a\x0b" + (n * (2**61 - 1)).to_bytes(11, "little") + b"N" for n in range(100_000)) + b"u"
)
GOOD_TORCH = {"a/data.pkl": PICKLE, "a/byteorder": b"little"}
TORCH: Makers = {
    "a byteorder of 1 GiB": bomb("a/byteorder", 1024, {"a/data.pkl": PICKLE}),
    "a byteorder of 1 GiB by bzip2": bomb("a/byteorder", 1024, {"a/data.pkl": PICKLE}, zipfile.ZIP_BZIP2),
    "a byteorder that lies": lying(bomb("a/byteorder", 1500, {"a/data.pkl": PICKLE}), b"a/byteorder", 6),
    "a pickle of 1 GiB": bomb("a/data.pkl", 1024, {"a/byteorder": b"little"}),
    "a pickle of 120 MiB": bomb("a/data.pkl", 120, {"a/byteorder": b"little"}),
    "a pickle that lies": lying(bomb("a/data.pkl", 1500, {"a/byteorder": b"little"}), b"a/data.pkl", 100),
    "a pickle by LZMA": zipped(GOOD_TORCH, zipfile.ZIP_LZMA),
    "a compressed storage of 1 GiB": bomb(
        "a/data/0", 1024, {"a/data.pkl": b"\x80\x02" + storage_of(b"FloatStorage", b"0", 1 << 28) + b"."}
    ),
    "20 compressed storages of 200 MiB": lambda path: _many_storages(path, 20, 200),
    "1000 storages in one place": lambda path: _overlapping(path, 1000),
    "colliding keys": pickled(COLLIDING),
    "colliding keys of a set": pickled(
        b"c__builtin__\nset\n(](" + COLLIDING[2:-1].replace(b"N\x8a", b"\x8a")[:-1] + b"etR"
    ),
    "a state for TorchVersion": pickled(b"ctorch.torch_version\nTorchVersion\nN}X\x01\0\0\0aNs\x86b"),
    "a state for a TorchVersion": pickled(b"ctorch.torch_version\nTorchVersion\nX\x01\0\0\0a\x85R}X\x01\0\0\0aNsb"),
    "a device of devices": pickled(
        BIG
        + b"q\0"
        + b"".join(b"0ctorch\ndevice\n(h" + bytes([n]) + b"h" + bytes([n]) + b"tRq" + bytes([n + 1]) for n in range(40))
    ),
    "a text encoded 10,000 times": pickled(
        BIG + b"q\x000c_codecs\nencode\nq\x01]q\x02(" + b"h\x01(h\0X\x06\0\0\0latin1tR" * 10_000 + b"e"
    ),
    "a list copied 10,000 times": pickled(
        b"](" + b"N" * 1_000_000 + b"eq\x000c__builtin__\nset\nq\x01](" + b"h\x01(h\0tR" * 10_000 + b"e"
    ),
    "a table copied 10,000 times": pickled(
        b"}("
        + b"".join(b"X\x06\0\0\0" + b"%06d" % n + b"N" for n in range(100_000))
        + b"uq\x000]("
        + b"cargparse\nNamespace\n)Rh\0b" * 10_000
        + b"e"
    ),
    "a size of 1e6 dims": pickled(b"ctorch\nSize\n(](" + b"K\x01" * 1_000_000 + b"etR"),
    "a number of 1e7 digits": lambda path: pickled(b"I" + b"9" * 10_000_000 + b"\n")(path),
    "a number of 1e7 bytes": lambda path: pickled(b"\x8b" + struct.pack("<i", 10_000_000) + b"\x7f" * 10_000_000)(path),
    "opcodes without end": lambda path: pickled(b"]" * 100_000_000)(path),
    "marks without end": pickled(b"(" * 4_000_000),
    "a number of a memo": pickled(b"Nr\xff\xff\xff\x7f"),
    "a text of 4 GiB that is not there": pickled(b"\x8d" + struct.pack("<Q", 1 << 32)),
    "bytes that are not there": pickled(b"\x96" + struct.pack("<Q", 1 << 40)),
    "a frame that is not there": pickled(b"\x95" + struct.pack("<Q", 1 << 40)),
    "a storage of negative size": zipped(
        {"a/data.pkl": b"\x80\x02" + storage_of(b"FloatStorage", b"0", -1) + b".", "a/data/0": b""}
    ),
    "a storage that is not there": pickled(storage_of(b"FloatStorage", b"0", 4)),
    "a storage of an unknown kind": pickled(storage_of(b"MagicStorage", b"0", 4)),
    "a storage with a path": pickled(storage_of(b"FloatStorage", b"../../x", 4)),
    "posix.system": pickled(b"cposix\nsystem\n(X\x01\0\0\0xtR"),
    "two pickles": zipped({"a/data.pkl": PICKLE, "b/data.pkl": PICKLE}),
    "a name twice": zipped({"a/data.pkl": PICKLE, "a//data.pkl": PICKLE}),
    "no pickle": zipped({"a/other": b""}),
    "big-endian": zipped({"a/data.pkl": PICKLE, "a/byteorder": b"big"}),
    "100,000 entries": zipped({"a/data.pkl": PICKLE} | {f"a/{n}": b"" for n in range(100_000)}),
    "encrypted": lambda path: _flag_set(path),
    "a zip cut in the middle": lambda path: (zipped(GOOD_TORCH)(path), path.write_bytes(path.read_bytes()[:-30]))[0],  # type: ignore[func-returns-value]
    "a pickle of protocol 5": zipped({"a/data.pkl": pickle.dumps({"a": [1, 2.0, "x"]}, protocol=5)}),
    "a plain pickle": text(pickle.dumps({"a": 1}, protocol=2)),
    "gzip": text(gzip.compress(PICKLE)),
}


def _many_storages(path: pathlib.Path, count: int, megabytes: int) -> None:
    elements = megabytes << 18
    tensors = b"".join(storage_of(b"FloatStorage", b"%02d" % n, elements) for n in range(count))
    zeros = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join([*(zeros.compress(bytes(1 << 20)) for _ in range(megabytes)), zeros.flush()])
    crc = 0
    for _ in range(megabytes):
        crc = zlib.crc32(bytes(1 << 20), crc)
    entries = {"a/data.pkl": (b"\x80\x02](" + tensors + b"e.", None)}
    _zip_by_hand(path, entries | {f"a/data/{n:02d}": (packed, (crc, megabytes << 20)) for n in range(count)})


def _overlapping(path: pathlib.Path, count: int) -> None:
    """A storage of 8 MiB that the directory of the archive lists under many names."""
    elements = 1 << 21
    tensors = b"".join(storage_of(b"FloatStorage", b"%04d" % n, elements) for n in range(count))
    entries: dict[str, Any] = {
        "a/data.pkl": (b"\x80\x02](" + tensors + b"e.", None),
        "a/data/0000": (bytes(4 * elements), None),
    }
    _zip_by_hand(path, entries, same={f"a/data/{n:04d}": "a/data/0000" for n in range(1, count)})


def _zip_by_hand(path: pathlib.Path, entries: dict[str, Any], same: dict[str, str] | None = None) -> None:
    """Writes entries, {name: (bytes, None)} as they are, or {name: (deflated bytes, (CRC-32, size))}; `same` names entries again."""
    directory: dict[str, bytes] = {}
    with open(path, "wb") as file:
        for name, (content, packed) in entries.items():
            crc, size = packed or (zlib.crc32(content), len(content))
            start = file.tell()
            fields = struct.pack("<HHHHHIIIHH", 20, 0, 8 if packed else 0, 0, 33, crc, len(content), size, len(name), 0)
            file.write(b"PK\3\4" + fields + name.encode() + content)
            directory[name] = (
                struct.pack("<HHHHHHIII", 20, 20, 0, 8 if packed else 0, 0, 33, crc, len(content), size) + b"%d" % start
            )
        at, count = file.tell(), 0
        for name, found in [*directory.items(), *((again, directory[first]) for again, first in (same or {}).items())]:
            fields, start = found[:24], int(found[24:])
            file.write(b"PK\1\2" + fields + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, start) + name.encode())
            count += 1
        file.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, file.tell() - at, at, 0))


def _flag_set(path: pathlib.Path) -> None:
    zipped(GOOD_TORCH)(path)
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        at = content.find(mark)
        while at >= 0:
            content[at + offset] |= 1
            at = content.find(mark, at + 4)
    path.write_bytes(content)


SMALL = 2**18 - 200  # the most that a config may have
DOCUMENTS: dict[str, str] = {
    "a comment without end": '{"a": 1} ' + "/*" * (SMALL // 3),
    "quotes": '{"a": ' + '\\"' * (SMALL // 3),
    "newlines": "\n" * SMALL,
    "a number of 5,000 digits": '{"train_batch_size": ' + "9" * 5000 + "}",
    "a batch of infinity": '{"train_batch_size": 1e999}',
    "a batch of NaN": '{"train_batch_size": NaN}',
    "a rate of NaN": '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": NaN}}}',
    "a clipping of infinity": '{"train_batch_size": 8, "gradient_clipping": Infinity}',
    "laughs": "a: &a [x]\n"
    + "".join(f"b{i}: &b{i} [{','.join([f'*b{i - 1}' if i else '*a'] * 90)}]\n" for i in range(20)),
    "merges": "a: &a {x: 1}\n"
    + "".join(f"b{i}: &b{i}\n  <<: [{','.join([f'*b{i - 1}' if i else '*a'] * 90)}]\n" for i in range(8)),
    "a part in itself": "zero_optimization: &a {b: *a}",
    "a list as a key": "? [a, b]\n: 1",
    "a table as a key": "? {a: 1}\n: 1",
    "numbers as keys": "{1: 2, 3: 4}",
    "colliding keys": "{" + ",".join(f"{n * (2**61 - 1)}: 1" for n in range(9000)) + "}",
    "sixties": "a: " + ":".join(["1"] * 50_000),
    "deep lists": "[" * SMALL,
    "deep tables": "{a: " * (SMALL // 4),
    "deep steps": "- " * (SMALL // 2),
    "many documents": "---\n" * (SMALL // 4),
    "an object of Python": "!!python/object/apply:os.system ['ls']",
    "an unknown tag": "!x {a: 1}",
    "an unknown alias": "a: *b",
    "tabs": "a:\n\t- b",
    "a date": "zero_optimization: 2001-01-01",
    "a date that is none": "zero_optimization: 2001-99-99",
    "bytes": "zero_optimization: !!binary '***'",
    "a set": "zero_optimization: !!set {a, b}",
    "a null": "zero_optimization: ~\nbf16: ~\noptimizer: ~",
    "lists for tables": '{"zero_optimization": [], "bf16": [], "optimizer": [], "scheduler": []}',
    "a hostfile of 1e9 slots": "worker-1 slots=999999999999999999999999999",
    "a hostfile of many lines": "\n".join(f"w{n} slots=8" for n in range(15_000)),
    "a hostfile with odd digits": "worker slots=\u0664",
    "an Accelerate file of lists": "distributed_type: []\ndeepspeed_config: []\nmixed_precision: {}",
    "an Accelerate file that names a device": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: /dev/zero",
    "an Accelerate file that names itself": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: case.yaml",
    "a Trainer file that names a pipe": '{"output_dir": "x", "deepspeed": "/dev/stdin"}',
    "a Trainer file that names a long path": '{"output_dir": "x", "deepspeed": "' + "x" * 300 + '"}',
    "a null byte": '{"a": "\\u0000"}\0',
    "a byte order mark": "\ufeff{}",
    "one letter": "x",
    "too long": '{"a": "' + "x" * 300_000 + '"}',
}


def _long_line(path: pathlib.Path) -> None:
    path.write_bytes(b'{"text": "' + b"x" * 100_000_000 + b'"}\n')


def parquet(**columns: Any) -> Callable[[pathlib.Path], None]:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path)


def cut(maker: Callable[[pathlib.Path], None], share: float) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        maker(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return make


def _repeated(path: pathlib.Path) -> None:
    """2e5 times one text of 100 kB: a few kB of file, 20 GB of text."""
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(200_000, np.int32)), pyarrow.array(["x" * 100_000])
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": column}), path, use_dictionary=True, compression="zstd", store_schema=False
    )


def _nested_columns(depth: int) -> Callable[[pathlib.Path], None]:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return parquet(a=[value])


RECORDS: dict[str, Makers] = {
    ".jsonl": {
        "a line of 100 MB": _long_line,
        "a line of 1 GB without content": sparse(1 << 30),
        "a nested line": text("[" * NESTED + "]" * NESTED),
        "a line of brackets": _flat,
        "3,000,000 short lines": text("{}\n", 3_000_000),
        "a number of 5,000 digits": text('{"text": ' + "9" * 5000 + "}"),
        "NaN": text('{"text": NaN}'),
        "a list": text("[1]\n"),
        "a half of a surrogate": text('{"text": "\\ud800"}\n'),
        "carriage returns": text('{"text": "a"}\r{"text": "b"}\r'),
        "null bytes": text(b'{"text": "a"}\n\0\0\0\n'),
        "only blanks": text(" \n\t\n"),
        "parquet": parquet(a=[1]),
        "gzip": text(gzip.compress(b'{"text": "a"}\n')),
    },
    ".json": {
        "many lists": _flat,
        "many tables": lambda path: path.write_text("[" + "{}," * 8_000_000 + "{}]"),  # type: ignore[dict-item]
        "a nested list": text("[" * NESTED + "]" * NESTED),
        "a list of lists": text("[[1], [2]]"),
        "an empty list": text("[]"),
        "a number": text("[1e999, 3]"),
        "cut off": text('[{"text": "a"}, {"te'),
        "a byte order mark": text('\ufeff[{"text": "a"}]'),
        "a table": text('{"data": [1]}'),
        "two lists": text('[{"a": 1}][{"b": 2}]'),
        "a comma at the end": text('[{"a": 1},]'),
        "no comma": text('[{"a": 1} {"a": 2}]'),
    },
    ".csv": {
        "a field of 10 MB": text("a,b\n1," + "x" * 1_000_000),
        "a quote without end": text('a,b\n1,"' + "x" * 1_000_000),
        "100,000 columns": text(",".join(f"c{n}" for n in range(100_000)) + "\n" + "," * 99_999),
        "2,000,000 rows": text("a\n1\n2\n3\n4\n5\n6\n7\n8\n9\n", 200_000),
        "a name twice": text("a,a\n1,2"),
        "no name": text(",\n1,2"),
        "rows of other lengths": text("a,b\n1\n1,2,3"),
        "null bytes": text("a,b\n\0,\0"),
        "only a header": text("a,b\n"),
        "only newlines": text("\n" * 100_000),
        "no UTF-8": text(b"a,b\n\xff,\xfe"),
        "carriage returns": text("a,b\r1,2\r"),
    },
    ".tsv": {"commas": text("a,b\n1\t2"), "a quote": text('a\tb\n"x\ty')},
    ".parquet": {
        "one text 200,000 times": _repeated,
        "30,000,000 nulls": lambda path: parquet(a=pyarrow.nulls(30_000_000))(path),
        "nested columns": _nested_columns(60),
        "2,000 columns": parquet(**{f"c{n}": [1] for n in range(2000)}),
        "no rows": parquet(a=pyarrow.array([], pyarrow.string())),
        "no columns": lambda path: pyarrow.parquet.write_table(pyarrow.table({}), path),
        "a name twice": lambda path: pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"]), path
        ),
        "a date beyond": parquet(a=pyarrow.array([2**62], pyarrow.timestamp("us"))),
        "a duration": parquet(a=pyarrow.array([2**62], pyarrow.duration("ns"))),
        "a decimal": parquet(a=pyarrow.array([1], pyarrow.decimal128(38, 0))),
        "no UTF-8": parquet(
            a=pyarrow.Array.from_buffers(
                pyarrow.string(), 1, [None, pyarrow.py_buffer(struct.pack("<ii", 0, 2)), pyarrow.py_buffer(b"\xff\xfe")]
            )
        ),
        "a half": cut(parquet(a=list(range(10_000))), 0.5),
        "the first quarter": cut(parquet(a=list(range(10_000))), 0.25),
        "only the mark": text(b"PAR1PAR1"),
        "a footer of 2 GiB": text(b"PAR1" + bytes(100) + struct.pack("<I", 2**31 - 1) + b"PAR1"),
        "a footer of zeros": text(b"PAR1" + bytes(100) + struct.pack("<I", 50) + b"PAR1"),
        "JSON": text('{"a": 1}'),
    },
}


def talks(*messages: Any, **fields: Any) -> Callable[[pathlib.Path], None]:
    return text(json.dumps({"messages": list(messages), **fields}) + "\n")


ASKED = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CONVERSATIONS: Makers = {
    "a sound one": talks(ASKED, ANSWER),
    "ShareGPT's names": talks({"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}),
    "a text": text('{"messages": "Hi"}'),
    "columns": text('{"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}}'),
    "columns of two lengths": text('{"messages": {"role": ["user"], "content": ["Hi", "Hello"]}}'),
    "one message": text('{"messages": {"role": "assistant", "content": "Hello"}}'),
    "nothing": text('{"messages": null}\n{"messages": []}\n{}'),
    "a role that is a list": talks({"role": ["user"], "content": "Hi"}, ANSWER),
    "an unknown role": talks({"role": "x" * 9999, "content": "Hi"}, ANSWER),
    "contents of all kinds": talks(
        ASKED, *({"role": "assistant", "content": value} for value in (3, None, {}, [], [3], ""))
    ),
    "parts": talks(
        ASKED, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": None}]}
    ),
    "an image": talks({"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER),
    "a part without a type": talks({"role": "user", "content": [{"text": "a"}]}, ANSWER),
    "weights of all kinds": talks(
        ASKED, *({**ANSWER, "weight": value} for value in (0, 1, True, 0.5, "no", [], 10**400))
    ),
    "a weight that is a list": talks(ASKED, {**ANSWER, "train": []}),
    "tool calls": talks(ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}),
    "tools": talks(ASKED, ANSWER, tools='[{"a": 1}]'),
    "tools that are no JSON": talks(ASKED, ANSWER, tools="[{"),
    "tools that are a number": talks(ASKED, ANSWER, tools=3),
    "nested tools": talks(ASKED, ANSWER, tools="[" * NESTED),
    "variables": talks(ASKED, ANSWER, chat_template_kwargs={"messages": 3}),
    "reasoning": talks(ASKED, {**ANSWER, "reasoning_content": {"a": 1}, "thinking": 3}),
    "many messages": talks(*[ASKED, ANSWER] * 300),
    "half a letter": talks(ASKED, {"role": "assistant", "content": "\ud800"}),
}
REQUESTS: Makers = {
    "a completion": text('{"model": "a", "prompt": [1, 2], "max_tokens": 3, "stop": ["a"], "logprobs": 1}'),
    "a chat": text(
        '{"model": "a", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stream": true}'
    ),
    "prompts": text('{"model": "a", "prompt": ["a", "b"], "n": 2, "seed": -1, "temperature": 0, "top_p": 1e-9}'),
    "odd prompts": text('{"model": "a", "prompt": [[1], ["a"], [], [-1, 1e9]]}'),
    "large numbers": text('{"model": "a", "prompt": "a", "seed": ' + "9" * 300 + ', "temperature": 1e300}'),
}


def _adapter(**changes: Any) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        sound = json.loads((GOLDEN / "huggingface" / "llama" / "lora" / path.name).read_text())
        path.write_text(json.dumps(sound | changes))

    return make


SLOW_REGEX = "(.*)*(.*)*x"
ADAPTERS: Makers = {
    "the plain one": _adapter(),
    "a slow regex of targets": _adapter(target_modules=SLOW_REGEX),
    "a slow regex of what is left out": _adapter(exclude_modules=SLOW_REGEX),
    "a slow regex of ranks": _adapter(rank_pattern={SLOW_REGEX: 4}),
    "a regex of many letters": _adapter(alpha_pattern={"(?i)" + "[\0-\U0010ffff]" * 900: 4}),
    "a regex of many groups": _adapter(target_modules="(" * 5000 + "a*b*"),
    "10,000 patterns": _adapter(rank_pattern={f"q{n}_proj": 4 for n in range(10_000)}),
    "texts for flags": _adapter(use_rslora="no", ensure_weight_tying="yes"),
    "a large number": _adapter(lora_alpha=10**400),
    "layers of all kinds": _adapter(layers_to_transform=[None, "a", []], layers_pattern=[3, "(.*)*"]),
}
INDICES: Makers = {
    "a sound one": text('{"step": 3, "tensors": {"a": {"step": 3, "file": "3/a", "checksum": "00"}}}'),
    "a step of 1e300": text('{"step": 1e300, "tensors": {}}'),
    "a step that is infinite": text('{"step": 1e999, "tensors": {}}'),
    "tensors that are a list": text('{"step": 3, "tensors": [1]}'),
    "a checksum": text('{"step": 3, "tensors": {}, "crc32": "x"}'),
}
ARRAYS: Makers = {
    "an array of 1e12": zipped(
        {
            "input_ids.npy": b"\x93NUMPY\x01\0v\0"
            + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117)
            + b"\n"
        }
    ),
    "a bomb": bomb("input_ids.npy", 2000, {}),
    "a bomb of an array": lambda path: _array_bomb(path),
    "objects": lambda path: np.savez(path, input_ids=np.array([{}], object)),
    "texts": lambda path: np.savez(path, input_ids=np.array(["a"])),
    "a header of code": zipped(
        {"input_ids.npy": b"\x93NUMPY\x01\0v\0" + b"__import__('os').system('x')".ljust(117) + b"\n"}
    ),
    "a nested header": zipped(
        {"input_ids.npy": b"\x93NUMPY\x02\0" + struct.pack("<I", 100_000) + b"(" * 99_999 + b"\n"}
    ),
    "an npy file": lambda path: np.save(path.with_suffix(".npy"), np.arange(3)),
    "no arrays": zipped({}),
}


def _array_bomb(path: pathlib.Path) -> None:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("input_ids.npy", "w", force_zip64=True) as file,
    ):
        file.write(
            b"\x93NUMPY\x01\0v\0"
            + f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({2000 << 17},), }}".encode().ljust(117)
            + b"\n"
        )
        for _ in range(2000):
            file.write(bytes(1 << 20))


def _beside(golden: str) -> Callable[[pathlib.Path], None]:
    """Copies a model's folder around the file of a case."""

    def make(path: pathlib.Path) -> None:
        for found in (GOLDEN / "huggingface" / golden).iterdir():
            if found.is_file() and found.name != path.name:
                shutil.copyfile(found, path.parent / found.name)

    return make


def _beside_tokenizer(path: pathlib.Path) -> None:
    model(type="BPE", vocab={"<s>": 0, "[UNK]": 1, "\u2581": 2, "a": 3, "</s>": 4, "\u2581a": 5}, merges=["\u2581 a"])(
        path.parent / token_files.TOKENIZER
    )


def _beside_template(path: pathlib.Path) -> None:
    path.parent.mkdir(exist_ok=True)
    jinja("{% for m in messages %}{{ m.content }}{% endfor %}")(path.parent.parent / templates.JINJA_FILE)


def _beside_adapter(path: pathlib.Path) -> None:
    shutil.copyfile(GOLDEN / "huggingface" / "llama" / "lora" / peft.WEIGHTS, path.parent / peft.WEIGHTS)


def altered(source: pathlib.Path, seed: int) -> Callable[[pathlib.Path], None]:
    """A copy of a file with some bytes changed, taken out, repeated or cut off."""

    def make(path: pathlib.Path) -> None:
        rng, content = random.Random(f"{source.name} {seed}"), bytearray(source.read_bytes())
        reach = min(len(content), rng.choice([64, 2000, len(content)]))
        for _ in range(rng.choice([1, 4, 30])):
            at = rng.randrange(reach) if rng.random() < 0.5 else len(content) - 1 - rng.randrange(reach)
            at = max(0, min(at, len(content) - 1))
            how = rng.randrange(5)
            if how == 0:
                content[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                content[at] = rng.choice(b"\0\xff{}[]\"'9e-,:\n")
            elif how == 2:
                del content[at : at + rng.choice([1, 8, 300])]
            elif how == 3:
                content[at:at] = content[at : at + rng.choice([1, 8, 300])]
            else:
                content[at:at] = rng.choice([b"9" * 30, b"1e999", b"null", b"[[[[", b"\xf0\x9f\x98\x80", bytes(9)])
            reach = min(reach, len(content))
        path.write_bytes(content)

    return make


# kind -> (the name of its file, its reader, its makers, what lies beside it)
KINDS: dict[str, tuple[str, Callable[[pathlib.Path], None], Makers, Callable[[pathlib.Path], None] | None]] = {
    "template": (
        "chat_template.jinja",
        read_template,
        {name: jinja(source) for name, source in TEMPLATES.items()},
        None,
    ),
    "tokenizer_config": ("tokenizer_config.json", read_template, json_makers() | NO_FILES, None),
    "templates by name": ("tokenizer_config.json", read_template, TEMPLATES_BY_NAME, None),
    "template for tools": (
        "additional_chat_templates/tool_use.jinja",
        read_named_template,
        {name: jinja(source) for name, source in list(TEMPLATES.items())[::6]} | NO_FILES,
        _beside_template,
    ),
    **{
        f"beside a tokenizer: {file}": (
            file,
            read_beside,
            BESIDE | json_makers("a long text") | NO_FILES,
            _beside_tokenizer,
        )
        for file in (
            token_files.TOKENIZER_CONFIG,
            token_files.SPECIAL_TOKENS,
            token_files.ADDED_TOKENS,
            token_files.GENERATION,
            token_files.CONFIG,
        )
    },
    "tokenizer": ("tokenizer.json", read_tokenizer, TOKENIZERS | json_makers() | NO_FILES, None),
    "safetensors": ("model.safetensors", read_tensors, SAFETENSORS | NO_FILES, None),
    "index": ("model.safetensors.index.json", read_tensors, json_makers("a long text") | NO_FILES, None),
    "model config": ("config.json", read_folder, json_makers() | NO_FILES, _beside("llama")),
    "generation config": ("generation_config.json", read_folder, json_makers(), _beside("t5")),
    "torch": ("case_model_states.pt", read_torch, TORCH | NO_FILES, None),
    "deepspeed": ("mp_rank_00_model_states.pt", read_deepspeed, dict(list(TORCH.items())[:4]), None),
    "document": (
        "case.yaml",
        read_document,
        {name: text(content) for name, content in DOCUMENTS.items()} | NO_FILES,
        None,
    ),
    **{f"records {end}": (f"case{end}", read_records, {**makers, **NO_FILES}, None) for end, makers in RECORDS.items()},
    "conversations": ("case.jsonl", read_conversations, CONVERSATIONS, None),
    "request": ("body", read_asked, REQUESTS | json_makers("a long text"), None),
    "index of weights": ("index.json", read_deltas, INDICES | json_makers("a long text"), None),
    "arrays": ("case.npz", read_arrays, ARRAYS | NO_FILES, None),
    "adapter": ("adapter_config.json", read_adapter, json_makers("a long text") | NO_FILES, None),
    "adapter of a model": ("adapter_config.json", read_adapter_of_a_model, ADAPTERS, _beside_adapter),
    "workdir": ("config.json", read_workdir, json_makers("a long text") | NO_FILES, None),
    "cluster": ("cluster.json", scale.read, json_makers() | NO_FILES, None),
    "rates": ("rates.json", functools.partial(rates.measured, target="h100"), json_makers() | NO_FILES, None),
    "hostfile": (
        "hostfile",
        read_hostfile,
        {name: text(DOCUMENTS[name]) for name in DOCUMENTS if "hostfile" in name} | NO_FILES,
        None,
    ),
    "environment": (
        "env",
        read_environment,
        {"quotes": text("A='x\nB=\"\n"), "no name": text("=3\n")} | NO_FILES,
        None,
    ),
    "record": ("bytes.json", read_record, json_makers("a long text") | NO_FILES, None),
}
ALTERED = {  # kind -> (a sound file, the number of altered copies)
    "safetensors": (GOLDEN / "huggingface" / "llama" / "model.safetensors", 12),
    "model config": (GOLDEN / "huggingface" / "llama" / "config.json", 20),
    "torch": (
        GOLDEN / "deepspeed" / "zero1-fp16-world2" / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        20,
    ),
    "deepspeed": (GOLDEN / "deepspeed" / "zero0-bf16-world2" / "global_step4" / "mp_rank_00_model_states.pt", 20),
    "tokenizer": (GOLDEN / "huggingface" / "llama" / "tokenizer.json", 20),
}


def cases() -> Iterator[tuple[str, Callable[[pathlib.Path], None]]]:
    """Yields the name of each case, and what reads it in an empty folder."""
    for kind, (file, read, makers, beside) in KINDS.items():
        found = dict(makers)
        source, count = ALTERED.get(kind, (None, 0))
        if source is not None and source.exists():
            found |= {f"altered {seed}": altered(source, seed) for seed in range(count)}
        for name, make in found.items():

            def run(folder: pathlib.Path, file=file, read=read, make=make, beside=beside) -> None:
                if beside is not None:
                    beside(folder / file)
                make(folder / file)
                _start_of_reading()
                read(folder / file)

            yield f"{kind}: {name}", run


# ---- the judge

_began: list[tuple[float, int]] = []  # seconds of computing and the most bytes, before a reading


def _start_of_reading() -> None:
    """Notes what this process has used, and limits what it may use."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # begins the record of the most memory anew
    addresses = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _began.append((used.ru_utime + used.ru_stime, _peak()))
    resource.setrlimit(resource.RLIMIT_AS, (addresses + ROOM, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WAIT)


def _peak() -> int:
    """Returns the most bytes that this process has held since the record began."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def fault(error: BaseException | None) -> str:
    """Returns what is wrong with the end of a reading, or ""."""
    if error is None:
        return ""
    if not isinstance(error, UserError):
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    line = str(error)
    return "" if line.isprintable() and 10 < len(line) <= LONGEST else f"no line: {line[:200]!r}"


def judge(run: Callable[[pathlib.Path], None], shows: bool = False) -> tuple[str, str, float, int]:
    """Runs a case in a process of its own. Returns its fault or "", its line, its seconds of computing and its growth in bytes."""
    reading, writing = os.pipe()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="odd-"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; it has not started
        child = os.fork()
    if child == 0:
        _child(run, folder, writing, shows)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status, used = os.wait4(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    if not told:
        ends = os.waitstatus_to_exitcode(status)
        why = {-signal.SIGPROF: f"computes for {SECONDS} s", -signal.SIGALRM: f"waits for {WAIT} s"}.get(
            ends, f"ends with status {ends}"
        )
        return why, "", used.ru_utime + used.ru_stime, 0
    found, line, seconds, growth = json.loads(told)
    if not found and growth > GROWTH:
        found = f"takes {growth >> 20} MiB"
    return found, line, seconds, growth


def _child(run: Callable[[pathlib.Path], None], folder: pathlib.Path, writing: int, shows: bool) -> None:
    error: BaseException | None = None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            run(folder)
    except BaseException as caught:
        error = caught
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if shows and error is not None:
        traceback.print_exception(error)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds, peak = _began[-1] if _began else (0.0, _peak())
    told = (
        fault(error),
        "" if error is None else str(error)[:LONGEST],
        used.ru_utime + used.ru_stime - seconds,
        _peak() - peak,
    )
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(json.dumps(told).encode())
    os._exit(0)


def main() -> int:
    """Runs the cases, and prints those that fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the beginning of the names of the cases")
    parser.add_argument("--share", type=int, default=1, help="runs each that many-th case")
    parser.add_argument("--quick", action="store_true", help="leaves out the cases that take seconds")
    parser.add_argument("--lines", action="store_true", help="prints how each case ends")
    given = parser.parse_args()
    chosen = [(name, run) for name, run in cases() if name.startswith(given.only)]
    if given.quick:
        chosen = [(name, run) for name, run in chosen if not re.search(SLOW, name)]
    chosen = chosen[:: given.share]
    failed, began = 0, time.time()
    for name, run in chosen:
        found, line, seconds, growth = judge(run, shows=bool(given.only) and not given.lines)
        failed += bool(found)
        if found:
            print(f"FAULT {name}: {found}", flush=True)
        elif given.lines:
            print(f"{seconds:6.2f} s {growth >> 20:5} MiB  {name}: {line[:200] or 'is read'}", flush=True)
    print(f"{len(chosen)} cases, {failed} faults, {time.time() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
