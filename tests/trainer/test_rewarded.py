"""Checks GRPO's loss against its equation on one device. This module tests zerojax.trainer.rewarded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ratios_by_numpy
import runs

from zerojax.trainer import program, rewarded
from zerojax.trainer import state as state_lib
from zerojax.zero.update import padding

ROUNDING = 2e-5  # the same float32 sums in another order
KL = 0.5
TASK = {"data__task": "grpo", "data__answer_len": 8, "seq_len": 24, "global_batch_size": 16, "data__train_file": "none"}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "zero__stage": 3,
            "grad_accum": 2,
            "lora__r": 4,
            "grpo__inner_steps": 2,
            "grpo__kl": KL,
            "checkpoint__every": 0,
        },
        {"zero__stage": 2, "grad_accum": 2, "grpo__variant": "dapo", "grpo__inner_steps": 2, "checkpoint__every": 0},
        pytest.param({"zero__stage": 1, "mesh__model": 2}, marks=runs.LONG),
        pytest.param({"zero__stage": 2, "model__preset": "bart_test", "grpo__inner_steps": 2}, marks=runs.LONG),
    ],
    ids=["stage 3, LoRA, two passes", "stage 2, DAPO, two passes", "stage 1, tensor parallel", "stage 2, BART"],
)
def test_the_loss_is_the_equations_mean_over_all_answers(cache_dir, changes):
    built = program.build(runs.config(**TASK, **changes), tokenizer_vocab=320)
    state, random = state_lib.first(built), np.random.default_rng(0)
    params = jax.tree.map(jnp.asarray, jax.device_get(padding.unpad(state, built.partition).params))
    shapes = {name: (16, length) for name, length in built.lengths.items()}
    floats = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    batch = {name: random.integers(3, 300, shape).astype(np.int32) for name, shape in shapes.items()}
    batch["labeled"] = (random.random(shapes["labeled"]) < 0.7).astype(np.int32)
    is_pair = "targets" in batch
    if is_pair:
        batch["mask"] = np.ones_like(batch["mask"])
    read = batch["targets" if is_pair else "tokens"]
    inputs = {"inputs": batch["inputs"]} if is_pair else {}
    logits = jax.jit(lambda *arrays: built.family.logits(built.model, *arrays))
    logs = jax.nn.log_softmax(logits(params, inputs, read[:, :-1]))
    own = np.take_along_axis(np.asarray(logs, np.float64), read[:, 1:, None], axis=-1)[..., 0]
    counts = batch["labeled"][:, 1:]
    for name in (rewarded.OLD, rewarded.REFERENCE):
        if name in floats:
            floats[name] = (own + 0.3 * floats[name]).astype(np.float32)
    batch |= {name: array.view(np.int32) for name, array in floats.items() if name in rewarded.OF_ANSWER}
    gain = floats.get(rewarded.REFERENCE, own) - own
    drift, chosen = KL * (np.exp(gain) - gain - 1), built.config.grpo
    bounds = chosen.clip, chosen.clip_high
    of_answers = own, floats.get(rewarded.OLD, own), floats[rewarded.ADVANTAGE][:, 0], counts
    wanted = ratios_by_numpy.loss(chosen.variant, *of_answers, TASK["data__answer_len"], *bounds, drift)
    like = built.abstract_batch
    placed = {name: jax.device_put(a.reshape(like[name].shape), like[name].sharding) for name, a in batch.items()}
    _, metrics = built.train_step(state, placed)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=ROUNDING, atol=ROUNDING)
    np.testing.assert_allclose(metrics["reward"], floats[rewarded.REWARD].mean(), rtol=ROUNDING, atol=ROUNDING)
