"""Turns optimizations off, so that tests compile fast. This module holds the settings for this process and its child processes."""

import importlib.metadata

# XLA ends a process with unknown XLA_FLAGS. jaxlib 0.10 to 0.12 know this flag.
_KNOWS = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) <= (0, 12)
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false" if _KNOWS else ""
JAX = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
