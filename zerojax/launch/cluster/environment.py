"""Reads the variables that a user keeps for all hosts. This module knows the file .deepspeed_env.

The launcher sends its own environment to every host. The file holds what belongs to a project or a cluster, as in NCCL_IB_HCA=mlx5.
"""

import pathlib
import re
import sys
from collections.abc import Mapping

from zerojax import errors
from zerojax.errors import UserError

FILE, FILE_VARIABLE = ".deepspeed_env", "DS_ENV_FILE"  # DeepSpeed's names


def read(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of .deepspeed_env in the home folder and in this one, which comes first, and says so in a line.

    A line is KEY=VALUE; "export " before it, and quotes around the value, are left out. DS_ENV_FILE gives the file another name or path.

    Raises:
      UserError: a file cannot be read, or a line has another form.
    """
    name = environ.get(FILE_VARIABLE) or FILE
    found: dict[str, str] = {}
    paths = dict.fromkeys(pathlib.Path(folder, name).absolute() for folder in (environ.get("HOME", ""), ""))
    if environ.get(FILE_VARIABLE) and not any(path.is_file() for path in paths):
        raise UserError(
            f"{FILE_VARIABLE}: there is no file {name!r} here or in the home folder; unset it, or correct the name"
        )
    for path in filter(pathlib.Path.is_file, paths):
        variables = _of_file(path)
        print(
            f"zerojax launch: {len(variables)} variables of {path}: {', '.join(variables)}", file=sys.stderr, flush=True
        )
        found |= variables
    return found


def _of_file(path: pathlib.Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
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
