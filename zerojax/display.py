"""Text for people. This module formats byte counts and tables as plain text."""

import io
import shutil
import sys
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console, OverflowMethod
from rich.table import Column, Table

_NARROWEST, _WIDEST = 30, 100  # characters of a line
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_text(table: Table) -> str:
    """Returns a table as plain lines, as wide as the terminal but at most 100 characters, in ASCII where stdout has no others."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns - 1)) if is_terminal else _WIDEST
    if not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf"):
        table.box = box.ASCII2
    written = io.StringIO()
    Console(file=written, width=width, force_terminal=False, color_system=None).print(table)
    return written.getvalue().rstrip()


def table(
    title: str,
    columns: Sequence[str],
    words: Collection[str] | None = None,
    *,
    overflow: OverflowMethod = "ellipsis",
    caption: str | None = None,
) -> Table:
    """Returns a table without rows. Columns of numbers are flush right, and those of `words` flush left: by default the first."""
    words = columns[:1] if words is None else words
    made = (Column(name, justify="left" if name in words else "right", overflow=overflow) for name in columns)
    return Table(*made, title=title, caption=caption)


def human(count: float) -> str:
    """Returns a number of bytes in the unit that reads best."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
