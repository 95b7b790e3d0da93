"""Explains where a ledger and theory differ. This module compares them weight by weight, in units of the model's parameters."""

import dataclasses
import math

from zerojax import roles
from zerojax.plan import attribution
from zerojax.plan import ledger as ledger_lib


@dataclasses.dataclass(frozen=True)
class Departure:
    """Where one group of equal-shaped weights moves more or less than theory says, in units of the model's parameters."""

    role: str
    weights: tuple[str, ...]
    expected: float
    found: float
    why: str


def departures(ledger: ledger_lib.Ledger, *, passes: int = 1, tolerance: float = 0.001) -> tuple[Departure, ...]:
    """Returns where the ledger and `ledger.theory` differ by more than `tolerance` parameters, each with its reason."""
    groups: dict[tuple[int, ...], list[attribution.WeightDims]] = {}
    for weight in ledger.weights.values():
        groups.setdefault(weight.used, []).append(weight)
    group_of = {weight.path: key for key, members in groups.items() for weight in members}
    found: dict[tuple, list[tuple[ledger_lib.Row, float]]] = {}
    for row in ledger.rows:
        candidates = {group_of[path] for path in row.weights}
        for key in candidates:  # where several groups are possible, each counts an equal part
            found.setdefault((row.role, key), []).append((row, row.elements / len(candidates)))
    result = []
    for key, members in groups.items():
        share = sum(weight.size for weight in members) / max(1, ledger.params)
        expected = ledger_lib.theory({weight.path: weight for weight in members}, ledger.ways, passes)
        for role, params in expected.items():
            rows = [row for row, _ in found.get((role, key), [])]
            moved = sum(elements for _, elements in found.get((role, key), [])) / max(1, ledger.params)
            if abs(moved - params * share) > tolerance:
                paths = tuple(weight.path for weight in members)
                why = _why(ledger, role, paths, rows, moved < params * share)
                result.append(Departure(role, paths, params * share, moved, why))
    return tuple(sorted(result, key=lambda departure: -abs(departure.found - departure.expected)))


def _why(
    ledger: ledger_lib.Ledger, role: str, paths: tuple[str, ...], rows: list[ledger_lib.Row], is_less: bool
) -> str:
    if role in (roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD) and is_less:
        gathered = [r for r in ledger.rows if r.role == roles.WEIGHTS_FORWARD and set(r.weights) & set(paths)]
        if not gathered:
            return "the program takes the weight whole, or moves activations in its stead"
        kept = any(row.is_kept for row in gathered)
        return "kept from the forward pass" if kept else "the backward pass does not read the weight"
    if role == roles.GRADIENTS and is_less:
        modules = {path.split("/")[-2] for path in paths if "/" in path}
        moved = [
            r for r in ledger.rows if r.role == roles.ACTIVATIONS and modules & set("/".join(r.read_by).split("/"))
        ]
        params = sum(row.elements for row in moved) / max(1, ledger.params)
        return f"formed on its shards from gathered activations, {params:.3f} parameters" if moved else "not reduced"
    is_split = any(min(map(math.prod, (w.grad, w.moments))) < w.size for w in (ledger.weights[path] for path in paths))
    if is_split and any(row.kind == "all-reduce" for row in rows):
        return "all-reduced: twice what a reduce-scatter moves"
    if any(row.kind == "collective-permute" for row in rows):
        return "a ring of permutes beside the product, whose first turn carries zeros"
    if any(row.times > 1 for row in rows):
        return "moved in every turn of a loop"
    return "moved more often than the plan needs" if rows else "not moved"
