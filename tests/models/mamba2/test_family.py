"""Checks presets, configs and runs. This module tests zerojax.models.mamba2.family."""

import dataclasses
import math

import pytest
import runs

from zerojax.errors import UserError
from zerojax.models import family as family_lib
from zerojax.models import scan_mixer
from zerojax.models.mamba2 import family, model

# Counted by hand from the shapes of the published weights.
PUBLISHED = {"mamba2_130m": 128_989_632}
STEP = {"model__preset": "mamba2_test", "model__num_layers": 2, "seq_len": 16}


def test_a_preset_has_its_published_number_of_weights():
    assert {name: family_lib.count_params(model.parts, family.PRESETS[name]) for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("steps", [(0.0, math.inf), (0.001, 0.1)])
def test_the_written_config_is_read_back(steps):
    config = dataclasses.replace(
        family.PRESETS["mamba2_370m"], scan=scan_mixer.Scan(32, 64, 128, 2, 3, steps, has_bias=True)
    )
    table = family.FAMILY.huggingface
    assert table.read(table.write(config), ()) == config
    named = [0.0, {"__float__": "Infinity"}]  # of transformers 5
    assert table.read(table.write(config) | {"time_step_limit": named}, ()).scan.steps == (0.0, math.inf)


@pytest.mark.parametrize("field, value", [
    ("expand", 3), ("n_groups", 5), ("time_step_limit", [0.1]), ("time_step_limit", [0.2, 0.1]), ("time_step_limit", "no"),
    ("hidden_act", "gulu"), ("conv_kernel", 0), ("use_bias", "yes"),
])  # fmt: skip
def test_a_config_that_is_not_computed_is_refused_in_one_line(field, value):
    written = family.FAMILY.huggingface.write(family.PRESETS["mamba2_130m"]) | {field: value}
    with pytest.raises(UserError, match=rf"^config.json: {field}: must be .*choose a folder") as caught:
        family.FAMILY.huggingface.read(written, ())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changed", [
    {"zero__stage": 3},
    pytest.param({"zero__stage": 2, "grad_accum": 2}, marks=runs.LONG),
    pytest.param({"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"}, marks=runs.LONG),
    pytest.param({"zero__stage": 1, "mesh__pipe": 2, "grad_accum": 2}, marks=runs.LONG),
    pytest.param({"zero__stage": 3, "model__remat": "full", "reduce_dtype": "fp32"}, marks=runs.LONG),
    {"zero__stage": 3, "mesh__model": 2},
    pytest.param({"zero__stage": 1, "mesh__model": 4}, marks=runs.LONG),
])  # fmt: skip
def test_losses_and_norms_of_gradients_are_those_of_stage_0(changed):
    plain = runs.trained(**STEP, zero__stage=0)
    for found, wanted in zip(runs.trained(devices=4, **STEP | changed), plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
