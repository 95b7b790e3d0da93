"""Checks how many groups are on their way at once, and when they are updated. This module tests zerojax.zero.offload.state_stream."""

import jax
import numpy as np
import offloads
import optax
import pytest
from block_nets import Net, X
from flax.training.train_state import TrainState

import zerojax
from zerojax.zero.offload import state_stream

NET = Net(2)
SCALE = np.ones((len(X), 1), np.float32)


def test_no_more_groups_than_in_flight_are_on_the_device_and_copies_are_sent_ahead(monkeypatch):
    state, partition = offloads.sharded(offloads.adam(), offloads.PIECES)
    train_step = zerojax.make_train_step(offloads.loss_fn, partition)
    updates, events, waiting = train_step.updates, [], jax.block_until_ready

    def noted(kind, function):
        def run(group, *args):
            events.append((kind, updates.groups.index(group)))
            return function(group, *args)

        return run

    for kind in ("load", "update", "store"):
        monkeypatch.setattr(updates, kind, noted(kind, getattr(updates, kind)))
    gradients = train_step.gradients
    train_step.gradients = lambda *args: events.append(("gradients", -1)) or gradients(*args)
    train_step.gradients.trace = gradients.trace
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: events.append(("wait", -1)) or waiting(arrays))
    monkeypatch.setattr(
        type(train_step.stream), "num_leaving", lambda self: len(self._leaving)
    )  # as if no store had ended
    state, _ = train_step(state, offloads.batch_of(0))
    assert events[:3] == [("gradients", -1), ("wait", -1), ("load", 0)]  # the program is loaded before the first copy
    events.clear()
    train_step.stream._leaving.clear()
    state, _ = train_step(state, offloads.batch_of(1))
    count = len(updates.groups)
    assert count > 2 * train_step.stream.in_flight
    loads, stores = ([n for kind, n in events if kind == wanted] for wanted in ("load", "store"))
    assert loads == stores == list(range(count))
    sent = events.index(("gradients", -1))
    assert [kind for kind, _ in events[:sent]] == ["load"] * train_step.ahead
    loaded = left = 0
    for kind, group in events:
        loaded += kind == "load"
        left += kind == "wait"  # each waits for one group's store
        assert loaded - left <= train_step.stream.in_flight
        assert kind != "update" or group + train_step.ahead <= loaded or loaded == count


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_blocks_weights_are_updated_as_soon_as_the_factor_of_its_gradients_is_known(clip, monkeypatch):
    sent, held, update = [], [], state_stream.StepGroups.update

    def noted(groups, index, handed):
        due = [group.weights for when, group in groups._waiting if when <= index]
        sent.extend((index, *weights) for weights in due)
        update(groups, index, handed)
        held.append(len(groups.grads))

    monkeypatch.setattr(state_stream.StepGroups, "update", noted)

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
