"""Compares adapters in NNX models with merged kernels. This module tests zerojax.lora.nnx_modules."""

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.ops import quantized

WIDTH = 64
X = arrays.normal(1, (16, WIDTH))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LinearGeneral((WIDTH,), (4, 16), rngs=rngs)])
        self.out = nnx.LinearGeneral((4, 16), (WIDTH,), axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.out(x)


def adapted(**fields):
    lora = zerojax.Lora(r=4, alpha=8, **fields)
    model = zerojax.add_lora(Net(nnx.Rngs(0)), lora, jax.random.key(1))
    for layer in (*model.layers, model.out):
        if hasattr(layer, "lora_b"):
            layer.lora_b[...] = arrays.normal(2, layer.lora_b.shape)
    return lora, model


@pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.long)])
def test_adapters_give_the_output_of_merged_kernels_and_keep_the_class(quantize):
    _, model = adapted(quantize=quantize, exclude_modules=("out",))
    plain = Net(nnx.Rngs(0))
    for layer, own in zip((*plain.layers, plain.out), (*model.layers, model.out)):
        kernel = own.kernel
        stored = {name: part[...] for name, part in kernel.items()} if isinstance(kernel, nnx.Dict) else None
        merged = kernel[...] if stored is None else quantized.dequantize(stored, jnp.float32)
        if hasattr(own, "lora_a"):
            merged = merged + 2.0 * (own.lora_a[...] @ own.lora_b[...]).reshape(merged.shape)
        layer.kernel[...] = merged
        assert isinstance(own, type(layer))
    assert not hasattr(model.out, "lora_a")
    np.testing.assert_allclose(model(X), plain(X), atol=2e-5)


@pytest.mark.long
def test_only_adapters_train_at_stage_3():
    lora = zerojax.Lora(r=4, alpha=8, quantize="nf4", dropout=0.5)

    def create(key):
        model = zerojax.add_lora(Net(nnx.Rngs(key)), lora, key)
        return nnx.split((model, nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.LoRAParam)))

    mesh = zerojax.make_mesh()
    (graph, state), partition = zerojax.shard_train_state(
        create, jax.random.key(0), mesh=mesh, stage=3, min_size=64, trainable=lora.trainable
    )
    frozen = {path for path, weight in partition.placements.items() if not weight.trainable}
    assert frozen and not [path for path in frozen if "lora_" in path]
    sharded = zerojax.where_used(lambda model, x: jnp.mean((model(x) - 1) ** 2), partition.placements)

    @jax.jit
    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(sharded, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    losses = []
    for _ in range(20):
        state, loss = step(state, X)
        losses.append(float(loss))
    assert len(set(losses)) == 20 and losses[-1] < 0.9 * losses[0]
    model, _ = nnx.merge(graph, state)
    model.eval()
    np.testing.assert_array_equal(model(X), model(X))
