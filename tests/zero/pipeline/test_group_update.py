"""Checks which states groups can update by themselves. This module tests zerojax.zero.pipeline.group_update; test_step has the updates."""

import jax
import jax.numpy as jnp
import optax
import pytest
from pipelines import abstract, prepared

from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero import gather, update
from zerojax.zero.pipeline import group_update


def test_an_optimizer_that_mixes_weights_is_refused():
    with pytest.raises(UserError, match="pipe: each group of devices updates its own weights, and with this optimizer"):
        prepared(
            {"pipe": 2}, shard=abstract, schedule="1f1b", tx=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
        )


def test_each_trained_weight_is_updated_by_one_group():
    (_, partition), _ = prepared({"pipe": 4}, shard=abstract, schedule="1f1b")
    groups = [
        group_update.GroupUpdate(
            partition.pipeline, number, gather.Reduction(jnp.float32), update.Unscaled(), update.Clip(), donate=True
        )
        for number in range(4)
    ]
    trained = [path for group in groups for path in group.trained]
    paths = [f"params/{path}" for path, _ in tree.flatten(partition.abstract_state.params)]
    assert sorted(trained) == sorted(paths)
    assert all(group.trained for group in groups)
    assert jax.tree.structure(partition.abstract_state) == jax.tree.structure(partition.shardings)
