"""Moves runs of a mixture between meshes that hold its experts on other numbers of devices, by stops and by kills."""

import os
import random
import signal
import time

import jax
import numpy as np
import pytest
import runs

from zerojax.checkpoint import checkpointer, logical
from zerojax.zero.host import storage

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cache_dir")]

SUM_ORDER = 2e-4  # float32 sums in another order, after Adam's first steps
KILLS = int(os.environ.get("ZEROJAX_TEST_EXPERT_KILLS", 50))
MIXTURE = {"model__preset": "moe_test", "zero__min_size": 0, "checkpoint__every": 1, "optimizer__warmup_steps": 0}
# The devices of a mesh, its axes, and a stage.
MESHES = (
    {"devices": 4, "mesh__expert": 4, "zero__stage": 3},
    {"devices": 2, "mesh__expert": 2, "zero__stage": 1},
    {"devices": 1, "zero__stage": 0},
    {"devices": 8, "mesh__data": 4, "mesh__context": 2, "mesh__expert": 4, "experts__parts": 2, "zero__stage": 2},
    {"devices": 8, "zero__stage": 3},
    {"devices": 8, "mesh__data": 4, "mesh__model": 2, "mesh__expert": 2, "zero__stage": 3},
)
HOST = {"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host", "offload__chunk_bytes": 8192}
DISK = {**HOST, "offload__optimizer": "nvme", "offload__params": "nvme"}
# Where experts and their optimizer state are, in turn.
PLACES = (
    {"mesh__data": 8, **HOST},
    {"mesh__data": 8, "mesh__expert": 4, **DISK},
    {"mesh__data": 4, "mesh__model": 2, "mesh__expert": 2, **HOST, "offload__params": "none"},
    {"mesh__data": 4, "mesh__context": 2, "mesh__expert": 4, **HOST},
    {"mesh__data": 8, "mesh__expert": 2, "zero__stage": 1},
    {"mesh__data": 4, "mesh__model": 2, "mesh__expert": 2, **DISK},
    {"mesh__data": 8, "mesh__expert": 4, **HOST},
)


@pytest.mark.parametrize("places", [MESHES, PLACES], ids=["on the device", "offloaded"])
def test_a_checkpoint_resumes_on_any_number_of_devices_of_experts_wherever_they_are(places, tmp_path):
    moved = tmp_path / "moved"
    for number, place in enumerate(places):
        runs.run(moved, steps=number + 1, **MIXTURE, **place)
    whole = runs.run(tmp_path / "whole", steps=len(places), **MIXTURE, **MESHES[2])
    np.testing.assert_allclose(runs.numbers(moved), runs.numbers(whole), rtol=SUM_ORDER)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_experts_keep_their_bits_through_checkpoints_of_all_places(precision, tmp_path):
    how = {**MIXTURE, "precision": precision}
    folder = runs.run(tmp_path / "run", steps=1, **how, **PLACES[0])
    with runs.on_devices(1):
        wanted = bits(runs.restored(folder, 1, **how, zero__stage=0)[1])
    for step, place in enumerate((*PLACES, *PLACES[:2]), 1):
        is_on_disk = place.get("offload__optimizer") == "nvme"
        disk = {"offload__nvme_path": str(tmp_path / "disk")} if is_on_disk else {}
        _, state = runs.restored(folder, step, **how, **place, **disk)
        found = bits(state)
        assert found.keys() == wanted.keys()
        for path, leaf in found.items():
            assert leaf.dtype == wanted[path].dtype and leaf.tobytes() == wanted[path].tobytes(), (place, path)
        assert any(map(storage.is_on_disk, jax.tree.leaves(state))) == is_on_disk
        with checkpointer.Checkpointer(folder / "checkpoints") as saver:
            saver.save(step + 1, logical.to_logical(state), saver.data_state(step), meta=saver.meta(step))


def bits(state):
    """Returns the arrays of a state's checkpoint, by path."""
    return {path: np.asarray(leaf) for path, leaf in logical.to_stored(logical.to_logical(state)).items()}


def steps(folder):
    found = folder / "metrics.jsonl"
    return len(runs.numbers(folder)) if found.exists() else 0


def test_runs_that_are_killed_resume_on_other_numbers_of_devices_and_none_hangs(commands, tmp_path):
    draw, killed, last = random.Random(0), tmp_path / "killed", 2 * KILLS

    def start(number):
        mesh = dict(MESHES[number % len(MESHES)])
        count = mesh.pop("devices")
        settings = {**MIXTURE, "steps": last, "emulate_devices": count, **mesh}
        return commands.start(*runs.flags(**settings), f"--workdir={killed}")

    for number in range(KILLS):
        before, command, end = steps(killed), start(number), time.monotonic() + runs.LIMIT
        while steps(killed) <= before:  # a step at least, so that the run ends
            assert time.monotonic() < end, command.err
            time.sleep(0.05)
        time.sleep(draw.random() * 0.2)
        command.kill(signal.SIGKILL)
        command.wait()
    end = start(2).wait()
    assert end.status == 0, end.err
    whole = runs.run(tmp_path / "whole", steps=last, **MIXTURE, **MESHES[2])
    assert [line[0] for line in runs.numbers(killed)] == list(range(1, last + 1))
    np.testing.assert_allclose(
        list(runs.losses(killed).values()), list(runs.losses(whole).values()), rtol=10 * SUM_ORDER
    )
