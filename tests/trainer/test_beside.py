"""Checks that a model beside the state is sharded as the stage says. This module tests zerojax.trainer.beside.

What such models return is compared in the tests of `lessons` and `values`.
"""

import dataclasses

import asking
import jax
import pytest
import runs

from zerojax import tree
from zerojax.models import families, family
from zerojax.trainer import beside, program


@pytest.mark.parametrize("stage, ways", [(3, 4), (2, 1)])
def test_weights_beside_the_state_have_the_shards_of_the_stage_and_their_bytes_are_told(stage, ways):
    built = program.build(
        runs.config(zero__stage=stage, zero__min_size=0), tokenizer_vocab=320, devices=jax.devices()[:4]
    )
    own, told, asked = families.PRESETS["test"], [], []
    abstract = family.abstract_params(own.parts, built.model)
    beside.opened(built, own, abstract, asked.append, lambda params, batch: batch, told.append)
    for path, leaf in tree.flatten(asked[0]):
        assert tree.shard_bytes(leaf) * ways == tree.nbytes(leaf), path
    assert len(told) == 1 and told[0].endswith("on each device, beside the state")


def test_a_plan_counts_what_a_device_holds_of_a_teacher(tmp_path):
    folder = asking.teachers(tmp_path / "teacher")
    texts = asking.write_prompts(tmp_path)
    built, _ = asking.taught(texts, folder, zero__stage=3, zero__min_size=0)
    teacher = built.weights.teacher
    how = {"read": teacher.read, "function": lambda params, batch: batch, "tell": lambda line: None}
    _, held = beside.opened(built, teacher.family, teacher.abstract(built.config.policy.compute_dtype), **how)
    device = built.mesh.devices.flat[0]
    shards = (shard for leaf in jax.tree.leaves(held) for shard in leaf.addressable_shards)
    nbytes = sum(shard.data.nbytes for shard in shards if shard.device == device)
    assert beside.nbytes(built) == nbytes > 0
    assert beside.nbytes(dataclasses.replace(built, weights=dataclasses.replace(built.weights, teacher=None))) == 0
