"""Text for people. This module formats byte counts and tables as plain text, and chooses units."""

import io
import shutil
import sys
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console, OverflowMethod
from rich.table import Column, Table

_NARROWEST, _WIDEST = 30, 100  # characters of a line
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


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
    size, unit = byte_unit(count)
    return f"{count / size:.{0 if unit == _UNITS[0] else 2}f} {unit}"


def byte_unit(count: float) -> tuple[float, str]:
    """Returns the unit in which a number of bytes reads best: its bytes and its name."""
    power = next((power for power in range(len(_UNITS)) if count < 1024.0 ** (power + 1)), len(_UNITS) - 1)
    return 1024.0**power, _UNITS[power]


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the unit in which a time reads best: its seconds and its name."""
    return next((unit for unit in _TIME_UNITS if seconds >= unit[0]), _TIME_UNITS[-1])
