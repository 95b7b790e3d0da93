"""Starts N processes of one command on this host as one run. This script adds their flags and ends them together.

    python scripts/launch_local.py --processes 2 -- python -m zerojax.train --config configs/zero3.py

Each process gets `--coordinator 127.0.0.1:PORT --num_processes N --process_id I` appended. On GPUs add
--gpus_per_process 1: each process then sees one GPU, and dispatches faster than one process with all GPUs.
On CPU each process emulates its devices.

Output lines are prefixed with [I]. With --log_dir only process 0's output is shown, and others write to process_I.log in that folder.
SIGTERM and SIGINT are passed on. SIGQUIT kills all processes. If one fails, the others are ended and its status is returned. If this
script is killed, they get SIGTERM.
"""

import argparse
import contextlib
import os
import pathlib
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

# Replaces itself by the command, which keeps the request (PR_SET_PDEATHSIG = 1; Linux alone has it).
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("launch_local: was killed")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"launch_local: {sys.argv[2]}: {error.strerror}")
"""
TAIL_LINES = 20  # of a failed process's log file


def main(arguments: Sequence[str]) -> int:
    """Runs the processes and returns the exit status: that of the first failed process, or 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command; give it after --, as in: --processes 2 -- python -m zerojax.train ...")
    if options.processes < 1:
        parser.error(f"--processes: must be at least 1, and is {options.processes}")
    try:
        environments = [
            child_environment(os.environ, index, options.processes, options.gpus_per_process)
            for index in range(options.processes)
        ]
    except ValueError as error:
        parser.error(str(error))
    flags = ["--coordinator", f"127.0.0.1:{_free_port()}", "--num_processes", str(options.processes)]
    with contextlib.ExitStack() as stack:
        children, readers = [], []
        stack.callback(_end, children, 0)
        _forward_signals(children, stack)
        for index, environment in enumerate(environments):
            child = _start([*command, *flags, "--process_id", str(index)], environment)
            children.append(child)
            out = stack.enter_context(_output(index, options.log_dir))
            prefix = f"[{index}] " if out is sys.stdout else ""
            readers.append(threading.Thread(target=_copy, args=(child.stdout, out, prefix), daemon=True))
            readers[-1].start()
        failed = _wait(children)
        _end(children, options.grace_seconds)
        for reader in readers:
            reader.join(timeout=5)
    return 0 if failed is None else _report(failed, children[failed].returncode, options.log_dir)


def child_environment(environ: Mapping[str, str], index: int, processes: int, gpus: int) -> dict[str, str]:
    """Returns the environment of process `index`, which sees only its own `gpus` GPUs (0: all).

    Raises:
      ValueError: CUDA_VISIBLE_DEVICES lists fewer GPUs than the processes need.
    """
    environment = {**environ, "PYTHONUNBUFFERED": "1"}
    if not gpus:
        return environment
    needed = processes * gpus
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(needed)] if visible is None else visible.split(",")
    if len(names) < needed:
        raise ValueError(
            f"--gpus_per_process: {processes} processes with {gpus} each need {needed} GPUs, and "
            f"CUDA_VISIBLE_DEVICES={visible} lists {len(names)}; ask for fewer"
        )
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(names[index * gpus : (index + 1) * gpus])}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="how many to start")
    parser.add_argument("--gpus_per_process", type=int, default=0, help="GPUs that each process sees; 0: all")
    parser.add_argument("--log_dir", type=pathlib.Path, help="folder for the output of all processes but 0")
    parser.add_argument(
        "--grace_seconds", type=float, default=10, help="from SIGTERM to SIGKILL after a process failed"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    return parser


def _free_port() -> int:
    """Returns a port that was free a moment ago, below those that Linux gives to outgoing connections."""
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
    """Starts one process in its own session, so that a terminal's Ctrl-C reaches it once, through this script.

    If this script is killed, the kernel sends the process SIGTERM.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", ENDS_WITH_PARENT, str(os.getpid()), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _output(index: int, log_dir: pathlib.Path | None) -> contextlib.AbstractContextManager[TextIO]:
    """Returns the output of process `index`: this script's stdout, or a log file."""
    if index == 0 or log_dir is None:
        return contextlib.nullcontext(sys.stdout)
    log_dir.mkdir(parents=True, exist_ok=True)
    return open(_log_file(log_dir, index), "w", encoding="utf-8")


def _log_file(log_dir: pathlib.Path, index: int) -> pathlib.Path:
    return log_dir / f"process_{index}.log"


def _copy(source, out: TextIO, prefix: str) -> None:
    """Copies lines until the process and its children close the pipe."""
    with source:
        for line in source:
            out.write(prefix + line.decode(errors="replace").rstrip("\n") + "\n")
            out.flush()


def _forward_signals(children: list[subprocess.Popen], stack: contextlib.ExitStack) -> None:
    """Passes SIGTERM and SIGINT on to the children, which decide when to end, and kills them on SIGQUIT, until `stack` closes."""

    def forward(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(signal.SIGKILL if number == signal.SIGQUIT else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        stack.callback(signal.signal, number, signal.signal(number, forward))


def _wait(children: list[subprocess.Popen]) -> int | None:
    """Waits until all end or one fails. Returns the index of the first that failed."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def watch(index: int) -> None:
        children[index].wait()
        ended.put(index)

    for index in range(len(children)):
        threading.Thread(target=watch, args=(index,), daemon=True).start()
    for _ in children:
        index = ended.get()
        if children[index].returncode:
            return index
    return None


def _end(children: list[subprocess.Popen], grace_seconds: float) -> None:
    """Terminates running children, and kills them after `grace_seconds`."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    deadline = time.monotonic() + grace_seconds
    for child in running:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _report(index: int, returncode: int, log_dir: pathlib.Path | None) -> int:
    """Prints which process failed and the end of its log file, if any. Returns its status."""
    status = returncode if returncode > 0 else 128 - returncode
    how = f"status {status}" if returncode > 0 else signal.Signals(-returncode).name
    print(f"launch_local: process {index} ended with {how}; ended the others", file=sys.stderr)
    if index and log_dir is not None:
        path = _log_file(log_dir, index)
        print(f"launch_local: the end of {path}:", file=sys.stderr)
        print("\n".join(path.read_text(encoding="utf-8").splitlines()[-TAIL_LINES:]), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
