"""One life of all processes of a run. This module starts them through the agents of their hosts, follows them, and finds the first failure.

Whoever fails first is named, not whoever is seen first: a process often ends because another did, and says so.
"""

import contextlib
import dataclasses
import os
import queue
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerojax.cluster import connection, hosts, verdict
from zerojax.launch import peers

PING_SECONDS = 5.0
LOST_SECONDS = 30.0  # without a frame of a host, after which it counts as lost; its agent then kills its processes by its own clock
LOOK_SECONDS = 5.0  # between an agent's looks at what its processes use
HELLO_SECONDS = 60.0  # for a host to answer
SETTLE_SECONDS = 2.0  # after the first failure, for a better witness of it
STACK_SECONDS = 3.0
LOST_STATUS = 1
USAGE = 2
# Statuses that another attempt would meet again, and what they mean. Shells end with the last two, and an agent with the last.
FINAL = {USAGE: "wrong input", 126: "a command that cannot be run", 127: "a command that is not there"}
LAUNCHER = "zerojax launch"
# Variables that belong to one host or one terminal.
OWN_VARIABLES = re.compile(
    r"HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|TERM.*|TTY|DISPLAY|SSH_.*|XDG_.*|DBUS_.*|TMUX.*|STY|LS_COLORS|TMPDIR|SLURM.*|OMPI_.*|PMI.*"
    "|CUDA_VISIBLE_DEVICES"
)


@dataclasses.dataclass(frozen=True)
class Order:
    """What to run, and where."""

    command: Sequence[str]  # the program and its arguments
    hosts: Sequence[hosts.Node]  # the hosts and their slots
    per_process: int = 1  # GPUs of a process; 0 for one process a host
    coordinator: str = ""  # "HOST[:PORT]" at which process 0 listens, "" to find one
    log_dir: str = ""  # folder for the output of each process, on its host; "" for none
    max_restarts: int = 0  # attempts after the first
    min_nodes: int = 0  # the fewest hosts with which to go on
    rejoin_seconds: float = 60.0  # how long a restart waits for hosts that do not answer
    grace_seconds: float = 10.0  # from SIGTERM to SIGKILL after a failure
    python: str = sys.executable  # the interpreter of the agents on other hosts
    ssh_options: Sequence[str] = ()  # arguments of ssh
    # see `verdict.LIMITS`
    limits: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(verdict.LIMITS))
    # of the environment, for the processes of all hosts
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first failure of an attempt: a process, or a host if `rank` is None.

    Attributes:
      host, rank: where.
      status: the exit status to end with.
      line: what happened, in one line.
      details: the last lines of its output, or its stack.
      is_lost: whether the host may still run its processes.
    """

    host: str
    rank: int | None
    status: int
    line: str
    details: Sequence[str] = ()
    is_lost: bool = False


@dataclasses.dataclass(frozen=True)
class Around:
    """What an attempt needs of the launcher."""

    # (host, inbox) -> the connection to its agent
    connect: Callable[[str, "queue.SimpleQueue[connection.Message]"], connection.Connection]
    show: Callable[[str, int, str], None]  # (host, rank, line) prints a line of a process
    tell: Callable[["Failure"], None]  # prints the first failure, before the others are ended
    signals: Callable[[], Iterator[int]]  # returns the signals to pass on
    run_id: str  # names the run
    secret: str  # that its processes prove to each other


class Attempt:
    """One life of all processes."""

    def __init__(self, around: Around, order: Order, chosen: Sequence[hosts.Node], number: int):
        """Attempt `number`, from 0, on the hosts `chosen`."""
        self._around, self._order, self._hosts, self._number = around, order, chosen, number
        self._inbox: queue.SimpleQueue[connection.Message] = queue.SimpleQueue()
        self._connections: dict[str, connection.Connection] = {}
        self._hello: dict[str, Mapping[str, Any]] = {}
        self._running: dict[int, str] = {}  # rank -> host
        self._beats: dict[int, verdict.Beat] = {}
        # rank -> (status, last lines), in the order of their ends
        self._ends: dict[int, tuple[int, Sequence[str]]] = {}
        self._stopped: dict[int, Mapping[str, Any]] = {}  # rank -> its last words, if a signal stopped it
        self._stacks: dict[int, str] = {}
        self._lost: dict[str, str] = {}  # host -> why
        self._refused: dict[str, str] = {}  # host -> why its processes could not be started
        self._judge = verdict.Judge(order.limits)

    @property
    def clocks(self) -> dict[str, float]:
        """Returns each host's time minus this host's, in seconds."""
        return {name: one.clock for name, one in self._connections.items() if one.clock is not None}

    def run(self) -> Failure | None:
        """Starts all processes, follows them to their ends, and ends the rest. Returns the first failure."""
        try:
            for host in self._hosts:
                self._connections[host.name] = self._around.connect(host.name, self._inbox)
            failure = self._greet() or self._start() or self._follow()
            if failure is not None:
                failure = self._best_witness(failure)
                self._around.tell(failure)
                self._broadcast({"news": f"{LAUNCHER}: {failure.line}"})
            self._broadcast({"end": self._order.grace_seconds})
            self._drain()
            return failure
        finally:
            for one in self._connections.values():
                one.close()
            for one in self._connections.values():
                one.wait(1.0)

    def _greet(self) -> Failure | None:
        """Waits for every host's agent."""
        deadline, pinged = time.monotonic() + HELLO_SECONDS, 0.0
        while len(self._hello) < len(self._hosts):
            for number in self._around.signals():
                return self._interrupted(number)
            self._take(0.2)
            silent = [host.name for host in self._hosts if host.name not in self._hello]
            for name in silent:
                if name in self._lost:
                    return self._unreachable(name, self._lost[name])
                if time.monotonic() > deadline:
                    return self._unreachable(name, f"no answer after {HELLO_SECONDS:.0f} s")
            if time.monotonic() - pinged > PING_SECONDS:
                pinged = time.monotonic()
                self._broadcast({"ping": time.time()})
        for _ in range(4):  # the quickest tells the clocks best
            for one in self._connections.values():
                one.ping()
        return None

    def _unreachable(self, name: str, why: str) -> Failure:
        how = f"ssh {name} true" if not hosts.is_here(name) else "python"
        line = f"host {name} cannot be used: {why}; `{how}` must work without a password (see --ssh_options, --python)"
        return Failure(name, None, LOST_STATUS, line, is_lost=True)

    def _start(self) -> Failure | None:
        """Gives every agent its processes."""
        without = [host.name for host in self._hosts if not self._gpus(host.name)]
        if 0 < len(without) < len(self._hosts):
            line = f"host {without[0]} has no GPU, and others have: repair its driver, or leave it out with --exclude"
            return Failure(without[0], None, USAGE, line)
        for host in self._hosts:
            found = self._gpus(host.name)
            unknown = [slot for slot in host.slots if slot not in found]
            if found and unknown:
                offers = f"it offers {', '.join(found)}; correct its slots, or CUDA_VISIBLE_DEVICES there"
                line = f"host {host.name} has no GPU {unknown[0]}: {offers}"
                return Failure(host.name, None, USAGE, line)
        ranks = hosts.ranks(self._hosts, self._order.per_process)
        full = len(hosts.ranks(self._order.hosts, self._order.per_process))
        coordinator = self._coordinator()
        for host in self._hosts:
            mine = [rank for rank in ranks if rank.host == host.name]
            common = self._environment(host.name)
            orders = [
                {
                    "rank": rank.rank,
                    "argv": list(self._order.command),
                    "env": {**common, **self._variables(rank, ranks, full, coordinator)},
                }
                for rank in mine
            ]
            start = {
                "ranks": orders,
                "cwd": os.getcwd(),
                "log_dir": os.path.abspath(self._order.log_dir) if self._order.log_dir else "",
                "host": host.name,
                "attempt": self._number,
                "lease": LOST_SECONDS,
                "look": LOOK_SECONDS,
            }
            self._connections[host.name].send({"start": start})
            self._running |= {rank.rank: host.name for rank in mine}
        return None

    def _gpus(self, name: str) -> list[str]:
        """Returns the GPUs that a host offers. JAX_PLATFORMS=cpu here counts for all hosts."""
        return [] if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu" else self._hello[name]["gpus"]

    def _environment(self, name: str) -> dict[str, str]:
        """Returns the variables that a host gets from this one."""
        kept = {} if hosts.is_here(name) else {k: v for k, v in os.environ.items() if not OWN_VARIABLES.fullmatch(k)}
        return {**kept, **self._order.variables, "PYTHONUNBUFFERED": "1"}

    def _variables(self, rank: hosts.Rank, ranks: Sequence[hosts.Rank], full: int, coordinator: str) -> dict[str, str]:
        """Returns the variables of one process: ours, and those of DeepSpeed's launcher."""
        address, _, port = coordinator.rpartition(":")
        local_size = sum(other.host == rank.host for other in ranks)
        found = {
            "ZEROJAX_COORDINATOR": coordinator,
            "ZEROJAX_NUM_PROCESSES": str(len(ranks)),
            "ZEROJAX_PROCESS_ID": str(rank.rank),
            "ZEROJAX_FULL_PROCESSES": str(full),
            "ZEROJAX_ATTEMPT": str(self._number),
            "ZEROJAX_RUN_ID": self._around.run_id,
            peers.VARIABLE: self._around.secret,
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.local_rank),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": address.strip("[]"),
            "MASTER_PORT": port,
        }
        if self._gpus(rank.host):
            found["CUDA_VISIBLE_DEVICES"] = ",".join(rank.slots)
        return found

    def _coordinator(self) -> str:
        """Returns the address of process 0, as the other hosts reach it."""
        first = self._hosts[0].name
        given, port = self._order.coordinator, str(self._hello[first]["port"])
        if given:
            return given if re.search(r":\d+$", given) else f"{given}:{port}"
        if all(hosts.is_here(host.name) for host in self._hosts):
            return f"127.0.0.1:{port}"
        address = self._address(first)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def _address(self, first: str) -> str:
        """Returns the address of the first host: that under which ssh reached it, or from which another host was reached."""
        if not hosts.is_here(first):
            ssh = self._hello[first]["ssh"]
            return ssh[2] if len(ssh) == 4 else first.rpartition("@")[2]
        for hello in self._hello.values():
            if hello["ssh"] and hosts.owns(hello["ssh"][0]):
                return hello["ssh"][0]
        return socket.gethostname() if first == hosts.THIS else first

    def _follow(self) -> Failure | None:
        """Follows the processes until all have ended well, or to the first failure."""
        pinged, is_asked = 0.0, False
        while self._running:
            self._take(0.2)
            for number in self._around.signals():
                is_asked = True
                self._broadcast({"signal": number})
            if time.monotonic() - pinged > PING_SECONDS:
                pinged = time.monotonic()
                for one in self._connections.values():
                    one.ping()
            if failure := self._failure():
                return failure
        return self._preempted() if self._stopped and not is_asked else None

    def _preempted(self) -> Failure:
        """Returns that a signal to one of the processes stopped the run, which saved and ended well."""
        rank = min(self._stopped, key=lambda rank: (not self._stopped[rank]["cause"], rank))
        where = f"rank {rank} on {self._host_of(rank)}"
        line = f"{where} got a signal: the run is stopped and saved at step {self._stopped[rank].get('step')}"
        return Failure(self._host_of(rank), rank, 0, line)

    def _failure(self) -> Failure | None:
        """Returns what has failed by now."""
        for rank, (status, _) in self._ends.items():
            if status:
                return self._ended(rank)
        for name, one in self._connections.items():
            if not any(host == name for host in self._running.values()):
                continue
            silence = time.monotonic() - one.heard
            if name in self._refused:
                why = f"{self._refused[name]}; all hosts need the same folders, see --log_dir and the working directory"
                return Failure(name, None, USAGE, f"host {name} cannot start its processes: {why}")
            if name in self._lost or silence > LOST_SECONDS:
                return self._host_lost(name, self._lost.get(name) or f"no word for {silence:.0f} s")
        beats = [beat for rank, beat in self._beats.items() if rank in self._running]
        if suspect := self._judge.suspect(beats):
            line = f"{suspect.beat.place()} {suspect.why}"
            self._around.tell(Failure(suspect.beat.host, suspect.beat.rank, 0, line, self._details(suspect.beat)))
            self._broadcast({"news": f"{LAUNCHER}: {line}"})
        found = self._judge.judge(beats)
        return None if found is None else self._guilty(found)

    def _ended(self, rank: int) -> Failure:
        """Returns the failure of a process that ended."""
        status, tail = self._ends[rank]
        where = self._beats[rank].place() if rank in self._beats else f"rank {rank} on {self._host_of(rank)}"
        how = f"status {status}" if status > 0 else _signal_name(-status)
        quoted = ["its last lines:", *(f"  {line}" for line in tail)] if tail else ["it printed nothing"]
        return Failure(self._host_of(rank), rank, shell_status(status), f"{where} ended with {how}", quoted)

    def _host_lost(self, name: str, why: str) -> Failure:
        ranks = [rank for rank, host in self._running.items() if host == name]
        where = "; ".join(self._beats[rank].place() for rank in ranks if rank in self._beats) or f"ranks {ranks}"
        return Failure(name, None, LOST_STATUS, f"host {name} is lost ({why}), with {where}", is_lost=True)

    def _guilty(self, found: verdict.Blame) -> Failure:
        """Returns the failure of a process that hangs, with its stack."""
        guilty = found.beat
        line = f"{guilty.place()} {found.why}"
        return Failure(guilty.host, guilty.rank, LOST_STATUS, line, self._details(guilty))

    def _details(self, guilty: verdict.Beat) -> list[str]:
        """Returns the stack of a process, and where all are."""
        running = [beat for rank, beat in sorted(self._beats.items()) if rank in self._running]
        return [
            *self._stack_of(guilty),
            "all processes:",
            *(f"  {beat.place()}, still for {beat.still:.0f} s{_innermost(beat)}" for beat in running),
        ]

    def _stack_of(self, beat: verdict.Beat) -> list[str]:
        """Returns where a process is: the stacks of its threads, or that of its main thread in its last heartbeat."""
        self._stacks.pop(beat.rank, None)
        self._connections[beat.host].send({"stacks": True})
        deadline = time.monotonic() + STACK_SECONDS
        while beat.rank not in self._stacks and time.monotonic() < deadline and beat.host not in self._lost:
            self._take(0.1)
        dumped = self._stacks.get(beat.rank, "").splitlines()
        return ["its Python stack, the innermost call first:", *(dumped or [f"  {frame}" for frame in beat.stack])]

    def _best_witness(self, failure: Failure) -> Failure:
        """Returns the failure that others follow from: a process often ends because another did, and its line says which."""
        if failure.rank is None or failure.rank not in self._ends:
            return failure
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and len(self._running):
            self._take(0.1)
            blamed = self._blamed(failure.rank)
            if blamed is None or blamed in self._ends:
                break
        killed = [rank for rank, (status, _) in self._ends.items() if status < 0 and status != -signal.SIGTERM]
        blamed = self._blamed(failure.rank)
        first = blamed if blamed in self._ends and self._ends[blamed][0] else killed[0] if killed else failure.rank
        if blamed is not None and blamed not in self._ends and blamed in self._running:
            host = self._running[blamed]
            where = self._beats[blamed].place() if blamed in self._beats else f"rank {blamed} on {host}"
            line = f"{where} does not answer the others any more"
            return dataclasses.replace(failure, host=host, rank=blamed, line=line, is_lost=True)
        return failure if first == failure.rank else self._ended(first)

    def _blamed(self, rank: int) -> int | None:
        """Returns the process whose end a process gave as the reason of its own."""
        _, tail = self._ends[rank]
        found = re.search(r"^zerojax: process (\d+) (is gone|ended with status)", "\n".join(tail[-3:]), re.MULTILINE)
        return int(found[1]) if found else None

    def _interrupted(self, number: int) -> Failure:
        return Failure("", None, shell_status(-number), f"stopped by {_signal_name(number)} before it began")

    def _drain(self) -> None:
        """Waits until the agents have ended all processes."""
        deadline = time.monotonic() + self._order.grace_seconds + 10
        while time.monotonic() < deadline and any(not one.is_lost for one in self._connections.values()):
            self._take(0.1)
            for number in self._around.signals():
                self._broadcast({"signal": number})
            if all(
                name in self._lost or time.monotonic() - one.heard > LOST_SECONDS
                for name, one in self._connections.items()
            ):
                break
        while self._take(0.0):
            pass

    def _take(self, seconds: float) -> bool:
        """Reads the frames that have come, and waits up to `seconds` for the first. Returns whether there were any."""
        is_any = False
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            while True:
                self._read(message)
                is_any = True
                message = self._inbox.get_nowait()
        return is_any

    def _read(self, message: connection.Message) -> None:
        host, frame = message
        if "out" in frame:
            self._around.show(host, frame["out"], frame["text"])
        elif "beats" in frame:
            for said in frame["beats"]:
                self._beats[said["rank"]] = verdict.beat(host, said, has_gpus=bool(self._gpus(host)))
        elif "exit" in frame:
            self._ends[frame["exit"]] = (frame["status"], frame["tail"])
            if frame["said"].get("stopped"):
                self._stopped[frame["exit"]] = frame["said"]
            self._running.pop(frame["exit"], None)
        elif "stacks" in frame:
            self._stacks |= {int(rank): text for rank, text in frame["stacks"].items()}
        elif "hello" in frame:
            self._hello[host] = frame["hello"]
        elif "refused" in frame:
            self._refused[host] = frame["refused"]
        elif "failed" in frame:
            self._lost.setdefault(host, frame["failed"])
        elif "lost" in frame:
            self._lost.setdefault(host, frame["lost"])

    def _host_of(self, rank: int) -> str:
        ranks = hosts.ranks(self._hosts, self._order.per_process)
        return ranks[rank].host

    def _broadcast(self, frame: Mapping[str, Any]) -> None:
        for one in self._connections.values():
            one.send(frame)


def _innermost(beat: verdict.Beat) -> str:
    return f", at {beat.stack[0]}" if beat.stack else ""


def shell_status(returncode: int) -> int:
    """Returns an exit status as a shell counts it."""
    return returncode if returncode >= 0 else 128 - returncode


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
