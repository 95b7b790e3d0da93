"""Checks that values which leave a step are those of one device, and equal on all. This module tests zerojax.zero.sharded_batch.outputs."""

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
from jax.sharding import PartitionSpec

import zerojax
from zerojax.errors import UserError
from zerojax.zero.sharded_batch import outputs

ROUNDING = 2e-6  # the same float32 terms, summed in another order
X = arrays.normal(1, (16, 8))
BATCH = {
    "x": X,
    "y": jnp.arange(16) % 4,
    "mask": (jnp.arange(16) % 5 > 1).astype(jnp.float32),
}  # unequal over devices and passes
BATCHES = [BATCH, jax.tree.map(lambda leaf: leaf[::-1], BATCH)]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="layer_1")(nn.tanh(nn.Dense(16, name="layer_0")(x)))


class Counting(TrainState):
    """Counts of many kinds, two keys, and words of a counter that look like a key."""

    rows: Any
    calls: Any
    right: Any
    histogram: Any
    words: Any
    average: Any
    weighed: Any
    total: Any
    rng: Any
    raw_rng: Any


def make_state(**fields):
    values = {
        "rows": jnp.int32(0),
        "calls": jnp.int32(0),
        "right": jnp.int32(0),
        "histogram": jnp.zeros(4, jnp.int32),
        "words": jnp.array([7, 9], jnp.uint32),
        "average": jnp.zeros(4),
        "weighed": jnp.float32(0),
        "total": jnp.float32(1),
        "rng": jax.random.key(3),
        "raw_rng": jax.random.PRNGKey(4),
    }
    params = Net().init(jax.random.key(0), X)["params"]
    return Counting.create(apply_fn=None, params=params, tx=optax.adam(1e-2), **values | fields)


def loss_fn(params, batch, state):
    logits = Net().apply({"params": params}, batch["x"])
    terms = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * batch["mask"]
    right = logits.argmax(-1) == batch["y"]
    (rng, own), raw_rng = jax.random.split(state.rng), jax.random.split(state.raw_rng)[0]
    fields = {
        "rows": state.rows + batch["x"].shape[0],
        "calls": state.calls + 1,
        "right": state.right + jnp.count_nonzero(right),
        "histogram": state.histogram.at[batch["y"]].add(1),
        "words": state.words + jnp.uint32(1),
        "average": 0.9 * state.average + 0.1 * logits.mean(0),
        "weighed": zerojax.Mean(jnp.sum(logits[:, 0] * batch["mask"]), batch["mask"].sum()),
        "total": zerojax.Sum(state.total + terms.sum()),
        "rng": rng,
        "raw_rng": raw_rng,
    }
    metrics = {
        "right": right.sum(),
        "masked": zerojax.Mean(jnp.sum(right * batch["mask"]), batch["mask"].sum()),
        "weight": zerojax.Sum(batch["mask"].sum()),
        "largest": outputs.Max(terms.max()),
        "accuracy": right.mean(),
        "step": state.step,
        "noise": jax.random.normal(own),
        "noise_squared": jax.random.normal(own) ** 2,
        "logits": logits.mean(0),
    }
    return zerojax.Mean(terms.sum(), batch["mask"].sum()), {"state": fields, "metrics": metrics}


@functools.cache
def on_one_device(steps):
    """Returns the state and the metrics after a plain loop; a step has one pass."""
    found, state = [], make_state()
    for batch in BATCHES[:steps]:

        def of_params(params, batch=batch, state=state):
            loss, aux = loss_fn(params, batch, state)
            return loss.total / loss.weight, aux

        (loss, aux), grads = jax.jit(jax.value_and_grad(of_params, has_aux=True))(state.params)
        plain = jax.tree.map(read, aux, is_leaf=outputs.is_term)
        found.append({**plain["metrics"], "loss": loss})
        state = state.replace(**plain["state"]).apply_gradients(grads=grads)
    return state, found


def read(node):
    if isinstance(node, outputs.Max):
        return node.value
    return node.total / node.weight if isinstance(node, zerojax.Mean) else getattr(node, "total", node)


def shard(state, stage, loss=loss_fn, **options):
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(2, 4), stage=stage, min_size=8)
    return state, zerojax.make_train_step(loss, part, **options)


def words(leaf):
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param(0, {"reduce_dtype": jnp.float32}, marks=runs.LONG),
        (3, {"reduce_dtype": jnp.float32, "blocks": r"layer_\d"}),
        pytest.param(3, {}, marks=runs.LONG),
    ],
)
def test_metrics_and_state_are_those_of_one_device(stage, options):
    expected, expected_metrics = on_one_device(2)
    state, train_step = shard(make_state(), stage, **options)
    for batch, wanted in zip(BATCHES, expected_metrics, strict=True):
        state, metrics = train_step(state, batch)
        for name in wanted.keys() - {"noise", "noise_squared"}:
            np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-5, atol=ROUNDING, err_msg=name)
        assert metrics["right"].dtype == jnp.int32 and metrics["step"].dtype == jnp.int32
        is_apart = metrics["noise_squared"] > 1.01 * metrics["noise"] ** 2
        assert is_apart == ("reduce_dtype" in options), "each device draws its own number from keys that stay equal"
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        wanted = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        np.testing.assert_allclose(words(leaf), words(wanted), rtol=1e-5, atol=ROUNDING, err_msg=str(path))
        if leaf.sharding.is_fully_replicated:
            shards = [np.asarray(words(shard.data)) for shard in leaf.addressable_shards]
            assert all(np.array_equal(shards[0], other) for other in shards[1:]), f"{path} differs between devices"


@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_passes_are_weighed_by_their_weights_and_their_counts_add_up(reduce_dtype):
    """Two passes of unlike weights, whose losses and gradients are those of the batch."""
    whole, wanted = on_one_device(1)
    state, train_step = shard(make_state(), 3, reduce_dtype=reduce_dtype, grad_accum=2)
    state, metrics = train_step(state, jax.tree.map(lambda leaf: leaf.reshape(2, 8, *leaf.shape[1:]), BATCH))
    for name in ("loss", "right", "masked", "weight", "largest", "accuracy", "step"):
        np.testing.assert_allclose(metrics[name], wanted[0][name], rtol=1e-6, err_msg=name)
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(whole.params)):
        np.testing.assert_allclose(found, expected, atol=ROUNDING)
    for name in ("rows", "right", "histogram", "total"):
        np.testing.assert_allclose(getattr(state, name), getattr(whole, name), rtol=1e-6, err_msg=name)
    assert int(state.calls) == 2, "a pass sees the state of the one before"


def plain_loss(params, batch, state):
    return jnp.mean((Net().apply({"params": params}, batch["x"])[:, 0] - batch["y"]) ** 2)


def with_result(make):
    return lambda params, batch, state: (plain_loss(params, batch, state), make(batch, state))


BY_DEVICE = {  # what has no rule when each device sees its own examples
    "a maximum in the state": (
        lambda b, s: {"state": {"right": b["y"].max()}},
        r"state/right, int32\[\], which differs",
    ),
    "a count that saturates": (
        lambda b, s: {"state": {"right": jnp.minimum(s.right + b["y"].sum(), 9)}},
        "state/right.*zerojax.Sum",
    ),
    "a maximum": (
        lambda b, s: {"metrics": {"most": b["y"].max()}},
        r"metrics/most, int32\[\], which differs .* zerojax",
    ),
    "a truth": (lambda b, s: {"metrics": {"any": (b["x"] > 3).any()}}, r"metrics/any, bool\[\]"),
    "a value for each example": (
        lambda b, s: {"metrics": {"each": b["x"][:, 0]}},
        r"metrics/each of shape \(2,\), which counts",
    ),
    "drawn integers": (
        lambda b, s: {"metrics": {"drawn": jax.random.randint(s.rng, (), 0, 9)}},
        r"metrics/drawn, int32\[\]",
    ),
    "a key made of the batch": (lambda b, s: {"state": {"rng": jax.random.fold_in(s.rng, b["y"][0])}}, "state/rng"),
}
ANYWHERE = {
    "an array": (lambda b, s: b["x"], r"^loss_fn: returned float32\[16, 8\] beside the loss, and needs a dict"),
    "a text": (
        lambda b, s: {"metrics": {"a": {"b": "text"}}},
        r"^loss_fn: returned metrics/a/b, str, and needs numbers",
    ),
    "a function": (
        lambda b, s: {"metrics": {"a": len}},
        r"^loss_fn: returned metrics/a, builtin_function_or_method, and n",
    ),
    "another loss": (
        lambda b, s: {"metrics": {"loss": b["x"].mean()}},
        r"^loss_fn: returned metrics/loss, a name of the s",
    ),
    "a norm": (
        lambda b, s: {"metrics": {"grad_norm": 1.0}},
        r"^loss_fn: returned metrics/grad_norm, a name of the step's",
    ),
    "an unknown key": (lambda b, s: {"stats": {}}, r"^loss_fn: returned \['stats'\] beside the loss; allowed are"),
    "params": (
        lambda b, s: {"state": {"params": s.params}},
        "state.params, which the optimizer updates; keep it in another",
    ),
    "an unknown field": (
        lambda b, s: {"state": {"ema": 1.0}},
        r"^loss_fn: returned a value for state.ema, .* has no such",
    ),
    "another shape": (
        lambda b, s: {"state": {"average": jnp.zeros(3)}},
        r"state/average as float32\[3\], .* float32\[4\]",
    ),
    "another dtype": (lambda b, s: {"state": {"rows": jnp.float32(1)}}, r"state/rows as float32\[\], .* int32\[\]"),
    "another structure": (
        lambda b, s: {"state": {"average": {"a": jnp.zeros(4)}}},
        "returned state.average w.* a state keeps",
    ),
}


@pytest.mark.parametrize("name", [*BY_DEVICE, *ANYWHERE])
def test_what_has_no_rule_is_refused_in_one_line_that_names_it(name):
    make, message = (BY_DEVICE | ANYWHERE)[name]
    options = {"reduce_dtype": jnp.float32} if name in BY_DEVICE else {}
    state, part = zerojax.shard_train_state(make_state(), mesh=zerojax.make_mesh(), stage=0)
    with pytest.raises(zerojax.UserError, match=message) as error:
        jax.eval_shape(zerojax.make_train_step(with_result(make), part, **options), state, BATCH)
    assert "\n" not in str(error.value)


def test_the_loss_may_be_among_the_metrics():
    def twice(params, batch, state):
        loss = plain_loss(params, batch, state)
        return loss, {"metrics": {"loss": loss}}

    state, part = zerojax.shard_train_state(make_state(), mesh=zerojax.make_mesh(), stage=0)
    _, metrics = jax.eval_shape(zerojax.make_train_step(twice, part), state, BATCH)
    assert metrics.keys() == {"loss", "grad_norm"}


@pytest.mark.parametrize("loss", [None, "low", jnp.ones(4), 1j, zerojax.Mean(jnp.ones(2), 1.0), (1.0, {}, {})])
def test_a_loss_that_is_no_scalar_is_refused(loss):
    state, part = zerojax.shard_train_state(make_state(), mesh=zerojax.make_mesh(), stage=0)
    with pytest.raises(zerojax.UserError, match=r"^loss_fn: returned"):
        jax.eval_shape(zerojax.make_train_step(lambda p, b, s: loss, part), state, BATCH)


def test_a_name_that_the_loss_itself_lacks_is_its_own_error():
    state, part = zerojax.shard_train_state(make_state(), mesh=zerojax.make_mesh(), stage=0)
    loss = lambda params, batch, state: missing  # noqa: E731, F821
    with pytest.raises(NameError, match="'missing' is not defined"):
        jax.eval_shape(zerojax.make_train_step(loss, part, reduce_dtype=jnp.float32), state, BATCH)


def test_a_ratio_over_no_weight_is_0_and_so_is_its_gradient():
    assert outputs.ratio(jnp.float32(0), 0) == 0 and outputs.ratio(3.0, 2) == 1.5
    value, grad = jax.value_and_grad(lambda total: outputs.ratio(total, jnp.zeros(())))(jnp.float32(2))
    assert value == 0 and grad == 0
    np.testing.assert_array_equal(outputs.ratio(jnp.ones(2), jnp.array([0, 4])), [0, 0.25])


def test_the_objective_of_a_mean_is_the_mean_and_no_gradient_flows_through_its_weight():
    def objective(x):
        return outputs.objective(outputs.Mean(3 * x, x), 1)

    (value, weight), grad = jax.value_and_grad(objective, has_aux=True)(jnp.float32(2))
    assert (value, weight["weight"], grad) == (3, 2, 1.5)


def test_passes_of_a_sum_add_up():
    value, weight = outputs.objective(outputs.Sum(jnp.float32(3)), 4)
    assert value / 4 == 3 and not weight


def test_values_that_are_no_totals_pass():
    assert outputs.value(5) == 5 and outputs.value(outputs.Sum(5)) == 5 and outputs.value(outputs.Mean(1, 4)) == 0.25


def test_a_loss_becomes_float32():
    assert outputs.in_float32(jnp.bfloat16(2)).dtype == jnp.float32
    found = outputs.times(outputs.in_float32(outputs.Mean(jnp.bfloat16(2), jnp.int32(4))), 8.0)
    assert found.total == 16 and found.total.dtype == jnp.float32 and found.weight == 4
    with pytest.raises(UserError, match=r"^loss_fn: returned float32\[2\] in zerojax.Sum as the loss"):
        outputs.in_float32(outputs.Sum(jnp.ones(2)))
    for count in (jnp.int32(3), outputs.Mean(jnp.int32(3), 1.0), np.bool_(True)):
        with pytest.raises(UserError, match="as the loss, which has no gradient; return a floating value"):
            outputs.in_float32(count)


@pytest.mark.parametrize(
    "sizes, axes, is_whole",
    [
        ({}, ("replica", "data"), True),
        ({"context": 2}, ("replica", "data", "context"), True),
        ({"context": 2}, ("replica", "data"), False),
    ],
)
def test_a_count_that_the_loss_itself_sums_over_every_axis_of_several_devices_is_the_same_on_all(sizes, axes, is_whole):
    x = arrays.normal(0, (8, 4, 8))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(**sizes), stage=0)

    def loss_fn(params, batch, state):
        return jnp.mean(batch @ params["w"]), {"metrics": {"above": jax.lax.psum(jnp.sum(batch > 0), axes)}}

    specs = PartitionSpec(("replica", "data"), "context")
    train_step = zerojax.make_train_step(loss_fn, part, reduce_dtype=jnp.float32, batch_specs=specs)
    if not is_whole:
        with pytest.raises(UserError, match=r"^loss_fn: returned metrics/above, .* differs between devices"):
            train_step(state, x)
        return
    assert train_step(state, x)[1]["above"] == jnp.sum(x > 0)
