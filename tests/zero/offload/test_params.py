"""Checks which params are stored on the host. This module tests zerojax.zero.offload.params."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero import stages

SHAPES = {f"block_{n}": {"kernel": (64, 32), "bias": (32,)} for n in range(4)}


def partition(offload, stage=3, trainable="", tx=None):
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=lambda node: isinstance(node, tuple)
    )
    tx = tx or optax.adam(1e-3)

    def init(params):
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        return state.replace(opt_state=()) if trainable == "none" else state

    state = jax.eval_shape(init, params)
    return stages.partition_state(state, mesh=mesh_lib.make_mesh(), stage=stage, min_size=100, offload=offload)


def on_host(part):
    return [p for p, leaf in tree.flatten(part.abstract_state) if leaf.sharding.memory_kind == "pinned_host"]


def test_large_params_are_stored_where_their_moments_are_and_small_ones_stay():
    found = on_host(partition({"optimizer": "host", "params": "host"}))
    weights = [f"block_{n}/kernel" for n in range(4)]
    assert set(found) == {f"{at}/{w}" for w in weights for at in ("params", "opt_state/0/mu", "opt_state/0/nu")}


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 1), (0.5, 2), (0.6, 3), (1.0, 4)])
def test_a_fraction_of_the_params_is_spread_over_the_model(fraction, count):
    part = partition({"optimizer": "host", "params": "host", "params_fraction": fraction})
    assert len([path for path in on_host(part) if path.startswith("params/")]) == count


@pytest.mark.parametrize("field", ["fraction", "params_fraction"])
def test_a_fraction_of_less_than_a_weight_is_warned_of(field):
    line = f"offload.{field}: is 1e-09, and 0.25 of the bytes are offloaded, .* 1 of 4 weights, .*; set {field} to 0.25 or more"
    with pytest.warns(UserWarning, match=line):
        partition({"optimizer": "host", "params": "host", field: 1e-9})


def test_params_that_a_regex_matches_stay_on_the_device_and_the_fraction_is_of_the_rest():
    settings = {"optimizer": "host", "params": "host", "params_on_device": "block_[03]", "params_fraction": 0.5}
    found = on_host(partition(settings))
    assert [path for path in found if path.startswith("params/")] == ["params/block_1/kernel"]
    assert "opt_state/0/mu/block_0/kernel" in found, "the moments of a weight on the device"


def test_the_partition_of_the_device_has_nothing_on_the_host():
    part = partition({"optimizer": "host", "params": "host"})
    assert on_host(part.on_device) == [] and jax.tree.structure(part.on_device.specs) == jax.tree.structure(part.specs)


def test_specs_and_shapes_stay():
    part = partition({"optimizer": "host", "params": "host"})
    assert part.specs.params == part.on_device.specs.params


@pytest.mark.parametrize(
    ("offload", "stage", "message"),
    [
        (
            {"params": "host"},
            3,
            r"^offload\.params: is 'host', and the optimizer state of trained weights stays on the device",
        ),
        (
            {"optimizer": "host", "params": "host"},
            2,
            r"^offload\.params: is 'host', which works at stage 3, and the stage is 2",
        ),
        (
            {"optimizer": "host", "params_fraction": 0.5},
            3,
            r"^offload\.params_fraction: is 0\.5 and cannot take effect",
        ),
        (
            {"optimizer": "host", "params_on_device": "embed"},
            3,
            r"^offload\.params_on_device: is 'embed' and cannot take effect",
        ),
        (
            {"optimizer": "host", "params": "host", "params_on_device": "embed"},
            3,
            r"^offload\.params_on_device: 'embed' matches none of the 4 weights .* params/block_0/kernel; correct or omit",
        ),
        (
            {"optimizer": "host", "params": "host", "params_on_device": "("},
            3,
            r"^offload\.params_on_device: '\(' is no regex",
        ),
        (
            {"optimizer": "host", "params": "host", "params_fraction": 0},
            3,
            r"^offload\.params_fraction: must be above 0",
        ),
    ],
)
def test_what_cannot_be_is_one_line(offload, stage, message):
    with pytest.raises(UserError, match=message):
        partition(offload, stage)
