"""Estimates a step's time and memory without compiling it. This module does arithmetic over the layers of a model.

    layer       its kernels from a trace, shared by `context` and `model`, + what these axes' devices wait for each other, alone; in a ring
                over `model` activations travel beside the layer instead, and two gradients of each weight are added up
    pass        layers x ( forward + backward ), each max( kernels, gathers and reductions beside them ), + the collectives at the pass's
                edges, and sums that a sum over replicas follows, beside which nothing runs
    step        passes x pass, or of a pipeline (micro-batches + (groups - 1) / chunks) x the longest stage, + update and sums of gradients
    offload     optimizer state that arrives and leaves beside the update, or beside the last backward pass where no norm is waited for;
                params that arrive twice in each pass

It leaves out what a compiler does: kernels of a trace are not those of a compiled program. `plan.search` compiles the settings that it puts
first.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from zerojax import display, roles
from zerojax.clock import kernels as kernels_lib
from zerojax.clock import rates as rates_lib
from zerojax.plan import traced
from zerojax.zero import stages

UPDATED = 30.0  # bytes that an update reads and writes for each weight: its gradient, the master weight and two moments
SLOWED = 0.12  # of a layer's time, more, while collectives run beside it (`slowdown` of the tables)
# Of a layer's time, computed again. With "dots" it is elementwise work, and less is stored.
AGAIN = {"none": 0.0, "dots": 0.0, "attention": 0.28, "full": 1 / 3}
WAITS = {"model": 8, "context": 12}  # times that a layer's activations travel over these axes, forward and backward
BACKWARD = 2 / 3  # of a pass
# Bytes read and written for each weight where a gradient is added to another: of a pass, or of a ring's step
ADDED = 12.0


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """What one example takes of one device, without any parallelism.

    Attributes:
      layers: their number; all are alike.
      layer, rest: kernels of a layer, and of all else, forward and backward.
      weights, others: elements of a layer's weights, and of all others.
      kept: bytes that a layer keeps for its backward pass, by `remat`.
      rest_kept: bytes that is kept beside layers.
      width: bytes of what one layer gives the next.
      state: bytes of the state and the gradients of all weights, by role: where params are sharded, and where they are not.
      sent: bytes in which an element of a layer's weights is gathered: 1 in fp8.
      away: the shares of the optimizer state and of the params that are in host memory where they are offloaded.
      is_early: whether offloaded state is updated beside the backward pass.
    """

    layers: int
    layer: traced.Kernels
    rest: traced.Kernels
    weights: float
    others: float
    kept: Mapping[str, float]
    rest_kept: float
    width: float
    state: Mapping[bool, Mapping[str, float]]
    sent: float = 2.0
    away: tuple[float, float] = (1.0, 1.0)
    is_early: bool = False
    _alone: dict[tuple[int, int], tuple[float, float]] = dataclasses.field(default_factory=dict, repr=False)

    def alone(self, rates: rates_lib.GpuRates, ways: int) -> tuple[float, float]:
        """Returns the seconds of a layer and of the rest, whose features so many devices share."""
        key = id(rates), ways
        if key not in self._alone:
            self._alone[key] = traced.seconds(self.layer, rates, ways), traced.seconds(self.rest, rates, ways)
        return self._alone[key]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of settings. All candidates have the same global batch, by gradient accumulation.

    `offload` says where the optimizer state lives, `params` where the params do, and `inputs` where those of layers wait for their backward
    pass. `context`, `model` and `pipe` are the sizes of these mesh axes, `chunks` those of `pipeline.chunks`, and `ring` is `model.ring`.
    `by_columns` says whether the config's `model.by_columns` stays.
    """

    stage: int
    remat: str
    micro_batch_size: int
    grad_accum: int
    replica: int
    offload: str = "none"
    params: str = "none"
    tile_tokens: int = 0
    inputs: str = "none"
    context: int = 1
    model: int = 1
    pipe: int = 1
    chunks: int = 1
    ring: bool = False
    by_columns: bool = False

    @property
    def per_example(self) -> int:
        """Returns the number of devices that share examples, or the layers of one."""
        return self.context * self.model * self.pipe

    @property
    def offloaded(self) -> int:
        """Returns how many parts of the state are offloaded."""
        return sum(where != "none" for where in (self.offload, self.params, self.inputs))


@dataclasses.dataclass(frozen=True)
class Guess:
    """An estimate: seconds of a step, bytes of a device at its peak, and the seconds by part, which add up to the first."""

    seconds: float
    peak: float
    parts: Mapping[str, float]


COMPUTE, TENSOR, WEIGHTS, BUBBLE, SENDS, UPDATE, HOST = (
    "arithmetic",
    "waits for model and context",
    "waits for weights and gradients",
    "bubble",
    "waits for stages",
    "update",
    "waits for host memory",
)


class AxisCost(NamedTuple):
    """Settings as text, their estimate, the tokens of a device, and the settings by place."""

    text: str
    guess: Guess
    tokens: float
    settings: Mapping[str, Any] = {}


def table(ways: Sequence[AxisCost]) -> Table:
    """Returns a table of estimates, with the milliseconds of each part."""
    parts = list(dict.fromkeys(part for way in ways for part in way.guess.parts))
    shown = display.table(
        "What each axis costs, by arithmetic: milliseconds of a step",
        ("settings", "step", *parts, "tokens/s/device", "peak"),
        caption="estimates; --search compiles those that it puts first",
    )
    for text, own, tokens, _ in ways:
        spent = [f"{own.parts.get(part, 0.0) * 1e3:,.0f}" for part in parts]
        shown.add_row(
            text, f"{own.seconds * 1e3:,.0f}", *spent, f"{tokens / own.seconds:,.0f}", display.human(own.peak)
        )
    return shown


def guess(work: ModelWork, candidate: Candidate, devices: int, rates: rates_lib.GpuRates, per_host: int) -> Guess:
    """Returns the estimate of a step.

    Args:
      work: of an example.
      candidate: the settings.
      devices: of all hosts.
      rates: of the GPU, and of links between hosts.
      per_host: devices of a host. Neighbours share examples first, then the state.
    """
    links = _Links(rates, per_host)
    own, s = stages.STAGES[candidate.stage], candidate
    share = s.context * s.model
    ways = devices // (s.replica * s.model * s.pipe)  # over which the state is sharded
    layer, rest = (took * s.micro_batch_size / s.context for took in work.alone(rates, s.model))
    layer *= 1 + AGAIN[s.remat]
    wait, hops = _waits(work, s, links)
    layers = work.layers
    if s.ring:
        wait += (s.model - 1) * ADDED * work.weights / s.model / rates.figures["bandwidth"]

    def busy(took: float, sent: float) -> float:
        """Returns the time of a layer's kernels beside which collectives run for so long."""
        return max(took + SLOWED * min(took, sent), sent)

    def gathered(elements: float, sent: float = 2.0, is_alone: bool = False) -> float:
        return links.seconds("all-gather", sent * elements, ways, s.model, is_alone) if own.params else 0.0

    def reduced(elements: float, is_alone: bool = False) -> float:
        kind = "reduce-scatter" if own.grads or own.opt_state else "all-reduce"
        return links.seconds(kind, 4 * elements, ways, s.model, is_alone)

    def over_replicas(elements: float) -> float:
        left = elements / (ways if own.grads or own.opt_state else 1)
        return links.seconds("all-reduce", 4 * left, s.replica, s.model * ways)

    # Each pass reduces gradients that are sharded; others are reduced once.
    at_once = own.grads or s.grad_accum == s.pipe == 1
    # XLA starts a sum over replicas as early as it can, and so waits at once for the sum that it follows.
    is_chain = at_once and s.replica > 1 and ways > 1
    in_layer, table = work.weights / s.model, work.others / 2 / s.model  # the embedding's, and as many of the head
    gather, sums = gathered(in_layer, work.sent), (reduced(in_layer), over_replicas(in_layer))
    beside = gather
    if is_chain:  # links inside a host and those between hosts send at once
        beside = gather + sums[1] if ways * s.model > per_host else max(gather, sums[1])
    elif at_once:
        beside = gather + sum(sums)
    halves = [(layer * (1 - BACKWARD), hops * (1 - BACKWARD), gather), (layer * BACKWARD, hops * BACKWARD, beside)]
    a_layer = sum(busy(took, hop + sent) for took, hop, sent in halves) + wait
    a_layer += reduced(in_layer, is_alone=True) if is_chain else 0.0
    a_layer_alone = sum(busy(took, hop) for took, hop, _ in halves) + wait
    # Nothing is beside the first gathers of a pass and its last sums, nor beside the head's before a sum over replicas.
    edges = gathered(table, is_alone=True) + gathered(in_layer, work.sent, is_alone=True)
    if at_once:
        edges += reduced((2 if is_chain else 1) * table, is_alone=True) + over_replicas(in_layer + table)
        edges += 0.0 if is_chain else reduced(in_layer, is_alone=True)
    a_rest = rest + edges
    if s.pipe > 1:  # other micro-batches are beside them
        a_rest = max(
            rest, 2 * gathered(2 * table) + (reduced(2 * table) + over_replicas(2 * table) if at_once else 0.0)
        )
    compute = s.grad_accum * (layers * layer + rest) / s.pipe
    waits = s.grad_accum * layers * (a_layer_alone - layer) / s.pipe
    mean = s.grad_accum * (layers * a_layer + a_rest) / s.pipe
    parts = {COMPUTE: compute, TENSOR: waits, WEIGHTS: max(0.0, mean - compute - waits)}
    if s.pipe > 1:
        of_group = _groups(layers, s.pipe, s.chunks, a_layer, a_rest)
        hop = links.hop(work.width * s.micro_batch_size / share, devices // s.pipe) * s.chunks
        steady = max(*of_group, 2 * hop)
        total = (s.grad_accum + (s.pipe - 1) / s.chunks) * steady + 2 * (s.pipe - 1) * hop
        sends = 2 * (s.pipe - 1) * hop + s.grad_accum * (steady - max(of_group))
        parts |= {BUBBLE: total - mean - sends, SENDS: sends}
    elements = (work.weights * layers + work.others) / (s.model * s.pipe)
    update = UPDATED * elements / (ways if own.opt_state else 1) / rates.figures["bandwidth"]
    if not at_once:
        parts[WEIGHTS] += reduced(elements, is_alone=True) + over_replicas(elements)  # after the last pass
    if own.opt_state and not own.params:
        update += links.seconds("all-gather", 2 * elements, ways, s.model)
    added = (s.grad_accum - 1) * ADDED * elements / (ways if own.grads else 1) / rates.figures["bandwidth"]
    parts[UPDATE] = update + added
    if s.offload != "none":
        a_pass = (compute + waits + parts[WEIGHTS]) / s.grad_accum
        parts[HOST] = _waits_for_host(work, s, ways, a_pass, update, rates.beside(min(per_host, devices)))
    seconds = sum(parts.values())
    spread = rates.spread(devices)
    return Guess(
        seconds * (1 + spread), _peak(work, s, ways), {part: took * (1 + spread) for part, took in parts.items()}
    )


def _waits_for_host(
    work: ModelWork, s: Candidate, ways: int, a_pass: float, update: float, rates: rates_lib.GpuRates
) -> float:
    """Returns the seconds for which a step waits for offloaded state, beside passes and an update that take so long."""
    away = _away(work, s, ways)
    behind = a_pass * BACKWARD if work.is_early else update
    waits = max(0.0, away[roles.OPT_STATE] / rates.figures["link.both"] - behind)
    arriving = away[roles.PARAMS] / rates.figures["link.from host"]
    # in the forward pass, and in the backward pass
    return waits + s.grad_accum * sum(max(0.0, arriving - a_pass * share) for share in (1 - BACKWARD, BACKWARD))


def _away(work: ModelWork, s: Candidate, ways: int) -> dict[str, float]:
    """Returns the bytes of a device's state that are in host memory or on a disk, by role."""
    own = stages.STAGES[s.stage]
    shares = {
        roles.OPT_STATE: work.away[0] * (s.offload != "none") / (ways if own.opt_state else 1),
        roles.PARAMS: work.away[1] * (s.params != "none") / (ways if own.params else 1),
    }
    return {role: share * work.state[own.params].get(role, 0.0) for role, share in shares.items()}


def _groups(layers: int, pipe: int, chunks: int, a_layer: float, rest: float) -> list[float]:
    """Returns the times of groups of `chunks` stages, of which the last has the rest, such that the longest is as short as it can be."""
    count = pipe * chunks

    def of(last: int) -> list[float]:
        most, more = divmod(layers - last, count - 1)
        stages = [a_layer * (most + (stage < more)) for stage in range(count - 1)] + [a_layer * last + rest]
        return [sum(stages[group::pipe]) for group in range(pipe)]

    return min(map(of, range(layers // count + 1)), key=max)


def _waits(work: ModelWork, s: Candidate, links: "_Links") -> tuple[float, float]:
    """Returns the seconds for which a layer waits for the devices with which it shares examples, forward and backward, and those for which
    activations travel beside it."""
    again = 1.5 if AGAIN[s.remat] > 0.1 else 1.0  # activations travel again when a layer is computed again
    kind = "collective-permute" if s.ring else "all-gather"
    over_model = links.seconds(kind, work.width * s.micro_batch_size / s.context, s.model, 1, is_alone=not s.ring)
    over_model *= again * WAITS["model"]
    nbytes = work.width * s.micro_batch_size / (s.context * s.model)
    over_context = again * WAITS["context"] * links.seconds("all-to-all", nbytes, s.context, s.model, is_alone=True)
    return (over_context, over_model) if s.ring else (over_context + over_model, 0.0)


def _peak(work: ModelWork, s: Candidate, ways: int) -> float:
    """Returns the bytes of the device that needs the most; the state is sharded over `ways`."""
    own, share = stages.STAGES[s.stage], s.context * s.model
    of_group = work.weights * math.ceil(work.layers / s.pipe) + work.others / (1 if s.pipe == 1 else 2)
    part = of_group / (work.weights * work.layers + work.others) / s.model
    is_sharded = {roles.GRADIENTS: own.grads, roles.OPT_STATE: own.opt_state, roles.OTHER: False}
    held = sum(
        part * count / (ways if is_sharded.get(role, own.params) else 1)
        for role, count in work.state[own.params].items()
    ) - sum(_away(work, s, ways).values())
    alive = float(work.layers)
    if s.pipe > 1:
        most = s.pipe if s.chunks == 1 else 2 * (s.pipe - 1) + (s.chunks - 1) * s.pipe + 1
        alive = min(s.grad_accum * s.chunks, most) * work.layers / (s.pipe * s.chunks)
    kept = s.micro_batch_size * (alive * work.kept[s.remat] + work.rest_kept) / share
    again = s.micro_batch_size * (work.kept["none"] - work.kept[s.remat]) / share
    gathered = (8 if own.params else 4) * work.weights / s.model
    return held + kept + max(again + gathered, 6 * work.others / s.model if own.params else 0.0)


@dataclasses.dataclass(frozen=True)
class _Links:
    rates: rates_lib.GpuRates
    per_host: int

    def seconds(self, kind: str, whole: float, ways: int, stride: int, is_alone: bool = False) -> float:
        """Returns the seconds of a collective of arrays of so many bytes, over devices whose numbers are `stride` apart, beside kernels or
        alone."""
        if ways == 1 or not whole:
            return 0.0
        spans = ways * stride > self.per_host
        here = max(1, self.per_host // stride) if spans else 0
        nbytes = whole * (ways - 1) / ways * (2 if kind == "all-reduce" else 1)
        work = kernels_lib.KernelWork(kernels_lib.COLLECTIVE, kind, nbytes=nbytes, group=tuple(range(ways)))
        per_host = min(here, ways)
        return self.rates.seconds(work, per_host) * (self.rates.hastened(work, per_host) if is_alone else 1.0)

    def hop(self, nbytes: float, stride: int) -> float:
        """Returns the seconds for which a stage's results travel to the next."""
        work = kernels_lib.KernelWork(kernels_lib.COLLECTIVE, "collective-permute", nbytes=nbytes, group=(0, 1))
        return self.rates.seconds(work, 1 if stride >= self.per_host else 0)
