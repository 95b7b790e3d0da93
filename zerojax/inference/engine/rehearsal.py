"""Compiles an engine's programs before its first text, each while the next is traced. This module traces them by calls that run nothing.

A call of a jitted function traces, lowers and compiles before it returns, so Python would wait for XLA and XLA for Python. In a rehearsal
each call lowers its program, hands it to a thread that compiles it, and returns the caches and rows that it was given, with tokens of
zeros. The compiled program is found by the next call with such arguments. One thread compiles: side by side XLA took longer on a GPU, where
it tunes kernels (docs/benchmarks/gpu.md, a program for each kind of layer).
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.inference.engine import programs as programs_lib
from zerojax.tree import PyTree

NAMES = ("first", "further", "step", "decode")  # of the programs


class Rehearsal:
    """What the calls of an engine's programs do in a `with` block. At its end all of them are compiled.

    Args:
      programs: those of the engine; jitted functions, not those of weights in host memory.
      tell: called as each program is compiled, with how many are, and how many there are so far.
    """

    def __init__(self, programs: programs_lib.Programs, tell: Callable[[int, int], Any]):
        self._programs, self._tell = programs, tell
        self._own = {name: getattr(programs, name) for name in NAMES}
        self._told: dict[Any, PyTree] = {}
        self._compiled: list[concurrent.futures.Future[Any]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "compile")

    def __enter__(self) -> "Rehearsal":
        for name, program in self._own.items():
            setattr(self._programs, name, functools.partial(self._call, program))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for name, program in self._own.items():
            setattr(self._programs, name, program)
        try:
            if kind is None:
                for number, one in enumerate(concurrent.futures.as_completed(self._compiled), 1):
                    one.result()
                    self._tell(number, len(self._compiled))
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _call(
        self, program: Any, params: PyTree, caches: PyTree, rows: Any, *given: Any, **static: Any
    ) -> tuple[Any, Any, programs_lib.Told]:
        leaves, form = jax.tree.flatten(given)
        key = id(program), form, *((leaf.shape, leaf.dtype) for leaf in leaves), *static.items()
        if key not in self._told:
            lowered = program.lower(params, caches, rows, *given, **static)
            self._told[key] = lowered.out_info[2]
            self._compiled.append(self._pool.submit(lowered.compile))
        return caches, rows, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._told[key])
