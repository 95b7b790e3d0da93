"""Compares unusual models and losses with plain autodiff. This module tests zerojax.zero's used, blocks and chain."""

import contextlib
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
from flax.training.train_state import TrainState

import zerojax

WIDTH = 16
X = arrays.normal(1, (16, WIDTH))


class Block(nn.Module):
    shift: Any = 0.0
    act: Any = jnp.tanh
    inner: Any = None

    @nn.compact
    def __call__(self, x, then=None, is_on=True):
        y = self.act(nn.Dense(WIDTH)(x + self.shift))
        y = y if self.inner is None else self.inner(y)
        y = y if then is None else then(y)
        return x + y if is_on else x


class Plain(nn.Module):
    """Two blocks in a row."""

    @nn.compact
    def __call__(self, x):
        return Block(name="layer_1")(Block(name="layer_0")(x))


class LearnedField(nn.Module):
    """Blocks get a weight of the model as a field."""

    @nn.compact
    def __call__(self, x):
        shift = self.param("shift", nn.initializers.normal(), (WIDTH,))
        return Block(shift=shift, name="layer_1")(Block(shift=shift, name="layer_0")(x))


class Closure(nn.Module):
    """Blocks get a function that reads a weight, and one that calls a module, as fields."""

    @nn.compact
    def __call__(self, x):
        scale, outside = self.param("scale", nn.initializers.ones, (WIDTH,)), nn.Dense(WIDTH)
        x = Block(act=lambda y: jnp.tanh(y * scale), name="layer_0")(x)
        return Block(act=functools.partial(lambda module, y: module(y), outside), name="layer_1")(x)


class Boxed:
    """An object that holds a module, and can be called."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return jnp.tanh(self.module(x))


class InAnObject(nn.Module):
    """Blocks get a module in an object, and one in an object of an object, which holds itself too."""

    @nn.compact
    def __call__(self, x):
        inner = Boxed(nn.Dense(WIDTH))
        outer = Boxed(inner)
        outer.own = outer
        return Block(act=outer, name="layer_1")(Block(act=inner, name="layer_0")(x))


class Shared(nn.Module):
    """Blocks share a module through a field and through an argument."""

    @nn.compact
    def __call__(self, x):
        shared = nn.Dense(WIDTH, name="shared")
        x = Block(inner=shared, name="layer_0")(x)
        return Block(name="layer_1")(x, then=shared)


class OnlyCalls(nn.Module):
    """One block has no weights, one is called with numpy's True, and one is called twice."""

    @nn.compact
    def __call__(self, x):
        last = Block(name="layer_2")
        return last(
            last(Block(name="layer_1")(nn.Dropout(0.5, deterministic=True, name="layer_0")(x), is_on=np.bool_(True)))
        )


class Where(nn.Module):
    """Its computation depends on its path in the model."""

    @nn.compact
    def __call__(self, y):
        return y * (2.0 if self.path[0] == "layer_1" else 0.5)


class ByPath(nn.Module):
    """A module inside a block reads its path."""

    @nn.compact
    def __call__(self, x):
        return Block(inner=Where(), name="layer_1")(Block(inner=Where(), name="layer_0")(x))


class Flagged(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"y": Block()(x), "name": "tanh", "is_on": True, "times": 3, "aux": None}


class ReturnsFlags(nn.Module):
    """Blocks return values that are not arrays, and the model uses them."""

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            found = Flagged(name=f"layer_{number}")(x)
            assert (found["name"], found["aux"]) == ("tanh", None)
            x = found["y"] * len(range(found["times"])) if found["is_on"] else x
        return x


class GradientInside(nn.Module):
    """The output is the gradient of a block's energy."""

    @nn.compact
    def __call__(self, x):
        block = Block(name="layer_0")
        return nn.vjp(lambda module, value: jnp.sum(jnp.square(module(value))), block, x)[1](jnp.float32(1.0))[1]


def squared(net, params, x):
    return jnp.mean(net.apply({"params": params}, x) ** 2)


def with_penalty(net, params, x):
    return squared(net, params, x) + 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))


def with_one_weight(net, params, x):
    return squared(net, params, x) + jnp.sum(params["layer_0"]["Dense_0"]["kernel"] ** 4)


def with_calls_changed_by_path(net, params, x):
    def change(call, args, kwargs, context):
        result = call(*args, **kwargs)
        is_meant = (context.module.path, context.method_name) == (("layer_0", "Dense_0"), "__call__")
        return 3.0 * result if is_meant else result

    with nn.intercept_methods(change):
        return squared(net, params, x)


def with_gradient_penalty(net, params, x):
    return jnp.mean(jax.grad(lambda value: net.apply({"params": params}, value).sum())(x) ** 2)


def with_changed_weights(net, params, x):
    return squared(net, jax.tree.map(lambda w: jnp.sin(w) + 0.1, params), x)


def of_a_part(net, params, x):
    return squared(net, dict(params), x) + squared(Block(), params["layer_0"], x)


CASES = {
    "a learned field": (LearnedField(), squared),
    "a closure": (Closure(), squared),
    "a shared module": (Shared(), squared),
    "a module in an object": (InAnObject(), squared),
    "no weights": (OnlyCalls(), squared),
    "a gradient inside": (GradientInside(), squared),
    "all weights read by the loss": (Plain(), with_penalty),
    "one weight read by the loss": (Plain(), with_one_weight),
    "a gradient penalty": (Plain(), with_gradient_penalty),
    "changed weights": (Plain(), with_changed_weights),
    "a part of the params": (Plain(), of_a_part),
    "a module that reads its path": (ByPath(), squared),
    "a flag returned": (ReturnsFlags(), squared),
    "calls changed by their path": (Plain(), with_calls_changed_by_path),
    "a jit around the model": (Plain(), lambda net, params, x: jax.jit(functools.partial(squared, net))(params, x)),
}


BY_DEVICE = {
    "a shared module",
    "a module in an object",
    "no weights",
    "all weights read by the loss",
    "one weight read by the loss",
    "a part of the params",
    "a module that reads its path",
    "a flag returned",
    "calls changed by their path",
}  # whose gradients of the global batch are made as those of other cases


@pytest.mark.parametrize(
    ("name", "reduce_dtype"),
    [
        *(pytest.param(name, jnp.float32, id=f"{name}, by device") for name in CASES),
        *(
            pytest.param(name, None, id=f"{name}, global batch", marks=runs.LONG if name in BY_DEVICE else ())
            for name in CASES
        ),
    ],
)
def test_losses_and_gradients_are_those_of_plain_autodiff(name, reduce_dtype):
    compare_with_autodiff(*CASES[name], reduce_dtype, "", is_told=False)


@pytest.mark.parametrize("name", ["all weights read by the loss", "a gradient penalty", "changed weights"])
def test_offloading_changes_no_loss(name):
    # A trace knows no modules to offload, so changed weights are gathered before their blocks.
    compare_with_autodiff(*CASES[name], jnp.float32, r"layer_\d/Dense_0", is_told=name == "changed weights")


def test_heads_that_match_nothing_are_refused():
    params = Plain().init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    on, partition = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8)
    for reduce_dtype in (None, jnp.float32):
        step = zerojax.make_train_step(
            lambda params, batch, _: squared(Plain(), params, batch),
            partition,
            blocks=r"layer_\d",
            heads="haed",
            reduce_dtype=reduce_dtype,
        )
        with pytest.raises(zerojax.UserError, match=r"^heads: 'haed' matches no module .* outside of blocks"):
            step(on, X)


def compare_with_autodiff(net, loss_of, reduce_dtype, offload, *, is_told):
    params = net.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    on, partition = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8)
    step = zerojax.make_train_step(
        lambda params, batch, _: loss_of(net, params, batch),
        partition,
        blocks=r"layer_\d",
        reduce_dtype=reduce_dtype,
        offload=offload,
        donate=False,
    )
    with pytest.warns(UserWarning, match=r"^blocks: weights of layer_0") if is_told else contextlib.nullcontext():
        after, metrics = step(on, X)
    loss, grads = jax.value_and_grad(functools.partial(loss_of, net))(params, X)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    found = jax.tree.map(lambda before, now: np.asarray(before) - np.asarray(now), params, after.params)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    assert largest > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), found, grads)
