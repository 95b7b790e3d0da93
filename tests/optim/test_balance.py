"""Tests biases that follow the load of experts beside an optimizer, alone and in runs of a mixture on any mesh."""

import functools

import arrays
import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

import zerojax
from zerojax.errors import UserError
from zerojax.ops import experts
from zerojax.optim import balance, fused, one_pass
from zerojax.trainer import program
from zerojax.trainer import state as state_lib

RATE = 0.01
PARAMS = {"mlp": {"choice_bias": jnp.asarray([0.5, -0.25, 0.0, 1.0]), "kernel": jnp.ones((8, 4))}}
GRADS = {"mlp": {"choice_bias": experts.COUNT * jnp.asarray([9.0, 3.0, 6.0, 6.0]), "kernel": jnp.full((8, 4), 0.5)}}
MOVED = [0.5 - RATE, -0.25 + RATE, 0.0, 1.0]
OPTIMIZERS = {
    "optax": lambda: optax.adamw(0.1),
    "one pass": lambda: fused.fused_adamw(0.1, moments="int8"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("has_masters", [False, True])
def test_a_bias_moves_by_the_rate_and_all_else_as_without(name, has_masters):
    def stepped(tx, params):
        tx = zerojax.with_master_weights(tx) if has_masters else tx
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params) if has_masters else params
        state = tx.init(params)
        if isinstance(tx, one_pass.OnePass):
            kept = tx.apply(GRADS, state, params, scale=1.0, finite=jnp.asarray(False), shardings=None)[0]
            np.testing.assert_array_equal(kept["mlp"]["choice_bias"], params["mlp"]["choice_bias"])
            return tx.apply(GRADS, state, params, scale=0.5, finite=jnp.asarray(True), shardings=None)[:2]
        updates, state = tx.update(GRADS, state, params)
        return optax.apply_updates(params, updates), state

    (params, state), (plain, _) = (
        stepped(wrapped(OPTIMIZERS[name]()), PARAMS)
        for wrapped in (lambda tx: balance.with_balance(tx, RATE), lambda tx: tx)
    )
    moved = state.master["mlp"]["choice_bias"] if has_masters else params["mlp"]["choice_bias"]
    np.testing.assert_allclose(moved, MOVED, rtol=1e-6)
    np.testing.assert_array_equal(params["mlp"]["kernel"], plain["mlp"]["kernel"])


def test_the_gradient_of_a_bias_that_counts_is_the_load_and_that_of_all_else_is_as_without():
    logits, bias = arrays.normal(0, (32, 8)), arrays.normal(1, (8,))

    def loss(logits, bias, counts):
        routing = experts.route(logits, 2, score="sigmoid", bias_E=bias, counts=counts)
        return 1e-3 * jnp.sum(routing.weights_TK**2), routing.experts_TK

    (grad, load), chosen = jax.grad(loss, (0, 1), has_aux=True)(logits, bias, True)
    (plain, nothing), _ = jax.grad(loss, (0, 1), has_aux=True)(logits, bias, False)
    np.testing.assert_array_equal(load / experts.COUNT, np.bincount(chosen.reshape(-1), minlength=8))
    np.testing.assert_array_equal(grad, plain)
    assert not nothing.any()


DEEPSEEK = {"init_from": str(golden_models.FOLDER / "deepseekv3"), "optimizer__router_bias_rate": RATE}
DEEPSEEK |= {"model__num_layers": 0}
MESHES = {
    "data": {"devices": 8, "zero__stage": 3},
    "expert": {"devices": 4, "mesh__expert": 4, "zero__stage": 2, "grad_accum": 2},
    "all axes": {
        "devices": 8,
        "mesh__data": 2,
        "mesh__context": 2,
        "mesh__model": 2,
        "mesh__expert": 4,
        "zero__stage": 3,
    },
    "16 bits": {"devices": 4, "mesh__expert": 2, "zero__stage": 1, "precision": "bf16"},
}


@functools.cache
def biases(name=""):
    """Returns the losses and norms of two steps of a run, and the bias before and after each."""
    settings = dict(MESHES.get(name, {"devices": 1, "zero__stage": 0}))
    devices = jax.devices()[: settings.pop("devices")]
    built = program.build(runs.config(**DEEPSEEK, zero__min_size=0, **settings), tokenizer_vocab=320, devices=devices)
    state, found = state_lib.first(built), []
    of = lambda state: np.asarray(state.params["layer_1"]["mlp"]["experts"]["choice_bias"], np.float32)  # noqa: E731
    moved = [of(state)]
    for number in range(2):
        state, metrics = built.train_step(state, runs.drawn_batch(built, number))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        moved.append(of(state))
    return np.asarray(found), np.asarray(moved)


@pytest.mark.parametrize("name", runs.cases(MESHES, long=MESHES))
def test_biases_move_alike_on_any_mesh_and_with_accumulation(name):
    (losses, moved), (expected, known) = biases(name), biases()
    steps = np.diff(known, axis=0)
    assert np.isclose(np.abs(steps), RATE, atol=1e-6).any(axis=1).all()
    assert (np.isclose(np.abs(steps), RATE, atol=1e-6) | (steps == 0)).all()
    if name == "16 bits":  # a count within 0.4% of the mean may be rounded
        assert np.mean(np.abs(moved - known) < RATE / 2) > 0.8
        return
    np.testing.assert_allclose(moved, known, atol=1e-7)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


REFUSED = {
    "optimizer.router_bias_rate": {"init_from": "", "model__preset": "moe_test", "model__num_layers": 1},
    "lora.r": {"lora__r": 2},
    "mesh.pipe": {"mesh__pipe": 2},
    "offload.optimizer": {"offload__optimizer": "host"},
    "zero.indivisible": {"zero__indivisible": "pad"},
    "precision": {"precision": "bf16_sr"},
    "reduce_dtype": {"reduce_dtype": "bf16"},
}


@pytest.mark.parametrize("place", REFUSED)
def test_what_counts_no_rows_is_refused_in_one_line(place):
    settings = runs.config(**{**DEEPSEEK, **REFUSED[place]})
    with pytest.raises(UserError, match=rf"^config.{place}: is .*, and .*; set"):
        program.build(settings, tokenizer_vocab=320, devices=jax.devices())
