"""Trains with a program for each kind of layer beside one program for the step: every axis, precision, task and family that it goes with.

This module tests `model.programs`; what it refuses is in tests/zero/offload/test_step_by_block.py.
"""

import jax
import numpy as np
import pytest
import runs

from zerojax import mesh as mesh_lib
from zerojax.trainer import program
from zerojax.trainer import state as state_lib
from zerojax.zero.step_programs import forward

SAME, BF16 = 1e-6, 2.0**-8  # relative
SETTINGS = {
    "context and experts": {"mesh__context": 2, "mesh__expert": 2, "model__preset": "moe_test"},
    "a ring, in tiles": {"mesh__model": 2, "model__ring": True, "model__tile_tokens": 8},
    "replicas, fp16, several passes": {
        "mesh__replica": 2,
        "zero__stage": 2,
        "precision": "fp16",
        "grad_accum": 2,
        "global_batch_size": 16,
    },
    "experts": {"mesh__expert": 2, "model__preset": "moe_test"},
    "adapters with dropout": {"lora__r": 4, "lora__dropout": 0.1},
    "fp8 by rows": {"precision": "fp8", "fp8__recipe": "rowwise"},
    "sums in bf16": {"grad_accum": 2, "global_batch_size": 16, "accum_dtype": "bf16"},
    "an encoder and a decoder": {"model__preset": "t5_test"},
    "muon": {"optimizer__name": "muon"},
}


@pytest.mark.parametrize("name", runs.cases(SETTINGS, long=[*SETTINGS][1:]))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_losses_and_the_norms_are_those_of_one_program(name):
    one, kinds = (runs.trained(8, model__programs=programs, **SETTINGS[name]) for programs in ("one", "kinds"))
    assert np.ptp([loss for loss, _ in one]) > 0
    is_drawn = (
        "accum_dtype" in SETTINGS[name]
    )  # each sum is rounded up or down at random, by other numbers in either form
    np.testing.assert_allclose(kinds, one, rtol=BF16 if is_drawn else SAME)


@pytest.mark.parametrize("name", runs.cases(SETTINGS, long=[*SETTINGS][1:]))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loss_of_an_evaluation_is_that_of_one_program(name):
    found = []
    for programs in ("one", "kinds"):
        config = runs.config(zero__min_size=0, model__programs=programs, **SETTINGS[name])
        built = program.build(config, tokenizer_vocab=320, devices=jax.devices()[:8])
        assert isinstance(built.forward.loss, forward.Forward) == (programs == "kinds")
        params, batch = built.forward.params(state_lib.first(built).params), runs.drawn_batch(built, 0)
        if built.sizes.grad_accum > 1:
            sharding = mesh_lib.batch_sharding(built.mesh, has_tokens=True)
            batch = {name: jax.device_put(np.asarray(rows)[0], sharding) for name, rows in batch.items()}
        found.append(float(built.forward.loss(params, batch)))
    np.testing.assert_allclose(found[1], found[0], rtol=SAME)
