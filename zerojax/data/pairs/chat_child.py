"""Renders a chat template in a process of its own. This module is its program, and imports neither zerojax nor JAX.

A template is a program that came with a tokenizer. Jinja's sandbox keeps it from files and other objects, but not from a loop without an
end or from a text of 1e11 letters. The kernel does: it ends this process after SECONDS of computing, and gives it no more than MEMORY.

Reads JSON lines: first [the template, the variables of every call], then [messages, whether the header of an answer follows] again and
again. Writes a JSON line for each: {"text": ...}, {"refused": what the template says}, or {"error": why it cannot be rendered}.
"""

import functools
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 5.0  # of computing for one text; known templates take less than a thousandth
MEMORY = 2**30  # bytes of addresses
LONGEST = 2**24  # characters of a text


class _Refused(Exception):
    """The template refuses the conversation."""


def main() -> None:
    """Answers each line of the standard input until its end."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, variables = json.loads(sys.stdin.readline())
    made: list[Any] = []
    _answer(lambda: made.append(_template(source)) or "")  # type: ignore[func-returns-value]
    for line in sys.stdin:
        messages, is_answered = json.loads(line)
        given = {"messages": messages, "add_generation_prompt": is_answered, **variables}
        _answer(functools.partial(made[0].render, **given))


def _answer(render: Callable[[], str]) -> None:
    """Writes the line for a text."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        text = render()
        found = {"text": text}
        if len(text) > LONGEST:
            found = {"error": f"it renders {len(text)} characters, and at most {LONGEST} are read"}
    except _Refused as error:
        found = {"refused": str(error)}
    except MemoryError:
        found = {"error": f"it takes more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a template may raise anything
        found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def _template(source: str) -> Any:
    """Returns a template of Jinja in the environment that transformers gives it."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Marks what a model writes. Here that is told by the messages."""

        tags = {"generation"}  # noqa: RUF012  as its base class declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: object) -> None:
        raise _Refused(str(message)[:300])

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


if __name__ == "__main__":
    main()
