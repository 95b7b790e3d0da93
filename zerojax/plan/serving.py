"""Bounds what a served decoder can do on a device. This module computes how many texts fit, and how many tokens a second they get at most.

A step adds a token to each of B texts. It reads the weights once and the cache of every text, and multiplies with every weight:

    seconds(B) >= max((weights + B x cache) / bandwidth, B x FLOPs / matrix rate, weights in host memory / rate of its link)

Of a mixture of experts it reads those that the B tokens take; they are counted as if each token drew its experts evenly.
"""

import dataclasses
from typing import Any

from zerojax import display
from zerojax.clock import rates as rates_lib
from zerojax.errors import UserError
from zerojax.plan import targets

SCHEMA = "zerojax.plan.serving/1"


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as an engine holds it, in bytes on each device."""

    devices: int  # over which the weights are sharded
    length: int  # tokens of a text, for which each slot has room
    dtype: str  # of the matmuls: "bf16" or "fp32"
    format: str  # of the kernels
    weights: int  # those on the device, with those that arrive from host memory at once
    dense: int  # those that every step reads: not the embedding's, of which it reads rows
    experts: int  # those of mixtures, of which a token reads `share`
    share: float  # the share of a mixture's experts that a token takes
    cache: int  # of a text
    row: int  # of a text's scores and of the tokens that it has
    flops: float  # of a token
    streamed: int = 0  # the weights in host memory, all of which each step reads over its link
    runs: str = ""  # which matmuls an engine on GPUs runs, in words

    def read(self, batch: int) -> float:
        """Returns the bytes that a step of `batch` texts reads."""
        return self.dense + self.experts * (1 - (1 - self.share) ** batch) + batch * self.cache


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


MOST = 1024  # the largest batch that is shown


def plan(served: Served, target: targets.Target) -> ServingPlan:
    """Returns the plan of a served model on a target.

    Raises:
      UserError: the weights and one text do not fit.
    """
    each, largest = served.cache + served.row, None
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
    matrix = target.matrix_rates.get(served.dtype)
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
        f"weights {display.human(served.weights)} on each device; cache {display.human(served.cache)} a text",
        f"the memory of {target.name} is unknown"
        if found.largest is None
        else f"{found.largest:,} texts fit at most, before what programs compute with",
    ]
    if served.streamed:
        link = "an unknown rate" if found.link is None else f"{found.link.value / 1e9:.0f} GB/s ({found.link.source})"
        lines.append(f"{display.human(served.streamed)} of weights in host memory, which every step reads at {link}")
    if served.runs and target.kind == "gpu":
        lines.append(f"a token is made by: {served.runs}")
    if found.bandwidth is not None:
        lines.append(
            f"memory at {found.bandwidth.value / 1e12:.2f} TB/s ({found.bandwidth.source}); a bound, not a measurement"
        )
    return "\n".join(lines)


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
    }
