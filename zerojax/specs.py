"""Arithmetic on PartitionSpecs. This module lists the mesh axes of a spec, removes axes, and trims its end."""

from collections.abc import Collection
from typing import Any

from jax.sharding import PartitionSpec as P

Entry = str | tuple[str, ...] | None  # of a spec, or what a collective runs over; P.UNCONSTRAINED beside


def axes(spec: P) -> set[str]:
    """Returns the mesh axes that a spec names."""
    return {name for entry in spec for name in names(entry)}


def dims_of(spec: P, axes: Collection[str]) -> list[int]:
    """Returns the dims that a spec shards over any of some mesh axes."""
    return [dim for dim, entry in enumerate(spec) if not set(axes).isdisjoint(names(entry))]


def without(spec: P, dropped: Collection[str]) -> P:
    """Returns the spec without some mesh axes, and without trailing None."""
    return only(spec, axes(spec) - set(dropped))


def only(spec: P, kept: Collection[str]) -> P:
    """Returns the spec with only the mesh axes in `kept`, and without trailing None."""

    def of_dim(own: Any) -> Any:
        return own if own is P.UNCONSTRAINED else entry(tuple(name for name in names(own) if name in kept))

    return trimmed([of_dim(own) for own in spec])


def entry(found: tuple[str, ...]) -> Entry:
    """Returns the entry of a spec, or the argument of a collective, that names these axes."""
    return found[0] if len(found) == 1 else found or None


def trimmed(entries: list) -> P:
    """Returns the entries as a spec without trailing None."""
    length = max((i + 1 for i, entry in enumerate(entries) if entry), default=0)
    return P(*entries[:length])


def names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a spec names."""
    if isinstance(entry, str):
        return (entry,)
    return () if entry is P.UNCONSTRAINED else tuple(entry or ())
