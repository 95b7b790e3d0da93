"""Checks the benchmark of mesh axes on emulated devices. This module tests scripts/bench_axes.py."""

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import bench_axes

SHAPE = (4, 2, 8)
ROUNDING = 0.01  # of bfloat16, relative


@pytest.mark.long
@pytest.mark.parametrize("way, order, window", sorted({(way, order, min(w, 16)) for way, order, w in bench_axes.ROWS}))
def test_each_row_is_exact_and_has_figures(way, order, window):
    devices = jax.devices()[:2]
    figures = bench_axes.measure(way, order, window, devices, "xla", 128, SHAPE, repeats=1)
    assert (figures["sent_gb"] > 0) == (way != "one device") and min(figures["ms"], figures["tflops"]) > 0
    if way != "one device":
        found = bench_axes.errors(way, order, window, devices, "xla", 64, SHAPE)
        assert found.keys() == set(bench_axes.ERRORS) and max(found.values()) < ROUNDING


@pytest.mark.long
def test_blocks_of_one_device_add_up():
    found = bench_axes.errors("blocks", "contiguous", 0, jax.devices()[:1], "xla", 64, SHAPE)
    assert found.keys() == set(bench_axes.ERRORS) and max(found.values()) < ROUNDING
