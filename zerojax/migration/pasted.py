r"""Repairs texts copied from a web page. This module puts lost indentation back into YAML, and removes the escapes of underscores.

A page that shows Markdown without its block of code loses the blanks at the beginning of lines, and writes `zero\_stage` for `zero_stage`.
"""

import re
from collections.abc import Iterator, Sequence

from zerojax.migration import accelerate_keys
from zerojax.migration import keys as keys_lib

_ESCAPED = re.compile(r"(?<!\\)\\([_*\[\]])")
_ESCAPED_KEY = re.compile(r"\w\\_\w[^\n:]{0,80}:")  # no key holds a backslash
_KEY = re.compile(r"([A-Za-z_]\w*)\s*:(?:\s+(.*))?")
_TABLES = {
    True: (accelerate_keys.KEYS, accelerate_keys.canonical, accelerate_keys.PREFIXES),
    False: (keys_lib.KEYS, keys_lib.canonical, {}),
}


def unescaped(text: str) -> str:
    """Returns a text without Markdown's backslashes, if keys have them."""
    return _ESCAPED.sub(r"\1", text) if _ESCAPED_KEY.search(text) else text


def names(text: str) -> list[str]:
    """Returns the names of the keys in the first column of a YAML text."""
    return [match[1] for line in text.splitlines() if (match := _KEY.fullmatch(line))]


def indented(text: str, *, is_accelerate: bool) -> tuple[str, list[str]]:
    """Returns a YAML text with the keys of sections below their sections, and the sections whose keys were in the first column.

    A text with any indentation returns as it is. Where all lines begin in the first column, a key belongs to the nearest of the sections
    that are open, or to the top, by who knows it; else to the only section that knows it.

    Args:
      text: the text.
      is_accelerate: whether it is an Accelerate config; else it is one of DeepSpeed.
    """
    lines = text.splitlines()
    if text.startswith("{") or any(re.match(r"\s+[^\s#]", line) for line in lines):
        return text, []
    table, canonical, _ = _TABLES[is_accelerate]
    groups = {key[: dot.start()] for key in table for dot in re.finditer(r"\.", key)}
    chunks: list[tuple[str, list[str]]] = []  # (the path of a key or section, its lines; none for a section)
    section = ""
    for line in lines:
        match = _KEY.fullmatch(line)
        if match is None:  # an entry of a list, or a comment
            chunks.append((chunks[-1][0] if chunks and chunks[-1][1] else _below(section, ""), [line]))
            continue
        path = _place(match[1], section, is_accelerate, groups)
        is_section = canonical(path) in groups and not re.sub(r"#.*", "", match[2] or "").strip()
        section = path if is_section else path.rpartition(".")[0]
        chunks.append((path, [] if is_section else [line]))
    moved = list(dict.fromkeys(path.rpartition(".")[0] for path, own in chunks if own and "." in path))
    return ("\n".join(_emitted(chunks, "")) + "\n", moved) if moved else (text, [])


def _place(name: str, section: str, is_accelerate: bool, groups: set[str]) -> str:
    """Returns the path of a key: where a row or a section has its name, or a section takes any name; else at the top."""
    table, canonical, prefixes = _TABLES[is_accelerate]
    around = [section[: dot.start()] for dot in re.finditer(r"\.|$", section)][::-1]
    paths = [_below(one, name) for one in (*filter(None, around), "")]
    for path in paths:
        if canonical(path) in table or canonical(path) in groups:
            return path
    if section and keys_lib.find(canonical(paths[0]), table):
        return paths[0]
    within = [
        _below(group, name.removeprefix(prefixes.get(group, "")))
        for group in groups
        if name.startswith(prefixes.get(group, ""))
    ]
    known = [path for path in within if path in table]
    return known[0] if len(known) == 1 and (is_accelerate or section) else name


def _below(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _emitted(chunks: Sequence[tuple[str, list[str]]], section: str) -> Iterator[str]:
    """Yields the lines of a section, with those of the sections below it."""
    depth = section.count(".") + 1 if section else 0
    begun: set[str] = set()
    for path, lines in chunks:
        if section and not path.startswith(f"{section}."):
            continue
        rest = path[len(section) :].lstrip(".")
        child = _below(section, rest.partition(".")[0])
        if (lines and child == path) or not rest:
            yield from ("  " * depth + line for line in lines)
        elif child not in begun:
            begun.add(child)
            yield f"{'  ' * depth}{rest.partition('.')[0]}:"
            yield from _emitted(chunks, child)
