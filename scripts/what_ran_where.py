"""Writes docs/what_ran_where.md from docs/benchmarks/ran.tsv. A test compares the two, and limits.md with them.

    python scripts/what_ran_where.py > docs/what_ran_where.md

A row of the table: the feature, with what it ran, on how many GPUs (or "emulated": CPU devices alone, "never", "none needed"), which, when
and of which code, the raw files or the tests that show it, and the page that has the figures.
"""

import csv
import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "benchmarks" / "ran.tsv"
RAW = "docs/benchmarks/raw/"
COLUMNS = ("feature", "with", "GPUs", "machine", "date, code", "shown by", "figures")
HEAD = """# What has run where

Features, and pairs that people combine: on how many GPUs at most each has run, and what shows it. "Emulated" means CPU devices of one
machine alone: tests compare numbers there, and nothing is known of its speed. What is refused is in [limits.md](limits.md#refused). This
page is made of [ran.tsv](benchmarks/ran.tsv) by `scripts/what_ran_where.py`: add a row there when something ran.
"""


class Row(NamedTuple):
    """A line of the table; `proof` holds paths from the top of the repository, with spaces between."""

    feature: str
    beside: str
    gpus: str
    machine: str
    date: str
    proof: str
    page: str


def rows() -> list[Row]:
    """Reads the table."""
    with TABLE.open(newline="") as file:
        _, *found = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    return [Row(*cells) for cells in found]


def text() -> str:
    """Returns the page: what ran on GPUs, the most first, then what did not."""
    found = rows()
    on_gpus = sorted((row for row in found if row.gpus.isdigit()), key=lambda row: -int(row.gpus))
    parts = {"On GPUs": on_gpus, "Not on GPUs": [row for row in found if not row.gpus.isdigit()]}
    return HEAD + "".join(f"\n## {title}\n\n{_table(part)}" for title, part in parts.items())


def _table(part: list[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(row) for row in part)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("|  |", "| |").replace("|  |", "| |")


def _cells(row: Row) -> tuple[str, ...]:
    shown = [
        f"[{pathlib.Path(path).name}]({path.removeprefix('docs/')})" if path.startswith(RAW) else f"`{path}`"
        for path in row.proof.split()
    ]
    name = row.page.partition("#")[0]
    folder = "" if (ROOT / "docs" / name).exists() else "benchmarks/"
    page = f"[{name}]({folder}{row.page})" if name else ""
    by = ", ".join(shown) or ("no raw file" if row.gpus.isdigit() else "")
    return row.feature, row.beside, row.gpus, row.machine, row.date, by, page


if __name__ == "__main__":
    print(text(), end="")
