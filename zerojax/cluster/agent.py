"""Starts and ends the processes of one host. This module's source is sent to every host, by ssh or not, and runs there without zerojax.

So it imports the standard library alone. It is the parent of the host's processes:

    launcher --stdin: source, then frames--> agent --starts--> processes, each the leader of its own group
             <--stdout: frames-------------        \\-- guard: a fork that kills all groups if the agent is killed or stops

A frame is one line of JSON. To the agent: ping, start, signal, end, news, stacks. From it: hello, pong, out, beats, exit, stacks, bye.

No process outlives the launcher: the agent reads the end of stdin when the launcher dies, and misses its pings when the network is cut.
None outlives the agent either: the kernel kills each process with its parent (PR_SET_PDEATHSIG), and the guard kills what these started.
"""

import collections
import contextlib
import glob
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

# Seconds without a word from the launcher, after which the processes are killed: it may have started them elsewhere
LEASE_SECONDS = 30.0
ORPHAN_SECONDS = 120.0  # from SIGTERM to SIGKILL after the launcher died: time to save
TICK_SECONDS = 1.0
LOOK_SECONDS = 5.0  # between looks at what the kernel counts of the processes
# Less than this in a second is the noise of a process that waits: its heartbeat, JAX's connections.
IDLE_CPUS, IDLE_PAGES, IDLE_BYTES = 0.02, 16, 1 << 16  # CPUs, page faults, bytes read and written
TAIL_LINES = 20  # of a process's output that are quoted
CHATTER = "[Gloo] Rank "  # begins lines of connections, which no failure is in need of
MOST_UNSENT = 32 << 20  # bytes of output that wait for a slow connection; what follows is only in the files
BEAT_BYTES = 4096  # of a heartbeat file
STACK_SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 7  # asks a process for the stacks of its threads
BOOT = "import sys;b=sys.stdin.buffer;exec(compile(b.read(int(b.readline())),'agent','exec'),{'__name__':'agent'})"
# Replaces itself by the command, which keeps the request (PR_SET_PDEATHSIG = 1; Linux alone has it). Before, it tells the guard of its
# group, which the agent might not live to tell, and no longer ignores the signals that the launcher and Python ignore.
STARTER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.write(int(sys.argv[2]), b"+%d\\n" % os.getpid())
os.close(int(sys.argv[2]))
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    print(f"zerojax: {sys.argv[3]}: {error.strerror}; give a command after --", file=sys.stderr)
    sys.exit(127)
"""


def gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs that processes of this host may use: those that CUDA_VISIBLE_DEVICES lists, or "0", "1", ..."""
    found = [path[len("/dev/nvidia") :] for path in glob.glob("/dev/nvidia[0-9]*")]
    if not found or environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index in range(len(found))]


def free_port() -> int:
    """Returns a port that was free a moment ago, below those that Linux gives to outgoing connections."""
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            return port


class Patience:
    """Measures how long something has not changed. Time in which this process itself was stopped does not count."""

    def __init__(self) -> None:
        self.seconds, self._clock = 0.0, time.monotonic()
        self._before: Any = None

    def see(self, value: object) -> float:
        """Returns the seconds since `value` changed."""
        now = time.monotonic()
        self.seconds += min(now - self._clock, 5 * TICK_SECONDS)
        self._clock = now
        if value != self._before:
            self.seconds, self._before = 0.0, value
        return self.seconds


class Usage(NamedTuple):
    """What the kernel counts of all processes of a session since their start, and which they are."""

    cpu_seconds: float
    pages: int
    bytes: int
    pids: frozenset[int]


class Pulse:
    """Measures how long a process and its children have been idle (no CPU), and unmoved: no new page was touched, nothing read or written.

    A thread that waits for a GPU may use CPU all the time, and it moves nothing.
    """

    def __init__(self) -> None:
        self._idle, self._unmoved = Patience(), Patience()
        self._before = Usage(0.0, 0, 0, frozenset())
        self._works, self._moves = 0, 0  # looks at which the process had used CPU, had moved something

    def feel(self, now: Usage, seconds: float) -> None:
        """Compares with what was counted `seconds` ago. A child that has begun or ended is a sign of life, too."""
        before, self._before = self._before, now
        is_new = now.pids != before.pids
        cpus, pages, count = (abs(a - b) / seconds for a, b in zip(now[:3], before[:3]))
        self._works += is_new or cpus >= IDLE_CPUS
        self._moves += is_new or pages >= IDLE_PAGES or count >= IDLE_BYTES

    def wants_cpu(self) -> None:
        """Says that the process is ready to run, which is as good as running."""
        self._works += 1

    def seconds(self) -> tuple[float, float]:
        """Returns for how long the process has been idle, and unmoved."""
        return self._idle.see(self._works), self._unmoved.see(self._moves)


class Process:
    """One process of the run on this host, its output and its heartbeat."""

    def __init__(
        self,
        order: Mapping[str, Any],
        shared: Mapping[str, Any],
        folder: str,
        guard_fd: int,
        tell: Callable[[Mapping[str, Any]], None],
    ):
        self.rank: int = order["rank"]
        self.status: int | None = None
        self._tell = tell
        self.beat_path = os.path.join(folder, str(self.rank))
        self.tail = collections.deque[str](maxlen=TAIL_LINES)
        self.silence, self.stillness = Patience(), Patience()
        self.pulse = Pulse()
        self._place: Any = None  # where the process last said it was
        self._cpu_there = 0.0  # seconds that it had used when it said so
        self._log: BinaryIO | None = None
        self._dumped = 0  # bytes of stacks that were read
        if shared["log_dir"]:
            os.makedirs(shared["log_dir"], exist_ok=True)
            name = f"{shared['host']}_{self.rank}.log"
            self._log = open(os.path.join(shared["log_dir"], name), "ab")  # noqa: SIM115  open until this process ends
            if shared["attempt"]:
                self.note(f"zerojax launch: restart {shared['attempt']}")
        cwd = shared["cwd"]
        environment = {**os.environ, **order["env"], "ZEROJAX_HEARTBEAT": self.beat_path, "PWD": cwd}
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", STARTER, str(os.getpid()), str(guard_fd), *order["argv"]],
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[guard_fd],
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def note(self, line: str) -> None:
        """Writes a line of the launcher into the process's log."""
        self._write(line.encode() + b"\n")

    def send(self, number: int) -> None:
        """Sends a signal to the process."""
        with contextlib.suppress(OSError):
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Kills the process and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def beat(self) -> dict[str, Any]:
        """Returns what the process last said of itself, and for how long it has been silent and still, in seconds."""
        said = self.last_words()
        silent = self.silence.see(said.get("count"))
        place = (said.get("advances"), said.get("phase"), said.get("step"))
        still = self.stillness.see(place)
        state, cpu = _state(said.get("pid", self.popen.pid))
        if place != self._place:
            self._place, self._cpu_there = place, cpu
        if state == "R":  # on a busy machine it may get no CPU for long
            self.pulse.wants_cpu()
        idle, unmoved = self.pulse.seconds()
        seconds = {"silent": silent, "still": still, "idle": idle, "unmoved": min(still, unmoved)}
        return {**said, "rank": self.rank, "state": state, "worked": cpu - self._cpu_there, **seconds}

    def last_words(self) -> dict[str, Any]:
        """Returns what the process last said of itself, {} if nothing."""
        with contextlib.suppress(OSError, ValueError), open(self.beat_path, "rb") as file:
            return dict(json.loads(file.read(BEAT_BYTES).split(b"\n")[0]))
        return {}

    def stack(self) -> str:
        """Returns the stacks of the process's threads, "" if it does not answer; asked for by STACK_SIGNAL a moment ago."""
        with contextlib.suppress(OSError), open(self.beat_path + ".stack", "rb") as file:
            file.seek(self._dumped)
            text = file.read()
            self._dumped += len(text)
            return text.decode(errors="replace")
        return ""

    def _read(self) -> None:
        assert self.popen.stdout is not None
        while line := self.popen.stdout.readline(1 << 16):
            self._write(line)
            text = line.decode(errors="replace").rstrip("\n")
            if not text.startswith(CHATTER):
                self.tail.append(text)
            self._tell({"out": self.rank, "text": text})

    def _write(self, line: bytes) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError, ValueError):  # a full disk must not stop the run
                self._log.write(line)
                self._log.flush()

    def _wait(self) -> None:
        status = self.popen.wait()
        self.kill()  # what it started ends with it
        self._reader.join(5)
        self._tell({"exit": self.rank, "status": status, "tail": list(self.tail), "said": self.last_words()})


class Agent:
    """The processes of this host, and the connection to the launcher."""

    def __init__(self, guard_fd: int, folder: str):
        self._guard_fd, self._folder = guard_fd, folder
        self._frames: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._unsent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._unsent_bytes, self._counting = 0, threading.Lock()
        self._processes: dict[int, Process] = {}
        self._deadline: float | None = None  # of SIGKILL
        self._lease, self._looked = Patience(), 0.0
        self._heard, self._is_over = 0, False
        self._lease_seconds, self._look_seconds = LEASE_SECONDS, LOOK_SECONDS

    def run(self) -> None:
        """Follows the launcher until it ends this host or is gone."""
        threading.Thread(target=self._receive, daemon=True).start()
        transmitter = threading.Thread(target=self._transmit, daemon=True)
        transmitter.start()
        signal.signal(signal.SIGTERM, lambda *_: self._frames.put({"signal": int(signal.SIGTERM)}))
        self._send({"hello": self._describe()})
        tick = 0.0
        while not (self._is_over and not self._running()):
            with contextlib.suppress(queue.Empty):
                self._obey(self._frames.get(timeout=TICK_SECONDS / 4))
            if time.monotonic() - tick > TICK_SECONDS:
                tick = time.monotonic()
                self._tick()
        self._send({"bye": True})
        self._unsent.put(b"")
        transmitter.join(5)

    def _tell_guard(self, line: str) -> bool:
        try:
            return os.write(self._guard_fd, f"{line}\n".encode()) > 0
        except OSError:
            return False

    def _running(self) -> list[Process]:
        return [process for process in self._processes.values() if process.status is None]

    def _describe(self) -> dict[str, Any]:
        return {
            "python": sys.version.split()[0],
            "gpus": gpus(os.environ),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "port": free_port(),
            "ssh": os.environ.get("SSH_CONNECTION", "").split(),
        }

    def _tick(self) -> None:
        if not self._tell_guard("tick") and not self._is_over:
            self._send({"failed": "the guard of its processes was killed"})
            self._end(5.0, "")
        if self._lease.see(self._heard) > self._lease_seconds and not self._is_over:
            self._end(
                5.0,
                f"zerojax launch: no word from the launcher for {self._lease_seconds:.0f} s; this host ends its processes",
            )
        if self._deadline is not None and time.monotonic() > self._deadline:
            for process in self._running():
                process.kill()
        if self._processes:
            self._look()
            self._send({"beats": [process.beat() for process in self._running()]})

    def _look(self) -> None:
        """Feels the pulse of the processes, if it is time."""
        now = time.monotonic()
        if (seconds := now - self._looked) < self._look_seconds:
            return
        self._looked, running = now, self._running()
        used = usage({process.popen.pid for process in running})
        for process in running:
            process.pulse.feel(used[process.popen.pid], seconds)

    def _obey(self, frame: dict[str, Any]) -> None:
        self._heard += 1
        if "ping" in frame:
            self._send({"pong": frame["ping"], "time": time.time()})
        elif "start" in frame:
            self._start(frame["start"])
        elif "signal" in frame:
            for process in self._running():
                process.kill() if frame["signal"] == signal.SIGKILL else process.send(frame["signal"])
        elif "news" in frame:
            for process in self._processes.values():
                process.note(frame["news"])
        elif "stacks" in frame:
            self._show_stacks()
        elif "exit" in frame:
            process = self._processes[frame["exit"]]
            process.status = frame["status"]
            self._tell_guard(f"-{process.popen.pid}")
            self._send(frame)
        elif "end" in frame:
            self._end(frame["end"], frame.get("why", ""))

    def _start(self, order: Mapping[str, Any]) -> None:
        self._lease_seconds = order.get("lease", LEASE_SECONDS)
        self._look_seconds = order.get("look", LOOK_SECONDS)
        try:
            for one in order["ranks"]:
                process = Process(one, order, self._folder, self._guard_fd, self._from_process)
                self._processes[one["rank"]] = process
        except OSError as error:
            self._send({"refused": f"{error.filename or order['cwd']}: {error.strerror}"})
            self._end(0.0, "")

    def _from_process(self, frame: Mapping[str, Any]) -> None:
        if "exit" in frame:
            self._frames.put(dict(frame))
        elif self._unsent_bytes < MOST_UNSENT:
            self._send(frame)

    def _end(self, grace: float, why: str) -> None:
        """Ends all processes: SIGTERM now, SIGKILL after `grace` seconds."""
        self._is_over = True
        if why:
            for process in self._processes.values():
                process.note(why)
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + grace)
        for process in self._running():
            process.send(signal.SIGTERM)
            process.send(signal.SIGCONT)

    def _show_stacks(self) -> None:
        """Asks the processes that can for the stacks of their threads, and sends them a moment later."""

        def collect() -> None:
            time.sleep(TICK_SECONDS)
            self._send({"stacks": {process.rank: process.stack() for process in self._processes.values()}})

        for process in self._running():
            if process.beat().get("dumps"):
                process.send(STACK_SIGNAL)
        threading.Thread(target=collect, daemon=True).start()

    def _receive(self) -> None:
        for line in sys.stdin.buffer:
            with contextlib.suppress(ValueError):
                self._frames.put(json.loads(line))
        why = "zerojax launch: the launcher is gone; this host ends its processes"
        self._frames.put({"end": ORPHAN_SECONDS, "why": "" if self._is_over else why})

    def _send(self, frame: Mapping[str, Any]) -> None:
        data = json.dumps(frame).encode() + b"\n"
        with self._counting:
            self._unsent_bytes += len(data)
        self._unsent.put(data)

    def _transmit(self) -> None:
        is_lost = False
        while data := self._unsent.get():
            rest = memoryview(data)
            while rest and not is_lost:
                try:
                    rest = rest[os.write(1, rest) :]
                except OSError:
                    is_lost = True
            with self._counting:
                self._unsent_bytes -= len(data)


def _state(pid: int) -> tuple[str, float]:
    """Returns the kernel's state of a process, R, S, D, T (stopped), ..., and its CPU seconds; ("", 0.0) if they cannot be read."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return fields[0], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def usage(sessions: set[int]) -> dict[int, Usage]:
    """Returns what the processes of each session have used."""
    ticks = os.sysconf("SC_CLK_TCK")
    members: dict[int, dict[int, tuple[float, int, int]]] = {session: {} for session in sessions}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            if (session := int(fields[3])) in members:
                pages = sum(map(int, fields[7:11]))  # minor and major, of ended children too
                cpu = sum(map(int, fields[11:15])) / ticks
                members[session][int(name)] = (cpu, pages, _bytes(name))
    return {session: _sum(found) for session, found in members.items()}


def _sum(members: Mapping[int, tuple[float, int, int]]) -> Usage:
    cpu, pages, count = (sum(column) for column in zip((0, 0, 0), *members.values()))
    return Usage(cpu, int(pages), int(count), frozenset(members))


def _bytes(pid: str) -> int:
    """Returns the bytes that a process has read and written; 0 if the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io") as file:
        counts = dict(line.split(":") for line in file)
        return int(counts["rchar"]) + int(counts["wchar"])
    return 0


def guard(folder: str) -> int:
    """Forks the guard. Returns the pipe that tells it of started (+PID) and ended (-PID) processes, and that the agent lives (tick)."""
    read, write = os.pipe()
    agent = os.getpid()
    if os.fork() == 0:
        os.close(write)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        _stand_guard(read, agent, folder)
        os._exit(0)
    os.close(read)
    return write


def _stand_guard(read: int, agent: int, folder: str) -> None:
    """Kills the groups of processes when the agent ends, or is stopped for longer than its lease."""
    groups: set[int] = set()
    silence, count = Patience(), 0
    os.set_blocking(read, False)
    rest = b""
    while silence.see(count) < LEASE_SECONDS:
        try:
            data = os.read(read, 1 << 16)
        except BlockingIOError:
            time.sleep(TICK_SECONDS / 4)
            continue
        if not data:
            break
        count += 1
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line[:1] in b"+-":
                (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    else:
        with contextlib.suppress(OSError):
            os.kill(agent, signal.SIGKILL)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Runs the agent of this host."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="zerojax-")
    Agent(guard(folder), folder).run()
    os._exit(0)  # a thread still reads the input


if __name__ == "agent":
    main()
