"""Checks the forms of MLPs. This module tests zerojax.models.llama.mlp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models.llama import family as presets
from zerojax.models.llama import mlp

ROUNDING = 1e-6  # float32 sums in another order
CONFIG = presets.PRESETS["test"]
X_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, CONFIG.embed_dim)), jnp.float32)


def drawn(module):
    return module.init(jax.random.key(0), X_BTD)["params"]


def test_a_fused_projection_is_gate_and_up():
    fused = mlp.MLP(CONFIG.changed(mlp={"is_fused": True}))
    params = drawn(fused)
    gate, up = (params["gate_up"]["kernel"][:, number] for number in (0, 1))
    apart = {"gate": {"kernel": gate}, "up": {"kernel": up}, "down": params["down"]}
    expected = mlp.MLP(CONFIG).apply({"params": apart}, X_BTD)
    np.testing.assert_allclose(fused.apply({"params": params}, X_BTD), expected, atol=ROUNDING)


def test_without_a_gate_it_is_down_of_the_activation_of_up():
    plain = mlp.MLP(CONFIG.changed(mlp={"is_gated": False, "activation": "relu"}))
    params = drawn(plain)
    expected = np.maximum(X_BTD @ params["up"]["kernel"], 0) @ params["down"]["kernel"]
    np.testing.assert_allclose(plain.apply({"params": params}, X_BTD), expected, atol=ROUNDING)


def test_all_tokens_take_the_shared_expert_by_its_weight_or_in_full():
    shape = presets.PRESETS["moe_test"]
    params = drawn(mlp.Mixture(shape))
    without = {"experts": params["experts"]}
    routed = mlp.Mixture(shape.changed(mixture={"shared_dim": 0})).apply({"params": without}, X_BTD)
    shared = mlp.MLP(dataclasses.replace(shape, mlp_dim=shape.mixture.shared_dim))
    own = shared.apply({"params": params["shared"]}, X_BTD)
    weight = 1 / (1 + np.exp(-(X_BTD @ params["shared_gate"]["kernel"])))
    gated = mlp.Mixture(shape).apply({"params": params}, X_BTD)
    np.testing.assert_allclose(gated, routed + weight * own, atol=ROUNDING)
    full = mlp.Mixture(shape.changed(mixture={"is_shared_gated": False}))
    in_full = full.apply({"params": without | {"shared": params["shared"]}}, X_BTD)
    np.testing.assert_allclose(in_full, routed + own, atol=ROUNDING)
