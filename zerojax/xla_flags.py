"""Returns the XLA options that the user has set. This module is the only reader of XLA_FLAGS.

XLA reads XLA_FLAGS when it starts, and applies it to every program of the process. Options that a library passes with one program override
it silently. So a library that passes options must know which ones the user has set, and XLA does not report them. Nothing here sets the
variable.
"""

import os
import re


def names() -> frozenset[str]:
    """Returns the names of the options in XLA_FLAGS, without their dashes."""
    return frozenset(re.findall(r"--([a-z0-9_]+)", os.environ.get("XLA_FLAGS", "")))
