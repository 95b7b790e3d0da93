"""Checks the process that renders chat templates. This module tests zerojax.data.pairs.chat_child."""

import json
import resource
import subprocess
import sys

import pytest

from zerojax.data.pairs import chat_child

TURNS = [{"role": "user", "content": "Hi \ud800 \u4e2d"}]


def answers(source, *questions, variables=None):
    """Returns what the process writes, and how it ends."""
    lines = [json.dumps(line) for line in ([source, variables or {}], *questions)]
    done = subprocess.run(
        [sys.executable, "-P", chat_child.__file__], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def test_each_question_is_answered_and_the_end_of_the_questions_ends_the_process():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ end }}{{ tools is none }}"
    found, status = answers(source, [TURNS, False], [[], True], variables={"end": "</s>", "tools": None})
    assert found == [{"text": ""}, {"text": TURNS[0]["content"] + "</s>True"}, {"text": "</s>True"}] and status == 0


def test_lines_that_hold_only_a_block_leave_no_text():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    assert answers(source, [TURNS, False])[0][1] == {"text": TURNS[0]["content"] + "\n"}


def test_a_refusal_and_an_error_leave_the_process_alive():
    source = "{% if add_generation_prompt %}{{ raise_exception('no') }}{% else %}{{ 1 // messages|length }}{% endif %}"
    found, status = answers(source, [[], True], [[], False], [TURNS, False])
    assert found[1:3] == [{"refused": "no"}, {"error": "ZeroDivisionError: integer division or modulo by zero"}]
    assert found[3] == {"text": "1"} and status == 0


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
        input=json.dumps([source, {}]) + "\n[[], true]\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == -27 and json.loads(done.stdout) == {"text": ""}  # SIGPROF
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < chat_child.SECONDS
