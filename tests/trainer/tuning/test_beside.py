"""Checks that a model beside the state is sharded as the stage says. This module tests zerojax.trainer.tuning.beside.

What such models return is compared in the tests of `lessons` and `values`.
"""

import jax
import pytest
import runs

from zerojax import tree
from zerojax.models import families, family
from zerojax.trainer import program
from zerojax.trainer.tuning import beside


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
