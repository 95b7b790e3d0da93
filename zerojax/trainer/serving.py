"""Counts what an engine holds of a config's model. This module connects a config to `zerojax.plan.serving`. It compiles nothing."""

import collections
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax import errors, precision, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.inference.engine import programs, weights
from zerojax.models import family as family_lib
from zerojax.plan import serving
from zerojax.trainer import model as model_lib
from zerojax.trainer import settings as settings_lib
from zerojax.tree import Leaf
from zerojax.zero import stages
from zerojax.zero.step_programs import arrivals

EXPERT = "expert"  # in the paths of a mixture's weights, whose first dim counts experts


def served(config: settings_lib.Config, format: str) -> serving.Served:
    """Returns what an engine of a config's model holds on each of `config.mesh.model` devices, for texts of `config.seq_len` tokens.

    Args:
      config: of a run; what it says of training is not read.
      format: of the kernels; see `zerojax.Engine`.

    Raises:
      UserError: the model is not a decoder, has no room for such texts, or the mesh has axes that serving has not.
    """
    errors.one_of("format", format, weights.FORMATS)
    for axis in ("replica", "context", "pipe"):
        if getattr(config.mesh, axis) != 1:
            raise UserError(
                f"mesh.{axis}: is {getattr(config.mesh, axis)}, and serving is planned over mesh.model; set 1"
            )
    is_streamed = config.offload.params != "none"
    if is_streamed and (config.offload.params != "host" or config.mesh.model > 1 or format != "none"):
        raise UserError(
            f"offload.params: is {config.offload.params!r}, and an engine streams weights from host memory to one device, as they are; set "
            "'host', mesh.model=1 and no --format, or offload.params='none'"
        )
    family, model = model_lib.shape(config, model_lib.source(config))
    if family.is_classifier or family.is_encoder_decoder:
        raise UserError("--serve: plans decoders; choose a model of that kind with model.preset or init_from")
    limit = family.positions(model)
    if limit is not None and config.seq_len > limit:
        raise UserError(f"seq_len: is {config.seq_len}, and the model has {limit} positions; lower it")
    ways = config.mesh.model
    if ways > len(jax.devices()):
        raise UserError(
            f"mesh.model: is {ways}, and --serve sees {len(jax.devices())} devices; set emulate_devices={ways}"
        )
    mesh = mesh_lib.make_mesh(model=ways, devices=jax.devices()[:ways])
    dtype = jnp.dtype(precision.PRECISIONS[config.precision].compute_dtype or jnp.float32)
    model = dataclasses.replace(model, attention="xla")
    shapes = family_lib.abstract_params(family.parts, model)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    placed = weights.abstract(family, model, abstract, mesh, dtype, format)
    is_tied, count = not family_lib.heads(family, model), getattr(model, "num_experts", 0)
    on_host = _on_host(config, abstract, mesh) if is_streamed else frozenset()
    sizes, arriving = {"dense": 0, "experts": 0, "rows": 0}, collections.Counter[str]()
    active, share = 0.0, model.experts_per_token / count if count else 0.0
    for path, leaf in tree.flatten(placed):
        is_mixed = bool(count) and EXPERT in path and leaf.shape[0] == count
        is_read = not path.endswith("/embedding") or (is_tied and path == "embed/embedding")
        sizes["experts" if is_mixed else "dense" if is_read else "rows"] += _nbytes(leaf)
        if path in on_host:
            arriving[tree.block_of(path, re.compile(family.blocks)) or path] += _nbytes(leaf)
    for path, leaf in tree.flatten(abstract):
        is_mixed = bool(count) and EXPERT in path and leaf.shape[0] == count
        if not path.endswith("/embedding") or (is_tied and path == "embed/embedding"):
            active += math.prod(leaf.shape) * (share if is_mixed else 1.0)
    shape = programs.Shape(1, config.seq_len, 0)
    special = family_lib.SpecialTokens()
    made = programs.Programs(family, model, mesh, shape, special, lambda function: function, None, ())
    caches, _ = jax.eval_shape(made._empty, abstract)
    cache = sum(_nbytes(leaf, made._sharding(leaf)) for leaf in jax.tree.leaves(caches))
    attended = 2 * model.num_heads * model.head_dim * config.seq_len * model.num_layers
    return serving.Served(
        devices=ways,
        length=config.seq_len,
        dtype="bf16" if dtype == jnp.bfloat16 else "fp32",
        format=format,
        weights=sum(sizes.values()) - arriving.total() + sum(n for _, n in arriving.most_common(arrivals.AHEAD + 2)),
        dense=sizes["dense"],
        experts=sizes["experts"],
        share=share,
        cache=cache,
        row=model.vocab_size * (jnp.dtype(jnp.float32).itemsize + 1),
        flops=2 * (active + attended) / ways,
        streamed=arriving.total(),
        runs=_runs(family, model, placed, ways, format, is_streamed=is_streamed),
    )


def _runs(family: family_lib.Family, model: Any, placed: Any, ways: int, format: str, *, is_streamed: bool) -> str:
    """Returns which matmuls an engine on GPUs adds a token with, in words (`inference.engine.weights.multiply`)."""
    plain = "the compiler's matmuls"
    if is_streamed:
        return f"{plain}, block by block"
    if format == "none":
        several, one = plain, "a kernel for each matmul" if ways == 1 else plain
    elif ways == 1:
        one = f"kernels that read {format}"
        several = f"{one} for up to {weights.MOST_ROWS}, and beyond {plain} of dequantized weights, whose bytes are not counted"
    else:
        one = several = f"{plain} of dequantized weights, whose bytes are not counted"
    if family.one_row(model, placed, ways) is not None:
        one = "five kernels a layer"
    return one if one == several else f"for a single text (slots=1) {one}; for several {several}"


def _on_host(config: settings_lib.Config, abstract: Any, mesh: Mesh) -> frozenset[str]:
    """Returns the paths of the weights that are in host memory."""
    offload = {name: getattr(config.offload, name) for name in ("params", "params_fraction", "params_on_device")}
    partition = stages.partition_state({"params": abstract}, mesh=mesh, stage=3, offload=offload)
    return frozenset(path.removeprefix("params/") for path in partition.on_host)


def _nbytes(leaf: Leaf, sharding: Any = None) -> int:
    """Returns the bytes of an array on one device."""
    shape = (sharding or leaf.sharding).shard_shape(tuple(leaf.shape))
    return math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
