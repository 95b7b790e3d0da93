"""Finds the placements of weights in trees that hold them, or layers of a stack of them.
This module tests zerojax.zero.weights.placement."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero import stages
from zerojax.zero.blocks import lifted_blocks
from zerojax.zero.weights import placement

ROWS, WIDTH = 16, 24


def finder(shape, **how):
    params = {"layers": {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}}
    options = {"mesh": mesh_lib.make_mesh(), "min_size": 0, **how}
    placements = stages.partition_state({"params": params}, **options).placements
    return placements["params/layers/kernel"], placement.finder(
        placements, lambda weight: weight.shape, lifted_blocks.of_layer
    )


def test_a_weight_is_found_by_the_end_of_its_path_and_one_of_another_shape_is_refused():
    own, find = finder((ROWS, WIDTH))
    assert find("layers/kernel", None) is own
    assert find("mu/layers/kernel", jnp.zeros((ROWS, WIDTH))) is own
    assert find("layers/bias", None) is None
    with pytest.raises(UserError, match=r"layers/kernel: has shape \(3, 24\), and the weight stored as"):
        find("layers/kernel", jnp.zeros((3, WIDTH)))


def test_a_layer_of_a_stack_has_the_shardings_of_the_stack_without_its_first_dim():
    stack, find = finder((3, ROWS, WIDTH))
    layer = find("layers/kernel", jnp.zeros((ROWS, WIDTH)))
    assert stack.stored.spec == P(None, "data") and layer.stored.spec == P("data") and layer.used.spec == P()
    assert layer.shape == (ROWS, WIDTH) and layer.wire is stack.wire


def test_a_layer_of_a_group_of_layers_lacks_both_dims():
    stack, find = finder((2, 3, ROWS, WIDTH))
    group, layer = find("layers/kernel", jnp.zeros((3, ROWS, WIDTH))), find("layers/kernel", jnp.zeros((ROWS, WIDTH)))
    specs = [own.stored.spec for own in (stack, group, layer)]
    assert specs == [P(None, None, "data"), P(None, "data"), P("data")]


@pytest.mark.parametrize(("layers", "indivisible"), [(8, "whole"), (9, "pad")])
def test_a_layer_of_a_stack_that_is_sharded_over_its_layers_is_refused(layers, indivisible):
    _, find = finder((layers, 3, 5), indivisible=indivisible)
    with pytest.raises(UserError, match="counts the layers"):
        find("layers/kernel", jnp.zeros((3, 5)))
