"""Checks train steps against plain optax. This module tests zerojax.trainer.steps."""

import jax
import numpy as np
import optax
import pytest
import runs

import zerojax
from zerojax.checkpoint import logical as logical_lib
from zerojax.models.llama import model as llama
from zerojax.ops import losses
from zerojax.optim import schedules
from zerojax.trainer import program
from zerojax.trainer import state as state_lib

SUM_ORDER = 1e-5  # relative: the same float32 sums in another order, over 30 steps
FEW_BITS = 1e-2  # relative, over 12 steps in which the loss halves: eight bits of weights or of moments

pytestmark = pytest.mark.usefixtures("cache_dir")


def build(**changes):
    return program.build(runs.config(**changes), tokenizer_vocab=320)


@pytest.fixture(scope="module")
def plain_losses(cache_dir):
    """Returns 30 losses of the same model, batches and optimizer in plain optax on one device."""
    built = build(steps=30)
    settings = built.config.optimizer
    model = llama.Llama(built.model)
    schedule = schedules.make(settings.schedule, settings.learning_rate, 2, 30, settings.final_fraction)
    tx = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(schedule, settings.b1, settings.b2, settings.eps, weight_decay=0.1, mask=zerojax.decayed),
    )
    params = jax.device_put(logical_lib.to_logical(state_lib.first(built)).params, jax.devices()[0])
    opt_state = tx.init(params)

    def loss_fn(params, tokens):
        return losses.cross_entropy(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    @jax.jit
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    found = []
    for tokens in batches(30):
        params, opt_state, loss = step(params, opt_state, tokens)
        found.append(float(loss))
    return found


def batches(steps: int):
    """Returns token batches that can be learnt: each token is followed by its double."""
    first = np.random.default_rng(0).integers(1, 320, size=(steps, 8, 1))
    return (first * 2 ** np.arange(9) % 320).astype(np.int32)


def trained(built):
    """Returns the state after 30 steps, and their losses."""
    state, found = state_lib.first(built), []
    for tokens in batches(30):
        state, numbers = built.train_step(state, {"tokens": jax.device_put(tokens, built.batch_sharding)})
        found.append(float(numbers["loss"]))
    return state, found


@runs.LONG
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"zero__stage": 1}, marks=runs.LONG),
        {"zero__stage": 3, "mesh__replica": 2, "mesh__data": 4},
    ],
    ids=["stage1", "stage3 2x4"],
)
def test_thirty_losses_are_those_of_plain_optax_on_one_device(plain_losses, changes):
    built = build(steps=30, **changes)
    _, found = trained(built)
    np.testing.assert_allclose(found, plain_losses, rtol=SUM_ORDER)
    assert found[-1] < found[0] - 1


@runs.LONG
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16_sr", "zero__stage": 3},
        pytest.param({"precision": "bf16_sr", "optimizer__moments": "bf16", "zero__stage": 1}, marks=runs.LONG),
        pytest.param({"precision": "bf16", "optimizer__moments": "int8", "zero__stage": 2}, marks=runs.LONG),
        pytest.param({"precision": "fp16", "zero__stage": 3}, marks=runs.LONG),  # as in test_fp16_runs
    ],
    ids=str,
)
def test_every_policy_learns_as_float32_does(plain_losses, changes):
    built = build(steps=30, **changes)
    state, found = trained(built)
    np.testing.assert_allclose(found[:12], plain_losses[:12], rtol=FEW_BITS)
    assert np.mean(found[-5:]) < np.mean(plain_losses[-5:]) + 0.2  # from 5.8; float16 may skip a step
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == built.partition.shardings
