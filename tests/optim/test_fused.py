"""Compares the fused optimizers with optax in float64. This module tests zerojax.optim.fused."""

import functools

import chex
import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.optim import eight_bit, fused

STEPS, RATE, DECAY = 100, 1e-2, 0.1
OPTIONS = {"b1": 0.9, "b2": 0.95}
SHAPES = {"kernel": (64, 300), "scale": (300,)}
MAKERS = {
    "adamw": (fused.fused_adamw, optax.adamw),
    "lion": (fused.fused_lion, optax.lion),
    "adam_l2": (
        functools.partial(fused.fused_adamw, decoupled=False),
        lambda rate, b1, b2, weight_decay: optax.chain(
            optax.add_decayed_weights(weight_decay), optax.adam(rate, b1, b2)
        ),
    ),
}
# Root mean square error of params after 100 steps in units of the distance that they moved (root mean square), by (params, moments).
# float32: 100 roundings. bf16 and int8 moments: each step's direction is off by a last place of the moments. bf16 params: a random walk of
# 100 steps of half a last place (2**-9 of a weight of size 1) against a distance of 0.3.
APART = {
    ("float32", "fp32"): 2e-6,
    ("float32", "bf16"): 4e-3,
    ("float32", "int8"): 0.02,
    ("bfloat16", "fp32"): 0.08,
    ("bfloat16", "bf16"): 0.08,
    ("bfloat16", "int8"): 0.08,
}


@functools.cache
def problem():
    """Returns params and the gradients of 100 steps: a slope of each weight's own, and noise twice as large."""
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    slopes = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    grads = {
        name: (slopes[name] + 2 * rng.standard_normal((STEPS, *shape))).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    return params, grads


@functools.cache
def truth(name):
    """Returns params after 100 steps of optax in float64."""
    with jax.enable_x64(True):
        params, grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), problem())
        tx = MAKERS[name][1](RATE, weight_decay=DECAY, **OPTIONS)

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), grads)
        return jax.tree.map(np.asarray, params)


def run(tx, dtype="float32", scale=1.0, **how):
    """Returns params after 100 steps; gradients come times 1 / scale."""
    params, grads = problem()
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), params)

    def step(carry, grads):
        params, state = carry
        params, state, copies = tx.apply(grads, state, params, scale=scale, **how)
        return (params, state), copies

    (params, state), copies = jax.jit(lambda c, g: jax.lax.scan(step, c, jax.tree.map(lambda x: x / scale, g)))(
        (params, tx.init(params)), grads
    )
    return params, state, copies


def distance(found, expected):
    """Returns the error of params in units of the distance that they moved."""
    start = problem()[0]
    wrong = [np.ravel(np.asarray(found[k], np.float64) - expected[k]) for k in SHAPES]
    moved = [np.ravel(expected[k] - start[k]) for k in SHAPES]
    return np.sqrt(np.mean(np.concatenate(wrong) ** 2) / np.mean(np.concatenate(moved) ** 2))


L2 = [
    pytest.param("adam_l2", *key, marks=() if key == ("bfloat16", "int8") else runs.LONG) for key in APART
]  # differs from adamw in one line


@pytest.mark.parametrize(("name", "dtype", "moments"), [*(("adamw", *key) for key in APART), *L2])
def test_100_steps_are_those_of_optax_in_float64(name, dtype, moments):
    rounds = (dtype, moments) != ("float32", "fp32")
    tx = MAKERS[name][0](RATE, weight_decay=DECAY, moments=moments, stochastic_rounding=rounds, **OPTIONS)
    params, state, _ = run(tx, dtype, scale=0.125)
    assert distance(params, truth(name)) < APART[dtype, moments]
    assert int(state.count) == STEPS


@pytest.mark.parametrize("moments", fused.MOMENTS)
def test_100_steps_of_lion_are_those_of_optax_but_where_the_sign_is_a_toss(moments):
    tx = fused.fused_lion(RATE, weight_decay=DECAY, moments=moments, stochastic_rounding=moments != "fp32", **OPTIONS)
    # A sign that differs moves a weight two steps away; in float32 one differs only where the sum is zero but for rounding.
    assert distance(run(tx)[0], truth("lion")) < {"fp32": 2e-6, "bf16": 0.01, "int8": 0.04}[moments]


def test_the_kernel_is_one_more_implementation():
    tx = fused.fused_adamw(RATE, weight_decay=DECAY, implementation="interpret", **OPTIONS)
    assert distance(run(tx)[0], truth("adamw")) < APART["float32", "fp32"]


def test_16_bit_weights_without_random_rounding_do_worse():
    tx = fused.fused_adamw(RATE, weight_decay=DECAY, moments="bf16", **OPTIONS)
    assert distance(run(tx, "bfloat16")[0], truth("adamw")) > 1.3 * distance(
        run(
            fused.fused_adamw(RATE, weight_decay=DECAY, moments="bf16", stochastic_rounding=True, **OPTIONS), "bfloat16"
        )[0],
        truth("adamw"),
    )


def test_copies_are_the_new_params_rounded():
    params, _, copies = run(fused.fused_adamw(RATE, **OPTIONS), copy_dtype=jnp.float16)
    for name in SHAPES:
        np.testing.assert_array_equal(copies[name][-1], params[name].astype(jnp.float16))


def small():
    params = jax.tree.map(lambda p: jnp.asarray(p[:4]), problem()[0])
    return params, jax.tree.map(lambda p: jnp.sin(3 * p), params)


def steps_of(tx, count=3):
    params, grads = small()
    state = tx.init(params)
    for _ in range(count):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


MASK = {"kernel": True, "scale": False}
COMPOSED = {
    "mask of decay": lambda make: make(RATE, weight_decay=DECAY, mask=MASK),
    "mask as a function": lambda make: make(
        RATE, weight_decay=DECAY, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "schedule": lambda make: make(optax.linear_schedule(0.1, 0.0, 5), weight_decay=DECAY),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(0.1), make(RATE)),
    "masked": lambda make: optax.masked(make(RATE), MASK),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(RATE, weight_decay=DECAY),
    "partition": lambda make: optax.partition(
        {True: make(RATE), False: optax.sgd(0.1)}, {"kernel": True, "scale": False}
    ),
}


@pytest.mark.parametrize("way", COMPOSED)
def test_it_composes_as_optax_does(way):
    found, _ = steps_of(COMPOSED[way](fused.fused_adamw))
    expected, _ = steps_of(COMPOSED[way](optax.adamw))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), found, expected)


def test_its_state_reads_as_that_of_optax():
    state = steps_of(fused.fused_adamw(RATE))[1]
    inner = steps_of(optax.adamw(RATE))[1][0]
    assert jax.tree.structure(state) == jax.tree.structure(inner) and int(state.count) == 3
    lion = steps_of(fused.fused_lion(RATE))[1]
    assert jax.tree.structure(lion) == jax.tree.structure(steps_of(optax.lion(RATE))[1][0])


@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
@pytest.mark.parametrize("moments", fused.MOMENTS)
def test_a_step_that_is_not_taken_leaves_all_as_it_was(moments, implementation):
    params, grads = problem()
    params = jax.tree.map(jnp.asarray, params)
    tx = fused.fused_adamw(RATE, moments=moments, implementation=implementation)
    step = jax.jit(lambda g, s, p, finite: tx.apply(g, s, p, finite=finite, copy_dtype=jnp.bfloat16)[:2])
    grads = jax.tree.map(lambda g: g[0], grads)
    before = step(grads, tx.init(params), params, True)
    bad = {
        **grads,
        "scale": grads["scale"].at[299].set(jnp.nan) if hasattr(grads["scale"], "at") else grads["scale"] * np.nan,
    }
    after = step(bad, before[1], before[0], False)
    chex.assert_trees_all_equal(after, before)


def test_random_bits_follow_the_key_and_the_count_and_nothing_else():
    tx = fused.fused_adamw(RATE, moments="bf16", stochastic_rounding=True)
    params, grads = small()
    state = tx.init(params)

    def mu(key, state=state):
        return tx.apply(grads, state, params, key=key)[1].mu["kernel"]

    keys = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(mu(keys[0]), mu(keys[0]))
    for other in (mu(keys[1]), mu(None), mu(keys[0], state._replace(count=jnp.asarray(5)))):
        assert np.any(np.asarray(mu(keys[0]) != other))


@pytest.mark.parametrize("moments, rates", [("fp32", None), ("int8", None), ("int8", {"kernel": 0.5, "scale": 2.0})])
def test_it_runs_on_shards(moments, rates):
    mesh = mesh_lib.make_mesh()
    shardings = {"kernel": NamedSharding(mesh, P("data")), "scale": NamedSharding(mesh, P())}
    how = {**OPTIONS, "weight_decay": DECAY, "rates": rates}
    tx = fused.fused_adamw(RATE, moments=moments, stochastic_rounding=moments == "int8", **how)
    found, expected = run(tx, shardings=shardings)[0], run(tx)[0]
    # A last place of float32 may tip a code at random; after 100 steps that is what one other draw makes.
    assert (
        distance(found, jax.tree.map(np.asarray, expected))
        < {"fp32": 2e-6, "int8": APART["float32", "int8"] / 10}[moments]
    )


@pytest.mark.parametrize(
    ("how", "is_kernel"),
    [
        ({}, False),
        ({"moments": "bf16"}, False),
        ({"moments": "bf16", "stochastic_rounding": True}, True),
        ({"moments": "int8"}, True),
        ({"moments": "int8", "implementation": "jnp"}, False),
    ],
)
def test_by_default_a_kernel_runs_where_it_is_faster_on_a_gpu(how, is_kernel):
    for devices, is_gpu in ((compile_only.devices(), True), (jax.devices(), False)):
        params = {"w": jax.ShapeDtypeStruct((64, 512), jnp.float32)}
        tx = fused.fused_adamw(1e-3, **how)
        shardings = {"w": NamedSharding(mesh_lib.make_mesh(devices=devices), P("data"))}
        state = jax.eval_shape(tx.init, params)
        step = jax.make_jaxpr(functools.partial(tx.apply, shardings=shardings))(params, state, params)
        assert ("pallas_call" in str(step)) == (is_kernel and is_gpu)


def test_a_kernel_is_refused_where_it_cannot_run():
    for name in ("pallas", "grouped"):
        with pytest.raises(UserError, match=rf"^implementation: '{name}' is compiled for GPUs, and this is a cpu"):
            fused.choose(name, "plain", mesh_lib.make_mesh())
    assert fused.choose("interpret", "plain", mesh_lib.make_mesh()) == "interpret"


def test_8_bit_moments_take_the_computed_bytes():
    state = fused.fused_adamw(RATE, moments="int8").init({"w": jnp.zeros((64, 512)), "b": jnp.zeros(512)})
    assert isinstance(state.mu["w"], eight_bit.Quantized) and state.mu["b"].dtype == jnp.float32
    assert sum(leaf.nbytes for leaf in jax.tree.leaves((state.mu["w"], state.nu["w"]))) == 2 * 64 * 512 * (1 + 4 / 256)


def test_impossible_settings_are_refused():
    params = {"w": jnp.zeros((4, 4))}
    with pytest.raises(UserError, match=r"^moments: must be one of fp32, bf16, int8, and is 'fp8'"):
        fused.fused_adamw(RATE, moments="fp8")
    with pytest.raises(
        UserError, match=r"^implementation: must be one of auto, jnp, pallas, grouped, interpret, and is 'cuda'"
    ):
        fused.fused_lion(RATE, implementation="cuda")
    with pytest.raises(UserError, match=r"^stochastic_rounding: nothing is stored in bf16 or int8"):
        fused.fused_adamw(RATE, stochastic_rounding=True).init(params)
    with pytest.raises(UserError, match=r"^n: the fused optimizers update floating weights, and it is int32"):
        fused.fused_adamw(RATE).init({"n": jnp.zeros(3, jnp.int32)})
    with pytest.raises(UserError, match=r"^b2: must be at least 0 and below 1, and is 1.5"):
        fused.fused_adamw(RATE, b2=1.5)
    with pytest.raises(UserError, match=r"^implementation: 'pallas' is compiled for GPUs, and this is a cpu"):
        tx = fused.fused_adamw(RATE, implementation="pallas")
        tx.update(params, tx.init(params), params)
    with pytest.raises(UserError, match=r"^mask: must be a tree of bools like the params"):
        tx = fused.fused_adamw(RATE, mask={"nope": True})
        tx.update(params, tx.init(params), params)
    tx = fused.fused_adamw(RATE)
    with pytest.raises(UserError, match=r"^update: the fused optimizers need params"):
        tx.update(params, tx.init(params))
