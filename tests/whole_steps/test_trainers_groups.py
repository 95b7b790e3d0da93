"""Compares four steps of AdamW with those of transformers' Trainer, by the files of tests/golden/trainer. This module tests what decays."""

import pathlib

import jax
import numpy as np
import pytest
import runs
import safetensors.numpy
from flax.training.train_state import TrainState

import zerojax
from zerojax import tree
from zerojax.interop import layout
from zerojax.optim import registry, schedules

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "trainer"
STEPS, RATE, HYPER = 4, 0.01, {"b1": 0.9, "b2": 0.999, "eps": 1e-4, "weight_decay": 0.3}
ROUNDING = 1e-5  # float32 sums in another order, and what AdamW makes of small gradients; a decayed bias is off by 1e-3


def trained(name, stage):
    """Returns the weights that our step makes of the same batches, by transformers' names."""
    loaded = zerojax.load_huggingface(FOLDER / name, stage=stage, min_size=64)
    tx = registry.make_optimizer("adamw", schedules.make("linear", RATE, 0, STEPS, 0.0), **HYPER)
    state, partition = zerojax.shard_train_state(
        lambda params: TrainState.create(apply_fn=None, params=params, tx=tx),
        loaded.params,
        mesh=zerojax.make_mesh(),
        stage=stage,
        min_size=64,
    )
    step = zerojax.make_train_step(
        lambda params, batch, _: loaded.loss(params, batch),
        partition,
        clip_norm=1.0,
        blocks=loaded.blocks,
        heads=loaded.heads,
    )
    with np.load(FOLDER / name / "batches.npz") as batches:
        for number in range(STEPS):
            state, _ = step(state, {key: batches[key][number] for key in batches})
    leaves = dict(tree.flatten(jax.device_get(state.params)))
    return {found.name: found.to_theirs(leaves[found.path]) for found in layout.tensors(loaded.family, loaded.config)}


@pytest.mark.parametrize("stage", runs.cases([0, 3], long=[0]))
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "bert", "gemma"])
def test_weights_after_four_steps_are_those_of_trainer(name, stage):
    """With biases, norms, embeddings, and heads that share these."""
    before, after = (safetensors.numpy.load_file(FOLDER / name / f"{file}.safetensors") for file in ("model", "after"))
    found = trained(name, stage)
    assert found.keys() == after.keys() and all((after[key] != before[key]).any() for key in after)
    for key, expected in after.items():
        np.testing.assert_allclose(found[key], expected, rtol=0, atol=ROUNDING, err_msg=key)
