"""Tests of zerojax.zero.host.selection: which leaves live on the host, and in which pieces."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import zerojax
from zerojax import tree
from zerojax.errors import UserError
from zerojax.optim import eight_bit, one_pass, pieces
from zerojax.zero.host import memory_kind, selection


def partition_of(params, tx, offload, **how):
    """Returns the partition of an abstract state."""
    state = jax.eval_shape(lambda p: train_state.TrainState.create(apply_fn=None, params=p, tx=tx), params)
    return zerojax.partition_state(state, mesh=zerojax.make_mesh(), offload=offload, **how)


def weights(*shapes, dtype=jnp.float32):
    return {f"layer_{n}": {"kernel": jax.ShapeDtypeStruct(shape, dtype)} for n, shape in enumerate(shapes)}


@pytest.mark.filterwarnings("ignore:offload.fraction. is 0.01, and 0.05 of the bytes are offloaded")
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9, 1.0])
def test_at_least_the_fraction_is_offloaded_and_spread_evenly(fraction):
    params = weights(*[(8 * (1 + n % 5), 64) for n in range(40)])
    partition = partition_of(params, optax.adam(1e-3), {"optimizer": "host", "fraction": fraction}, min_size=64)
    sizes = {path: math.prod(p.shape) for path, p in partition.placements.items()}
    offloaded = selection.offloaded_weights(partition)
    taken = seen = 0
    for path in partition.placements:  # in the order of the layers
        seen += sizes[path]
        taken += sizes[path] * (path in offloaded)
        assert fraction * seen <= taken < fraction * seen + max(sizes.values())
    assert taken == seen or fraction < 1


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 5000, 1 << 14, 1 << 20])
@pytest.mark.parametrize("make", [lambda: optax.adam(1e-3), lambda: zerojax.fused_adamw(1e-3, moments="int8")])
def test_pieces_are_bounded_slices_with_the_spec_and_the_values_of_their_leaf(chunk_bytes, make):
    params = weights((64, 96), (8, 1024), (48, 40, 8), (4096,), (37, 512))
    tx = make()
    partition = partition_of(params, tx, {"optimizer": "host", "chunk_bytes": chunk_bytes}, indivisible="pad")
    whole = dict(tree.flatten(partition.on_device.abstract_state))
    by_weight = {}
    for path, leaf in tree.flatten(partition.abstract_state, is_leaf=pieces.is_pieces):
        assert leaf.shape == whole[path].shape
        assert leaf.dtype == whole[path].dtype
        parts = jax.tree.leaves(leaf)
        for part in parts:
            assert part.sharding.spec == whole[path].sharding.spec
            part.sharding.shard_shape(part.shape)  # raises if it does not divide
        if memory_kind.is_on_host(leaf):
            assert {part.sharding.memory_kind for part in parts} == {memory_kind.MEMORY_KIND}
            found = by_weight.setdefault(partition.on_device.leaves[path].weight, [0] * len(parts))
            assert len(found) == len(parts)
            for number, part in enumerate(parts):
                found[number] += tree.shard_bytes(part)
    assert list(by_weight) == selection.offloaded_weights(partition)
    for path, counts in by_weight.items():
        shape, cut = partition.placements[path].shape, partition.cuts.get(path)
        assert (cut is not None) == (len(counts) > 1)
        if cut:
            step = eight_bit.BLOCK if isinstance(tx, one_pass.OnePass) and cut.dim == len(shape) - 1 else 1
            assert max(counts) <= chunk_bytes + sum(counts) * step / shape[cut.dim]
        else:  # the only dim of a vector is sharded, and 8-bit moments have a smallest size
            assert sum(counts) <= chunk_bytes or len(shape) == 1 or isinstance(tx, one_pass.OnePass)


def test_only_the_state_of_large_trained_weights_is_offloaded():
    params = {**weights((64, 64), (64, 64)), "bias": jax.ShapeDtypeStruct((64,), jnp.float32)}
    partition = partition_of(params, optax.adafactor(1e-3, min_dim_size_to_factor=16, momentum=0.9), "host")
    host = {p for p, leaf in tree.flatten(partition.abstract_state) if memory_kind.is_on_host(leaf)}
    assert host == partition.on_host != set()
    assert all("layer_" in path for path in host)  # not the count, the factored moments or the bias
    assert all(dict(tree.flatten(partition.abstract_state))[path].shape == (64, 64) for path in host)


def test_placements_store_on_the_host_and_update_on_the_device():
    partition = partition_of(weights((64, 64)), optax.adam(1e-3), "host")
    found = partition.placements["params/layer_0/kernel"]
    assert found.opt_state.memory_kind == memory_kind.MEMORY_KIND
    assert found.opt_state.spec == found.update.spec
    assert found.update.memory_kind != memory_kind.MEMORY_KIND
    assert partition.on_device.placements["params/layer_0/kernel"].opt_state == found.update
    assert jax.tree.structure(partition.specs) == jax.tree.structure(partition.shardings)


class OwnUpdate(train_state.TrainState):
    """A state that averages its weights."""

    def apply_gradients(self, *, grads, **kwargs):
        return super().apply_gradients(grads=grads, **kwargs)


def test_updates_that_are_not_leaf_by_leaf_are_refused_with_the_way_out():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with pytest.raises(UserError, match="clip_norm="):
        partition_of(weights((64, 64), (64, 64)), clipped, "host")
    state = jax.eval_shape(
        lambda: OwnUpdate.create(apply_fn=None, params={"w": np.zeros((64, 64), np.float32)}, tx=optax.adam(1e-3))
    )
    with pytest.raises(UserError, match="OwnUpdate"):
        zerojax.partition_state(state, mesh=zerojax.make_mesh(), offload="host")
    fp8 = {"params": weights((64, 64)), "_overwrite_with_gradient": {"scale": jax.ShapeDtypeStruct((1,), jnp.float32)}}
    with pytest.raises(UserError, match="overwritten with its gradient"):
        partition_of(fp8, optax.adam(1e-3), "host")
    with pytest.raises(UserError, match="min_size=1024"):
        partition_of(weights((8, 8)), optax.adam(1e-3), "host")
    with pytest.raises(UserError, match="works at stage 1, 2, 3, and the stage is 0"):
        partition_of(weights((64, 64)), optax.adam(1e-3), "host", stage=0)


def test_nothing_offloaded_leaves_the_partition_as_it_is():
    partition = partition_of(weights((64, 64)), optax.adam(1e-3), "none")
    assert partition.on_device is partition
    assert not partition.cuts


SHAPES = {f"block_{n}": {"kernel": (64, 32), "bias": (32,)} for n in range(4)}


def placed(offload, stage=3, trainable="", tx=None):
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=lambda node: isinstance(node, tuple)
    )
    tx = tx or optax.adam(1e-3)

    def init(params):
        state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
        return state.replace(opt_state=()) if trainable == "none" else state

    state = jax.eval_shape(init, params)
    return zerojax.partition_state(state, mesh=zerojax.make_mesh(), stage=stage, min_size=100, offload=offload)


def on_host(part):
    return [p for p, leaf in tree.flatten(part.abstract_state) if leaf.sharding.memory_kind == "pinned_host"]


def test_large_params_are_stored_where_their_moments_are_and_small_ones_stay():
    found = on_host(placed({"optimizer": "host", "params": "host"}))
    weights = [f"block_{n}/kernel" for n in range(4)]
    assert set(found) == {f"{at}/{w}" for w in weights for at in ("params", "opt_state/0/mu", "opt_state/0/nu")}


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 1), (0.5, 2), (0.6, 3), (1.0, 4)])
def test_a_fraction_of_the_params_is_spread_over_the_model(fraction, count):
    part = placed({"optimizer": "host", "params": "host", "params_fraction": fraction})
    assert len([path for path in on_host(part) if path.startswith("params/")]) == count


@pytest.mark.parametrize("field", ["fraction", "params_fraction"])
def test_a_fraction_of_less_than_a_weight_is_warned_of(field):
    line = f"offload.{field}: is 1e-09, and 0.25 of the bytes are offloaded, .* 1 of 4 weights, .*; set {field} to 0.25 or more"
    with pytest.warns(UserWarning, match=line):
        placed({"optimizer": "host", "params": "host", field: 1e-9})


def test_params_that_a_regex_matches_stay_on_the_device_and_the_fraction_is_of_the_rest():
    settings = {"optimizer": "host", "params": "host", "params_on_device": "block_[03]", "params_fraction": 0.5}
    found = on_host(placed(settings))
    assert [path for path in found if path.startswith("params/")] == ["params/block_1/kernel"]
    assert "opt_state/0/mu/block_0/kernel" in found, "the moments of a weight on the device"


def test_the_partition_of_the_device_has_nothing_on_the_host():
    part = placed({"optimizer": "host", "params": "host"})
    assert on_host(part.on_device) == [] and jax.tree.structure(part.on_device.specs) == jax.tree.structure(part.specs)


def test_specs_and_shapes_stay():
    part = placed({"optimizer": "host", "params": "host"})
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
            r"^offload\.params_on_device: '\(' is not a regex",
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
        placed(offload, stage)
