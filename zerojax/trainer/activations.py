"""Estimates the temporaries of a train step without compiling it. This module adds up what its backward pass keeps and makes.

The residuals are counted from a trace of the loss on one device: exactly what automatic differentiation keeps under `remat`. The rest is
arithmetic over the largest block and the output projection.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.models import family as family_lib
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree
from zerojax.zero import stages
from zerojax.zero.blocks import where_used
from zerojax.zero.fp8 import modules as fp8_modules

DEPTHS = ("num_layers", "decoder_layers")  # fields of a model's config that count its blocks


# (stage, sequences of a pass on each device, remat, passes of a step) -> bytes of temporaries on each device
Estimate = Callable[[int, int, str, int], float]


def estimate(program: program_lib.Program) -> Estimate:
    """Returns an upper estimate of the temporaries of a program's step at any stage.

    With the state and the gradients it is an upper estimate of the peak, of which compiled steps took 0.82 to 0.95.
    Adapters are counted as if all weights were trained.

    Args:
      program: of any stage, whose arrays are abstract.
    """
    depths = {name: count for name in DEPTHS if (count := getattr(program.model, name, 0))}
    block, other = weights(program)
    width = jnp.dtype(program.config.policy.compute_dtype).itemsize

    @functools.cache
    def by_depth(rows: int, remat: str) -> dict[str, float]:
        """Returns what one more block of each kind keeps, by the name of its count, and under "" what all of them do not."""
        one = dict.fromkeys(depths, 1)
        first = residuals(program, rows, remat, one)
        found = {name: float(residuals(program, rows, remat, {**one, name: 2}) - first) for name in depths}
        return {"": first - sum(found.values()), **found}

    def temporaries(number: int, rows: int, remat: str, passes: int) -> float:
        sharded = stages.STAGES[number]
        kept, whole = by_depth(rows, remat), by_depth(rows, "none")
        total = kept[""] + sum(count * kept[name] for name, count in depths.items())
        weight = (width if sharded.params else 0) + 4  # gathered, and its gradient before it is reduced
        # A block's backward pass computes its residuals of "none" again, while the next one's weights arrive.
        again = max(whole[name] - kept[name] for name in depths)
        of_block = again + weight * block + (width * block if sharded.params else 0)
        beside = 4 * other if passes > 1 else 0  # the gradient of a pass, beside the sum of those before
        return total + beside + max(of_block, weight * other)

    return temporaries


def weights(program: program_lib.Program) -> tuple[int, int]:
    """Returns the elements of the largest block, and of the largest weight outside of blocks."""
    params = family_lib.abstract_params(program.weights.family.parts, program.model)
    pattern = re.compile(program.family.blocks)
    blocks: dict[str, int] = {}
    others = 0
    for path, leaf in tree.flatten(params):
        if block := tree.block_of(path, pattern):
            blocks[block] = blocks.get(block, 0) + tree.size(leaf)
        else:
            others = max(others, tree.size(leaf))
    return max(blocks.values(), default=0), others


def residuals(program: program_lib.Program, rows: int, remat: str, depths: Mapping[str, int]) -> int:
    """Returns the bytes that the forward pass of so many blocks keeps on a device for the backward pass of `rows` sequences."""
    loss, params, batch = _on_one_device(program, rows, remat, depths)
    kept = jax.eval_shape(lambda p, arrays: jax.vjp(lambda q: loss(q, arrays), p)[1], params, batch)
    found = collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(kept))
    found -= collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params))
    total = sum(count * math.prod(shape) * jnp.dtype(dtype).itemsize for (shape, dtype), count in found.items())
    return total // mesh_lib.size(program.mesh, mesh_lib.TOKENS)


def gradients(program: program_lib.Program, rows: int, depths: Mapping[str, int]) -> jex.ClosedJaxpr:
    """Returns the trace of the gradients of `rows` sequences through so many blocks on one device, nothing computed again.

    Matmuls are in fp8 where the step's are; none is kept at either end, where a few blocks stand for many.
    """
    fp8 = config_lib.make_fp8(program.config)
    fp8 = fp8 and dataclasses.replace(fp8, first=0, last=0)
    loss, params, batch = _on_one_device(program, rows, "none", depths, fp8)
    return jax.make_jaxpr(jax.grad(loss))(params, batch)


def _on_one_device(
    program: program_lib.Program, rows: int, remat: str, depths: Mapping[str, int], fp8: fp8_modules.Fp8 | None = None
) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the loss of so many blocks on one device, and its abstract weights and batch."""
    config = program.config
    family = program.weights.family
    model = dataclasses.replace(program.model, **depths)
    params = family_lib.abstract_params(family.parts, model)
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.identity()), params)
    mesh = mesh_lib.make_mesh(devices=list(program.mesh.devices.flat)[:1])
    partition = stages.partition_state(state, mesh=mesh, stage=0)
    batch = {name: jax.ShapeDtypeStruct((rows, *array.shape), array.dtype) for name, array in program.row.items()}

    def of_batch(given: PyTree, arrays: PyTree) -> jax.Array:
        return family.loss(model, given, arrays)

    loss = where_used.where_used(
        fp8_modules.stateless(fp8, of_batch, partition, family.blocks),
        partition.placements,
        **family_lib.gathering(family, model, config.policy.compute_dtype),
        remat=remat,
        recompute=config.model.recompute if remat == "dots" else "",
        offload=config.model.offload if remat != "none" else "",
    )
    return loss, params, batch
