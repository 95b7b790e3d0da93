"""Checks generation with weights in host memory against that with weights on the device. This module tests zerojax.inference.by_block."""

import collections
import dataclasses
import re

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.inference import by_block, choice, generate, sampling
from zerojax.models import families, family
from zerojax.models.llama.config import Heads, LlamaConfig
from zerojax.zero import stages
from zerojax.zero.host import memory_kind

PROMPTS = np.array([[3, 9, 4, 1, 5, 9, 2, 6], [7, 7, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 8, 2, 8, 1]])
MASK = np.array([[1] * 8, [1] * 3 + [0] * 5, [0] * 4 + [1] * 4])
NEW, DEPTH = 5, 8
HOST = {"stage": 3, "min_size": 64, "offload": {"params": "host"}, "trainable": "norm"}


def model(name):
    """Returns a family and a small config of it."""
    if name == "test":
        shape = {"embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 48}
        return families.PRESETS[name], LlamaConfig(61, 2, heads=Heads(windows=(5, 0)), **shape)
    chosen = families.PRESETS[name]
    return chosen, dataclasses.replace(chosen.presets[name], vocab_size=61, num_layers=1)


def params_of(chosen, config):
    random = np.random.default_rng(0)
    shapes = family.abstract_params(chosen.parts, config)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.4, leaf.shape), leaf.dtype), shapes)


@pytest.mark.parametrize(
    "name", runs.cases(["test", "bart_test"], long=["test"])
)  # tests/interop generates so with Llama
def test_tokens_are_those_of_one_program_with_all_weights_on_the_device(name):
    chosen, config = model(name)
    params, found = params_of(chosen, config), []
    for how in ({"stage": 0}, HOST):
        partition = stages.partition_state({"params": params}, mesh=mesh_lib.make_mesh(), **how)
        stored = jax.device_put(params, partition.shardings["params"])
        assert any(map(memory_kind.is_on_host, jax.tree.leaves(stored))) == (how is HOST)
        special = family.SpecialTokens(stops=(6,), pad=59)
        function = generate.make_generator(chosen, config, partition, new_tokens=NEW, special=special)
        found.append(function(stored, PROMPTS, MASK))
    np.testing.assert_array_equal(*found)


@runs.LONG
def test_a_program_reads_the_weights_of_one_block_and_three_blocks_are_on_the_device_at_most():
    chosen = families.PRESETS["test"]
    config = dataclasses.replace(chosen.presets["test"], vocab_size=61, num_layers=DEPTH)
    mesh = mesh_lib.make_mesh(devices=compile_only.devices()[:1])
    shapes = {"params": family.abstract_params(chosen.parts, config)}
    partition = stages.partition_state(shapes, mesh=mesh, **HOST)
    picked = choice.Choice(NEW, family.SpecialTokens(), sampling.Sampling())
    programs, rows = by_block.Loop(chosen, config, partition, picked, None), mesh_lib.batch_sharding(mesh)
    like = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows) for shape in ((1, 4), (1,))]
    weights = partition.abstract_state["params"]
    schedule = programs.start.schedule(weights, ({}, *like))
    pattern = re.compile(chosen.blocks)
    blocks = [tree.block_of(path, pattern) for path, _ in tree.flatten(weights)]
    read = [{blocks[n] for n in program.reads if n < len(blocks)} - {None} for program in schedule.cut.programs]
    assert max(map(len, read)) == 1 and set().union(*read) == {f"layer_{n}" for n in range(DEPTH)}
    nbytes = collections.Counter()
    for number, block in enumerate(blocks):
        nbytes[block] += schedule.cut.nbytes(number)
    assert schedule.peak() < nbytes[None] + 4 * nbytes["layer_0"] < sum(nbytes.values()) / 1.5
