"""Finds who started this process, and as which of how many. This module reads variables of the environment by one table.

A variable proves little: a shell in a job, a batch script, and what another starter started there inherit those of the job around them.
So a row of TABLE may also say which program starts its tasks. The nearest known starter above this process decides, if it is seen. In a
container with process numbers of its own, and where other users' processes are hidden, variables alone decide.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zerojax import errors
from zerojax.errors import UserError

# JAX's own: the address of process 0, and its port alone
ADDRESS_VARIABLE, PORT_VARIABLE = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"
LOCAL = "127.0.0.1"
WAY_OUT = "set --coordinator, --num_processes and --process_id"
STARTERS = re.compile(
    r"(\S*/)?(slurmstepd|orted|prted|prterun|orterun|mpirun|mpiexec|hydra_pmi_proxy|sshd)\b"
)  # of a process's title
Environ = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run, as one of them knows them.

    Attributes:
      coordinator: the address of process 0, "host:port".
      num_processes: how many there are.
      process_id: the index of this one.
      devices: this process's GPUs among those that it sees; None for all.
    """

    coordinator: str
    num_processes: int
    process_id: int
    devices: tuple[int, ...] | None = None


class Origin(NamedTuple):
    """Who started this process, "" if nobody is known, and what follows.

    Attributes:
      name: of the row of TABLE.
      cluster: this process and its others; None if it is alone, or if only JAX can ask.
      method: JAX's name of the scheduler that it can ask; else "".
      note: a line that tells why a process is alone though a variable says that there are more; else "".
    """

    name: str
    cluster: Cluster | None = None
    method: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """What starts processes, and by which variables it tells them who they are.

    Attributes:
      name: in messages.
      count, index: the variables of the number of processes and of this one. The row is looked at if `count` is set; without one, `index`.
      local_index, local_count: the same for its host; a count may have Slurm's form "2(x3),1".
      beside: variables that must be set too.
      address: the host and the port of process 0.
      started_by: a regex for the nearest known starter, if one is seen; "" if any may be.
      method: JAX's name, where it must ask for the count.
      package: a Python package that `method` needs.
      never: why the row is not taken, but only told.
    """

    name: str
    count: str
    index: str = ""
    local_index: str = ""
    local_count: str = ""
    beside: tuple[str, ...] = ()
    address: Callable[[Environ], tuple[str, str]] = lambda environ: (environ["MASTER_ADDR"], environ["MASTER_PORT"])
    started_by: str = ""
    method: str = ""
    package: str = ""
    never: str = ""

    def is_present(self, environ: Environ) -> bool:
        """Returns whether the variables that show this starter are set."""
        return all(environ.get(name) for name in (self.count or self.index, *self.beside))

    def why_not(self, starter: str) -> str:
        """Returns why the row does not decide though its variables are set, or ""."""
        if starter and self.started_by and not re.match(self.started_by, starter):
            return f"left over from a job around this one, as {errors.shown(starter)} started this process"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"the package {self.package} is not installed; {WAY_OUT}"
        return self.never

    def read(self, environ: Environ) -> Cluster:
        """Returns what the variables say. With one process, the address may be "".

        Raises:
          UserError: one is missing, no number or out of range, or none says where process 0 is.
        """
        count = self._number(environ, self.count, 1)
        index = self._number(environ, self.index, 0, count)
        most = self._most_of_a_host(environ)
        devices = None
        if self.local_index in environ:
            devices = _devices(environ, self._number(environ, self.local_index, 0), most)
        return Cluster(self._coordinator(environ, count, most == count), count, index, devices)

    def says(self, environ: Environ) -> str:
        """Returns the variable that counts its processes, as "NAME=3"; "" if it counts one. Without a count: its index."""
        name = self.count or self.index
        return "" if self.count and environ[name].strip() == "1" else f"{name}={environ[name]}"

    def _number(self, environ: Environ, name: str, least: int, below: int | None = None) -> int:
        if name not in environ:
            raise UserError(f"launch: {name} of {self.name} is missing; {WAY_OUT}")
        text = environ[name].strip()
        number = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
        if number < least or (below is not None and number >= below):
            rule = f"from {least}" if below is None else f"from {least}, below {self.count}={below}"
            raise UserError(
                f"launch: {name} of {self.name} must be a number {rule}, and is {errors.shown(environ[name])}; unset it, or {WAY_OUT}"
            )
        return number

    def _most_of_a_host(self, environ: Environ) -> int | None:
        """Returns how many processes the fullest host has, if that is known."""
        return max(map(int, re.findall(r"(?:^|,)([0-9]{1,9})", environ.get(self.local_count, ""))), default=None)

    def _coordinator(self, environ: Environ, count: int, is_one_host: bool) -> str:
        if count == 1:
            return ""
        name = "" if self is LAUNCHER else ADDRESS_VARIABLE
        given = environ.get(name, "")
        if not given:
            try:
                host, port = self.address(environ)
            except (KeyError, ValueError) as error:
                way_out = f"set {ADDRESS_VARIABLE}=HOST:PORT to one that they reach, or {WAY_OUT}"
                raise UserError(
                    f"launch: {self.name} ({self.count}={count}) gives no address of process 0; {way_out}"
                ) from error
            if self is not LAUNCHER:
                port, name = environ.get(PORT_VARIABLE, port), PORT_VARIABLE
                host = LOCAL if is_one_host else host
            given = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        return check_address(given, f"launch: the address of process 0 ({name or self.name})")


def check_address(text: str, place: str) -> str:
    """Returns `text` if it is HOST:PORT.

    Raises:
      UserError: it is not.
    """
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UserError(f"{place}: must be HOST:PORT, as in node0:1234, and is {errors.shown(text)}")
    return text


def find(environ: Environ | None = None, above: Sequence[str] | None = None) -> Origin:
    """Returns who started this process, by the first row of TABLE that is not proven to be left over.

    Args:
      environ: the environment; None for this process's.
      above: the titles of the processes above this one, the nearest first; None to read them.

    Raises:
      UserError: the variables of that row contradict each other.
    """
    environ = os.environ if environ is None else environ
    present = [row for row in TABLE if row.is_present(environ)]
    if not present:
        return Origin("")
    starter = next(filter(STARTERS.match, titles() if above is None else above), "")
    reasons = {row: row.why_not(starter) for row in present}
    row = next((row for row in present if not reasons[row]), None)
    if row is not None and row.method:
        return Origin(row.name, method=row.method)
    if row is not None and (cluster := row.read(environ)).num_processes > 1:
        return Origin(row.name, cluster)
    without_effect = [
        other.says(environ) + (" has no effect" if not reasons[other] else f" has no effect ({reasons[other]})")
        for other in present
        if other is not row and other.says(environ) and (other.count or row is None)
    ]
    if row is LAUNCHER or not without_effect:  # who uses our launcher knows
        return Origin("" if row is None else row.name)
    name, by = ("", "") if row is None else (row.name, f", by {row.count}=1 of {row.name}")
    return Origin(name, note=f"launch: this is one process{by}: {'; '.join(without_effect)}")


def titles(most: int = 100) -> Iterator[str]:
    """Yields the titles of the processes above this one, as `ps` shows their first word, the nearest first; on Linux alone."""
    process = os.getpid()
    for _ in range(most):
        try:
            process = int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            words = pathlib.Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            return
        yield words[0].decode(errors="replace").strip()


def _devices(environ: Environ, local_index: int, most: int | None) -> tuple[int, ...] | None:
    """Returns which of the GPUs that a task sees it uses: the only one; all if it is alone on its host; else the one of its local number.

    None is all, or what JAX reads from JAX_LOCAL_DEVICE_IDS.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if "JAX_LOCAL_DEVICE_IDS" in environ:
        return None
    if visible and "," not in visible:
        return (0,)
    return None if most == 1 else (local_index,)


def _port(number: str) -> str:
    """Returns the port that JAX chooses for a job's number. It is above those that Linux gives to outgoing connections."""
    return str(61440 + int(number) % 4096)


def _launcher_address(environ: Environ) -> tuple[str, str]:
    host, _, port = environ["ZEROJAX_COORDINATOR"].rpartition(":")
    return host, port


def _jax_address(environ: Environ) -> tuple[str, str]:
    raise KeyError(ADDRESS_VARIABLE)  # it was looked for already


def _torchrun_address(environ: Environ) -> tuple[str, str]:
    return environ["MASTER_ADDR"], _port(environ["MASTER_PORT"])  # torchrun itself listens at MASTER_PORT


def _slurm_address(environ: Environ) -> tuple[str, str]:
    """Returns the first host of a list such as "node[001-004,007],other", which process 0 is on."""
    first = _match(r"(?:[^,\[]|\[[^]]*\])+", environ["SLURM_STEP_NODELIST"])[0]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first), _port(environ["SLURM_JOB_ID"])


def _open_mpi_address(environ: Environ) -> tuple[str, str]:
    """Returns the host of mpirun, which process 0 is on: version 4 gives its address, 5 its name ("prterun-node-1-8586@1")."""
    if uri := environ.get("OMPI_MCA_orte_hnp_uri"):
        found = _match(r"(\d+)\.\d+;tcp6?://(?:\[([^],]+)|([^,:]+))", uri)
        return found[2] or found[3], _port(str(int(found[1]) // 4096))
    found = _match(r"prterun-(.+)-(\d+)@", environ["PMIX_NAMESPACE"])
    return found[1], _port(found[2])


def _match(pattern: str, text: str) -> re.Match[str]:
    if found := re.match(pattern, text):
        return found
    raise ValueError(text)


LAUNCHER = Scheduler(
    "zerojax launch", count="ZEROJAX_NUM_PROCESSES", index="ZEROJAX_PROCESS_ID", address=_launcher_address
)
# Read from the top: what can run inside of what stands above it. The first row that is not proven to be left over decides.
TABLE = (
    LAUNCHER,
    Scheduler("JAX", count="JAX_NUM_PROCESSES", index="JAX_PROCESS_ID", address=_jax_address),
    Scheduler(
        "torchrun",
        count="WORLD_SIZE",
        index="RANK",
        local_index="LOCAL_RANK",
        local_count="LOCAL_WORLD_SIZE",
        beside=("TORCHELASTIC_RUN_ID",),
        address=_torchrun_address,
    ),
    Scheduler(
        "Open MPI",
        count="OMPI_COMM_WORLD_SIZE",
        index="OMPI_COMM_WORLD_RANK",
        local_index="OMPI_COMM_WORLD_LOCAL_RANK",
        local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
        address=_open_mpi_address,
        started_by=r".*\b(orted|prted|prterun|orterun|mpirun|mpiexec|sshd)\b",  # a daemon of another name comes by ssh
    ),
    Scheduler(
        "MPICH",
        count="PMI_SIZE",
        index="PMI_RANK",
        local_index="MPI_LOCALRANKID",
        local_count="MPI_LOCALNRANKS",
        beside=("MPI_LOCALRANKID",),  # Slurm sets PMI_SIZE too
        started_by=r".*\b(hydra_pmi_proxy|sshd)\b",
    ),
    Scheduler(
        "PALS",
        count="PMI_SIZE",
        index="PMI_RANK",
        local_index="PALS_LOCAL_RANKID",
        local_count="PALS_LOCAL_SIZE",
        beside=("PALS_RANKID",),
    ),
    Scheduler(
        "Slurm",
        count="SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is the job's, in an interactive step too
        index="SLURM_PROCID",
        local_index="SLURM_LOCALID",
        local_count="SLURM_STEP_TASKS_PER_NODE",
        beside=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        address=_slurm_address,
        started_by=r".*\bslurmstepd\b(?!.*\.(batch|extern)\b)",  # a batch script inherits the step that it was submitted from
    ),
    Scheduler("a Slurm job", count="SLURM_NTASKS", beside=("SLURM_JOB_ID",), never="only srun starts its tasks"),
    Scheduler(
        "PyTorch",  # by PyTorchJob of Kubernetes, accelerate, DeepSpeed, or a script
        count="WORLD_SIZE",
        index="RANK",
        local_index="LOCAL_RANK",
        local_count="LOCAL_WORLD_SIZE",
        beside=("RANK", "MASTER_ADDR", "MASTER_PORT"),
    ),
    Scheduler(
        "Kubernetes",  # an Indexed Job; its API knows the count and the pods
        count="",
        index="JOB_COMPLETION_INDEX",
        beside=("KUBERNETES_SERVICE_HOST",),
        method="k8s",
        package="kubernetes",
    ),
    Scheduler("PMIx", count="", index="PMIX_RANK", never=f"no variable of PMIx counts the processes; {WAY_OUT}"),
)
