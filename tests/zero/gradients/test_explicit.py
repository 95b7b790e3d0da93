"""Checks passes over each device's own examples against plain autodiff on one device. This module tests zerojax.zero.gradients.explicit."""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import block_nets
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax import nnx
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero import shard_state, step
from zerojax.zero.blocks import block_settings
from zerojax.zero.gradients import explicit
from zerojax.zero.sharded_batch import inputs
from zerojax.zero.weights import gather

X = block_nets.X
BLOCKS = r"block_\d"
ROUNDING = 5e-7  # of sums of terms below 1: a block's calls may be added before or after devices, and XLA fuses what it sums otherwise


def gradients_of(loss_fn, part, how, passes=1):
    options = {"passes": passes, "reduce_dtype": jnp.float32, "compute_dtype": None}
    return explicit.value_and_grad(
        loss_fn, part, how, layout=inputs.Layout(part.mesh, passes, by_device=True), **options
    )


class Net(nn.Module):
    """Its second block is called twice, and inside a transformation of the model's own."""

    nested: bool = False

    @nn.compact
    def __call__(self, x):
        x = block_nets.Block(name="block_0")(x)
        last = block_nets.Block(name="block_1")
        x = last(x, jnp.arange(1.0, 9.0))
        x = nn.remat(lambda module, value: module(value))(last, x) if self.nested else last(x)
        return block_nets.Head(name="head")(x)


def sharded(
    stage: int, mesh: tuple[int, ...] = (1, 8), net: nn.Module | None = None, min_size: int = 0
) -> tuple[Any, Any, Any]:
    params = (net or Net()).init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    on = mesh_lib.make_mesh(*mesh)
    return params, *shard_state.shard_train_state(state, mesh=on, stage=stage, min_size=min_size)


def loss_of(net: nn.Module, params: Any, batch: Any, state: Any) -> tuple[jax.Array, dict]:
    loss = net.apply({"params": params}, batch["x"])
    return loss, {"metrics": {"twice": 2 * loss}}


WAYS: list[tuple[Any, ...]] = [
    (0, (1, 8), 2, {}),
    (1, (2, 4), 2, {"remat": "full"}),
    (2, (2, 4), 1, {"heads": "head"}),
    (3, (1, 8), 2, {"heads": "head", "recompute": "block_1/wide"}),
    (3, (2, 2, 2), 1, {"pattern": ""}),
    (3, (8, 1), 1, {"remat": "none"}),
    (3, (1, 8), 2, {"heads": "head", "offload": ".*/wide"}),
    (2, (2, 4), 1, {"remat": "full", "offload": "block_0/(wide|narrow)"}),
]
ALIKE = (0, 1, 4, 5)  # a transformation inside the model changes nothing of these; the others are tried with it


@pytest.mark.parametrize(
    ("stage", "mesh", "passes", "options", "nested"),
    [
        pytest.param(*way, nested, marks=runs.LONG if nested == (number in ALIKE) else ())
        for nested in (False, True)
        for number, way in enumerate(WAYS)
    ],
)
@pytest.mark.filterwarnings("ignore:mesh. model is 2, and no weight is sharded over")
def test_gradients_are_those_of_the_global_batch_sharded_as_the_moments(stage, mesh, passes, options, nested):
    net = Net(nested)
    params, state, part = sharded(stage, mesh)
    loss_fn = functools.partial(loss_of, net)
    gradients = gradients_of(loss_fn, part, block_settings.Blocks(**{"pattern": BLOCKS} | options), passes)
    batch = {"x": X if passes == 1 else X.reshape(passes, -1, 8)}
    is_told = (
        nested and stage == 3 and mesh != (8, 1) and options.get("pattern") != ""
    )  # block_1's weights are gathered outside
    with pytest.warns(UserWarning, match="weights of block_1 reach") if is_told else contextlib.nullcontext():
        (loss, aux), grads = jax.jit(gradients)(state.params, batch, state)
    plain = jax.value_and_grad(lambda p: loss_of(net, p, {"x": X}, None)[0])
    expected, expected_grads = plain(params)
    np.testing.assert_allclose((loss, aux["metrics"]["twice"]), (expected, 2 * expected), rtol=1e-5)
    for path, grad in tree.flatten(grads):
        np.testing.assert_allclose(grad, dict(tree.flatten(expected_grads))[path], rtol=1e-4, atol=1e-6)
        assert grad.sharding.is_equivalent_to(part.placements[f"params/{path}"].opt_state, grad.ndim)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_small_replicated_leaves_are_summed_after_those_of_all_blocks(stage, monkeypatch):
    """A sum of a few elements between two blocks would wait for the reduce-scatter sent before it."""
    params, state, part = sharded(stage, min_size=32)
    gradients = gradients_of(functools.partial(loss_of, Net()), part, block_settings.Blocks(BLOCKS))
    lines = str(jax.make_jaxpr(gradients)(state.params, {"x": X}, state)).splitlines()
    scattered = [n for n, line in enumerate(lines) if "= reduce_scatter[" in line]
    summed = [n for n, line in enumerate(lines) if re.search(r":f32\[(8|16)\].*= psum", line)]
    assert len(scattered) == 6 and len(summed) == 4 and scattered[-1] < summed[0]
    _, grads = jax.jit(gradients)(state.params, {"x": X}, state)
    expected = jax.grad(lambda p: loss_of(Net(), p, {"x": X}, None)[0])(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads, expected)
    monkeypatch.setattr(gather, "SMALL", 0)
    of_each_block = gradients_of(functools.partial(loss_of, Net()), part, block_settings.Blocks(BLOCKS))
    _, others = jax.jit(of_each_block)(state.params, {"x": X}, state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=ROUNDING), grads, others)


class KeyedState(TrainState):
    rng: Any


@runs.LONG
def test_devices_draw_apart_and_a_returned_key_is_that_of_the_state():
    _, state, _ = sharded(3)
    state = KeyedState(
        **{f: getattr(state, f) for f in ("step", "apply_fn", "params", "tx", "opt_state")}, rng=jax.random.key(3)
    )
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=3, min_size=0)

    def loss_fn(params, batch, state):
        noise = jax.random.normal(state.rng)
        metrics = {"square": noise**2, "mean": noise}
        loss = jnp.mean(Net().apply({"params": params}, batch["x"]))
        return loss, {"metrics": metrics, "state": {"rng": jax.random.split(state.rng)[0]}}

    run = gradients_of(loss_fn, part, block_settings.Blocks(BLOCKS))
    (_, aux), _ = jax.jit(run)(state.params, {"x": X}, state)
    assert aux["metrics"]["square"] > 1.01 * aux["metrics"]["mean"] ** 2, "the same number on every device"
    assert aux["state"]["rng"] == jax.random.split(state.rng)[0]


def test_a_leaf_of_the_params_that_is_no_weight_is_refused_in_one_line():
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8)), "n": jnp.ones(8)}, tx=optax.sgd(0.1))
    roles = [("params/w$", "params")]
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), roles=roles)
    loss = lambda params, x, state: jnp.sum(x @ params["w"] + params["n"])  # noqa: E731
    train_step = step.make_train_step(loss, part, reduce_dtype=jnp.float32)
    with pytest.raises(UserError, match=r"^reduce_dtype: params/n does not have the role of a weight .* omit"):
        train_step(state, jnp.ones((8, 8)))


def test_nnx_variables_that_would_come_apart_are_refused():
    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    _, _, part = sharded(3)
    part = dataclasses.replace(part, abstract_state=part.abstract_state.replace(params=nnx.eval_shape(Model)))
    with pytest.raises(UserError, match=r"^reduce_dtype: NNX params with other variables"):
        gradients_of(lambda p, b, s: (jnp.zeros(()), {}), part, block_settings.Blocks())
