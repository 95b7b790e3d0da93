"""Describes every setting for --help. This module reads the unit and the effect of each from the comments in configs/base.py."""

import ast
import functools
import io
import re
import textwrap
import tokenize
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerojax import configs
from zerojax.trainer import config as config_lib
from zerojax.trainer.checks import ranges

_INDENT = " " * 6


class Described(NamedTuple):
    """A setting, or a group of settings.

    Attributes:
      line: its unit and effect.
      default: its value in the config `base`; None for a group.
      choices: the values that are allowed; () if there is no such table.
    """

    line: str
    default: Any
    choices: tuple


@functools.cache
def table() -> Mapping[str, Described]:
    """Returns {place: its setting} in the order of configs/base.py, groups too: {"zero": ..., "zero.stage": ...}."""
    source = configs.path("base").read_text()
    defaults = configs.get("base")
    comments = _comments(source)
    found: dict[str, Described] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not (place := ast.unparse(node.targets[0])).startswith("c."):
            continue
        first = node.lineno
        while not comments.get(first - 1, ("", True))[1]:  # lines above that hold a comment alone
            first -= 1
        texts = [comments[line][0] for line in range(first, (node.end_lineno or node.lineno) + 1) if line in comments]
        place = place.removeprefix("c.")
        value = functools.reduce(getattr, place.split("."), defaults)
        is_group = hasattr(value, "items")
        choices = ranges.CHOICES.get(place, ())
        found[place] = Described(" ".join(texts), None if is_group else value, choices)
    return found


def text(width: int) -> str:
    """Returns a list of all settings with their defaults and lines, for a terminal of `width` columns."""
    lines = ["settings (--config.KEY=VALUE), each as it is in `base`:", ""]
    for place, setting in table().items():
        about = setting.line
        if setting.default is None:
            lines += [
                "",
                *textwrap.wrap(f"{place}: {about}" if about else f"{place}:", width, subsequent_indent=_INDENT),
            ]
            continue
        if not all(re.search(rf"\b{choice}\b", f"{about} {setting.default!r}") for choice in setting.choices):
            about += f" (one of {', '.join(map(str, setting.choices))})"
        lines.append(f"  --config.{place}={_shown(setting.default)}")
        lines += textwrap.wrap(
            f"{about} [{config_lib.expected(place)}]", width, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Returns a default as one would give it on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"'{value}'" if isinstance(value, str) and re.search(r"[^\w./,:-]", value) else str(value)


def _comments(source: str) -> dict[int, tuple[str, bool]]:
    """Returns {line: (the comment there, whether code stands before it)}."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: (token.string.lstrip("# "), bool(token.line[: token.start[1]].strip()))
        for token in tokens
        if token.type == tokenize.COMMENT
    }
