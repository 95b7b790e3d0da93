"""Jits a function with XLA options of its own. This module also explains, in one line, calls that JAX refuses, and reads what a compiled
program takes."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from zerojax import errors


def jit(
    run: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    before: Callable[..., None] = lambda *args: None,
    explained: Callable[..., Exception | None] = lambda *args: None,
    **how: Any,
) -> Any:
    """Returns `jax.jit(run, **how)`, compiled with XLA options. A call inside another traced function uses that function's options.

    Args:
      run: the function.
      options: XLA's.
      before: called with the arguments of each call that is not traced.
      explained: (arguments of a call that failed) -> the error to raise in place of JAX's, or None.
      **how: arguments of `jax.jit`.

    >>> step = jit(lambda x: x + 1, xla_options.for_mesh(mesh))
    """
    return _Program(run, options, how, before, explained)


def bytes_beside(compiled: Any) -> int:
    """Returns the bytes of a device that a compiled program takes beside its arguments; 0 if the backend does not tell."""
    found = compiled.memory_analysis()
    return 0 if found is None else found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


class _Program:
    """A `jax.stages.Wrapped`. JAX takes options for a whole program only, so a function inside another has none."""

    def __init__(
        self,
        run: Callable[..., Any],
        options: Mapping[str, Any],
        how: Mapping[str, Any],
        before: Callable[..., None],
        explained: Callable[..., Exception | None],
    ):
        functools.update_wrapper(self, run)
        self._program = jax.jit(run, compiler_options=dict(options), **how) if options else jax.jit(run, **how)
        self._part = jax.jit(run, **how) if options else self._program
        self._before, self._explained, self._signature = before, explained, inspect.signature(run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(*args, **kwargs)
        args, kwargs = given.args, given.kwargs  # JAX takes no names beside shardings
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._part(*args, **kwargs)
        self._before(*args, **kwargs)
        with self._explaining(args, kwargs):
            return self._program(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        with self._explaining(args, kwargs):
            return self._program.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        with self._explaining(args, kwargs):
            return self._program.lower(*args, **kwargs)

    @contextlib.contextmanager
    def _explaining(self, args: Any, kwargs: Any) -> Iterator[None]:
        try:
            yield
        except errors.UserError:
            raise
        except (ValueError, TypeError, OverflowError, AssertionError) as error:
            why = self._explained(*args, **kwargs)
            if why is None:
                raise
            raise why from error

    def __getattr__(self, name: str) -> Any:  # other attributes of a jitted function
        if "_program" not in vars(self):  # `copy.copy` asks an object that is not made yet
            raise AttributeError(name)
        return getattr(self._program, name)
