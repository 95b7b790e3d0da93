"""Checks regexes over paths of modules. This module tests zerojax.zero.blocks.block_settings."""

import jax
import jax.numpy as jnp
import pytest

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero import stages
from zerojax.zero.blocks import block_settings, where_used


def placements_of(**shapes):
    params = {name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in shapes.items()}
    abstract_state = {"params": params}
    return stages.partition_state(abstract_state, mesh=mesh_lib.make_mesh(), min_size=0).placements


def test_the_largest_block_is_counted_with_all_its_weights():
    placements = placements_of(block_0=(16, 8), block_1=(16, 16), head=(64, 64))
    twice = {**placements, **{path.replace("kernel", "bias"): own for path, own in placements.items()}}
    assert block_settings.largest_block(placements, r"block_\d") == 256
    assert block_settings.largest_block(twice, r"block_\d") == 512
    assert block_settings.largest_block(placements, "layer") == 0


def test_blocks_that_are_no_regex_are_refused():
    with pytest.raises(UserError, match=r"blocks: .* is not a regex"):
        where_used.where_used(lambda params: 0.0, {}, blocks="layer_(")


def test_modules_that_differ_from_a_block_in_digits_alone_are_told_if_the_regex_misses_them():
    layers = {f"block_{n}": (16, 16) for n in range(12)}
    others = {"block_norm": (16, 16), "head_1": (16, 16), "block_99": (16, 8)}
    placements = placements_of(**layers, **others)
    assert block_settings.missed_blocks(placements, r"block_\d") == ("block_10", "block_11")
    for blocks in (r"block_\d+", r"block_(\d|1\d)", "block_norm|head_1"):
        assert block_settings.missed_blocks(placements, blocks) == ()
