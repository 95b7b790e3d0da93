"""Formats text for people. This module tests zerojax.display."""

import io

import pytest
from rich.table import Table

from zerojax import display


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * 2**30, "1.50 GiB"), (2**60, "1048576.00 TiB")],
)
def test_bytes_are_shown_in_the_unit_that_reads_best(count, text):
    assert display.human(count) == text


def test_a_table_is_plain_lines():
    table = Table("role", "bytes")
    table.add_row("params", "4")
    text = display.as_text(table)
    assert "params" in text and "\x1b" not in text and text == text.rstrip()


@pytest.mark.parametrize("words, texts", [(None, "role"), ((), ""), (("role", "why"), "role why")])
def test_columns_of_numbers_are_flush_right_and_the_first_or_those_of_words_left(words, texts):
    table = display.table("memory", ("role", "bytes", "why"), words, caption="of a device")
    assert {column.header for column in table.columns if column.justify == "left"} == {*texts.split()}
    assert (table.title, table.caption) == ("memory", "of a device")


@pytest.mark.parametrize("columns, widest", [("40", 39), ("300", 100), ("3", 30)])
def test_a_table_fits_the_terminal_and_a_pipe_has_100_characters(monkeypatch, columns, widest):
    table = Table("role", "what it is")
    table.add_row("params", "words " * 40)
    monkeypatch.setenv("COLUMNS", columns)
    assert max(map(len, display.as_text(table).splitlines())) == 100
    monkeypatch.setattr(display.sys.stdout, "isatty", lambda: True, raising=False)
    assert max(map(len, display.as_text(table).splitlines())) == widest


def test_a_table_is_ascii_where_stdout_has_no_other_characters(monkeypatch):
    table = Table("role", "bytes")
    table.add_row("params", "4")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(display.sys, "stdout", stream)
    assert display.as_text(table).isascii()


@pytest.mark.parametrize(
    "seconds, unit", [(2.0, (1.0, "s")), (0.5, (1e-3, "ms")), (5e-4, (1e-6, "µs")), (0, (1e-6, "µs"))]
)
def test_a_time_has_the_unit_of_its_magnitude(seconds, unit):
    assert display.time_unit(seconds) == unit
