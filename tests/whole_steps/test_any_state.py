"""Compares unusual models, states, batches and optimizers with a plain optax loop on one device. This module tests whole steps."""

import functools
from typing import Any

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax

WIDTH, ROWS, STEPS = 12, 16, 2  # 12 does not divide by 8
ROUNDING = 3e-6  # the same float32 terms, summed in another order, through two steps of adam
AXES = ("replica", "data")
X = arrays.normal(1, (ROWS, WIDTH))
MASK = (np.arange(ROWS) % 5 > 1).astype(np.float32)  # unequal over devices

# (stage, with blocks, reduce_dtype, indivisible): every pair of settings occurs.
SETTINGS = [
    (0, False, jnp.float32, "whole"),
    (0, True, None, "whole"),
    (3, False, None, "pad"),
    (3, True, jnp.float32, "pad"),
    (3, True, None, "whole"),
    (3, False, jnp.float32, "whole"),
]


class Layer(nn.Module):
    boxed: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.lecun_normal()
        init = nn.with_partitioning(init, ("embed", "mlp")) if self.boxed else init
        return x + nn.tanh(nn.Dense(WIDTH, kernel_init=init)(x)), None


class Stacked(nn.Module):
    """Layers under nn.scan."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scanned(name="layer")(x, None)[0]


class Unrolled(nn.Module):
    boxed: bool = False

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x, _ = Layer(self.boxed, name=f"layer_{number}")(x)
        return x


class Averaging(TrainState):
    """Keeps a moving average of its weights."""

    ema_params: Any = None

    def apply_gradients(self, *, grads, **kwargs):
        new = super().apply_gradients(grads=grads, **kwargs)
        average = jax.tree.map(lambda old, param: 0.9 * old + 0.1 * param, self.ema_params, new.params)
        return new.replace(ema_params=average)


class Counting(TrainState):
    seen: Any = None
    right: Any = None


class WithVariables(TrainState):
    rest: Any = None


def of_linen(model, state_type=TrainState, **fields):
    """Returns make(by_device, on_mesh) -> (state, loss, batch) for a mean of squares."""

    def loss_fn(params, batch, state):
        return jnp.mean(model.apply({"params": params}, batch["x"]) ** 2)

    def make(by_device, on_mesh=True):
        params = model.init(jax.random.key(0), X)["params"]
        own = {name: value(params) for name, value in fields.items()}
        return state_type.create(apply_fn=None, params=params, tx=optax.adam(1e-2), **own), loss_fn, {"x": X}

    return make


def masked_and_counted(by_device, on_mesh=True):
    """A weighted mean, class weights that count no examples, and counters."""
    model = Unrolled()

    def loss_fn(params, batch, state):
        logits = model.apply({"params": params}, batch["x"])
        terms = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        weights = batch["class_weights"][batch["y"]] * batch["mask"]
        right = state.right + jnp.sum(logits.argmax(-1) == batch["y"])
        fields = {"seen": state.seen + batch["x"].shape[0], "right": right}
        return zerojax.Mean(jnp.sum(weights * terms), weights.sum()), {"state": fields}

    params = model.init(jax.random.key(0), X)["params"]
    tx = optax.adam(1e-2)
    state = Counting.create(apply_fn=None, params=params, tx=tx, seen=jnp.int32(0), right=jnp.int32(0))
    weights = jnp.linspace(0.1, 3.0, ROWS)
    return state, loss_fn, {"x": X, "y": jnp.arange(ROWS) % WIDTH, "mask": MASK, "class_weights": weights}


class Model(nnx.Module):
    def __init__(self, by_device, on_mesh):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, axis_name=AXES if by_device and on_mesh else None, rngs=rngs)
        # Devices draw their own masks; without reduce_dtype all draws are those of one device.
        self.dropout = nnx.Dropout(0.0 if by_device else 0.5, rngs=rngs)


def of_nnx(by_device, on_mesh=True):
    graph, params, rest = nnx.split(Model(by_device, on_mesh), nnx.Param, ...)

    def loss_fn(params, batch, state):
        model = nnx.merge(graph, params, state.rest)
        loss = jnp.mean(model.dropout(model.norm(jnp.tanh(model.linear(batch["x"])))) ** 2 * batch["x"])
        return loss, {"state": {"rest": nnx.state(model, nnx.Not(nnx.Param))}}

    state = WithVariables.create(apply_fn=None, params=params, tx=optax.adam(1e-2), rest=rest)
    return state, loss_fn, {"x": X}


def of_equinox(by_device, on_mesh=True):
    equinox = pytest.importorskip("equinox")
    net = equinox.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))
    arrays, rest = equinox.partition(net, equinox.is_array)

    def loss_fn(params, batch, state):
        return jnp.mean(jax.vmap(equinox.combine(params["net"], rest))(batch["x"]) ** 2)

    return TrainState.create(apply_fn=None, params={"net": arrays}, tx=optax.adam(1e-2)), loss_fn, {"x": X}


# name -> (make(by_device, on_mesh) -> (state, loss, batch), blocks)
CASES: dict[str, tuple[Any, str]] = {
    "nn.scan": (of_linen(Stacked()), "layer"),
    "nn.scan of nn.remat": (of_linen(Stacked(True)), "layer"),
    "boxed": (of_linen(Unrolled(True)), r"layer_\d"),
    "an average of the weights": (of_linen(Unrolled(), Averaging, ema_params=lambda params: params), r"layer_\d"),
    "masks and counts": (masked_and_counted, r"layer_\d"),
    "NNX with dropout and batch norm": (of_nnx, ""),
    "Equinox": (of_equinox, ""),
}
SPECS = [("class_weights", P())]


@functools.cache
def truth(name, by_device):
    """Returns the losses and the last state of a plain loop on one device."""
    state, loss_fn, batch = CASES[name][0](by_device, on_mesh=False)
    losses = []
    for _ in range(STEPS):

        def of_params(params, state=state):
            state = jax.tree.map(lambda leaf: leaf, state)  # NNX variables belong to one trace
            found = loss_fn(params, batch, state)
            loss, aux = found if isinstance(found, tuple) else (found, {})
            return (loss.total / loss.weight if isinstance(loss, zerojax.Mean) else loss), aux

        (loss, aux), grads = jax.jit(jax.value_and_grad(of_params, has_aux=True))(state.params)
        state = state.replace(**aux.get("state", {})).apply_gradients(grads=grads)
        losses.append(float(loss))
    return losses, state


# Every setting, and every state with blocks where it has any. That with masks and counts has the most to get wrong.
DEFAULT = {
    "masks and counts": (0, 1, 2, 3),
    "NNX with dropout and batch norm": (5,),
    "Equinox": (5,),
    "boxed": (4,),
    "nn.scan of nn.remat": (),
}
RUNS = [
    pytest.param(name, *setting, marks=() if number in DEFAULT.get(name, (3,)) else runs.LONG)
    for name, (_, blocks) in CASES.items()
    for number, setting in enumerate(SETTINGS)
    if blocks or not setting[1]
]


@pytest.mark.parametrize(("name", "stage", "with_blocks", "reduce_dtype", "indivisible"), RUNS)
def test_a_step_is_that_of_a_plain_loop(name, stage, with_blocks, reduce_dtype, indivisible):
    make, blocks = CASES[name]
    state, loss_fn, batch = make(reduce_dtype is not None)
    scanned = [("layer/", P(None, "data"))] if "scan" in name else []
    devices = jax.devices()[: 4 if scanned else 8]  # 12 divides by 4: an override is final
    mesh = zerojax.make_mesh(devices=devices)
    options = {"overrides": scanned, "min_size": 8, "indivisible": indivisible}
    on, part = zerojax.shard_train_state(state, mesh=mesh, stage=stage, **options)
    step = zerojax.make_train_step(
        loss_fn,
        part,
        blocks=blocks if with_blocks else "",
        reduce_dtype=reduce_dtype,
        batch_specs=SPECS if "masks" in name else (),
    )
    losses, expected = truth(name, reduce_dtype is not None)
    for loss in losses:
        on, metrics = step(on, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5, atol=1e-7)
    assert jax.tree.map(lambda leaf: leaf.sharding, on) == part.shardings
    found = dict(jax.tree_util.tree_leaves_with_path(zerojax.unpad(on, part)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            assert (found[path] == leaf).all()
        else:
            np.testing.assert_allclose(found[path], leaf, atol=ROUNDING, rtol=1e-5, err_msg=str(path))


def test_a_layer_of_nn_scan_is_gathered_inside_the_scan():
    """A gathered array has the shape of a layer, forward and backward, and none has that of the stack."""
    state, loss_fn, batch = CASES["nn.scan"][0](True)
    options = {"overrides": [("layer/", P(None, "data"))]}
    on, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(devices=jax.devices()[:4]), stage=3, **options)
    step = zerojax.make_train_step(loss_fn, part, blocks="layer", reduce_dtype=jnp.float32)
    text = step.lower(on, batch).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    assert gathers and all(f"-> tensor<{WIDTH}" in line for line in gathers), gathers


@pytest.mark.parametrize("stacked", ["scan", "vmap"])
def test_a_stack_sharded_by_its_layers_is_refused_with_the_override_that_helps(stacked):
    stack = {"layer": {"Dense_0": {"kernel": jnp.ones((8, WIDTH, WIDTH)), "bias": jnp.ones((8, WIDTH))}}}

    class Eight(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"variable_axes": {"params": 0}, "split_rngs": {}}
            if stacked == "scan":
                return nn.scan(Layer, length=8, **axes)(name="layer")(x, None)[0]
            return nn.vmap(Layer, axis_size=8, in_axes=None, **axes)(name="layer")(x, None)[0]

    state = TrainState.create(apply_fn=None, params=stack, tx=optax.sgd(1.0))
    on, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8)
    for reduce_dtype in (None, jnp.float32):
        step = zerojax.make_train_step(
            lambda p, b, s: jnp.mean(Eight().apply({"params": p}, b)), part, blocks="layer", reduce_dtype=reduce_dtype
        )
        with pytest.raises(
            zerojax.UserError, match=r'its first dim, which counts the layers.*overrides=\[\("layer/", PartitionSpec'
        ):
            jax.eval_shape(step, on, X)


@jax.custom_vjp
def observed(x, largest):
    """Returns x; the gradient of `largest` is its new value, as that of flax's statistics of fp8 matmuls."""
    return x


def observe_backward(residuals, cotangent):
    x, largest = residuals
    return cotangent, jnp.roll(largest, -1).at[0].set(jnp.abs(x).max())


observed.defvjp(lambda x, largest: (x, (x, largest)), observe_backward)


@pytest.mark.parametrize(
    ("reduce_dtype", "passes"),
    [
        (None, 2),
        (jnp.float32, 1),
        pytest.param(None, 1, marks=runs.LONG),
        pytest.param(jnp.float32, 2, marks=runs.LONG),
    ],
)
def test_weights_that_their_gradient_overwrites_are_neither_clipped_nor_averaged_nor_cast(reduce_dtype, passes):
    kernel, history = arrays.normal(0, (WIDTH, WIDTH)), jnp.linspace(0.1, 0.3, 16)
    params = {"params": {"kernel": kernel}, "_overwrite_with_gradient": {"largest": history}}

    def loss_fn(params, batch, state):
        seen = observed(batch, params["_overwrite_with_gradient"]["largest"])
        return 100 * jnp.mean(jnp.tanh(seen @ params["params"]["kernel"]) ** 2)

    clip = optax.clip_by_global_norm(0.5)
    plain = TrainState.create(apply_fn=None, params=params, tx=optax.chain(clip, optax.sgd(1.0)))
    plain = plain.apply_gradients(grads=jax.grad(loss_fn)(params, X, None))
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8, indivisible="pad")
    step = zerojax.make_train_step(
        loss_fn, part, clip_norm=0.5, reduce_dtype=reduce_dtype, grad_accum=passes, compute_dtype=jnp.float32
    )
    state, _ = step(state, X if passes == 1 else X.reshape(2, 8, WIDTH))
    found = zerojax.unpad(state, part).params
    np.testing.assert_allclose(found["params"]["kernel"], plain.params["params"]["kernel"], atol=ROUNDING)
    expected = plain.params["_overwrite_with_gradient"]["largest"]
    np.testing.assert_array_equal(found["_overwrite_with_gradient"]["largest"], expected)
    assert np.abs(kernel - found["params"]["kernel"]).max() > 1e-3 and float(expected[0]) > 2


@pytest.mark.parametrize(
    ("every", "options"),
    [
        (1, {"grad_accum": 2}),
        (2, {"reduce_dtype": jnp.float32}),
        pytest.param(1, {"reduce_dtype": jnp.float32}, marks=runs.LONG),
        pytest.param(2, {"grad_accum": 2}, marks=runs.LONG),
    ],
)
def test_16_bit_weights_keep_the_dtypes_of_their_moments(options, every):
    """Sums over devices and passes are float32; optax takes the moments' dtype from the gradients, and MultiSteps refuses a mixture."""
    params = {"w": jnp.ones((16, WIDTH), jnp.bfloat16)}
    tx = optax.adam(1e-2) if every == 1 else optax.MultiSteps(optax.adam(1e-2), every)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8)
    step = zerojax.make_train_step(lambda p, b, s: jnp.mean((b @ p["w"].T) ** 2), part, donate=False, **options)
    batch = X if "reduce_dtype" in options else X.reshape(2, 8, WIDTH)
    after, _ = step(state, batch)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)
