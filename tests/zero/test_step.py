"""Checks training steps against optax on one device. This module tests zerojax.zero.step."""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import sys
import traceback
from typing import Any

import arrays
import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

from zerojax import jitted
from zerojax import mesh as mesh_lib
from zerojax.checkpoint import logical as logical_lib
from zerojax.errors import UserError
from zerojax.models.llama import family as presets
from zerojax.models.llama import model as llama
from zerojax.ops import losses
from zerojax.optim import master_weights
from zerojax.zero import shard_state, stages, step

LONGEST, STEPS, ROWS, LENGTH = 30, 10, 48, 9  # steps of one case, and of every other
SAME_LOSS = 1e-5  # relative, over 30 steps in float32: the bar of the project
ROUNDING = 2e-6  # the same float32 terms, summed in another order
BF16 = 1e-2  # relative: 8 bits of mantissa, over steps in which the loss itself moves by 35 %
CONFIG = dataclasses.replace(presets.PRESETS["test"], vocab_size=67)  # odd: neither 67 nor 64 divides by 3
MODEL = llama.Llama(CONFIG)
SCHEDULE = optax.linear_schedule(3e-3, 3e-4, LONGEST)
TX = optax.adamw(SCHEDULE, b1=0.9, b2=0.95, weight_decay=0.1)


@functools.cache
def make_params():
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]

    def draw(leaf):
        values = random.normal(0, 0.05, leaf.shape) if leaf.ndim > 1 else np.ones(leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(draw, shapes)


def batches():
    """Yields tokens of which some are far more frequent than others: something to learn."""
    random = np.random.default_rng(1)
    while True:
        yield (random.geometric(0.2, (ROWS, LENGTH)) % CONFIG.vocab_size).astype(np.int32)


@functools.cache
def truth() -> np.ndarray:
    """Losses and gradient norms of plain optax under jax.jit on one device; nothing of zerojax but the model."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), TX)

    def loss_fn(params, tokens):
        logits = MODEL.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def train_step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.global_norm(grads)

    params, opt_state, found = make_params(), tx.init(make_params()), []
    for tokens in itertools.islice(batches(), LONGEST):
        params, opt_state, *numbers = train_step(params, opt_state, tokens)
        found.append(numbers)
    return np.array(found).T


def run(
    stage,
    mesh=(1, 8),
    *,
    steps=STEPS,
    accum=1,
    blocks=r"layer_\d+",
    remat="dots",
    dtype=None,
    reduce=jnp.float32,
    **options,
):
    """Returns the losses and gradient norms of each step, and the last state."""
    keeps_copy = dtype is not None and not stages.STAGES[stage].params
    tx = master_weights.with_master_weights(TX) if keeps_copy else TX
    state = TrainState.create(apply_fn=None, params=make_params(), tx=TX)
    state = logical_lib.from_logical(state, dtype if keeps_copy else None).replace(tx=tx)
    mesh = mesh_lib.make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)])
    state, part = shard_state.shard_train_state(state, mesh=mesh, stage=stage, **options)

    def loss_fn(params, batch, state):
        inputs, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        if reduce is None:
            return losses.cross_entropy(MODEL.apply({"params": params}, inputs), labels)
        return MODEL.apply({"params": params}, batch["tokens"], method="loss")

    heads = "head" if blocks and reduce is not None else ""
    how = {"compute_dtype": dtype, "blocks": blocks, "heads": heads, "remat": remat, "reduce_dtype": reduce}
    train_step = step.make_train_step(loss_fn, part, clip_norm=1.0, grad_accum=accum, **how)
    found = []
    for tokens in itertools.islice(batches(), steps):
        tokens = tokens if accum == 1 else tokens.reshape(accum, -1, LENGTH)
        state, metrics = train_step(state, {"tokens": tokens})
        found.append((metrics["loss"], metrics["grad_norm"]))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == part.shardings
    assert int(state.step) == steps
    return *np.array(found).T, state


CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1, 2 passes": {"stage": 1, "accum": 2},
    "stage 2, 4 x 2, 2 passes, none": {"stage": 2, "mesh": (4, 2), "accum": 2, "remat": "none"},
    "stage 3": {"stage": 3},
    "stage 3, no blocks, full": {"stage": 3, "blocks": "", "remat": "full"},
    "stage 3, 2 x 3, padded": {"stage": 3, "mesh": (2, 3), "indivisible": "pad", "min_size": 0, "steps": LONGEST},
    "stage 3, 2 x 2 x 2": {"stage": 3, "mesh": (2, 2, 2), "overrides": [("up/kernel", (None, "model"))]},
    "stage 1, by the compiler": {"stage": 1, "reduce": None},
    "stage 2, by the compiler, padded, none": {"stage": 2, "reduce": None, "indivisible": "pad", "remat": "none"},
    "stage 3, 2 x 4, by the compiler, no blocks, 2 passes, full": {
        "stage": 3,
        "mesh": (2, 4),
        "reduce": None,
        "blocks": "",
        "accum": 2,
        "remat": "full",
    },
}


LONG = (
    "stage 1, 2 passes",
    "stage 3",
    "stage 3, no blocks, full",
    "stage 2, 4 x 2, 2 passes, none",  # test_explicit.py has its gradients, and the test below stage 2
    "stage 0",  # tests/whole_steps/test_any_state.py has steps of stage 0 and a plain loop
    "stage 3, 2 x 2 x 2",  # tests/trainer/test_program.py has a model axis
    "stage 1, by the compiler",
    "stage 2, by the compiler, padded, none",
    # test_by_compiler.py and test_accumulate.py have such steps of small models.
    "stage 3, 2 x 4, by the compiler, no blocks, 2 passes, full",
)


@pytest.mark.parametrize("name", runs.cases(CASES, long=LONG))
def test_losses_are_those_of_plain_optax_at_every_step(name):
    found, norms, state = run(**CASES[name])
    expected, expected_norms = truth()[:, : len(found)]
    np.testing.assert_allclose(found, expected, rtol=SAME_LOSS)
    np.testing.assert_allclose(norms, expected_norms, rtol=10 * SAME_LOSS)  # squares of small numbers
    assert expected[-1] < 0.8 * expected[0] and expected_norms.max() > 1, "the run must learn, and clip"
    if "3, padded" in name:
        assert state.params["embed"]["embedding"].shape == (69, 64)
        assert not np.asarray(state.params["embed"]["embedding"])[67:].any(), "padding must stay zero"


@runs.LONG
def test_bf16_params_stay_their_masters_rounded_and_follow_float32():
    losses, _, state = run(2, dtype=jnp.bfloat16)
    np.testing.assert_allclose(losses, truth()[0, :STEPS], rtol=BF16)
    differs = total = 0
    for param, master in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state.master)):
        assert param.dtype == jnp.bfloat16 and master.dtype == jnp.float32
        differs += int(jnp.sum(param != master.astype(jnp.bfloat16)))
        total += param.size
    assert differs <= total // 10_000  # ties in the last place


# Small models from here on


def linear_state(tx=optax.sgd(0.5)):
    params = {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "b": jnp.zeros((8,))}
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def linear_loss(params, batch, state):
    return jnp.mean((batch["x"] @ params["w"] + params["b"]) * batch["y"])


def linear_batch(rows=16, scale=1.0, seed=0):
    x, y = arrays.normal(seed, (2, rows, 8))
    return {"x": scale * x, "y": y}


def shard(state, stage=3, **options):
    return shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=stage, min_size=0, **options)


@pytest.mark.parametrize("clip_norm", [0.0, 1e-4, 0.1])
def test_clipping_is_optax_clip_by_global_norm(clip_norm):
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    state, part = shard(linear_state())
    train_step = step.make_train_step(linear_loss, part, clip_norm=clip_norm, donate=False)
    for scale in (0.0, 1e-3, 1.0, 1e4):
        batch = linear_batch(scale=scale)
        grads = jax.grad(linear_loss)(linear_state().params, batch, None)
        clipped, _ = clip.update(grads, clip.init(grads))
        new, metrics = train_step(state, batch)
        np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=ROUNDING)
        for key in grads:
            moved = (np.asarray(state.params[key]) - np.asarray(new.params[key])) / 0.5
            np.testing.assert_allclose(moved, clipped[key], rtol=1e-4, atol=4e-7)


@pytest.mark.parametrize("donate", [True, False])
def test_the_old_states_memory_is_reused_where_asked(donate):
    state, part = shard(linear_state(optax.adam(1e-3)))
    step.make_train_step(linear_loss, part, donate=donate)(state, linear_batch())
    assert {leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state))} == {donate}


def test_a_batch_may_come_from_the_host_or_lie_on_the_mesh():
    state, part = shard(linear_state())
    train_step = step.make_train_step(linear_loss, part, donate=False)
    batch = linear_batch()
    host, sharded = jax.device_get(batch), jax.device_put(batch, part.batch_sharding)
    results = [jax.device_get(train_step(state, b)[0].params) for b in (host, sharded)]
    chex.assert_trees_all_equal(*results)


BAD_BATCHES = {
    "rows": (
        1,
        linear_batch(12),
        r"^batch/x: dim 0 of \(12, 8\) does not divide by data \* replica = 8; use a multiple",
    ),
    "rows a pass": (2, jax.tree.map(lambda x: x.reshape(2, 6, 8), linear_batch(12)), r"^batch/x: dim 1 of \(2, 6, 8\)"),
    "passes": (
        2,
        linear_batch(16),
        r"^batch/x: shape \(16, 8\) must begin with grad_accum=2, then examples; reshape it to \(2, 8, 8\)",
    ),
    "a number": (2, {"x": jnp.ones(())}, r"^batch/x: shape \(\) must begin with grad_accum=2"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_that_does_not_fit_is_named(name):
    accum, batch, message = BAD_BATCHES[name]
    state, part = shard(linear_state())
    train_step = step.make_train_step(linear_loss, part, grad_accum=accum)
    with pytest.raises(UserError, match=message):
        train_step(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params)), "nothing may be lost"


def test_an_unknown_result_of_the_loss_is_named():
    state, part = shard(linear_state())
    train_step = step.make_train_step(lambda p, b, s: (linear_loss(p, b, s), {"stats": {}}), part)
    with pytest.raises(
        UserError,
        match=r"^loss_fn: returned \['stats'\] beside the loss; allowed are 'state' and 'metrics': return loss, or",
    ):
        train_step(state, linear_batch())


def test_fewer_than_one_pass_is_refused():
    _, part = shard(linear_state())
    with pytest.raises(UserError, match=r"^grad_accum: must be at least 1, and is 0$"):
        step.make_train_step(linear_loss, part, grad_accum=0)


@pytest.mark.parametrize(
    ("clip_norm", "accum"),
    [(0.0, 1), (0.5, 2), pytest.param(0.0, 2, marks=runs.LONG), pytest.param(0.5, 1, marks=runs.LONG)],
)
def test_complex_weights_train_and_their_norm_counts_both_parts(clip_norm, accum):
    w = jnp.asarray([1.0 + 2.0j, 0.5 - 1.0j])
    x = jnp.linspace(-1.0, 1.0, 32).reshape(16, 2)

    def loss_of(params, x, _):
        return jnp.mean(jnp.abs(jnp.sum(params["w"] * x, axis=-1) - 1.0) ** 2)

    state = TrainState.create(apply_fn=None, params={"w": w}, tx=optax.sgd(1.0))
    on, partition = shard(state)
    train = step.make_train_step(loss_of, partition, clip_norm=clip_norm, grad_accum=accum, donate=False)
    after, metrics = train(on, x if accum == 1 else x.reshape(2, 8, 2))
    grad = np.asarray(jax.grad(loss_of)({"w": w}, x, None)["w"])
    norm = np.linalg.norm(grad)
    assert np.abs(grad.imag).max() > 0.1
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    np.testing.assert_allclose(
        w - after.params["w"], grad * (min(1.0, clip_norm / norm) if clip_norm else 1), rtol=1e-5
    )
    with pytest.raises(UserError, match=r"^reduce_dtype: params/w is complex64"):
        step.make_train_step(loss_of, partition, reduce_dtype=jnp.float32)


@pytest.mark.parametrize("accum", runs.cases([1, 2], long=[1]))
def test_with_64_bits_enabled_no_dtype_of_the_state_changes(accum):
    with jax.enable_x64(True):
        state = linear_state(optax.adam(1e-3))
        on, partition = shard(state)
        train = step.make_train_step(linear_loss, partition, grad_accum=accum, reduce_dtype=jnp.float32, donate=False)
        batch = jax.tree.map(
            lambda leaf: leaf.reshape(accum, -1, *leaf.shape[1:]) if accum > 1 else leaf, linear_batch()
        )
        after, _ = train(on, batch)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, on)


MOST_FRAMES = 9  # of zerojax between the public step and the user's loss: as a traceback of a user's mistake shows


@pytest.mark.parametrize(
    ("reduce", "blocks", "accum", "frozen"),
    list(itertools.product([None, jnp.float32], ["", r"layers_\d"], [1, 2], [False, True])),
)
def test_few_frames_lie_between_the_step_and_the_users_loss(reduce, blocks, accum, frozen):
    model, depths = nn.Sequential([nn.Dense(8), nn.Dense(8)]), set()
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    options = {"mesh": mesh_lib.make_mesh(), "trainable": "layers_1" if frozen else ""}
    state, part = shard_state.shard_train_state(state, **options)
    package = str(pathlib.Path(step.__file__).parent.parent)

    def loss_fn(params, batch, state):
        frames = [frame.filename for frame in traceback.extract_stack() if frame.filename.startswith(package)]
        depths.add(len([name for name in frames if name != jitted.__file__]))  # that one is the public step
        return jnp.mean(model.apply({"params": params}, batch) ** 2)

    how = {"grad_accum": accum, "blocks": blocks, "reduce_dtype": reduce}
    batch = jnp.ones((16, 8) if accum == 1 else (2, 16, 8))
    jax.eval_shape(step.make_train_step(loss_fn, part, **how), state, batch)
    assert max(depths) <= MOST_FRAMES


OFF = {
    "offload",
    "step_programs",
    "wires",
    "fp8",
    "accumulate.py",
    "by_compiler.py",
    "forward_only.py",
    "loss_scale.py",
    "one_pass_update.py",
    "padding.py",
    "partition.py",
    "narrow_params.py",
    "arguments.py",
    "marks.py",
    "nnx_blocks.py",
    "lifted_blocks.py",
    "block_keys.py",
    "block_settings.py",
    "traced_blocks.py",
    "trace_segments.py",
    "tpu_slices.py",
    "returned_state.py",
    "dependence.py",
    "parts.py",
    "xla_options.py",
}


@pytest.mark.parametrize("blocks", [pytest.param("", marks=runs.LONG), r"layers_\d"])
def test_a_plain_step_enters_no_module_of_what_is_off(blocks):
    model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh())
    entered, folder = set(), pathlib.Path(step.__file__).parent

    def loss_fn(params, batch, state):
        return jnp.mean(model.apply({"params": params}, batch) ** 2)

    train_step = step.make_train_step(loss_fn, part, blocks=blocks, reduce_dtype=jnp.float32)
    sys.setprofile(lambda frame, event, _: entered.add(pathlib.Path(frame.f_code.co_filename)))
    try:
        jax.eval_shape(train_step, state, jnp.ones((16, 8)))
    finally:
        sys.setprofile(None)
    names = {name for path in entered if path.is_relative_to(folder) for name in path.relative_to(folder).parts}
    assert "explicit.py" in names and names.isdisjoint(OFF), names & OFF


@pytest.mark.parametrize("reduce", [None, jnp.float32])
def test_a_loss_is_traced_once_a_pass_and_a_second_step_traces_nothing(reduce):
    chex.clear_trace_counter()
    params = {"w": jnp.ones((16, 8))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh())
    loss_fn = chex.assert_max_traces(lambda params, batch, state: jnp.mean((batch @ params["w"]) ** 2), n=1)
    train_step = step.make_train_step(loss_fn, part, reduce_dtype=reduce)
    for _ in range(2):
        state, _ = train_step(state, jnp.ones((8, 16)))
    chex.assert_tree_all_finite(state.params)


@pytest.mark.parametrize("reduce", [None, jnp.float32])
def test_trained_weights_that_the_loss_does_not_read_are_told_before_compiling(reduce):
    params = {name: jnp.ones((16, 8)) for name in "abcde"}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    one = {"x": jnp.ones((8, 16))}
    two = {**one, "y": jnp.ones((8, 8))}
    for trainable, reads, batch, line in (
        ("a|b", "c", one, r"^loss_fn: reads no trainable weight \(params/a, params/b\).* zerojax.with_lora"),
        ("a|b", "bc", one, "^loss_fn: does not read params/a, whose gradients are 0"),
        ("a|b", "ab", one, ""),
        ("", "", two, r"^loss_fn: reads no trainable weight \(params/a, params/b, params/c and 2 more\)"),
        ("", "e", two, "^loss_fn: does not read params/a, params/b, params/c and 1 more, whose"),
    ):
        if reduce is None and not trainable:
            continue  # such a loss is traced once
        sharded, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), trainable=trainable)

        def loss_fn(params, batch, state, reads=reads):
            del state
            return sum((jnp.mean((batch["x"] @ params[name]) ** 2) for name in reads), jnp.mean(batch["x"]))

        train_step = step.make_train_step(loss_fn, part, reduce_dtype=reduce)
        is_refused = "no trainable" in line
        told = pytest.raises(UserError, match=line) if is_refused else pytest.warns(UserWarning, match=line)
        with told if line else contextlib.nullcontext():
            train_step.trace(sharded, batch)


def test_blocks_that_miss_a_module_of_the_same_weights_are_told_when_the_step_is_made():
    params = {f"block_{n}": {"kernel": jax.ShapeDtypeStruct((16, 16), jnp.float32)} for n in range(12)}
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.sgd(0.1)), params)
    partition = stages.partition_state(state, mesh=mesh_lib.make_mesh(), min_size=0)
    with pytest.warns(UserWarning, match=r"^blocks: .* does not match block_10, block_11, though"):
        step.make_train_step(lambda params, batch, state: 0.0, partition, blocks=r"block_\d")
