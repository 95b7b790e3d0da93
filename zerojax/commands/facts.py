"""Facts about machines, with a verdict and a remedy each. This module prints those of `zerojax report` and `zerojax doctor`, and asks
packages and commands for them."""

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap

OK, NOTE, WRONG = "ok", "note", "wrong"
_MARKS = {OK: "[ok]", NOTE: "[--]", WRONG: "[!!]"}
_BEFORE_NAME = 7  # columns of a mark
_NARROWEST = 20  # column of values that is wrapped
_COLOURS = {OK: "32", NOTE: "33", WRONG: "31"}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of a report.

    Attributes:
      group, name: what it is about.
      value: what was found.
      verdict: "ok", "note" (nothing is wrong, but something could be better), or "wrong".
      remedy: what to do about it; "" if it is ok.
    """

    group: str
    name: str
    value: str
    verdict: str = OK
    remedy: str = ""

    @classmethod
    def judged(cls, group: str, name: str, value: str, is_right: bool, remedy: str, other: str = WRONG) -> "Fact":
        """Returns a line that is ok, or else has the verdict `other` and its remedy."""
        return cls(group, name, value, OK if is_right else other, "" if is_right else remedy)


def show(facts: list[Fact], *, as_json: bool) -> int:
    """Prints facts, and returns the exit status: 1 if one of them is wrong."""
    is_right = not any(fact.verdict == WRONG for fact in facts)
    if as_json:
        listed = [dataclasses.asdict(fact) for fact in facts]
        print(json.dumps({"schema": 1, "ok": is_right, "facts": listed}, indent=2))
    else:
        is_terminal = sys.stdout.isatty()
        colours = is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        print(text(facts, colours=colours, columns=shutil.get_terminal_size().columns if is_terminal else 0))
    return 0 if is_right else 1


def text(facts: list[Fact], *, colours: bool = False, columns: int = 0) -> str:
    """Returns the report as text, a remedy below each line that has one, in lines of a terminal's `columns`; 0: of any length."""
    lines: list[str] = []
    width = max(len(fact.name) for fact in facts)
    for number, fact in enumerate(facts):
        if not number or facts[number - 1].group != fact.group:
            lines += ["", fact.group] if lines else [fact.group]
        mark = _MARKS[fact.verdict]
        mark = f"\033[{_COLOURS[fact.verdict]}m{mark}\033[0m" if colours else mark
        indent = width + _BEFORE_NAME + 2
        value, *more = _wrapped(fact.value, columns - indent)
        lines += [f"  {mark} {fact.name:<{width}}  {value}", *(" " * indent + line for line in more)]
        remedy = _wrapped(f"-> {fact.remedy}", columns - indent) if fact.remedy else []
        lines += [" " * indent + line for line in remedy]
    wrong = sum(fact.verdict == WRONG for fact in facts)
    return "\n".join([*lines, "", f"{wrong} wrong" if wrong else "nothing is wrong"])


def _wrapped(words: str, width: int) -> list[str]:
    """Returns a text in lines of at most `width`, unless that is too narrow for a column of its own."""
    return textwrap.wrap(words, width, break_on_hyphens=False) or [""] if width >= _NARROWEST else [words]


def version(name: str) -> str | None:
    """Returns a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lines(command: list[str]) -> list[str]:
    """Returns the lines that a command prints, or [] if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
