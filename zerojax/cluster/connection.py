"""Connects the launcher to the agent of one host, directly or by ssh. This module sends frames, and puts those that arrive in a queue."""

import contextlib
import json
import pathlib
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.cluster import agent, hosts

# A user's options come first, and ssh takes the first value of an option.
SSH_OPTIONS = (
    "BatchMode=yes",  # never asks for a password
    "ConnectTimeout=20",
    "ServerAliveInterval=5",  # a lost host counts as dead after 30 s
    "ServerAliveCountMax=6",
    "ControlMaster=no",  # the connection ends with its process
    "ControlPath=none",
)
NOISE_LINES = 5  # of what ssh or a login shell prints that are quoted


class Message(NamedTuple):
    """A frame of a host's agent; {"lost": why} if the connection has ended."""

    host: str
    frame: Mapping[str, Any]


class Connection:
    """One host's agent.

    Attributes:
      host: its name.
      heard: when its last frame came, by time.monotonic().
      is_lost: whether the connection has ended.
      clock: the host's time minus this host's in seconds, measured by the quickest ping; None before the first.
    """

    def __init__(self, host: str, inbox: "queue.SimpleQueue[Message]", *, python: str, ssh_options: Sequence[str] = ()):
        """Starts the agent. Its frames go to `inbox`.

        Args:
          host: is reached by ssh unless it is this one.
          python: the interpreter there.
          ssh_options: arguments of ssh before the host.
        """
        self.host, self.is_lost, self.heard = host, False, time.monotonic()
        self.clock: float | None = None
        self._quickest = float("inf")
        self._inbox = inbox
        self._noise: list[str] = []
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            command(host, python, ssh_options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on
        )
        source = pathlib.Path(agent.__file__).read_bytes()
        self._unsent.put(b"%d\n" % len(source) + source)
        for work in (self._read, self._read_noise, self._write):
            threading.Thread(target=work, name=f"{host}: {work.__name__}", daemon=True).start()

    def send(self, frame: Mapping[str, Any]) -> None:
        """Sends a frame, and never waits for it."""
        self._unsent.put(json.dumps(frame).encode() + b"\n")

    def ping(self) -> None:
        """Asks for a sign of life, and for the host's clock."""
        self.send({"ping": time.time()})

    def close(self) -> None:
        """Ends the input of the agent, which then ends its host's processes."""
        self._unsent.put(None)

    def wait(self, seconds: float) -> None:
        """Waits until the agent has gone, and kills the connection after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError), self._process.stdout as stream:
            for line in stream:
                try:
                    frame = json.loads(line)
                except ValueError:
                    frame = None
                if not isinstance(frame, dict):  # printed by a login shell
                    self._noise.append(line.decode(errors="replace").strip())
                    continue
                self.heard = time.monotonic()
                if "pong" in frame:
                    self._set_clock(frame["pong"], frame["time"])
                else:
                    self._inbox.put(Message(self.host, frame))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.is_lost = True
        time.sleep(0.1)  # for the last words of ssh
        words = "; ".join(line for line in self._noise[-NOISE_LINES:] if line) or "without a word"
        self._inbox.put(Message(self.host, {"lost": words}))

    def _set_clock(self, sent: float, there: float) -> None:
        now = time.time()
        if now - sent < self._quickest:
            self._quickest, self.clock = now - sent, there - (now + sent) / 2

    def _read_noise(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError), self._process.stderr as stream:
            for line in stream:
                self._noise.append(line.decode(errors="replace").strip())

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:
            while (data := self._unsent.get()) is not None:
                stream.write(data)
                stream.flush()


def command(host: str, python: str, ssh_options: Sequence[str]) -> list[str]:
    """Returns the command that starts a host's agent, which reads its source from its input."""
    agent_command = [python, "-I", "-S", "-c", agent.BOOT]
    if hosts.is_here(host):
        return [sys.executable, *agent_command[1:]]
    options = [word for option in SSH_OPTIONS for word in ("-o", option)]
    return ["ssh", "-T", *ssh_options, *options, host, shlex.join(agent_command)]
