"""Trains a language model from a config. This module is the command line `python -m zerojax.train`; `train` lists its phases in order.

python -m zerojax.train --config configs/zero3.py --workdir runs/mine --config.steps=50
"""

import contextlib
import functools
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from zerojax import display, errors
from zerojax.checkpoint import checkpointer
from zerojax.data import batches, source
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError
from zerojax.launch import devices, processes, signals, start_up
from zerojax.plan import report as plan_report
from zerojax.plan import step_plan
from zerojax.profile import profiler
from zerojax.trainer import command, loop, memory_guard, metrics, progress, results, resume, workdir
from zerojax.trainer import config as config_lib
from zerojax.trainer import health as health_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import recorder as recorder_lib
from zerojax.zero import memory
from zerojax.zero.offload import budget, kept

INTERRUPTED = 130  # the exit status of a command that SIGINT ends
STEPS_BEFORE_COMPARING = 2  # a program reaches its peak memory in its first steps

flags.declare_key_flag("config")  # for --help, which lists the flags of this module
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for all files of the run. A folder that holds a run resumes it."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, to join processes without a scheduler."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes in the run.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "This process's number, from 0.")


def main() -> None:
    """Parses the command line and trains. An invalid input ends the process with one line and status 2."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the checkpointer reports a failed write, once
    sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)
    try:
        config = config_lib.from_dict(command.parse(sys.argv))
        start_up.keep_every_program()
        if pinned := program_lib.most_pinned_bytes(config):
            start_up.size_pinned_pool(budget.pool_size_gb(pinned / (_NUM_PROCESSES.value or 1)))
        emulated = devices.emulate_cpu_devices(config.emulate_devices)
        processes.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        if emulated:
            say(f"no accelerator found: emulating {jax.local_device_count()} CPU devices")
        folder = _choose_workdir()
        with workdir.held(folder):
            train(config, folder)
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
    """Runs all phases of a training run in `folder`."""
    say(f"devices: {devices.describe()}; everything goes to {folder}")
    _check_folder(config, folder)
    start_up.wake_devices()
    config = config_lib.with_scratch(config, folder / workdir.OFFLOAD)

    tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
    program = _build(config, tokenizer)
    streams = program_lib.open_feed(program, tokenizer, _prepare_data(config, folder))
    keep = config.checkpoint
    saver = checkpointer.Checkpointer(folder / workdir.CHECKPOINTS, keep_last=keep.keep_last, keep_best=keep.keep_best)
    start = resume.find(program, saver, streams, folder, steps=config.steps)
    if start.saved is not None and not saver.has_checksums(start.step):
        say(f"checkpoint {start.step} was saved without checksums: only the sizes of its files could be checked")
    if start.saved is not None and resume.rescales(program, start.saved):
        say("the loss scale is reset: config.loss_scale has another initial scale than before")

    health = _open_health(config, program, saver, start)
    with signals.StopSignal() as stop, _open_recorder(config, program, health, folder, start) as recorder:
        plan = _compile(program, recorder, folder, start) if start.step < config.steps else None
        with memory_guard.explained(program, plan), _open_profiler(config, folder) as profile:
            end = loop.run(
                plan,
                functools.partial(_first_state, config, program, saver, folder, start, recorder),
                start.step,
                when=_when(config),
                streams=streams,
                evaluate=functools.partial(program_lib.held_out_loss, program, streams),
                checkpoints=loop.Checkpoints(saver, resume.meta(program)),
                recorder=recorder,
                profile=profile,
                stop=stop,
            )
    if end.is_stopped:
        return say(f"stopped by a signal at step {end.step}, saved; the same command resumes")

    if skipped := health.summary():
        say(skipped)
    if config.sample.length:
        text = results.sample(program, tokenizer, end.state.params, **vars(config.sample), seed=config.seed)
        say(f"a sample, from {config.sample.prompt!r}:\n{text}")
    saver.close()
    streams.close()
    if processes.is_primary():
        results.draw(folder)
    if config.export.format == "huggingface":
        results.export(program, end.state, folder / "export")
        say(f"weights exported to {folder / 'export'}")
    return say(f"done: {folder}")


def say(text: str) -> None:
    """Prints a line on the primary process."""
    if processes.is_primary():
        print(text, flush=True)


def _check_folder(config: config_lib.Config, folder: pathlib.Path) -> None:
    """Refuses a folder that holds another run, and a profile of steps that the run does not have. Names files that are lost."""
    workdir.check(folder, config_lib.to_dict(config))
    for line in workdir.lost(folder):
        say(line)
    others = {"evaluate": config.evaluate.every, "checkpoint": config.checkpoint.every}
    profiler.check(config.profile.start, config.profile.steps, config.steps, others)


def _build(config: config_lib.Config, tokenizer: tokenizer_lib.Tokenizer) -> program_lib.Program:
    """Returns the program, from the mesh to the sharded train step, and prints its memory table. Allocates nothing."""
    with start_up.without_collector():
        program = program_lib.build(config, tokenizer_vocab=tokenizer.vocab_size)
    if program.source is not None:
        say(f"the model is that of {program.source.path}; config.model.preset is not read")
    accumulates = program.sizes.grad_accum > 1
    say(display.as_text(memory.memory_table(program.partition, program.baseline, accumulates, by_hand=True)))
    say(memory.per_parameter_line(program.partition, config.precision, config.optimizer.moments))
    if line := kept.line(program.partition):
        say(line)
    return program


def _prepare_data(config: config_lib.Config, folder: pathlib.Path) -> pathlib.Path:
    """Prepares the dataset on the primary process, and returns its folder."""
    data_dir = pathlib.Path(config.data.dir or folder / "datasets")
    if config.data.name != batches.RANDOM:
        if processes.is_primary():
            source.prepare(config.data.name, data_dir)
        processes.barrier("data")
    return data_dir


def _open_health(
    config: config_lib.Config, program: program_lib.Program, saver: checkpointer.Checkpointer, start: resume.Start
) -> health_lib.Health:
    return health_lib.Health(
        program.partition.abstract_state.params,
        saver,
        start=start.step,
        learning_rate=config.optimizer.learning_rate,
        min_scale=config.loss_scale.min_scale,
    )


@contextlib.contextmanager
def _open_recorder(
    config: config_lib.Config,
    program: program_lib.Program,
    health: health_lib.Health,
    folder: pathlib.Path,
    start: resume.Start,
) -> Iterator[recorder_lib.Recorder]:
    """Opens the log and the display, and closes both at the end of the block."""
    is_primary = processes.is_primary()
    log = metrics.MetricsLog(folder, enabled=is_primary)
    shown = progress.Progress(config.steps, start=start.step, log_every=config.log_every, enabled=is_primary)
    tokens = program.sizes.global_batch_size * config.seq_len
    with log, shown:
        yield recorder_lib.Recorder(log, shown, health, tokens=tokens, is_logged=_when(config).logs)


def _open_profiler(config: config_lib.Config, folder: pathlib.Path) -> profiler.Profiler:
    traced = config.profile
    return profiler.Profiler(folder, traced.start, traced.steps, enabled=processes.is_primary())


def _when(config: config_lib.Config) -> loop.When:
    return loop.When(
        steps=config.steps,
        log_every=config.log_every,
        evaluate_every=config.evaluate.every,
        save_every=config.checkpoint.every,
        saves_at_end=config.checkpoint.at_end,
    )


def _compile(
    program: program_lib.Program, recorder: recorder_lib.Recorder, folder: pathlib.Path, start: resume.Start
) -> step_plan.Plan:
    """Compiles the step and returns its plan. Prints the plan, and compares it with the measured peak after the first steps."""
    with start_up.without_collector():
        plan = memory_guard.compile_step(program)
    recorder.say(f"compiled in {plan.compile_seconds:.1f} s; {plan_report.verdict(plan)}")
    if processes.is_primary():
        memory_guard.write(folder, program, plan, None)

    def compare() -> None:
        measured = metrics.device_memory().get("device_peak_bytes")
        recorder.say(memory_guard.compared(plan, measured))
        if processes.is_primary():
            memory_guard.write(folder, program, plan, measured)

    recorder.after(start.step + STEPS_BEFORE_COMPARING, compare)
    return plan


def _first_state(
    config: config_lib.Config,
    program: program_lib.Program,
    saver: checkpointer.Checkpointer,
    folder: pathlib.Path,
    start: resume.Start,
    recorder: recorder_lib.Recorder,
) -> Any:
    """Initialises the state with its shardings or restores it, and writes the config: the folder now belongs to this run."""
    if start.saved is None:
        with start_up.without_collector():
            state = program_lib.init_state(program)
    else:
        state = resume.state(program, saver, start.step, start.saved)
    if processes.is_primary():
        workdir.save(folder, config_lib.to_dict(config))
    held = display.human(memory.measured_bytes(state, jax.local_devices()[0]))
    counted = f"{held} of state on each device, counted from its arrays"
    recorder.say(f"starts at step {start.step} of {config.steps}; {counted}")
    recorder.open(start.step, is_over=start.step == config.steps)
    return state


def _leave_unheard(line: str) -> None:
    """Ends the process when stdout cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout at exit
    print(f"zerojax: {line}", file=sys.stderr, flush=True)
    processes.leave(2)


def _report_unraisable(report: Callable[[Any], object], unraisable: Any) -> None:
    """Drops errors of writes in flight after another write fails and closes Orbax's event loop. The first error is reported."""
    if str(unraisable.exc_value) != "Event loop is closed":
        report(unraisable)


def _choose_workdir() -> pathlib.Path:
    """Returns --workdir, or a new folder named after the config and the time."""
    if _WORKDIR.value == "":
        raise UserError("--workdir: is empty; name a folder, or omit the flag for a new one under runs/")
    if _WORKDIR.value:
        return pathlib.Path(_WORKDIR.value).resolve()
    if jax.process_count() > 1:
        raise UserError("--workdir: a run of several processes needs a folder that all of them can reach; name it")
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    return pathlib.Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()


if __name__ == "__main__":
    main()
