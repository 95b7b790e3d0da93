"""Checks the presets against published sizes, and runs of the family. This module tests zerojax.models.t5.family."""

import json

import numpy as np
import pytest
import runs
import safetensors.numpy

from zerojax.models import family
from zerojax.models.t5 import family as t5
from zerojax.models.t5 import model
from zerojax.trainer import plans, program

# The models google/t5-v1_1-* at Hugging Face.
PUBLISHED = {
    "t5_v1_1_small": 76_961_152,
    "t5_v1_1_base": 247_577_856,
    "t5_v1_1_large": 783_150_080,
    "t5_v1_1_xl": 2_849_757_184,
    "t5_v1_1_xxl": 11_135_332_352,
}
SUM_ORDER = 1e-5  # relative: the same float32 sums in another order, over 6 steps
TEST = {"model__preset": "t5_test", "data__name": "python_stdlib"}

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.mark.parametrize("name", PUBLISHED)
def test_big_presets_have_their_published_number_of_weights(name):
    assert family.count_params(model.parts, t5.PRESETS[name]) == PUBLISHED[name]


@pytest.fixture(scope="module")
def unsharded(cache_dir, stdlib_dir, tmp_path_factory):
    """Returns the folder of six steps at stage 0 on one device."""
    return runs.run(tmp_path_factory.mktemp("stage0"), devices=1, zero__stage=0, **TEST, data__dir=str(stdlib_dir))


@runs.LONG
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_gives_the_losses_of_stage_0(tmp_path, stdlib_dir, unsharded, stage):
    found = runs.run(tmp_path, zero__stage=stage, **TEST, data__dir=str(stdlib_dir))
    np.testing.assert_allclose(runs.numbers(found), runs.numbers(unsharded), rtol=SUM_ORDER)


@runs.LONG  # tests/trainer/test_resume.py resumes, and tests/interop and tests/whole_steps train, export and generate with T5
def test_a_resumed_run_at_stage_3_gives_the_losses_of_stage_0(tmp_path, stdlib_dir, unsharded, capsys):
    """And it evaluates, samples and exports."""
    settings = {**TEST, "data__dir": str(stdlib_dir), "zero__stage": 3}
    runs.run(tmp_path, **settings, steps=3)
    finish = {"sample__length": 4, "sample__prompt": "def ___(self):", "export__format": "huggingface"}
    runs.run(tmp_path, **settings, **finish, **runs.EVALUATED)
    np.testing.assert_allclose(runs.numbers(tmp_path), runs.numbers(unsharded), rtol=SUM_ORDER)
    losses = runs.losses(tmp_path)
    assert losses[6] < losses[1]
    assert runs.evaluations(tmp_path)[-1][0] == 6
    assert "a sample, from 'def ___(self):':\ndef " in capsys.readouterr().out
    exported = safetensors.numpy.load_file(tmp_path / "export" / "model.safetensors")
    assert exported["decoder.block.0.layer.1.EncDecAttention.q.weight"].shape == (64, 64)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["model_type"] == "t5" and config["feed_forward_proj"] == "gated-gelu"


@pytest.mark.parametrize("stage", runs.cases([2, 3], long=[2, 3]))
def test_the_plan_has_no_finding_but_that_of_xla_on_cpus(stage):
    """XLA on CPUs drops the barriers that make the backward pass gather again, in every model's step at stage 3."""
    rules = {2: set(), 3: {"gathered weights are kept for the backward pass"}}[stage]
    built = program.build(runs.config(**TEST, model__remat="dots", zero__stage=stage), tokenizer_vocab=320)
    assert {finding.rule for finding in plans.plan_program(built, "here").findings} <= rules
