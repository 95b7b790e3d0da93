"""Checks the process that renders chat templates. This module tests zerojax.data.pairs.chat_child."""

import datetime
import json
import resource
import subprocess
import sys

import pytest

from zerojax.data.pairs import chat_child, templates

TURNS = [{"role": "user", "content": "Hi \ud800 \u4e2d"}]


def answers(source, *questions, variables=None, now=None):
    """Returns what the process writes, and how it ends."""
    asked = (
        ["default", {"messages": messages, "add_generation_prompt": is_answered}] for messages, is_answered in questions
    )
    lines = [json.dumps(line) for line in ([{"default": source}, variables or {}, now], *asked)]
    done = subprocess.run(
        [sys.executable, "-P", chat_child.__file__],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        env=chat_child.environment(),
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def test_each_question_is_answered_and_the_end_of_the_questions_ends_the_process():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ end }}{{ tools is none }}"
    found, status = answers(source, [TURNS, False], [[], True], variables={"end": "</s>", "tools": None})
    assert [line["text"] for line in found] == ["", TURNS[0]["content"] + "</s>True", "</s>True"] and status == 0
    assert [line["parts"] for line in found] == [[], [[0, 6]], []]


def test_a_block_of_an_answer_has_a_scope_of_its_own_and_its_place_is_known_or_refused():
    inner = "a{% generation %}{% set q = 1 %}bc{% endgeneration %}{{ q is defined }}"
    assert answers(inner, [[], False])[0][1] == {"text": "abcFalse", "parts": [[1, 3]]}
    hidden = "{% set x %}ab{% generation %}c{% endgeneration %}{% endset %}z{{ x }}"
    assert "where its place in the text is unknown" in answers(hidden, [[], False])[0][1]["error"]


def test_a_template_gets_the_functions_that_transformers_gives():
    source = "{{ dict(a=1) | tojson(true) }}{% set n = namespace(x=2) %}{{ n.x }}{{ strftime_now('%Y') | length }}"
    assert answers(source, [[], False])[0][1]["text"] == '{"a": 1}24'
    noon = datetime.datetime(2020, 2, 3, 12).timestamp()
    assert answers("{{ strftime_now('%d %b %Y') }}", [[], False], now=noon)[0][1]["text"] == "03 Feb 2020"
    for reach in ("{% set n = namespace() %}{% set n._x = 1 %}", "{{ namespace(_x=1) }}"):
        assert "has no '_x'" in answers(reach, [[], False])[0][1]["error"]


def test_lines_that_hold_only_a_block_leave_no_text():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    assert answers(source, [TURNS, False])[0][1]["text"] == TURNS[0]["content"] + "\n"


def test_a_refusal_and_an_error_leave_the_process_alive():
    source = "{% if add_generation_prompt %}{{ raise_exception('no') }}{% else %}{{ 1 // messages|length }}{% endif %}"
    found, status = answers(source, [[], True], [[], False], [TURNS, False])
    assert found[1:3] == [{"refused": "no"}, {"error": "ZeroDivisionError: integer division or modulo by zero"}]
    assert found[3]["text"] == "1" and status == 0


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 10**11 }}", "{{ '%0999999999999d' % 3 }}", "{{ range(10)|list * 10**9 }}"]
)
def test_a_template_gets_no_more_memory_than_it_may(source):
    found, status = answers(source, [[], True])
    assert found[1] == {"error": "it takes more than 1024 MiB of memory"} and status == 0


def test_a_long_text_is_refused():
    found, _ = answers("{{ 'a' * (2**24 + 1) }}", [[], True])
    assert found[1] == {"error": f"it renders {2**24 + 1} characters, and at most {2**24} are read"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10**(10**9 + messages|length) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_the_kernel_ends_a_template_that_computes_for_too_long(source):
    """The limit is that of a process whose time is nearly up: SECONDS of a test would be long."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    program = (
        "import runpy, jinja2.ext, jinja2.sandbox\n"  # whose import is no part of these 0.3 s
        f"m = runpy.run_path({chat_child.__file__!r}); m['main'].__globals__['SECONDS'] = 0.3; m['main']()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([{"default": source}, {}, None])
        + '\n["default", {"messages": [], "add_generation_prompt": true}]\n',
        capture_output=True,
        text=True,
    )
    assert done.returncode == -27 and json.loads(done.stdout)["text"] == ""  # SIGPROF
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < chat_child.SECONDS


def test_the_process_has_no_variable_but_those_that_start_python(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of the user")
    monkeypatch.setenv("TZ", "UTC")
    started = []
    monkeypatch.setattr(templates.subprocess, "Popen", lambda words, **how: started.append(how["env"]) or sys.exit(0))
    with pytest.raises(SystemExit):
        templates.JinjaChat({"default": "{{ messages }}"}, {}, "a folder")
    assert started[0]["TZ"] == "UTC" and started[0].keys() <= {*chat_child.VARIABLES}
