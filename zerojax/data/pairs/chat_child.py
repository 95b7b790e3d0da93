"""Renders a chat template in a process of its own. This module is its program, and imports neither zerojax nor JAX.

A template is a program that came with a tokenizer. Jinja's sandbox keeps it from files and other objects, but not from a loop without an
end or from a text of 1e11 letters. The kernel does: it ends this process after SECONDS of computing, and gives it no more than MEMORY.
Sandboxes have had holes, so the process has none of the environment's variables but those of VARIABLES: no token, no key.

Reads JSON lines: first [the templates by name, the variables of every call, the time for strftime_now or null], then [the name of one, the
variables of this call] again and again. Writes a JSON line for each: {"text": ..., "parts": ...}, {"refused": what the template says}, or
{"error": why it cannot be rendered}. `parts` are the first characters, and those after the last, of what stands in {% generation %} blocks,
in the order of rendering.
"""

import datetime
import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 5.0  # of computing for one text; known templates take less than a thousandth
MEMORY = 2**30  # bytes of addresses
LONGEST = 2**24  # characters of a text
VARIABLES = (
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TZ",
)  # for Python's libraries, Jinja, and the time


Rendered = tuple[str, list[tuple[int, int]]]  # a text, and parts of it


class _Refused(Exception):
    """The template refuses the conversation."""


def environment() -> dict[str, str]:
    """Returns the environment of the process, in the one that starts it."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def main() -> None:
    """Answers each line of the standard input until its end."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sources, variables, now = json.loads(sys.stdin.readline())
    made: dict[str, Any] = {}

    def compiled() -> Rendered:
        made.update({name: _template(source, now) for name, source in sources.items()})
        return "", []

    _answer(compiled)
    for line in sys.stdin:
        name, given = json.loads(line)
        _answer(functools.partial(_render, made[name], {**variables, **given}))


def _render(template: Any, given: dict[str, Any]) -> Rendered:
    """Returns a text, and the places of its {% generation %} blocks, as transformers tells them."""
    pieces, length = [], 0
    marks: list[tuple[int, str]] = []
    template.environment.marks = lambda block: marks.append((length, block))
    for piece in template.generate(**given):
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST:
            break
    text = "".join(pieces)
    if any(not text.startswith(block, at) for at, block in marks):
        raise ValueError(
            "a {% generation %} block stands inside of another block, where its place in the text is unknown"
        )
    return text, [(at, at + len(block)) for at, block in marks]


def _answer(render: Callable[[], Rendered]) -> None:
    """Writes the line for a text."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    found: dict[str, Any]
    try:
        text, parts = render()
        found = {"text": text, "parts": parts}
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


def _template(source: str, now: float | None) -> Any:
    """Returns a template of Jinja in the environment that transformers gives it, at a time in seconds since 1970, or of each call."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """Marks what a model writes, in a scope of its own."""

        tags = {"generation"}  # noqa: RUF012  as its base class declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            block = caller()
            self.environment.marks(block)  # type: ignore[attr-defined]
            return block

    class Namespace(jinja2.utils.Namespace):
        """Refuses names with an underscore in front, by which a template could reach Python itself."""

        def __init__(*values: Any, **named: Any):
            own, rest = values[0], values[1:]
            for name in dict(*rest, **named):
                Namespace.check(name)
            jinja2.utils.Namespace.__init__(own, *rest, **named)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace.check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def check(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")

    class Tables:
        """Makes tables, and is no class whose attributes a template could read."""

        def __call__(self, *values: Any, **named: Any) -> dict:
            return dict(*values, **named)

        def fromkeys(self, *values: Any) -> dict:
            return dict.fromkeys(*values)

    def refuse(message: object) -> None:
        raise _Refused(str(message)[:300])

    def written(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = written
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: (
            datetime.datetime.fromtimestamp(now) if now else datetime.datetime.now()
        ).strftime(form),
        "dict": Tables(),
        "namespace": Namespace,
    }
    return environment.from_string(source)


if __name__ == "__main__":
    main()
