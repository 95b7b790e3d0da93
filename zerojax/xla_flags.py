"""Says which of XLA's options the user has set. This module reads XLA_FLAGS, and nothing else does.

XLA_FLAGS is XLA's own command line: XLA reads it when it starts, and it holds for every program of the process, whoever wrote it. An option
that a library gives with one program wins over it, without a word. So a library that gives options has to know which the user has
set, in any program and not in those of a command line of ours alone; XLA does not say it. Nothing here sets the variable.
"""

import os
import re


def names() -> frozenset[str]:
    """Returns the names of the options in XLA_FLAGS, without their dashes."""
    return frozenset(re.findall(r"--([a-z0-9_]+)", os.environ.get("XLA_FLAGS", "")))
