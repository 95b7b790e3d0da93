"""Measures a disk and predicts a step that offloads to it. This module is the command line `zerojax disk`.

zerojax disk /scratch                                       rates by chunk and threads
zerojax disk /scratch --config configs/llama3_8b.py --json  and the time of that config's optimizer state
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from typing import Any

from zerojax import display, errors, roles, tree
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.zero.host.disk import folder as folder_lib
from zerojax.zero.host.disk import rates, scratch

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_CHUNKS, _THREADS, _SIZE = "1M,8M,32M", "1,4,16", "2G"


@arguments.command
def main() -> None:
    """Prints the rates. A UserError prints one line and ends with status 2."""
    given = _parse(sys.argv[1:])
    warning = folder_lib.warning(given.folder)
    if warning:
        print(f"zerojax: {warning}", file=sys.stderr, flush=True)
    nbytes = given.state if given.state else _state_bytes(given.config) if given.config else 0
    measured = rates.measure(
        given.folder,
        size=given.size,
        chunks=given.chunk,
        threads=given.threads,
        say=lambda line: print(line, file=sys.stderr, flush=True) if sys.stderr.isatty() else None,
    )
    print(json.dumps(as_json(measured, nbytes), indent=2) if given.json else text(measured, nbytes))


def text(measured: rates.Measured, nbytes: int = 0) -> str:
    """Returns the table of rates and, if `nbytes` of state are given, the time that a step moves them in."""
    table = display.table(measured.where, ("chunk", "threads", "read GB/s", "write GB/s", "both GB/s"), ())
    for row in measured.rates:
        speeds = (f"{rate / 1e9:.2f}" for rate in (row.read, row.write, row.both))
        table.add_row(display.human(row.chunk), str(row.threads), *speeds)
    best = measured.best
    lines = [
        display.as_text(table),
        f"fastest for a step: chunks of {display.human(best.chunk)}, {best.threads} at a time",
    ]
    if nbytes:
        lines.append(
            f"{nbytes / 1e9:.2f} GB of optimizer state are read and written in {best.seconds(nbytes):.2f} s a step, and in no less than "
            f"{best.least_seconds(nbytes):.2f} s, the time of the slower direction alone"
        )
    return "\n".join(lines)


def as_json(measured: rates.Measured, nbytes: int = 0) -> dict[str, Any]:
    """Returns the same as JSON: bytes, bytes a second and seconds."""
    found = {**dataclasses.asdict(measured), "best": dataclasses.asdict(measured.best)}
    best = measured.best
    times = (
        {"seconds_a_step": best.seconds(nbytes), "least_seconds_a_step": best.least_seconds(nbytes)} if nbytes else {}
    )
    return found | ({"state_bytes": nbytes, **times} if nbytes else {})


def size_of(word: str) -> int:
    """Returns the bytes that a word means.

    >>> size_of("8M")
    8388608
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", word.strip(), re.IGNORECASE)
    nbytes = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if not 1 <= nbytes < 2**63:
        raise argparse.ArgumentTypeError(f"{errors.shown(word)} is no size; write 8M or 4GiB")
    return int(nbytes)


def _chunk(word: str) -> list[int]:
    chunks = [size_of(part) for part in word.split(",")]
    for chunk in chunks:
        if chunk % scratch.ALIGNMENT:
            raise argparse.ArgumentTypeError(f"{chunk} bytes is not a multiple of {scratch.ALIGNMENT}; write 1M")
    return chunks


def _threads(word: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", word):
        raise argparse.ArgumentTypeError(f"{word!r} is no list of numbers from 1 to 9999; write 1,4,16")
    return [int(part) for part in word.split(",")]


def _parse(words: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax disk", doc=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", nargs="?", default=".", type=pathlib.Path, help="default: this one")
    add("--size", type=size_of, default=_SIZE, help=f"bytes of the file ({_SIZE})")
    add("--chunk", type=_chunk, default=_CHUNKS, help=f"bytes of one call, or several ({_CHUNKS})")
    add("--threads", type=_threads, default=_THREADS, help=f"calls at once, or several ({_THREADS})")
    add("--state", type=size_of, help="bytes of optimizer state on this machine")
    add("--config", metavar="FILE", help="a config, whose optimizer state is counted")
    add("--json", action="store_true", help="print JSON")
    given = parser.parse_args(words)
    if not given.folder.is_dir():
        raise UserError(f"{given.folder}: there is no such folder; name one on the disk that shall be measured")
    if given.state and given.config:
        raise UserError("--state and --config: both say how large the optimizer state is; omit one")
    if given.size < 2 * max(given.chunk):
        raise UserError(f"--size: is {given.size} bytes, and must hold two chunks of {max(given.chunk)}")
    return given


def _state_bytes(config: str) -> int:
    """Returns the bytes of the optimizer state of a config, of all devices together."""
    import jax

    from zerojax.trainer import command, program
    from zerojax.trainer import config as config_lib
    from zerojax.trainer import settings as settings_lib

    jax.config.update("jax_platforms", "cpu")
    settings = config_lib.from_dict(command.parse(["zerojax", f"--config={config}"]))
    settings = settings_lib.changed(settings, {"grpo.rollout_devices": 0})
    settings = dataclasses.replace(settings, mesh=settings_lib.MeshSettings(replica=1, data=1, model=1))
    partition = program.build(settings, devices=jax.devices()[:1]).partition
    leaves = dict(tree.flatten(partition.abstract_state))
    return sum(tree.nbytes(leaves[path]) for path, found in partition.leaves.items() if found.role == roles.OPT_STATE)


if __name__ == "__main__":
    main()
