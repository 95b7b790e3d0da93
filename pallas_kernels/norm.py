"""Adds up the squares of gradients, each read once. This module holds that kernel and its twin.

One pass gives the global norm and the verdict on overflow: a sum of squares is finite only where every gradient is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles as tiles_lib
from pallas_kernels.tiles import Launch

LAUNCHES = {"pallas": Launch(elements=2**16, step=4096, joins=True), "interpret": tiles_lib.INTERPRETED}


def sums_of_squares(
    grads: Sequence[jax.Array], scale: Any, *, implementation: str = "jnp", launch: Launch | None = None
) -> list[jax.Array]:
    """Returns for each array the sum of (array * scale)**2, a float32 scalar.

    Infinite or NaN where an element is, or where the sum exceeds float32 (a norm above 1.8e19).

    Args:
      grads: float32 or 16-bit arrays of any shape.
      scale: a float32 scalar that multiplies each gradient first: the loss scale's inverse.
      implementation: a key of IMPLEMENTATIONS.
      launch: how to launch; None takes LAUNCHES.
    """
    scale = jnp.asarray(scale, jnp.float32)
    return IMPLEMENTATIONS[implementation](grads, scale, launch or LAUNCHES.get(implementation, LAUNCHES["pallas"]))


def sum_of_squares_ref(grad: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the sum for one array: the kernel's twin."""
    return jnp.sum(jnp.square(grad.astype(jnp.float32) * scale))


def _by_twin(grads: Sequence[jax.Array], scale: jax.Array, _: Any) -> list[jax.Array]:
    return [sum_of_squares_ref(grad, scale) for grad in grads]


def _by_kernel(
    grads: Sequence[jax.Array], scale: jax.Array, launch: Launch, *, interpret: bool, in_groups: bool = False
) -> list[jax.Array]:
    """Adds up by the kernel; `in_groups` leaves large arrays, and those that are launched alone, to the twin."""
    sums: dict[int, jax.Array] = {}
    alike: dict[Any, list[int]] = {}
    for number, grad in enumerate(grads):
        if tiles_lib.fits(grad.size):
            alike.setdefault(grad.dtype, []).append(number)
        else:
            sums[number] = sum_of_squares_ref(grad, scale)
    for numbers in alike.values():
        for group in tiles_lib.groups([grads[number].size for number in numbers], launch):
            members = [numbers[place] for place in group]
            arrays = [grads[number] for number in members]
            if in_groups and not launch.gathers([array.size for array in arrays]):
                found = _by_twin(arrays, scale, launch)
            else:
                found = _launch(arrays, scale, launch=launch, interpret=interpret)
            sums.update(zip(members, found))
    return [sums[number] for number in range(len(grads))]


@functools.partial(jax.jit, static_argnames=("launch", "interpret"))
def _launch(grads: Sequence[jax.Array], scale: jax.Array, *, launch: Launch, interpret: bool) -> list[jax.Array]:
    """Runs the kernel over a group of arrays: each program writes the sum of its tile."""
    elements = launch.tile_of([grad.size for grad in grads])
    steps = max(1, elements // launch.step)
    tiles = [tiles_lib.flat(grad.size, elements) for grad in grads]
    counts = [tile.programs for tile in tiles]
    part = tiles_lib.flat(elements * max(counts), elements // steps)

    def kernel(scale_ref: Any, *refs: Any) -> None:
        *grad_refs, sums_ref = refs
        program = pl.program_id(0)

        def square(part: jax.Array) -> jax.Array:
            return jnp.square(part.astype(jnp.float32) * scale_ref[0])

        def load(step: jax.Array, number: int, masked: bool) -> jax.Array:
            spot = part.at(step)
            return tiles_lib.load(grad_refs[number], spot.elements, tiles[number].masks(spot, masked)[0])

        def work(own: jax.Array, choose: tiles_lib.Choose) -> None:
            def add_up(number: int, masked: bool) -> jax.Array:
                start = jnp.zeros((1, part.width), jnp.float32)
                return jax.lax.fori_loop(
                    0, steps, lambda step, total: total + square(load(own * steps + step, number, masked)), start
                )

            sums_ref[program] = jnp.sum(choose(add_up) if steps > 1 else square(choose(functools.partial(load, own))))

        tiles_lib.run(tiles, program, work)

    partial = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((sum(counts),), jnp.float32),
        grid=(sum(counts),),
        compiler_params=launch.params,
        interpret=interpret,
        name="sum_of_squares",
    )(scale[None], *map(jnp.ravel, grads))
    alike = [partial[first.start : first.stop].reshape(len(first), first.step) for first in tiles_lib.runs(tiles)]
    return [total for parts in alike for total in jnp.sum(parts, axis=1)]


IMPLEMENTATIONS: dict[str, Callable[..., list[jax.Array]]] = {
    "jnp": _by_twin,
    "pallas": functools.partial(_by_kernel, interpret=False),
    "grouped": functools.partial(_by_kernel, interpret=False, in_groups=True),
    "interpret": functools.partial(_by_kernel, interpret=True),
}
