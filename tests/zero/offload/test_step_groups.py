"""Checks when the groups of a step are updated. This module tests zerojax.zero.offload.step_groups."""

import jax
import numpy as np
import optax
import pytest
from block_nets import Net, X
from flax.training.train_state import TrainState

import zerojax
from zerojax.zero.offload import step_groups

NET = Net(2)
SCALE = np.ones((len(X), 1), np.float32)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_blocks_weights_are_updated_as_soon_as_the_factor_of_its_gradients_is_known(clip, monkeypatch):
    sent, held, update = [], [], step_groups.StepGroups.update

    def noted(groups, index, handed):
        due = [group.weights for when, group in groups._waiting if when <= index]
        sent.extend((index, *weights) for weights in due)
        update(groups, index, handed)
        held.append(len(groups.grads))

    monkeypatch.setattr(step_groups.StepGroups, "update", noted)

    def init(key):
        return TrainState.create(apply_fn=None, params=NET.init(key, X, SCALE)["params"], tx=optax.adam(1e-2))

    def loss_fn(params, batch, state):
        return NET.apply({"params": params}, batch["x"], batch["scale"])

    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=zerojax.make_mesh(), stage=3, min_size=0)
    how = {"blocks": zerojax.Blocks(r"block_\d", programs="kinds"), "reduce_dtype": np.float32, "clip_norm": clip}
    _, metrics = zerojax.make_train_step(loss_fn, partition, **how)(state, {"x": X, "scale": SCALE})
    assert np.isfinite(metrics["loss"])
    blocks = [weights[0].split("/")[1] for _, *weights in sent]
    assert sorted(blocks) == ["block_0", "block_1"]
    indices = [index for index, *_ in sent]
    if clip:
        assert len(set(indices)) == 1 and held == [0], "all wait for the norm"
    else:
        assert blocks == ["block_1", "block_0"] and indices[0] < indices[1]
        assert max(held) < len(sent[0]), "no gradient outlives its block"
