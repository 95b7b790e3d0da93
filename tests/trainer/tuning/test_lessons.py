"""Checks that students on several devices learn as on one, and resume. This module tests zerojax.trainer.tuning.lessons."""

import shutil

import asking
import numpy as np
import pytest
import runs

from zerojax.interop import folder as folder_lib
from zerojax.trainer import state as state_lib


def two_steps(texts_file, teacher_folder, devices, **changes):
    """Returns the loss and the gradients' norm of two steps, the second of which has updated weights."""
    built, made = asking.taught(texts_file, teacher_folder, devices, **changes)
    state, found = state_lib.first(built), []
    for step in (1, 2):
        state, metrics = built.train_step(state, made.next(step, state.params))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "zero__min_size": 0, "mesh__model": 2},
        {"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"},
        pytest.param({"zero__stage": 2, "grad_accum": 2, "offload__optimizer": "host"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__programs": "kinds"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "wire__weights": "int8"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__tile_tokens": 8, "zero__indivisible": "pad"}, marks=runs.LONG),
        pytest.param({"zero__stage": 1, "lora__r": 4, "lora__quantize": "nf4"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "moe_test", "mesh__expert": 2}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "lfm2_test", "distill__own": 1.0}, marks=runs.LONG),
        pytest.param({"model__preset": "moe_test", "mesh__expert": 2, "distill__own": 1.0}, marks=runs.LONG),
        pytest.param(
            {"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host", "distill__own": 1.0},
            marks=runs.LONG,
        ),
        pytest.param({"zero__stage": 3, "model__preset": "mamba2_test", "distill__own": 1.0}, marks=runs.LONG),
    ],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_steps_are_those_of_one_device_at_stage_0(texts_file, teacher_folder, cache_dir, changes):
    of_mesh = ("zero", "mesh", "offload", "grad", "wire")
    plain = {name: value for name, value in changes.items() if not name.startswith(of_mesh)}
    plain.pop("model__programs", None)
    wanted = two_steps(texts_file, teacher_folder, 1, zero__stage=0, **plain)
    found = two_steps(texts_file, teacher_folder, 4, **changes)
    rounds = "wire__weights" in changes  # weights in 8 bits
    np.testing.assert_allclose(found, wanted, rtol=0.05 if rounds else 1e-4)
    assert wanted[1, 0] < wanted[0, 0] or "distill__own" in changes


def test_a_run_learns_from_its_own_answers_resumes_alike_and_exports_the_student(
    texts_file, teacher_folder, cache_dir, tmp_path
):
    """Its teacher is the folder of a run. Half of its steps learn from own answers."""
    task = {**asking.LEARNED, "data__train_file": texts_file, "data__eval_file": texts_file, "evaluate__answers": 2}
    other = runs.run(tmp_path / "other", devices=2, steps=2, model__num_layers=2, **task)
    task |= {
        "distill__teacher": str(other),
        "distill__own": 0.5,
        "export__format": "huggingface",
        "checkpoint__every": 2,
    }
    whole = runs.run(tmp_path / "whole", devices=2, steps=4, **task)
    parts = runs.run(tmp_path / "parts", devices=2, steps=2, **task)
    shutil.rmtree(parts / "export")
    runs.run(parts, devices=2, steps=4, **task)
    names = ("loss", "own", "teacher_loss", "student_loss")
    assert runs.numbers(parts, names=names) == runs.numbers(whole, names=names)
    assert {line[2] for line in runs.numbers(whole, names=names)} == {0.0, 1.0}
    (step, loss), *_ = runs.evaluations(whole)
    assert step == 4 and loss > 0
    exported = [folder_lib.open_folder(folder / "export") for folder in (whole, parts)]
    assert [len(folder.entries) for folder in exported] == [12, 12]  # of one layer, without the teacher's head
    assert folder_lib.fingerprint(exported[0]) == folder_lib.fingerprint(exported[1])
