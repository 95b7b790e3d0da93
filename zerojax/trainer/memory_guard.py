"""Holds a run to its plan. This module compiles the step, compares planned with measured peak memory, and helps when memory is short."""

import contextlib
import json
import pathlib
from collections.abc import Iterator

import jax

from zerojax import display, files
from zerojax.errors import UserError
from zerojax.hlo import buffers
from zerojax.launch import processes
from zerojax.plan import json_form, step_plan
from zerojax.plan import report as plan_report
from zerojax.trainer import plans
from zerojax.trainer import program as program_lib

FILE = "plan.json"
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
SHORT = "out of device memory"  # how a run's message about it begins
_TRIES = 6  # leaner settings that are compiled after the run's own did not fit


def compile_step(program: program_lib.Program) -> step_plan.Plan:
    """Compiles the program's train step for the devices it is built on; the plan holds the step, ready to run.

    Raises:
      UserError: it cannot be compiled within the devices' memory, or needs more than JAX may allocate there.
    """
    try:
        plan = plans.plan_program(program, "here", from_cache=True)
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
        "flops_per_token": program.flops_per_token,
        "plan": json_form.as_json(plan),
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
    if processes.is_primary():
        print(f"{SHORT}: looking for settings that fit", flush=True)
    lines = []
    if plan is not None:
        if plan.buffers.source != buffers.ASSIGNMENT:  # it came from the cache of compiled programs
            plan = plans.plan_program(program, "here")
        lines.append(display.as_text(plan_report.memory_table(plan)))
        if plan.buffers.at_peak:
            lines.append(display.as_text(plan_report.temporaries_table(plan)))
    fitting = plans.changes_that_fit(program, most_compiles=_TRIES)
    if fitting:
        lines.append("changes that would fit, the fastest first:")
        lines += [f"  {change.flags}   (peak {display.human(change.peak)})" for change in fitting]
        way_out = f"add {fitting[0].flags}"
    else:
        way_out = "use more devices, a shorter config.seq_len or a smaller model: no change of stage, remat or micro-batch fits"
    if processes.is_primary():
        print("\n".join(lines), flush=True)
    peak = f"the step needs {display.human(plan.peak)}, " if plan is not None else ""
    return UserError(f"{SHORT}: {peak}{way_out}")
