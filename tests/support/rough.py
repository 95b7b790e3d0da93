"""Makes tests fast: optimizations are off and bytecode is kept. This module holds the settings for this process and its child processes."""

import importlib.metadata
import os
import pathlib
import platform
import sys

# Tests start some hundred processes. Without bytecode on disk each compiles the libraries again, which triples its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# XLA ends a process whose XLA_FLAGS it does not know: jaxlib 0.10 knows this one, 0.11 and 0.12 do not.
_KNOWS = importlib.metadata.version("jaxlib").startswith("0.10.")
_CPU = pathlib.Path("/proc/cpuinfo")
HAS_FLOAT16 = _CPU.exists() and "avx512_fp16" in _CPU.read_text()  # whether the CPU computes in float16
# XLA makes one rounding of a multiplication and an addition where the CPU can, so two programs may differ in the last place. Tests that
# compare programs bit for bit are compiled as for CPUs that round each operation.
_ROUNDS_EACH = ["--xla_cpu_max_isa=AVX"] if platform.machine() in ("x86_64", "AMD64") else []
# XLA would generate code for up to 32 parts of a program in parallel. In one part a train step takes a quarter less CPU time to compile.
_IN_ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
XLA_FLAGS = " ".join([_IN_ONE_PART, *_ROUNDS_EACH, *(["--xla_cpu_use_fusion_emitters=false"] if _KNOWS else [])])
# Operations carry one line of Python, not a whole traceback, which takes time.
# The pools have two threads a device, as zerojax.launch.devices gives them.
JAX = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1", "PJRT_NPROC": "16"}
