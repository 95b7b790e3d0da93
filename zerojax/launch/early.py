"""Ends a command in one line if it is stopped while it starts, or if JAX refuses a variable of the environment. This module is
imported before the others, which may take seconds.

Where zerojax is imported as a library it only starts the heartbeat that `zerojax launch` asks for.
"""

import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from zerojax.launch import watch

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Modules of commands that answer without JAX, in a fraction of the time that its import takes.
WITHOUT_JAX = {f"zerojax.commands.{name}" for name in ("completion", "configs", "launch", "show", "verify_checkpoint")}
INTERRUPTED = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM", signal.SIGHUP: "stopped by SIGHUP"}


def listens_for(number: int) -> bool:
    """Returns whether a command acts on the signal. One that was ignored when it started stays ignored: SIGHUP after `nohup`, SIGINT after
    `&` in a script, any after `trap ''`."""
    return signal.getsignal(number) != signal.SIG_IGN


def line(number: int) -> str:
    """Returns the line of a command that a signal stops before it has anything to save. One that is not the trainer has no checkpoints."""
    after = "; the same command resumes from the last checkpoint" if command(sys.orig_argv) in ("", "train") else ""
    return f"zerojax: {INTERRUPTED[signal.Signals(number)]}{after}"


def command(words: Sequence[str]) -> str:
    """Returns the command that a command line of Python starts: "show" for `python -m zerojax show`, "" for a program of another name."""
    first, *after = _program(words)
    if first == "zerojax":
        return after[0] if after else ""
    return first.rpartition(".")[2] if first.startswith("zerojax.") else ""


def _program(words: Sequence[str]) -> list[str]:
    """Returns the module or the file's name that a command line of Python starts, and its arguments."""
    at = next((at for at, word in enumerate(words[1:], 1) if word.startswith("-m") or not word.startswith("-")), 0)
    if words[at] == "-m":
        at += 1
    first, *after = [*words[at:], ""]
    return [os.path.basename(first.removeprefix("-m")), *after]


def status(number: int) -> int:
    """Returns the exit status of a command that a signal ends, as a shell counts it."""
    return 128 + number


def _is_command() -> bool:
    """Returns whether this process is one of our command lines: python -m zerojax.train, or zerojax train."""
    first = sys.argv[0] if sys.argv else ""
    started = [word.removeprefix("-m").split(".")[0] for word in sys.orig_argv[1:]]
    return os.path.basename(first) == "zerojax" or (first == "-m" and "zerojax" in started)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{line(number)}\n".encode())
    os._exit(status(number))


def import_jax(module: str) -> None:
    """Imports JAX for a command's module, unless that needs none. A variable that JAX refuses ends the command in one line."""
    if module in WITHOUT_JAX:
        return
    try:
        importlib.import_module("jax")
    except ValueError as error:
        named = re.search("jax_[a-z0-9_]+", str(error), re.IGNORECASE)
        if named is None:
            raise
        name = named[0].upper()
        os.write(2, f"zerojax: {name}: is {os.environ.get(name)!r}, which JAX refuses; unset this variable\n".encode())
        os._exit(2)


watch.begin()
if _is_command():
    for _number in filter(listens_for, STOPS):
        signal.signal(_number, _end)
    if (_module := _program(sys.orig_argv)[0]) != "zerojax":  # whose __main__ chooses the module
        import_jax(_module)
