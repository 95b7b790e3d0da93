"""Makes tests fast: optimizations are off and bytecode is kept. This module holds the settings for this process and its child processes."""

import importlib.metadata
import os
import pathlib
import sys

# Tests start some hundred processes. Without bytecode on disk each compiles the libraries again, which triples its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# XLA ends a process whose XLA_FLAGS it does not know: jaxlib 0.10 knows this one, 0.11 and 0.12 do not.
_KNOWS = importlib.metadata.version("jaxlib").startswith("0.10.")
_CPU = pathlib.Path("/proc/cpuinfo")
HAS_FLOAT16 = _CPU.exists() and "avx512_fp16" in _CPU.read_text()  # whether the CPU computes in float16
# On such a CPU XLA makes one rounding of a float16 multiplication and addition where it can, so two programs may differ. Tests that
# compare programs bit for bit are compiled as for other CPUs, on which each float16 operation is rounded.
_ROUNDS_EACH = "--xla_cpu_max_isa=AVX2" if HAS_FLOAT16 else ""
XLA_FLAGS = " ".join(filter(None, ["--xla_cpu_use_fusion_emitters=false" if _KNOWS else "", _ROUNDS_EACH]))
# Operations carry one line of Python, not a whole traceback, which takes time.
# The pools have two threads a device, as zerojax.launch.devices gives them.
JAX = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1", "PJRT_NPROC": "16"}
