"""Plans what an engine does with a config's model. This module connects a config to `zerojax.plan.serving`: it counts what an engine holds,
and compiles its programs for GPUs that may be absent."""

import collections
import dataclasses
import math
import re
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax import errors, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.inference.engine import engine, programs, streamed, weights
from zerojax.interop import huggingface
from zerojax.models import family as family_lib
from zerojax.plan import search, serving, targets
from zerojax.trainer import model as model_lib
from zerojax.trainer import setting_names
from zerojax.trainer import settings as settings_lib
from zerojax.tree import PyTree
from zerojax.zero import stages
from zerojax.zero.blocks import tensor_parallel
from zerojax.zero.step_programs import arrivals
from zerojax.zero.weights import partition as partition_lib

EXPERT = "expert"  # in the paths of a mixture's weights, whose first dim counts experts


def served(config: settings_lib.Config, format: str) -> serving.Served:
    """Returns what an engine of a config's model holds on each of `config.mesh.model` devices, for texts of `config.seq_len` tokens.

    Args:
      config: of a run; what it says of training is not read.
      format: of the kernels; see `zerojax.Engine`.

    Raises:
      UserError: the model is not a decoder, has no room for such texts, or the mesh has axes that serving has not.
    """
    family, model, dtype = _model(config, format)
    ways = config.mesh.model
    if ways > len(jax.devices()):
        raise UserError(
            f"mesh.model: is {ways}, and --serve sees {len(jax.devices())} devices; set emulate_devices={ways}"
        )
    mesh = mesh_lib.make_mesh(model=ways, devices=jax.devices()[:ways])
    model, is_streamed = dataclasses.replace(model, attention="xla"), config.offload.params != "none"
    abstract = _abstract(family, model, dtype)
    shapes = {path: leaf.shape for path, leaf in tree.flatten({"params": abstract})}
    if whole := tensor_parallel.overrides(family.parallel.weights, shapes, mesh)[1]:
        setting_names.tell(f"config.mesh: {whole}")
    placed = weights.abstract(family, model, abstract, mesh, dtype, format)
    is_tied, mixture = not family_lib.heads(family, model), family_lib.mixture(model)
    count = 0 if mixture is None else mixture.experts
    on_host = _partition(config, abstract, mesh).on_host if is_streamed else ()
    sizes, arriving = {"dense": 0, "experts": 0, "rows": 0}, collections.Counter[str]()
    share = mixture.per_token / count if count else 0.0

    def kind(path: str, leaf: Any) -> str:
        is_read = not path.endswith("/embedding") or (is_tied and path == "embed/embedding")
        return "experts" if count and EXPERT in path and leaf.shape[0] == count else "dense" if is_read else "rows"

    for path, leaf in tree.flatten(placed):
        sizes[kind(path, leaf)] += tree.shard_bytes(leaf)
        if f"params/{path}" in on_host:
            arriving[tree.block_of(path, re.compile(family.blocks)) or path] += tree.shard_bytes(leaf)
    used = {"experts": share, "dense": 1.0, "rows": 0.0}
    active = sum(math.prod(leaf.shape) * used[kind(path, leaf)] for path, leaf in tree.flatten(abstract))
    shape, special = programs.Shape(1, config.seq_len, 0), family_lib.SpecialTokens()
    made = programs.Programs(family, model, mesh, shape, special, None)
    caches, _ = made.abstract(abstract)
    cache = sum(map(tree.shard_bytes, jax.tree.leaves(caches)))
    held = [jax.tree.leaves(layer) for layer in family.caches(model)]
    states = zip(jax.tree.leaves(caches), jax.tree.leaves(held), strict=True)
    attending = sum(any(one.positions for one in layer) for layer in held)
    attended = 2 * model.num_heads * model.head_dim * config.seq_len * attending
    attended += sum(2 * math.prod(one.shape) for layer in held for one in layer if one.positions is None)
    return serving.Served(
        devices=ways,
        length=config.seq_len,
        dtype=next(name for name, known in huggingface.DTYPES.items() if known == dtype),
        format=format,
        weights=sum(sizes.values()) - arriving.total() + sum(n for _, n in arriving.most_common(arrivals.AHEAD + 2)),
        dense=sizes["dense"],
        experts=sizes["experts"],
        share=share,
        cache=cache,
        row=model.vocab_size * (jnp.dtype(jnp.float32).itemsize + 1),
        kept=sum(tree.shard_bytes(leaf) for leaf, one in states if one.positions is None),
        flops=2 * (active + attended) / ways,
        streamed=arriving.total(),
        runs=_runs(family, model, placed, ways, format, is_streamed=is_streamed),
    )


def foretold(
    config: settings_lib.Config,
    format: str,
    target: targets.Target,
    devices: Sequence[Any],
    slots: Sequence[int],
    prompt: int,
) -> serving.Foretold:
    """Returns how long an engine of a config's model takes for a token, and to read a prompt, by the clock's rates of the target.

    Of a deep model it compiles two of few layers, and continues them in a straight line; of one that streams its weights, whose equal
    blocks are one program, the model itself.

    Args:
      config, format: see `served`.
      target: a kind of GPU that has rates.
      devices: of the target, `config.mesh.model`; they may be absent.
      slots: the numbers of texts that are answered at once.
      prompt: the tokens of the prompt, which one program reads.

    Raises:
      UserError: as `served`; or the prompt and a token have no room in a text.
    """
    if not 0 < prompt < config.seq_len:
        raise UserError(
            f"--prompt: is {prompt}, and a text has seq_len={config.seq_len} tokens, at least one of them new; lower it"
        )
    family, model, dtype = _model(config, format)
    mesh = mesh_lib.make_mesh(model=config.mesh.model, devices=devices)
    few = search.few_layers(model) if config.offload.params == "none" else ()

    def time_of(rows: int, tokens: int) -> serving.ProgramTime:
        times, steps = {}, 1
        if not tokens and config.offload.params == "none":
            steps = programs.steps_of(_stored(family, model, dtype, format, mesh, rows), rows, mesh)
        for depth in few or (model.num_layers,):
            own = dataclasses.replace(model, num_layers=depth)
            compiled = _compiled(config, family, own, dtype, format, mesh, rows, tokens, steps)
            times[depth] = serving.time_of(compiled, target, mesh, rows, tokens)
        return serving.of_deep(times, model.num_layers)

    return serving.Foretold(tuple(time_of(rows, 0) for rows in slots), time_of(1, prompt), few)


def _stored(family: family_lib.Family, model: Any, dtype: Any, format: str, mesh: Mesh, slots: int) -> PyTree:
    """Returns the weights as an engine that does not stream them stores them, as ShapeDtypeStructs."""
    params = weights.abstract(family, model, _abstract(family, model, dtype), mesh, dtype, format)
    return weights.for_one_row(family, model, params, mesh, weights.kernels_of(mesh)) if slots == 1 else params


def _compiled(
    config: settings_lib.Config,
    family: family_lib.Family,
    model: Any,
    dtype: Any,
    format: str,
    mesh: Mesh,
    slots: int,
    tokens: int,
    steps: int,
) -> programs.CompiledPrograms:
    """Compiles what an engine runs for a token of each row, or for a prompt; see `programs.Programs.compiled`."""
    params = _abstract(family, model, dtype)
    model = engine.with_kernel(model, family, mesh, params, dtype)
    shape, special = programs.Shape(slots, config.seq_len, 0), family_lib.SpecialTokens()
    made: programs.Programs
    if config.offload.params == "none":
        params, kernels = _stored(family, model, dtype, format, mesh, slots), weights.kernels_of(mesh)
        made = programs.Programs(
            family, model, mesh, shape, special, kernels, has_transposed=weights.has_transposed(params), steps=steps
        )
    else:
        partition = _partition(config, params, mesh)
        params = partition.abstract_state["params"]
        made = streamed.StreamedPrograms(family, model, mesh, shape, special, partition)
    # The abstract mesh tells JAX 0.11 and later for which GPU kernels are lowered.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.numpy_rank_promotion("allow"):
        return made.compiled(params, tokens)


def _model(config: settings_lib.Config, format: str) -> tuple[family_lib.Family, Any, Any]:
    """Returns the family, the config and the dtype of a config's model. Raises as `served` does."""
    errors.one_of("format", format, weights.FORMATS)
    for axis in ("replica", "context", "expert", "pipe"):
        if getattr(config.mesh, axis) != 1:
            raise UserError(
                f"mesh.{axis}: is {getattr(config.mesh, axis)}, and serving is planned over mesh.model; set 1"
            )
    if config.offload.params != "none" and (
        config.offload.params != "host" or config.mesh.model > 1 or format != "none"
    ):
        raise UserError(
            f"offload.params: is {config.offload.params!r}, and an engine streams weights from host memory to one device, as they are; set "
            "'host', mesh.model=1 and no --format, or offload.params='none'"
        )
    family, model = model_lib.shape(config, model_lib.source(config))
    if not family_lib.writes_text(family, model) or family.is_encoder_decoder:
        raise UserError("--serve: plans decoders; choose a model of that kind with model.preset or init_from")
    limit = family.positions(model)
    if limit is not None and config.seq_len > limit:
        raise UserError(f"seq_len: is {config.seq_len}, and the model has {limit} positions; lower it")
    return family, model, jnp.dtype(config.policy.compute_dtype or jnp.float32)


def _abstract(family: family_lib.Family, model: Any, dtype: Any) -> Any:
    """Returns the weights of a model, as ShapeDtypeStructs."""
    return tree.of_dtype(family_lib.abstract_params(family.parts, model), dtype)


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
        hopper = types.SimpleNamespace(device_kind=targets.get("h200").device_kind, num_cores=1)
        is_launched = ways == 1 and family.transposed(model, placed, hopper) is not None
        one = f"five kernels a layer{' (two on a Hopper GPU)' if is_launched else ''}"
    return one if one == several else f"for a single text (slots=1): {one}; for several: {several}"


def _partition(config: settings_lib.Config, abstract: Any, mesh: Mesh) -> partition_lib.Partition:
    """Returns where the weights of a model are that is streamed from host memory."""
    offload = {name: getattr(config.offload, name) for name in ("params", "params_fraction", "params_on_device")}
    return stages.partition_state({"params": abstract}, mesh=mesh, stage=3, offload=offload)
