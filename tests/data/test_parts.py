"""Checks rows of which devices hold parts. This module tests zerojax.data.parts."""

import functools

import numpy as np
import pytest

from zerojax.data import objectives, parts
from zerojax.ops import token_order

ROWS = {
    "text": {"tokens": 17},
    "packed": {"tokens": 17, "labeled": 17, "segments": 17},
    "pairs": {"inputs": 8, "mask": 8, "targets": 13, "labeled": 13},
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_each_token_has_the_label_and_the_position_that_it_has_in_its_row(name, order):
    rng = np.random.default_rng(0)
    rows = {array: rng.integers(0, 100, (2, length)).astype(np.int32) for array, length in ROWS[name].items()}
    order = functools.partial(token_order.permutation, ways=2, order=order)
    found = parts.of_rows(rows, order)
    declared = parts.row(objectives.integers(ROWS[name]))
    assert {array: (values.shape[1:], values.dtype) for array, values in found.items()} == {
        array: (like.shape, like.dtype) for array, like in declared.items()
    }
    read = "targets" if "targets" in rows else "tokens"
    positions = found["target_positions" if "inputs" in rows else "positions"]
    np.testing.assert_array_equal(positions[0], order(rows[read].shape[1] - 1))
    at = functools.partial(np.take_along_axis, indices=positions, axis=1)
    np.testing.assert_array_equal(found[read], at(rows[read]))
    np.testing.assert_array_equal(found["labels"], at(rows[read][:, 1:]))
    for array, first in (("labeled", 1), ("segments", 0)):
        if array in rows:
            np.testing.assert_array_equal(found[array], at(rows[array][:, first:]))
    if "inputs" in rows:
        for array in ("inputs", "mask"):
            np.testing.assert_array_equal(found[array], np.take_along_axis(rows[array], found["positions"], axis=1))
    if "labeled" in rows:
        np.testing.assert_array_equal(parts.labeled(rows), rows["labeled"][:, 1:])
        np.testing.assert_array_equal(parts.labeled(found), found["labeled"])
