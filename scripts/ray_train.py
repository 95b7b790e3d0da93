"""Trains on a Ray cluster, by Ray Train's JaxTrainer. This script runs the trainer in each of Ray's workers.

    pip install -e '.[ray]'
    python scripts/ray_train.py --workers 32 --gpus 1 --max_failures 20 -- --config configs/llama3_8b.py --workdir /shared/runs/a
    JAX_PLATFORMS=cpu python scripts/ray_train.py --workers 2 -- --config configs/zero3.py --workdir /tmp/runs/b --config.emulate_devices=4

Ray places the workers and gives each its GPUs, and zerojax joins them. All of them read the same files, so --workdir is on a file system
that all hosts share. A worker that fails, or whose host is gone, ends the others; Ray starts all again, and the run resumes from its last
checkpoint.
"""

import argparse
import os
import pathlib
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Any

import bench_child  # in this folder

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str]) -> int:
    """Checks the settings, trains, and returns the exit status: 1 if the last start failed too, 2 for wrong settings."""
    options, words = parse(arguments)
    sys.path.insert(0, str(ROOT))
    from zerojax import errors

    try:
        settings(words)
    except errors.UserError as error:
        print(f"zerojax: {error}", file=sys.stderr)
        return 2
    from ray import train as ray_train
    from ray.train.v2 import jax as ray_jax

    use_gpu = options.gpus > 0
    resources = {"CPU": options.cpus} | ({"GPU": options.gpus} if use_gpu else {})
    environ = {"PYTHONPATH": bench_child.python_path()}
    environ |= {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "NCCL_"))}
    trainer = ray_jax.JaxTrainer(
        run_worker,
        train_loop_config={"words": words},
        jax_config=ray_jax.JaxConfig(),  # which leaves joining the workers, and which GPUs a worker sees, to others
        scaling_config=ray_train.ScalingConfig(
            num_workers=options.workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=ray_train.RunConfig(
            name=pathlib.Path(workdir_of(words)).name,
            storage_path=str(pathlib.Path(workdir_of(words)).absolute() / "ray"),
            failure_config=ray_train.FailureConfig(max_failures=options.max_failures),
            worker_runtime_env={"env_vars": environ},
        ),
    )
    try:
        trainer.fit()
    except Exception as error:  # of any worker, through Ray
        print(f"zerojax: the run failed ({errors.first_line(error)}); the same command resumes", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this script's options, and the trainer's words after "--"."""
    parser = argparse.ArgumentParser(
        description="Trains on a Ray cluster. After --: the flags of python -m zerojax.train."
    )
    parser.add_argument("--workers", type=int, required=True, help="processes; one for each GPU is fastest")
    parser.add_argument("--gpus", type=int, default=0, help="of each worker; 0: CPU devices, with JAX_PLATFORMS=cpu")
    parser.add_argument("--cpus", type=int, default=1, help="that Ray counts for each worker")
    parser.add_argument("--max_failures", type=int, default=0, help="starts after the first one; -1: any number")
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser.parse_args(arguments[:at]), list(arguments[at + 1 :])
    if options.gpus == 0 and os.environ.get("JAX_PLATFORMS") != "cpu":
        parser.error("--gpus: is 0, and JAX_PLATFORMS is not cpu; give each worker a GPU, or set JAX_PLATFORMS=cpu")
    if not workdir_of(words):
        parser.error("--workdir: is missing after --; name a folder that all hosts share")
    return options, words


def workdir_of(words: Sequence[str]) -> str:
    """Returns the value of --workdir."""
    for number, word in enumerate(words):
        if word.startswith("--workdir="):
            return word.partition("=")[2]
        if word == "--workdir":
            return words[number + 1] if number + 1 < len(words) else ""
    return ""


def settings(words: Sequence[str]) -> Any:
    """Returns the checked config of the trainer's words. Once a process.

    Raises:
      UserError: they are wrong.
    """
    from zerojax import train  # noqa: F401 (its flags)
    from zerojax.trainer import command, config

    sys.argv = ["zerojax train", *words]
    return config.from_dict(command.parse(sys.argv))


def run_worker(given: dict[str, Any]) -> None:
    """Joins the other workers and trains, in one of Ray's workers."""
    from ray import train as ray_train
    from ray import util
    from ray.train import collective

    from zerojax import train
    from zerojax.launch import devices, processes
    from zerojax.trainer import workdir

    os.chdir(ROOT)
    config = settings(given["words"])
    devices.emulate_cpu_devices(config.emulate_devices)
    here = ray_train.get_context()
    drawn = f"{util.get_node_ip_address()}:{free_port()}", secrets.token_hex(32)
    address, os.environ["ZEROJAX_SECRET"] = collective.broadcast_from_rank_zero(drawn)
    if here.get_world_size() > 1:
        processes.initialize(address, here.get_world_size(), here.get_world_rank())
    folder = pathlib.Path(workdir_of(given["words"])).absolute()
    with workdir.held(folder):
        train.train(config, folder)
    processes.barrier("the end of the run")  # a worker that is gone would end those that still work


def free_port() -> int:
    """Returns a port that is free on this host."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
