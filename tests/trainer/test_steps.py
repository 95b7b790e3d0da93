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
from zerojax.trainer import program, steps
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


ANSWERS = {"data__task": "seq2seq", "data__pack": False, "data__train_file": "none", "data__answer_len": 8}
OBJECTIVES = {
    "next token": {},
    "span corruption": {"model__preset": "t5_test"},
    "answers of a decoder": ANSWERS,
    "answers of an encoder-decoder": {**ANSWERS, "model__preset": "bart_test"},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_the_mean_of_the_logarithms_of_its_labels(name):
    """In numpy, from all logits; for the other tasks see test_rewarded.py and test_preferences.py."""
    built = program.build(runs.config(**OBJECTIVES[name]), tokenizer_vocab=320, devices=jax.devices()[:1])
    params, batch = state_lib.first(built).params, runs.drawn_batch(built, 1)
    read = np.asarray(batch["targets" if "targets" in batch else "tokens"])
    objective = steps.objective(built.config, built.family, built.model)

    @jax.jit
    def both(params, batch):
        inputs = {key: batch[key] > 0 if key == "mask" else batch[key] for key in ("inputs", "mask") if key in batch}
        return objective(params, batch), built.family.logits(built.model, params, inputs, read[:, :-1])

    (loss, metrics), logits = both(params, batch)
    logs = np.asarray(logits, np.float64) - np.logaddexp.reduce(np.asarray(logits, np.float64), axis=-1, keepdims=True)
    own = -np.take_along_axis(logs, read[:, 1:, None], axis=-1)[..., 0]
    counts = np.asarray(batch["labeled"])[:, 1:] if "labeled" in batch else np.ones_like(own)
    value, weight = (loss.total, loss.weight) if "labeled" in batch else (loss * counts.size, counts.size)
    np.testing.assert_allclose(value, (own * counts).sum(), rtol=SUM_ORDER)
    assert float(weight) == counts.sum() == (float(metrics["labels"].total) if metrics else counts.size)


def test_a_step_moves_weights_by_the_rate_that_it_reports_also_after_a_resume():
    """Of plain SGD: what a weight moves by is the rate times its gradient. The rate of the first step of a warm-up is 0."""
    how = {"optimizer__name": "sgd", "optimizer__b1": 0.0, "optimizer__weight_decay": 0.0, "optimizer__clip_norm": 0.0}
    config = runs.config(**how, optimizer__schedule="linear", optimizer__warmup_steps=2, steps=6, zero__min_size=0)
    built = program.build(config, tokenizer_vocab=320, devices=jax.devices()[:1])
    state = state_lib.first(built)
    for number in range(4):
        if number == 2:  # as a checkpoint restores it
            state = jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), leaf.sharding), state)
        before = [np.array(leaf) for leaf in jax.tree.leaves(state.params)]
        state, metrics = built.train_step(state, runs.drawn_batch(built, number))
        rate = [0.0, 0.5, 1.0, 1 - 0.9 / 4][number] * config.optimizer.learning_rate
        assert float(metrics["learning_rate"]) == pytest.approx(rate, rel=SUM_ORDER)
        moved = np.sqrt(sum(np.sum(np.square(old - new)) for old, new in zip(before, jax.tree.leaves(state.params))))
        assert moved == pytest.approx(rate * float(metrics["grad_norm"]), rel=1e-4)
