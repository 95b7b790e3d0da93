"""The loop over batches. This module feeds the train step, watches its numbers, and evaluates, saves and samples when due."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from zerojax import display
from zerojax import mesh as mesh_lib
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import feed
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.launch import processes, start_up
from zerojax.plan import report as plan_report
from zerojax.plan import step_plan
from zerojax.profile import profiler
from zerojax.trainer import memory_guard, metrics, plot, resume, timing
from zerojax.trainer import program as program_lib
from zerojax.zero import loss_scale, memory

_STEPS_BEFORE_COMPARING = 2  # the first steps of a program reach its peak


class Run:
    """One part of a run: from a plan and a state to the last step, or to a signal."""

    def __init__(
        self,
        program: program_lib.Program,
        streams: feed.Streams,
        saver: checkpointer.Checkpointer,
        folder: pathlib.Path,
    ):
        self.step = 0
        self._program, self._streams, self._saver, self._folder = program, streams, saver, folder
        self._log = metrics.MetricsLog(folder, enabled=processes.is_primary())
        self._reader = timing.LateReader()
        settings = program.config.profile
        self._profiler = profiler.Profiler(folder, settings.start, settings.steps, enabled=processes.is_primary())
        self._evaluation: tuple[int, float] | None = None
        self._last_good = 0  # the last step whose loss and gradients were finite
        self._skipped = 0
        self._plan: step_plan.Plan | None = None
        self._compare_at = 0
        self._clock = 0.0

    def train(self, first_state: Callable[[], Any], *, start: int) -> tuple[Any, bool]:
        """Plans, makes the state of step `start`, and trains; returns the state, and whether the last step was reached."""
        config = self._program.config
        self.step = self._last_good = start
        progress = metrics.Progress(
            config.steps, start=start, log_every=config.log_every, enabled=processes.is_primary()
        )
        with processes.StopSignal() as stop, self._log, progress as self._progress, self._watched(), self._profiler:
            state = self._begin(first_state)
            if self.step == config.steps and stop.agreed(at_once=True):
                return state, False
            if config.profile.steps and self.step >= config.profile.start:
                self._progress.print(f"nothing is profiled: step {config.profile.start} was done before this run")
            own = timing.OwnTime()
            while self.step < config.steps:
                if self._profiler.begins(self.step + 1):
                    self._settle(state)
                    self._profiler.start()
                batch = self._streams.next()
                with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1), own.away():
                    state, numbers = self._compiled_step(state, batch)
                numbers["host_seconds"] = own.lap()
                self.step += 1
                if self._profiler.holds(self.step):
                    numbers["profiled"] = 1  # slower, and not to be counted with others
                with own.away():
                    reading = self._reader.push(self.step, numbers)
                self._record(reading)
                if self._profiler.ends(self.step):
                    self._end_profile(state)
                is_last, is_stopped = self.step == config.steps, stop.agreed()
                if is_last or _is_due(self.step, config.evaluate.every):
                    self._evaluate(state)
                is_due = config.checkpoint.at_end if is_last else _is_due(self.step, config.checkpoint.every)
                if is_due or is_stopped:
                    self._save(state)
                if is_stopped:
                    self._saver.wait()
                    return state, False
            self._saver.wait()
        return state, True

    def finish(self, state: Any) -> None:
        """Samples text, draws the curves and closes the files."""
        config = self._program.config
        if processes.is_primary() and self._skipped:
            rest = "" if self._last_good else ", and none was taken: config.loss_scale starts too high for so few steps"
            print(f"{self._skipped} steps were skipped, since their gradients overflowed{rest}", flush=True)
        if config.sample.length:
            text = self._sample(state)  # every process takes part; one prints
            if processes.is_primary():
                print(f"a sample, from {config.sample.prompt!r}:\n{text}", flush=True)
        self._saver.close()
        self._streams.close()
        if processes.is_primary():
            plot.plot_losses(metrics.read(self._folder), self._folder / "losses.png")

    def _begin(self, first_state: Callable[[], Any]) -> Any:
        """Compiles the step, if one is left, and returns the state: until the plan is known nothing is allocated, or cut off the log."""
        is_over = self.step == self._program.config.steps
        if not is_over:
            self._compile()
        state = first_state()
        held = display.human(memory.measured_bytes(state, jax.local_devices()[0]))
        whole = f"{held} of state on each device, counted from its arrays"
        self._progress.print(f"starts at step {self.step} of {self._program.config.steps}; {whole}")
        self._log.resume_at(self.step)
        if not is_over:
            self._log.open()
        self._clock = time.perf_counter()
        return state

    def _compile(self) -> None:
        """Compiles the step, and says what it will need before the first one runs."""
        with start_up.without_collector():
            self._plan = memory_guard.compile_step(self._program)
        self._compiled_step = self._plan.compiled
        self._compare_at = self.step + _STEPS_BEFORE_COMPARING
        self._progress.print(f"compiled in {self._plan.compile_seconds:.1f} s; {plan_report.verdict(self._plan)}")
        if processes.is_primary():
            memory_guard.write(self._folder, self._program, self._plan, None)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Turns a lack of device memory into what would help."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if memory_guard.OUT_OF_MEMORY not in str(error):
                raise
            raise memory_guard.too_large(self._program, self._plan) from error

    def _settle(self, state: Any) -> None:
        """Waits until all that was dispatched has ended and is recorded."""
        jax.block_until_ready(state)
        self._record(self._reader.flush())
        self._clock = time.perf_counter()

    def _end_profile(self, state: Any) -> None:
        """Writes the trace and shows where the time of its steps went."""
        self._settle(state)
        assert self._plan is not None
        found = self._profiler.stop(self._plan.ledger)
        if found is not None:
            self._progress.print(display.as_text(profiler.table(found)))
            self._progress.print(f"the trace is in {self._folder / profiler.FOLDER}")
        self._clock = time.perf_counter()

    def _compare(self, plan: step_plan.Plan) -> None:
        """Says how the measured peak compares with the planned one, after the first steps."""
        measured = metrics.device_memory().get("device_peak_bytes")
        self._progress.print(memory_guard.compared(plan, measured))
        if processes.is_primary():
            memory_guard.write(self._folder, self._program, plan, measured)

    def _record(self, read: timing.Reading | None) -> None:
        """Logs a step's numbers, which have arrived; stops the run where they are not finite and the step was not skipped."""
        if read is None:
            return
        step, told, arrived = read
        numbers = {name: value for name, value in told.items() if name not in loss_scale.VERDICT}
        seconds, self._clock = arrived - self._clock, arrived
        config, sizes = self._program.config, self._program.sizes
        numbers["tokens_per_second"] = sizes.global_batch_size * config.seq_len / seconds
        numbers["step_seconds"] = seconds
        overflow = loss_scale.overflow(told, self._program.partition.abstract_state.params)
        bad = next((name for name in ("loss", "grad_norm") if not math.isfinite(numbers[name])), None)
        if bad or overflow or _is_due(step, config.log_every) or step == config.steps:
            self._log.write(step, numbers | metrics.device_memory())
        if overflow is not None:
            self._skipped += 1
            self._progress.print(f"step {step}: skipped, {overflow}")
            if told["is_exhausted"]:
                smallest = self._program.config.loss_scale.min_scale
                way_out = f"lower config.loss_scale.min_scale (now {smallest:g})"
                raise self._bad_end(step, f"{overflow}, which is the smallest", way_out)
        elif bad:
            raise self._bad_end(step, f"{bad} is {numbers[bad]}")
        else:
            self._last_good = step
        shown = {name: numbers[name] for name in ("loss", "grad_norm", "tokens_per_second")}
        self._progress.update(step, **shown)
        if self._plan is not None and step == self._compare_at:
            self._compare(self._plan)

    def _bad_end(self, step: int, why: str, way_out: str = "") -> UserError:
        """Returns the error to raise; weights are good that gave the step after them a finite loss."""
        self._saver.wait()
        good = max((saved for saved in self._saver.steps() if saved < self._last_good), default=None)
        kept = "no checkpoint before it is good" if good is None else f"the last good checkpoint is of step {good}"
        rate = self._program.config.optimizer.learning_rate
        return UserError(
            f"step {step}: {why}; {kept} in {self._saver.directory}; "
            f"{way_out and way_out + ', or '}lower config.optimizer.learning_rate (now {rate}) and start anew, or look at the data"
        )

    def _evaluate(self, state: Any) -> None:
        self._record(self._reader.flush())
        loss = self._streams.evaluation_loss(state.params)
        if loss is None:
            return
        self._evaluation = (self.step, loss)
        self._log.write(self.step, {"eval_loss": loss})
        if not math.isfinite(loss):
            raise self._bad_end(self.step + 1, f"eval_loss is {loss}")
        self._progress.print(f"step {self.step}: evaluation loss {loss:.4f} on held-out text")
        self._clock = time.perf_counter()

    def _save(self, state: Any) -> None:
        """Saves a state whose numbers are known to be finite."""
        self._record(self._reader.flush())
        seen, loss = self._evaluation or (None, None)
        self._saver.save(
            self.step,
            logical_lib.to_logical(state),
            self._streams.position(),
            meta=resume.meta(self._program),
            eval_loss=loss if seen == self.step else None,
        )
        self._log.flush()
        self._clock = time.perf_counter()

    def _sample(self, state: Any) -> str:
        settings, tokenizer = self._program.config.sample, self._streams.tokenizer
        sampler = generate.make_sampler(
            self._program.logits, settings.length, settings.temperature, rows=mesh_lib.ways(self._program.mesh)
        )
        prompt = np.concatenate([[tokenizer.bos_id], tokenizer.encode(settings.prompt)]).astype(np.int32)
        tokens = sampler(state.params, prompt, jax.random.key(self._program.config.seed))
        return tokenizer.decode(np.asarray(tokens)[1:])


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
