"""Makes optax's own Muon and AdamW with the forms of `zerojax.muon`. This module is what its tests compare with."""

from typing import Any

import jax
import optax
from optax import contrib

from zerojax import tree
from zerojax.optim import muon

RATE, DECAY, B1, B2 = 1e-2, 0.1, 0.8, 0.9


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def settings(**changes: Any) -> dict[str, Any]:
    """Returns arguments of `zerojax.muon` that mean what `reference` computes."""
    return {
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "b1": B1,
        "b2": B2,
        "mask": matrices,
        "dtype": "float32",
    } | changes


def numbers(form: str) -> contrib.MuonDimensionNumbers:
    rows, columns = (tuple(dim for dim, letter in enumerate(form) if letter == own) for own in "rc")
    return contrib.MuonDimensionNumbers(rows, columns)


def reference(rms: float | None = muon.RMS, **how: Any) -> optax.GradientTransformation:
    """Returns the optimizer for params on one device."""

    def form(path: str, leaf: Any) -> str:
        return muon.form(path, leaf.shape, **how)

    of_matrices = contrib.muon(
        RATE,
        weight_decay=DECAY,
        muon_weight_dimension_numbers=lambda params: tree.map_with_path(lambda *leaf: numbers(form(*leaf)), params),
        consistent_rms=rms,
    )
    of_others = optax.adamw(RATE, B1, B2, weight_decay=DECAY, mask=matrices)
    return optax.partition(
        {"matrix": of_matrices, "other": of_others},
        lambda params: tree.map_with_path(lambda *leaf: "matrix" if form(*leaf) else "other", params),
    )
