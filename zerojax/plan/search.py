"""Searches for the fastest plan that fits, by compilation alone. This module walks a grid of settings and reports why each one lost.

It bounds settings by arithmetic first and compiles last. A setting is not compiled whose state and gradients exceed the device's memory,
or exceed it with the activations that it must have after what another setting took, or whose matmuls alone take longer than another's
whole step. Of a deep model it compiles two models of few layers and continues their time and peak in a straight line: its layers are alike,
or repeat a pattern.
Those that should fit are then compiled in full, the fastest first, until none that is left should be faster.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from rich.table import Table

from zerojax import display
from zerojax.errors import UserError
from zerojax.ops import tiles
from zerojax.plan import arithmetic, step_plan
from zerojax.plan.arithmetic import Candidate
from zerojax.zero import stages
from zerojax.zero.pipeline import order as order_lib
from zerojax.zero.pipeline import segments

DEFAULT_GRID: Mapping[str, Sequence[Any]] = {
    "stage": tuple(stages.STAGES),
    "remat": ("none", "dots", "full"),  # in order of the residuals kept, most first
    "micro_batch_size": (1, 2, 4, 8),
    "offload": ("none", "host"),  # of the optimizer; the second is tried if nothing fits without
    "params": (
        "none",
        "host",
    ),  # where params live; the second is tried if nothing fits with the optimizer alone on the host
}


# What a grid for long texts has beside that: attention's results may be kept, MLPs run in tiles, and inputs of layers be in host memory.
LONG: Mapping[str, Sequence[Any]] = {
    "remat": ("none", "dots", "attention", "full"),
    "tile_tokens": (0, tiles.USUAL),
    "inputs": ("none", "host"),
}
OTHER_STAGE = 0.5  # of a stage's temporaries, which any other has at least: activations, without its gathered weights


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a candidate: its peak, its time and its rate, and why it lost ("" for the best).

    `seconds` are those that the clock foretells, and `tokens_per_second` their rate; without the clock's rates, that of the bound. Of a
    candidate that is not compiled in full they are continued from models of few layers. `held` are the bytes of its state and gradients,
    if they were counted. `flags` are the settings of the best as command-line overrides of the config.
    """

    candidate: Candidate
    peak: int | None
    tokens_per_second: float | None
    reason: str
    is_compiled: bool = False
    held: int | None = None
    seconds: float | None = None
    flags: str = ""


@dataclasses.dataclass(frozen=True)
class Continued:
    """The peak in bytes, the seconds and the tokens of a step of many layers, continued from two of few layers; None if unknown."""

    peak: float
    seconds: float | None
    tokens: float


class Built(NamedTuple):
    """A candidate's step before it is compiled."""

    held: int  # the bytes of its state and gradients on each device
    plan: Callable[[], step_plan.Plan]  # compiles and plans it
    line: Callable[[], Continued] | None = None  # compiles two models of few layers; None where they do not tell
    least: float = 0.0  # seconds below which no step of it is; 0 if unknown
    # whether the few layers have the last word unless they come near the memory, since compiling it takes minutes
    trusts_line: bool = False


Build = Callable[[Candidate], tuple]  # the fields of `Built`, of which the first two are enough
AXES = ("replica", "pipe", "context", "model")  # fields of a candidate that are sizes of a mesh's axes
DEEP = 10  # layers from which on that takes less time than compiling the model itself
VERY_DEEP = 40  # layers from which on compiling the model takes minutes
MARGIN = 0.01  # of the memory: a line that exceeds it by less is compiled in full


def search(
    candidates: Sequence[Candidate],
    build: Build,
    *,
    memory: float,
    most_compiles: int = 12,
    say: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Returns every candidate's outcome, the fastest that fits first.

    They are ordered by the time that the clock foretells. Without rates of the target's kernels it is the bound (`plan.bound`), and if
    that is unknown too, plans stay in the order of their expected cost.

    Args:
      candidates: the candidates to try (see `candidates_of`).
      build: builds a candidate's step, without compiling it.
      memory: bytes that XLA may use on a device.
      most_compiles: the maximum number of candidates to compile.
      say: called with a line of progress for each candidate that is built.

    Raises:
      UserError: there are no candidates.
    """
    if not candidates:
        raise UserError("search: no micro-batch and replica of the grid keeps the global batch; extend the grid")
    outcomes: list[Outcome] = []
    waiting: dict[Candidate, Built] = {}
    fewest = min(candidate.per_example for candidate in candidates)
    for _, group in itertools.groupby(sorted(candidates, key=_expected_cost), key=_tier):
        for candidate in group:
            compiled = sum(outcome.is_compiled for outcome in outcomes)
            reason = _why_skipped(candidate, outcomes)
            if not reason and compiled >= most_compiles:
                reason = f"not compiled: the limit of {most_compiles} compiles was reached"
            fits_on_fewer = any(
                not one.reason and one.candidate.per_example < candidate.per_example for one in outcomes
            )
            is_needed = not reason and not fits_on_fewer
            if candidate.per_example > fewest and not is_needed:
                continue  # the table has no rows of larger axes that nobody needs
            if reason:
                outcomes.append(Outcome(candidate, None, None, reason))
                continue
            outcome, built = _try(candidate, build, memory, outcomes)
            outcomes.append(outcome)
            if built is not None:
                waiting[candidate] = built
            say(f"{words(candidate)}: {outcome.reason or 'fits'}")
        _compile_fastest(outcomes, waiting, memory, most_compiles, say)
        waiting.clear()
    return _ranked(outcomes)


def by_arithmetic(
    candidates: Sequence[Candidate],
    guess: Callable[[Candidate], arithmetic.Guess],
    build: Build,
    *,
    memory: float,
    most_compiles: int = 12,
    say: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Returns outcomes as `search` does, of the candidates that arithmetic puts first; [] if by it none fits.

    Of two settings of which one should be faster by more than `NEAR`, the other is not compiled, and neither is one that exceeds the
    memory by more than `OFF`. Once steps were compiled, both are counted from where these were, those with the same axes first; of two with
    the same axes and remat `ALIKE` is enough, and `ALONE` where no devices share examples. A pipeline takes several times as long to
    compile: of those that differ in stage and replica alone, the first that fits is compiled, and once one was, `PIPED` is enough.
    """
    guesses = sorted(
        ((guess(candidate), candidate) for candidate in candidates), key=lambda own: (own[0].seconds, own[1].grad_accum)
    )
    fitting = [(own, candidate) for own, candidate in guesses if own.peak * OFF <= memory]
    outcomes: list[Outcome] = []
    waiting: dict[Candidate, Built] = {}
    of_time, of_peak, left = 1.0, dict[tuple[Any, ...], float](), 0
    of_kind, of_axes = dict[tuple[Any, ...], float](), dict[tuple[bool, ...], float]()
    of_pipes: dict[Candidate, float] = {}  # those that fit, without what does not change their passes
    best, lines = float("inf"), 0
    for own, candidate in fitting:
        kind = candidate.remat, candidate.pipe > 1, candidate.model > 1
        alike = *kind, candidate.context > 1, candidate.tile_tokens, candidate.inputs
        axes = candidate.pipe > 1, candidate.model > 1, candidate.context > 1
        should = of_axes.get(axes, of_time) * (1 - NEAR)
        if alike in of_kind:
            should = of_kind[alike] * (1 - (ALONE if candidate.per_example == 1 else ALIKE))
        passes = dataclasses.replace(candidate, stage=0, replica=1)
        if candidate.pipe > 1 and of_pipes:
            should = min(of_pipes.values()) * (1 - PIPED)
        if own.seconds * should >= best or lines >= most_compiles or passes in of_pipes:
            left += 1
            if left <= SHOWN:
                why = f"by arithmetic {own.seconds * 1e3:,.0f} ms and {display.human(own.peak)}"
                outcomes.append(Outcome(candidate, None, None, f"not compiled: {why}"))
            continue
        if own.peak * of_peak.get(kind, OFF) > memory:
            continue
        outcome, built = _try(candidate, build, memory, outcomes)
        outcomes.append(outcome)
        took = f", {outcome.seconds * 1e3:,.0f} ms" if outcome.seconds else ""
        say(f"{words(candidate)}: {outcome.reason or 'fits'}{took} (by arithmetic {own.seconds * 1e3:,.0f} ms)")
        if outcome.seconds is None or outcome.peak is None:
            continue
        lines += 1
        found = outcome.peak / own.peak
        of_peak[kind] = min(of_peak.get(kind, found), found)
        share = outcome.seconds / own.seconds
        of_time = share if lines == 1 else min(of_time, share)
        of_kind[alike] = min(of_kind.get(alike, share), share)
        of_axes[axes] = min(of_axes.get(axes, share), share)
        if not outcome.reason:
            best = min(best, outcome.seconds)
            of_pipes |= {passes: share} if candidate.pipe > 1 else {}
        if built is not None:
            waiting[candidate] = built
    _compile_fastest(outcomes, waiting, memory, most_compiles, say)
    return _ranked(outcomes)


NEAR = 0.08  # of the time of a step, that arithmetic may be wrong by against another's
ALIKE = 0.04  # the same, against that of a step over the same axes, of other sizes, with the same remat
ALONE = 0.02  # the same, without such axes: of 8B on 8 and 512 H200s arithmetic and compiled programs differ by the same 0.7 to 1.4%
PIPED = 0.02  # the same, between pipelines
OFF = 0.75  # of the memory that it estimates, what a step may take
SHOWN = 5  # candidates that were not compiled, in the table


def _tier(candidate: Candidate) -> tuple[int, int, int]:
    """Returns what decides whether a candidate is tried at all: those of a later tier only if none before fits."""
    return candidate.offloaded, candidate.per_example, candidate.model


_BY_LINE = "should fit, by models of few layers"


def _compile_fastest(
    outcomes: list[Outcome], waiting: Mapping[Candidate, Built], memory: float, most: int, say: Callable[[str], None]
) -> None:
    """Compiles in full the candidates that should fit, the fastest first, until none that is left should be faster than one that fits."""
    order = sorted(
        (outcome for outcome in outcomes if outcome.candidate in waiting), key=lambda one: one.seconds or 0.0
    )
    best = min((o.seconds for o in outcomes if o.seconds and o.is_compiled and not o.reason), default=float("inf"))
    for outcome in order:
        compiled = sum(one.is_compiled for one in outcomes)
        if (outcome.seconds or 0.0) >= best or compiled >= most:
            reason = (
                f"{_BY_LINE}, and is no faster"
                if compiled < most
                else f"not compiled: the limit of {most} compiles was reached"
            )
            done = dataclasses.replace(outcome, reason=reason)
        elif waiting[outcome.candidate].trusts_line and (outcome.peak or 0) < (1 - MARGIN) * memory:
            done, best = outcome, min(best, outcome.seconds or best)
        else:
            done = _compiled(outcome.candidate, waiting[outcome.candidate], memory)
            if outcome.seconds and (done.seconds or 0.0) > (1 + MARGIN) * outcome.seconds:
                # XLA computes values again, by its count of memory. A run of such a program took what few layers say (docs/plan.md).
                done = dataclasses.replace(done, seconds=outcome.seconds, tokens_per_second=outcome.tokens_per_second)
            say(f"{words(outcome.candidate)}: {done.reason or 'fits'}, compiled in full")
            if not done.reason and done.seconds:
                best = min(best, done.seconds)
        outcomes[outcomes.index(outcome)] = done


def candidates_of(grid: Mapping[str, Sequence[Any]], *, ways: int, global_batch_size: int) -> list[Candidate]:
    """Returns the grid's choices that keep the global batch.

    Args:
      grid: choices by setting: those of DEFAULT_GRID and LONG, "replica", "context", "model", "pipe", "chunks" and "ring", which is for
        examples that `model` divides. Without "offload", "params" and "inputs" all is on devices; without axes each example is on one.
      ways: the number of devices.
      global_batch_size: examples in one step, over all devices and passes.
    """
    found = []
    choices = {
        field.name: grid.get(field.name, (field.default,))
        for field in dataclasses.fields(Candidate)
        if field.name != "grad_accum"
    }
    for values in itertools.product(*choices.values()):
        c = Candidate(**dict(zip(choices, values)), grad_accum=1)
        row = stages.STAGES[c.stage]
        may_offload = (c.offload == "none" or row.opt_state) and (c.params == "none" or row.params)
        may_offload &= c.offload != "none" or c.params == "none" or len(choices["params"]) == 1  # the optimizer first
        # A step with params on the host is cut into programs, which keep no activations there.
        may_offload &= c.inputs == "none" or (c.params == "none" and c.remat != "none")
        own = ways // c.per_example  # devices that have examples of their own
        if own * c.per_example != ways or own % c.replica or global_batch_size % (c.micro_batch_size * max(1, own)):
            continue
        accum = global_batch_size // (c.micro_batch_size * own)
        # A pipeline keeps all on its devices, and works on several micro-batches.
        may_offload &= c.pipe == 1 or not c.offloaded
        is_order = accum >= c.pipe if c.chunks == 1 else c.pipe > 1 and accum % c.pipe == 0
        if may_offload and is_order:
            has_ring = c.ring and c.model > 1 and c.micro_batch_size % c.model == 0
            found.append(dataclasses.replace(c, grad_accum=accum, ring=has_ring))
    return list(dict.fromkeys(found))


def default_grid(devices: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Returns DEFAULT_GRID with two choices of "replica": state sharded over all devices, or over those of each host."""
    return {**DEFAULT_GRID, "replica": sorted({1, hosts_of(devices)})}


def hosts_of(devices: Sequence[Any]) -> int:
    """Returns the number of hosts that devices are on."""
    return len({device.process_index for device in devices})


def _try(
    candidate: Candidate, build: Build, memory: float, outcomes: Sequence[Outcome]
) -> tuple[Outcome, Built | None]:
    """Returns what is known of a candidate, and its step if that is to be compiled in full later.

    It is compiled, in full or with few layers, unless its state and gradients exceed the memory, alone or with its least activations, or
    its matmuls alone take longer than another's step.
    """
    try:
        built = Built(*build(candidate))
    except UserError as error:
        if not candidate.offloaded and candidate.per_example == 1:
            raise
        # An optimizer that cannot be offloaded, tokens that do not divide.
        return Outcome(candidate, None, None, str(error)), None
    held = built.held
    if held > memory:
        reason = f"state and gradients alone take {display.human(held)}"
        return Outcome(candidate, held, None, reason, held=held), None
    for outcome in outcomes:
        if held + _least_temporaries(candidate, outcome) > memory:
            tried, over = outcome.candidate, (outcome.peak or 0) - memory
            why = f"does not fit, after stage {tried.stage}, micro-batch {tried.micro_batch_size}"
            why += f" ({display.human(over)} too much)" if over > 0 else ""
            return Outcome(candidate, None, None, why, held=held), None
    best = min((o.seconds for o in outcomes if o.seconds and not o.reason), default=float("inf"))
    if built.least >= best:
        why = f"not compiled: its matmuls alone take {built.least * 1e3:.0f} ms, and another step {best * 1e3:.0f}"
        return Outcome(candidate, None, None, why, held=held), None
    if built.line is None:
        return _compiled(candidate, built, memory), None
    line = built.line()
    rate = line.tokens / line.seconds if line.seconds else None
    over = line.peak - memory
    if over > MARGIN * memory:
        reason = f"does not fit: {display.human(over)} too much, by models of few layers"
        return Outcome(candidate, round(line.peak), rate, reason, held=held, seconds=line.seconds), None
    return Outcome(candidate, round(line.peak), rate, "", held=held, seconds=line.seconds), built


def _compiled(candidate: Candidate, built: Built, memory: float) -> Outcome:
    """Returns the outcome of a candidate that is compiled in full."""
    try:
        plan = built.plan()
    except jax.errors.JaxRuntimeError as error:
        lack = step_plan.shortage(error)
        if lack is None:
            raise
        return Outcome(candidate, None, None, f"does not fit: {lack}", is_compiled=True, held=built.held)
    seconds = seconds_of(plan)
    rate = plan.tokens / seconds if seconds else None
    # Answers are drawn by copies of the weights only where these fit, so the step decides, unless the engine needs the copies.
    over, reason = plan.in_step - memory, ""
    if over > 0:
        reason = f"does not fit: {display.human(over)} too much"
    elif plan.rollouts:
        reason = plan.rollouts.refused
    return Outcome(candidate, plan.in_step, rate, reason, is_compiled=True, held=built.held, seconds=seconds)


def seconds_of(plan: step_plan.Plan) -> float | None:
    """Returns the time of a step: foretold, or its bound where the target's kernels have no rates; None if both are unknown."""
    return plan.seconds or (plan.bound.step_seconds if plan.bound else None)


def few_layers(model: Any) -> tuple[int, ...]:
    """Returns the layers of two models whose time continues in a straight line to that of a deep one, since the line reaches its number of
    layers of each kind (`kind_of`); () if there are none that take less time to compile than the model itself.

    >>> few_layers(model_of_32_layers)
    (2, 4)
    """
    total, kind_of = model.num_layers, getattr(model, "kind_of", lambda _: None)
    kinds = [kind_of(layer) for layer in range(total)]

    def reaches_all(low: int, high: int) -> bool:
        of_low, of_high, of_all = (collections.Counter(kinds[:count]) for count in (low, high, total))
        return all((of_all[k] - of_low[k]) * (high - low) == (total - low) * (of_high[k] - of_low[k]) for k in of_all)

    if total < DEEP or getattr(model, "sharing_layers", 0):  # whose last layers have the keys of earlier ones
        return ()
    pairs = ((low, compiled - low) for compiled in range(6, total) for low in range((compiled - 2) // 2, 1, -1))
    return next((pair for pair in pairs if reaches_all(*pair)), ())


def on_line(few: Mapping[int, float], layers: int) -> float:
    """Returns a figure of a model of so many layers, in a straight line from those of two numbers of layers, or its own."""
    low, high = min(few), max(few)
    return few[high] + (layers - high) / max(1, high - low) * (few[high] - few[low])


def continued(few: Mapping[int, step_plan.Plan], layers: int) -> Continued:
    """Returns the peak and the time of a step of many layers, from the plans of two numbers of layers, or from its own.

    >>> continued({2: plan_of_2, 4: plan_of_4}, 32)
    """
    peak = on_line({count: plan.in_step for count, plan in few.items()}, layers)
    times = {count: time for count, plan in few.items() if (time := seconds_of(plan)) is not None}
    return Continued(peak, on_line(times, layers) if len(times) == len(few) else None, few[max(few)].tokens)


def continued_over_stages(first: step_plan.Plan, second: step_plan.Plan, layers: int) -> Continued:
    """Returns the peak and the time of a step of many layers over a pipeline, from the plans of one layer a stage and of two.

    A layer takes as much time, and memory of its group, in any number of them. They are divided by these times.
    """
    few = [plan.pipeline for plan in (first, second) if plan.pipeline is not None]
    own, order = few[1], few[1].order
    others = len(few[0].stage_of_call) - order.stages  # calls of blocks that are no layers
    of_stage = [own.stage_of_call.count(stage) for stage in range(order.stages)]
    a_layer, fixed = {}, {}
    for name in _TIMES:
        told = [getattr(found.times, name) for found in few]
        took = [list(time) if isinstance(time, Sequence) else [time] * order.stages for time in told]
        a_layer[name] = (sum(took[1]) - sum(took[0])) / order.stages
        fixed[name] = [max(0.0, time - count * a_layer[name]) for time, count in zip(took[1], of_stage)]
    before, *_, after = (forward + backward for forward, backward in zip(fixed["forward"], fixed["backward"]))
    a_call = a_layer["forward"] + a_layer["backward"]
    calls = [a_call] * (layers + others)
    cut = segments.balanced(calls, order.stages, before=before, after=after, chunks=order.chunks)
    times = {
        name: [cut.count(stage) * a_layer[name] + fixed[name][stage] for stage in range(order.stages)]
        for name in _TIMES
    }
    line = order_lib.run(order, order_lib.PassTimes(**times, hop=own.times.hop))
    update = own.update + (layers / order.stages - 2) * max(0.0, own.update - few[0].update)
    counts = [sum(stage % order.devices == group for stage in cut) for group in range(order.devices)]
    grows = [
        (two.peak - one.peak) / (more - count) if more > count else 0.0
        for one, two, count, more in zip(few[0].memory, own.memory, few[0].calls, own.calls)
    ]
    peaks = [
        held.peak + (count - had) * (slope or max(grows))
        for held, count, had, slope in zip(own.memory, counts, own.calls, grows)
    ]
    return Continued(max(peaks), line.total + update, second.tokens)


_TIMES = ("forward", "backward", "weights")  # fields of PassTimes


_OF_ACTIVATIONS = ("remat", "offload", "params", "tile_tokens", "inputs", "context", "model", "pipe", "chunks", "ring")


def _least_temporaries(candidate: Candidate, outcome: Outcome) -> float:
    """Returns the least bytes of a candidate's temporaries, after those of another that was compiled; 0 if the two do not compare.

    A part of them is the same for all micro-batches, the rest grows with these.
    """
    tried = outcome.candidate
    if outcome.peak is None or outcome.held is None:
        return 0
    if not all(getattr(tried, name) == getattr(candidate, name) for name in _OF_ACTIVATIONS):
        return 0
    share = min(1, candidate.micro_batch_size / tried.micro_batch_size)
    same = (tried.stage, tried.replica) == (candidate.stage, candidate.replica)
    return (outcome.peak - outcome.held) * share * (1 if same else OTHER_STAGE)


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns the outcomes as JSON values."""
    return [dataclasses.asdict(outcome) for outcome in outcomes]


COLUMNS = {  # of the table, by field of a candidate; those below are left out where no candidate has another value than none
    "stage": "stage",
    "remat": "remat",
    "micro_batch_size": "micro-batch",
    "grad_accum": "accum",
    "replica": "replica",
    "offload": "offload",
    "params": "params",
    "inputs": "inputs",
    "tile_tokens": "tile",
    "pipe": "pipe",
    "chunks": "chunks",
    "context": "context",
    "model": "model",
    "ring": "ring",
}
_ALWAYS = ("stage", "remat", "micro_batch_size", "grad_accum", "replica")
_WORDS = ("remat", "offload", "params", "inputs")


def table(outcomes: Sequence[Outcome]) -> Table:
    """Returns the outcomes as a table."""
    own = {name: {getattr(outcome.candidate, name) for outcome in outcomes} for name in COLUMNS}
    named = [name for name in COLUMNS if name in _ALWAYS or {*map(str, own[name])} - {"1", "0", "none", "False"}]
    shown = display.table(
        "Plans, the fastest that fits first",
        (*(COLUMNS[name] for name in named), "peak", "step", "tokens/s", "why not"),
        (*_WORDS, "why not"),
        caption="model.recompute applies only if remat is dots; model.offload does not apply if remat is none",
    )
    for outcome in outcomes:
        rate = "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}"
        peak = "" if outcome.peak is None else display.human(outcome.peak)
        time = "" if outcome.seconds is None else f"{outcome.seconds * 1e3:,.0f} ms"
        values = [getattr(outcome.candidate, name) for name in named]
        shown.add_row(*map(str, values), peak, time, rate, outcome.reason)
    return shown


def _expected_cost(candidate: Candidate) -> tuple[float, ...]:
    """Returns a sort key: least offloaded first, then fewest devices that share examples, first over `context`, which layers wait for less
    than for `model`; then fewest recomputed operations, fewest bytes sent, fewest passes, most replicas."""
    recomputed = {"none": 0.0, "dots": 0.02, "attention": 0.25, "full": 0.33}[candidate.remat]
    if candidate.tile_tokens and candidate.remat in ("none", "dots"):
        recomputed += 0.2  # the MLP, forward
    sent = 3 if stages.STAGES[candidate.stage].params else 2
    return (*_tier(candidate), recomputed, sent * candidate.grad_accum, candidate.grad_accum, -candidate.replica)


def _why_skipped(candidate: Candidate, outcomes: Sequence[Outcome]) -> str:
    """Returns why a candidate need not be tried: others fit with less offloaded. Otherwise returns ""."""
    for outcome in outcomes:
        tried = outcome.candidate
        if not outcome.reason and candidate.offloaded > tried.offloaded:
            return f"not needed: a plan fits with{' less' if tried.offloaded else 'out'} offload"
    return ""


def _ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    def by_rate(outcome: Outcome) -> tuple[float, int]:  # plans of equal rate are sorted by their peak
        rate = outcome.tokens_per_second
        return (-rate, outcome.peak or 0) if rate else (0.0, 0)

    fitting = sorted((outcome for outcome in outcomes if not outcome.reason), key=by_rate)
    ranked = fitting[:1]
    for outcome in fitting[1:]:
        slower = 1 - (outcome.tokens_per_second or 0) / (fitting[0].tokens_per_second or 1)
        ranked.append(
            dataclasses.replace(outcome, reason=f"fits, {slower:.1%} slower" if slower > 0 else "fits, as fast")
        )
    rest = [outcome for outcome in outcomes if outcome.reason]
    return ranked + sorted(rest, key=lambda one: by_rate(one) if one.reason.startswith(_BY_LINE) else (1.0, 0))


def words(candidate: Candidate) -> str:
    """Returns a candidate's settings as text."""
    c = candidate
    offload = "" if c.offload == "none" else f", optimizer on the {c.offload}"
    offload += "" if c.params == "none" else f", params on the {c.params}"
    offload += "" if c.inputs == "none" else f", inputs of layers on the {c.inputs}"
    offload += f", tiles of {c.tile_tokens} tokens" if c.tile_tokens else ""
    offload += "".join(
        f", {axis} {size}"
        for axis, size in (("pipe", c.pipe), ("chunks", c.chunks), ("context", c.context), ("model", c.model))
        if size > 1
    )
    offload += ", ring" if c.ring else ""
    return f"stage {c.stage}, remat {c.remat}, micro-batch {c.micro_batch_size} x {c.grad_accum}, replica {c.replica}{offload}"
