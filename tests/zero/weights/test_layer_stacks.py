"""Checks which dims count layers in forms that models are written in. This module tests zerojax.zero.weights.layer_stacks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.zero import shard_state
from zerojax.zero.weights import layer_stacks

LAYERS = WIDTH = 8  # on as many devices: no size of a dim tells what it counts


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.LayerNorm()(x)), None


class LinenScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return nn.Dense(WIDTH, name="out")(layers(name="layers")(x, None)[0])


def linen(key):
    return LinenScan().init(key, jnp.zeros((1, WIDTH)))["params"]


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dense = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class NnxVmap(nnx.Module):
    def __init__(self, rngs):
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxLayer, in_axes=(0,), out_axes=0))
        self.layers, self.out = make(rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def of_nnx(key):
    return nnx.state(NnxVmap(nnx.Rngs(key)), nnx.Param)


def layer(key):
    kernel = jax.random.normal(key, (WIDTH, WIDTH))
    return {"kernel": kernel @ kernel, "bias": jnp.zeros(WIDTH)}


def of_vmap(key):
    return {"layers": jax.vmap(layer)(jax.random.split(key, LAYERS)), "out": layer(key)}


def of_stack(key):
    layers = [layer(own) for own in jax.random.split(key, LAYERS)]
    return {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), "out": layer(key)}


def of_two_vmaps(key):
    return {"layers": jax.vmap(jax.vmap(layer))(jax.random.split(key, (2, LAYERS))), "out": layer(key)}


@pytest.mark.parametrize("init, dims", [(linen, 1), (of_nnx, 1), (of_vmap, 1), (of_stack, 1), (of_two_vmaps, 2)])
def test_the_dims_that_a_scan_or_a_vmap_made_are_found_in_the_trace_of_an_init(init, dims):
    program, params = jax.make_jaxpr(init, return_shape=True)(jax.random.key(0))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]
    expected = {path: dims for path in paths if path.startswith("layers")}
    assert len(expected) >= 2
    assert layer_stacks.counts(program, params) == expected


def test_a_stack_and_its_moments_are_never_sharded_by_layers():
    def init(key):
        return TrainState.create(apply_fn=None, params=of_vmap(key), tx=optax.adam(1e-3))

    kinds = {"mesh": mesh_lib.make_mesh(data=8), "min_size": 1}
    _, partition = shard_state.shard_train_state(init, jax.random.key(0), **kinds)
    specs = {path: leaf.spec for path, leaf in partition.leaves.items() if path.endswith(("kernel", "bias"))}
    assert {spec for path, spec in specs.items() if "layers" in path} == {P(None, "data")}
    assert {spec for path, spec in specs.items() if "out" in path} == {P("data")}
    _, partition = shard_state.shard_train_state(init, jax.random.key(0), overrides=[("layers", P("data"))], **kinds)
    assert partition.leaves["params/layers/bias"].spec == P("data")
