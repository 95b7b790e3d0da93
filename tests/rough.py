"""Compiles roughly, so that tests are quick. This module holds the settings, for this process and for those that tests start."""

import importlib.metadata

# XLA ends a process whose XLA_FLAGS it does not know; 0.10 to 0.12 know this one.
_KNOWS = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) <= (0, 12)
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false" if _KNOWS else ""
JAX = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
