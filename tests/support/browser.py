"""Drives a browser without a window over its debugging pipe. This module finds one, opens a page, and evaluates scripts."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 120.0  # seconds
# A browser of this kind reads commands from descriptor 3, and writes answers to 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 20) for word in sys.argv[1:3]]
for end, own in zip(ends, (3, 4)):
    os.dup2(end, own)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Returns the path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page of a browser: `commands` and `answers` are the ends of its pipes."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers, self._rest = commands, answers, b""
        self._numbers, self._session = itertools.count(1), ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        """Opens an address, and waits until the page has loaded."""
        assert "errorText" not in self._ask("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def run(self, script: str) -> Any:
        """Returns the value of a script's last expression."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Returns the value of a script once it is true."""
        ends = time.monotonic() + LIMIT
        while not (found := self.run(script)):
            assert time.monotonic() < ends, self.run("document.body.innerText")
            time.sleep(0.05)
        return found

    def _ask(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._commands, json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._answers, 1 << 16)
                assert part, "the browser has ended"
                self._rest += part
            line, self._rest = self._rest.split(b"\0", 1)
            if (told := json.loads(line)).get("id") == number:
                assert "error" not in told, told
                return told["result"]


@contextlib.contextmanager
def opened(path: str, folder: pathlib.Path) -> Iterator[Page]:
    """Starts a browser with a profile in `folder`, and gives a page of it."""
    theirs, ours = os.pipe()
    answers, told = os.pipe()
    words = [path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    words = [sys.executable, "-c", START, str(theirs), str(told), *words, f"--user-data-dir={folder}"]
    process = subprocess.Popen(words, pass_fds=(theirs, told), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(theirs)
    os.close(told)
    try:
        yield Page(ours, answers)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(answers)
