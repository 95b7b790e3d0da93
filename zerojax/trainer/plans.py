"""Plans the train step of a config, or searches for the fastest settings. This module connects the config to `zerojax.plan`."""

import collections
import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax import precision, tree
from zerojax.clock import rates as rates_lib
from zerojax.errors import UserError
from zerojax.models import decoding
from zerojax.models import family as family_lib
from zerojax.ops import expert_parallel, fp8, tiles
from zerojax.plan import arithmetic, scale, search, step_plan, targets, traced
from zerojax.trainer import activations, beside, rollout_sizes, setting_names, steps
from zerojax.trainer import config as config_lib
from zerojax.trainer import model as model_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib
from zerojax.zero import stages, state_bytes
from zerojax.zero.offload import step_by_block
from zerojax.zero.weights import partition as partition_lib

FORWARD_AGAIN = 1.25  # of a step's operations, at least, where nothing but the inputs of layers is kept: 4/3 without embedding and head


@dataclasses.dataclass(frozen=True)
class Change:
    """Settings that would fit: the flags to add to the command line, and the peak on each device in bytes."""

    flags: str
    peak: int


def plan_config(config: settings_lib.Config, target: str, topology: str = "", **how: Any) -> step_plan.Plan:
    """Plans the trainer's step under a config. The target devices need not be present. `how` is further for `step_plan.plan_step`.

    Raises:
      UserError: the config, the target or the topology is invalid, or an extra is not installed.
    """
    program = program_lib.build(config, devices=targets.devices(target, topology))
    return plan_program(program, target, **how)


def partitions(
    config: settings_lib.Config, target: str, topology: str = ""
) -> tuple[partition_lib.Partition, partition_lib.Partition]:
    """Returns how a config shards its state on the target's devices, and the same at stage 0. Compiles nothing."""
    program = program_lib.build(config, devices=targets.devices(target, topology))
    return program.partition, program.baseline


def plan_program(program: program_lib.Program, target: str, **how: Any) -> step_plan.Plan:
    """Plans a built program on its own mesh. `how` is further for `step_plan.plan_step`. Errors name config keys."""
    config, sizes = program.config, program.sizes
    with setting_names.of_config():
        plan = step_plan.plan_step(
            program.train_step,
            program.partition.abstract_state,
            program.abstract_batch,
            mesh=program.mesh,
            target=target,
            placement=steps.as_sent(config, program.family, program.partition),
            tokens=program.tokens_per_step,
            compute_dtype=config.policy.compute_dtype,
            passes=sizes.grad_accum,
            by_hand=True,
            flops_per_token=program.flops_per_token,
            exchange=exchange_of(program),
            **how,
        )
        models = beside.nbytes(program)
        free = None if plan.usable is None else plan.usable - models
        return dataclasses.replace(plan, beside=models, rollouts=rollouts_of(program, free))


def rollouts_of(program: program_lib.Program, usable: int | None = None) -> step_plan.RolloutDevices | None:
    """Returns what the devices hold that draw answers, or None if no engine draws any.

    Args:
      program: of the run.
      usable: the bytes that a device which trains has for the state and these; None: they are not known.
    """
    if not program.config.draws_by_engine:
        return None
    answers, model = program.sizes.global_batch_size, rollout_sizes.model_of(program)
    if program.rollout_mesh is not None:
        own = program.rollouts
        found = rollout_sizes.bytes_of(program, model, own, program.copies(own))
        return step_plan.RolloutDevices(program.rollout_mesh.size, answers, *found)
    state = rollout_sizes.of_state(program)
    held = rollout_sizes.held(program, model, None if usable is None else usable - state)
    refused = "" if held.fits else held.line
    return step_plan.RolloutDevices(0, answers, held.weights, held.caches, state, refused)


def exchange_of(program: program_lib.Program) -> step_plan.Exchange | None:
    """Returns the theory of tokens that travel to their experts in a step, or None if they do not travel."""
    config, placements, placed = program.config, program.partition.placements, program.partition.pipeline
    ways = mesh_lib.size(program.partition.mesh, mesh_lib.EXPERT)
    held = {path: own for path, own in placements.items() if own.is_experts and path.endswith("experts/down")}
    if not held:
        return None
    stacks = list(held.values())
    if placed:  # those of the group that has most
        count = max(collections.Counter(placed.homes[path] for path in held).values())
        stacks = stacks[:count]
    tokens = program.sizes.micro_batch_size * config.seq_len // mesh_lib.size(program.mesh, mesh_lib.TOKENS)
    compute = config.policy.compute_dtype
    once = expert_parallel.cost(
        tokens * program.model.mixture.per_token,
        (stacks[0].shape or (0,))[-1],
        ways,
        config.experts.load,
        jnp.dtype(compute or jnp.float32).itemsize,
        parts=config.experts.parts,
        again=config.model.remat != "none",
    )
    received = program.sizes.grad_accum * len(stacks) * sum(once.values())
    return step_plan.Exchange(config.experts.load, received, parts=config.experts.parts)


def search_config(
    config: settings_lib.Config,
    target: str,
    topology: str = "",
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    most_compiles: int = 12,
    memory: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    cluster: scale.Network | None = None,
    rates: rates_lib.GpuRates | None = None,
) -> list[search.Outcome]:
    """Returns the outcome of each setting, with the fastest that fits first; see `search.search`.

    Args:
      config: what to train. Every candidate keeps its global batch size, which is derived if it is 0.
      target, topology: see `targets.devices`.
      grid: choices by setting; None takes `search.default_grid`.
      most_compiles, memory, say: see `search.search`.
      cluster: the links between hosts; None: the target's.
      rates: the clock's; None: the target's table.

    Raises:
      UserError: the target's memory is not known, or no candidate keeps the batch.
    """
    _check_all_train(config, "--search")
    devices = targets.devices(target, topology)
    if memory is None and (memory := targets.get(target).usable) is None:
        raise UserError(
            f"target {target}: its memory is unknown, so --search cannot tell what fits; choose another target"
        )
    rates = _rates(rates, target, cluster, len(devices))
    work = _work(config, devices) if rates is not None and grid is None else None
    origin = config
    if work is not None and _names_layers(config):
        config = settings_lib.changed(config, {"model.recompute": "", "model.offload": ""})
        say("model.recompute and model.offload name single layers, and are left out")
    if work is not None and _is_recurrent(config):
        say(
            "mesh.context is not tried, since what recurrent layers hand on over it has no price; plan without --search to see a size of it"
        )

    def build(candidate: search.Candidate) -> search.Built:
        applied = _applied(config, candidate)
        if candidate.pipe > 1 and work is not None:
            line = functools.partial(_line_of_pipeline, applied, target, devices, work.layers, rates)
            whole = lambda: plan_program(program_lib.build(applied, devices=devices), target, rates=rates)  # noqa: E731
            return search.Built(0, whole, line, trusts_line=True)
        program = program_lib.build(applied, devices=devices)
        held = sum(state_bytes.bytes_per_device(program.partition).values())
        line = functools.partial(_line, applied, target, devices, program.model, rates)
        least = _least_seconds(program, rates, candidate) if rates else 0.0
        plan = functools.partial(plan_program, program, target, rates=rates)
        is_deep = _is_deep(applied, program)
        trusts_line = program.model.num_layers > search.VERY_DEEP or (work is not None and per_host < len(devices))
        return search.Built(held, plan, line if is_deep else None, least, trusts_line)

    per_host = len(devices) // search.hosts_of(devices)
    batch = config_lib.batch_sizes(config, len(devices) // config_lib.per_example(config.mesh)).global_batch_size
    others = {**search.default_grid(devices), **_offloads(config), **_of_long(config), **_axes(config, devices)}
    others["pipe"] = (config.mesh.pipe,)
    if len(devices) == 1:  # at which all stages that keep the weights on each device are the same
        others["stage"] = (2, 3)
    choices = functools.partial(_choices, config, len(devices), batch, keeps_columns=grid is not None)
    candidates = choices({**_own_axes(config), **(grid or others)})
    if work is not None:
        assert rates is not None
        tiers: dict[tuple[bool, bool], list[search.Candidate]] = {}
        for candidate in sorted(candidates, key=lambda one: (one.offload != "none", one.params != "none")):
            tiers.setdefault((candidate.offload != "none", candidate.params != "none"), []).append(candidate)
        if (False, False) in tiers:
            tiers[False, False] = choices(_grid_of_axes(config, devices))
        for tier in tiers.values():  # the next one only where nothing fits with less offloaded
            found = search.by_arithmetic(
                tier,
                lambda candidate: arithmetic.guess(work, candidate, len(devices), rates, per_host),
                build,
                most_compiles=most_compiles,
                memory=memory,
                say=say,
            )
            if any(not outcome.reason for outcome in found):
                return _with_flags(found, config, origin)
    found = search.search(candidates, build, most_compiles=most_compiles, memory=memory, say=say)
    return _with_flags(found, config, origin)


def _rates(
    rates: rates_lib.GpuRates | None, target: str, cluster: scale.Network | None, gpus: int
) -> rates_lib.GpuRates | None:
    """Returns the given rates, or else the target's, with the links of a cluster if there is one."""
    found = rates or rates_lib.of(target)
    if found is None or cluster is None:
        return found
    return scale.OnCluster(found.name, found.figures, found.sources, cluster, gpus, gpus)


def _check_all_train(config: settings_lib.Config, flag: str) -> None:
    """Raises a UserError if some devices do not train, which what compares meshes does not know."""
    if count := config.rollout_devices:
        raise UserError(
            f"config.grpo.rollout_devices: is {count}, and {flag} compares meshes of all devices; set it to 0, and --topology to the rest"
        )


def _choices(
    config: settings_lib.Config, ways: int, batch: int, grid: Mapping[str, Sequence[Any]], *, keeps_columns: bool
) -> list[search.Candidate]:
    """Returns a grid's candidates on so many devices, each with the config's `model.by_columns` where that is allowed, and
    may pay or is kept."""
    candidates = search.candidates_of(grid, ways=ways, global_batch_size=batch)
    if not config.model.by_columns:
        return candidates
    model = model_lib.shape(config, None)[1]

    def has_columns(c: search.Candidate) -> bool:
        # What only a step has that is one program and gathers weights. Where the tokens of all devices that share the state are more than
        # the rows of embedding and head, sending them takes longer than these (`findings.columns_send_more_than_weights`).
        of_state = ways // (c.replica * c.per_example)
        is_open = stages.STAGES[c.stage].params and c.pipe == c.model == 1
        divides = not any(size % (of_state * c.context) for size in (model.vocab_size, model.embed_dim))
        pays = of_state * c.micro_batch_size * config.seq_len <= 2 * model.vocab_size
        return is_open and divides and (pays or keeps_columns)

    return [dataclasses.replace(c, by_columns=has_columns(c)) for c in candidates]


def _with_flags(
    outcomes: Sequence[search.Outcome], config: settings_lib.Config, origin: settings_lib.Config
) -> list[search.Outcome]:
    """Returns the outcomes, the best with its flags."""
    return [
        outcome if outcome.reason else dataclasses.replace(outcome, flags=_flags(config, outcome.candidate, origin))
        for outcome in outcomes
    ]


def axes_config(
    config: settings_lib.Config,
    target: str,
    topology: str = "",
    cluster: scale.Network | None = None,
    rates: rates_lib.GpuRates | None = None,
) -> list[arithmetic.AxisCost]:
    """Returns, for each axis of a mesh alone and each of its sizes, the fastest settings that fit, by arithmetic. Compiles nothing.

    Args:
      config, target, topology, cluster, rates: as of `search_config`.

    Raises:
      UserError: the clock has no rates of the target, the model's layers are few or not alike, or nothing fits.
    """
    _check_all_train(config, "--axes")
    devices = targets.devices(target, topology)
    rates, memory = _rates(rates, target, cluster, len(devices)), targets.get(target).usable
    config = settings_lib.changed(config, {"model.recompute": "", "model.offload": ""})
    is_alone = (config.offload.optimizer, config.offload.params) == ("none", "none")
    work = _work(config, devices) if rates is not None and is_alone else None
    if work is None or rates is None or memory is None:
        raise UserError(
            f"--axes: needs a decoder of {search.DEEP} or more equal layers, mesh.expert=1, nothing offloaded and a GPU of known rates; "
            "see docs/plan.md in the repository"
        )
    batch = config_lib.batch_sizes(config, len(devices) // config_lib.per_example(config.mesh)).global_batch_size
    per_host = len(devices) // search.hosts_of(devices)
    candidates = search.candidates_of(_grid_of_axes(config, devices), ways=len(devices), global_batch_size=batch)
    best: dict[tuple[tuple[str, int], ...], arithmetic.AxisCost] = {}
    for candidate in candidates:
        axes = tuple((axis, size) for axis in search.AXES if (size := getattr(candidate, axis)) > 1)
        guess = arithmetic.guess(work, candidate, len(devices), rates, per_host)
        is_fastest = axes not in best or guess.seconds < best[axes].guess.seconds
        if len(axes) < 2 and guess.peak <= memory and is_fastest:
            tokens = batch * config.seq_len / len(devices)
            best[axes] = arithmetic.AxisCost(search.words(candidate), guess, tokens, _places(candidate))
    if not best:
        raise UserError(
            f"--axes: no axis alone fits the model and {batch} examples into the memory of {len(devices)} devices; --search combines axes"
        )
    return [
        best[axes] for axes in sorted(best, key=lambda own: [(search.AXES.index(axis), size) for axis, size in own])
    ]


def _grid_of_axes(config: settings_lib.Config, devices: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Returns the choices that arithmetic compares: all that keep the state on the devices."""
    hosts = search.hosts_of(devices)
    per_host = len(devices) // hosts
    grid = {**search.default_grid(devices), **_of_long(config), "offload": ("none",), "params": ("none",)}
    # One device holds all of the state at any stage, and at the last no copy of the weights in 16 bits
    if len(devices) == 1:
        grid["stage"] = (max(stages.STAGES),)
    grid |= {"context": (config.mesh.context,), "model": _doubled(config.mesh.model, per_host)}
    if not _is_recurrent(config):
        grid["context"] = _doubled(config.mesh.context, min(8, per_host))
    takes_pipe = not _refuses_pipe(config)
    grid["replica"] = sorted({1, *(2**power for power in range(hosts.bit_length()) if hosts % 2**power == 0)})
    grid["pipe"] = _doubled(config.mesh.pipe, max(config.mesh.pipe, hosts)) if takes_pipe else (config.mesh.pipe,)
    grid["chunks"] = (1, 2) if takes_pipe else (1,)
    grid["ring"] = (False, True) if _takes_ring(config) else (False,)
    return grid


def _is_recurrent(config: settings_lib.Config) -> bool:
    """Returns whether layers of a config's model hand states on over `mesh.context`, which arithmetic does not price."""
    family, model = model_lib.shape(config, None)
    return family_lib.writes_text(family, model) and decoding.is_recurrent(family.caches(model))


def _takes_ring(config: settings_lib.Config) -> bool:
    """Returns whether modules of a config's model may run in rings (`zero.blocks.ring_matmuls`): those of a decoder without experts."""
    model = model_lib.shape(config, None)[1]
    is_wide = not config.policy.has_fp8 and config.lora.quantize == "none"
    draws = config.model.dropout or config.lora.dropout
    return is_wide and not draws and hasattr(model, "tile_tokens") and not family_lib.mixture(model)


def _refuses_pipe(config: settings_lib.Config) -> bool:
    """Returns whether a setting of a config is one that no pipeline has (`zero.pipeline.step.of`)."""
    own = config_lib.make_fp8(config)
    return bool(
        (own and own.one_program())
        or config.mesh.expert > 1
        or config_lib.make_wires(config).is_on
        or precision.DTYPES[config.reduce_dtype] is None
    )


def _work(config: settings_lib.Config, devices: Sequence[Any]) -> arithmetic.ModelWork | None:
    """Returns what an example of a model takes of a device; None of a model whose layers are few, named or of several kinds, or whose
    tokens travel to their experts."""
    if config.mesh.expert > 1:
        return None
    sizes: dict[str, Any] = {"global_batch_size": 0, "micro_batch_size": 1, "grad_accum": 1, "zero.stage": 3}
    sizes |= {"mesh": settings_lib.MeshSettings(), "offload": settings_lib.OffloadSettings()}
    remat = {"model.remat": "none", "model.recompute": "", "model.offload": "", "model.by_columns": ""}
    plain = settings_lib.changed(config, {**sizes, **remat})
    program = program_lib.build(plain, devices=devices[:1])
    depths = [name for name in activations.DEPTHS if getattr(program.model, name, 0)]
    mixture = family_lib.mixture(program.model)
    has_others = mixture is not None and bool(mixture.dense_layers)  # the first layer is traced, and stands for all
    if tuple(depths) != activations.DEPTHS[:1] or not _is_deep(plain, program) or has_others:
        return None
    one, two = ({depths[0]: count} for count in (1, 2))
    first, second = (traced.kernels(activations.gradients(program, 1, count)) for count in (one, two))
    layer = traced.less(second, first)
    block, _ = activations.weights(program)
    layers, total = (
        program.model.num_layers,
        sum(tree.size(p) for _, p in tree.flatten(program.partition.abstract_state.params)),
    )
    remats = search.LONG["remat"] if takes_tiles(config) else search.DEFAULT_GRID["remat"]
    kept = {
        remat: float(activations.residuals(program, 1, remat, two) - activations.residuals(program, 1, remat, one))
        for remat in remats
    }
    rest_kept = activations.residuals(program, 1, "full", one) - kept["full"]
    stored = {
        own: state_bytes.bytes_per_device(partition, accumulates=True, by_hand=True)
        for own, partition in ((True, program.partition), (False, program.baseline))
    }
    width = 2.0 * config.seq_len * program.model.embed_dim
    in_8_bits = config.policy.has_fp8 and not fp8.RECIPES[config.fp8.recipe].by_row
    in_8_bits &= config.fp8.experts or mixture is None  # most weights of a mixture
    rest, others, sent = traced.less(first, layer), total - block * layers, 1.0 if in_8_bits else 2.0
    away = config.offload.fraction, config.offload.params_fraction
    is_early = config.offload.late_norm or not config.optimizer.clip_norm
    return arithmetic.ModelWork(
        layers, layer, rest, block, others, kept, rest_kept, width, stored, sent, away, is_early
    )


def _is_deep(config: settings_lib.Config, program: program_lib.Program) -> bool:
    """Returns whether models of few layers tell what a step of a model takes: its layers are many, and it is one program."""
    is_by_block = isinstance(program.train_step, step_by_block.BlockwiseStep)  # whose programs are few at any depth
    is_whole = not is_by_block and config.mesh.pipe == 1 and not config.init_from and not config.zero.overrides
    is_alike = not (_names_layers(config) or config.fp8.first or config.fp8.last)
    return is_whole and is_alike and bool(search.few_layers(program.model))


def _names_layers(config: settings_lib.Config) -> bool:
    """Returns whether what a backward pass keeps is not the same for all layers."""
    return bool(config.model.recompute or re.search(r"\d", config.model.offload.replace(r"\d", "")))


def _line(
    config: settings_lib.Config, target: str, devices: Sequence[Any], model: Any, rates: rates_lib.GpuRates | None
) -> search.Continued:
    """Returns the peak and the time of a deep model's step, from those of models of few layers."""
    few = {count: _few(config, target, devices, count, rates) for count in search.few_layers(model)}
    return search.continued(few, model.num_layers)


def _line_of_pipeline(
    config: settings_lib.Config, target: str, devices: Sequence[Any], layers: int, rates: rates_lib.GpuRates | None
) -> search.Continued:
    """Returns the peak and the time of a deep model's step over a pipeline, from those of one and of two layers a stage."""
    count = config.mesh.pipe * config.pipeline.chunks
    few = [_few(config, target, devices, per_stage * count, rates) for per_stage in (1, 2)]
    return search.continued_over_stages(few[0], few[1], layers)


def _few(
    config: settings_lib.Config, target: str, devices: Sequence[Any], layers: int, rates: rates_lib.GpuRates | None
) -> step_plan.Plan:
    own = settings_lib.changed(config, {"model.num_layers": layers})
    return plan_program(program_lib.build(own, devices=devices), target, rates=rates)


def _least_seconds(program: program_lib.Program, rates: rates_lib.GpuRates, candidate: search.Candidate) -> float:
    """Returns the seconds that a device's matmuls take at the highest rate of any; "full" runs the forward pass, a third of it, again."""
    config = program.config
    forms = ("fp8", "bf16") if config.policy.has_fp8 else ("bf16",)
    highest = max(
        value for name, value in rates.figures.items() if name.startswith(tuple(f"matmul.{form}." for form in forms))
    )
    flops = program.flops_per_token * program.tokens_per_step / program.mesh.size
    return flops * (FORWARD_AGAIN if candidate.remat == "full" else 1.0) / highest


def changes_that_fit(program: program_lib.Program, *, most_compiles: int) -> list[Change]:
    """Compiles leaner settings for this machine's devices and returns those that fit, with the fastest first.

    Leaner settings have a higher stage, a remat policy that keeps fewer residuals, a smaller micro-batch, or the optimizer state, and the
    params, in host memory.
    """
    # The tokenizer may have set the size of the vocabulary.
    config = settings_lib.changed(program.config, {"model.vocab_size": program.model.vocab_size})
    micro = program.sizes.micro_batch_size
    of_long = dict(_of_long(config))
    remats = of_long.pop("remat", search.DEFAULT_GRID["remat"])
    if config.model.remat not in remats:
        remats = search.LONG["remat"]
    grid = {
        "stage": _from(search.DEFAULT_GRID["stage"], config.zero.stage),
        "remat": _from(remats, config.model.remat),
        "micro_batch_size": tuple(size for size in (micro, micro // 2, micro // 4, 1) if size >= 1),
        "replica": (config.mesh.replica,),
        **_offloads(config),
        **of_long,
    }
    try:
        outcomes = search_config(config, "here", grid=grid, most_compiles=most_compiles)
    except UserError:  # the memory of this device kind is not known
        return []
    sizes = {"micro_batch_size": micro, "grad_accum": program.sizes.grad_accum}
    fitting = (
        outcome
        for outcome in outcomes
        if outcome.is_compiled
        and "does not fit" not in outcome.reason
        and any(
            value != sizes.get(place, settings_lib.lookup(config, place))
            for place, value in _places(outcome.candidate).items()
        )
    )
    return [Change(_flags(program.config, outcome.candidate), outcome.peak or 0) for outcome in fitting]


def with_remat(config: settings_lib.Config, remat: str) -> settings_lib.Config:
    """Returns the config with another `remat`, without the `recompute` and `offload` that it does not allow."""
    stays = {"model.recompute": remat == "dots", "model.offload": remat != "none"}
    emptied = {place: "" for place, is_kept in stays.items() if not is_kept}
    return settings_lib.changed(config, {"model.remat": remat, **emptied})


# Field of a candidate -> its setting.
_PLACES = {
    "stage": "zero.stage",
    "remat": "model.remat",
    "micro_batch_size": "micro_batch_size",
    "grad_accum": "grad_accum",
    "offload": "offload.optimizer",
    "params": "offload.params",
    "ring": "model.ring",
    **{axis: f"mesh.{axis}" for axis in search.AXES},
}
_OF_DEVICE = {"offload": "none", "params": "none", "ring": False}  # settings that need not be told


def _applied(config: settings_lib.Config, candidate: search.Candidate) -> settings_lib.Config:
    config, c = with_remat(config, candidate.remat), candidate
    values = {place: getattr(c, name) for name, place in _PLACES.items()} | {"global_batch_size": 0, "mesh.data": -1}
    if c.inputs != "none":
        values["model.offload"] = model_lib.family_of(config)[0].blocks
    elif c.pipe > 1:
        values["model.offload"] = ""
    values["model.tile_tokens"] = c.tile_tokens or config.model.tile_tokens
    values["model.by_columns"] = config.model.by_columns if c.by_columns else ""
    if not (c.pipe == config.mesh.pipe > 1 and c.chunks == config.pipeline.chunks):
        values |= {"pipeline.schedule": "interleaved" if c.chunks > 1 else "1f1b", "pipeline.chunks": c.chunks}
    return settings_lib.changed(config, values)


def _places(candidate: search.Candidate) -> dict[str, Any]:
    """Returns a candidate's settings that all keep on the device, by place."""
    own = {name: getattr(candidate, name) for name in _PLACES}
    found = {_PLACES[name]: value for name, value in own.items() if name not in _OF_DEVICE or value != _OF_DEVICE[name]}
    if candidate.chunks > 1:
        found |= {"pipeline.schedule": "interleaved", "pipeline.chunks": candidate.chunks}
    return found


def _own_axes(config: settings_lib.Config) -> dict[str, Sequence[int]]:
    """Returns the sizes of the axes over which the config's examples are the same."""
    found = {name: (settings_lib.lookup(config, _PLACES[name]),) for name in ("context", "model", "pipe", "ring")}
    return {**found, "chunks": (config.pipeline.chunks if config.mesh.pipe > 1 else 1,)}


def _axes(config: settings_lib.Config, devices: Sequence[Any]) -> dict[str, Sequence[int]]:
    """Returns the choices for these axes, inside a host: the config's own, and larger ones, which are tried if nothing fits without."""
    per_host = len(devices) // search.hosts_of(devices)
    return {name: _doubled(getattr(config.mesh, name), per_host) for name in ("context", "model")}


def _doubled(size: int, most: int) -> Sequence[int]:
    """Returns a size and its doubles up to `most`."""
    return (size, *_doubled(2 * size, most)) if 2 * size <= most else (size,)


def _offloads(config: settings_lib.Config) -> dict[str, Sequence[str]]:
    """Returns the choices for the optimizer state and the params: what the config offloads stays offloaded, where it is."""
    own = {"offload": config.offload.optimizer, "params": config.offload.params}
    return {name: search.DEFAULT_GRID[name] if kind == "none" else (kind,) for name, kind in own.items()}


def takes_tiles(config: settings_lib.Config) -> bool:
    """Returns whether a text is so long that the model's MLPs should run in tiles, and the model has tiles."""
    if config.seq_len < tiles.MANY:
        return False
    family, _ = model_lib.family_of(config)
    return hasattr(next(iter(family.presets.values())), "tile_tokens")


def _of_long(config: settings_lib.Config) -> dict[str, Sequence[Any]]:
    """Returns the choices for long texts; {} where none are."""
    if not takes_tiles(config) or config.model.offload or config.model.recompute:
        return {}
    return {**search.LONG, **({"tile_tokens": (config.model.tile_tokens,)} if config.model.tile_tokens else {})}


def _flags(config: settings_lib.Config, candidate: search.Candidate, origin: settings_lib.Config | None = None) -> str:
    """Returns a candidate of a config as command-line overrides of it, or of the one that it was made of. The global batch stays."""
    applied, origin = _applied(config, candidate), origin or config
    places = [place for place, declared in settings_lib.table().items() if declared.hint in settings_lib.KINDS]
    places.sort(key=lambda place: "." not in place)  # those of groups first
    pairs = ((place, settings_lib.lookup(applied, place)) for place in places if place != "global_batch_size")
    changed = ((place, new) for place, new in pairs if new != settings_lib.lookup(origin, place))
    return " ".join(shlex.quote(f"--config.{place}={new}") for place, new in changed)


def _from(choices: Sequence[Any], first: Any) -> Sequence[Any]:
    """Returns the choices from `first` on."""
    return choices[choices.index(first) :]
