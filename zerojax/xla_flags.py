"""Returns the XLA options that the user has set. This module alone reads XLA_FLAGS and names XLA's variables. It
refuses settings of JAX with which programs do not run.

XLA reads XLA_FLAGS when it starts, and applies it to every program of the process. Options that a library passes with one program override
it silently. So a library that passes options must know which ones the user has set, and XLA does not report them. Only
`make_deterministic` and `keep_roundings` add to the variable.
"""

import os
import pathlib
import re
from collections.abc import Collection, Mapping

import jax

from zerojax.errors import UserError

# GiB of pinned host memory that a process may use; read when JAX starts
PINNED_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
CPU_THREADS = "PJRT_NPROC"  # threads of each pool of the CPU's devices; read when JAX starts
DEFAULT_POOL_GB = 64.0
# Of a GPU's memory; the second is the older name
MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"

# Either takes no kernel by its time and none whose additions have no order; the first turns on the second
_DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")

_EXCESS = "xla_allow_excess_precision"

# JAX's settings for the search of errors -> the values with which programs do not run
NO_JIT = {"jax_disable_jit": (True,)}  # nothing is sharded without `jit`
NO_LEAKS = {"jax_check_tracer_leaks": (True,)}  # a pipeline keeps the trace of its loss


def names() -> frozenset[str]:
    """Returns the names of the options in XLA_FLAGS, without their dashes."""
    return frozenset(re.findall(r"--([a-z0-9_]+)", _given()))


def is_deterministic() -> bool:
    """Returns whether XLA_FLAGS make programs on GPUs give the same bits each time."""
    return any(_value(name) in ("", "1", "true") for name in _DETERMINISTIC)


def make_deterministic() -> None:
    """Makes programs on GPUs give the same bits each time, at a cost in speed. Must run before the first use of a device."""
    if not is_deterministic():
        _add(f"{_DETERMINISTIC[0]}=true")


def keeps_roundings() -> bool:
    """Returns whether XLA_FLAGS make programs round to 16 bits wherever they are written to."""
    return _value(_EXCESS) in ("0", "false")


def keep_roundings() -> None:
    """Makes programs round to 16 bits wherever they are written to: else XLA leaves roundings out, in each program others. Must run before
    the first use of a device."""
    if not keeps_roundings():
        _add(f"{_EXCESS}=false")


def _value(name: str) -> str | None:
    """Returns the value of an option, in lower case, "" where it has none, None where it is not set. The last one holds."""
    found = re.findall(rf"--{name}(?:=(\w+))?(?!\w)", _given())
    return found[-1].lower() if found else None


def _add(option: str) -> None:
    os.environ["XLA_FLAGS"] = f"{_given()} --{option}".strip()


def num_cpu_devices() -> int:
    """Returns the number of CPU devices that XLA_FLAGS ask for; 0: they say nothing of it."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", _given())
    return int(found[-1]) if found else 0


def _given() -> str:
    """Returns the options in XLA_FLAGS, which holds them, or names a file of them if it begins with no dash."""
    given = os.environ.get("XLA_FLAGS", "")
    if not given.strip() or given.lstrip().startswith("-"):
        return given
    try:
        return pathlib.Path(given).read_text(errors="replace").strip()
    except OSError:
        return given  # XLA ends with a line that names the file


def pinned_pool_gb() -> float:
    """Returns the size in GiB of the pool from which XLA takes pinned host memory on GPUs.

    Raises:
      UserError: the environment variable is not a number.
    """
    value = os.environ.get(PINNED_POOL)
    try:
        return DEFAULT_POOL_GB if value is None else float(value)
    except ValueError as error:
        raise UserError(f"{PINNED_POOL}: must be a number of GiB, and is {value!r}") from error


def check_settings(refused: Mapping[str, Collection[object]]) -> None:
    """Raises a UserError if a setting of JAX has one of the values with which programs do not run."""
    for name, values in refused.items():
        if (value := getattr(jax.config, name)) in values:
            raise UserError(
                f"{name.upper()}: is {value!r}, with which the programs of zerojax do not run; unset it, and test own functions with it"
            )
