"""Checks which policy stored weights have. This module tests zerojax.zero.blocks.stored."""

import pytest

from zerojax.zero.blocks import block_settings, marks, remat, stored


@pytest.mark.parametrize(
    ("how", "moves", "expected"),
    [
        ({"remat": "none"}, False, None),  # all is kept
        ({"remat": "none"}, True, remat.REMAT["none"]),  # all but gathered weights
        ({}, True, remat.REMAT["dots"]),
        ({"recompute": "a/up"}, True, remat.policy("dots", in_place=False)),
        ({"offload": "a/up"}, True, marks.Offloads(remat.policy("dots", in_place=False))),
    ],
)
def test_a_policy_keeps_what_the_settings_say(how, moves, expected):
    own = stored.Stored(lambda path, leaf: leaf, block_settings.Blocks("a", **how), moves)
    assert own.policy == expected
