"""Crosses adapters of other kinds than plain ones with how steps run, and compares with one device. This module tests DoRA, and adapters of
experts: of each, stacked as their matrices are, and of stacks."""

import functools
import math

import numpy as np
import pytest
import runs

ROUNDING = 1e-5  # relative: the same float32 sums, taken in another order
MIXTURE = {"model__preset": "moe_test", "model__num_layers": 2, "lora__r": 4}
WHAT = {
    "dora": {"model__num_layers": 2, "lora__r": 4, "lora__dora": True, "lora__target_modules": "all-linear"},
    "recurrent": {"model__preset": "hybrid_test", "model__num_layers": 2, "lora__r": 4, "lora__dora": True},
    "experts": {**MIXTURE, "lora__target_modules": "gate_proj,up_proj,down_proj"},
    "stacks": {
        **MIXTURE,
        "lora__target_modules": "q_proj",
        "lora__target_parameters": "gate_up_proj,down_proj,gate.weight",
    },
}
HOW = {
    "pipe": {"mesh__pipe": 2, "grad_accum": 2, "zero__stage": 1},
    "pipe, stage 3": {"mesh__pipe": 2, "mesh__data": 2, "grad_accum": 2},
    "optimizer on the host": {"mesh__data": 2, "offload__optimizer": "host"},
    "host": {"mesh__data": 2, "offload__optimizer": "host", "offload__params": "host"},
    "context": {"mesh__data": 2, "mesh__context": 2},
    "kinds": {"mesh__data": 2, "model__programs": "kinds"},
    "model": {"mesh__data": 2, "mesh__model": 2},
    "expert": {"mesh__data": 4, "mesh__expert": 2},
}
DEFAULT = [("stacks", "kinds")]
CASES = [(what, how) for what in WHAT for how in HOW if how != "expert" or "moe_test" in WHAT[what].values()]


@functools.cache
def alone(what):
    """Returns the losses, and the norms of gradients, of one device at stage 0."""
    return runs.trained(zero__stage=0, **WHAT[what])


@pytest.mark.parametrize(
    "what, how", [pytest.param(*case, marks=() if case in DEFAULT else runs.LONG) for case in CASES]
)
def test_adapters_train_as_on_one_device(what, how):
    sizes = [size for name, size in HOW[how].items() if name.startswith("mesh") and name != "mesh__expert"]
    found = runs.trained(math.prod(sizes), **WHAT[what], **{"mesh__data": 1, **HOW[how]})
    np.testing.assert_allclose(found, alone(what), rtol=ROUNDING)
