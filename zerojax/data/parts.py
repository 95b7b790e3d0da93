"""Makes rows of which devices hold parts. This module adds to each token what its neighbours say: the label after it, and its position.

A part of a row then needs no other. Of the arrays of a row with T tokens to read:

    tokens[T + 1] (or targets)   becomes tokens[T] and labels[T]
    labeled[T + 1]               becomes labeled[T], of the labels
    segments[T + 1]              becomes segments[T], as do the numbers of sources (of a decoder)
    positions[T]                 is new; of an encoder-decoder those of the inputs, and target_positions[T]

All are put in the order in which devices hold them, so that each has a slice.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zerojax.data import objectives

# length -> int32[length]: the position in its row of each token, as devices hold them
Order = Callable[[int], np.ndarray]
_READ = ("tokens", "targets")  # the array of a row whose next token is learned


def of_rows(arrays: Mapping[str, np.ndarray], order: Order) -> dict[str, np.ndarray]:
    """Returns rows, {name: int32[..., length]}, with labels and positions, in an order."""
    name = next(name for name in _READ if name in arrays)
    found = dict(arrays)
    found[name], found["labels"] = arrays[name][..., :-1], arrays[name][..., 1:]
    if "labeled" in arrays:
        found["labeled"] = arrays["labeled"][..., 1:]
    for of_read in {"segments", "sources"} & arrays.keys() if "inputs" not in arrays else ():
        found[of_read] = arrays[of_read][..., :-1]
    for counted, positions in (
        ((name, "target_positions"), ("inputs", "positions")) if "inputs" in arrays else ((name, "positions"),)
    ):
        shape = found[counted].shape
        found[positions] = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    return {name: array[..., order(array.shape[-1])] for name, array in found.items()}


def row(declared: objectives.Row) -> objectives.Row:
    """Declares the arrays that `of_rows` makes of a declared row."""
    found = of_rows({name: np.zeros(array.shape, array.dtype) for name, array in declared.items()}, np.arange)
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in found.items()}


def labeled(batch: Mapping[str, Any]) -> Any:
    """Returns 1 where a token of a batch is a label that is learned: int32[..., T]. The batch has "labeled"."""
    return batch["labeled"] if "labels" in batch else batch["labeled"][..., 1:]
