"""Runs the launcher in this process for tests. This module also makes an `ssh` that starts the command on this machine.

Its hosts are called node-a, node-b, ...; such a command has a session, a folder and an environment of its own, as behind a real sshd.
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from zerojax.cluster import attempt, hosts, supervisor, verdict
from zerojax.launch import watch

LIMIT = 60.0  # seconds
SSH = f"""#!{sys.executable}
import contextlib, os, pathlib, subprocess, sys, threading
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[2:] if words[0] == "-o" else words[1:]
host, command = words[0], words[1:]
folder = pathlib.Path(sys.argv[0]).parent
if (folder / f"{{host}}.down").exists():
    sys.exit(f"ssh: connect to host {{host}} port 22: No route to host")
(folder / f"{{host}}.pid").write_text(str(os.getpid()))
print("Welcome to", host, flush=True)
environment = {{"PATH": os.environ["PATH"], "HOME": "/", "SSH_CONNECTION": "127.0.0.1 40000 127.0.0.1 22"}}
pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
remote = subprocess.Popen(["sh", "-c", " ".join(command)], env=environment, cwd="/", start_new_session=True, **pipes)
def copy(source, target):
    with contextlib.suppress(BrokenPipeError):  # the other side has ended, as ssh would not tell either
        while data := os.read(source, 1 << 16):
            os.write(target, data)
    os.close(target)
threading.Thread(target=copy, args=(0, remote.stdin.fileno()), daemon=True).start()
copy(remote.stdout.fileno(), 1)
sys.exit(remote.wait())
"""
# Loads `watch` without JAX: a process with heartbeats that starts at once.
BEATS = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("watch", {watch.__file__!r})
watch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watch)
watch.BEAT_SECONDS = 0.05
watch.begin()
rank, attempt = int(os.environ["RANK"]), int(os.environ["ZEROJAX_ATTEMPT"])
"""


@dataclasses.dataclass
class Done:
    """A launch that ended."""

    status: int
    out: str
    err: str

    def lines(self, rank: int, host: str = "localhost") -> list[str]:
        """Returns what a process printed."""
        prefix = f"[{host}:{rank}] "
        return [line.removeprefix(prefix) for line in self.out.splitlines() if line.startswith(prefix)]


def fake_ssh(folder: pathlib.Path, monkeypatch: Any) -> pathlib.Path:
    """Puts the `ssh` of this module in front of PATH, and returns its folder. FOLDER/HOST.down makes a host unreachable."""
    folder.mkdir(exist_ok=True)
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def nodes(*names: str, slots: int = 1) -> list[hosts.Node]:
    """Returns hosts with slots "0", "1", ..."""
    return [hosts.Node(name, tuple(map(str, range(slots)))) for name in names]


def launch(capfd: Any, program: str, *words: str, processes: int = 2, limits: str = "", **changes: Any) -> Done:
    """Runs a Python program as `processes` processes of this host, or on the hosts in `changes`."""
    order = attempt.Order(
        command=[sys.executable, "-c", program, *words],
        **{
            "hosts": nodes("localhost", slots=processes),
            "limits": verdict.read_limits(limits) if limits else verdict.LIMITS,
            **changes,
        },
    )
    capfd.readouterr()
    status = supervisor.Supervisor(order).run()
    return Done(status, *capfd.readouterr())


def wait_until(is_so: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """Waits until something is true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    """Returns whether a process runs and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
