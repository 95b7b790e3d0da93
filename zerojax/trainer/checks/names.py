"""Gives the library's errors the names that a command line uses. This module maps arguments to config keys and flags.

The library's errors begin with the name of an argument ("recompute: ..."), which a user of a config does not know.
"""

import contextlib
import re
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
    """Puts the config key or the flag in front of a UserError of the block that begins with the name of an argument."""
    try:
        yield
    except UserError as error:
        line = str(error)
        argument = re.match(r"\w+(?=[: ])", line)
        if argument is not None and argument[0] in KEYS:
            raise UserError(KEYS[argument[0]] + line[argument.end() :]) from error
        if line.startswith(
            ("offload.", "fp8", "lora.")
        ):  # a field of `Offload`; the argument of a train step is a regex
            raise UserError(f"config.{line}") from error
        raise
