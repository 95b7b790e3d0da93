"""Compares adapters in Linen models with merged kernels. This module tests zerojax.lora.linen."""

import functools

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

import zerojax
from zerojax import traces, train_state, tree
from zerojax.errors import UserError
from zerojax.lora import adapters, linen, targets

WIDTH = 64
X = arrays.normal(1, (16, 4, WIDTH))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(nn.gelu(nn.Dense(WIDTH, name="up")(x + y)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = Block(name=f"layer_{number}")(x)
        return nn.Dense(8, name="head")(x)


NET = Net()


def apply(params, x):
    return NET.apply({"params": params}, x)


@functools.cache
def init():
    """Returns the model's own weights and its linear modules."""
    params = jax.jit(NET.init)(jax.random.key(0), X)["params"]
    params = tree.map_with_path(lambda path, leaf: leaf + 0.1 * path.endswith("bias"), params)  # which begin as 0
    return params, linen.find(apply, params, X)


@functools.cache
def adapted(b=0.3, **fields):
    """Returns settings, weights whose adapters are not 0, and the adapters."""
    lora = zerojax.Lora(r=4, alpha=8, target_modules="all-linear", exclude_modules=("head",), **fields)
    params, linear = init()
    chosen = targets.choose(lora, linear)
    leaves = targets.flat(jax.jit(lambda params: adapters.add(params, chosen, jax.random.key(1)))(params))
    for number, path in enumerate(chosen.adapted):
        leaves[f"{path}/lora_b"] = b * arrays.normal(number, leaves[f"{path}/lora_b"].shape)
    return lora, tree.nested(leaves), chosen


def loss_fn(params, batch, state):
    return jnp.mean(apply(params, batch) ** 2)


def test_all_linear_modules_are_found_also_inside_flaxs_own():
    _, found = init()
    attention = {f"layer_0/attention/{name}" for name in ("query", "key", "value", "out")}
    assert attention <= found.keys() and {"layer_1/up", "layer_1/down", "head"} <= found.keys()
    assert found["layer_0/attention/out"] == targets.LinearModule("layer_0.attention.out", (2, 32, 64), 2)


def test_params_in_boxes_are_refused_with_the_call_that_takes_them_out():
    params = jax.tree.map(lambda leaf: nn.Partitioned(leaf, names=(None,) * leaf.ndim), init()[0])
    with pytest.raises(
        UserError, match=r"^add_lora: head/bias is in a Partitioned, .*; pass flax\.linen\.meta\.unbox\(params\)"
    ):
        zerojax.add_lora(params, zerojax.Lora(r=2), jax.random.key(0), apply, X)


@pytest.mark.parametrize("quantize", runs.cases(["none", "nf4", "fp8_block", "int8"], long=["int8"]))
def test_adapters_give_the_output_of_merged_kernels(quantize):
    lora, params, chosen = adapted(quantize=quantize)
    found = jax.jit(zerojax.with_lora(apply, lora))(params, X)
    plain = jax.jit(apply)
    expected = plain(adapters.merge(params, chosen), X)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(expected - plain(init()[0], X)).max() > 0.1


@pytest.mark.parametrize(
    "stage, quantize, reduce_dtype",
    [
        pytest.param(0, "none", jnp.float32, marks=runs.LONG),
        (3, "none", None),
        pytest.param(3, "fp8_block", None, marks=runs.LONG),
        pytest.param(3, "nf4", None, marks=runs.LONG),
        pytest.param(3, "nf4", jnp.float32, marks=runs.LONG),
    ],
)
def test_training_changes_adapters_as_plain_optax_does_and_nothing_else(stage, quantize, reduce_dtype):
    lora, params, _ = adapted(quantize=quantize)
    tx = optax.sgd(1.0)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    on, partition = zerojax.shard_train_state(
        state, mesh=zerojax.make_mesh(), stage=stage, min_size=64, trainable=lora.trainable
    )
    step = zerojax.make_train_step(
        zerojax.with_lora(loss_fn, lora), partition, blocks=r"layer_\d", reduce_dtype=reduce_dtype
    )
    new, metrics = step(on, jax.device_put(X, partition.batch_sharding))
    trained = {path: leaf for path, leaf in targets.flat(params).items() if "lora_" in path}

    def loss_of(trained):
        return zerojax.with_lora(loss_fn, lora)(tree.nested({**targets.flat(params), **trained}), X, None)

    loss, grads = jax.jit(jax.value_and_grad(loss_of))(trained)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for path, leaf in targets.flat(new.params).items():
        if path in trained:
            np.testing.assert_allclose(leaf, trained[path] - grads[path], rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(leaf, targets.flat(params)[path])


def test_no_gradient_of_a_frozen_kernel_is_computed():
    """The step has no matmul whose result has a frozen kernel's shape, and a full step has one for each."""
    lora, params, _ = adapted()

    def shapes(trainable, loss):
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
        on, partition = zerojax.shard_train_state(
            state, mesh=zerojax.make_mesh(devices=jax.devices()[:1]), stage=0, trainable=trainable
        )
        step = zerojax.make_train_step(loss, partition, blocks=r"layer_\d", reduce_dtype=jnp.float32)
        found = traces.equations(jax.make_jaxpr(step)(on, X).jaxpr)
        return [eqn.outvars[0].aval.shape for eqn in found if eqn.primitive.name == "dot_general"]

    wrapped = zerojax.with_lora(loss_fn, lora)
    assert (WIDTH, WIDTH) not in shapes(lora.trainable, wrapped)
    assert shapes("", wrapped).count((WIDTH, WIDTH)) >= 4


@runs.LONG
def test_dropout_draws_in_blocks_what_it_draws_without_them_and_only_with_a_key():
    lora, params, chosen = adapted(dropout=0.5)
    state = train_state.create(params, optax.sgd(1.0), jax.random.key(3))
    mesh, found = zerojax.make_mesh(), {}
    keyed = zerojax.with_lora(loss_fn, lora, key=lambda batch, state: jax.random.fold_in(state.rng, state.step))
    for name, blocks in (("blocks", r"layer_\d"), ("top", "")):
        on, partition = zerojax.shard_train_state(state, mesh=mesh, stage=3, min_size=64, trainable=lora.trainable)
        step = zerojax.make_train_step(keyed, partition, blocks=blocks, reduce_dtype=jnp.float32)
        new, metrics = step(on, jax.device_put(X, partition.batch_sharding))
        found[name] = metrics["loss"], targets.flat(new.params)
    np.testing.assert_allclose(found["blocks"][0], found["top"][0], rtol=1e-5)
    for path, leaf in found["top"][1].items():
        np.testing.assert_allclose(found["blocks"][1][path], leaf, rtol=1e-4, atol=1e-5)
    off = jax.jit(zerojax.with_lora(loss_fn, lora))(params, X, None)
    np.testing.assert_allclose(off, jax.jit(loss_fn)(adapters.merge(params, chosen), X, None), rtol=1e-5)
    assert abs(found["top"][0] - off) > 1e-3


def test_dropped_inputs_keep_their_mean():
    x = jnp.ones((1000, 100), jnp.bfloat16)
    found = linen.drop(jax.random.key(0), x, 0.25)
    assert abs((found == 0).mean() - 0.25) < 0.01 and abs(found.astype(jnp.float32).mean() - 1) < 0.01


def test_draws_of_calls_keys_and_neighbours_are_not_related():
    x = jnp.ones((256, 256))

    def kept(key, call):
        return np.asarray(linen.drop(jax.random.key(key), x, 0.5, call)).ravel() / 2

    drawn = [kept(key, call) for key in (0, 1) for call in (0, 1, 2**31)]
    drawn += [np.roll(drawn[0], shift) for shift in (1, 2, 256)]
    assert np.abs(np.corrcoef(drawn) - np.eye(len(drawn))).max() < 0.02  # 4 standard errors of 65,536 draws are 0.016


class Projection(nn.Module):
    """Does more than multiply."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (WIDTH, 8))
        return jax.nn.softmax(x @ kernel)


def test_an_adapter_of_a_module_that_does_more_than_multiply_is_merged_into_its_kernel():
    kernel, a, b = (arrays.normal(n, shape) for n, shape in enumerate([(WIDTH, 8), (WIDTH, 2), (2, 8)]))
    params, lora = {"kernel": kernel, "lora_a": a, "lora_b": b}, zerojax.Lora(r=2, alpha=1, dropout=0.1)

    def call(params, x):
        return Projection().apply({"params": params}, x)

    found = zerojax.with_lora(call, lora)(params, X)
    np.testing.assert_allclose(found, jax.nn.softmax(X @ (kernel + 0.5 * a @ b)), atol=1e-5)
    with pytest.raises(UserError, match=r"^lora.dropout: .* does more than multiply its input"):
        zerojax.with_lora(call, lora, key=lambda x: jax.random.key(0))(params, X)


@pytest.mark.parametrize("jitted", [pytest.param(False, marks=runs.LONG), True])
def test_adapters_of_modules_that_are_attributes_drop_too(jitted):
    net = nn.Sequential([nn.Dense(WIDTH), nn.gelu, nn.Dense(8)])
    lora = zerojax.Lora(r=4, alpha=8, dropout=0.5)

    def call(params, x):
        return net.apply({"params": params}, x)

    call = jax.jit(call) if jitted else call  # whose trace without dropout is not taken again
    params = zerojax.add_lora(net.init(jax.random.key(0), X)["params"], lora, jax.random.key(1), call, X)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    off = zerojax.with_lora(call, lora)(params, X)
    drawn = [
        zerojax.with_lora(call, lora, key=lambda x, seed=seed: jax.random.key(seed))(params, X) for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    for found in (drawn[0], drawn[2]):
        assert np.abs(found - off).max() > 0.1
    assert np.abs(drawn[0] - drawn[2]).max() > 0.1
    np.testing.assert_array_equal(zerojax.with_lora(call, lora)(params, X), off)
