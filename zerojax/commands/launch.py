"""Starts a command on every GPU of one or several hosts. This module is the command line `zerojax launch`, with DeepSpeed's options.

zerojax launch -- python -m zerojax.train --config configs/zero3.py --workdir runs/a                          this host
zerojax launch --hostfile hosts --max_restarts 5 --log_dir logs -- python -m zerojax.train ...                 several, by ssh
zerojax launch --hostfile hosts --include worker-0@worker-1:0,2 -- python train.py                             some of their GPUs

Output lines begin with [host:rank].
"""

import argparse
import os
import re
import sys

from zerojax.cluster import supervisor
from zerojax.commands import arguments
from zerojax.errors import UserError

# Options of DeepSpeed's launcher that have another form here
DEEPSPEED = {
    "--master_addr": "--coordinator HOST",
    "--master_port": "--coordinator HOST:PORT",
    "--ssh_port": '--ssh_options "-p PORT"',
    "--enable_each_rank_log": "--log_dir FOLDER",
    "--min_elastic_nodes": "--min_nodes N with --max_restarts N",
    "--max_elastic_nodes": "--num_nodes N",
    "--elastic_training": "--min_nodes N with --max_restarts N",
    "--module": "-- python -m MODULE",
    "--no_python": "-- COMMAND, which is started as it is",
    "--launcher": "nothing: hosts are reached by ssh; under Slurm and Kubernetes their own launchers start the command",
}


@arguments.command
def main() -> int:
    """Runs the command and ends with the status of its first failed process, or 0. Wrong arguments end with one line and status 2."""
    given = _parse(sys.argv[1:])
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise UserError(
            "no command; give it after --, as in: zerojax launch --num_gpus 2 -- python -m zerojax.train ..."
        )
    if command[0].endswith(".py") and not os.access(command[0], os.X_OK):  # as `deepspeed train.py`
        command = [given.python, *command]
    order = arguments.order(given, command, os.environ)
    if given.max_restarts and _trains(command) and not any(re.match("--?workdir($|=)", word) for word in command):
        raise UserError(
            "--max_restarts: a restart resumes from the checkpoints in --workdir, which the command lacks; name a folder"
        )
    return supervisor.Supervisor(order).run()


def _trains(command: list[str]) -> bool:
    return "zerojax.train" in command or [os.path.basename(word) for word in command[:1]] + command[1:2] == [
        "zerojax",
        "train",
    ]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax launch", "zerojax launch [options] -- COMMAND", doc=__doc__)
    arguments.add_hosts(parser)
    add = parser.add_argument
    add("--log_dir", default="", help="folder for the output of each process, HOST_RANK.log, on its host")
    add("--max_restarts", type=int, default=0, help="restarts after a failure, from the last checkpoint")
    add("--min_nodes", type=int, default=0, help="hosts that are enough to go on with (all)")
    add("--rejoin_seconds", type=float, default=60.0, help="how long a restart waits for all hosts")
    add("--grace_seconds", type=float, default=10.0, help="from SIGTERM to SIGKILL after a failure")
    add("--limits", help="seconds without progress by phase, as in step=300,compile=7200,silent=60; 0: none")
    add("command", nargs=argparse.REMAINDER, help="-- and the command")
    try:
        return parser.parse_args(argv)
    except UserError as error:
        other = re.match(r"unrecognized arguments: (--\w+)", str(error))
        if other is None or other[1] not in DEEPSPEED:
            raise
        raise UserError(f"{other[1]}: is an option of DeepSpeed's launcher; here give {DEEPSPEED[other[1]]}") from error


if __name__ == "__main__":
    main()
