"""Checks the checkpoints of a run without restoring them. This module is the command line `zerojax verify-checkpoint`.

zerojax verify-checkpoint runs/mine             all steps
zerojax verify-checkpoint runs/mine --step 100  one step
"""

import argparse
import pathlib

from zerojax import display, files
from zerojax.checkpoint import checksums
from zerojax.checkpoint import files as step_files
from zerojax.commands import arguments
from zerojax.errors import UserError


@arguments.command
def main() -> int:
    """Prints a line for each step. Status 2: one is damaged. A wrong input ends with one line and status 2."""
    given = _parse()
    directory = _directory(given.workdir)
    steps = step_files.steps(directory) if given.step is None else [given.step]
    if not steps:
        raise UserError(f"{directory}: holds no checkpoint; give the --workdir of a run")
    is_intact = [_verify(directory, step) for step in steps]
    return 0 if all(is_intact) else 2


def _parse() -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax verify-checkpoint", doc=__doc__)
    parser.add_argument("workdir", metavar="WORKDIR", type=pathlib.Path, help="the folder of a run, or of checkpoints")
    parser.add_argument("--step", type=int, metavar="N", help="check this step alone")
    return parser.parse_args()


def _directory(folder: pathlib.Path) -> pathlib.Path:
    """Returns the directory of checkpoints: the folder, or the one that a run keeps in it."""
    with files.reading(folder, "give the --workdir of a run"):
        below = folder / "checkpoints"
        directory = below if below.is_dir() else folder
        next(iter(directory.iterdir()), None)
    return directory.absolute()


def _verify(directory: pathlib.Path, step: int) -> bool:
    """Prints a step's state, and returns whether it is intact."""
    path = step_files.find(directory, step)
    flaw = step_files.find_flaw(path)
    if flaw is not None:
        print(f"step {step}: damaged ({flaw})", flush=True)
        return False
    record = checksums.read(path / step_files.SIZES)
    size = display.human(sum(file.size for file in record.files.values()))
    how = "intact" if record.has_checksums else "has the sizes as saved; it was saved without checksums"
    print(f"step {step}: {how}, {len(record.files)} files, {size}", flush=True)
    return True


if __name__ == "__main__":
    main()
