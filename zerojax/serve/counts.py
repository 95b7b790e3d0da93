"""Counts what a server does. This module writes the counts in the text format of Prometheus."""

import bisect
from collections.abc import Mapping

# seconds: the upper ends of the buckets of a histogram
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_HELP = {
    "requests_total": ("counter", "Requests that were answered or refused, by route and status."),
    "prompt_tokens_total": ("counter", "Tokens of prompts that were asked."),
    "reused_tokens_total": ("counter", "Tokens of prompts that were found in a cache."),
    "generated_tokens_total": ("counter", "Tokens that were generated."),
    "cancelled_total": ("counter", "Answers that ended because their client was gone, or because of the time limit."),
    "running": ("gauge", "Answers that have a slot."),
    "waiting": ("gauge", "Answers that wait for a slot."),
    "slots": ("gauge", "Answers that can have a slot at once."),
    "draining": ("gauge", "1 when the server refuses new requests because it is to end."),
    "queue_seconds": ("histogram", "Time from a request to a slot, of each answer."),
    "first_token_seconds": ("histogram", "Time from a request to its first token."),
    "request_seconds": ("histogram", "Time from a request to its end."),
}


class Counts:
    """The counts of a server. One thread changes them."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._times: dict[str, tuple[list[int], float]] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        key = (name, tuple(labels.items()))
        self._values[key] = self._values.get(key, 0) + value

    def time(self, name: str, seconds: float) -> None:
        """Adds a time to a histogram."""
        buckets, total = self._times.get(name, ([0] * (len(SECONDS) + 1), 0.0))
        buckets[bisect.bisect_left(SECONDS, seconds)] += 1
        self._times[name] = (buckets, total + seconds)

    def text(self, gauges: Mapping[str, float]) -> str:
        """Returns all counts, and the gauges of this moment."""
        lines = []
        for name, (kind, told) in _HELP.items():
            full = f"zerojax_{name}"
            lines += [f"# HELP {full} {told}", f"# TYPE {full} {kind}"]
            if kind == "gauge":
                lines.append(f"{full} {gauges[name]:g}")
            elif kind == "counter":
                found = {labels: value for (known, labels), value in self._values.items() if known == name}
                for labels, value in (found or {(): 0.0}).items():
                    within = ",".join(f'{key}="{word}"' for key, word in labels)
                    lines.append(f"{full}{{{within}}} {value:.0f}" if within else f"{full} {value:.0f}")
            else:
                buckets, total = self._times.get(name, ([0] * (len(SECONDS) + 1), 0.0))
                count = 0
                for end, number in zip((*map(str, SECONDS), "+Inf"), buckets):
                    count += number
                    lines.append(f'{full}_bucket{{le="{end}"}} {count}')
                lines += [f"{full}_sum {total:.6f}", f"{full}_count {count}"]
        return "\n".join(lines) + "\n"
