"""Checks device memory against the plan. This module compiles the step, compares the planned with the measured peak, and suggests
settings that fit when memory is short."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator

import jax

from zerojax import display, files
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.hlo import buffers
from zerojax.launch import processes
from zerojax.plan import json_form, step_plan
from zerojax.plan import report as plan_report
from zerojax.trainer import plans
from zerojax.trainer import program as program_lib
from zerojax.trainer.checks import host

FILE = "plan.json"
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
SHORT = "out of device memory"  # the start of the error message
_TRIES = 6  # the number of leaner settings to compile when the run's own do not fit


def compile_step(program: program_lib.Program) -> step_plan.Plan:
    """Compiles the program's train step for its own devices. The returned plan holds the compiled step.

    Raises:
      UserError: XLA runs out of memory while compiling, or the step needs more memory than JAX may allocate, or than the host of CPU
        devices has.
    """
    try:
        plan = plans.plan_program(program, "here", from_cache=True)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        refused = _too_large(program, None, error)
        if refused is None:
            raise
        raise refused from error
    if mesh_lib.platform(program.mesh) == "cpu":
        host.refuse("the step", plan.most * len(program.mesh.local_devices))
    if plan.target.is_pool and not plan.fits:
        raise too_large(program, plan)
    return plan


def write(
    folder: pathlib.Path,
    program: program_lib.Program,
    plan: step_plan.Plan,
    measured: int | None,
    at_start: int | None = None,
) -> None:
    """Writes the plan, the planned and the measured peak, the peak before the first step, and the FLOPs per token to plan.json.

    Raises:
      UserError: the folder cannot be written.
    """
    path = folder / FILE
    content = {
        "planned_peak_bytes": plan.most,
        "measured_peak_bytes": measured,
        "peak_bytes_before_first_step": at_start,
        "device_kind": plan.target.device_kind,
        "flops_per_token": program.flops_per_token,
        "plan": json_form.as_json(plan),
    }
    with files.writing(path):
        files.replace(path, json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def explained(program: program_lib.Program, plan: step_plan.Plan | None) -> Iterator[None]:
    """Turns an out-of-memory error in the block into a UserError; that of a device names settings that fit."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        refused = _too_large(program, plan, error)
        if refused is None:
            raise
        raise refused from error


def compared(plan: step_plan.Plan, measured: int | None, at_start: int | None = None) -> str:
    """Returns a line that compares the measured peak with the planned one.

    A backend reports the peak since the process started. The compiler's tuning of kernels and the making of the state come before the
    first step; where they took more than the steps did, the steps' own peak is not known, but is no higher.

    Args:
      plan: of the step.
      measured: the peak in bytes after some steps; None: the backend does not report it.
      at_start: the peak before the first step.
    """
    planned = f"planned peak {display.human(plan.most)} on each device"
    if measured is None:
        return f"{planned}; this backend does not report its memory use"
    if at_start is not None and plan.most < measured <= at_start:
        return (
            f"{planned}; the steps took no more than the {display.human(measured)} that were in use at a time before them, while "
            "kernels were tuned and the state was made"
        )
    return f"{planned}, measured {display.human(measured)} ({measured / plan.most - 1:+.1%})"


def _too_large(program: program_lib.Program, plan: step_plan.Plan | None, error: Exception) -> UserError | None:
    """Returns the error to raise where the host or a device ran out of memory, else None."""
    if (refused := host.short(error)) is not None:
        return refused
    return too_large(program, plan) if OUT_OF_MEMORY in str(error) else None


def too_large(program: program_lib.Program, plan: step_plan.Plan | None) -> UserError:
    """Prints the largest uses of memory and the changes that would fit. Returns the error that ends the run."""
    if processes.is_primary():
        print(f"{SHORT}: looking for settings that fit", flush=True)
    lines = []
    if plan is not None:
        if plan.buffers.source == buffers.ANALYSIS:  # the cache of compiled programs omits the buffer assignment
            plan = dataclasses.replace(plans.plan_program(program, "here"), target=plan.target)
        lines.append(display.as_text(plan_report.memory_table(plan)))
        if plan.buffers.at_peak:
            lines.append(display.as_text(plan_report.temporaries_table(plan)))
    fitting = plans.changes_that_fit(program, most_compiles=_TRIES)
    if fitting:
        lines.append("changes that would fit, the fastest first:")
        lines += [f"  {change.flags}   (peak {display.human(change.peak)})" for change in fitting]
        way_out = f"add {fitting[0].flags}"
    else:
        way_out = (
            "use more devices, a shorter config.seq_len or a smaller model: "
            "no change of stage, remat, micro-batch or offload fits"
        )
    if processes.is_primary():
        print("\n".join(lines), flush=True)
    if plan is None:
        return UserError(f"{SHORT}: {way_out}")
    needs = f"the step needs {display.human(plan.in_step)}"
    if plan.usable is not None and mesh_lib.platform(program.mesh) != "cpu":
        needs += f" of the {display.human(plan.usable)} that JAX may take of this device"
        if not plan.fits:
            return UserError(f"{SHORT}: {needs}, {way_out}")
        return UserError(
            f"{SHORT}: {needs}: another process holds memory there (nvidia-smi names it), or what runs beside the step needs "
            f"more; end that process, choose a device with CUDA_VISIBLE_DEVICES, or {way_out}"
        )
    return UserError(f"{SHORT}: {needs}, {way_out}")
