"""Prints the card of a run, or of two runs side by side. This module is the command line `zerojax show`.

zerojax show runs/a                  the run card WORKDIR/run.json as a table
zerojax show runs/a runs/b           both, with the settings that differ, and the first step whose losses differ
zerojax show runs/a/checkpoints/50   the card as it was when step 50 was saved
"""

import argparse
import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerojax import display
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.trainer import metrics, setting_names
from zerojax.trainer.card import document

_NOTHING = "-"
_LONGEST = 60  # characters of a setting


@arguments.command
def main() -> None:
    """Prints one card or compares two. A UserError prints one line and ends with status 2."""
    given = _parse(sys.argv[1:])
    cards = [document.read(place) for place in given.runs]
    if len(cards) == 1:
        print(json.dumps(cards[0], indent=1) if given.json else aligned(list(rows(cards[0]))))
        return
    first, second = map(pathlib.Path, given.runs)
    found = compared(first, second, cards[0], cards[1])
    print(json.dumps(found, indent=1) if given.json else beside(given.runs, cards, found))


def rows(card: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what a card says, as (name, text). What the card lacks is "-"."""
    line = card.get("line")
    yield "status", f"{_text(card.get('status'))}{f': {line}' if line else ''}"
    yield "step", f"{_text(card.get('step'))} of {_text(card.get('steps'))}"
    yield "loss", _text(card.get("loss"))
    yield "evaluation loss", _text(card.get("eval_loss"))
    losses = _group(card, "losses")
    yield "losses", f"of steps {_text(losses.get('first_step'))} to {_text(losses.get('last_step'))}: {_hash(losses)}"
    yield "tokens/s", _speed(card)
    mfu = card.get("mfu")
    yield "MFU", f"{mfu:.1%}" if isinstance(mfu, float) else _NOTHING
    foretold = card.get("foretold_step_seconds")
    yield "step, foretold", f"{foretold * 1e3:,.1f} ms" if isinstance(foretold, float) else _NOTHING
    yield "peak, planned", _bytes(card.get("planned_peak_bytes"))
    yield "peak, measured", _bytes(card.get("measured_peak_bytes"))
    received = _group(_group(card, "received_bytes"), "by_kind")
    sent = [f"{kind} {_bytes(count)}" for kind, count in received.items()]
    yield "received a step", ", ".join(sent) or _NOTHING
    yield "skipped steps", _text(card.get("skipped_steps"))
    yield "resumes", _text(card.get("resumes"))
    config, devices = _group(card, "config"), _group(card, "devices")
    yield "stage", f"{_text(card.get('stage'))}, {_text(config.get('precision'))}"
    yield "mesh", ", ".join(f"{axis} {size}" for axis, size in _group(card, "mesh").items()) or _NOTHING
    hosts = card.get("hosts")
    where = f" on {', '.join(map(str, hosts))}" if isinstance(hosts, list) and hosts else ""
    yield "devices", f"{_text(devices.get('count'))} x {_text(devices.get('kind'))}{where}"
    sizes = [card.get(name) for name in ("global_batch_size", "micro_batch_size", "grad_accum")]
    whole, micro, accum = (size if isinstance(size, int) else 0 for size in sizes)
    ways = whole // (micro * accum) if micro * accum else None
    yield "batch", "{} = micro-batch {} x accumulation {} x {} ways".format(*map(_text, [*sizes, ways]))
    yield "config", _short(card.get("config_sha256"))
    yield (
        "versions",
        ", ".join(f"{name} {_text(found)}" for name, found in _group(card, "versions").items()) or _NOTHING,
    )
    yield "written", _text(card.get("written"))


def aligned(lines: list[tuple[str, str]]) -> str:
    """Returns names and texts in two columns."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def beside(names: Sequence[str], cards: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    """Returns two cards: rows that are equal once, and those that differ below each other; then the settings and the verdict."""
    lines: list[tuple[str, str]] = [*zip("AB", names)]
    for (name, ours), (_, theirs) in zip(*map(rows, cards)):
        lines += [(name, ours)] if ours == theirs else [(f"{name}  A", ours), (f"{name}  B", theirs)]
    for place, values in found["settings"].items():
        shown = (repr(values[which])[:_LONGEST] for which in ("a", "b"))
        lines += [(f"config.{place}  {which}", text) for which, text in zip("AB", shown)]
    return "\n".join([aligned(lines), "", verdict(found)])


def compared(first: pathlib.Path, second: pathlib.Path, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how two runs differ, as JSON: their settings, and their losses."""
    settings_a, settings_b = (setting_names.flat(_group(card, "config")) for card in (a, b))
    places = [place for place in {**settings_a, **settings_b} if settings_a.get(place) != settings_b.get(place)]
    is_same = bool(_hash(_group(a, "losses")) != _NOTHING and a.get("losses") == b.get("losses"))
    common = {} if is_same else _common(first, second)
    return {
        "schema": document.SCHEMA,
        "settings": {place: {"a": settings_a.get(place), "b": settings_b.get(place)} for place in places},
        "same_losses": is_same,
        "compared_steps": len(common),
        "first_different_step": next((step for step, (a, b) in common.items() if a != b), None),
    }


def verdict(found: Mapping[str, Any]) -> str:
    """Returns the line that says whether two runs have the same losses."""
    if found["same_losses"]:
        return "The losses of all steps are the same, bit for bit."
    if (step := found["first_different_step"]) is not None:
        return f"The losses differ from step {step} on."
    if count := found["compared_steps"]:
        return f"The losses of the {count} steps that both have logged are the same, and the runs have other steps too."
    return "The losses differ; no logged step tells where."


def _common(first: pathlib.Path, second: pathlib.Path) -> dict[int, tuple[Any, Any]]:
    """Returns the losses of the steps that both runs have logged, in order."""
    logs: list[dict[int, Any]] = []
    for place in (first, second):
        folders = [place, place.parent, place.parent.parent]  # the run's, or that of a checkpoint or a card in it
        folder = next((folder for folder in folders if (folder / metrics.FILE).is_file()), place)
        log: dict[int, Any] = {}
        with contextlib.suppress(UserError):
            log = {record["step"]: record["loss"] for record in metrics.read(folder) if "loss" in record}
        logs.append(log)
    return {step: (loss, logs[1][step]) for step, loss in sorted(logs[0].items()) if step in logs[1]}


def _group(card: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = card.get(name)
    return found if isinstance(found, Mapping) else {}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return _NOTHING if value is None else str(value)


def _bytes(value: object) -> str:
    return display.human(value) if isinstance(value, int | float) else _NOTHING


def _hash(losses: Mapping[str, Any]) -> str:
    return _short(losses.get("sha256"))


def _short(digest: object) -> str:
    return digest[:16] if isinstance(digest, str) and digest else _NOTHING


def _speed(card: Mapping[str, Any]) -> str:
    rate, seconds = card.get("tokens_per_second"), card.get("step_seconds")
    if not isinstance(rate, float) or not isinstance(seconds, float):
        return _NOTHING
    steps = card.get("timed_steps")
    return f"{rate:,.0f}, {'of 1 step' if steps == 1 else f'the median of {_text(steps)} steps'} ({seconds:.4g} s)"


def _parse(words: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax show", doc=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, a checkpoint's, or a run.json")
    parser.add_argument("--json", action="store_true", help="print JSON: the card, or the comparison")
    given = parser.parse_args(words)
    if len(given.runs) > 2:
        raise UserError(f"RUN: {len(given.runs)} are given, and one is shown or two are compared; name one or two")
    return given


if __name__ == "__main__":
    main()
