"""Makes the matmuls and sums that compute weight gradients return float32. This module rewrites a traced backward pass.

A matmul accumulates in float32 whatever its operands are. JAX gives a weight's gradient the weight's dtype: it is rounded to 16 bits, then
cast back for a sum over devices in float32. This loses half of the precision and costs a pass over memory. With a float32 result the
matmul returns its accumulator. Sums over examples, which make the gradients of scales and biases, run in 16 bits throughout and gain more.
"""

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source
import jax.numpy as jnp

from zerojax import traces

# Not convolutions: on GPUs XLA has none of 16-bit operands with a float32 result, and would cast the operands.
_MATMUL = "dot_general"
_SUM = "reduce_sum"
_PASS_ON = traces.PERMUTATIONS | {"add", "add_any"}


def in_float32(pull: Callable[..., tuple], *, platform: str) -> Callable[..., tuple]:
    """Returns `pull` with leaves of its first result in float32: those that only matmuls, sums, casts, moves and additions make.

    Args:
      pull: a function such as `jax.vjp` returns; its first result holds the gradients of weights. Other results are unchanged.
      platform: of the devices. XLA's CPU backend refuses some matmuls of 16-bit operands with a float32 result; there operands are cast.
    """

    def run(*args: Any) -> tuple:
        closed, shapes = jax.make_jaxpr(pull, return_shape=True)(*args)
        program = _Widened(closed, range(len(jax.tree.leaves(shapes[0]))), casts=platform == "cpu")
        return jax.tree.unflatten(jax.tree.structure(shapes), program.run(jax.tree.leaves(args)))

    return run


class _Widened:
    """A program, and which of its equations return float32.

    Args:
      program: a jaxpr, closed or not.
      outputs: the indices of its results that may be float32.
      casts: casts the operands of matmuls, too.
    """

    def __init__(self, program: traces.Program, outputs: Collection[int], *, casts: bool):
        self._program, self._casts = program, casts
        jaxpr, _ = traces.opened(program)
        self._makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        read = [var for eqn in jaxpr.eqns for var in eqn.invars] + list(jaxpr.outvars)
        self._reads = collections.Counter(filter(traces.is_var, read))
        self._ends: set[int] = set()  # matmuls, sums and casts, by id
        self._passes_on: set[int] = set()
        self._inside: dict[int, _Widened] = {}
        self.widened = {number for number in outputs if self._widen(jaxpr.outvars[number])}

    def _widen(self, var: jex.Var) -> bool:
        """Marks the equations that make a variable, and returns whether it is float32 now."""
        eqn = self._makers.get(var) if traces.is_var(var) else None
        if eqn is None or self._reads[var] != 1 or _dtype(var) not in (jnp.bfloat16, jnp.float16):
            return False
        name = eqn.primitive.name
        if name == _SUM and self._widen(eqn.invars[0]):  # of a sum
            self._passes_on.add(id(eqn))
            return True
        if name in (_MATMUL, _SUM) or (name == traces.CAST and _dtype(eqn.invars[0]) == jnp.float32):
            self._ends.add(id(eqn))
            return True
        if name in _PASS_ON:  # if only one term of a sum can be widened, it is cast back
            if all(self._widen(term) for term in eqn.invars):
                self._passes_on.add(id(eqn))
            return id(eqn) in self._passes_on
        if name not in traces.CHECKPOINTS:
            return False
        before = self._inside[id(eqn)].widened if id(eqn) in self._inside else set()
        program = _Widened(eqn.params["jaxpr"], before | {eqn.outvars.index(var)}, casts=self._casts)
        if program.widened != before:
            self._inside[id(eqn)] = program
        return program.widened != before

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Returns the results; those in `widened` are float32."""

        def apply(eqn: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            with traces.scopes(eqn):
                return self._results(eqn, inputs)

        results = zip(traces.run(self._program, args, apply), traces.opened(self._program)[0].outvars)
        return [
            value if number in self.widened else _as_traced(value, atom) for number, (value, atom) in enumerate(results)
        ]

    def _results(self, eqn: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        params = dict(eqn.params)
        if id(eqn) not in self._passes_on:
            inputs = [_as_traced(value, atom) for value, atom in zip(inputs, eqn.invars)]
        if id(eqn) in self._ends:
            if eqn.primitive.name == traces.CAST:
                return inputs
            is_sum = eqn.primitive.name == _SUM
            inputs = [value.astype(jnp.float32) for value in inputs] if is_sum or self._casts else inputs
            params |= {} if is_sum else {"preferred_element_type": jnp.dtype(jnp.float32)}
        if id(eqn) in self._inside:
            program = self._inside[id(eqn)]
            with source.reset_name_stack():
                traced = jax.make_jaxpr(lambda *args: program.run(args))(*inputs)
            if traced.consts:  # a checkpoint has none of its own
                return program.run(inputs)
            params["jaxpr"] = traced.jaxpr
        return traces.bind(eqn, inputs, params)


def _as_traced(value: jax.Array, atom: traces.Atom) -> jax.Array:
    """Returns a value in the dtype that it was traced with."""
    dtype = _dtype(atom)
    is_other = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and value.dtype != dtype
    return value.astype(dtype) if is_other else value


def _dtype(atom: traces.Atom) -> Any:
    return getattr(atom.aval, "dtype", None)  # effects' tokens have none
