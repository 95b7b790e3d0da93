"""Reads a command's arguments. This module turns every wrong argument, and every UserError of a command, into one line and status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from zerojax.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Refuses wrong arguments in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the arguments")


def run(command: Callable[[], int | None]) -> NoReturn:
    """Runs a command and ends the process with its status. A UserError prints one line and ends with status 2."""
    try:
        status = command() or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"zerojax: {error}", file=sys.stderr, flush=True)
        status = 2
    except BrokenPipeError:  # the reader of a pipe has gone
        sys.stderr.close()
        status = 0
    except KeyboardInterrupt:
        print("zerojax: interrupted", file=sys.stderr, flush=True)
        status = 130
    sys.exit(status)
