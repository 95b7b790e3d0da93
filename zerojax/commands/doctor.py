"""Checks hosts and devices before a long run. This module is the command line `zerojax doctor`, which measures under the launcher.

zerojax doctor                                                 this host
zerojax doctor --hostfile hosts --workdir /shared/runs/a       several, as `zerojax launch` would start them
zerojax doctor --hostfile hosts --min_gb_per_second 20 --json  for scripts: status 1 if a line is wrong
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerojax import display
from zerojax.cluster import attempt, hosts, probe, supervisor
from zerojax.commands import arguments, facts
from zerojax.commands.facts import NOTE, OK, WRONG, Fact
from zerojax.errors import UserError
from zerojax.launch import devices

SLOW = 0.75  # of the median rate, below which a device or host is slow
SLOW_LINK = 0.5
# Clocks that differ by more are noted, and are wrong: locks and files carry times
CLOCK_SECONDS, BEAT_CLOCK_SECONDS = 1.0, 60.0
MOST_UNEQUAL = 0.1  # of the memory of hosts or devices
FEW_GB = 10
SHOWN_PAIRS = 28  # of 8 hosts; of more hosts only the slowest are listed

Found = Mapping[int, Mapping[str, Any]]  # rank -> what its probe found


@arguments.command
def main() -> int:
    """Prints what was found. Ends with status 1 if a line is wrong."""
    given = _parse(sys.argv[1:])
    if given.probe:
        probe.run([int(rank) for rank in given.probe.split(",")], given.workdir, given.emulate_devices)
        return 0
    if not 1 <= given.emulate_devices <= devices.MOST_EMULATED:
        raise UserError(f"--emulate_devices: must be from 1 to {devices.MOST_EMULATED}, and is {given.emulate_devices}")
    if not 0 <= given.min_gb_per_second < math.inf:
        raise UserError(f"--min_gb_per_second: must be 0 or more, and is {given.min_gb_per_second}")
    order = arguments.order(given, [], os.environ)
    ranks = hosts.ranks(order.hosts, order.per_process)
    words = [
        "--probe",
        ",".join(map(str, leaders(ranks))),
        "--workdir",
        given.workdir and os.path.abspath(given.workdir),
    ]
    words += ["--emulate_devices", str(given.emulate_devices)]
    found: dict[int, dict[str, Any]] = {rank.rank: {} for rank in ranks}
    failures: list[attempt.Failure] = []
    runner = supervisor.Supervisor(
        arguments.order(given, [given.python, "-m", "zerojax.commands.doctor", *words], os.environ),
        hear=lambda rank, line: _hear(found, rank, line),
        tell=failures.append,
    )
    status = runner.run()
    if status > 128 and not failures:
        return status
    listed = list(collect(ranks, found, failures, runner.clocks, given.min_gb_per_second))
    return facts.show(listed, as_json=given.json)


def leaders(ranks: Sequence[hosts.Rank]) -> list[int]:
    """Returns the processes that exchange data with each other: the first of each host, or all those of a single host."""
    first = [rank.rank for rank in ranks if not rank.local_rank]
    return first if len(first) > 1 else [rank.rank for rank in ranks]


def collect(
    ranks: Sequence[hosts.Rank],
    found: Found,
    failures: Sequence[attempt.Failure],
    clocks: Mapping[str, float],
    least: float = 0.0,
) -> Iterator[Fact]:
    """Yields a line for each thing that was checked.

    Args:
      ranks: the processes.
      found: what their probes found before they ended.
      failures: what ended them early.
      clocks: the time of each host minus that of this one, in seconds.
      least: the rate that every pair of hosts must reach, in GB/s.
    """
    for failure in failures:
        details = "; ".join(line.strip() for line in failure.details if line.strip())
        remedy = f"fix this first; what follows is incomplete ({details[-600:]})"
        yield Fact("processes", "started", failure.line, WRONG, remedy)
    if not failures:
        yield Fact("processes", "started", f"{len(ranks)} on {len({rank.host for rank in ranks})} hosts")
    yield from _compute(ranks, found)
    yield from _exchange(ranks, found, least)
    yield from _versions(ranks, found)
    yield from _clocks(clocks)
    yield from _memory(ranks, found)
    yield from _disk(ranks, found)


def _compute(ranks: Sequence[hosts.Rank], found: Found) -> Iterator[Fact]:
    """Yields whether each device computes right, and which is slow."""
    devices = [(rank, device) for rank in ranks for device in found[rank.rank].get("compute", [])]
    if not devices:
        return
    typical = statistics.median(device["flops"] for _, device in devices)
    bad = False
    for rank, device in devices:
        name = f"{rank.host}:{rank.rank}, device {device['device']}"
        if not device["right"]:
            bad, remedy = True, f"take it out of service: --exclude {rank.host}"
            yield Fact("devices", name, "computes a wrong product", WRONG, remedy)
        elif device["flops"] < SLOW * typical:
            bad = True
            value = f"{device['flops'] / 1e12:.3g} TFLOP/s, {device['flops'] / typical:.0%} of the others"
            # emulated devices share processors
            is_emulated = device["kind"] == "cpu"
            remedy = "check its clocks, power and temperature (nvidia-smi -q -d PERFORMANCE), and what else runs there"
            yield Fact("devices", name, value, NOTE if is_emulated else WRONG, remedy)
    kinds = sorted({device["kind"] for _, device in devices})
    if len(kinds) > 1:
        remedy = "a run is as fast as its slowest device: use hosts of one kind"
        yield Fact("devices", "kinds", ", ".join(kinds), WRONG, remedy)
    if not bad:
        yield Fact("devices", "compute", f"{len(devices)} x {kinds[0]}, each right, {typical / 1e12:.3g} TFLOP/s")
    is_right = all(found[rank.rank].get("sum") is True for rank in ranks)
    value = "right" if is_right else "wrong or missing"
    yield Fact.judged("devices", "sum over all", value, is_right, "check the network, and NCCL_DEBUG=INFO")


def _exchange(ranks: Sequence[hosts.Rank], found: Found, least: float) -> Iterator[Fact]:
    """Yields the rate between every two hosts, and the host whose links are all slow."""
    hosts_of = {rank.rank: rank.host for rank in ranks}
    is_several = len(set(hosts_of.values())) > 1
    names = {rank: host if is_several else f"{host}:{rank}" for rank, host in hosts_of.items()}
    rates: dict[tuple[int, int], float] = {}
    for rank in hosts_of:
        for peer, rate in found[rank].get("exchange", {}).items():
            pair = (min(rank, int(peer)), max(rank, int(peer)))
            rates[pair] = min(rate, rates.get(pair, math.inf))
    first = leaders(ranks)
    missing = [(a, b) for index, a in enumerate(first) for b in first[index + 1 :] if (a, b) not in rates]
    for a, b in missing:
        yield Fact("links", f"{names[a]} - {names[b]}", "not measured", WRONG, "the processes ended before; see above")
    if not rates:
        return
    typical = statistics.median(rates.values())
    for (a, b), rate in sorted(rates.items(), key=lambda item: item[1])[:SHOWN_PAIRS]:
        is_low, is_slow = rate < least * 1e9, rate < SLOW_LINK * typical
        remedy = ""
        if is_low:
            remedy = f"less than --min_gb_per_second={least:g}: check the link, and that NCCL uses it (NCCL_DEBUG=INFO)"
        elif is_slow:
            remedy = f"{rate / typical:.0%} of the median: check the link"
        value = f"{rate / 1e9:.3g} GB/s each way"
        yield Fact("links", f"{names[a]} - {names[b]}", value, WRONG if is_low else NOTE if is_slow else OK, remedy)
    slow = _slow_host(rates, typical)
    if slow is not None:
        value = f"{names[slow]}: all its links are slow"
        yield Fact("links", "the slow host", value, WRONG, f"repair it, or run without it: --exclude {hosts_of[slow]}")


def _slow_host(rates: Mapping[tuple[int, int], float], typical: float) -> int | None:
    """Returns the one host of three or more whose links are all slow while some others' are not."""
    places = sorted({place for pair in rates for place in pair})
    slow = [p for p in places if all(rate < SLOW_LINK * typical for pair, rate in rates.items() if p in pair)]
    return slow[0] if len(slow) == 1 and len(places) > 2 else None


def _clocks(clocks: Mapping[str, float]) -> Iterator[Fact]:
    """Yields how far the clocks of the hosts are apart."""
    if not clocks:
        return
    middle = statistics.median(clocks.values())
    worst = max(clocks, key=lambda host: abs(clocks[host] - middle))
    off = abs(clocks[worst] - middle)
    if off <= CLOCK_SECONDS:
        yield Fact("hosts", "clocks", f"agree within {off * 1000:.0f} ms")
        return
    verdict = WRONG if off > BEAT_CLOCK_SECONDS else NOTE
    yield Fact("hosts", "clocks", f"{worst} is off by {off:.1f} s", verdict, f"synchronize {worst} (chronyc makestep)")


def _machines(ranks: Sequence[hosts.Rank], found: Found) -> dict[str, Mapping[str, Any]]:
    """Returns what the first process of each host found about its machine."""
    return {rank.host: found[rank.rank]["machine"] for rank in reversed(ranks) if "machine" in found[rank.rank]}


def _versions(ranks: Sequence[hosts.Rank], found: Found) -> Iterator[Fact]:
    """Yields each version, and the hosts that differ from most."""
    machines = _machines(ranks, found)
    for name in next(iter(machines.values()), {"versions": {}})["versions"]:
        values = {host: machine["versions"].get(name, "missing") for host, machine in machines.items()}
        usual = statistics.mode(values.values())
        others = [f"{host}: {value}" for host, value in values.items() if value != usual]
        told = f"{usual}; but {', '.join(others)}" if others else usual
        yield Fact.judged("versions", name, told, not others, f"install the same {name} on all hosts")


def _memory(ranks: Sequence[hosts.Rank], found: Found) -> Iterator[Fact]:
    """Yields the memory of hosts and devices, and which has less than the others."""
    machines = _machines(ranks, found)
    devices = {
        f"{rank.host}, device {device['device']}": device["memory"]
        for rank in ranks
        for device in found[rank.rank].get("compute", [])
        if device["memory"]
    }
    total, free = ({host: one[key] for host, one in machines.items()} for key in ("memory", "available"))
    rows: list[tuple[str, Mapping[str, int], str]] = [
        ("memory", total, "use hosts of one kind"),
        ("free memory", free, "see what runs on {}"),
        ("device memory", devices, "see what runs on {} (nvidia-smi)"),
    ]
    for name, values, remedy in rows:
        if not values:
            continue
        least, most = min(values, key=lambda key: values[key]), max(values.values())
        is_unequal = values[least] < (1 - MOST_UNEQUAL) * most
        value = f"{display.human(values[least])} at least"
        value += f" ({least}), {display.human(most)} at most" if is_unequal else ""
        worst = NOTE if name == "free memory" else WRONG
        yield Fact.judged("hosts", name, value, not is_unequal, remedy.format(least), worst)


def _disk(ranks: Sequence[hosts.Rank], found: Found) -> Iterator[Fact]:
    """Yields whether all hosts can write the workdir and see each other's files in it."""
    results = {rank.rank: found[rank.rank]["disk"] for rank in ranks if "disk" in found[rank.rank]}
    names = {rank.rank: rank.host for rank in ranks}
    if not results:
        if not any("machine" in one for one in found.values()):
            return
        yield Fact("disk", "workdir", "not checked", NOTE, "name it: --workdir FOLDER")
        return
    for rank, result in results.items():
        if result["error"]:
            value = f"cannot write the workdir: {result['error']}"
            yield Fact("disk", names[rank], value, WRONG, "mount it there, or correct its permissions")
    blind = {
        names[rank]: names[other]
        for rank, result in results.items()
        for other in result["unseen"]
        if not results[other]["error"]
    }
    for host, other in blind.items():
        value = f"does not see the files of {other}"
        yield Fact("disk", host, value, WRONG, "use one file system that all hosts share")
    free = min((found[rank]["machine"]["free"] for rank in results), default=0)
    if not blind and not any(result["error"] for result in results.values()):
        value, remedy = (
            f"written and seen by all, {display.human(free)} free",
            "checkpoints hold 12 bytes a parameter: make room",
        )
        yield Fact.judged("disk", "workdir", value, free >= FEW_GB * 2**30, remedy, NOTE)


def _hear(found: dict[int, dict[str, Any]], rank: int, line: str) -> bool:
    """Takes a finding from a line of a process. No line is shown."""
    if line.startswith(probe.MARK):
        found[rank] |= json.loads(line.removeprefix(probe.MARK))
    return False


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax doctor", doc=__doc__)
    arguments.add_hosts(parser)
    add = parser.add_argument
    add("--workdir", default="", help="the folder of the run, which all hosts must share")
    add("--min_gb_per_second", type=float, default=0.0, help="the rate that every two hosts must reach")
    add("--emulate_devices", type=int, default=1, help="CPU devices of a process without accelerators")
    add("--json", action="store_true", help="print JSON")
    add("--probe", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
