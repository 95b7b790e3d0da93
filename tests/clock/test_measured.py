"""Checks the page of the clock's errors against the settings, the raw files and the tables."""

import json
import pathlib
import re
import sys

import pytest

from zerojax.clock import rates

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import foretell  # noqa: E402

SETTINGS = json.loads((foretell.RAW / "clock_settings.json").read_text())["settings"]
PAGE = (ROOT / "docs/benchmarks/clock.md").read_text()
CELLS = re.compile(
    r"^\| (.+?) \| (\d) (H[12]00) \| ([\d,.]+) \| ([\d,.]+) \| [-+][\d.]+% \| ([\d,.]+) \| [-+][\d.]+% \| (fitted|held out) \|$",
    re.M,
)


@pytest.fixture(scope="module")
def rows():
    return [
        (name, int(devices), gpu, *map(_number, cells), kind)
        for name, devices, gpu, *cells, kind in CELLS.findall(PAGE)
    ]


def _number(text):
    return float(text.replace(",", ""))


def test_each_row_has_the_measured_time_of_its_raw_file_and_what_was_foretold_first(rows):
    listed = {
        (name, devices, gpu.lower()): (measured, first, kind) for name, devices, gpu, measured, first, _, kind in rows
    }
    assert len(listed) == len(rows) > 20
    known = {(one["name"], one["devices"], one["target"]): one for one in SETTINGS}
    assert len(known) == len(SETTINGS) and set(listed) <= set(known)
    for key, (measured, first, kind) in listed.items():
        assert measured == pytest.approx(foretell.measured(known[key]) * 1e3, abs=0.051)
        assert first == known[key]["first_ms"]
        assert (kind == "fitted") == known[key]["fitted"]


def test_the_errors_that_the_plan_prints_are_those_of_the_rows_that_are_held_out(rows):
    own = rates.of("h200").errors
    errors = sorted(
        abs(foretold / measured - 1)
        for _, _, gpu, measured, _, foretold, kind in rows
        if (gpu, kind) == ("H200", "held out")
    )
    assert own["settings"] == len(errors)
    assert own["worst"] == pytest.approx(errors[-1], abs=0.001)
    assert errors[(len(errors) - 1) // 2] - 0.001 <= own["median"] <= errors[len(errors) // 2] + 0.001
