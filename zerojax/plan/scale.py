"""Foretells a step on more hosts than it was compiled for. This module reads a cluster's file, and walks a program of two hosts as of many.

The tokens of a GPU stay (weak scaling), so its matmuls do. A collective inside a host stays too. One that spans hosts gets more devices:

    bytes      all - all / n, of n devices
    time       hops x latency + max( bytes / NVLink,  bytes / devices on a host / adapter / oversubscription )

A ring over h hosts has h - 1 hops between hosts, and one for each further device. An all-to-all sends to all others directly, to
`AT_A_TIME` in one hop. Small arrays take NCCL's protocol LL, whose hops are shorter, at half the bandwidth. All wait for the slowest
device. A job that fails at random, every M seconds, saves for C and restarts in R does best if it saves every T = sqrt(2 C M) seconds
(Young, 1974; Daly, 2006). The share of its time that is useful is then

    T / ((M + R) (exp((T + C) / M) - 1))
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from zerojax import bounded, display, errors
from zerojax.clock import kernels as kernels_lib
from zerojax.clock import rates as rates_lib
from zerojax.clock import walk
from zerojax.errors import UserError
from zerojax.plan import bound as bound_lib
from zerojax.plan import step_plan

MOST = 1e12
AT_A_TIME = 8  # messages of an all-to-all, assumed
# Of NCCL's protocol LL beside Simple: its hops (2.7 of 14 us, 0.6 of 3.4; src/graph/tuning.cc), and its bandwidth.
LL_HOP, LL_RATE = 0.19, 0.5
REACHED = 0.8  # of an adapter's rate, by NCCL; assumed, as `clock`'s rates do


@dataclasses.dataclass(frozen=True)
class Network:
    """What a cluster's file says. A field that it does not name has its default, whose source is beside it.

    Attributes:
      gpus_per_host: of each host.
      adapter_gbps: Gbit/s of a host's adapters together, for each GPU.
      hop_us: latency of a hop between hosts, microseconds.
      near_hop_us: of a hop between GPUs of a host.
      pod_hosts: hosts under one non-blocking part of the network; 0: all.
      oversubscription: how many times as slow links between these parts are.
      gpu_hours: hours of one GPU between interruptions of a job.
      save_seconds: for which a checkpoint stops the step.
      restart_seconds: from an interruption to the next step.
    """

    gpus_per_host: int = 8
    adapter_gbps: float = 400.0
    hop_us: float = 14.0  # NCCL's table for rings and the protocol Simple (src/graph/tuning.cc)
    near_hop_us: float = 3.4  # the same, NVLink
    pod_hosts: int = 0
    oversubscription: float = 1.0
    # 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv:2407.21783, section 3.3.4)
    gpu_hours: float = 50_676.0
    save_seconds: float = 30.0  # assumed
    restart_seconds: float = 300.0  # assumed


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on so many GPUs: its seconds, those of waiting for collectives, and the job's best interval and share of useful time."""

    gpus: int
    seconds: float
    exposed: float
    interval: float
    useful: float


def read(path: str | os.PathLike[str]) -> Network:
    """Returns the cluster of a JSON file.

    Raises:
      UserError: the file cannot be read, a key is unknown, or a value is no positive number.
    """
    try:
        content = bounded.parse_json(bounded.read_text(path), is_strict=True)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--cluster {path}: cannot be read ({errors.one_line(error)}); give a JSON file") from error
    known = {field.name: field.type for field in dataclasses.fields(Network)}
    if not isinstance(content, Mapping):
        raise UserError(f'--cluster {path}: must hold a JSON object, such as {{"adapter_gbps": 100}}')
    for key, value in content.items():
        if key not in known:
            raise UserError(f"--cluster {path}: {key!r} is not known; {errors.choose(key, known)}")
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        least = 0 if key == "pod_hosts" else 1e-9
        if not (is_whole or isinstance(value, float)) or not least <= value <= MOST:
            raise UserError(
                f"--cluster {path}: {key} must be above 0 and at most {MOST:g}, and is {errors.shown(value)}"
            )
        if key in ("gpus_per_host", "pod_hosts") and not is_whole:
            raise UserError(f"--cluster {path}: {key} must be a whole number, and is {errors.shown(value)}")
    return Network(**content)


@dataclasses.dataclass(frozen=True)
class OnCluster(rates_lib.GpuRates):
    """The rates of one kind of GPU where collectives between hosts are those of a larger job."""

    cluster: Network = dataclasses.field(default_factory=Network)  # the network
    gpus: int = 16  # those of the job
    compiled: int = 16  # those of the program

    def seconds(self, kernel: kernels_lib.KernelWork, per_host: int = 0, is_duplex: bool = False) -> float:
        if kernel.kind != kernels_lib.COLLECTIVE or not per_host:
            return super().seconds(kernel, per_host, is_duplex)
        ways = len(kernel.group)
        many = ways * self.gpus // self.compiled
        received = kernel.nbytes * ways / (ways - 1) * (many - 1) / many
        hosts, c = many // per_host, self.cluster
        far_hops, near_hops = hosts - 1, many - hosts
        if kernel.form == "all-to-all":
            far_hops, near_hops = (math.ceil(hops / AT_A_TIME) for hops in (far_hops, near_hops))
        hops = (far_hops * c.hop_us + near_hops * c.near_hop_us) * 1e-6
        crosses = c.pod_hosts and self.gpus // c.gpus_per_host > c.pod_hosts
        far = received / per_host / (c.adapter_gbps / 8 * 1e9 * REACHED) * (c.oversubscription if crosses else 1.0)
        near = received / self.figures["beta"]
        sent = far if per_host == 1 else max(near, far)
        return min(hops + sent, LL_HOP * hops + sent / LL_RATE)

    def spread(self, devices: int) -> float:
        return super().spread(self.gpus)


def curve(plan: step_plan.Plan, cluster: Network, counts: Sequence[int]) -> list[Point]:
    """Returns the step on so many GPUs each, from a plan of two hosts or more.

    Raises:
      UserError: the plan has no foretold time, its hosts are not those of the cluster, or nothing spans hosts.
    """
    if plan.foretold is None or plan.rates is None or plan.pipeline is not None:
        raise UserError(
            "--cluster: needs the foretold time of a step that is one program, on a target with rates; see docs/plan.md in the repository"
        )
    by_host = bound_lib.hosts(plan.ledger.mesh, plan.ledger.mesh.axis_names)
    if len(by_host) < 2 or {*by_host.values()} != {cluster.gpus_per_host}:
        raise UserError(
            f"--cluster: {len(by_host)} host(s) of {max(by_host.values())} are planned, and more are foretold from two hosts of "
            f"{cluster.gpus_per_host} or more; pass --topology 2x{cluster.gpus_per_host}"
        )
    found, known = [], dict[Any, Any]()
    for gpus in counts:
        rates = OnCluster(plan.rates.name, plan.rates.figures, plan.rates.sources, cluster, gpus, plan.devices)
        time = walk.walk(plan.ledger.flow, rates, plan.devices, cluster.gpus_per_host, known=known)
        between = cluster.gpu_hours * 3600 / gpus
        interval, useful = best_interval(cluster.save_seconds, cluster.restart_seconds, between)
        found.append(Point(gpus, time.seconds, time.parts[walk.EXPOSED], interval, useful))
    return found


def counts_of(plan: step_plan.Plan) -> list[int]:
    """Returns the job sizes of a curve: those of the plan, then doubled from 64 to 4,096."""
    return [plan.devices, *(64 << doubled for doubled in range(7) if 64 << doubled > plan.devices)]


def best_interval(save: float, restart: float, between: float) -> tuple[float, float]:
    """Returns the interval between checkpoints that loses least, in seconds, and the share of the time that is useful then.

    >>> interval, useful = best_interval(30.0, 300.0, 86400.0)
    """
    interval = math.sqrt(2 * save * between)
    rounds = 1 / math.expm1(min((interval + save) / between, 700.0))  # that end before a failure, on average
    return interval, interval * rounds / (between + restart)


def table(plan: step_plan.Plan, points: Sequence[Point]) -> Table:
    """Returns the curve as a table; efficiency is that of the first row's tokens a second and GPU."""
    title = f"The same step on more hosts, {plan.tokens / plan.devices:,.0f} tokens a GPU"
    columns = ("GPUs", "step", "waits for collectives", "efficiency", "save every", "useful time")
    shown = display.table(title, columns, ())
    for point in points:
        shown.add_row(
            f"{point.gpus:,}",
            f"{point.seconds * 1e3:,.0f} ms",
            f"{point.exposed * 1e3:,.0f} ms",
            f"{points[0].seconds / point.seconds:.1%}",
            f"{point.interval / 60:,.0f} min",
            f"{point.useful:.1%}",
        )
    shown.caption = "no job of these sizes was measured"
    return shown
