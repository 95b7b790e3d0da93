"""Regexes that others wrote. This module tries them on the names that they are for, in a process of its own with limits.

Python's engine takes a time for `(.*)*x` that doubles with each letter of a name, and nothing in its own process can end it. Engines that
take linear time read no lookahead, and adapters of PEFT have some: they would mean other modules.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerojax import errors
from zerojax.errors import UserError

SECONDS = 2.0  # of computing for all regexes of a file; known ones take thousandths
_WAIT = 120.0  # seconds, on a machine that others use too
_REPEATS = re.compile(r"[*+?{[]")  # one of these makes no regex slow
_PROGRAM = """
import contextlib, json, re, resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.signal(signal.SIGPROF, signal.SIG_DFL)
seconds, regexes, names = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_PROF, seconds)
for method, regex in regexes:
    with contextlib.suppress(re.error, OverflowError, RecursionError):
        match = getattr(re.compile(regex), method)
        for name in names:
            match(name)
    print(flush=True)
"""


class Regex(NamedTuple):
    """A regex of a file.

    Attributes:
      place: the file and the field that hold it.
      pattern: as it stands there.
      regex: as it is matched.
      method: how it is: "match" or "fullmatch".
    """

    place: str
    pattern: str
    regex: str
    method: str


def check(regexes: Sequence[Regex], names: Iterable[str]) -> None:
    """Checks that matching takes no more than SECONDS. What is no regex passes: whoever compiles it says why.

    Raises:
      UserError: one takes longer, or too much memory.
    """
    if all(len(_REPEATS.findall(one.pattern)) < 2 for one in regexes):
        return
    asked = json.dumps([SECONDS, [(one.method, one.regex) for one in regexes], list(names)])
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            done, _ = process.communicate(asked.encode(), _WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            done, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        slow = regexes[min(done.count(b"\n"), len(regexes) - 1)]
        is_slow = process.returncode in (-signal.SIGPROF, -signal.SIGKILL)
        why = f"takes more than {SECONDS:g} s to match names" if is_slow else "takes too much memory"
        raise UserError(
            f"{slow.place}: {errors.shown(slow.pattern)} {why}; write it without repetitions of repetitions, such as '(.*)*'"
        )
