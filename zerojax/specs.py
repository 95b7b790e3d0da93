"""Arithmetic on PartitionSpecs. This module says which mesh axes one names, takes an axis out, and trims its end."""

from typing import Any

from jax.sharding import PartitionSpec as P


def axes(spec: P) -> set[str]:
    """Returns the mesh axes that a spec names."""
    return {name for entry in spec for name in _names(entry)}


def without(spec: P, axis: str) -> P:
    """Returns the spec with one mesh axis dropped, and no None at its end."""

    def drop(entry: Any) -> Any:
        kept = tuple(name for name in _names(entry) if name != axis)
        return kept[0] if len(kept) == 1 else kept or None

    return trimmed([drop(entry) for entry in spec])


def trimmed(entries: list) -> P:
    """Returns the entries as a spec with no None at its end."""
    length = max((i + 1 for i, entry in enumerate(entries) if entry), default=0)
    return P(*entries[:length])


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
