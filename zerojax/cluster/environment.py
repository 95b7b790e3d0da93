"""Reads the variables that a user keeps for all hosts. This module knows the file .deepspeed_env.

The launcher sends its own environment to every host. The file holds what belongs to a project or a cluster, as in NCCL_IB_HCA=mlx5.
"""

import pathlib
import re
import sys
from collections.abc import Mapping

from zerojax import bounded, errors
from zerojax.errors import UserError

FILE, FILE_VARIABLE = ".deepspeed_env", "DS_ENV_FILE"  # DeepSpeed's names
# What the launcher sets for each process (`attempt`).
OWN = re.compile(
    r"ZEROJAX_.*|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|PYTHONUNBUFFERED|CUDA_VISIBLE_DEVICES"
)


def read(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of .deepspeed_env in the home folder and in this one, which comes first, and says so in lines.

    A line is KEY=VALUE; "export " before it, and quotes around the value, are left out. DS_ENV_FILE gives the file another name or path.

    Raises:
      UserError: a file cannot be read, or a line has another form.
    """
    name = environ.get(FILE_VARIABLE) or FILE
    found: dict[str, str] = {}
    paths = dict.fromkeys(pathlib.Path(folder, name).absolute() for folder in (environ.get("HOME", ""), ""))
    if environ.get(FILE_VARIABLE) and not any(map(_exists, paths)):
        raise UserError(
            f"{FILE_VARIABLE}: there is no file {name!r} here or in the home folder; unset it, or correct the name"
        )
    for path in filter(_exists, paths):
        variables = _of_file(path)
        listed = f": {', '.join(variables)}" if variables else ""
        print(f"zerojax launch: {len(variables)} variables of {path}{listed}", file=sys.stderr, flush=True)
        found |= variables
    if own := [variable for variable in found if OWN.fullmatch(variable)]:
        line = f"{', '.join(own)} of {name} without effect: the launcher sets them for each process"
        print(f"zerojax launch: {line}", file=sys.stderr, flush=True)
    return found


def _exists(path: pathlib.Path) -> bool:
    """Returns whether something has that name. A folder does too, and is then refused as what cannot be read."""
    try:
        return path.exists()
    except OSError:  # another user's folder
        return False


def _of_file(path: pathlib.Path) -> dict[str, str]:
    try:
        lines = bounded.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({errors.first_line(error)}); correct or remove it") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)", text)
        if match is None or "\0" in text:
            raise UserError(f"{path}:{number}: must be KEY=VALUE, as in NCCL_DEBUG=INFO, and is {errors.shown(text)}")
        value = match[2]
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        found[match[1]] = value[1:-1] if is_quoted else value
    return found
