"""Joins processes into one run. This module connects a process to its peers, identifies it, and ends it.

Call `devices.emulate_cpu_devices` first, then `initialize`, then anything that uses a device. JAX has these limits:

* XLA aborts a process whose peers never join, or that cannot reach its coordinator, with status 134 and a C++ stack trace. Python cannot
  catch that. So `initialize` first connects to the coordinator with a plain socket, and prints a line if it waits long.
* If a peer dies, a running collective raises at once on CPU. On GPU it can block for HEARTBEAT_SECONDS without heartbeats. Then XLA
  aborts the survivors (sooner if process 0, the coordinator, died).
* A process that ends normally waits up to 300 s for its peers, and is aborted if they do not end. So a failed process ends through
  `leave`.
* JAX's preemption service swallows SIGTERM. `initialize` turns it off. `signals.StopSignal` replaces it.
"""

import contextlib
import dataclasses
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from zerojax import errors
from zerojax.errors import UserError

CONNECT_SECONDS = 300  # for all processes to join
HEARTBEAT_SECONDS = 100  # a process without heartbeats for this long counts as dead


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The address of process 0 ("host:port"), the number of processes, and the index of this one."""

    coordinator: str
    num_processes: int
    process_id: int


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = CONNECT_SECONDS,
) -> None:
    """Joins this process to its run, by the three arguments, or else by Slurm, Open MPI or Kubernetes.

    Does nothing if there are no arguments and no scheduler started several processes.

    Raises:
      UserError: some but not all three arguments are set, one is out of range, the port of process 0 is in use, or nothing
        answers at `coordinator` within `timeout_seconds`.
    """
    cluster = _checked(coordinator, num_processes, process_id)
    scheduler = None if cluster else detect_scheduler(os.environ)
    if not cluster and not scheduler:
        return
    jax.config.update("jax_enable_preemption_service", False)
    bounds: dict[str, Any] = {"initialization_timeout": timeout_seconds, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    who = f"process {process_id} of {num_processes} at {coordinator}" if cluster else f"this {scheduler} task"
    with _prints_if_waiting(f"{who}: still waiting for the others; gives up after {timeout_seconds} s"):
        if cluster:
            _check_coordinator(cluster, timeout_seconds)
            arguments = cluster.coordinator, cluster.num_processes, cluster.process_id
            jax.distributed.initialize(*arguments, cluster_detection_method="deactivate", **bounds)
            return
        try:
            jax.distributed.initialize(local_device_ids=_only_visible_device(os.environ), **bounds)
        except (RuntimeError, ValueError) as error:
            way_out = "set --coordinator HOST:PORT, --num_processes and --process_id"
            raise UserError(
                f"launch: {who} could not join the others ({errors.first_line(error)}); {way_out}"
            ) from error


def detect_scheduler(environ: Mapping[str, str]) -> str | None:
    """Returns the scheduler that started this process as one of several, if JAX can join them; else None.

    Kubernetes counts if the process is in a pod of an Indexed Job and the `kubernetes` package (jax[k8s]) is installed.
    """
    several = {
        "Slurm": "SLURM_STEP_NODELIST" in environ and int(environ.get("SLURM_NTASKS", 1)) > 1,
        "Open MPI": int(environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1,
        "Kubernetes": {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
        and importlib.util.find_spec("kubernetes") is not None,
    }
    return next((name for name, is_found in several.items() if is_found), None)


def is_primary() -> bool:
    """Returns whether this is the process that prints, and that writes files which are written once."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process has reached the barrier `name`. With one process, returns at once."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def leave(status: int) -> NoReturn:
    """Ends this process with `status`. If there are other processes, it does not wait for them at exit."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


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
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator: must be HOST:PORT, as in node0:1234, and is {coordinator!r}")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id: must be below --num_processes={num_processes}, and is {process_id}")
    return Cluster(coordinator, num_processes, process_id)


def _check_coordinator(cluster: Cluster, timeout_seconds: float) -> None:
    """Raises a UserError where XLA would abort: the port of process 0 is in use, or nothing answers the other processes."""
    host, _, port = cluster.coordinator.rpartition(":")
    if cluster.process_id == 0:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        try:
            socket.create_server(("", int(port)), family=family, dualstack_ipv6=is_dual).close()
        except OSError as error:
            raise UserError(f"--coordinator: port {port} cannot be opened ({error.strerror}); try another") from error
        return
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                what = f"nothing answers at {cluster.coordinator} after {timeout_seconds} s ({error})"
                way_out = "start process 0 there, and make that port reachable from this host"
                raise UserError(f"--coordinator: {what}; {way_out}") from error
        time.sleep(0.2)


def _only_visible_device(environ: Mapping[str, str]) -> list[int] | None:
    """Returns [0] if this task sees one GPU. JAX's default would be the GPU with the index of this task on the host."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return [0] if visible and "," not in visible else None


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
