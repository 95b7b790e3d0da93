"""Checks which transformations keep a one-pass form. This module tests zerojax.optim.one_pass."""

import optax
import pytest

import zerojax
from zerojax.optim import one_pass, registry

HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("make", [zerojax.fused_adamw, zerojax.fused_lion])
def test_fused_optimizers_have_a_one_pass_form_and_keep_it_with_master_weights(make):
    for tx in (make(1e-3), zerojax.with_master_weights(make(1e-3))):
        assert isinstance(tx, one_pass.OnePass) and callable(tx.apply)
        assert isinstance(tx, optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_optimizers_by_name_have_it_where_something_is_rounded(moments):
    tx = registry.make_optimizer("adam", 1e-3, **HYPER, moments=moments)
    assert isinstance(tx, one_pass.OnePass) == (moments != "fp32")
    assert not isinstance(zerojax.with_master_weights(optax.adam(1e-3)), one_pass.OnePass)
