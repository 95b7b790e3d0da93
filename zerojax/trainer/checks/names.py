"""Gives the library's errors and warnings the names that a command line uses. This module maps arguments to config keys and flags.

The library's lines begin with the name of an argument ("recompute: ..."), which a user of a config does not know.
"""

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Iterator

from zerojax.errors import UserError

# the argument at the start of an error -> the key or flag that sets it
KEYS = {
    "mesh": "config.mesh",
    "stage": "config.zero.stage",
    "overrides": "config.zero.overrides",
    "indivisible": "config.zero.indivisible",
    "remat": "config.model.remat",
    "recompute": "config.model.recompute",
    "offload": "config.model.offload",
    "by_columns": "config.model.by_columns",
    "reduce_dtype": "config.reduce_dtype",
    "accum_dtype": "config.accum_dtype",
    "grad_accum": "config.grad_accum",
    "clip_norm": "config.optimizer.clip_norm",
    "target": "--target",
    "topology": "--topology",
}


@contextlib.contextmanager
def of_config() -> Iterator[None]:
    """Puts the config key or the flag in front of a UserError or a warning of the block that begins with the name of an argument.

    Such a warning is printed as one line on stderr, once.
    """
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        except UserError as error:
            line = _of_config(str(error))
            if line is None:
                raise
            raise UserError(line) from error
        finally:
            warned = list(caught)
    for one in warned:
        line = _of_config(str(one.message))
        if line is None:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        else:
            _tell(line)


def _of_config(line: str) -> str | None:
    """Returns a line of the library with the name of its config key or flag; None if it begins with no argument."""
    argument = re.match(r"\w+(?=[: ])", line)
    if argument is not None and argument[0] in KEYS:
        return KEYS[argument[0]] + line[argument.end() :]
    # A field of `Offload`; the argument of a train step is a regex.
    return f"config.{line}" if line.startswith(("offload.", "fp8", "lora.")) else None


@functools.cache  # a search builds many programs
def _tell(line: str) -> None:
    print(f"zerojax: {line}", file=sys.stderr, flush=True)
