"""Compares DoRA with the formula of its paper: magnitude * (W + s B A) / ||W + s B A||, the norm a constant in the backward pass."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from flax.training import train_state

import zerojax
from zerojax.lora import adapters, linen, targets

F32 = 1e-5  # float32 sums in another order
X = np.random.default_rng(0).integers(0, 24, (16, 4))
Y = np.random.default_rng(1).normal(size=(16, 4, 8)).astype(np.float32)
LORA = zerojax.Lora(r=2, alpha=6, dora=True, target_modules=".*")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        heads = nn.DenseGeneral((4, 8), name="heads")(x)
        return x + nn.DenseGeneral(32, axis=(-2, -1), name="out")(nn.tanh(heads))


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(24, 32, name="table")(tokens)
        for number in range(2):
            x = Block(name=f"block_{number}")(x)
        return nn.Dense(8, name="head")(x)


def apply(params, tokens):
    return Net().apply({"params": params}, tokens)


def changed(params):
    """Returns params whose adapters and biases are no longer those that they begin with."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    noise = np.random.default_rng(2)
    is_own = lambda path: "lora" in path or "bias" in path  # noqa: E731
    found = [leaf + 0.2 * noise.normal(size=leaf.shape) * is_own(str(path)) for path, leaf in leaves]
    return jax.tree.unflatten(structure, [jnp.asarray(leaf, jnp.float32) for leaf in found])


@functools.cache
def weights(quantize="none"):
    lora = zerojax.Lora(r=2, alpha=6, dora=True, target_modules=".*", quantize=quantize)
    return zerojax.add_lora(Net().init(jax.random.key(0), X)["params"], lora, jax.random.key(1), apply, X)


def by_formula(params, tokens):
    """Returns the output with plain kernels that the paper's equation 5 makes of each adapter."""

    def plain(node):
        if not isinstance(node, dict) or "lora_a" not in node:
            return {name: plain(child) for name, child in node.items()} if isinstance(node, dict) else node
        name = "embedding" if "embedding" in node else "kernel"
        both = node[name].reshape(len(node["lora_a"]), -1) + 3.0 * node["lora_a"] @ node["lora_b"]
        norm = jax.lax.stop_gradient(jnp.linalg.norm(both, axis=0))
        kept = {key: leaf for key, leaf in node.items() if not key.startswith("lora")}
        return kept | {name: (node["lora_magnitude"] * both / norm).reshape(node[name].shape)}

    return apply(plain(params), tokens)


def test_outputs_gradients_and_merged_weights_are_those_of_the_formula():
    params = changed(weights())
    own = zerojax.with_lora(apply, LORA)
    np.testing.assert_allclose(own(params, X), by_formula(params, X), atol=F32)
    grads, known = (jax.grad(lambda p, f=f: jnp.mean((f(p, X) - Y) ** 2))(params) for f in (own, by_formula))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=F32), grads, known)
    shapes = jax.eval_shape(Net().init, jax.random.key(0), X)["params"]
    chosen = targets.choose(LORA, linen.find(apply, shapes, X), targets.flat(shapes))
    np.testing.assert_allclose(apply(adapters.merge(params, chosen), X), by_formula(params, X), atol=F32)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_fresh_magnitudes_are_norms_so_that_no_output_changes(quantize):
    lora, params = zerojax.Lora(r=2, dora=True, target_modules=".*", quantize=quantize), weights(quantize)
    plain = zerojax.add_lora(
        Net().init(jax.random.key(0), X)["params"], zerojax.Lora(r=2, quantize=quantize), jax.random.key(1), apply, X
    )
    known = zerojax.with_lora(apply, zerojax.Lora(r=2))(plain, X)
    np.testing.assert_allclose(zerojax.with_lora(apply, lora)(params, X), known, atol=F32)


def trained(mesh, stage, quantize, **how):
    params = weights(quantize)  # outside of the trace, whose values would be kept

    def init(key):
        return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.01))

    state, partition = zerojax.shard_train_state(
        init, jax.random.key(0), mesh=mesh, stage=stage, min_size=0, trainable=LORA.trainable
    )
    loss = zerojax.with_lora(lambda params, batch: jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2), LORA)
    step = zerojax.make_train_step(lambda params, batch, *_: loss(params, batch), partition, **how)
    for _ in range(2):
        state, metrics = step(state, {"x": X, "y": Y})
    return float(metrics["loss"]), jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_norms_of_sharded_weights_are_those_of_one_device(quantize):
    loss, known = trained(zerojax.make_mesh(devices=jax.devices()[:1]), 0, quantize)
    how = {"reduce_dtype": jnp.float32, "blocks": r"block_\d"}
    for own in ({}, how):
        found = trained(zerojax.make_mesh(), 3, quantize, **own)
        np.testing.assert_allclose(found[0], loss, rtol=F32)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=F32), found[1], known)
    before = weights(quantize)["head"]["lora_magnitude"]
    assert not np.array_equal(known["head"]["lora_magnitude"], before)


def test_dropped_inputs_are_those_of_what_is_added_as_in_peft():
    """With W = 1, B = 0 and a magnitude of 2 the output is x + dropped(x)."""
    net, x = nn.Sequential([nn.Dense(16, use_bias=False)]), jnp.asarray(Y.reshape(-1, 16))
    lora = zerojax.Lora(r=2, dora=True, dropout=0.5)
    run = lambda params, x: net.apply({"params": params}, x)  # noqa: E731
    params = zerojax.add_lora({"layers_0": {"kernel": jnp.eye(16)}}, lora, jax.random.key(0), run, x)
    params["layers_0"]["lora_magnitude"] *= 2
    np.testing.assert_allclose(zerojax.with_lora(run, lora)(params, x), 2 * x, rtol=F32)
    added = zerojax.with_lora(run, lora, key=lambda x: jax.random.key(1))(params, x) - x
    is_dropped = np.abs(added) < F32
    assert 0.3 < np.mean(is_dropped) < 0.7
    np.testing.assert_allclose(np.where(is_dropped, 2 * x, added), 2 * x, rtol=1e-4)


def test_an_nnx_model_has_the_same_magnitudes_and_outputs():
    linear, x = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), Y.reshape(-1, 16)
    linear.bias[...] = jnp.arange(8.0)
    kernel, before = linear.kernel[...], linear(x)
    zerojax.add_lora(linear, zerojax.Lora(r=2, alpha=6, dora=True), jax.random.key(0))
    np.testing.assert_allclose(linear(x), before, atol=F32)
    linear.lora_magnitude[...] = 1.5 * linear.lora_magnitude[...]
    linear.lora_b[...] = 0.3 * jnp.ones((2, 8))
    both = kernel + 3 * linear.lora_a[...] @ linear.lora_b[...]
    scaled = 1.5 * jnp.linalg.norm(kernel, axis=0) / jnp.linalg.norm(both, axis=0) * both
    np.testing.assert_allclose(linear(x), x @ scaled + jnp.arange(8.0), atol=1e-4)


def test_an_adapter_of_no_share_is_off_with_its_magnitude():
    params = changed(weights())
    plain = {name: leaf for name, leaf in traverse_util.flatten_dict(params).items() if "lora" not in name[-1]}
    with linen.applied(lambda path: 0.0):
        found = apply(params, X)
    np.testing.assert_allclose(found, apply(traverse_util.unflatten_dict(plain), X), atol=F32)
    assert np.abs(found - zerojax.with_lora(apply, LORA)(params, X)).max() > 0.1
