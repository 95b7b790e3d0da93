"""Holds a run to its plan. This module compiles the step, compares planned with measured peak memory, and helps when memory is short."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from zerojax import display, files
from zerojax.errors import UserError
from zerojax.hlo import buffers
from zerojax.launch import processes
from zerojax.models import llama
from zerojax.plan import report as plan_report
from zerojax.plan import search, step_plan
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.zero import stages

FILE = "plan.json"
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
SHORT = "out of device memory"  # how a run's own words for it begin
# After the run's own settings did not fit: what else to try, and how often to compile.
_TRIES = 6


def compile_step(program: program_lib.Program) -> step_plan.Plan:
    """Compiles the program's train step for the devices it is built on; the plan holds the step, ready to run.

    Raises:
      UserError: it cannot be compiled within the devices' memory, or needs more than JAX may allocate there.
    """
    try:
        plan = step_plan.plan_program(program, "here", from_cache=True)
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        raise too_large(program, None) from error
    if plan.target.is_pool and not plan.fits:
        raise too_large(program, plan)
    return plan


def write(folder: pathlib.Path, program: program_lib.Program, plan: step_plan.Plan, measured: int | None) -> None:
    """Writes the plan, with the measured peak beside the planned one and what a token costs, to plan.json.

    Raises:
      UserError: the folder cannot be written.
    """
    path = folder / FILE
    content = {
        "planned_peak_bytes": plan.peak,
        "measured_peak_bytes": measured,
        "device_kind": plan.target.device_kind,
        "flops_per_token": llama.flops_per_token(program.model, program.config.seq_len),
        "plan": plan_report.as_json(plan),
    }
    with files.writing(path):
        files.replace(path, json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def explained(program: program_lib.Program, plan: step_plan.Plan | None) -> Iterator[None]:
    """Turns a lack of device memory in the block into a UserError that says what would help."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        raise too_large(program, plan) from error


def compared(plan: step_plan.Plan, measured: int | None) -> str:
    """Says in a line how the measured peak compares with the planned one."""
    planned = f"planned peak {display.human(plan.peak)} on each device"
    if measured is None:
        return f"{planned}; this backend does not tell what is in use"
    return f"{planned}, measured {display.human(measured)} ({measured / plan.peak - 1:+.1%})"


def too_large(program: program_lib.Program, plan: step_plan.Plan | None) -> UserError:
    """Prints what fills the memory and which changes would fit, and returns the error that ends the run."""
    config = program.config
    if processes.is_primary():
        print(f"{SHORT}: looking for settings that fit", flush=True)
    lines = []
    if plan is not None:
        if plan.buffers.source != buffers.ASSIGNMENT:  # it came from the cache of compiled programs
            plan = step_plan.plan_program(program, "here")
        lines.append(display.as_text(plan_report.memory_table(plan)))
        if plan.buffers.at_peak:
            lines.append(display.as_text(plan_report.temporaries_table(plan)))
    fitting = _changes_that_fit(program)
    if fitting:
        lines.append("changes that would fit, the fastest first:")
        lines += [f"  {_flags(config, found.candidate)}   (peak {display.human(found.peak or 0)})" for found in fitting]
        way_out = f"add {_flags(config, fitting[0].candidate)}"
    else:
        way_out = "use more devices, a shorter config.seq_len or a smaller model: no change of stage, remat or micro-batch fits"
    if processes.is_primary():
        print("\n".join(lines), flush=True)
    peak = f"the step needs {display.human(plan.peak)}, " if plan is not None else ""
    return UserError(f"{SHORT}: {peak}{way_out}")


def _changes_that_fit(program: program_lib.Program) -> list[search.Outcome]:
    """Compiles leaner settings for the same devices and returns those that fit."""
    model = dataclasses.replace(
        program.config.model, vocab_size=program.model.vocab_size
    )  # the tokenizer may have set it
    config = dataclasses.replace(program.config, model=model)
    micro = program.sizes.micro_batch_size
    grid = {
        "stage": tuple(stage for stage in stages.STAGES if stage >= config.zero.stage),
        "remat": {"none": ("none", "dots", "full"), "dots": ("dots", "full"), "full": ("full",)}[config.model.remat],
        "micro_batch_size": tuple(size for size in (micro, micro // 2, micro // 4, 1) if size >= 1),
        "replica": (config.mesh.replica,),
    }
    try:
        outcomes = search.search(config, "here", grid=grid, most_compiles=_TRIES)
    except UserError:  # the memory of this kind of device is not known
        return []
    return [outcome for outcome in outcomes if outcome.is_compiled and "does not fit" not in outcome.reason]


def _flags(config: config_lib.Config, candidate: search.Candidate) -> str:
    """Writes a candidate as command-line overrides."""
    model = search.with_remat(config.model, candidate.remat)
    settings: dict[str, Any] = {
        "zero.stage": (config.zero.stage, candidate.stage),
        **{
            f"model.{name}": (getattr(config.model, name), getattr(model, name))
            for name in ("remat", "recompute", "offload")
        },
        "micro_batch_size": (config.micro_batch_size, candidate.micro_batch_size),
        "grad_accum": (config.grad_accum, candidate.grad_accum),
    }
    return " ".join(f"--config.{name}={new}" for name, (old, new) in settings.items() if old != new)
