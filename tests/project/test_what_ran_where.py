"""Checks docs/what_ran_where.md: that it is made of its table, which agrees with limits.md and cites what exists."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import what_ran_where

DOCS = what_ran_where.ROOT / "docs"
WORDS = {"none": "emulated", "never run": "never"}  # of limits.md


def test_the_page_is_made_of_its_table():
    assert (DOCS / "what_ran_where.md").read_text() == what_ran_where.text(), (
        "python scripts/what_ran_where.py > docs/what_ran_where.md"
    )


def test_what_limits_says_of_gpus_is_in_the_table():
    section = re.search(r"^## Measured\n(.*?)^## ", (DOCS / "limits.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    said = [line.strip("| ").split(" | ")[:2] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(said) > 15
    wanted = {(what, WORDS.get(count.strip(" |"), count.split(";")[0].strip(" |"))) for what, count in said}
    found = {(row.feature, row.gpus) for row in what_ran_where.rows()}
    assert not wanted - found


def test_rows_cite_files_that_exist_and_what_ran_on_gpus_has_a_date():
    for row in what_ran_where.rows():
        assert row.gpus.isdigit() or row.gpus in ("emulated", "never", "none needed"), row
        for path in row.proof.split():
            assert (what_ran_where.ROOT / path).exists(), path
            is_raw = path.startswith(what_ran_where.RAW)
            assert is_raw or not row.gpus.isdigit(), f"{row.feature}: a test shows no run on a GPU"
        counts = {int(n) for n in re.findall(r"_(\d+)xh[12]00", row.proof)}
        assert not counts or max(counts) == int(row.gpus), f"{row.feature}: its raw files are of {counts} GPUs"
        assert not counts or (row.machine and re.match(r"2026-\d\d-\d\d", row.date)), row
        assert row.gpus != "emulated" or row.proof, f"{row.feature}: nothing shows that it ran"
