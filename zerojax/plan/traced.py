"""Gives the operations of a trace their time on a kind of GPU, without compiling it. This module lists the kernels that they become.

Matmuls and attention are kernels of their own. The other operations are fused: of what they return, the share `STORED` goes through memory.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from zerojax import traces
from zerojax.clock import kernels as kernels_lib
from zerojax.clock import rates as rates_lib
from zerojax.plan import flops

STORED = 0.3  # of the bytes that elementwise operations return and read again; fitted to compiled layers of 8B (tests/plan/test_traced.py)
_FREE = frozenset("broadcast_in_dim iota reshape squeeze transpose convert_element_type stop_gradient copy".split())
Kernels = dict[kernels_lib.KernelWork, float]


def kernels(program: traces.Program) -> Kernels:
    """Returns the kernels of a trace, with how often each runs; elementwise work is one.

    Args:
      program: a jaxpr, whose arrays are those of one device. Inside a `jax.shard_map` all of its devices count.
    """
    found: Kernels = {}
    nbytes = _walk(traces.opened(program)[0], 1.0, found)
    found[kernels_lib.KernelWork(kernels_lib.ELEMENTWISE, nbytes=STORED * nbytes)] = 1.0
    return found


def seconds(found: Mapping[kernels_lib.KernelWork, float], rates: rates_lib.GpuRates, share: int = 1) -> float:
    """Returns the time of kernels, each of which so many devices share by its features: the columns or the sum of a matmul, heads."""
    return math.fsum(times * (rates.seconds(shared(kernel, share)) + rates.gap) for kernel, times in found.items())


def shared(kernel: kernels_lib.KernelWork, ways: int) -> kernels_lib.KernelWork:
    """Returns the part of a kernel that one of several devices runs."""
    if ways == 1:
        return kernel
    dims = kernel.dims
    if kernel.kind == kernels_lib.MATMUL and len(dims) == 4 and dims[0] == 1:
        largest = max((1, 2, 3), key=lambda d: dims[d] if d > 1 else 0)  # not the tokens, which all of them have
        dims = tuple(max(1, size // ways) if d == largest else size for d, size in enumerate(dims))
    return dataclasses.replace(kernel, flops=kernel.flops / ways, nbytes=kernel.nbytes / ways, dims=dims)


def less(found: Kernels, other: Kernels) -> Kernels:
    """Returns the kernels that are not among others, and the elementwise work that is more."""
    left = {work: times - other.get(work, 0.0) for work, times in found.items() if work.kind != kernels_lib.ELEMENTWISE}
    rest = [sum(w.nbytes for w in own if w.kind == kernels_lib.ELEMENTWISE) for own in (found, other)]
    elementwise = kernels_lib.KernelWork(kernels_lib.ELEMENTWISE, nbytes=max(0.0, rest[0] - rest[1]))
    return {work: times for work, times in left.items() if times > 0} | {elementwise: 1.0}


def cost(rates: rates_lib.GpuRates) -> Callable[[Any], float]:
    """Returns f(an operation of a trace) -> its seconds, as `zero.pipeline.state.Pipeline` takes it."""

    def of(eqn: jex.JaxprEqn) -> float:
        found: Kernels = {}
        nbytes = _of_equation(eqn, 1.0, found)
        found[kernels_lib.KernelWork(kernels_lib.ELEMENTWISE, nbytes=STORED * nbytes)] = 1.0
        return seconds(found, rates)

    return of


def _walk(jaxpr: traces.Program, times: float, found: Kernels) -> float:
    """Adds the kernels of a trace, and returns the bytes that its elementwise operations return."""
    return math.fsum(_of_equation(eqn, times, found) for eqn in traces.opened(jaxpr)[0].eqns)


def _of_equation(eqn: jex.JaxprEqn, times: float, found: Kernels) -> float:
    name = eqn.primitive.name
    if flops.is_counted(eqn):
        if kernel := _kernel(eqn):
            found[kernel] = found.get(kernel, 0.0) + times
        return 0.0
    if name == "cond":
        longest = max(eqn.params["branches"], key=lambda own: sum(flops.count(own).values()))
        return _walk(longest, times, found)
    if flops.is_further(eqn):
        return 0.0
    if inner := list(traces.programs(eqn)):
        return math.fsum(_walk(own, times * flops.repeats(eqn), found) for own in inner)
    return 0.0 if name in _FREE else times * sum(map(_nbytes, eqn.outvars))


def _nbytes(var: Any) -> float:
    aval = var.aval
    is_array = hasattr(aval, "shape") and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return 2.0 * math.prod(aval.shape) * np.dtype(aval.dtype).itemsize if is_array else 0.0


def _kernel(eqn: Any) -> kernels_lib.KernelWork | None:
    """Returns the kernel of a matmul or of attention; None if it does nothing."""
    operations = flops.of_equation(eqn)
    (form,) = operations or ("bf16",)
    total = operations.get(form, 0.0)
    if not total:
        return None
    if eqn.primitive.name == "dot_general":
        (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
        left, right, made = (v.aval for v in (*eqn.invars[:2], eqn.outvars[0]))
        k, batch = (math.prod(left.shape[d] for d in own) for own in (contracted, batched))
        m, n = left.size // (k * batch), right.size // (k * batch)
        nbytes = sum(own.size * np.dtype(own.dtype).itemsize for own in (left, right, made))
        return kernels_lib.KernelWork(kernels_lib.MATMUL, form, total, nbytes, (batch, m, n, k))
    if direction := flops.attention(eqn):
        shape, keys = eqn.invars[0].aval.shape, max(eqn.invars[1].aval.shape[1:3])
        return kernels_lib.KernelWork(
            kernels_lib.ATTENTION, direction, total, 0.0, (shape[0], 1, keys, keys, shape[-1])
        )
    size = max(1024, round((total / 2) ** (1 / 3)))
    return kernels_lib.KernelWork(kernels_lib.MATMUL, form, total, 0.0, (1, size, size, size))
