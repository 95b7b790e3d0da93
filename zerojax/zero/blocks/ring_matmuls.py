"""Runs a module of a tensor-parallel model for the examples of one device after the other. This module sends activations along a ring,
beside the module's own matmuls.

Between matmuls each of m devices has examples of its own, and a module, such as a block's MLP, reads those of all. It treats each example
on its own, so it runs for the device's own examples while the next ones arrive. What it makes of a device's examples is a term of a sum
over devices, and the sum travels home beside the next run. On device j, with f the module with that device's shards of the weights,

    x[0] = x of device j          x[s] = x[s - 1] of device j + 1
    sum[m - 1] = f(x[m - 1])      sum[s] = f(x[s]) + sum[s + 1] of device j - 1          y = sum[0]

The backward pass is the same ring, with dy in place of x and the module's own backward pass in place of f. A ring of modules needs no array
of all examples; one of matmuls would have to join what they return. Collective matmuls: Wang et al., "Overlap communication with dependent
computation via decomposition", ASPLOS 2023.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import roles, traces
from zerojax.zero.blocks import float32_grads

Weights = Mapping[str, jax.Array]
# f(step, arrays, following) -> (terms, what else it makes, `following`): what follows waits for the matmuls that read the arrays directly.
_Run = Callable[[int, list[jax.Array], list[jax.Array]], tuple[list[jax.Array], Any, list[jax.Array]]]
_PASS_ON = traces.PERMUTATIONS | traces.MARKS | {traces.CAST}


@dataclasses.dataclass(frozen=True)
class RingOfExamples:
    """The devices of a ring: the axis of the `jax.shard_map` that runs it, their number and their platform; the dtype of weights."""

    axis: str
    ways: int
    platform: str
    dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def around(
    function: Callable[..., list[jax.Array]],
    ring: RingOfExamples,
    weights: Weights,
    arrays: list[jax.Array],
    others: list[jax.Array],
) -> list[jax.Array]:
    """Returns sums over devices of what they make of this device's examples, each [examples of a device, ...].

    Args:
      function: `function(weights, arrays, others)` returns this device's terms of the sums for the examples of any device.
      ring: the devices.
      weights: this device's shards, in float32; `function` gets them in the ring's dtype. Their gradients leave the matmuls in float32.
      arrays: of this device's examples, [examples of a device, ...].
      others: arrays without gradients that every device has of all devices' examples, [examples of all devices, ...].
    """
    return _forward(function, ring, weights, arrays, others)[0]


def _forward(function: Callable[..., Any], ring: RingOfExamples, weights: Weights, arrays: list, others: list) -> Any:
    # Rounded here and not outside: so `float32_grads` finds gradients in float32 without looking into the `shard_map`.
    narrow = {name: weight.astype(ring.dtype) for name, weight in weights.items()}

    def run(step: int, arrays: list[jax.Array], following: list[jax.Array]) -> Any:
        size, device = arrays[0].shape[0], (jax.lax.axis_index(ring.axis) + step) % ring.ways
        rows = [jax.lax.dynamic_slice_in_dim(other, device * size, size) for other in others]
        of_rows = lambda weights, arrays: _with_first(lambda arrays: function(weights, arrays, rows), arrays)  # noqa: E731
        results, pull, first = jax.vjp(of_rows, narrow, arrays, has_aux=True)
        # The results of this barrier are not read: a backward pass that recomputes what is read needs no matmul for it.
        return results, pull, jax.lax.optimization_barrier((following, first))[0]

    return _around(run, ring, arrays)


def _backward(function: Callable[..., Any], ring: RingOfExamples, pulls: list[Any], grads: list[jax.Array]) -> Any:
    def run(step: int, grads: list[jax.Array], following: list[jax.Array]) -> Any:
        def joined(results: Sequence[jax.Array]) -> Sequence[jax.Array]:
            nonlocal following  # the results are read behind the barrier, or JAX would drop them from it
            following, results = jax.lax.optimization_barrier((following, results))
            return results

        pull = float32_grads.in_float32(pulls[step], platform=ring.platform)
        (of_weights, of_arrays), _ = _with_first(pull, grads, lambda results: results[1], joined)
        return of_arrays, of_weights, following

    of_arrays, of_weights = _around(run, ring, grads)
    total = jax.tree.map(lambda *terms: sum(term.astype(jnp.float32) for term in terms), *of_weights)
    return total, of_arrays, None


around.defvjp(_forward, _backward)


def _around(run: _Run, ring: RingOfExamples, arrays: list[jax.Array]) -> tuple[list[jax.Array], list[Any]]:
    """Returns the sums that came home, and what else each run made."""
    ahead = [(device, (device - 1) % ring.ways) for device in range(ring.ways)]
    home = [(device, source) for source, device in ahead]
    terms, rest = [], []
    for step in range(ring.ways):
        # The next arrays wait for matmuls of this step, or the compiler would put nothing beside their way.
        following = _sent(arrays, ring, ahead) if step + 1 < ring.ways else []
        found, other, arrays = run(step, arrays, following)
        terms.append(found)
        rest.append(other)
    totals = terms.pop()
    while terms:
        totals = [own + other for own, other in zip(terms.pop(), _sent(totals, ring, home))]
    return totals, rest


def _sent(arrays: list[jax.Array], ring: RingOfExamples, pairs: list[tuple[int, int]]) -> list[jax.Array]:
    with jax.named_scope(roles.TENSOR_PARALLEL):
        return [jax.lax.ppermute(array, ring.axis, pairs) for array in arrays]


def _with_first(
    function: Callable[[Any], Any],
    arrays: Sequence[jax.Array],
    needed: Callable[[Any], Any] = lambda results: results,
    seen: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] = lambda results: results,
) -> tuple[Any, list[jax.Array]]:
    """Returns `function(arrays)`, and of it the matmuls that read these arrays as they are and that what is `needed` reads; `seen` may
    replace their results."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(arrays)
    form, jaxpr = jax.tree.structure(shapes), closed.jaxpr
    live = {
        id(eqn) for eqn in traces.live(jaxpr.eqns, jax.tree.leaves(needed(jax.tree.unflatten(form, jaxpr.outvars))))
    }
    given, first = set(jaxpr.invars), list[jax.Array]()

    def apply(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        with traces.scopes(eqn):
            results = traces.bind(eqn, inputs)
        if given.intersection(traces.variables(eqn.invars)):
            if eqn.primitive.name in _PASS_ON:
                given.update(eqn.outvars)
            elif eqn.primitive.name in traces.MATMULS and id(eqn) in live:
                results = seen(results)
                first.extend(results)
        return results

    return jax.tree.unflatten(form, traces.run(closed, jax.tree.leaves(arrays), apply)), first
