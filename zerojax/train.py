"""Trains a language model as a config says. This module is the command line `python -m zerojax.train`; it reads as a list of chapters.

python -m zerojax.train --config configs/zero3.py --workdir runs/mine --config.steps=50
"""

import functools
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from zerojax import display, errors
from zerojax.checkpoint import checkpointer
from zerojax.data import batches, source
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError
from zerojax.interop import huggingface
from zerojax.launch import devices, processes, start_up
from zerojax.profile import profiler
from zerojax.trainer import command, loop, metrics, resume, workdir
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.zero import memory

INTERRUPTED = 130  # the status of a command that SIGINT ended

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all that the run writes; one that holds a run resumes it.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, to join processes by hand.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes in the run.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "This process's number, from 0.")


def main() -> None:
    """Parses the command line and trains; a wrong input ends with one line and status 2."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a failed write is told by the checkpointer, once
    sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)
    try:
        config = config_lib.from_dict(command.parse(sys.argv))
        start_up.keep_every_program()
        emulated = devices.emulate_cpu_devices(config.emulate_devices)
        processes.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        if emulated:
            say(f"no accelerator found: emulating {jax.local_device_count()} CPU devices")
        train(config, _choose_workdir())
    except UserError as error:
        print(f"zerojax: {error}", file=sys.stderr, flush=True)
        processes.leave(2)
    except BrokenPipeError:
        _leave_unheard("stdout is closed; the same command resumes from the last checkpoint")
    except OSError as error:
        if not errors.is_disk_full(error):
            raise
        where = error.filename or "stdout, or another file of the run"
        _leave_unheard(f"{where}: no space left on the device; make room, then run again to resume")
    except KeyboardInterrupt:
        print("zerojax: interrupted; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        processes.leave(INTERRUPTED)
    processes.leave(0)


def train(config: config_lib.Config, folder: pathlib.Path) -> None:
    """Runs all chapters of a training in `folder`."""
    program, run, first_state, done = prepare(config, folder)
    state, finished = run.train(first_state, start=done)
    if not finished:
        return say(f"stopped by a signal at step {run.step}, saved; the same command resumes")
    run.finish(state)
    if config.export.format == "huggingface":
        params = resume.logical_params(program, state)
        huggingface.export(params, program.family, program.model, folder / "export")
        say(f"weights exported to {folder / 'export'}")
    say(f"done: {folder}")
    return None


def prepare(
    config: config_lib.Config, folder: pathlib.Path
) -> tuple[program_lib.Program, loop.Run, Callable[[], Any], int]:
    """Returns the program, a run of it, what makes its first state or takes its saved one, and the steps done."""
    say(f"devices: {devices.describe()}; everything goes to {folder}")
    settings = config_lib.to_dict(config)
    workdir.check(folder, settings)
    others = {"evaluate": config.evaluate.every, "checkpoint": config.checkpoint.every}
    profiler.check(config.profile.start, config.profile.steps, config.steps, others)
    start_up.wake_devices()

    tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
    with start_up.without_collector():
        program = program_lib.build(config, tokenizer_vocab=tokenizer.vocab_size)
    accumulates = program.sizes.grad_accum > 1
    say(display.as_text(memory.memory_table(program.partition, program.baseline, accumulates, by_hand=True)))
    say(memory.per_parameter_line(program.partition, config.precision, config.optimizer.moments))

    data_dir = pathlib.Path(config.data.dir or folder / "datasets")
    if config.data.name != batches.RANDOM:
        if processes.is_primary():
            source.prepare(config.data.name, data_dir)
        processes.barrier("data")
    streams = program_lib.open_feed(program, tokenizer, data_dir)

    saver = checkpointer.Checkpointer(
        folder / "checkpoints", keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
    )
    done = saver.latest_step()
    if (done or 0) > config.steps:
        raise UserError(
            f"config.steps: is {config.steps}, and the run in {folder} is at step {done}; set --config.steps={done} "
            "or more, or choose another --workdir"
        )
    if done is not None:
        saved = resume.check(program, saver, done, streams)
        if processes.is_primary() and (folder / metrics.FILE).exists():
            metrics.read(folder)  # lest a line that is none be found after compiling
        if resume.rescales(program, saved):
            say("the loss scale starts afresh: config.loss_scale sets another first one than before")

    def first_state() -> Any:
        if done is None:
            with start_up.without_collector():
                state = program_lib.init_state(program)
        else:
            state = resume.state(program, saver, done, saved)
        if processes.is_primary():
            workdir.save(folder, settings)
        return state

    return program, loop.Run(program, streams, saver, folder), first_state, done or 0


def say(text: str) -> None:
    """Prints a line on the primary process."""
    if processes.is_primary():
        print(text, flush=True)


def _leave_unheard(line: str) -> None:
    """Ends the process where stdout takes nothing more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes it once more
    print(f"zerojax: {line}", file=sys.stderr, flush=True)
    processes.leave(2)


def _report_unraisable(report: Callable[[Any], object], what: Any) -> None:
    """Drops what writes in flight say when another has failed and closed Orbax's event loop: that one's line is enough."""
    if str(what.exc_value) != "Event loop is closed":
        report(what)


def _choose_workdir() -> pathlib.Path:
    """Returns --workdir, or a new folder named after the config and the time."""
    if _WORKDIR.value == "":
        raise UserError("--workdir: is empty; name a folder, or leave the flag away for a new one under runs/")
    if _WORKDIR.value:
        return pathlib.Path(_WORKDIR.value).resolve()
    if jax.process_count() > 1:
        raise UserError("--workdir: a run of several processes needs one that all of them reach; name it")
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    return pathlib.Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()


if __name__ == "__main__":
    main()
