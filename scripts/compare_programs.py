"""Compares the programs that two runs lowered. This module shows whether a change of the code changed a program.

    JAX_DUMP_IR_TO=/tmp/before python -m pytest -n 0 tests/whole_steps        # in the tree before
    JAX_DUMP_IR_TO=/tmp/after python -m pytest -n 0 tests/whole_steps         # in the tree after
    python scripts/compare_programs.py /tmp/before /tmp/after

JAX writes each program that it compiles. They are compared as texts without lines of code, whatever their order. Programs with kernels of
Triton hold such lines in their kernels' text, and differ where a file was moved. The exit status is 1 if any differs.
"""

import argparse
import collections
import pathlib
import re

_LINES_OF_CODE = re.compile(r"^#loc.*\n|loc\([^\n]*", re.M)
_NUMBER = re.compile(r"^jax_ir\d+_")


def programs(folder: pathlib.Path) -> dict[tuple[str, str], list[str]]:
    """Returns the files of each program, by its name and its text."""
    found = collections.defaultdict(list)
    for path in sorted(folder.glob("*.mlir")):
        found[_NUMBER.sub("", path.name), _LINES_OF_CODE.sub("", path.read_text())].append(path.name)
    return found


def compared(before: pathlib.Path, after: pathlib.Path) -> list[str]:
    """Returns a line for each file whose program only one folder has, or has more often."""
    both = programs(before), programs(after)
    if not all(both):
        raise SystemExit(
            "compare_programs: a folder has no programs (*.mlir); set JAX_DUMP_IR_TO, and compile without a cache"
        )
    sides = ((before, both[0], both[1]), (after, both[1], both[0]))
    return [
        f"only in {folder}: {name}"
        for folder, own, other in sides
        for key in own
        for name in own[key][len(other.get(key, [])) :]
    ]


def main(arguments: list[str] | None = None) -> None:
    """Prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2, type=pathlib.Path, metavar="FOLDER")
    before, after = parser.parse_args(arguments).folders
    lines = compared(before, after)
    print("\n".join(lines) or "equal")
    print(f"{len(lines)} differ of {len([*before.glob('*.mlir')])} and {len([*after.glob('*.mlir')])}")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
