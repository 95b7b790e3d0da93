"""Trains a language model from a config. This module is the command line `python -m zerojax.train`; `train` lists its phases in order.

python -m zerojax.train --config configs/zero3.py --workdir runs/mine --config.steps=50
"""

import contextlib
import dataclasses
import errno
import functools
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from zerojax import display, errors, files, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import files as step_files
from zerojax.data import feed, mixture, source
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import splits, tasks
from zerojax.errors import UserError
from zerojax.interop import hub, vllm_server
from zerojax.launch import devices, ending, processes, program_cache, signals, start_up, watch
from zerojax.plan import report as plan_report
from zerojax.plan import step_plan, targets
from zerojax.profile import profiler
from zerojax.train_state import State
from zerojax.trainer import (
    command,
    examples,
    loop,
    metrics,
    progress,
    results,
    resume,
    setting_names,
    teacher,
    trackers,
    workdir,
)
from zerojax.trainer import config as config_lib
from zerojax.trainer import health as health_lib
from zerojax.trainer import model as model_lib
from zerojax.trainer import patience as patience_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import recorder as recorder_lib
from zerojax.trainer import run_totals as tally_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import state as state_lib
from zerojax.trainer.card import document, facts
from zerojax.trainer.card import writer as card_lib
from zerojax.trainer.checks import disk_space, effects, host, memory_guard, texts
from zerojax.trainer.tuning import answers, lessons, reference, rounds
from zerojax.trainer.tuning import mixed as mixed_lib
from zerojax.trainer.tuning import rollouts as rollouts_lib
from zerojax.tree import PyTree
from zerojax.zero import state_bytes
from zerojax.zero.host import budget, storage
from zerojax.zero.host import settings as offload_settings
from zerojax.zero.pipeline import step as pipeline_step

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
    errors.warn_in_one_line(setting_names.in_config)
    checkpointer.report_failed_writes_once()
    with signals.StopSignal(has_state=False) as stop:
        watch.at(watch.START)
        ending.guard_streams((lambda error: None) if command.asks_help(sys.argv) else functools.partial(_unheard, stop))
        try:
            config = config_lib.from_dict(command.parse(sys.argv))
            kept = program_cache.begin(is_one_host=processes.are_here(*_joined_by()))
            activations = host.most_offloaded_activations(config)
            if pinned := host.most_pinned_bytes(config) + activations:
                several = processes.find_cluster(*_joined_by())
                count = several.num_processes if several else 1
                size = budget.pool_size_gb(pinned / count, budget.read_host(), count)
                # Where the config names fewer devices than there are, activations take more than is known.
                start_up.size_pinned_pool(max(size, round(xla_flags.DEFAULT_POOL_GB)) if activations else size)
            start_up.settle_environment()
            if config.deterministic:
                xla_flags.make_deterministic()
            if config.keeps_roundings:
                xla_flags.keep_roundings()
            start_up.take_memory(targets.USABLE, mapped=config.offload.params != offload_settings.NONE)
            emulated = devices.emulate_cpu_devices(config.emulate_devices)
            processes.initialize(*_joined_by())
            devices.start()
            if emulated:
                count = jax.local_device_count()
                say(f"no accelerator found: emulating {count} CPU device{'s' if count > 1 else ''}")
            if kept:
                say(kept)
            config = _refit(config)
            folder = _choose_workdir()
            with workdir.held(folder):
                end = train(config, folder, stop)
        except Exception as error:
            processes.leave_after(error if isinstance(error, UserError) else host.short(error) or error)
        if end.is_stopped and stop.cause != signals.SIGNAL:
            processes.leave(2, f"zerojax: {stop.cause}: stopped at step {end.step}, saved; the same command resumes")
        processes.leave(0)


def _joined_by() -> tuple[str | None, int | None, int | None]:
    """Returns the three flags that join processes."""
    return _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value


def _refit(config: settings_lib.Config) -> settings_lib.Config:
    """Returns the config for the processes there are. A restart of `zerojax launch` may lack hosts."""
    started = processes.launched()
    if started is None or started.full_processes == started.cluster.num_processes:
        return config
    devices_now = jax.device_count()
    fitted = config_lib.refit(config, devices_now, jax.local_device_count() * started.full_processes)
    batch = f"{fitted.global_batch_size} = {fitted.micro_batch_size} x {fitted.grad_accum} passes"
    pipe = f"mesh.pipe={fitted.mesh.pipe}, " if config.mesh.pipe > 1 else ""
    say(
        f"hosts are missing: {pipe}mesh.replica={fitted.mesh.replica}, mesh.data={fitted.mesh.data}; the global batch stays {batch}"
    )
    return fitted


@setting_names.errors_of_config()
def train(config: settings_lib.Config, folder: pathlib.Path, stop: signals.StopSignal | None = None) -> loop.End:
    """Runs all phases of a training run in `folder`, until the last one or a stop, which only signals that `stop` hears request."""
    stop = stop or signals.StopSignal()
    aside = f", the last {config.rollout_devices} for rollouts" if config.rollout_devices else ""
    say(f"devices: {devices.describe()}{aside}; everything goes to {folder}")
    prepared = prepare(config, folder)
    program, streams, saver, start = prepared.program, prepared.streams, prepared.saver, prepared.start
    config = program.config
    for note in resume.notes(program, saver, start, folder):
        say(note)

    tally = tally_lib.Tally.resumed(start.step, start.saved)
    with card_lib.Card(folder, steps=config.steps, tally=tally, enabled=processes.is_primary()) as card:
        end = _take_steps(config, prepared, folder, stop, tally, card)
        if end.is_stopped:
            watch.stopped(end.step, is_cause=stop.requested)
            card.end(document.STOPPED, f"by {stop.cause}")
            say(f"stopped by {stop.cause} at step {end.step}, saved; the same command resumes")
            return end
        if end.step in saver.steps():
            stop.ends_at_once("the training is done and saved; the same command writes the results")
        watch.at(watch.RESULTS)
        saver.close()
        streams.close()
        end = _best(config, program, saver, end)
        _write_results(config, program, prepared.tokenizer, streams.examples, end.state, folder)
        card.end(document.FINISHED)
    say(f"done: {folder}")
    return end


def _take_steps(
    config: settings_lib.Config,
    prepared: "Prepared",
    folder: pathlib.Path,
    stop: signals.StopSignal,
    tally: tally_lib.Tally,
    card: card_lib.Card,
) -> loop.End:
    """Compiles the step, makes or restores the state, and trains until the last step or a stop."""
    program, streams, saver, start = prepared.program, prepared.streams, prepared.saver, prepared.start
    pairs, rollouts = prepared.pairs, prepared.rollouts
    health = _open_health(config, program, saver, start)
    with _open_recorder(config, program, health, tally, folder, start) as recorder:
        patience = patience_lib.EarlyStop.resumed(config.evaluate.patience, start.saved)
        goes_on = start.step < config.steps and not patience.is_over
        plan = _compile(program, recorder, folder, start) if goes_on else None
        if plan is not None:
            measure = functools.partial(_measure, program, plan, recorder)
            card.begin(
                facts.collect(config, program, plan, prepared.fingerprints), measure, saver.directory / str(start.step)
            )
        with (
            start_up.collector_restored(),
            memory_guard.explained(program, plan),
            profiler.Profiler(
                folder, config.profile.start, config.profile.steps, enabled=processes.is_primary()
            ) as profile,
            _evaluation(prepared, recorder, stop) as evaluate,
        ):
            end = loop.run(
                plan,
                functools.partial(_first_state, config, prepared, folder, recorder, goes_on=goes_on),
                start.step,
                when=_when(config, () if pairs is None else pairs.ends(config.epochs, program.sizes.global_batch_size)),
                streams=streams,
                evaluate=evaluate,
                checkpoints=loop.Checkpoints(
                    saver,
                    resume.meta(program, prepared.fingerprints),
                    card.checkpoint,
                    program.to_saved,
                    rollouts.ahead if isinstance(rollouts, rollouts_lib.Rollouts) else lambda step, params: {},
                ),
                recorder=recorder,
                profile=profile,
                stop=stop,
                patience=patience,
                publish=lambda step, state: _publish(program, state, folder, step, start.step),
                next_batch=None
                if rollouts is None
                else _announced(lambda step, state: rollouts.next(step, state.params), rollouts.line, recorder),
                beside=dict if rollouts is None else lambda: rollouts.told,
                is_unevaluated=_is_unevaluated(start),
            )
    if not end.is_stopped and (skipped := health.summary()):
        say(skipped)
    for line in streams.summary() if end.step > start.step else ():
        say(line)
    return end


@contextlib.contextmanager
def _evaluation(
    prepared: "Prepared", recorder: recorder_lib.Recorder, stop: signals.StopSignal
) -> Iterator[Callable[[int, Any], float | None]]:
    """Gives (step, params) -> the held-out loss, None if nothing is held out; it logs and shows the loss and, of a task, a round.

    It raises `signals.Stopped` within a batch if the run is to stop.
    """
    program, streams, pairs, rollouts = prepared.program, prepared.streams, prepared.pairs, prepared.rollouts
    check_of_loss = _announced(stop.check, "compiling the evaluation", recorder)
    check_of_answers = _announced(stop.check, "compiling the program of held-out answers", recorder)

    def loss_of(params: PyTree) -> float | None:
        if rollouts is not None and not rollouts.has_labels:
            return None  # its loss is that of answers that it gave
        return program_lib.held_out_loss(program, streams, params, check_of_loss)

    def evaluate(step: int, params: PyTree) -> float | None:
        loss = loss_of(params)
        if loss is not None:
            recorder.evaluated(step, loss)
        return loss

    if pairs is None or pairs.has_pairs:
        yield evaluate
        return
    ends = pairs.ends(program.config.epochs, program.sizes.global_batch_size)
    kept = rounds.Rounds(
        recorder, loss_of, answers.make(program, prepared.tokenizer, pairs, check_of_answers), ends, rollouts is None
    )
    kept.begin()
    try:
        yield kept.evaluate
        kept.tell_last()
    finally:
        kept.end()


def _announced(call: Callable[..., Any], line: str, recorder: recorder_lib.Recorder) -> Callable[..., Any]:
    """Returns `call`, before whose first run the line is printed: what follows it compiles."""
    lines = [line]

    def announced(*args: Any) -> Any:
        if lines:
            recorder.say(lines.pop())
        return call(*args)

    return announced


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a run has before it compiles: all that its settings, its folder and its data can be refused for is checked."""

    tokenizer: tokenizer_lib.Tokenizer
    program: program_lib.Program
    streams: feed.Feed
    saver: checkpointer.Checkpointer
    fingerprints: Mapping[str, str]
    start: resume.Start
    pairs: splits.Splits | None
    rollouts: rollouts_lib.Rollouts | lessons.Lessons | None


@setting_names.errors_of_config()
def prepare(config: settings_lib.Config, folder: pathlib.Path) -> Prepared:
    """Checks a run's settings, its folder and its data, and opens both. Compiles nothing and allocates nothing on devices."""
    watch.at(watch.DATA)
    _check_folder(config, folder)
    if processes.is_primary():
        trackers.check_installed(config.metrics.to)
    if config.deterministic and not xla_flags.is_deterministic():
        option = "XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        raise UserError(
            f"config.deterministic: XLA reads its options when JAX starts; set {option} before Python starts"
        )
    if config.keeps_roundings and not xla_flags.keeps_roundings():
        option = "XLA_FLAGS=--xla_allow_excess_precision=false"
        raise UserError(
            f"config.grpo.exact: XLA leaves roundings to 16 bits out, in each program others; set {option} before Python starts, or "
            "--config.precision=fp32"
        )
    for line in effects.unread(config):
        say(line)
    start_up.wake_devices()
    config = config_lib.with_scratch(config, folder / workdir.OFFLOAD)
    tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
    pairs, mixed, is_streamed = None, None, mixed_lib.is_streamed(config, folder)
    if config.data.task != tasks.TEXT and not is_streamed:
        pairs = _load_pairs(config, tokenizer, folder)
        config = examples.with_steps(config, pairs)
        if config.epochs:
            say(f"config.epochs={config.epochs:g} takes {config.steps} steps")
        if config.data.task == tasks.GRPO:
            rollouts_lib.check(config, pairs)
    program = _build(config, tokenizer)
    data_dir = _prepare_data(config, folder) if pairs is None else folder
    if is_streamed:
        mixed = _open_mixture(program, tokenizer, data_dir, folder)
    streams = program_lib.open_feed(program, tokenizer, data_dir, pairs or mixed)
    if config_lib.reads_text(config.data):
        say(tokenizer_lib.told(tokenizer))
    if pairs is None and not config.data.has_held_out:
        where = (
            "config.data.sources name no eval_file or eval_split"
            if config.data.sources
            else "config.data.eval_file is empty"
        )
        if config.data.train_file or config.data.sources:
            say(f"{where}: nothing is held out, and nothing is evaluated")
    if streams.times > 1:
        held_out = "eval_file" if config.data.train_file else "eval_split"
        repeated = f"an evaluation reads the text of config.data.{held_out} {streams.times:.1f} times"
        say(f"config.evaluate.batches={config.evaluate.batches} is more than there is: {repeated}")
    keep = config.checkpoint
    rollouts: rollouts_lib.Rollouts | lessons.Lessons | None = None
    if pairs is not None and config.data.task == tasks.GRPO:
        rollouts = rollouts_lib.Rollouts(program, tokenizer, pairs, streams, say)
    if program.weights.teacher is not None:
        teacher.check_tokenizer(program.weights.teacher.tokenized_by, tokenizer)
        rollouts = lessons.Lessons(program, tokenizer, pairs, streams, say)
    saver = checkpointer.Checkpointer(
        folder / workdir.CHECKPOINTS, keep_last=keep.keep_last, keep_best=keep.keep_best, run_id=processes.run_id()
    )
    ending.before_end(lambda *_: saver.unlock())
    fingerprints = {**streams.fingerprints(), **program.fingerprints}
    if isinstance(rollouts, rollouts_lib.Rollouts):
        fingerprints |= rollouts.fingerprints
    start = resume.find(program, saver, streams, fingerprints, folder)
    if isinstance(rollouts, rollouts_lib.Rollouts) and start.saved is not None:
        rollouts.restore(start.step + 1, saver.batch(start.step))
    disk_space.check(program, folder, step=start.step, saved=len(saver.steps()))
    if pairs is not None and examples.has_reference(config) and start.saved is not None:
        reference.restore(pairs, folder)
    return Prepared(tokenizer, program, streams, saver, fingerprints, start, pairs, rollouts)


def _open_mixture(
    program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer, data_dir: pathlib.Path, folder: pathlib.Path
) -> mixture.SourceMixture:
    """Opens the sources that are read as they are needed, and says how often each is read."""
    config = program.config
    found = mixed_lib.open_mixture(program, tokenizer, data_dir, _cache(config), _began(config, tokenizer, folder))
    if not config.data.sources:
        say(
            "config.data.train_file is read as it is needed, in blocks that are mixed, and not indexed before the first step"
        )
    for line in (*found.notes, *found.told(config.steps)):
        say(setting_names.in_config(line))
    return found


def _cache(config: settings_lib.Config) -> pathlib.Path:
    """Returns the folder for what takes long to make of data."""
    return pathlib.Path(config.data.dir or start_up.cache_folder()) / "encoded"


def _load_pairs(config: settings_lib.Config, tokenizer: tokenizer_lib.Tokenizer, folder: pathlib.Path) -> splits.Splits:
    """Reads and encodes the examples of a task, and prints what they are."""
    family, source = model_lib.family_of(config)
    began = _began(config, tokenizer, folder)
    found = examples.load(config, family, source, tokenizer, _prepare_data(config, folder), _cache(config), began)
    for note in found.notes:
        say(setting_names.in_config(note))
    return found


def _began(config: settings_lib.Config, tokenizer: tokenizer_lib.Tokenizer, folder: pathlib.Path) -> int | None:
    """Returns the time that a chat template is told, that of the run's first start; None where no template asks for it."""
    if not examples.writes_date(config, tokenizer):
        return None
    began = workdir.began(folder)
    if processes.is_primary():
        workdir.save_began(folder, began)
    return began


def say(line: str) -> None:
    """Prints a line on the primary process."""
    if processes.is_primary():
        print(line, flush=True)


def _check_folder(config: settings_lib.Config, folder: pathlib.Path) -> None:
    """Refuses a folder that holds another run, and a profile of steps that the run does not have. Names files that are lost."""
    workdir.check(folder, config_lib.to_dict(config))
    for line in workdir.lost(folder):
        say(line)
    others = {f"config.{name}.every": getattr(config, name).every for name in ("evaluate", "checkpoint")}
    steps = (1 << 31) if config.epochs else config.steps  # epochs tell their steps when the examples are read
    profiler.check(config.profile.start, config.profile.steps, steps, others)


def _build(config: settings_lib.Config, tokenizer: tokenizer_lib.Tokenizer) -> program_lib.Program:
    """Returns the program, from the mesh to the sharded train step, and prints its memory table. Allocates nothing."""
    with start_up.without_collector():
        program = program_lib.build(config, tokenizer_vocab=tokenizer.vocab_size)
    texts.check(program, tokenizer)
    host.check(program)
    if not config.grad_accum:
        sizes, ways = program.sizes, mesh_lib.ways(program.mesh)
        batch = f"{sizes.global_batch_size} sequences are {sizes.micro_batch_size} x {sizes.grad_accum} passes x data * replica={ways}"
        say(f"config.grad_accum={sizes.grad_accum} follows from the batch: {batch}")
    of_mesh = (*effects.undivided(config, program.sizes.micro_batch_size), *effects.unsharded(config, program.mesh))
    for line in (*effects.shortened(config), *effects.unreached(config), *of_mesh):
        say(line)
    if program.weights.adapted is not None:
        say(program.weights.count_line(program.partition))
    if program.weights.source is not None:
        say(f"the model is that of {program.weights.source.path}; config.model.preset is not read")
    if model_lib.is_capped(program.model):
        say("attention by XLA, which stores its scores: no fused kernel bounds them by a softcap")
    if program.way is not None:
        say(f"parts of sequences on other devices: {program.way.text}")
    if isinstance(program.train_step, pipeline_step.PipelineStep):
        say(f"pipeline: {program.train_step.order.text}")
    say(display.as_text(program_lib.memory_table(program)))
    say(state_bytes.per_parameter_line(program.partition, config.precision, config.optimizer.moments))
    if line := storage.line(program.partition):
        say(line)
    return program


def _prepare_data(config: settings_lib.Config, folder: pathlib.Path) -> pathlib.Path:
    """Prepares the dataset on the primary process, and returns its folder."""
    data_dir = pathlib.Path(config.data.dir or folder / "datasets")
    for name in mixed_lib.names(config):
        if config.data.dir:
            files.check_path(config.data.dir, "config.data.dir")
        if processes.is_primary():
            source.prepare(name, data_dir)
        processes.barrier("data")
    return data_dir


def _open_health(
    config: settings_lib.Config, program: program_lib.Program, saver: checkpointer.Checkpointer, start: resume.Start
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
    config: settings_lib.Config,
    program: program_lib.Program,
    health: health_lib.Health,
    tally: tally_lib.Tally,
    folder: pathlib.Path,
    start: resume.Start,
) -> Iterator[recorder_lib.Recorder]:
    """Opens the log and the display, and closes both at the end of the block."""
    is_primary = processes.is_primary()
    shown = progress.Progress(config.steps, start=start.step, log_every=config.log_every, enabled=is_primary)
    clients = trackers.Outlets(config.metrics, folder, setting_names.flat(config_lib.to_dict(config)), shown.print)
    has_events = trackers.TENSORBOARD in trackers.names(config.metrics.to)
    log = metrics.MetricsLog(folder, enabled=is_primary, tensorboard=has_events, clients=clients)
    tokens = program.tokens_per_step
    with shown, log:
        logged = 0 if start.saved is None else start.saved.get("logged")
        is_logged = _when(config).logs
        yield recorder_lib.Recorder(log, shown, health, tokens=tokens, is_logged=is_logged, logged=logged, tally=tally)


def _when(config: settings_lib.Config, epoch_ends: tuple[int, ...] = ()) -> loop.When:
    return loop.When(
        steps=config.steps,
        log_every=config.log_every,
        evaluate_every=config.evaluate.every,
        save_every=config.checkpoint.every,
        saves_at_end=config.checkpoint.at_end,
        epoch_ends=epoch_ends,
        publish_every=config.export.deltas_every,
        stops_every=config.grpo.inner_steps,
    )


def _publish(program: program_lib.Program, state: State, folder: pathlib.Path, step: int, start: int) -> None:
    is_first = step - program.config.export.deltas_every <= start
    found = results.publish(program, state, folder / "deltas", step, is_first=is_first)
    say(f"step {step}: {found.tensors} of {found.of} tensors published, {display.human(found.nbytes)}")
    if (url := program.config.export.deltas_to) and processes.is_primary():
        try:
            vllm_server.tell(url, folder / "deltas", step)
        except UserError as error:  # the next publication has what this one had
            say(f"step {step}: config.export.deltas_to: the server keeps its weights: {error}")


def _compile(
    program: program_lib.Program, recorder: recorder_lib.Recorder, folder: pathlib.Path, start: resume.Start
) -> step_plan.Plan:
    """Compiles the step and returns its plan. Prints the plan, and compares it with the measured peak after the first steps."""
    watch.at(watch.COMPILE)
    recorder.say("compiling the step, which may take minutes")
    with start_up.without_collector(), program_cache.counted() as compiled:
        plan = memory_guard.compile_step(program)
    recorder.say(f"compiled the step in {plan.compile_seconds:.1f} s ({compiled}); {plan_report.verdict(plan)}")
    if processes.is_primary():
        memory_guard.write(folder, program, plan, None)

    def compare() -> None:
        measured = metrics.device_memory().get("device_peak_bytes")
        recorder.say(memory_guard.compared(plan, measured, recorder.peak_at_start))
        if processes.is_primary():
            memory_guard.write(folder, program, plan, measured, recorder.peak_at_start)

    recorder.after(start.step + STEPS_BEFORE_COMPARING, compare)
    return plan


def _measure(program: program_lib.Program, plan: step_plan.Plan, recorder: recorder_lib.Recorder) -> dict[str, Any]:
    """Returns the fields of the run card that were measured since the start: the median step and the peak memory."""
    timing = recorder.tally.timing(program.tokens_per_step)
    return {
        **timing,
        "mfu": plan.mfu(timing["step_seconds"]),
        "foretold_differs": recorder.differs,
        "measured_peak_bytes": metrics.device_memory().get("device_peak_bytes"),
        "peak_bytes_before_first_step": recorder.peak_at_start,
    }


def _first_state(
    config: settings_lib.Config,
    prepared: Prepared,
    folder: pathlib.Path,
    recorder: recorder_lib.Recorder,
    *,
    goes_on: bool,
) -> State:
    """Initialises the state with its shardings or restores it, and writes the config: the folder now belongs to this run."""
    program, saver, start, pairs = prepared.program, prepared.saver, prepared.start, prepared.pairs
    watch.at(watch.RESTORE)
    began = time.monotonic()
    if start.saved is None:
        recorder.say("making the state, whose programs are compiled")
        with start_up.without_collector():
            state = state_lib.first(program)
    else:
        recorder.say(f"restoring the state of step {start.step}")
        state = resume.state(program, saver, start.step, start.saved)
    seconds = time.monotonic() - began
    if processes.is_primary():
        workdir.save(folder, config_lib.to_dict(config))
    held = display.human(state_bytes.measured_bytes(state, jax.local_devices()[0]))
    counted = f"{held} of state on each device, counted from its arrays; ready after {seconds:.1f} s"
    recorder.say(f"starts at step {start.step} of {config.steps}; {counted}")
    if pairs is not None and examples.has_reference(config) and start.saved is None:
        recorder.say(f"the reference is the model at step {start.step}: log-probabilities of the answers of all pairs")
        reference.make(program, pairs, state.params, folder)
    again = _is_unevaluated(start)
    recorder.open(is_over=not goes_on and not again, is_unevaluated=again)
    return state


def _best(
    config: settings_lib.Config, program: program_lib.Program, saver: checkpointer.Checkpointer, end: loop.End
) -> loop.End:
    """Returns the end of a run with the state whose results are written: with patience that of the lowest evaluation loss."""
    losses = step_files.losses(saver.directory) if config.evaluate.patience else {}
    best = min(losses, key=lambda step: (losses[step], step), default=end.step)
    if best == end.step or losses[best] == math.inf:
        return end
    say(f"the results are those of step {best}, which has the lowest evaluation loss ({losses[best]:.4f})")
    for leaf in jax.tree.leaves(end.state):
        if isinstance(leaf, jax.Array):
            leaf.delete()  # its memory is needed
    return end._replace(state=resume.state(program, saver, best, saver.meta(best)))


def _is_unevaluated(start: resume.Start) -> bool:
    """Returns whether the run that is resumed gave up an evaluation at its last step."""
    return bool((start.saved or {}).get(loop.UNEVALUATED))


def _write_results(
    config: settings_lib.Config,
    program: program_lib.Program,
    tokenizer: tokenizer_lib.Tokenizer,
    learned: splits.Splits | mixture.SourceMixture | None,
    state: State,
    folder: pathlib.Path,
) -> None:
    """Prints a sample, draws the losses and exports the weights. A failure of one does not lose the others."""

    length, is_own = texts.sample_length(program, tokenizer), config.sample.length == settings_lib.OWN

    def sample() -> None:
        say("compiling the program of the sample")
        how = {**vars(config.sample), "length": length}
        sampled = results.sample(program, tokenizer, state.params, **how, seed=config.seed)
        fits = f" of {length} tokens, for which the model has positions" if length < texts.SAMPLED and is_own else ""
        say(f"a sample{fits}, from {config.sample.prompt!r}:\n{sampled}")

    def export() -> None:
        what = "adapter" if config.export.format == "peft" else "weights"
        say(f"writing the {what} to {folder / 'export'}")
        results.export(program, state, folder / "export", tokenizer, learned)
        size = display.human(files.folder_bytes(folder / "export")) if processes.is_primary() else ""
        say(f"{what} exported to {folder / 'export'}, {size}")
        if config.export.push_to and processes.is_primary():
            with errors.below("config.export.push_to: "):
                hub.push(folder / "export", config.export.push_to)
            say(f"and written to the Hugging Face hub: {config.export.push_to}")

    wanted: list[tuple[Callable[[], None], bool]] = [
        (sample, length > 0),
        (functools.partial(results.draw, folder), processes.is_primary()),
        (export, config.export.format != "none"),
    ]
    results.try_each(write for write, is_wanted in wanted if is_wanted)


def _unheard(stop: signals.StopSignal, error: OSError) -> None:
    """Stops the run, since stdout cannot be written."""
    names = {errno.EPIPE: "stdout is closed", errno.ENOSPC: "stdout: no space left on the device"}
    why = names.get(error.errno or 0, f"stdout cannot be written ({error.strerror})")
    stop.request(why, f"zerojax: {why}; the same command resumes from the last checkpoint", 2)


def _choose_workdir() -> pathlib.Path:
    """Returns --workdir, or a new folder named after the config and the time."""
    if _WORKDIR.value == "":
        raise UserError("--workdir: is empty; name a folder, or omit the flag for a new one under runs/")
    if _WORKDIR.value:
        files.check_path(_WORKDIR.value, "--workdir")
        return pathlib.Path(os.path.realpath(_WORKDIR.value))
    if jax.process_count() > 1:
        raise UserError("--workdir: a run of several processes needs a folder that all of them can reach; name it")
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    return pathlib.Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()


if __name__ == "__main__":
    main()
