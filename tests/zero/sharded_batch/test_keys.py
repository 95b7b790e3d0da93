"""Checks that devices and passes draw their own random numbers. This module tests zerojax.zero.sharded_batch.keys."""

import functools
from typing import Any

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
from zerojax.zero.sharded_batch import keys

ROWS, WIDTH = 16, 64
CLOSED_OVER = jax.random.key(5)


class Keyed(TrainState):
    rng: Any = ()
    raw: Any = ()
    rest: Any = ()


class Drops(nn.Module):
    """Half of its ones are dropped, in a block of its own and outside of it."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=False, name="block_0")(x)
        return nn.Dense(1, use_bias=False)(x), x


def of_linen(find_key):
    def loss_fn(params, batch, state):
        key = find_key(batch, state)
        y, kept = Drops().apply({"params": params}, batch["x"], rngs={"dropout": key})
        return jnp.mean(y), {"metrics": {"kept": masks(kept)}}

    return loss_fn


def directly(find_key):
    def loss_fn(params, batch, state):
        kept = jax.random.bernoulli(find_key(batch, state), 0.5, batch["x"].shape)
        return jnp.mean(batch["x"] * params["Dense_0"]["kernel"][:, 0]), {"metrics": {"kept": masks(kept)}}

    return loss_fn


def masks(kept):
    """Returns the mean mask of the rows, float32[width]: 0 or 1 where all rows, devices and passes drew the same."""
    return (
        jnp.mean((kept[0] != 0).astype(jnp.float32), keepdims=False, axis=())
        if kept.ndim == 1
        else (kept[0] != 0) * 1.0
    )


CASES = {
    "Linen, a key closed over": of_linen(lambda batch, state: CLOSED_OVER),
    "Linen, folded from the step": of_linen(lambda batch, state: jax.random.fold_in(CLOSED_OVER, state.step)),
    "Linen, a raw key in the batch": of_linen(lambda batch, state: batch["raw"]),
    "a typed key of the state": directly(lambda batch, state: jax.random.fold_in(state.rng, state.step)),
    "a raw key of the state": directly(lambda batch, state: jax.random.split(state.raw)[1]),
    "a typed key in the batch": directly(lambda batch, state: batch["key"]),
    "a raw key in the batch": directly(lambda batch, state: batch["raw"]),
}


IN_ONE_PASS = ("Linen, a key closed over", "a raw key of the state")
WAYS = [(name, passes, () if passes == 2 or name in IN_ONE_PASS else runs.LONG) for name in CASES for passes in (1, 2)]


@pytest.mark.parametrize(("name", "passes"), [pytest.param(*way, marks=marks) for *way, marks in WAYS])
def test_each_device_and_each_pass_draws_its_own_mask(name, passes):
    params = {"Dense_0": {"kernel": jnp.ones((WIDTH, 1))}}
    state = Keyed.create(
        apply_fn=None, params=params, tx=optax.sgd(0.0), rng=jax.random.key(1), raw=jax.random.PRNGKey(2)
    )
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(devices=jax.devices()[:2]), stage=0)
    x = jnp.ones((passes, ROWS // passes, WIDTH))
    batch = {"x": x if passes > 1 else x[0], "key": jax.random.key(3), "raw": jax.random.PRNGKey(4)}
    specs = [("^key$|^raw$", P())]
    for reduce_dtype, expected in ((jnp.float32, 2 * passes), (None, passes)):
        step = zerojax.make_train_step(
            CASES[name], part, reduce_dtype=reduce_dtype, grad_accum=passes, batch_specs=specs, donate=False
        )
        kept = np.asarray(step(state, batch)[1]["kept"])
        # The mean of n masks takes n + 1 values, about half of them neither all nor none.
        assert len(np.unique(kept)) == expected + 1, f"{name}: {np.unique(kept)} of {expected} masks"


def test_words_that_the_loss_never_draws_with_are_left_alone():
    state = Keyed.create(apply_fn=None, params={"w": jnp.ones(8)}, tx=optax.sgd(0.0), raw=jnp.array([7, 1], jnp.uint32))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=0)

    def loss_fn(params, batch, state):
        return jnp.mean(batch * params["w"]), {"metrics": {"word": state.raw[0].astype(jnp.float32)}}

    step = zerojax.make_train_step(loss_fn, part, reduce_dtype=jnp.float32)
    assert step(state, jnp.ones((16, 8)))[1]["word"] == 7


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)


def test_nnx_models_draw_apart_and_return_the_same_statistics_and_counts():
    """The state holds the variables other than params: batch statistics, and the keys and counts of nnx.Rngs."""
    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    state = Keyed.create(apply_fn=None, params=params, tx=optax.sgd(0.1), rest=rest)
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(devices=jax.devices()[:2]), stage=3)

    def loss_fn(params, batch, state):
        model = nnx.merge(graph, params, state.rest)
        kept = model.dropout(jnp.ones_like(batch))
        loss = jnp.mean(model.out(model.norm(batch) * kept) ** 2)
        return loss, {"metrics": {"kept": masks(kept)}, "state": {"rest": nnx.state(model, nnx.Not(nnx.Param))}}

    step = zerojax.make_train_step(loss_fn, part, reduce_dtype=jnp.float32, donate=False)
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    for count in (1, 2):
        state, metrics = step(state, x)
        assert len(np.unique(np.asarray(metrics["kept"]))) == 3
        new = nnx.to_pure_dict(state.rest)
        assert int(new["dropout"]["rngs"]["count"]) == count
        assert jax.random.key_data(new["dropout"]["rngs"]["key"]).tolist() == key_words(rest)
        np.testing.assert_allclose(new["norm"]["mean"], (1 - 0.5**count) * x.mean(0), atol=1e-6)


def key_words(rest):
    return jax.random.key_data(nnx.to_pure_dict(rest)["dropout"]["rngs"]["key"]).tolist()


def test_keys_of_any_shape_fold_as_each_alone():
    typed, raw = jax.random.split(jax.random.key(0), 3), jax.random.split(jax.random.PRNGKey(0), 3)
    found = keys.fold({"typed": typed, "raw": raw, "n": 1}, ["typed", "raw"], 5)
    fold = functools.partial(jax.random.fold_in, data=5)
    assert (found["typed"] == jnp.stack([fold(key) for key in typed])).all() and found["n"] == 1
    np.testing.assert_array_equal(found["raw"], [fold(key) for key in raw])
