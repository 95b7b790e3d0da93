"""Soaks two engines with few requests, of which one kills an engine. This module tests scripts/soak_serve.py."""

import json
import pathlib
import sys

import golden_models
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import soak_serve


@pytest.mark.skipif(sys.platform != "linux", reason="it reads memory and processes from /proc")
def test_no_request_is_lost_when_an_engine_is_killed(tmp_path):
    folder, out = str(golden_models.FOLDER / "llama"), tmp_path / "soak.json"
    assert soak_serve.main([folder, "--requests", "60", "--kills", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ends = found["soak"]["ends"]
    assert sum(ends.values()) == 60 and {*ends} <= {"answered", "cancelled", "refused", soak_serve.ENDED}
    assert min(ends["answered"], ends["cancelled"], ends["refused"]) > 0 and found["restarts"] == 1


def test_memory_grows_by_the_slope_of_the_second_half():
    assert soak_serve.growth([9, 1, 5, 7, *range(100, 140, 10)]) == pytest.approx((10, 0))
    assert soak_serve.growth([0] * 4 + [0, 3, 0, 3]) == pytest.approx((0.6, 0.72**0.5))  # 7.2 are left / 2 / 5
    assert soak_serve.growth([1]) == (0, 0)
