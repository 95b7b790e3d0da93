"""Foretells what a served decoder does on a device. This module computes how many texts fit and how many tokens a second they get, at most
and by the clock.

A step adds a token to each of B texts. It reads the weights once and the cache of every text, and multiplies with every weight:

    seconds(B) >= max((weights + B x cache) / bandwidth, B x FLOPs / matrix rate, weights in host memory / rate of its link)

Of a mixture of experts it reads those that the B tokens take; they are counted as if each token drew its experts evenly.

The clock walks the engine's compiled programs. No CUDA graph launches kernels across a collective, so on several devices a step that the
host sends alone takes no less time than the host takes to launch its kernels. Weights in host memory arrive beside the programs, which they
slow down.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from zerojax import display
from zerojax.clock import rates as rates_lib
from zerojax.clock import walk
from zerojax.errors import UserError
from zerojax.hlo import buffers, syntax
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import bound as bound_lib
from zerojax.plan import search, targets
from zerojax.plan.offload import times

SCHEMA = "zerojax.plan.serving/2"
SHORT = 2e-3  # seconds of a step that the host may not keep up with
_SHORT = "a step of several texts that takes less than 2 ms may wait for the engine's host, which is not counted"
LAUNCHES, ARRIVALS = "launches by the host", "weights from host memory"  # parts beside those of `walk.PARTS`


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as an engine holds it, in bytes on each device."""

    devices: int  # over which the weights are sharded
    length: int  # tokens of a text, for which each slot has room
    dtype: str  # of the matmuls: "bf16", "fp16" or "fp32"
    format: str  # of the kernels
    weights: int  # those on the device, with those that arrive from host memory at once
    dense: int  # those that every step reads: not the embedding's, of which it reads rows
    experts: int  # those of mixtures, of which a token reads `share`
    share: float  # the share of a mixture's experts that a token takes
    cache: int  # of a text
    row: int  # of a text's scores and of the tokens that it has
    flops: float  # of a token
    kept: int = 0  # of a copy of a text's recurrent states, for prompts that go on from there
    streamed: int = 0  # the weights in host memory, all of which each step reads over its link
    runs: str = ""  # which matmuls an engine on GPUs runs, in words

    def read(self, batch: int) -> float:
        """Returns the bytes that a step of `batch` texts reads."""
        return self.dense + self.experts * (1 - (1 - self.share) ** batch) + batch * self.cache


@dataclasses.dataclass(frozen=True)
class ProgramTime:
    """The foretold time of the programs that add a token to each of some texts, or that read a prompt.

    Attributes:
      texts: those that get a token.
      tokens: of the prompt; 0 if a token is added.
      seconds: of all.
      parts: by a name of `walk.PARTS`, LAUNCHES or ARRIVALS, seconds that add up.
      peak: the most bytes of a device, with weights and caches.
      steps: that the host sends at once.
    """

    texts: int
    tokens: int
    seconds: float
    parts: Mapping[str, float]
    peak: float
    steps: int = 1

    @property
    def rate(self) -> float:
        """Returns the tokens a second."""
        return (self.tokens or self.texts) / self.seconds


@dataclasses.dataclass(frozen=True)
class Foretold:
    """What the clock says of an engine."""

    steps: tuple[ProgramTime, ...]  # a token of each text, by the number of texts
    prompt: ProgramTime  # the reading of a prompt, which gives the first token
    # Layers of the models from which the times are continued; () if the model itself was compiled.
    few: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ServingPlan:
    """What a target does with a served model."""

    served: Served  # the model
    target: targets.Target  # the kind of device
    largest: int | None  # the most texts that fit; None if the memory is unknown
    bandwidth: targets.Figure | None  # bytes/s of a device's memory; None if it is unknown
    link: targets.Figure | None  # bytes/s from host memory; None if it is unknown, or nothing is there
    # (batch, bytes of a device, most tokens/s of all texts or None) for batches of 1, 2, 4, ... and the largest.
    rows: tuple[tuple[int, int, float | None], ...]
    foretold: Foretold | None = None  # by the clock
    why: str = ""  # why nothing is foretold


def time_of(compiled: Any, target: targets.Target, mesh: Mesh, texts: int, tokens: int) -> ProgramTime:
    """Returns the time of programs.

    Args:
      compiled: `inference.engine.programs.CompiledPrograms`.
      target: the kind of GPU, whose rates are known.
      mesh: the devices that the programs run on.
      texts, tokens: see `ProgramTime`.
    """
    known = rates_lib.of(target.name)
    assert known is not None
    rates, walks = known.of_tokens(), {}
    if not compiled.has_graphs:
        rates = dataclasses.replace(rates, figures={**rates.figures, "gap": known.gap})
    for run in compiled.runs:
        if id(run) not in walks:
            flow = hlo_flow.flow(syntax.parse(buffers.text_of(run)))
            walks[id(run)] = walk.walk(flow, rates, mesh.size, bound_lib.per_host(mesh))
    own = [walks[id(run)] for run in compiled.runs]
    parts = {name: sum(time.parts[name] for time in own) for name in walk.PARTS if name != walk.WAITS}
    seconds = sum(parts.values())
    is_launched_alone = mesh.size > 1 and compiled.steps == 1
    launched = sum(span.times * rates.launch(span.kind) for time in own for span in time.spans) * is_launched_alone
    parts[LAUNCHES], parts[ARRIVALS] = max(0.0, launched - seconds), 0.0
    if compiled.arriving and target.host_link is not None:
        link = compiled.arriving / target.host_link.value
        parts[ARRIVALS] = max(min(link, seconds) * (1 - 1 / times.SLOWED), link - seconds)
    return ProgramTime(texts, tokens, sum(parts.values()), parts, compiled.peak, compiled.steps)


def of_deep(few: Mapping[int, ProgramTime], layers: int) -> ProgramTime:
    """Returns the time of the programs of a model of so many layers, from those of two numbers of layers, or its own (`search.on_line`)."""
    first = few[min(few)]
    parts = {name: search.on_line({n: own.parts[name] for n, own in few.items()}, layers) for name in first.parts}
    peak = search.on_line({n: own.peak for n, own in few.items()}, layers)
    return dataclasses.replace(first, seconds=sum(parts.values()), parts=parts, peak=peak)


MOST = 1024  # the largest batch that is shown


def plan(served: Served, target: targets.Target) -> ServingPlan:
    """Returns the plan of a served model on a target.

    Raises:
      UserError: the weights and one text do not fit.
    """
    each, largest = served.cache + served.row + served.kept, None
    if target.usable is not None:
        largest = (target.usable - served.weights) // each
        if largest < 1:
            way_out = "raise offload.params_fraction" if served.streamed else "raise mesh.model, or give a --format"
            raise UserError(
                f"--serve: the weights take {display.human(served.weights)} and a text of {served.length} tokens {display.human(each)} on "
                f"each device, and XLA may use {display.human(target.usable)} there; {way_out}"
            )
    rates, bandwidth = rates_lib.of(target.name), target.memory_bandwidth
    if rates is not None:
        bandwidth = targets.Figure(rates.figures["bandwidth"], rates.sources.get("bandwidth", targets.MEASURED))
    most = min(MOST, largest or MOST)
    batches = sorted(
        {*(1 << n for n in range(most.bit_length()) if 1 << n <= most), most, *([largest] if largest else [])}
    )
    link = target.host_link if served.streamed else None
    rows = tuple(
        (batch, served.weights + batch * each, _tokens(served, target, bandwidth, link, batch)) for batch in batches
    )
    return ServingPlan(served, target, largest, bandwidth, link, rows)


def _tokens(
    served: Served, target: targets.Target, bandwidth: targets.Figure | None, link: targets.Figure | None, batch: int
) -> float | None:
    """Returns the most tokens/s of all texts of a batch; None if the target's rates are unknown."""
    matrix = target.matrix_rates.get(served.dtype.replace("fp16", "bf16"))
    if bandwidth is None or matrix is None or (served.streamed and link is None):
        return None
    arrives = 0.0 if link is None else served.streamed / link.value
    return batch / max(served.read(batch) / bandwidth.value, batch * served.flops / matrix.value, arrives)


def text(found: ServingPlan) -> str:
    """Returns a plan as text."""
    served, target = found.served, found.target
    title = f"Serving on {target.name}, model={served.devices}: {served.dtype}, format {served.format}, {served.length} tokens a text"
    table = display.table(title, ("texts", "bytes of a device", "tokens/s at most", "of each text"), ())
    for batch, nbytes, rate in found.rows:
        told = ("unknown",) * 2 if rate is None else (f"{rate:,.0f}", f"{rate / batch:,.1f}")
        table.add_row(f"{batch:,}", display.human(nbytes), *told)
    lines = [
        display.as_text(table),
        "",
        *_told(found),
        f"weights {display.human(served.weights)} on each device; cache {display.human(served.cache)} a text",
        f"the memory of {target.name} is unknown"
        if found.largest is None
        else f"{found.largest:,} texts fit at most, if programs need no more than the memory that a plan keeps free",
    ]
    if served.streamed:
        link = "an unknown rate" if found.link is None else f"{found.link.value / 1e9:.0f} GB/s ({found.link.source})"
        lines.append(f"{display.human(served.streamed)} of weights in host memory, which every step reads at {link}")
    if served.runs and target.kind == "gpu":
        lines.append(f"a token is made by: {served.runs}")
    if found.bandwidth is not None:
        lines.append(
            f"at most: memory at {found.bandwidth.value / 1e12:.2f} TB/s ({found.bandwidth.source}); a bound, not a measurement"
        )
    return "\n".join(lines)


def _told(found: ServingPlan) -> list[str]:
    """Returns the lines of what the clock says."""
    if found.foretold is None:
        return [f"no time is foretold: {found.why}"] if found.why else []
    foretold = found.foretold
    bound = functools.partial(_tokens, found.served, found.target, found.bandwidth, found.link)
    programs = (*foretold.steps, foretold.prompt)
    heads = [f"{own.texts:,} text{'s' if own.texts > 1 else ''}" for own in foretold.steps]
    table = display.table("Foretold by the clock, ms", ("", *heads, f"a prompt of {foretold.prompt.tokens:,}"))
    table.add_row("a step", *(_ms(own.seconds) for own in programs))
    for name in foretold.prompt.parts:
        if any(own.parts[name] >= 1e-6 for own in programs):
            table.add_row(f"  {name}", *(_ms(own.parts[name]) for own in programs))
    table.add_row("tokens/s", *(f"{own.rate:,.0f}" for own in programs))
    table.add_row("of each text", *(f"{own.rate / own.texts:,.1f}" for own in foretold.steps), "")
    shares = (own.rate / most if (most := bound(own.texts)) else None for own in foretold.steps)
    table.add_row("of the bound", *("unknown" if share is None else f"{share:.0%}" for share in shares), "")
    table.add_row("bytes of a device", *(display.human(own.peak) for own in programs))
    few = f", continued from models of {foretold.few[0]} and {foretold.few[1]} layers" if foretold.few else ""
    return [
        display.as_text(table),
        "",
        f"the first token of a prompt of {foretold.prompt.tokens:,} tokens: {_ms(foretold.prompt.seconds)} ms, if no other request runs",
        *([_SHORT] if any(own.seconds < SHORT and own.steps == 1 for own in foretold.steps) else []),
        f"foretold for the likeliest tokens and texts of full length{few}; {_errors(found.target)}",
    ]


def _errors(target: targets.Target) -> str:
    """Returns how far measured steps were from what was foretold."""
    known = rates_lib.of(target.name)
    errors = known.of_tokens().errors if known is not None else None
    if errors is None:
        return f"no step was measured on {target.name}"
    settings, median, worst = (errors[name] for name in ("settings", "median", "worst"))
    return f"{settings:.0f} measured steps, none fitted, were off by {median:.1%} (median) and {worst:.1%} (worst)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def as_json(found: ServingPlan) -> dict[str, Any]:
    """Returns a plan as JSON values."""
    rows = [{"batch": batch, "bytes": nbytes, "tokens_per_second": rate} for batch, nbytes, rate in found.rows]
    return {
        "schema": SCHEMA,
        "target": found.target.name,
        "served": dataclasses.asdict(found.served),
        "largest_batch": found.largest,
        "memory_bandwidth": None if found.bandwidth is None else dataclasses.asdict(found.bandwidth),
        "host_link": None if found.link is None else dataclasses.asdict(found.link),
        "batches": rows,
        "foretold": None if found.foretold is None else _foretold_json(found.foretold),
        "why_not_foretold": found.why,
    }


def _foretold_json(foretold: Foretold) -> dict[str, Any]:
    programs = {"steps": foretold.steps, "prompt": (foretold.prompt,)}
    told = {
        name: [dataclasses.asdict(own) | {"tokens_per_second": own.rate} for own in found]
        for name, found in programs.items()
    }
    return {"steps": told["steps"], "prompt": told["prompt"][0], "few_layers": foretold.few}
