"""Explains where a ledger differs from theory. This module compares them by group of weights, in units of the model's parameters."""

import dataclasses
import math

from zerojax import mesh as mesh_lib
from zerojax import roles
from zerojax.plan import attribution
from zerojax.plan import ledger as ledger_lib


@dataclasses.dataclass(frozen=True)
class Departure:
    """A group of weights of one shape that moves more or less than theory expects, in units of the model's parameters."""

    role: str
    weights: tuple[str, ...]
    expected: float
    found: float
    why: str


def departures(ledger: ledger_lib.Ledger, *, passes: int = 1, tolerance: float = 0.001) -> tuple[Departure, ...]:
    """Returns the groups of weights for which the ledger and `ledger.theory` differ by more than `tolerance` parameters, with reasons."""
    groups: dict[tuple[int, ...], list[attribution.WeightDims]] = {}
    for weight in ledger.weights.values():
        groups.setdefault(weight.used, []).append(weight)
    group_of = {weight.path: key for key, members in groups.items() for weight in members}
    found: dict[tuple, list[tuple[ledger_lib.Row, float]]] = {}
    for row in ledger.rows:
        # Where tokens are sharded over such an axis, the gradient of a replicated weight (a norm) is also summed over it.
        if row.role == roles.GRADIENTS and row.axes and set(row.axes) <= set(mesh_lib.COMPILER):
            continue
        candidates = {group_of[path] for path in row.weights}
        for key in candidates:  # if several groups are possible, each counts an equal share
            found.setdefault((row.role, key), []).append((row, row.elements / len(candidates)))
    result = []
    for key, members in groups.items():
        share = sum(weight.size for weight in members) / max(1, ledger.params)
        expected = ledger.theory(passes, {weight.path for weight in members})
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
    if is_less and any("all-to-all" in row.kind and set(row.weights) & set(paths) for row in ledger.rows):
        return "devices use it by columns, and activations are sent instead"
    if role in (roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD) and is_less:
        gathered = {r.role for r in ledger.rows if set(r.weights) & set(paths)}
        if not gathered & {roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD}:
            return "the weight is replicated in the program, or the program moves activations instead"
        is_kept = role == roles.WEIGHTS_BACKWARD and roles.WEIGHTS_FORWARD in gathered
        return "kept from the forward pass" if is_kept else "gathered once for both passes"
    if role == roles.GRADIENTS and is_less:
        modules = {path.split("/")[-2] for path in paths if "/" in path}
        moved = [
            r for r in ledger.rows if r.role == roles.ACTIVATIONS and modules & set("/".join(r.read_by).split("/"))
        ]
        params = sum(row.elements for row in moved) / max(1, ledger.params)
        if moved:
            return f"computed as shards from gathered activations, {params:.3f} parameters"
        return "not reduced, as of a weight that the loss reads as a constant"
    is_sharded = any(
        min(map(math.prod, (w.grad, w.moments))) < w.size for w in (ledger.weights[path] for path in paths)
    )
    if is_sharded and any(row.kind == "all-reduce" for row in rows):
        return "all-reduced, which moves twice as much as a reduce-scatter"
    kinds = {row.kind for row in rows}
    if {"reduce-scatter", "collective-permute"} <= kinds:
        return (
            "permutes move rows between devices after a reduce-scatter, whose parts are of other sizes than the shards"
        )
    if "collective-permute" in kinds:
        return "summed by a ring of permutes beside the matmul; the first permute sends zeros"
    if any(row.times > 1 for row in rows):
        return "moved in every iteration of a loop"
    return "moved more often than the plan needs" if rows else "not moved"
