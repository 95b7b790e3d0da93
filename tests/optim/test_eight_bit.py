"""Checks the form and the placement of 8-bit moments. This module tests zerojax.optim.eight_bit."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.optim import eight_bit
from zerojax.zero import stages


def test_a_moment_of_zeros_has_a_byte_a_value_and_a_scale_a_block():
    moment = eight_bit.zeros((4, 700), jnp.uint8)
    assert (moment.codes.shape, moment.codes.dtype) == ((4, 700), jnp.uint8)
    assert (moment.scales.shape, moment.scales.dtype) == ((4, 3), jnp.float32)


@pytest.mark.parametrize(
    ("shape", "takes"), [((4096,), False), ((64, 63), False), ((64, 64), True), ((2, 2, 1024), True)]
)
def test_vectors_and_small_weights_keep_float32(shape, takes):
    assert eight_bit.takes(shape) == takes


@pytest.mark.parametrize(
    ("spec", "shape", "axes", "scales"),
    [
        (P("data"), (8, 700), (), P("data")),
        (P(None, "data"), (8, 2048), (), P(None, "data")),  # shards of 256
        (P(None, "data"), (8, 1024), ("data",), P()),  # shards of 128 share a block
        (P("replica", "data"), (8, 512), ("data",), P("replica")),
        (P(None, ("replica", "data")), (8, 1024), ("replica", "data"), P()),
        (P(), (8, 700), (), P()),
    ],
)
def test_scales_are_sharded_as_their_codes_if_shards_end_at_blocks_and_else_replicated(spec, shape, axes, scales):
    mesh = mesh_lib.make_mesh(replica=1 if "replica" not in str(spec) else 2)
    assert eight_bit.shared_axes(spec, shape, mesh) == axes
    assert eight_bit.scales_spec(spec, shape, mesh) == scales


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 40), st.integers(1, 3000), st.sampled_from(["whole", "pad"]), st.integers(0, 3))
def test_a_partition_splits_codes_as_their_weight_and_scales_in_shapes_that_divide(rows, cols, indivisible, stage):
    weight = jax.ShapeDtypeStruct((rows, cols), jnp.float32)
    moment = jax.eval_shape(lambda: eight_bit.zeros((rows, cols), jnp.int8))
    state = {"params": {"w": weight}, "opt_state": {"mu": {"w": moment}}}
    mesh = mesh_lib.make_mesh()
    part = stages.partition_state(state, mesh=mesh, stage=stage, min_size=0, indivisible=indivisible)
    stored = part.abstract_state["opt_state"]["mu"]["w"]
    assert part.leaves["opt_state/mu/w/codes"].sharded == part.leaves["params/w"].sharded
    assert stored.scales.shape == eight_bit.scales_shape(stored.codes.shape)
    for leaf in jax.tree.leaves(stored):
        leaf.sharding.shard_shape(leaf.shape)  # raises where a dim does not divide


def test_moments_are_found_by_path():
    state = {"mu": {"w": eight_bit.zeros((64, 70), jnp.int8), "b": jnp.zeros(3)}}
    assert eight_bit.moments(state) == {f"mu/w/{part}": ("mu/w", (64, 70)) for part in ("codes", "scales")}
    assert {path for path, _ in tree.flatten(state)} >= set(eight_bit.moments(state))
