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
    "reduce_dtype": "config.reduce_dtype",
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
        argument = re.match(r"\w+(?=[: ])", str(error))
        if argument is None or argument[0] not in KEYS:
            raise
        raise UserError(KEYS[argument[0]] + str(error)[argument.end() :]) from error
