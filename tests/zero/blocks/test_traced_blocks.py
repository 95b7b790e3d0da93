"""Checks that each step of a scan gathers its own layer, whoever wrote the scan. This module tests zerojax.zero.blocks.traced_blocks."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge

from zerojax import mesh as mesh_lib
from zerojax import train_state
from zerojax.plan import targets
from zerojax.zero import shard_state, stages, step
from zerojax.zero.weights import layer_stacks

LAYERS, WIDTH = 8, 64
# Sums over devices in another order, over five steps.
LAST_PLACES = 1e-5


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, name="down")(
            nn.gelu(nn.Dense(2 * WIDTH, name="up")(nn.RMSNorm(name="norm")(x)))
        ), None


class LinenScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return nn.Dense(16, name="out")(layers(name="layers")(x, None)[0])


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxScan(nnx.Module):
    def __init__(self, rngs, is_remat=False):
        self.is_remat, self.out = is_remat, nnx.Linear(WIDTH, 16, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxLayer, in_axes=(0,), out_axes=0))(rngs)

    def __call__(self, x):
        body = lambda x, layer: layer(x)  # noqa: E731
        body = nnx.remat(body) if self.is_remat else body
        return self.out(nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers))


class NnxList(nnx.Module):
    def __init__(self, rngs):
        self.out, self.layers = (
            nnx.Linear(WIDTH, 16, rngs=rngs),
            nnx.List([NnxLayer(rngs) for _ in range(LAYERS)]),
        )

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def bridged(key):
    model = bridge.ToNNX(LinenScan())
    model.lazy_init(jnp.zeros((1, WIDTH)), rngs=nnx.Rngs(key))
    return model


def loss_of(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def of_nnx(make):
    graph, _, rest = nnx.split(make(jax.random.key(0)), nnx.Param, ...)
    init = lambda key: nnx.state(make(key), nnx.Param)  # noqa: E731
    return init, lambda params, batch, state: loss_of(nnx.merge(graph, params, rest)(batch["x"]), batch)


def of_functions():
    def layer(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (WIDTH, 2 * WIDTH)) / 8,
            "down": jax.random.normal(down, (2 * WIDTH, WIDTH)) / 11,
        }

    def init(key):
        out = jax.random.normal(key, (WIDTH, 16)) / 8
        return {"layers": jax.vmap(layer)(jax.random.split(key, LAYERS)), "out": out}

    @jax.jit
    def loss(params, batch, state):
        body = lambda x, own: (x + jax.nn.gelu(x @ own["up"]) @ own["down"], None)  # noqa: E731
        # Weights are cast all together, as mixed precision by hand does.
        layers = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params["layers"])
        return loss_of(jax.lax.scan(body, batch["x"], layers)[0] @ params["out"], batch)

    return init, loss


FORMS = {
    "ToNNX of nn.scan(nn.remat)": lambda: of_nnx(bridged),
    "nnx.scan": lambda: of_nnx(lambda key: NnxScan(nnx.Rngs(key))),
    "nnx.scan(nnx.remat)": lambda: of_nnx(lambda key: NnxScan(nnx.Rngs(key), is_remat=True)),
    "jax.lax.scan": of_functions,
}


def batch():
    x = jax.random.normal(jax.random.key(1), (64, WIDTH))
    return {"x": x, "y": jnp.argmax(x[:, :16], -1)}


def compiled(form, devices=8, **how):
    """Returns a state, a train step and its compiled program."""
    init_params, loss_fn = form

    def init(key):
        return train_state.TrainState.create(apply_fn=None, params=init_params(key), tx=optax.adamw(1e-3))

    mesh = mesh_lib.make_mesh(data=devices, devices=jax.devices()[:devices])
    stage = 3 if devices > 1 else 0
    state, partition = shard_state.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage)
    train_step = step.make_train_step(loss_fn, partition, **how)
    return state, train_step


def losses(state, train_step):
    found = []
    for _ in range(5):
        state, metrics = train_step(state, batch())
        found.append(float(metrics["loss"]))
    return found


def gathered(program):
    """Returns the shapes of a program's gathers."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\][^=]*? all-gather(?:-start)?\(", program.as_text())
    return {tuple(map(int, shape.split(","))) for shape in found}


@pytest.mark.parametrize("how", [{"blocks": "layers"}, {}], ids=["blocks", "no blocks"])
@pytest.mark.parametrize("reduce_dtype", [jnp.float32, None], ids=["explicit", "by the compiler"])
@pytest.mark.parametrize("name", FORMS)
def test_a_scan_gathers_a_layer_a_step_and_its_losses_are_those_of_one_device(name, reduce_dtype, how):
    state, train_step = compiled(FORMS[name](), reduce_dtype=reduce_dtype, **how)
    program = train_step.lower(state, batch()).compile()
    shapes = gathered(program)
    assert any(set(shape) >= {WIDTH, 2 * WIDTH} for shape in shapes)
    assert not [shape for shape in shapes if len(shape) == 3 and shape[0] == LAYERS], shapes
    one = losses(*compiled(FORMS[name](), devices=1))
    np.testing.assert_allclose(losses(state, train_step), one, rtol=LAST_PLACES)
    assert one[-1] < one[0]


@pytest.mark.parametrize("name", FORMS)
def test_temporaries_of_a_scan_are_at_most_those_of_a_loop(name):
    def temporaries(form, blocks):
        state, train_step = compiled(form, reduce_dtype=jnp.float32, blocks=blocks)
        return train_step.lower(state, batch()).compile().memory_analysis().temp_size_in_bytes

    unrolled = temporaries(of_nnx(lambda key: NnxList(nnx.Rngs(key))), r"layers/\d+")
    assert temporaries(FORMS[name](), "layers") <= 1.3 * unrolled


def test_a_gpu_gathers_a_layer_in_a_loop_and_reduces_its_gradient_there():
    devices = targets.devices("h200", "1x8")
    init_params, loss_fn = FORMS["nnx.scan"]()

    def init():
        params = init_params(jax.random.key(0))
        return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    program, abstract = jax.make_jaxpr(init, return_shape=True)()
    partition = stages.partition_state(
        abstract, mesh=mesh_lib.make_mesh(data=8, devices=devices), layer_dims=layer_stacks.counts(program, abstract)
    )
    train_step = step.make_train_step(loss_fn, partition, blocks="layers", reduce_dtype=jnp.float32)
    compiled = train_step.lower(partition.abstract_state, jax.eval_shape(batch)).compile()
    assert not [shape for shape in gathered(compiled) if shape[0] == LAYERS and len(shape) == 3]
    loops = set(re.findall(r"body=%?([\w.-]+)", compiled.as_text()))
    inside = [text for text in compiled.as_text().split("\n\n") if text.lstrip("% ").split(" ")[0] in loops]
    assert sum("all-gather" in text for text in inside) == 2  # forward and backward
    assert sum("reduce-scatter" in text for text in inside) == 1
