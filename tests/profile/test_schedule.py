"""Checks what a trace tells of a pipeline's schedule. This module tests zerojax.profile.schedule."""

import itertools
import json

import jax
import pytest
import runs

from zerojax.profile import profiler, schedule, traces

# group, pass, start and end in milliseconds: 1f1b of two groups and two micro-batches
RUNS = [
    ("0", "jit_stage_0_forward", 1, 2),
    ("0", "jit_stage_0_forward", 2, 3),
    ("1", "jit_stage_1_forward", 2, 3),
    ("1", "jit_stage_1_backward", 3, 5),
    ("0", "jit_stage_0_backward", 5, 7),
    ("1", "jit_stage_1_forward", 5, 6),
    ("1", "jit_stage_1_backward", 6, 8),
    ("0", "jit_stage_0_backward", 8, 10),
    ("0", "jit_apply", 10, 12),
]


def kernels():
    """Returns kernels that take all but a microsecond of their pass."""
    for device, module, start, end in RUNS:
        times = [start + n * (end - start) / 4 for n in range(5)]
        for begin, until in itertools.pairwise(times):
            yield traces.Kernel(device, "fusion", "fusion.1", module, begin * 1e6, until * 1e6 - 1000)


def test_kernels_that_follow_one_another_are_one_bar_and_waits_are_the_bubble(tmp_path):
    ran = schedule.passes(kernels())
    found = {key: [tuple(round(x, 2) for x in one) for one in intervals] for key, intervals in ran.items()}
    assert found == {
        ("0", "forward"): [(0, 2)],
        ("1", "forward"): [(1, 2), (4, 5)],
        ("1", "backward"): [(2, 4), (5, 7)],
        ("0", "backward"): [(4, 6), (7, 9)],
    }
    assert schedule.waits(ran) == pytest.approx(1 / 3, abs=1e-3), "(groups - 1) / (micro-batches + groups - 1)"
    schedule.draw(ran, tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 5_000


def test_a_trace_of_no_pipeline_has_none():
    assert schedule.passes([traces.Kernel("0", "dot", "dot.1", "jit_train_step", 0, 1)]) == {}
    assert schedule.waits({}) == 0


@pytest.mark.long
def test_a_run_over_a_pipeline_names_its_kernels_and_draws_its_passes(cache_dir, tmp_path):
    settings = {"mesh__pipe": 2, "mesh__data": 2, "model__num_layers": 2, "grad_accum": 2}
    runs.run(tmp_path, devices=4, **settings, profile__start=3, profile__steps=1, steps=4, checkpoint__every=0)
    saved = json.loads((tmp_path / profiler.FILE).read_text())
    assert saved["named_share"] > 0.9 and saved["phases"]["matmuls"]["kernels"] > 0
    assert saved["phases"]["optimizer"]["kernels"] > 0
    assert (tmp_path / profiler.FOLDER / schedule.FILE).stat().st_size > 5_000
    ran = schedule.passes(traces.read(traces.newest(tmp_path / profiler.FOLDER)))
    devices = {f"cpu:{number}" for number in range(len(jax.devices()[:4]))}
    assert set(ran) == {(device, kind) for device in devices for kind in ("forward", "backward")}
