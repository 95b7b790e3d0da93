"""Checks that devices and passes draw their own random numbers. This module tests zerojax.zero.sharded_batch.keys."""

import functools
from collections.abc import Callable
from typing import Any

import arrays
import flax.core
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
    "Linen, folded from the step": of_linen(lambda batch, state: jax.random.fold_in(CLOSED_OVER, state.step)),
    "Linen, a raw key in the batch": of_linen(lambda batch, state: batch["raw"]),
    "a typed key of the state": directly(lambda batch, state: jax.random.fold_in(state.rng, state.step)),
    "a raw key of the state": directly(lambda batch, state: jax.random.split(state.raw)[1]),
    "a typed key in the batch": directly(lambda batch, state: batch["key"]),
    "a raw key in the batch": directly(lambda batch, state: batch["raw"]),
}


IN_ONE_PASS = ("a raw key of the state",)
AGAIN = ("a typed key in the batch", "a raw key in the batch", "a typed key of the state")  # as with Linen
WAYS = [
    (name, passes, () if (passes == 2 or name in IN_ONE_PASS) and name not in AGAIN else runs.LONG)
    for name in CASES
    for passes in (1, 2)
]


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
    x = arrays.normal(1, (ROWS, WIDTH))
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


class Field(nn.Module):
    """Calls what it is given."""

    inner: Callable

    @nn.compact
    def __call__(self, x):
        return self.inner(x)


class SetUp(nn.Module):
    def setup(self):
        self.drop = dropout()
        self.many = [dropout(), {"a": dropout()}]

    def __call__(self, x):
        return self.many[1]["a"](x)

    @nn.nowrap
    def draw(self, x):
        return x * jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape)


class Inside(nn.Module):
    """Calls a function of its own module."""

    function: Callable

    @nn.compact
    def __call__(self, x):
        return self.function(self, x)


class OfCarry(nn.Module):
    inner: Callable

    @nn.compact
    def __call__(self, carry, _):
        return self.inner(carry), None


class Scanned(nn.Module):
    inner: Callable

    @nn.compact
    def __call__(self, x):
        return scanned(self.inner)(x)


def dropout(**how):
    return nn.Dropout(0.5, deterministic=False, **how)


def applied(module, **how):
    return lambda key, x: module.apply({}, x, rngs={"dropout": key}, **how)


def of_scope(key, x):
    def draw(scope, x):
        return x * jax.random.bernoulli(scope.push("inner").make_rng("dropout"), 0.5, x.shape)

    return flax.core.apply(draw)({}, x, rngs={"dropout": key})


def scanned(inner):
    return lambda x: nn.scan(OfCarry, length=2, split_rngs={"dropout": True}, variable_axes={})(inner)(x, None)[0]


def in_block(find):
    """Returns a model whose only block, with a weight, runs `find`."""

    def block(module, x):
        return find(module.make_rng("dropout"), x) * module.param("one", nn.initializers.ones, ())

    return Inside(lambda _, x: Inside(block, name="block_0")(x))


jitted = jax.jit(lambda x: applied(dropout())(CLOSED_OVER, x))
rate = {"rate": 0.5, "deterministic": False}

# f(key, x): one `apply`, of Linen or of its core, that draws with the key.
ONE_APPLY = {
    "an attribute": applied(nn.Sequential([dropout()])),
    "an attribute of an attribute": applied(nn.Sequential([nn.Sequential([dropout()])])),
    "a field": applied(Field(dropout())),
    "a module in a list of setup": applied(SetUp()),
    "a module of setup, called from outside": applied(SetUp(), method=lambda module, x: module.drop(x)),
    "a method that is not wrapped": applied(SetUp(), method=SetUp.draw),
    "a draw outside of the modules' methods": applied(SetUp(), method=lambda module, x: SetUp.draw(module, x)),
    "a closure": applied(Inside(lambda _, x: Field(functools.partial(lambda drop, y: drop(y), dropout()))(x))),
    "a shared module": applied(Inside(lambda _, x: (lambda drop: Field(Field(drop))(x))(dropout()))),
    "nn.scan": applied(Inside(lambda _, x: scanned(dropout())(x))),
    "nn.scan of an attribute": applied(Scanned(dropout())),
    "nn.vmap": applied(
        Inside(lambda _, x: nn.vmap(nn.Dropout, split_rngs={"dropout": True}, variable_axes={})(**rate)(x))
    ),
    "nn.remat": applied(Inside(lambda _, x: nn.remat(nn.Dropout)(**rate)(x))),
    "nn.remat of an attribute": applied(Inside(nn.remat(lambda _, x: dropout()(x)))),
    "nn.jit": applied(Inside(lambda _, x: nn.jit(nn.Dropout)(**rate)(x))),
    "nn.cond": applied(Inside(lambda self, x: nn.cond(True, *[lambda _, x: dropout()(x)] * 2, self, x))),
    "nn.map_variables": applied(Inside(lambda _, x: nn.map_variables(nn.Dropout, "params")(**rate)(x))),
    "bind": lambda key, x: Field(dropout()).bind({}, rngs={"dropout": key})(x),
    "a draw of what bind returned": lambda key, x: SetUp().bind({}, rngs={"dropout": key}).draw(x),
    "the core without modules": of_scope,
    "another stream": lambda key, x: Field(dropout(rng_collection="noise")).apply({}, x, rngs={"noise": key}),
    "the only key": lambda key, x: Field(dropout()).apply({}, x, rngs=key),
    "jax.checkpoint": jax.checkpoint(applied(Field(dropout()))),
    "jax.jit": lambda key, x: jitted(x) if key is CLOSED_OVER else applied(dropout())(key, x),
    "jax.lax.scan": lambda key, x: jax.lax.scan(lambda y, _: (applied(dropout())(key, y), None), x, length=1)[0],
    "mutable variables": lambda key, x: applied(Field(dropout()), mutable=["sown"])(key, x)[0],
}
# More than one key is folded on the way: that of the model, and that of an inner apply or stream.
SEVERAL = {
    "an apply inside": applied(Inside(lambda _, x: applied(dropout())(CLOSED_OVER, x))),
    "an apply inside, with an own key": applied(
        Inside(lambda self, x: applied(dropout())(self.make_rng("dropout"), x))
    ),
    "an NNX stream": lambda key, x: nnx.Dropout(0.5)(x, rngs=nnx.Rngs(dropout=key)),
    "an NNX module": lambda key, x: nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(key)))(x),
    "streams of nnx.vmap": lambda key, x: nnx.vmap(lambda rngs, row: row * rngs.noise.bernoulli(0.5, row.shape))(
        nnx.Rngs(noise=key).split(x.shape[0]), x
    ),
}


def own_keys(ways, passes):
    """Returns the keys of each device in each pass."""
    keys = [jax.random.fold_in(CLOSED_OVER, device) if ways > 1 else CLOSED_OVER for device in range(ways)]
    return [jax.random.fold_in(key, number) for number in range(passes) for key in keys]


def masks_alone(x, key):
    """Returns the masks that one device draws in each way, by its name."""
    return {name: masks(find(key, x)) for name, find in ONE_APPLY.items()}


@pytest.mark.parametrize(
    ("reduce_dtype", "blocks"),
    [
        pytest.param(jnp.float32, "", marks=runs.LONG),
        (jnp.float32, "block_0"),
        (None, "block_0"),
        pytest.param(None, "", marks=runs.LONG),
    ],
)
def test_however_a_module_came_in_its_masks_are_those_of_its_device_and_pass(reduce_dtype, blocks):
    """A mask is that of the key with the numbers of device and pass folded in, drawn on one device by the same function."""
    passes, devices = 2, 2
    cases = {**ONE_APPLY, **SEVERAL}
    if blocks:  # the arrangements that a block can have
        names = ("an attribute", "nn.scan", "nn.remat", "an apply inside", "an apply inside, with an own key")
        cases = {name: cases[name] for name in names}

    def loss_fn(params, batch, _):
        kept, rngs = {}, {"dropout": CLOSED_OVER}
        for name, find in cases.items():
            kept[name] = (
                in_block(find).apply({"params": params}, batch, rngs=rngs) if blocks else find(CLOSED_OVER, batch)
            )
        return params["block_0"]["one"] * jnp.mean(batch), {"metrics": {name: masks(x) for name, x in kept.items()}}

    state = TrainState.create(apply_fn=None, params={"block_0": {"one": jnp.ones(())}}, tx=optax.sgd(0.0))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(devices=jax.devices()[:devices]), stage=0)
    x = jnp.ones((passes, ROWS // passes, WIDTH))
    step = zerojax.make_train_step(loss_fn, part, reduce_dtype=reduce_dtype, grad_accum=passes, blocks=blocks)
    found = step(state, x)[1]
    ways = devices if reduce_dtype else 1
    own = (
        []
        if blocks
        else list(map(jax.jit(functools.partial(masks_alone, x[0, : ROWS // passes // ways])), own_keys(ways, passes)))
    )
    for name in cases:
        values = np.unique(np.asarray(found[name]))
        share = {"nn.scan": 4, "nn.scan of an attribute": 4}.get(name, 2)  # of two draws in a row a fourth is kept
        assert len(values) >= min(ways * passes, 3) + 1 - (share == 4), f"{name}: {values} of {ways * passes} masks"
        if name in ONE_APPLY and not blocks:
            np.testing.assert_array_equal(found[name], np.mean([drawn[name] for drawn in own], axis=0), err_msg=name)


def test_weights_that_a_loss_draws_are_equal_on_all_devices():
    def loss_fn(params, batch, _):
        variables = nn.Dense(WIDTH).init(CLOSED_OVER, batch)
        return jnp.mean(batch) * params["w"].sum(), {"metrics": {"drawn": variables["params"]["kernel"][0]}}

    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(8)}, tx=optax.sgd(0.0))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(devices=jax.devices()[:2]), stage=0)
    x = jnp.ones((ROWS, WIDTH))
    found = zerojax.make_train_step(loss_fn, part, reduce_dtype=jnp.float32)(state, x)[1]["drawn"]
    np.testing.assert_array_equal(found, nn.Dense(WIDTH).init(CLOSED_OVER, x)["params"]["kernel"][0])
