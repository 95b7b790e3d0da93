"""Checks frozen weights: they have no gradients, moments and updates. This module tests zerojax.zero.weights.partition."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax import roles, traces, tree
from zerojax.checkpoint import logical as logical_lib
from zerojax.errors import UserError
from zerojax.optim import fused, master_weights
from zerojax.zero import shard_state, stages, state_bytes, step
from zerojax.zero.blocks import where_used
from zerojax.zero.update import loss_scale
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.weights import placement

STEPS, ROWS, WIDTH = 3, 16, 24
ROUNDING = 2e-6  # the same float32 terms, summed in another order
TRAINABLE = "lora|head"
BLOCKS = r"layer_\d"


class Layer(nn.Module):
    """A weight that is frozen beside two that are trained."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(WIDTH, name="base")(x)
        z = nn.Dense(WIDTH, use_bias=False, name="lora_b")(nn.Dense(8, use_bias=False, name="lora_a")(x))
        return x + nn.tanh(y + z)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = Layer(name=f"layer_{number}")(x)
        return nn.Dense(1, name="head")(x)


MODEL = Net()


@functools.cache
def make_params():
    return MODEL.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]


def batches():
    random = np.random.default_rng(1)
    while True:
        yield random.normal(size=(ROWS, WIDTH)).astype(np.float32)


def loss_fn(params, batch, state):
    return jnp.mean((MODEL.apply({"params": params}, batch).astype(jnp.float32) - 1) ** 2)


def labels(params):
    return tree.map_with_path(lambda path, _: "trained" if "lora" in path or "head" in path else "frozen", params)


def make_tx(clip=0.5):
    tx = optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx


@functools.cache
def truth():
    """Params after some steps of plain optax on one device, its clipping over the trained weights alone."""
    tx = optax.multi_transform({"trained": make_tx(), "frozen": optax.set_to_zero()}, labels)

    @jax.jit
    def train_step(params, opt_state, batch):
        grads = jax.grad(loss_fn)(params, batch, None)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = make_params(), tx.init(make_params())
    for batch in itertools.islice(batches(), STEPS):
        params, opt_state = train_step(params, opt_state, batch)
    return params


def shard(stage=3, tx=None, params=None, trainable=TRAINABLE, create=TrainState.create, mesh=(2, 4), **fields):
    weights = make_params() if params is None else params

    def init():
        return create(apply_fn=None, params=weights, tx=make_tx(0) if tx is None else tx, **fields)

    options = {"mesh": mesh_lib.make_mesh(*mesh), "stage": stage, "min_size": 16, "trainable": trainable}
    return shard_state.shard_train_state(init, **options)


def train(state, part, accum=1, **options):
    train_step = step.make_train_step(loss_fn, part, grad_accum=accum, **{"clip_norm": 0.5, **options})
    for batch in itertools.islice(batches(), STEPS):
        state, metrics = train_step(state, batch if accum == 1 else batch.reshape(accum, -1, WIDTH))
    return state, metrics


def assert_frozen_are_the_same_and_trained_close(found, expected, tolerance=ROUNDING):
    """Frozen weights bit for bit; trained weights have moved, and are close."""
    before = dict(tree.flatten(make_params()))
    for (path, leaf), (_, target) in zip(tree.flatten(found), tree.flatten(expected), strict=True):
        if "base" in path:
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(before[path].astype(leaf.dtype)))
        else:
            assert np.abs(np.asarray(leaf, np.float32) - before[path]).max() > 1e-3
            np.testing.assert_allclose(np.asarray(leaf, np.float32), target, atol=tolerance, rtol=tolerance)


PASSES = list(itertools.product(stages.STAGES, [None, jnp.float32]))
ALIKE = (
    (0, None),
    (0, jnp.float32),
    (1, None),
    (2, None),
    (2, jnp.float32),
)  # fused updates are tried at stages 0 and 2


@pytest.mark.parametrize(
    ("stage", "reduce_dtype"), [pytest.param(*way, marks=runs.LONG if way in ALIKE else ()) for way in PASSES]
)
def test_trained_weights_take_optaxs_path_and_frozen_ones_stay_to_the_bit(stage, reduce_dtype):
    """Over all stages, with blocks and without, in one pass and in two."""
    accum, blocks = 1 + stage % 2, BLOCKS if (stage in (0, 3)) == (reduce_dtype is None) else ""
    state, metrics = train(*shard(stage), accum, blocks=blocks, reduce_dtype=reduce_dtype)
    assert_frozen_are_the_same_and_trained_close(state.params, truth())
    assert float(metrics["grad_norm"]) > 0.5, "the run must clip"


@pytest.mark.parametrize(
    ("blocks", "reduce_dtype"),
    [
        (BLOCKS, jnp.float32),
        ("", None),
        pytest.param("", jnp.float32, marks=runs.LONG),
        pytest.param(BLOCKS, None, marks=runs.LONG),
    ],
)
def test_no_gradient_of_a_frozen_weight_is_computed_or_summed(blocks, reduce_dtype):
    """No matmul and no collective has the shape of a frozen weight's gradient."""
    state, part = shard(3, mesh=(1, 8))
    batch = next(batches())

    def traced(trainable):
        state, part = shard(3, mesh=(1, 8), trainable=trainable)
        train_step = step.make_train_step(loss_fn, part, blocks=blocks, reduce_dtype=reduce_dtype)
        jaxpr = jax.make_jaxpr(train_step)(state, batch)
        return [e for e in traces.equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]

    square = [e for e in traced("") if e.outvars[0].aval.shape == (WIDTH, WIDTH)]
    assert len(square) == 2, "of the two layers"
    assert not [e for e in traced(TRAINABLE) if e.outvars[0].aval.shape == (WIDTH, WIDTH)]
    if reduce_dtype is None:
        return
    compiled = step.make_train_step(loss_fn, part, blocks=blocks, reduce_dtype=reduce_dtype)
    text = compiled.lower(state, batch).compile().as_text()
    assert f"f32[{WIDTH // 8},{WIDTH}]" not in "".join(line for line in text.splitlines() if " reduce-scatter(" in line)


@pytest.mark.parametrize("stage", stages.STAGES)
def test_frozen_weights_are_sharded_like_others_and_have_no_moments(stage):
    state, part = shard(stage)
    _, every = shard(stage, trainable="")
    assert state.params["layer_0"]["base"]["kernel"].sharding == every.shardings.params["layer_0"]["base"]["kernel"]
    assert {leaf.role for path, leaf in part.leaves.items() if "base" in path} == {roles.FROZEN}
    assert not [path for path in part.leaves if path.startswith("opt_state") and "base" in path]
    assert [path for path in part.leaves if path.startswith("opt_state") and "lora_a" in path]
    trainable = {path for path, place in part.placements.items() if place.trainable}
    assert trainable == {path for path in every.placements if "base" not in path}


@pytest.mark.parametrize("stage", stages.STAGES)
def test_the_bytes_table_counts_no_gradients_and_no_moments_of_frozen_weights(stage):
    counted, every = (state_bytes.bytes_per_device(shard(stage, trainable=t)[1]) for t in (TRAINABLE, ""))
    _, part = shard(stage)
    frozen = sum(
        4 * np.prod(place.stored.shard_shape(place.shape)) for place in part.placements.values() if not place.trainable
    )
    grads = sum(
        4 * np.prod(part.placements[path].update.shard_shape(place.shape))
        for path, place in shard(stage, trainable="")[1].placements.items()
        if "base" not in path
    )
    assert counted["frozen"] == frozen and every["frozen"] == 0
    assert counted["params"] + counted["frozen"] == every["params"]
    assert counted["gradients"] >= grads and counted["gradients"] < every["gradients"]
    assert counted["opt_state"] < every["opt_state"]
    table = state_bytes.memory_table(part, shard(0)[1])
    assert "frozen params" in list(table.columns[0].cells)


@pytest.mark.parametrize("stage", runs.cases([1, 3], long=[3]))
def test_master_weights_are_kept_for_trained_weights_alone(stage):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params())
    state, part = shard(stage, master_weights.with_master_weights(make_tx(0)), params)
    state, _ = train(state, part, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.float32, blocks=BLOCKS)
    assert state.params["layer_0"]["base"]["kernel"].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state.master)} == {jnp.dtype(jnp.float32)}
    assert_frozen_are_the_same_and_trained_close(state.params, truth(), 0.05)


@pytest.mark.parametrize("frozen_dtype", [jnp.bfloat16, jnp.float32])
def test_the_logical_form_holds_all_weights(frozen_dtype):
    params = tree.map_with_path(
        lambda path, leaf: leaf.astype(frozen_dtype if "base" in path else jnp.bfloat16), make_params()
    )
    state, _ = shard(2, master_weights.with_master_weights(make_tx(0)), params)
    logical = logical_lib.to_logical(state)
    assert jax.tree.structure(logical.params) == jax.tree.structure(state.params)
    assert logical.params["layer_0"]["base"]["kernel"].dtype == frozen_dtype
    assert logical.params["head"]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize("stage", runs.cases([0, 2, 3], long=[3]))
def test_fused_optimizers_update_trained_weights_alone(stage):
    """In one pass, as the grouped or per-leaf kernel's twin."""
    tx = fused.fused_adamw(1e-2, 0.9, 0.95, weight_decay=0.1)
    state, _ = train(*shard(stage, tx), reduce_dtype=jnp.float32)
    assert_frozen_are_the_same_and_trained_close(state.params, truth())


class ScaledState(TrainState):
    loss_scale: loss_scale.LossScaleState


def test_loss_scaling_names_the_weight_that_overflowed_though_others_are_frozen():
    scaler = loss_scale.DynamicLossScale(init_scale=2.0**10)
    create = functools.partial(ScaledState.create, loss_scale=scaler.init())
    state, part = shard(3, create=create)
    state, metrics = train(state, part, loss_scale=scaler)
    assert_frozen_are_the_same_and_trained_close(state.params, truth())
    assert int(metrics["overflow_leaf"]) == -1

    def overflowing(params, batch, state):
        return loss_fn(params, batch, state) + jnp.sum(params["layer_1"]["lora_a"]["kernel"]) * jnp.inf

    train_step = step.make_train_step(overflowing, part, loss_scale=scaler)
    _, metrics = train_step(state, next(batches()))
    assert loss_scale.overflow(metrics, make_params()).startswith("the gradient of params/layer_1/lora_a/kernel is not")


def test_a_concrete_state_keeps_the_moments_of_its_trained_weights():
    state = TrainState.create(apply_fn=None, params=make_params(), tx=make_tx(0))
    state = jax.jit(lambda state: state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params)))(state)
    sharded, _ = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), trainable=TRAINABLE)
    (adam, *_), (expected, *_) = sharded.opt_state, state.opt_state
    np.testing.assert_array_equal(adam.mu["head"]["kernel"], expected.mu["head"]["kernel"])
    assert placement.is_frozen(adam.mu["layer_0"]["base"]["kernel"])
    again, _ = shard_state.shard_train_state(sharded, mesh=mesh_lib.make_mesh(), trainable=TRAINABLE)
    assert jax.tree.structure(again.opt_state) == jax.tree.structure(sharded.opt_state)


def test_a_loss_of_gathered_weights_has_no_gradient_of_frozen_ones():
    state, part = shard(3, mesh=(1, 8))
    loss = where_used.where_used(lambda params, batch: loss_fn(params, batch, None), part.placements, blocks=BLOCKS)
    grads = jax.jit(jax.grad(loss))(state.params, next(batches()))
    assert not np.asarray(grads["layer_0"]["base"]["kernel"]).any()
    assert np.asarray(grads["layer_0"]["lora_a"]["kernel"]).any()


def test_without_frozen_weights_the_trainable_part_is_the_params():
    state, part = shard(3, trainable="")
    assert part.trainable_part(state.params) is state.params
    assert partition_lib.with_frozen(state.params, None) is state.params


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("adapter", r"^trainable: 'adapter' matches no weight's path"),
        ("lora(", r"^trainable: 'lora\(' is not a regex"),
        ("param", r"^trainable: 'param' matches no weight's path"),  # which begins below params
    ],
)
def test_a_pattern_that_matches_nothing_or_is_not_a_regex_is_refused(trainable, message):
    with pytest.raises(UserError, match=message):
        shard(trainable=trainable)


def test_moments_of_frozen_weights_are_refused():
    state = TrainState.create(apply_fn=None, params=make_params(), tx=make_tx(0))
    with pytest.raises(
        UserError, match=r"^opt_state/0/mu/.*/base/.*: belongs to params/.*trainable='lora.head' freezes"
    ):
        stages.partition_state(state, mesh=mesh_lib.make_mesh(), trainable=TRAINABLE)


def test_a_count_of_the_optimizer_is_no_moment_of_a_frozen_weight_of_that_name():
    params = {"norm": {"count": jnp.ones(())}, "lora": {"kernel": jnp.ones((8, 16))}}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    _, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), trainable="lora")
    assert part.leaves["params/norm/count"].role == roles.FROZEN
    assert part.leaves["opt_state/0/count"].role == roles.OPT_STATE
