"""Trains models and losses of many public architectures beside plain optax. This module tests zerojax.make_train_step as a whole."""

import functools
from typing import Any

import arrays
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax import nnx
from flax.training.train_state import TrainState

import zerojax

W, ROWS, LENGTH = 8, 8, 4
X = arrays.normal(1, (ROWS, LENGTH, W))
NOISE = arrays.normal(2, (ROWS, LENGTH, W))
TOKENS = arrays.integers(3, (ROWS, LENGTH), 0, W)
MASK = (np.arange(LENGTH) < 1 + np.arange(ROWS)[:, None] % LENGTH).astype(np.float32)
IMAGES = arrays.normal(4, (ROWS, 8, 8, 2))
BATCH = {"x": X, "noise": NOISE, "tokens": TOKENS, "mask": MASK, "images": IMAGES}
TOLERANCE = 2e-5  # of sums in another order, relative to the largest change of a weight in two steps


def linen(call, loss=None, of="x"):
    """Returns (params, loss) of a Linen model whose `call(x)` makes its modules."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return call(self, x)

    net = Net()

    def loss_fn(params, batch):
        y = net.apply({"params": params}, batch[of])
        return jnp.mean(jnp.square(y)) if loss is None else loss(y, batch)

    return lambda: (net.init(jax.random.key(0), BATCH[of])["params"], loss_fn)


def smoothed(logits, batch):
    labels = optax.smooth_labels(jax.nn.one_hot(batch["tokens"], W), 0.1)
    losses = optax.softmax_cross_entropy(logits, labels) * batch["mask"]
    return zerojax.Mean(losses.sum(), batch["mask"].sum())


def tied(self, tokens):
    embed = nn.Embed(W, W)
    return embed.attend(nn.gelu(nn.Dense(W)(embed(tokens))))


def vit(self, images):
    x = nn.Conv(W, (4, 4), (4, 4))(images).reshape(images.shape[0], -1, W)
    cls = jnp.broadcast_to(self.param("cls", nn.initializers.normal(), (1, 1, W)), (x.shape[0], 1, W))
    x = jnp.concatenate([cls, x], 1)
    x += self.param("position", nn.initializers.normal(), (1, x.shape[1], W))
    y = nn.LayerNorm()(x)
    x += nn.MultiHeadDotProductAttention(2)(y, y)
    return nn.Dense(3)(nn.LayerNorm()(x)[:, 0])


def unet(self, images):
    down = nn.relu(nn.Conv(4, (3, 3))(images))
    deep = nn.relu(nn.GroupNorm(2)(nn.Conv(8, (3, 3), (2, 2))(down)))
    up = nn.ConvTranspose(4, (2, 2), (2, 2))(deep)
    return nn.Conv(2, (1, 1))(jnp.concatenate([up, down], -1))


def mixer(self, x):
    y = nn.Dense(LENGTH)(nn.LayerNorm()(x).swapaxes(1, 2)).swapaxes(1, 2)
    return nn.Dense(W)(nn.gelu(nn.Dense(2 * W)(x + y)))


def vae(self, x):
    mean, log = jnp.split(nn.Dense(2 * W)(x), 2, -1)
    z = mean + jnp.exp(log / 2) * jnp.sin(7 * x)
    return nn.Dense(W)(z) - x, jnp.square(mean) + jnp.exp(log) - log


def moe(self, x):
    gates = jax.nn.softmax(nn.Dense(4)(x))
    top, which = jax.lax.top_k(gates, 2)
    experts = self.param("experts", nn.initializers.lecun_normal(), (4, W, W))
    routed = (jax.nn.one_hot(which, 4) * top[..., None]).sum(-2)
    return x + jnp.einsum("ble,eij,bli->blj", routed, experts, x)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))  # straight through


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


softsign.defjvp(lambda primals, tangents: (softsign(*primals), tangents[0] / (1 + jnp.abs(primals[0])) ** 2))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(W)(jnp.tanh(nn.Dense(W)(x))), None


def stack(module, length):
    return nn.scan(module, variable_axes={"params": 0}, split_rngs={"params": True}, length=length)


class Group(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return stack(nn.remat(Layer), 2)()(x, None)[0], None


def film(self, x):
    scale, shift = jnp.split(nn.Dense(2 * W)(x.mean(1, keepdims=True)), 2, -1)
    return nn.Dense(W)(x) * (1 + scale) + shift


def hyper(self, x):
    kernel = nn.Dense(W * W)(self.param("code", nn.initializers.normal(), (4,))).reshape(W, W)
    return jnp.tanh(x @ kernel)


def perceiver(self, x):
    latent = self.param("latent", nn.initializers.normal(), (2, W))
    return nn.MultiHeadDotProductAttention(2)(jnp.broadcast_to(latent, (x.shape[0], 2, W)), x)


def state_space(self, x):
    decay = jax.nn.sigmoid(self.param("decay", nn.initializers.normal(), (W,)))
    decays = jnp.broadcast_to(decay, x.shape)
    return jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decays, nn.Dense(W)(x)), axis=1)[1]


def linear_attention(self, x):
    q, k, v = (nn.elu(nn.DenseGeneral((2, 4))(x)) + 1 for _ in range(3))

    def add(state, step):
        state = state + jnp.einsum("bhi,bhj->bhij", step[1], step[2])
        return state, jnp.einsum("bhi,bhij->bhj", step[0], state)

    start = jnp.zeros((x.shape[0], 2, 4, 4))
    return jax.lax.scan(add, start, jax.tree.map(lambda a: a.swapaxes(0, 1), (q, k, v)))[1]


def flow(self, x):
    matrix = self.param("matrix", nn.initializers.orthogonal(), (W, W)) + 0.1 * jnp.eye(W)
    return jnp.square(x @ matrix) / 2 - jnp.linalg.slogdet(matrix)[1] / W


def ode(self, x):
    field = nn.Dense(W)
    return stack_free(lambda y: y + 0.1 * jnp.tanh(field(y)), x, 3)


def stack_free(step, x, count):
    for _ in range(count):
        x = step(x)
    return x


def wavenet(self, x):
    for dilation in (1, 2):
        y = nn.Conv(2 * W, (2,), kernel_dilation=(dilation,), padding="CAUSAL")(x)
        x += jnp.tanh(y[..., :W]) * jax.nn.sigmoid(y[..., W:])
    return x


def graph(self, x):
    nodes, edges = nn.Dense(W)(x), jnp.array([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
    gathered = jax.vmap(lambda h: jax.ops.segment_sum(h[edges[0]], edges[1], LENGTH))(nodes)
    return nn.relu(gathered) + nodes


def rotary(self, x):
    q, k, v = jnp.split(nn.Dense(3 * W, use_bias=False)(x), 3, -1)
    angle = jnp.arange(LENGTH)[:, None] / 10.0 ** jnp.arange(W // 2)

    def turned(y):
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)

    scores = jnp.einsum("bqd,bkd->bqk", turned(q), turned(k)) - jnp.triu(jnp.full((LENGTH, LENGTH), 1e9), 1)
    return jax.nn.softmax(scores) @ v


def branches(self, x):
    y = nn.Dense(W)(x)
    return jax.lax.cond(jnp.bool_(True), jnp.tanh, jnp.sin, jax.lax.switch(1, [jnp.abs, jnp.sin], y))


def mapped(self, x):
    kernel = self.param("kernel", nn.initializers.normal(), (W, W))
    return jax.lax.map(lambda row: jnp.tanh(row @ kernel), x)


def recurrent(cell):
    return linen(lambda self, x: nn.RNN(cell(W))(x))


def spectral(self, x):
    kernel = self.param("kernel", nn.initializers.lecun_normal(), (W, W))
    return x @ (kernel / jnp.linalg.norm(kernel, 2))


def contrastive(y, batch):
    emitted = y.mean(1) / jnp.linalg.norm(y.mean(1), axis=-1, keepdims=True)
    anchors = batch["noise"].mean(1)
    return -jnp.mean(jax.nn.log_sigmoid(jnp.sum(emitted * anchors, -1) / 0.1))


def penalized(net, params, x):
    return jnp.mean(jnp.square(jax.grad(lambda x: net(params, x).sum())(x)))


def plain(init, loss):
    """Returns (params, loss) of a model without a library."""
    return lambda: (init(jax.random.key(0)), loss)


def weights(*shapes):
    return lambda key: [
        0.3 * jax.random.normal(jax.random.fold_in(key, number), shape) for number, shape in enumerate(shapes)
    ]


def mlp(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def adversarial(params, batch):
    """The loss of a generator and that of a discriminator, each for its own weights."""
    fixed = jax.lax.stop_gradient
    fake = mlp(params["generator"], batch["noise"])
    of_generator = -mlp(fixed(params["discriminator"]), fake).mean()
    critic = mlp(params["discriminator"], fixed(fake)).mean() - mlp(params["discriminator"], batch["x"]).mean()
    return of_generator + critic


def meta(params, batch):
    """The loss after one step of an inner descent on other data (MAML)."""

    def inner(params, x):
        return jnp.mean(jnp.square(mlp(params, x) - x))

    def of_example(x, noise):
        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(inner)(params, x))
        return inner(adapted, noise)

    return jax.vmap(of_example)(batch["x"], batch["noise"]).mean()


def score(params, batch):
    """Sliced score matching, with a jvp inside."""
    value, slope = jax.jvp(functools.partial(mlp, params), (batch["x"],), (batch["noise"],))
    return jnp.mean(jnp.sum(batch["noise"] * slope, -1) + 0.5 * jnp.sum(value**2, -1))


def implicit(params, batch):
    """A fixed point found by a loop, differentiated by the implicit function theorem (a deep equilibrium)."""

    def step(y, x):
        return jnp.tanh(0.3 * y @ params[0] + x @ params[1])

    fixed = jax.lax.stop_gradient(
        jax.lax.fori_loop(0, 30, lambda _, y: step(y, batch["x"]), jnp.zeros_like(batch["x"]))
    )
    return jnp.mean(jnp.square(step(fixed, batch["x"])))


def ctc(y, batch):
    return jnp.mean(optax.ctc_loss(y, jnp.zeros(y.shape[:2]), batch["tokens"][:, :2], jnp.zeros((y.shape[0], 2))))


def nested(params, batch):
    layers, (head, scales) = params["layers"], params["head"]
    x = batch["x"]
    for layer in layers:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(jnp.square(x @ head * scales[0]))


def of_nnx(make, call=lambda model, batch: model(batch["x"])):
    def made():
        graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
        return params, lambda params, batch: jnp.mean(
            jnp.square(call(nnx.merge(graph, params, rest, copy=True), batch))
        )

    return made


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(W, W, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(W, W, rngs=rngs), nnx.LayerNorm(W, rngs=rngs)])
        self.again = self.layers[0]

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in (*self.layers, self.again):
            x = jnp.tanh(layer(x))
        return self.embed.attend(x)


def nnx_stack(rngs):
    return nnx.Dict(layers=nnx.vmap(lambda rngs: nnx.Linear(W, W, rngs=rngs))(rngs.split(3)))


def run_stack(model, batch):
    return nnx.scan(lambda x, layer: (jnp.tanh(layer(x)), None))(batch["x"], model.layers)[0]


def of_equinox(make, call=lambda model, x: jax.vmap(jax.vmap(model))(x)):
    def made():
        params, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)

        def loss_fn(params, batch):
            return jnp.mean(jnp.square(call(eqx.combine(params["net"], static), batch["x"])))

        return {"net": params}, loss_fn

    return made


def run_gru(cell, x):
    def of_example(x):
        return jax.lax.scan(lambda h, row: (cell(row, h),) * 2, jnp.zeros(W), x)[1]

    return jax.vmap(of_example)(x)


MODELS: dict[str, Any] = {
    "tied embedding, smoothed labels, ragged mask": linen(tied, smoothed, "tokens"),
    "ViT": linen(vit, of="images"),
    "U-Net": linen(unet, of="images"),
    "MLP-Mixer": linen(mixer),
    "VAE": linen(vae, lambda y, batch: jnp.mean(y[0] ** 2) + 0.1 * jnp.mean(y[1])),
    "mixture of experts": linen(moe),
    "custom_vjp": linen(lambda self, x: clipped(nn.Dense(W)(x))),
    "custom_jvp": linen(lambda self, x: softsign(nn.Dense(W)(x))),
    "scan in scan with remat": linen(lambda self, x: stack(Group, 2)()(x, None)[0]),
    "FiLM": linen(film),
    "hypernetwork": linen(hyper),
    "Perceiver": linen(perceiver),
    "state space": linen(state_space),
    "linear attention": linen(linear_attention),
    "flow": linen(flow),
    "ODE": linen(ode),
    "WaveNet": linen(wavenet),
    "graph": linen(graph),
    "RoPE": linen(rotary),
    "branches": linen(branches),
    "GRU": recurrent(nn.GRUCell),
    "LSTM": recurrent(nn.OptimizedLSTMCell),
    "bidirectional": linen(lambda self, x: nn.Bidirectional(nn.RNN(nn.SimpleCell(W)), nn.RNN(nn.SimpleCell(W)))(x)),
    "spectral norm": linen(spectral),
    "weight norm": linen(lambda self, x: nn.WeightNorm(nn.Dense(W))(x)),
    "local convolution": linen(lambda self, x: nn.ConvLocal(W, (2,))(x)),
    "einsum": linen(lambda self, x: nn.Einsum((W, 2, 4), "bld,dhe->blhe")(x)),
    "FNet": linen(lambda self, x: nn.Dense(W)(jnp.fft.fft2(nn.Dense(W)(x)).real)),
    "contrastive": linen(lambda self, x: nn.Dense(W)(x), contrastive),
    "CTC": linen(lambda self, x: nn.Dense(W)(x), ctc),
    "boxed weights": linen(
        lambda self, x: nn.Dense(W, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "data")))(x)
    ),
    "top-k pooling": linen(lambda self, x: jax.lax.top_k(nn.Dense(W)(x).swapaxes(1, 2), 2)[0]),
    "lax.map": linen(mapped),
    "adversarial": plain(
        lambda key: {name: weights((W, W), (W, W))(key) for name in ("generator", "discriminator")}, adversarial
    ),
    "MAML": plain(weights((W, W), (W, W)), meta),
    "score matching": plain(weights((W, W), (W, W)), score),
    "gradient penalty": plain(weights((W, W), (W, W)), lambda params, batch: penalized(mlp, params, batch["x"])),
    "deep equilibrium": plain(weights((W, W), (W, W)), implicit),
    "dicts, lists and tuples": plain(
        lambda key: {
            "layers": [{"w": w, "b": jnp.zeros(W)} for w in weights((W, W), (W, W))(key)],
            "head": (jnp.eye(W), (jnp.float32(2.0),)),
        },
        nested,
    ),
    "NNX MLP": of_nnx(lambda rngs: nnx.Sequential(nnx.Linear(W, W, rngs=rngs), jnp.tanh, nnx.Linear(W, W, rngs=rngs))),
    "NNX tied": of_nnx(Tied, lambda model, batch: model(batch["tokens"])),
    "NNX attention": of_nnx(lambda rngs: nnx.MultiHeadAttention(2, W, decode=False, rngs=rngs)),
    "NNX GRU": of_nnx(lambda rngs: nnx.RNN(nnx.GRUCell(W, W, rngs=rngs))),
    "NNX convolution": of_nnx(lambda rngs: nnx.Conv(2, 4, (3, 3), rngs=rngs), lambda model, batch: model(batch["images"])),
    "NNX stack": of_nnx(nnx_stack, run_stack),
    "NNX LoRA": of_nnx(lambda rngs: nnx.LoRALinear(W, W, lora_rank=2, rngs=rngs)),
    "equinox MLP": of_equinox(lambda key: eqx.nn.MLP(W, W, W, 2, key=key)),
    "equinox GRU": of_equinox(lambda key: eqx.nn.GRUCell(W, W, key=key), run_gru),
    "equinox attention": of_equinox(
        lambda key: eqx.nn.MultiheadAttention(2, W, key=key), lambda model, x: jax.vmap(lambda row: model(row, row, row))(x)
    ),
}  # fmt: skip

WAYS = [
    {"stage": 3, "by_device": True},
    {"stage": 3, "by_device": True, "grad_accum": 2},
    {"stage": 2, "grad_accum": 2},
    {"stage": 3, "by_device": True, "offload": "host"},
    {"stage": 1, "by_device": True},
    {"stage": 3},
    {"stage": 3, "by_device": True, "remat": "full"},
    {"stage": 0, "by_device": True, "grad_accum": 2},
]
CASES = [(name, way) for number, name in enumerate(MODELS) for way in (number % 8, (number + 3) % 8)]


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(*case, marks=() if number % 33 == 1 else runs.LONG) for number, case in enumerate(CASES)],
)
def test_two_steps_are_those_of_optax_on_one_device(name, way):
    params, loss_fn = MODELS[name]()
    tx, how = optax.sgd(0.1, momentum=0.9), dict(WAYS[way])
    stage, offload, passes = how.pop("stage"), how.pop("offload", ""), how.get("grad_accum", 1)
    reduce_dtype = jnp.float32 if how.pop("by_device", False) else None

    def value(params):
        loss = loss_fn(params, BATCH)
        return loss.total / loss.weight if isinstance(loss, zerojax.Mean) else loss

    @jax.jit
    def by_hand(params, opt_state):
        loss, grads = jax.value_and_grad(value)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    mesh = zerojax.make_mesh(devices=jax.devices()[:2])
    kept = {"offload": offload} if offload else {}
    on, part = zerojax.shard_train_state(state, mesh=mesh, stage=stage, min_size=8, **kept)
    step = zerojax.make_train_step(
        lambda params, batch, _: loss_fn(params, batch), part, reduce_dtype=reduce_dtype, donate=False, **how
    )
    batch = jax.tree.map(lambda x: x.reshape(passes, -1, *x.shape[1:]), BATCH) if passes > 1 else BATCH
    mine, opt_state = params, tx.init(params)
    for _ in range(2):
        mine, opt_state, loss = by_hand(mine, opt_state)
        on, metrics = step(on, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5, atol=1e-6)
    changes = jax.tree.map(lambda new, old: np.abs(np.asarray(new) - np.asarray(old)).max(), mine, params)
    largest = max(jax.tree.leaves(changes))
    assert largest > 1e-4
    for found, wanted in zip(jax.tree.leaves(on.params), jax.tree.leaves(mine), strict=True):
        np.testing.assert_allclose(found, wanted, atol=max(TOLERANCE * largest, 1e-6))
