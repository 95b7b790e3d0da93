"""Turns optimizations off, so that tests compile fast. This module holds the settings for this process and its child processes."""

import importlib.metadata

# XLA ends a process whose XLA_FLAGS it does not know: jaxlib 0.10 knows these, 0.11 and 0.12 not all.
_KNOWS = importlib.metadata.version("jaxlib").startswith("0.10.")
# One module of LLVM for each program: the parts compiled beside each other cost more than they save on few cores.
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" if _KNOWS else ""
# Operations carry one line of Python, not a whole traceback: a twelfth of the time went into these.
JAX = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1"}
