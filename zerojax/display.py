"""Text for people. This module formats byte counts and tables as plain text."""

from rich.console import Console
from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_text(table: Table) -> str:
    """Returns a table as plain lines."""
    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()


def human(count: float) -> str:
    """Returns a number of bytes in the unit that reads best."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
