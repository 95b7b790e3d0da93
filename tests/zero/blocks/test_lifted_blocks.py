"""Runs blocks by Linen's transformations. This module tests zerojax.zero.blocks.lifted_blocks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.zero.blocks import lifted_blocks, remat


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x, word):
        y = x * self.param("w", nn.initializers.ones, (2,))
        self.sow("seen", "y", y)
        return {"y": y, word: word}


@pytest.mark.parametrize("policy", [None, remat.REMAT["full"]])
def test_a_block_gathers_its_known_weights_and_keeps_what_is_no_array(policy):
    stored, x = jnp.array([[2.0, 3.0]]), jnp.ones(2)

    def run(module, x):
        known = {"w": ("scaled/w", stored)}
        gather = lambda path, leaf: leaf[0] if path == "scaled/w" else leaf  # noqa: E731
        same = lambda values: values  # noqa: E731
        how = {"is_leaf": None, "is_made": True}
        return lifted_blocks.run(module, "__call__", (x, "word"), {}, known, gather, same, policy, **how)

    found, seen = nn.apply(run, Scaled(), mutable="seen")({"params": {"w": jnp.zeros(2)}}, x)
    np.testing.assert_array_equal(found.pop("y"), [2, 3])
    assert found == {"word": "word"} and "y" in seen["seen"]


def test_the_placement_of_a_layer_is_that_of_its_stack_without_the_first_dim():
    state = {"params": {"w": jax.ShapeDtypeStruct((3, 13, 10), jnp.float32)}}
    partition = zerojax.partition_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=0, indivisible="pad")
    stack = partition.placements["params/w"]
    found = lifted_blocks.of_layer("params/w", stack)
    assert (stack.padding, found.padding, found.shape) == ((0, 3, 0), (3, 0), (16, 10))
    for name in ("stored", "used", "grad", "opt_state", "update"):
        own, of_stack = getattr(found, name), getattr(stack, name)
        assert (*own.spec, None, None)[:2] == (*of_stack.spec, None, None, None)[1:3], name
        assert own.memory_kind == of_stack.memory_kind and own.mesh == of_stack.mesh
    assert found.stored.spec[0]


def test_a_layer_lacks_the_first_dim_of_each_weight_of_its_stack():
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}
    is_layer = [
        lifted_blocks.is_layer(params, stacks, is_leaf=None)
        for stacks in ([(5, 3, 4), (5, 4)], [(5, 3, 4), (4,)], [None] * 2)
    ]
    assert is_layer == [True, False, False]


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


class Block(nn.Module):
    other: nn.Module

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(jnp.tanh(self.other(x)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        shared = Wide(name="shared")
        for i in range(2):
            x = Block(shared, name=f"block_{i}")(x)
        return x


@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_a_module_that_blocks_share_keeps_its_weights_beside_those_of_the_same_names(reduce_dtype):
    net, x = Net(), jnp.linspace(-1, 1, 64).reshape(8, 8)
    params = net.init(jax.random.key(0), x)["params"]
    assert params["shared"].keys() == params["block_0"].keys() == {"Dense_0"}
    loss_fn = lambda params, x, state: jnp.mean(net.apply({"params": params}, x) ** 2)  # noqa: E731
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, x, None)
    whole = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state, partition = zerojax.shard_train_state(whole, mesh=zerojax.make_mesh(), min_size=1)
    step = zerojax.make_train_step(loss_fn, partition, blocks=r"block_\d", reduce_dtype=reduce_dtype)
    state, metrics = step(state, x)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    same = lambda new, old, grad: np.testing.assert_allclose(new, old - grad, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(same, state.params, params, grads)
