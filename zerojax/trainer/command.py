"""Reads a command line that names a config file. This module turns every error in either into one line."""

import pathlib
import re
import sys
import traceback
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from zerojax import errors
from zerojax.errors import UserError

_CONFIG = config_flags.DEFINE_config_file("config", None, "A config file, such as configs/zero3.py.", lock_config=True)

CHECKOUT = pathlib.Path(__file__).parents[2]  # of this repository, whose configs/ a config anywhere may import


def parse(argv: list[str]) -> Any:
    """Reads the flags. Config files in any folder may import each other as `from configs import base`.

    Args:
      argv: the command line, with the program's name first.

    Returns:
      The result of `get_config` in the file after --config, with the overrides applied.

    Raises:
      UserError: a flag or key is unknown, or the config file is missing or fails. The line names it.
    """
    logging.set_verbosity(logging.WARNING)
    for index, word in enumerate(argv):
        name = word.partition("=")[2] if word.startswith("--config=") else ""
        if word == "--config" and index + 1 < len(argv):
            name = argv[index + 1]
        if name:
            path = pathlib.Path(name).resolve()
            if not path.is_file():
                raise UserError(f"--config {name}: there is no such file; configs/ holds some")
            sys.path += [str(path.parent.parent), str(CHECKOUT)]
    app.define_help_flags()
    try:
        rest = flags.FLAGS(argv)
    except SystemExit as end:  # absl prints the help and exits with 1
        raise SystemExit(0) from end
    except flags.Error as error:
        raise UserError(f"command line: {errors.one_line(error)}") from error
    except Exception as error:  # a config file is code and may raise anything
        raise UserError(_why_no_config(error, argv)) from error
    if _CONFIG.value is None:
        raise UserError("--config: is missing; name a config file, such as --config configs/zero3.py")
    if rest[1:]:
        raise UserError(f"command line: {rest[1]!r} is not a flag; settings are given as --config.steps=50")
    return _CONFIG.value


def _why_no_config(error: Exception, argv: list[str]) -> str:
    """Returns the error line for a config file that failed, or for an override of an unknown key."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}; fix the config file"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    inside = [frame for frame in frames if not re.search(r"/(absl|ml_collections)/|importlib", frame.filename)]
    if inside:
        place = f"{inside[-1].filename}:{inside[-1].lineno}"
        return f"{place}: {type(error).__name__}: {errors.one_line(error)}; fix the config file"
    key, near = re.search(r"\w+", errors.one_line(error)), re.search(r'mean "(\w+)"', errors.one_line(error))
    overrides = [word for word in argv if word.startswith("--config.")]
    override = next((word for word in overrides if key and key[0] in re.split("[.=]", word)), None)
    if key is None or override is None:
        return f"command line: {errors.one_line(error)}"
    hint = f"did you mean {near[1]!r}?" if near else "configs/base.py holds every key"
    return f"{override}: unknown config key {key[0]!r}; {hint}"
