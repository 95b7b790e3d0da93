"""Checks how many groups are on their way at once. This module tests zerojax.zero.offload.state_stream."""

import jax
import offloads

import zerojax


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
