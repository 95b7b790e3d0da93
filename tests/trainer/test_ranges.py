"""Checks that values which cannot be meant are refused. This module tests zerojax.trainer.ranges."""

import pytest
import runs

from zerojax import precision
from zerojax.data import objectives
from zerojax.errors import UserError
from zerojax.models import families
from zerojax.optim import registry, schedules
from zerojax.trainer import settings
from zerojax.zero import stages
from zerojax.zero.blocks import remat as remat_lib


def choices(place):
    return settings.table()[place].choices


def test_choices_are_those_of_the_modules_that_act_on_them():
    assert set(choices("optimizer.name")) == set(registry.OPTIMIZERS)
    assert set(choices("optimizer.schedule")) == {*schedules.SCHEDULES, *schedules.DEEPSPEED} > set(schedules.FALLING)
    assert tuple(choices("zero.stage")) == tuple(stages.STAGES)
    assert set(choices("precision")) == set(precision.PRECISIONS)
    assert set(choices("model.remat")) == set(remat_lib.REMAT)
    assert {kernel for family in families.FAMILIES for kernel in family.attention} < set(choices("model.attention"))
    assert {family.objective for family in families.FAMILIES} <= set(objectives.OBJECTIVES)
    assert all(family.blocks for family in families.FAMILIES)
    assert choices("zero.indivisible") == ("whole", "pad")
    assert choices("optimizer.moments") == ("fp32", "bf16", "int8")
    assert choices("loss_scale.on_minimum") == ("raise", "hold")
    assert choices("reduce_dtype") == ("fp32", "bf16")


REFUSED = {
    "a fraction above the peak": (
        {"optimizer__final_fraction": 1.5},
        r"final_fraction: must be at most 1, since a schedule falls",
    ),
    "half a step": (
        {"optimizer__warmup_steps": 2.5},
        r"warmup_steps: must be a whole number of steps, or a share of them below 1, and is 2.5",
    ),
    "an epsilon above every gradient": (
        {"optimizer__eps": 1e6},
        r"eps: must be at most 1, since gradients are far smaller",
    ),
    "a norm that float32 loses": (
        {"optimizer__clip_norm": 1e-20},
        r"clip_norm: must be at least 1e-06, since .*; 0 turns clipping off",
    ),
    "a norm below epsilon": (
        {"optimizer__clip_norm": 1e-4, "optimizer__eps": 1e-3},
        r"clip_norm: 0.0001 is not above config\.optimizer\.eps=0\.001",
    ),
    "a rate that changes no weight": (
        {"optimizer__learning_rate": 1e-20},
        r"learning_rate: must be at least 1e-12, since no float32 weight",
    ),
    "an average that never changes": (
        {"optimizer__b2": 1 - 1e-12},
        r"b2: must be at most 0\.9999999\d*, above which it is 1 in float32",
    ),
    "infinity in float32": (
        {"optimizer__weight_decay": 1e39},
        r"weight_decay: must be at most 3\.4e\+38, above which float32 has only",
    ),
    "zero in float32": (
        {"loss_scale__min_scale": 1e-40},
        r"min_scale: must be above 1\.2e-38, below which float32 has only 0",
    ),
    "a number of 33 bits": ({"seed": 2**32}, r"seed: must be below 2\*\*31, and is 4294967296;"),
    "layers without end": (
        {"model__num_layers": 10**6},
        r"num_layers: must be at most 512, since each layer is traced on its own",
    ),
    "a near name": (
        {"model__preset": "tinny"},
        r"preset: is 'tinny'; did you mean 'tiny'\? \(one of \d+ names such as test, .*; `zerojax train --help` lists them\)$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_cannot_be_meant_is_refused_with_the_rule(name):
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=rf"^config\.\w*\.?{message}"):
        runs.config(**changes)


def test_a_small_norm_is_allowed_where_the_optimizer_has_no_epsilon():
    assert (
        runs.config(optimizer__clip_norm=1e-4, optimizer__eps=1e-3, optimizer__name="lion").optimizer.clip_norm == 1e-4
    )
