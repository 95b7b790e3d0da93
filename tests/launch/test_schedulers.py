"""Checks who started a process, as which of how many. This module tests zerojax.launch.schedulers.

The variables and titles are those that Slurm 22.05, Open MPI 4.1 and 5.0, MPICH 5.0 and torchrun 2.13 give their processes.
"""

import subprocess
import sys

import programs
import pytest

from zerojax.errors import UserError
from zerojax.launch import schedulers
from zerojax.launch.schedulers import Cluster

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
BATCH = {"SLURM_JOB_ID": "78", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
INTERACTIVE = {
    **STEP,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OMPI4 = {**OMPI, "OMPI_MCA_orte_hnp_uri": "1935540224.0;tcp://192.0.2.2,10.0.0.2:37283;tcp6://[fd00::2]:57525"}
OMPI5 = {**OMPI, "PMIX_NAMESPACE": "prterun-node-1-8586@1", "PMIX_RANK": "2"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
ENV = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "23456"}
LAUNCHED = {"ZEROJAX_COORDINATOR": "[fd00::1]:1234", "ZEROJAX_NUM_PROCESSES": "4", "ZEROJAX_PROCESS_ID": "3"}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
STEPD, ORTED, HYDRA_PROXY, SSHD = "slurmstepd: [77.0]", "/usr/bin/orted", "/opt/hydra_pmi_proxy", "sshd: me@notty"

SLURM_PORT, OMPI4_PORT, OMPI5_PORT, TORCH_PORT = (
    61440 + 77,
    61440 + 1935540224 // 4096 % 4096,
    61440 + 8586 % 4096,
    61440 + 29500 % 4096,
)
TASK = Cluster(f"node001:{SLURM_PORT}", 4, 3, (1,))
OMPI_TASK = Cluster(f"192.0.2.2:{OMPI4_PORT}", 4, 2, (0,))


def one_of(environ, **changes):
    """Returns the variables as the one process of its starter has them."""
    ones = ("SIZE", "NUM_TASKS", "PER_NODE", "NRANKS", "NUM_PROCESSES")
    zeros = ("RANK", "RANKID", "PROCID", "LOCALID", "PROCESS_ID")
    alone = {
        key: "1" if key.endswith(ones) else "0" if key.endswith(zeros) else value for key, value in environ.items()
    }
    return alone | changes


@pytest.mark.parametrize(
    "environ, above, name, cluster",
    [
        ({}, [], "", None),
        # Slurm
        (STEP, ["bash", STEPD], "Slurm", TASK),
        (STEP, [], "Slurm", TASK),  # in a container with process numbers of its own
        (STEP, ["bash", "slurmstepd: [77+1.0]"], "Slurm", TASK),
        ({**STEP, "CUDA_VISIBLE_DEVICES": "5"}, [STEPD], "Slurm", Cluster(f"node001:{SLURM_PORT}", 4, 3, (0,))),
        ({**STEP, "JAX_LOCAL_DEVICE_IDS": "2,3"}, [STEPD], "Slurm", Cluster(f"node001:{SLURM_PORT}", 4, 3)),
        ({**STEP, "JAX_COORDINATOR_PORT": "9"}, [STEPD], "Slurm", Cluster("node001:9", 4, 3, (1,))),
        ({**STEP, "JAX_COORDINATOR_ADDRESS": "other:9"}, [STEPD], "Slurm", Cluster("other:9", 4, 3, (1,))),
        # alone on its host, a task takes all GPUs; all on one host, they need no name of it
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, [STEPD], "Slurm", Cluster(f"node001:{SLURM_PORT}", 4, 3)),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x2),2"}, [STEPD], "Slurm", TASK),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, [STEPD], "Slurm", Cluster(f"127.0.0.1:{SLURM_PORT}", 4, 3, (1,))),
        (BATCH, ["/bin/bash", "slurmstepd: [78.batch]"], "", None),
        ({**STEP, **BATCH}, ["slurmstepd: [78.batch]"], "", None),  # that a task of another job submitted
        (INTERACTIVE, ["/bin/bash", "slurmstepd: [77.interactive]"], "Slurm", None),
        ({**one_of(STEP), "SLURM_NTASKS": "1"}, ["bash", STEPD], "Slurm", None),  # srun bash, and a run from there
        (STEP, ["bash", SSHD], "", None),
        # Open MPI
        (OMPI4, ["bash", ORTED, SSHD], "Open MPI", OMPI_TASK),
        (OMPI4, ["mpispawn", SSHD], "Open MPI", OMPI_TASK),
        (OMPI5, ["prterun"], "Open MPI", Cluster(f"node-1:{OMPI5_PORT}", 4, 2, (0,))),
        ({**OMPI4, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, [], "Open MPI", Cluster(f"127.0.0.1:{OMPI4_PORT}", 4, 2, (0,))),
        ({**OMPI, "OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fd00::2,fd00::3]:5"}, [], "Open MPI", Cluster("[fd00::2]:61441", 4, 2, (0,))),
        (one_of(OMPI4), ["mpirun"], "Open MPI", None),
        ({"OMPI_MCA_btl": "tcp"}, [], "", None),  # a setting, not a task
        ({**STEP, **OMPI4}, [ORTED, STEPD], "Open MPI", OMPI_TASK),  # mpirun in a Slurm job
        ({**STEP, **one_of(OMPI4)}, [STEPD, "mpirun"], "Slurm", TASK),  # srun in a shell of mpirun
        ({**OMPI4, **BATCH}, ["slurmstepd: [78.batch]"], "", None),  # sbatch in a task of mpirun
        # MPICH and Intel MPI; Slurm's pmi2 sets two of their variables
        ({**HYDRA, **ENV}, [HYDRA_PROXY], "MPICH", Cluster("127.0.0.1:23456", 2, 1, (1,))),
        ({**HYDRA, "JAX_COORDINATOR_ADDRESS": "a:1"}, [HYDRA_PROXY, SSHD], "MPICH", Cluster("a:1", 2, 1, (1,))),
        (one_of(HYDRA), [HYDRA_PROXY], "MPICH", None),
        ({**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"}, [STEPD], "Slurm", TASK),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "PALS_RANKID": "1", **ENV}, [], "PALS", Cluster("node0:23456", 2, 1)),
        # torchrun, in whatever job; and its names where it did not start the process
        (TORCHRUN, [], "torchrun", Cluster(f"node0:{TORCH_PORT}", 4, 3, (1,))),
        ({**STEP, **TORCHRUN}, ["pt_elastic", STEPD], "torchrun", Cluster(f"node0:{TORCH_PORT}", 4, 3, (1,))),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, [], "torchrun", Cluster(f"node0:{TORCH_PORT}", 4, 3)),
        (one_of(TORCHRUN), [], "torchrun", None),
        (ENV, [SSHD], "PyTorch", Cluster("node0:23456", 2, 1)),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, [], "", None),
        ({**ENV, "WORLD_SIZE": ""}, [], "", None),
        ({**STEP, "WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, [STEPD], "Slurm", TASK),
        # what is told explicitly comes first
        ({**STEP, **OMPI4, **TORCHRUN, **JAX, **LAUNCHED}, [ORTED], "zerojax launch", Cluster("[fd00::1]:1234", 4, 3)),
        ({**STEP, **TORCHRUN, **JAX}, [STEPD], "JAX", Cluster("node0:1234", 2, 1)),
        ({**STEP, **one_of(LAUNCHED)}, [STEPD], "zerojax launch", None),
        ({"PMIX_RANK": "1"}, [], "", None),
    ],
)  # fmt: skip
def test_the_first_row_that_is_not_left_over_decides(environ, above, name, cluster):
    found = schedulers.find(environ, above)
    assert (found.name, found.cluster, found.method) == (name, cluster, "")


@pytest.mark.parametrize(
    "environ, above, note",
    [
        ({}, [], ""),
        (STEP, [STEPD], ""),
        (one_of(TORCHRUN), [], ""),
        ({**STEP, **one_of(LAUNCHED)}, [STEPD], ""),
        (BATCH, ["slurmstepd: [78.batch]"], "SLURM_NTASKS=4 has no effect (only srun starts its tasks)"),
        (INTERACTIVE, [], ", by SLURM_STEP_NUM_TASKS=1 of Slurm: SLURM_NTASKS=4 has no effect (only srun starts its tasks)"),
        (
            STEP | BATCH,
            ["slurmstepd: [78.batch]"],
            "SLURM_STEP_NUM_TASKS=4 has no effect (left over from a job around this one, as 'slurmstepd: [78.batch]' started this process)"
            "; SLURM_NTASKS=4 has no effect (only srun starts its tasks)",
        ),
        (OMPI4, [STEPD], f"OMPI_COMM_WORLD_SIZE=4 has no effect (left over from a job around this one, as '{STEPD}' started this process)"),
        (
            {**STEP, **one_of(TORCHRUN)},
            [STEPD],
            ", by WORLD_SIZE=1 of torchrun: SLURM_STEP_NUM_TASKS=4 has no effect; SLURM_NTASKS=4 has no effect (only srun",
        ),
        (POD, [], "JOB_COMPLETION_INDEX=1 has no effect (the package kubernetes is not installed; set --coordinator"),
        ({**POD, **one_of(TORCHRUN)}, [], ""),
        ({"PMIX_RANK": "1"}, [], "PMIX_RANK=1 has no effect (no variable of PMIx counts the processes; set --coordinator"),
    ],
)  # fmt: skip
def test_a_process_that_is_alone_beside_what_says_otherwise_is_told_why(environ, above, note, monkeypatch):
    monkeypatch.setattr(schedulers.importlib.util, "find_spec", lambda name: None)
    found = schedulers.find(environ, above).note
    assert found.startswith("launch: this is one process") if note else found == ""
    assert note in found


def test_an_indexed_job_of_kubernetes_is_asked_through_jax(monkeypatch):
    monkeypatch.setattr(schedulers.importlib.util, "find_spec", lambda name: object())
    assert schedulers.find(POD, []) == schedulers.Origin("Kubernetes", method="k8s")
    assert schedulers.find({**POD, **ENV}, []).name == "PyTorch"  # PyTorchJob says it all
    assert schedulers.find({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, []) == schedulers.Origin("")


@pytest.mark.parametrize(
    "environ, message",
    [
        ({**STEP, "SLURM_PROCID": "4"}, "SLURM_PROCID of Slurm must be a number from 0, below SLURM_STEP_NUM_TASKS=4, and is '4'; "),
        ({**STEP, "SLURM_PROCID": "-1"}, "launch: SLURM_PROCID of Slurm must be a number from 0, below"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "four"}, "launch: SLURM_STEP_NUM_TASKS of Slurm must be a number from 1, and is 'four'; unset"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS of Slurm must be a number from 1"),
        ({**STEP, "SLURM_LOCALID": "x"}, "SLURM_LOCALID of Slurm must be a number from 0, and is 'x'"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "launch: OMPI_COMM_WORLD_RANK of Open MPI is missing; set --coordinator, --num_processes and"),
        (OMPI, "launch: Open MPI (OMPI_COMM_WORLD_SIZE=4) gives no address of process 0; set JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        ({**OMPI, "OMPI_MCA_orte_hnp_uri": "what?"}, "gives no address of process 0"),
        ({**OMPI, "PMIX_NAMESPACE": "slurm.pmix.7.0"}, "gives no address of process 0"),
        (HYDRA, "launch: MPICH (PMI_SIZE=2) gives no address of process 0"),
        ({**JAX, "JAX_PROCESS_ID": "2"}, "launch: JAX_PROCESS_ID of JAX must be a number from 0, below JAX_NUM_PROCESSES=2"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "node0"}, "the address of process 0 (JAX_COORDINATOR_ADDRESS): must be HOST:PORT"),
        ({**STEP, "JAX_COORDINATOR_PORT": "x"}, "the address of process 0 (JAX_COORDINATOR_PORT): must be HOST:PORT"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "launch: torchrun (WORLD_SIZE=4) gives no address of process 0"),
        ({**ENV, "WORLD_SIZE": "two"}, "launch: WORLD_SIZE of PyTorch must be a number from 1"),
        ({**LAUNCHED, "ZEROJAX_PROCESS_ID": "9" * 5000}, "launch: ZEROJAX_PROCESS_ID of zerojax launch must be"),
    ],
)  # fmt: skip
def test_variables_that_contradict_each_other_are_one_line(environ, message):
    with pytest.raises(UserError) as caught:
        schedulers.find(environ, [])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_docs_name_the_variables_of_each_row():
    text = (programs.ROOT / "docs" / "multi_host.md").read_text()
    for row in schedulers.TABLE:
        assert {name for name in (row.count, row.index) if f"`{name}`" not in text} <= {""}, row.name


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node001", "node001"),
        ("a-1,b[2-3]", "a-1"),
        ("node[001-0015],host2", "node001"),
        ("node[7,009-015],host2", "node7"),
        ("r[1-2]n[05-08].ib", "r1n05.ib"),
    ],
)
def test_the_first_host_of_slurms_list_is_that_of_process_0(nodes, first):
    assert schedulers.find({**STEP, "SLURM_STEP_NODELIST": nodes}, []).cluster.coordinator == f"{first}:{SLURM_PORT}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_titles_above_a_process_begin_with_the_nearest():
    program = "import sys; from zerojax.launch import schedulers; print(*schedulers.titles(2), sep='|')"
    words = ["slurmstepd: [77.0]", "-c", '"$0" -c "$1"; exit $?', sys.executable, program]
    done = subprocess.run(words, executable="/bin/sh", check=True, text=True, capture_output=True)
    assert done.stdout.split("|")[0] == "slurmstepd: [77.0]"
