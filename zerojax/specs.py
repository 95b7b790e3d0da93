"""Arithmetic on PartitionSpecs. This module says which mesh axes one names, takes an axis out, trims its end, and picks a dim to pad."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P


def axes(spec: P) -> set[str]:
    """Returns the mesh axes that a spec names."""
    return {name for entry in spec for name in names(entry)}


def without(spec: P, axis: str) -> P:
    """Returns the spec with one mesh axis dropped, and no None at its end."""

    def drop(entry: Any) -> Any:
        kept = tuple(name for name in names(entry) if name != axis)
        return kept[0] if len(kept) == 1 else kept or None

    return trimmed([drop(entry) for entry in spec])


def trimmed(entries: list) -> P:
    """Returns the entries as a spec with no None at its end."""
    length = max((i + 1 for i, entry in enumerate(entries) if entry), default=0)
    return P(*entries[:length])


def names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a spec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def pad_dim(shape: Sequence[int], base: P, ways: int) -> tuple[int | None, tuple[int, ...]]:
    """Picks the longest dim that `base` leaves free, and returns it with what to add to each dim so that it divides."""
    taken = tuple(base) + (None,) * (len(shape) - len(base))
    free = [dim for dim in range(len(shape)) if taken[dim] is None]
    if not free:
        return None, ()
    dim = max(free, key=lambda d: shape[d])
    return dim, tuple(-shape[d] % ways if d == dim else 0 for d in range(len(shape)))
