"""Compares states as people have them with a plain optax loop: averages, two optimizers, teachers, state beside params. Whole steps."""

from typing import Any, NamedTuple

import arrays
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax

WIDTH, ROWS, STEPS = 16, 16, 5
SUMS = 1e-5  # sums over devices in another order, over five steps
X = arrays.normal(1, (ROWS, WIDTH))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(3):
            x = x + jnp.tanh(nn.Dense(WIDTH, name=f"layer_{number}")(x))
        return x


def params_of(number):
    return Net().init(jax.random.key(number), X)["params"]


def applied(params, x):
    return Net().apply({"params": params}, x)


class Averaged(NamedTuple):
    inner: Any
    average: Any


def with_average(tx, decay=0.9):
    """Returns an optimizer that keeps a moving average of the weights."""

    def init(params):
        return Averaged(tx.init(params), params)

    def update(updates, state, params):
        updates, inner = tx.update(updates, state.inner, params)
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, own: decay * old + (1 - decay) * own, state.average, new)
        return updates, Averaged(inner, average)

    return optax.GradientTransformation(init, update)


def averages():
    state = TrainState.create(apply_fn=None, params=params_of(0), tx=with_average(optax.adam(1e-2)))
    return state, lambda params, batch, state: jnp.mean((applied(params, batch) - 1) ** 2)


def two_optimizers():
    """A generator and a critic, each with its own loss, learning rate and moments."""
    params = {"generator": params_of(0), "critic": params_of(1)}
    tx = optax.partition(
        {"generator": optax.adam(1e-2), "critic": optax.rmsprop(3e-3)}, {name: name for name in params}
    )

    def loss_fn(params, batch, state):
        held = jax.lax.stop_gradient(params)
        made = applied(params["generator"], batch)
        of_generator = jnp.mean((applied(held["critic"], made) - 1) ** 2)
        judged = applied(params["critic"], jax.lax.stop_gradient(made))
        return of_generator + jnp.mean(judged**2 + (applied(params["critic"], batch) - 1) ** 2)

    return TrainState.create(apply_fn=None, params=params, tx=tx), loss_fn


def teacher():
    """A student and the frozen weights of its teacher."""
    params = {"student": params_of(0), "teacher": params_of(1)}

    def loss_fn(params, batch, state):
        return jnp.mean((applied(params["student"], batch) - applied(params["teacher"], batch)) ** 2)

    labels = {"student": "student", "teacher": "teacher"}
    tx = optax.partition({"student": optax.adam(1e-2), "teacher": optax.set_to_zero()}, labels)
    return TrainState.create(apply_fn=None, params=params, tx=tx), loss_fn


class WithState(TrainState):
    net_state: Any = None


def state_beside_params():
    """Params and state as of `haiku.transform_with_state`: dicts by the names of modules."""

    def apply(params, state, x):
        for name in ("net/layer_0", "net/layer_1"):
            x = x + jnp.tanh(x @ params[name]["w"] + params[name]["b"] - state["net/norm"]["mean"])
        return x, {"net/norm": {"mean": 0.9 * state["net/norm"]["mean"] + 0.1 * x.mean()}}

    def loss_fn(params, batch, state):
        y, net_state = apply(params, state.net_state, batch)
        return jnp.mean((y - 1) ** 2), {"state": {"net_state": net_state}}

    names = ("net/layer_0", "net/layer_1")
    params = {name: {"w": arrays.normal(3, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for name in names}
    net_state = {"net/norm": {"mean": jnp.zeros(())}}
    return WithState.create(apply_fn=None, params=params, tx=optax.adam(1e-2), net_state=net_state), loss_fn


CASES = {
    "averages, offloaded": (averages, r"layer_\d", {"offload": "host"}),
    "two optimizers": (two_optimizers, r"(generator|critic)/layer_\d", {}),
    "a frozen teacher": (teacher, r"(student|teacher)/layer_\d", {"trainable": "student"}),
    "state beside params": (state_beside_params, r"net/layer_\d", {}),
}


@pytest.mark.parametrize("reduce_dtype", [jnp.float32, None], ids=["explicit", "by the compiler"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_plain_optax(name, reduce_dtype):
    make, blocks, how = CASES[name]
    plain, loss_fn = make()
    state, partition = zerojax.shard_train_state(plain, mesh=zerojax.make_mesh(), stage=3, min_size=8, **how)
    train_step = zerojax.make_train_step(loss_fn, partition, blocks=blocks, reduce_dtype=reduce_dtype)

    @jax.jit
    def plain_step(state):
        def of_params(params):
            found = loss_fn(params, X, state)
            return found if isinstance(found, tuple) else (found, {})

        (loss, aux), grads = jax.value_and_grad(of_params, has_aux=True)(state.params)
        return state.replace(**aux.get("state", {})).apply_gradients(grads=grads), loss

    for _ in range(STEPS):
        state, metrics = train_step(state, X)
        plain, loss = plain_step(plain)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=SUMS)
    expected = dict(jax.tree_util.tree_leaves_with_path(plain))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if hasattr(leaf, "shape"):
            np.testing.assert_allclose(leaf, expected[path], atol=SUMS, rtol=SUMS, err_msg=str(path))


def test_states_of_other_forms_are_refused_in_one_line_that_says_how():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    one = TrainState.create(apply_fn=None, params={"w": X}, tx=optax.sgd(1.0))
    mesh = zerojax.make_mesh()
    for state, line in (
        (nnx.split((model, optimizer))[1], r"for NNX use zerojax.TrainState.create\(.*examples/nnx_model.py"),
        ({"generator": one, "critic": one}, r"shard each of its train states by itself .*optax.partition"),
        ({"params": {"w": X}, "opt_state": ()}, r"zerojax.TrainState.create\(apply_fn=None, params=params, tx=tx\)"),
    ):
        _, partition = zerojax.shard_train_state(state, mesh=mesh, stage=3)
        with pytest.raises(zerojax.UserError, match=line):
            zerojax.make_train_step(lambda params, batch, state: 0.0, partition)
    with pytest.raises(zerojax.UserError, match=r"no leaf has the role 'params'.* for NNX use zerojax.TrainState"):
        zerojax.shard_train_state(optimizer, mesh=mesh, stage=3)
    module = eqx.filter(eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.is_array)
    with pytest.raises(zerojax.UserError, match=r'^params: is a Linear, .* params=\{"net": equinox.filter'):
        zerojax.TrainState.create(apply_fn=None, params=module, tx=optax.sgd(1.0))


def test_averages_in_apply_gradients_are_refused_with_offload_and_the_line_says_where_they_may_be():
    class Averaging(TrainState):
        def apply_gradients(self, *, grads, **kwargs):
            return super().apply_gradients(grads=grads, **kwargs)

    state = Averaging.create(apply_fn=None, params=params_of(0), tx=optax.sgd(1.0))
    with pytest.raises(zerojax.UserError, match="averages of weights may be in the state of its optimizer"):
        zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, offload="host")
