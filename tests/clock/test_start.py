"""Checks the foretold time to a run's first step. This module tests zerojax.clock.start."""

import itertools

import pytest

from zerojax.clock import start


def test_more_lines_devices_and_pinned_memory_take_longer_and_compiling_is_part_of_the_first_step():
    one = start.foretold(10_000, 1)
    assert one.compile == start.FIXED + 10_000 * start.EACH
    assert one.first_step == pytest.approx(one.compile + start.ALONE + start.BESIDE)
    rows = [start.foretold(lines, 8, pinned) for lines, pinned in ((10_000, 0.0), (20_000, 0.0), (20_000, 1e10))]
    assert all(low.first_step < high.first_step for low, high in itertools.pairwise([one, *rows]))
    assert rows[2].first_step - rows[1].first_step == pytest.approx(8e10 / start.PINNED)
