"""Reads a command's arguments. This module turns every wrong argument, and every UserError of a command, into one line and status 2."""

import argparse
import functools
import io
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from zerojax import errors, files
from zerojax.cluster import agent, attempt, environment, hosts, verdict
from zerojax.errors import UserError


def whole(word: str) -> int:
    """Returns the whole number that a word is. Raises argparse.ArgumentTypeError if it is none, or has more than 18 digits."""
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", word):
        raise argparse.ArgumentTypeError(f"invalid int value: {errors.shown(word)}")
    return int(word)


class OneLineParser(argparse.ArgumentParser):
    """Refuses wrong arguments in one line. Options of `type=int` are read by `whole`. `doc`: a module's docstring, for --help."""

    def __init__(self, *args: Any, doc: str | None = "", **settings: Any):
        if doc:
            settings |= {"description": described(doc), "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **settings)
        self.register("type", int, whole)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the arguments")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse's own says nothing of a full disk


def described(doc: str | None) -> str:
    """Returns a module's docstring for its --help, without the sentence on the module itself."""
    return re.sub(r" This module [^\n]*", "", doc or "", count=1)


def check_new(path: pathlib.Path, *, force: bool) -> None:
    """Checks that the file that a command is to write is new, or may be replaced.

    Raises:
      UserError: it exists, or cannot be written.
    """
    if os.path.isdir(path):
        raise UserError(f"--out {path}: is a folder; name a file in it, such as {path / 'mine.py'}")
    files.check_file(path, "--out")
    if os.path.lexists(path) and not force:
        raise UserError(f"--out {path}: exists; choose another file, or add --force to replace it")


def write(path: pathlib.Path, text: str) -> None:
    """Writes the file of --out, and its folders."""
    with files.writing(path, "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text)


def run(command: Callable[[], int | None]) -> NoReturn:
    """Runs a command and ends the process with its status. A UserError prints one line and ends with status 2."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  open until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # one that is not UTF-8 cannot show every character
            stream.reconfigure(errors="backslashreplace")
    errors.warn_in_one_line()
    status = 0
    try:
        status = command() or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"zerojax: {error}", file=sys.stderr, flush=True)
        status = 2
    except BrokenPipeError:  # the reader of a pipe has gone; a command that found out by itself has said so
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at its end
    except KeyboardInterrupt:
        print("zerojax: interrupted", file=sys.stderr, flush=True)
        status = 130
    except OSError as error:
        line = errors.lost_file(error) or errors.denied(error)
        if errors.is_disk_full(error):
            line = f"{error.filename or 'a file'}: no space left on the device; make room"
        if not line:
            raise
        print(f"zerojax: {line}; run again", file=sys.stderr, flush=True)
        status = 2
    sys.exit(status)


def command(main: Callable[[], int | None]) -> Callable[[], NoReturn]:
    """Returns a command's `main`, which `run` runs."""
    return functools.wraps(main)(lambda: run(main))


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose hosts and GPUs, with DeepSpeed's names and meanings."""
    add = parser.add_argument
    add("--hostfile", help=f'lines "worker-1 slots=8" ({hosts.HOSTFILE}, if it exists)')
    add("--include", default="", help="hosts and slots to use, as in worker-0@worker-1:0,2")
    add("--exclude", default="", help="hosts and slots not to use")
    add("--num_nodes", type=int, help="hosts to use, the first ones (all)")
    add("--num_gpus", type=int, help="GPUs of each host, the first ones (all); without GPUs: processes")
    add("--gpus_per_process", type=int, default=1, help="GPUs of a process (1); 0: one process a host")
    add("--coordinator", default="", help="HOST[:PORT] of process 0, if it is not found")
    add("--python", default=sys.executable, help="the interpreter on other hosts (the same path as here)")
    add("--ssh_options", default="", help='arguments of ssh, as in "-p 2222 -i ~/.ssh/cluster"')


def order(given: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> attempt.Order:
    """Returns what is to run where, by the options of `add_hosts` and, where the parser has them, of `zerojax launch`.

    Raises:
      UserError: an option is wrong.
    """
    gpus = agent.gpus(environ)
    pool = hosts.read(given.hostfile, gpus or [str(index) for index in range(max(1, given.num_gpus or 1))])
    options = {name: getattr(given, name) for name in ("include", "exclude", "num_nodes", "num_gpus")}
    try:
        chosen = hosts.choose(pool, **options)
    except UserError as error:
        if gpus or given.hostfile or list(pool) != [hosts.THIS] or not (given.include or given.exclude):
            raise
        raise UserError(f"{error}; this host has no GPUs: --num_gpus 2 in its place starts 2 processes") from error
    if given.gpus_per_process < 0:
        raise UserError(f"--gpus_per_process: must be 0 or more, and is {given.gpus_per_process}")
    hosts.ranks(chosen, given.gpus_per_process)
    try:
        ssh_options = shlex.split(given.ssh_options)
    except ValueError as error:
        raise UserError(f"--ssh_options: {error}; quote it as a shell would") from error
    limits = getattr(given, "limits", None)
    names = ("log_dir", "max_restarts", "min_nodes", "rejoin_seconds", "grace_seconds")
    more = {name: getattr(given, name) for name in names if hasattr(given, name)}
    for name, value in more.items():
        if name != "log_dir" and not 0 <= value < float("inf"):
            raise UserError(f"--{name}: must be 0 or more, and is {value}")
    if more.get("min_nodes", 0) > len(chosen):
        raise UserError(f"--min_nodes: is {more['min_nodes']}, and the run has {len(chosen)} hosts; lower it")
    return attempt.Order(
        command=command,
        hosts=chosen,
        per_process=given.gpus_per_process,
        coordinator=given.coordinator,
        python=given.python,
        ssh_options=ssh_options,
        limits=verdict.LIMITS if limits is None else verdict.read_limits(limits),
        variables=environment.read(environ),
        **more,
    )
