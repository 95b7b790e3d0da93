"""Turns optimizations off, so that tests compile fast. This module holds the settings for this process and its child processes."""

import importlib.metadata

# XLA ends a process whose XLA_FLAGS it does not know: jaxlib 0.10 knows this one, 0.11 and 0.12 do not.
_KNOWS = importlib.metadata.version("jaxlib").startswith("0.10.")
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false" if _KNOWS else ""
# Operations carry one line of Python, not a whole traceback, which takes time.
JAX = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1"}
