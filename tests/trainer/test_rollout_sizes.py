"""Checks what an engine in training will hold. This module tests zerojax.trainer.rollout_sizes."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.models import families, family
from zerojax.trainer import rollout_sizes
from zerojax.zero import stages


@pytest.mark.parametrize("data, slots", [(1, 6), (4, 8)])
def test_bytes_are_those_of_shards_and_of_slots_that_devices_share(data, slots):
    """Six answers need eight slots on four devices. The model has keys and values of two heads in each of two layers."""
    found = families.PRESETS["test"]
    config = dataclasses.replace(found.presets["test"], vocab_size=64)
    mesh = zerojax.make_mesh(data=data, devices=jax.devices()[:data])
    partition = stages.partition_state({"params": family.abstract_params(found.parts, config)}, mesh=mesh, stage=3)
    settings = types.SimpleNamespace(
        seq_len=10,
        data=types.SimpleNamespace(answer_len=3),
        grpo=types.SimpleNamespace(replay=False),
        policy=types.SimpleNamespace(compute_dtype=jnp.float32),
    )
    program = types.SimpleNamespace(
        config=settings, family=found, model=config, sizes=types.SimpleNamespace(global_batch_size=6)
    )
    params = partition.abstract_state["params"]
    held, caches = rollout_sizes.bytes_of(program, rollout_sizes.model_of(program), partition, params)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert held <= whole and (data == 1 or held < 0.5 * whole)
    heads = (config.num_kv_heads or config.num_heads) * config.head_dim
    assert caches == slots // data * 11 * 2 * heads * 4 * config.num_layers
    assert rollout_sizes.sizes_of(program) == {"slots": 6, "max_len": 11, "max_inputs": 10}
