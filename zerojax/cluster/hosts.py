"""Chooses the hosts and GPUs of a run. This module reads a hostfile, --include and --exclude as DeepSpeed does.

A slot is one GPU, by the name that CUDA_VISIBLE_DEVICES uses; on a host without GPUs it is one process that emulates devices.
"""

import functools
import pathlib
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerojax import bounded, errors
from zerojax.errors import UserError

HOSTFILE = "/job/hostfile"  # DeepSpeed's default, read if it exists
THIS = "localhost"

Pool = Mapping[str, Sequence[str]]  # host -> its slots


class Node(NamedTuple):
    """A host of the run, and the slots that the run uses."""

    name: str
    slots: tuple[str, ...]


class Rank(NamedTuple):
    """One process of the run: its number, that among the processes of its host, and the slots it sees."""

    host: str
    rank: int
    local_rank: int
    slots: tuple[str, ...]


def read(path: str | None, local: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the slots of each host in a hostfile, or those of this host (`local`) if there is no hostfile.

    A line is "worker-1 slots=8"; # begins a comment.

    Raises:
      UserError: the file cannot be read, a line has another form, or a host occurs twice.
    """
    if path is None and not pathlib.Path(HOSTFILE).is_file():
        return {THIS: tuple(local)}
    path = path or HOSTFILE
    try:
        lines = bounded.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {path}: cannot be read ({errors.first_line(error)}); name a text file") from error
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([^\s:@,=-][^\s:,=]*)\s+slots\s*=\s*([0-9]{1,5})", text)
        if match is None or not int(match[2]):
            raise UserError(f'{path}:{number}: must be HOST slots=NUMBER, as in "worker-1 slots=8", and is {text!r}')
        if match[1] in found:
            raise UserError(f"{path}:{number}: {match[1]} is listed twice; give it one line with all its slots")
        found[match[1]] = tuple(map(str, range(int(match[2]))))
    if not found:
        raise UserError(f"--hostfile {path}: lists no host; add lines such as: worker-1 slots=8")
    return found


def choose(
    pool: Pool, *, include: str = "", exclude: str = "", num_nodes: int | None = None, num_gpus: int | None = None
) -> list[Node]:
    """Returns the hosts of a run with the slots that it uses, in the order of `pool`.

    Args:
      pool: all slots of each host.
      include, exclude: "worker-0@worker-1:0,2": hosts, or some of their slots; not both.
      num_nodes: the number of hosts, the first ones; None for all.
      num_gpus: the number of slots on each host, the first ones; None for all.

    Raises:
      UserError: a host or slot is not in the pool, options exclude each other, or nothing is left.
    """
    if include and exclude:
        raise UserError("--include and --exclude: exclude each other; give one of them")
    if (include or exclude) and (num_nodes is not None or num_gpus is not None):
        raise UserError(
            "--num_nodes and --num_gpus: cannot be given with --include or --exclude; these choose the slots"
        )
    chosen = {name: tuple(slots) for name, slots in pool.items()}
    if include:
        named = _named("--include", include, pool)
        chosen = {name: named[name] for name in pool if name in named}
    if exclude:
        without = _named("--exclude", exclude, pool)
        chosen = {name: tuple(s for s in slots if s not in without.get(name, ())) for name, slots in chosen.items()}
    if num_nodes is not None:
        if not 0 < num_nodes <= len(pool):
            raise UserError(f"--num_nodes: is {num_nodes}, and there are {len(pool)} hosts; list more in --hostfile")
        chosen = dict(list(chosen.items())[:num_nodes])
    if num_gpus is not None:
        for name, slots in chosen.items():
            if not 0 < num_gpus <= len(slots):
                has, room = ("1 slot", "1") if len(slots) == 1 else (f"{len(slots)} slots", f"1 to {len(slots)}")
                raise UserError(f"--num_gpus: is {num_gpus}, and {name} has {has}; ask for {room}")
        chosen = {name: slots[:num_gpus] for name, slots in chosen.items()}
    found = [Node(name, slots) for name, slots in chosen.items() if slots]
    if not found:
        raise UserError("--exclude: leaves no slot; exclude fewer")
    return found


def ranks(chosen: Sequence[Node], per_process: int) -> list[Rank]:
    """Returns the processes of a run: one for each `per_process` slots of a host, or one a host if that is 0.

    Raises:
      UserError: the slots of a host do not divide by `per_process`.
    """
    found: list[Rank] = []
    for host in chosen:
        size = per_process or len(host.slots)
        if len(host.slots) % size:
            raise UserError(
                f"--gpus_per_process: {host.name} has {len(host.slots)} slots, which do not divide by {size}; "
                "choose a divisor, or other slots with --include"
            )
        for local in range(len(host.slots) // size):
            found.append(Rank(host.name, len(found), local, host.slots[local * size : (local + 1) * size]))
    return found


@functools.cache
def is_here(name: str) -> bool:
    """Returns whether a host is this one: it then needs no ssh. Asks for its address once."""
    if name in (THIS, socket.gethostname(), "127.0.0.1", "::1"):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name.rpartition("@")[2], 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return any(owns(str(address)) for address in found)


def owns(address: str) -> bool:
    """Returns whether an address is one of this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind((address, 0))
        except OSError:
            return False
    return True


def _named(option: str, text: str, pool: Pool) -> dict[str, tuple[str, ...]]:
    """Returns the slots that "worker-0@worker-1:0,2" names."""
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split("@"):
        name, colon, listed = part.strip().partition(":")
        if name not in pool:
            raise UserError(f"{option} {text}: {name!r} is not a host of this run; {errors.choose(name, pool)}")
        slots = tuple(slot.strip() for slot in listed.split(",")) if colon else tuple(pool[name])
        for slot in slots:
            if slot not in pool[name]:
                raise UserError(f"{option} {text}: {name} has no slot {slot!r}; name some of {', '.join(pool[name])}")
        if name in found:
            raise UserError(f"{option} {text}: names {name} twice; list its slots in one place")
        found[name] = tuple(slot for slot in pool[name] if slot in slots)
    return found
