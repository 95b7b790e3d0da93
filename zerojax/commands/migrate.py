"""Translates a config of DeepSpeed or Accelerate, a Trainer's arguments or a hostfile. This module is the command line `zerojax migrate`.

zerojax migrate ds_config.json --out configs/mine.py   writes a config, and reports what became of every key
zerojax migrate accelerate.yaml --strict               ends with status 2 if a key is not supported
zerojax migrate --keys                                 prints every known key and what becomes of it
"""

import argparse
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from zerojax import configs
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.migration import accelerate_keys, config_file, documents, draft, script_arguments, trainer_arguments
from zerojax.migration import keys as keys_lib
from zerojax.trainer import config as config_lib

_STATUS_STRICT = 2


@arguments.command
def main() -> int:
    """Prints the report, writes the config, and ends with status 2 under --strict if a key is not supported."""
    given = _parse(sys.argv[1:])
    if given.keys:
        print("\n".join(key_tables()))
        return 0
    document = documents.read(given.file)
    found = documents.translated(document, version=_version(given.deepspeed))
    _check(document, found)
    stem = re.sub(r"\W+", "_", pathlib.Path(document.name).stem).strip("_").lower()  # a name that Python can import
    path = given.out or pathlib.Path("configs") / f"{stem or 'migrated'}.py"
    config = config_file.text(found.settings, found.sources, origin=pathlib.Path(document.name).name, path=str(path))
    fails = given.strict and bool(found.unsupported)
    if document.repaired:
        print(f"zerojax: warning: {document.name}: {document.repaired}", file=sys.stderr)
    for name, near in unknown(found).items():
        hint = f"; did you mean {near}?" if near else ""
        print(f"zerojax: warning: {document.name}: {name} is not known, and was not read{hint}", file=sys.stderr)
    if given.json:
        print(json.dumps(_as_json(document, found, config), indent=2, allow_nan=False))
    else:
        print(report(document, found))
    if fails:
        count = len(found.unsupported)
        are = "1 key is" if count == 1 else f"{count} keys are"
        print(f"zerojax: {document.name}: {are} not supported (--strict); nothing was written", file=sys.stderr)
        return _STATUS_STRICT
    if given.out:
        arguments.write(given.out, config)
        if not given.json:
            print(f"\nwritten: {given.out}")
    elif not given.json:
        print(f"\n{config}", end="")
    return 0


def _check(document: documents.Document, found: draft.Translation) -> None:
    """Checks that the settings are those of a config that can run.

    Raises:
      UserError: one is out of its range. The line names it, and the keys of the file that decided it.
    """
    raw = configs.get("base")
    raw.update_from_flattened_dict(found.settings)
    try:
        config_lib.from_dict(raw)
    except UserError as error:
        place = re.match(r"config\.([\w.]+)", str(error))
        keys = ", ".join(found.sources.get(place[1], ())) if place else ""
        raise UserError(f"{document.name}: {keys or 'it'} becomes a config that cannot run: {error}") from error


def report(document: documents.Document, found: draft.Translation) -> str:
    """Returns the report as text: a line for each key, by verdict, those that need a decision last."""
    absent = sum(map(_absent_from(document), found.lines))
    there = f"{len(found.lines) - absent} keys"
    if absent:
        there += f", and {absent} absent " + ("one that matters" if absent == 1 else "ones that matter")
    lines = [f"{document.name}: {document.kind}, {there}"]
    for verdict in keys_lib.VERDICTS:
        rows = [line for line in found.lines if line.verdict == verdict]
        if rows:
            lines += ["", f"{verdict} ({len(rows)})", *map(_row, rows)]
    return "\n".join(lines)


def unknown(found: draft.Translation) -> dict[str, str]:
    """Returns {name: the nearest known name, or ""} of sections of which no key is known, and of other keys that look misspelt."""
    lost = {line.key: line.nearest for line in found.lines if line.nearest is not None}
    known = {line.key.partition(".")[0] for line in found.lines if line.key not in lost}
    names: dict[str, str] = {}
    for key, near in lost.items():
        section, is_inside, _ = key.partition(".")
        if is_inside and section not in known:
            names[f"the section {section}"] = names.get(f"the section {section}") or near.partition(".")[0]
        elif near:
            names[key] = near
    return names


def key_tables() -> list[str]:
    """Returns the tables of docs/migrate.md, line by line."""
    lines = []
    tables = {"DeepSpeed": keys_lib.KEYS, "Accelerate": accelerate_keys.KEYS}
    for name, table in tables.items():
        lines += [f"### Keys of {name}", "", "| key | verdict | here |", "|---|---|---|"]
        for key, row in table.items():
            places = ", ".join(f"`config.{place}`" for place in row.into)
            lines.append(f"| `{key}` | {row.verdict} | {'; '.join(filter(None, (places, row.why)))} |")
        lines.append("")
    lines += ["### A Trainer's arguments", "", '| argument | the "auto" that takes it | here |', "|---|---|---|"]
    for name, (keys, place) in trainer_arguments.ARGUMENTS.items():
        lines.append(f"| `{name}` | {', '.join(f'`{key}`' for key in keys)} | `config.{place}` |")
    for name, row in trainer_arguments.KEYS.items():
        if name not in trainer_arguments.ARGUMENTS:
            places = ", ".join(f"`config.{place}`" for place in row.into)
            lines.append(f"| `{name}` |  | {'; '.join(filter(None, (places, row.why)))} |")
    lines += ["", "### Other names", "", "| name | read as |", "|---|---|"]
    others = {**keys_lib.ALIASES, **script_arguments.ALIASES}
    return lines + [f"| `{old}` | `{new}` |" for old, new in others.items()]


def _row(line: draft.Line) -> str:
    value = "" if line.value is None else f" = {_short(line.value)}"
    return f"  {line.key}{value}: {line.text}"


def _short(value: object) -> str:
    text = " ".join(json.dumps(value, default=str).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_json(document: documents.Document, found: draft.Translation, config: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "file": document.name,
        "kind": document.kind,
        "devices": found.devices,
        "settings": found.settings,
        "keys": [
            {"key": line.key, "value": _finite(line.value), "verdict": line.verdict, "text": line.text}
            for line in found.lines
        ],
        "config": config,
    }


def _finite(value: object) -> object:
    """Returns a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)


def _absent_from(document: documents.Document) -> Callable[[draft.Line], bool]:
    """Returns a function that tells whether the key of a line is not in the file."""
    content = document.content
    there = {name for name, _ in draft.leaves(content)} if isinstance(content, Mapping) else set()
    return lambda line: line.value is None and line.key not in there


def _version(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise UserError(f"--deepspeed: must be a version such as 0.18.2, and is {text!r}")
    return tuple(map(int, text.split(".")))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax migrate", doc=__doc__)
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="the file; a DeepSpeed config may also be given as text or in base64")
    add("--out", type=pathlib.Path, metavar="CONFIG.py", help="write the config here; without it, it is printed")
    add("--force", action="store_true", help="replace the file of --out")
    add("--strict", action="store_true", help="write nothing and end with status 2 if a key is not supported")
    add("--json", action="store_true", help="print the report and the config as JSON")
    add("--deepspeed", default="0.19", metavar="VERSION", help="whose defaults hold for absent keys")
    add("--keys", action="store_true", help="print the tables of all known keys")
    given = parser.parse_args(argv)
    if (given.file is None) != given.keys:
        raise UserError("FILE: name one file to translate, or --keys alone; --help lists the arguments")
    if given.out is not None:
        arguments.check_new(given.out, force=given.force)
    return given


if __name__ == "__main__":
    main()
