"""Checks what one's own model must be given with. This module tests zerojax.lora.add."""

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.errors import UserError
from zerojax.lora import adapters, linen, targets


def test_linen_params_need_the_function_that_calls_the_model():
    with pytest.raises(UserError, match=r"^add_lora: the modules of Linen params are found by calling the model"):
        zerojax.add_lora({"kernel": jnp.ones((2, 2))}, zerojax.Lora(), jax.random.key(0))


def test_a_module_whose_kernel_is_elsewhere_in_the_params_gets_no_adapter_that_nothing_would_run():
    net = nn.Dense(4, name="out")
    params = {"backbone": net.init(jax.random.key(0), jnp.ones((2, 8)))["params"]}
    apply = lambda params, x: nn.Sequential([net]).apply({"params": {"layers_0": params["backbone"]}}, x)  # noqa: E731
    with pytest.raises(
        UserError, match=r"^add_lora: \w+ is called, and the params have no \w+/kernel: function= calls"
    ):
        zerojax.add_lora(params, zerojax.Lora(target_modules=".*"), jax.random.key(1), apply, jnp.ones((2, 8)))


def test_params_whose_names_hold_a_slash_keep_them():
    net = nn.Sequential([nn.WeightNorm(nn.Dense(4)), nn.Dense(3)])
    x = jnp.ones((2, 8))
    params = net.init(jax.random.key(0), x)["params"]
    adapted = zerojax.add_lora(
        params, zerojax.Lora(r=2), jax.random.key(1), lambda params, x: net.apply({"params": params}, x), x
    )
    before, after = ({path for path, _ in jax.tree_util.tree_leaves_with_path(tree)} for tree in (params, adapted))
    assert before < after and sum("/" in str(path) for path in before) == 1


WIDTH, LAYERS = 64, 2
X = arrays.normal(1, (16, WIDTH))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(WIDTH, name="out")(jnp.tanh(nn.DenseGeneral((4, 16), name="up")(x)).reshape(x.shape)), None


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(LAYERS):
            x, _ = Layer(name=f"layer_{number}")(x)
        return x


class Scanned(nn.Module):
    streams: tuple = ()

    @nn.compact
    def __call__(self, x):
        split = dict.fromkeys(("params", *self.streams), True)
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs=split, length=LAYERS)
        return stack(name="layers")(x, None)[0]


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.vmap(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=LAYERS)
        return stack(name="layers")(x)[0].sum(0)


class Separate(nn.Module):
    """What `Mapped` does, without a stack."""

    @nn.compact
    def __call__(self, x):
        return sum(Layer(name=f"layer_{number}")(x)[0] for number in range(LAYERS))


def unstacked(params):
    return {f"layer_{n}": jax.tree.map(lambda leaf, n=n: leaf[n], params["layers"]) for n in range(LAYERS)}


def loss_of(net):
    return lambda params, x, _=None: jnp.mean(net.apply({"params": params}, x) ** 2)


@pytest.mark.parametrize(
    ("net", "plain", "quantize"),
    [pytest.param(Scanned(), Unrolled(), "nf4", marks=pytest.mark.long), (Mapped(), Separate(), "none")],
)
def test_adapters_of_a_stack_are_those_of_its_layers(net, plain, quantize):
    lora = zerojax.Lora(r=4, alpha=8, quantize=quantize)
    params = net.init(jax.random.key(0), X)["params"]
    adapted = zerojax.add_lora(params, lora, jax.random.key(1), loss_of(net), X)
    a, b = (adapted["layers"]["up"][name] for name in ("lora_a", "lora_b"))
    assert (a.shape, b.shape) == ((LAYERS, WIDTH, 4), (LAYERS, 4, WIDTH)) and not b.any()
    assert jnp.unique(a).size == a.size and 0.9 / 8 < jnp.abs(a).max() <= 1 / 8  # bounds of one layer's inputs
    adapted = jax.tree.map(lambda leaf: leaf if leaf.any() else 0.1 * arrays.normal(2, leaf.shape), adapted)
    alone = unstacked(adapted)
    own = zerojax.add_lora(unstacked(params), lora, jax.random.key(1), loss_of(plain), X)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), own) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), alone
    )
    if quantize == "nf4":
        np.testing.assert_array_equal(
            own["layer_1"]["up"]["kernel"]["nf4"], adapted["layers"]["up"]["kernel"]["nf4"][1]
        )
    loss, wanted = jax.value_and_grad(zerojax.with_lora(loss_of(plain), lora), allow_int=True)(alone, X)

    state = TrainState.create(apply_fn=None, params=adapted, tx=optax.sgd(1.0))
    on, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8, trainable=lora.trainable)
    step = zerojax.make_train_step(zerojax.with_lora(loss_of(net), lora), part, reduce_dtype=jnp.float32)
    after, metrics = step(on, X)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for path, leaf in targets.flat(unstacked(after.params)).items():
        grad = targets.flat(wanted)[path] if "lora" in path else 0
        np.testing.assert_allclose(leaf, targets.flat(alone)[path] - grad, rtol=1e-4, atol=1e-5, err_msg=path)

    chosen = targets.choose(lora, linen.find(loss_of(net), params, X), targets.flat(params))
    merged = adapters.merge(adapted, chosen)
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(loss_of(net)(merged, X), loss, rtol=1e-4)


def test_dropout_in_a_stack_draws_for_each_layer_or_is_refused():
    lora, key = zerojax.Lora(r=4, alpha=8, dropout=0.5), lambda x: jax.random.key(5)
    params = Scanned().init(jax.random.key(0), X)["params"]
    adapted = zerojax.add_lora(params, lora, jax.random.key(1), loss_of(Scanned()), X)
    adapted = jax.tree.map(lambda leaf: leaf if leaf.any() else jnp.ones(leaf.shape), adapted)
    with pytest.raises(UserError, match=r'^lora.dropout: layers/up is in a stack .* split_rngs=\{"lora": True\}'):
        zerojax.with_lora(loss_of(Scanned()), lora, key=key)(adapted, X)
    split = loss_of(Scanned(streams=("lora",)))
    assert zerojax.with_lora(split, lora, key=key)(adapted, X) != zerojax.with_lora(split, lora)(adapted, X)


def test_kernels_that_are_stacked_behind_their_first_dim_are_refused():
    stack = nn.scan(Layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=LAYERS)()
    params = stack.init(jax.random.key(0), X, None)["params"]

    def call(params, x):
        return stack.apply({"params": params}, x, None)[0]

    with pytest.raises(
        UserError, match=r"^add_lora: up is called with a kernel of shape \(64, 4, 16\), and its weights are \(64, 2"
    ):
        zerojax.add_lora(params, zerojax.Lora(), jax.random.key(0), call, X)


def test_adapters_of_an_nnx_stack_are_those_of_its_layers():
    @nnx.vmap
    def create(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    @nnx.scan
    def run(x, layer):
        return jnp.tanh(layer(x)), None

    def losses(model):
        return jnp.mean(run(X, model)[0] ** 2)

    def adapted(**fields):
        lora = zerojax.Lora(r=4, alpha=8, **fields)
        model = zerojax.add_lora(nnx.Dict(layers=create(nnx.Rngs(0).split(LAYERS))), lora, jax.random.key(1)).layers
        model.lora_b[...] = arrays.normal(2, model.lora_b.shape)
        return model

    model = adapted()
    assert model.lora_a.shape == (LAYERS, WIDTH, 4)
    y = X
    for number in range(LAYERS):
        merged = model.kernel[number] + 2.0 * model.lora_a[number] @ model.lora_b[number]
        y = jnp.tanh(y @ merged + model.bias[number])
    np.testing.assert_allclose(losses(model), jnp.mean(y**2), rtol=1e-4)
    assert abs(losses(adapted(quantize="nf4")) - jnp.mean(y**2)) < 0.1
    assert abs(losses(adapted(dropout=0.5)) - jnp.mean(y**2)) > 1e-4
