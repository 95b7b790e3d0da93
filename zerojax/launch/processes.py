"""Joins processes into one run. This module connects a process to its peers, identifies it, and ends it.

Call `devices.emulate_cpu_devices` first, then `initialize`, then anything that uses a device. JAX has these limits:

* XLA aborts a process whose peers never join, or whose coordinator ends, with status 134 and a C++ stack trace. Python cannot
  catch that. So `peers` connects the processes first, tells them of each other's end, and hides the coordinator's end from XLA.
* If a peer dies, a running collective raises at once on CPU. On GPU it blocks. `peers` ends the process in both cases.
* A process that ends normally waits up to 300 s for its peers, and is aborted if they do not end. So a process ends through
  `leave`, also after an exception that nobody catches. A program that does not call it is left to that wait.
* JAX's preemption service swallows SIGTERM. `initialize` turns it off. `signals.StopSignal` replaces it.

Who started this process, and as which of how many, is read by `schedulers`. Where Kubernetes has to be asked, JAX does so and connects the
processes, and nothing but XLA's heartbeats tells of their end.
"""

import atexit
import contextlib
import dataclasses
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from zerojax import errors, files
from zerojax.errors import UserError
from zerojax.launch import early, ending, schedulers
from zerojax.launch import peers as peers_lib
from zerojax.launch.schedulers import Cluster

CONNECT_SECONDS = 300  # for all processes to join
HEARTBEAT_SECONDS = 100  # a process without heartbeats for this long counts as dead
NEWS_SECONDS = 2.0  # in which a process learns that its exception follows from the end of another
# JAX's own: the address on which process 0 listens, if not the coordinator's
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
SECRET_FILE_VARIABLE = f"{peers_lib.VARIABLE}_FILE"
SHORTEST_SECRET = 16  # characters; who hears a proof can try short ones

_peers: peers_lib.Peers | None = None  # the other processes; None if there are none, or if JAX found them


@dataclasses.dataclass(frozen=True)
class Launched:
    """What `zerojax launch` says to a process that it starts."""

    cluster: Cluster  # the processes of this attempt
    full_processes: int  # the processes of an attempt on all hosts. There are fewer if a restart lacks hosts.
    attempt: int  # the number of restarts before
    # names the run. All its attempts share it, and one begins only when the processes of the one before have ended.
    run_id: str


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns what `zerojax launch` says to this process, or None if it did not start it.

    Raises:
      UserError: its variables are incomplete or no numbers.
    """
    if "ZEROJAX_COORDINATOR" not in environ:
        return None
    try:
        full, attempt = (int(environ[f"ZEROJAX_{name}"]) for name in ("FULL_PROCESSES", "ATTEMPT"))
    except (KeyError, ValueError) as error:
        raise UserError(
            f"launch: the variables ZEROJAX_... are not those of zerojax launch ({errors.first_line(error)}); unset them"
        ) from error
    return Launched(schedulers.LAUNCHER.read(environ), full, attempt, environ.get("ZEROJAX_RUN_ID", ""))


def run_id() -> str:
    """Returns the name that all attempts of a run share, or "" if `zerojax launch` did not start this process."""
    started = launched()
    return "" if started is None else started.run_id


def rank() -> int:
    """Returns the number that `zerojax launch` gave this process, or 0. Starts no JAX backend."""
    started = launched()
    return 0 if started is None else started.cluster.process_id


def find_cluster(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Cluster | None:
    """Returns the processes of this run by three flags, or else by what started this one. None: it is alone, or only JAX can ask.

    Raises:
      UserError: some but not all three arguments are set, one is out of range, or variables contradict each other.
    """
    return _checked(coordinator, num_processes, process_id) or schedulers.find().cluster


def are_here(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> bool:
    """Returns whether all processes of this run are known to be on this host: it is alone, or process 0 has an address for this host alone.

    Raises:
      UserError: as `find_cluster`.
    """
    cluster = find_cluster(coordinator, num_processes, process_id)
    if cluster is None or cluster.num_processes == 1:
        return cluster is not None or not schedulers.find().method
    host = cluster.coordinator.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = CONNECT_SECONDS,
) -> None:
    """Joins this process to its run, by the three arguments, or else by what started it: `zerojax launch`, or a row of `schedulers.TABLE`.

    Does nothing if there are no arguments, and nobody started several processes. Warns if a variable says that there are several
    and does not count.

    Raises:
      UserError: some but not all three arguments are set, one is out of range, variables contradict each other, the port of
        process 0 is in use, or nothing answers at `coordinator` within `timeout_seconds`.
    """
    cluster = _checked(coordinator, num_processes, process_id)
    found = schedulers.Origin("") if cluster else schedulers.find()
    cluster = cluster or found.cluster
    if found.note:
        warnings.warn(found.note, stacklevel=2)
    if not cluster and not found.method:
        return
    sys.excepthook = _leave_after
    jax.config.update("jax_enable_preemption_service", False)
    bounds: dict[str, Any] = {"initialization_timeout": timeout_seconds, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    who = (
        f"process {cluster.process_id} of {cluster.num_processes} at {cluster.coordinator}"
        if cluster
        else f"this process of {found.name}"
    ) + (f" ({found.name})" if cluster and found.name else "")
    with _prints_if_waiting(f"{who}: still waiting for the others; gives up after {timeout_seconds} s"):
        if cluster:
            address = _connect(cluster, timeout_seconds)
            arguments = address, cluster.num_processes, cluster.process_id
            bounds |= {"cluster_detection_method": "deactivate", "coordinator_bind_address": address}  # process 0 binds
            jax.distributed.initialize(*arguments, cluster.devices, **bounds)
            return
        try:
            jax.distributed.initialize(cluster_detection_method=found.method, **bounds)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"launch: {who} could not join the others ({errors.first_line(error)}); {schedulers.WAY_OUT}"
            ) from error


def secret(environ: Mapping[str, str]) -> bytes:
    """Returns what processes of a run prove to each other: ZEROJAX_SECRET, which `zerojax launch` sets, or a file's text; b"" for none.

    Raises:
      UserError: the file cannot be read, or the secret is too short.
    """
    place, found = peers_lib.VARIABLE, environ.get(peers_lib.VARIABLE, "")
    if not found:
        if not (path := environ.get(SECRET_FILE_VARIABLE)):
            return b""
        place, found = f"{SECRET_FILE_VARIABLE} {path}", files.read_key(path, SECRET_FILE_VARIABLE)
    if len(found) < SHORTEST_SECRET:
        way_out = "set it to that of `openssl rand -hex 32`"
        raise UserError(
            f"{place}: has {len(found)} characters, and a secret needs {SHORTEST_SECRET} or more; {way_out}"
        )
    return found.encode()


def is_primary() -> bool:
    """Returns whether this is the process that prints, and that writes files which are written once."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process has reached the barrier `name`. With one process, returns at once."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def order(what: object) -> None:
    """On process 0: gives all others a value of JSON. They get what is ordered in this order, each by `next_order`."""
    if _peers is not None:
        _peers.order(what)


def next_order() -> Any:
    """On the other processes: returns what process 0 ordered next, and waits for it."""
    assert _peers is not None
    return _peers.next_order()


def leave(status: int, line: str = "") -> NoReturn:
    """Ends this process with `status`, after printing `line` to stderr. Other processes end too, with a line that quotes this one.

    With status 0 it first waits until all processes have called this. With another, it is gone within a few seconds.
    """
    if status == 0 and _peers is not None:
        _peers.finish()
    elif status == 0 and jax.distributed.is_initialized():
        barrier("the end of the run")  # else XLA would miss this process's heartbeats while another still works
    ending.leave(status, line)


def leave_after(error: Exception) -> NoReturn:
    """Ends a command after an error: a UserError, a full disk and a forbidden file with one line and status 2, others with their traceback.

    If it follows from the end of another process, prints that line instead.
    """
    if isinstance(error, UserError):
        if any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in errors.causes(error)):
            leave_if_told()
        ending.leave(2, f"zerojax: {error}")
    if isinstance(error, OSError) and errors.is_disk_full(error):
        where = error.filename or "a file of the run"
        ending.leave(2, f"zerojax: {where}: no space left on the device; make room, then run again to resume")
    if lost := errors.lost_file(error):
        ending.leave(2, f"zerojax: {lost}; when it is back, the same command resumes")
    if denied := errors.denied(error):
        ending.leave(2, f"zerojax: {denied}")
    _leave_with_traceback(error)


def leave_if_told() -> None:
    """Ends this process if another one ended, of which this one learns in a moment."""
    news = _peers.news(NEWS_SECONDS) if _peers is not None else None
    if news is not None:
        ending.leave(news.status or 1, str(news))


def _checked(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Cluster | None:
    """Returns the three flags as a Cluster, or None if none is set."""
    flags = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        present = ", ".join(flag for flag in flags if flag not in missing)
        raise UserError(f"{missing[0]}: must be set together with {present}; set all of {', '.join(flags)}, or none")
    assert coordinator is not None and num_processes is not None and process_id is not None
    schedulers.check_address(coordinator, "--coordinator")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id: must be below --num_processes={num_processes}, and is {process_id}")
    return Cluster(coordinator, num_processes, process_id)


def _connect(cluster: Cluster, timeout_seconds: float) -> str:
    """Connects this process to the others, and returns the address of the coordination service for XLA in this process.

    Raises:
      UserError: the port of process 0 is in use, nothing answers the other processes, or some do not come.
    """
    global _peers
    joined = peers_lib.Peers(cluster.process_id, cluster.num_processes, secret(os.environ))
    deadline = time.monotonic() + timeout_seconds
    try:
        address = _open(joined, cluster) if cluster.process_id == 0 else _join(joined, cluster, timeout_seconds)
        if missing := joined.wait(max(0.0, deadline - time.monotonic())):
            names = ", ".join(map(str, missing)) if cluster.process_id == 0 else "some"
            raise UserError(
                f"--num_processes: of {cluster.num_processes} processes, {names} did not join within {timeout_seconds} s; "
                "start them, or set the number of those there are"
            )
    except UserError:
        joined.close()
        raise
    _peers = joined
    atexit.register(_end, joined)
    ending.before_end(lambda status, line: joined.tell(status, line) if status else None)
    return address


def _end(joined: peers_lib.Peers) -> None:
    """Ends the connections of a program that ends without `leave`, while their thread still runs."""
    jax.distributed.shutdown()  # waits for the others, over these connections
    joined.finish()
    joined.close()


def _open(joined: peers_lib.Peers, cluster: Cluster) -> str:
    """Listens for the other processes, as process 0."""
    host, _, port = cluster.coordinator.rpartition(":")
    try:
        address = joined.listen(*_bind_address(host.strip("[]"), int(port)))
        if joined.is_open:
            warnings.warn(
                f"launch: whoever reaches {cluster.coordinator} can end this run or take part in it; set {peers_lib.VARIABLE} to the same "
                f"random word in all processes, or {SECRET_FILE_VARIABLE} to a file with one",
                stacklevel=4,
            )
        return address
    except OSError as error:
        way_out = f"try another, name an address of this host, or set {BIND_VARIABLE}"
        why = os.strerror(error.errno or 0) if (error.errno or 0) > 0 else errors.first_line(error)
        raise UserError(f"--coordinator: port {port} cannot be opened at {host} ({why}); {way_out}") from error


def _join(joined: peers_lib.Peers, cluster: Cluster, timeout_seconds: float) -> str:
    """Connects to process 0, which may start later."""
    host, _, port = cluster.coordinator.rpartition(":")
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return joined.join(host.strip("[]"), int(port))
        except OSError as error:
            if time.monotonic() > deadline:
                what = (
                    f"nothing answers at {cluster.coordinator} after {timeout_seconds} s ({errors.first_line(error)})"
                )
                way_out = f"start process 0 there, and make that port reachable from here ({BIND_VARIABLE} there tells where it listens)"
                raise UserError(f"--coordinator: {what}; {way_out}") from error
        time.sleep(0.2)


def _bind_address(host: str, port: int) -> tuple[str | Sequence[str] | None, int]:
    """Returns the addresses on which process 0 listens, and the port; None for all addresses of this host.

    They are those of the coordinator. Where this host's own files give its name a loopback address, which no other host can reach, the
    address by which this host reaches others is added.
    """
    if chosen := os.environ.get(BIND_VARIABLE):
        own, _, port_text = chosen.rpartition(":")
        own = own.strip("[]")
        return (None if own in ("", "::", "0.0.0.0") else own), int(port_text)
    found = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    is_name = host != "localhost" and not any(str(address) == host for address in found)
    if not is_name or not all(address.is_loopback for address in found):
        return host, port
    outward = _outward_address()
    return (None if outward is None else [*sorted(map(str, found)), outward]), port


def _outward_address() -> str | None:
    """Returns the address from which this host reaches others, or None if it has no route to any. Sends nothing."""
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # reserved for examples
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unused:
            unused.connect((far, 9))
            return str(unused.getsockname()[0])
    return None


def _leave_after(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends a process whose program did not catch an exception. It would wait for the others, and they for it."""
    if isinstance(error, KeyboardInterrupt):
        ending.leave(early.status(signal.SIGINT), early.line(signal.SIGINT))
    _leave_with_traceback(error)


def _leave_with_traceback(error: BaseException) -> NoReturn:
    """Ends this process with status 1, and its others with the first line of the error."""
    leave_if_told()
    traceback.print_exception(error)
    ending.leave(1, "" if _peers is None else f"zerojax: {errors.kind_and_line(error)}")


@contextlib.contextmanager
def _prints_if_waiting(text: str, seconds: float = 15) -> Iterator[None]:
    """Prints `text` to stderr once if the block is still running after `seconds`."""
    timer = threading.Timer(seconds, print, [text], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
