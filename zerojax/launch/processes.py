"""Joins processes into one run and stops them together. This module asks which process it is.

Order: `emulate_cpu_devices`, `initialize`, then anything that touches a device. What JAX leaves to live with:

* A process whose peers never come, or that cannot reach its coordinator, is aborted by XLA (status 134 and a
  C++ stack trace; no `except` sees it). `initialize` therefore looks for the coordinator first, with a plain
  socket, and says after a while for whom it waits.
* A dead peer: on CPU the collective in flight raises at once; on GPU it can block until heartbeats are missing
  for HEARTBEAT_SECONDS, when XLA aborts the survivors (sooner if process 0, which coordinates, died).
* A process that ends through the interpreter waits up to 300 s for its peers, and is aborted if they do not
  end. One that failed therefore ends through `leave`.
* JAX's preemption service swallows SIGTERM. `initialize` turns it off; `StopSignal` takes its place.
"""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zerojax import xla_flags
from zerojax.errors import UserError
from zerojax.launch import accelerators

CONNECT_SECONDS = 300  # for all processes to come
HEARTBEAT_SECONDS = 100  # without a sign of life, after which a process counts as dead


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where process 0 listens ("host:port"), how many processes there are, and which this one is."""

    coordinator: str
    num_processes: int
    process_id: int


def emulate_cpu_devices(count: int) -> bool:
    """Has JAX emulate `count` CPU devices in this process where it would find no accelerator.

    Starts no backend. A count set before, by XLA_FLAGS=--xla_force_host_platform_device_count=N or by
    `jax_num_cpu_devices`, is kept.

    Returns:
      Whether computation will run on (emulated) CPU devices.

    Raises:
      UserError: JAX's backends have started, which fixes the number of devices.
    """
    is_counted = "xla_force_host_platform_device_count" in xla_flags.names()
    try:
        if not accelerators.pass_over_absent():
            return False
        if not is_counted and jax.config.jax_num_cpu_devices == -1:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UserError(
            f"devices: JAX has started, so {count} CPU devices cannot be emulated; call emulate_cpu_devices "
            "before anything that computes or lists devices, or set JAX_NUM_CPU_DEVICES"
        ) from error
    return True


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = CONNECT_SECONDS,
) -> None:
    """Joins this process to its run: by the three arguments, else by Slurm, Open MPI or Kubernetes.

    Does nothing where none of these says that there are several processes.

    Raises:
      UserError: some but not all three are given, one is out of range, process 0's port is taken, or nothing
        answers at `coordinator` within `timeout_seconds`.
    """
    cluster = _checked(coordinator, num_processes, process_id)
    scheduler = None if cluster else detect_scheduler(os.environ)
    if not cluster and not scheduler:
        return
    jax.config.update("jax_enable_preemption_service", False)
    bounds: dict[str, Any] = {"initialization_timeout": timeout_seconds, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    who = f"process {process_id} of {num_processes} at {coordinator}" if cluster else f"this {scheduler} task"
    with _says_if_waiting(f"{who}: still waiting for the others; gives up after {timeout_seconds} s"):
        if cluster:
            _look_for_coordinator(cluster, timeout_seconds)
            place = cluster.coordinator, cluster.num_processes, cluster.process_id
            jax.distributed.initialize(*place, cluster_detection_method="deactivate", **bounds)
            return
        try:
            jax.distributed.initialize(local_device_ids=_only_visible_device(os.environ), **bounds)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            way_out = "give --coordinator HOST:PORT, --num_processes and --process_id"
            raise UserError(f"launch: {who} could not join the others ({reason}); {way_out}") from error


def detect_scheduler(environ: Mapping[str, str]) -> str | None:
    """Names the scheduler that started this process as one of several, where JAX can join them; else None.

    Kubernetes counts for a pod of an Indexed Job where the `kubernetes` package (jax[k8s]) is installed.
    """
    several = {
        "Slurm": "SLURM_STEP_NODELIST" in environ and int(environ.get("SLURM_NTASKS", 1)) > 1,
        "Open MPI": int(environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1,
        "Kubernetes": {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
        and importlib.util.find_spec("kubernetes") is not None,
    }
    return next((name for name, is_found in several.items() if is_found), None)


def is_primary() -> bool:
    """Says whether this process is the one that prints and writes what is written once."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process has come to the barrier `name`; with one process returns at once."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def describe() -> str:
    """Returns the devices and processes in words: "8 x cpu (emulated), 1 process"."""
    emulated = " (emulated)" if jax.default_backend() == "cpu" and jax.local_device_count() > 1 else ""
    processes = jax.process_count()
    kind = jax.devices()[0].device_kind
    return f"{jax.device_count()} x {kind}{emulated}, {processes} process{'es' if processes > 1 else ''}"


def agreed(stop: bool) -> bool:
    """Returns whether any process passed True; every process must call it at the same step.

    It waits for the devices to finish what was dispatched before. In a loop, use `StopSignal.agreed`.
    """
    return stop if jax.process_count() == 1 else bool(jax.device_get(_any(stop)))


def leave(status: int) -> NoReturn:
    """Ends this process with `status`; if there are others, at once, without waiting for them at exit."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class StopSignal:
    """Turns the first SIGTERM or SIGINT into a request to stop after the step; a SIGINT after it interrupts.

    A context manager, for the main thread: leaving it puts the former handlers back. `requested` says whether
    a signal came to this process.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[int, Any] = {}
        self._asked: jax.Array | None = None

    def __enter__(self) -> "StopSignal":
        self._former = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def agreed(self, *, at_once: bool = False) -> bool:
        """Returns the same on every process: whether any was asked to stop. Call it once a step on each.

        The answer is one call late, unless wanted `at_once`, so that no device waits: a call dispatches a tiny reduction and reads
        the one before. With one process it is `requested`.
        """
        if jax.process_count() == 1:
            return self.requested
        if at_once:
            return bool(jax.device_get(_any(self.requested)))
        before, self._asked = self._asked, _any(self.requested)
        return before is not None and bool(jax.device_get(before))

    def _handle(self, number: int, frame: object) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


def _checked(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Cluster | None:
    """Returns the three flags as a Cluster, or None where none is given."""
    flags = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        given = ", ".join(flag for flag in flags if flag not in missing)
        raise UserError(f"{missing[0]}: must be given with {given}; give all of {', '.join(flags)}, or none")
    assert coordinator is not None and num_processes is not None and process_id is not None
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator: must be HOST:PORT, as in node0:1234, and is {coordinator!r}")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id: must be below --num_processes={num_processes}, and is {process_id}")
    return Cluster(coordinator, num_processes, process_id)


def _look_for_coordinator(cluster: Cluster, timeout_seconds: float) -> None:
    """Raises a UserError for what XLA aborts on: process 0's port is taken, or nobody answers the others."""
    host, _, port = cluster.coordinator.rpartition(":")
    if cluster.process_id == 0:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        try:
            socket.create_server(("", int(port)), family=family, dualstack_ipv6=is_dual).close()
        except OSError as error:
            raise UserError(f"--coordinator: port {port} is no use here ({error.strerror}); try another") from error
        return
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                what = f"nothing answers at {cluster.coordinator} after {timeout_seconds} s ({error})"
                way_out = "start process 0 there, and let this host reach that port"
                raise UserError(f"--coordinator: {what}; {way_out}") from error
        time.sleep(0.2)


def _only_visible_device(environ: Mapping[str, str]) -> list[int] | None:
    """Returns [0] where this task sees one GPU: JAX would look for the one of its number on the host."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return [0] if visible and "," not in visible else None


@contextlib.contextmanager
def _says_if_waiting(text: str, seconds: float = 15) -> Iterator[None]:
    """Prints `text` to stderr, once, if the block is still running after `seconds`."""
    timer = threading.Timer(seconds, print, [text], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _any(stop: bool) -> jax.Array:
    """Dispatches a reduction of every process's `stop`; the result is bool[] on all."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    split = jax.NamedSharding(mesh, jax.P("all"))
    with jax.transfer_guard("allow"):  # one byte a device
        asked = jax.make_array_from_callback((mesh.size,), split, lambda index: np.full(1, stop))
    return jax.jit(jnp.any, out_shardings=jax.NamedSharding(mesh, jax.P()))(asked)
