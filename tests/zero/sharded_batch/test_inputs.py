"""Checks how batches are sharded and cast. This module tests zerojax.zero.sharded_batch.inputs."""

import re

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import mesh as mesh_lib
from zerojax.zero.sharded_batch import dependence, inputs

MESH = zerojax.make_mesh()
WEIGHTS = jnp.linspace(0.5, 2.0, 16)  # of 16 classes beside 16 examples
BATCH = {
    "x": arrays.normal(1, (16, 8)),
    "y": jnp.arange(16) % 16,
    "class_weights": WEIGHTS,
    "first_time": arrays.normal(2, (3, 16)),
}
SPECS = {"x": P(mesh_lib.EXAMPLES), "y": P(mesh_lib.EXAMPLES), "class_weights": P(), "first_time": P(None, "data")}


def make_step(loss=None, **options):
    params = {"w": arrays.normal(0, (8, 16))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8)
    return state, zerojax.make_train_step(loss or loss_fn, part, donate=False, **options)


def loss_fn(params, batch, state):
    terms = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"], batch["y"])
    weights = batch["class_weights"][batch["y"]]
    return zerojax.Mean(jnp.sum(weights * terms) + batch["first_time"].sum(), weights.sum())


@pytest.mark.parametrize(
    "batch_specs", [[("class", P()), ("^first", SPECS["first_time"])], SPECS], ids=["regexes", "a tree"]
)
@pytest.mark.parametrize("passes", [1, 2])
def test_leaves_that_count_no_examples_and_other_layouts_keep_their_meaning(passes, batch_specs):
    state, train_step = make_step(reduce_dtype=jnp.float32, grad_accum=passes, batch_specs=batch_specs)
    batch = dict(BATCH)
    if passes > 1:
        batch |= {name: leaf.reshape(2, 8, *leaf.shape[1:]) for name, leaf in BATCH.items() if name in ("x", "y")}
        batch["first_time"] = jnp.stack(jnp.split(BATCH["first_time"], 2, axis=1))
    after, metrics = train_step(state, batch)
    loss, grad = jax.value_and_grad(lambda p: zerojax_value(loss_fn(p, BATCH, None)))(jax.device_get(state.params))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"] - after.params["w"], grad["w"], atol=2e-6)


def zerojax_value(mean):
    return mean.total / mean.weight


def entropies(batch, params, weights=1.0):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"] * weights, batch["y"])


def of_class_weights(params, batch, state):
    return jnp.mean(entropies(batch, params) * batch["others"][batch["y"]])


def of_class_scales(params, batch, state):
    return jnp.mean(entropies(batch, params, batch["others"]))


def of_prototypes(params, batch, state):
    near = jnp.tanh(batch["x"] @ params["w"]) @ batch["others"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(near, batch["y"]))


def of_support(params, batch, state):
    support, labels = batch["others"]
    near = jax.nn.softmax((batch["x"] @ params["w"]) @ (support @ params["w"]).T) @ jax.nn.one_hot(labels, 16)
    return -jnp.mean(jnp.sum(jnp.log(near + 0.1) * jax.nn.one_hot(batch["y"], 16), -1))


def of_other_examples(params, batch, state):
    return jnp.mean(entropies(batch, params)) - jnp.mean(jnp.tanh(batch["others"] @ params["w"]))


ROWS_OF = {  # as many rows as examples: (the loss, the other leaves, whether these count examples)
    "weights of classes": (of_class_weights, WEIGHTS, False),
    "scales of classes": (of_class_scales, WEIGHTS, False),
    "prototypes": (of_prototypes, arrays.normal(3, (16, 16)), False),
    "a set and its labels": (of_support, (BATCH["x"][::-1] + 1, (BATCH["y"] * 7) % 16), False),
    "other examples": (of_other_examples, BATCH["x"][::-1] + 1, True),
}


@pytest.mark.parametrize("name", ROWS_OF)
def test_leaves_that_have_as_many_rows_as_examples_and_may_be_none_are_refused_until_a_spec_says_what_they_are(name):
    loss, others, count_examples = ROWS_OF[name]
    batch = {"x": BATCH["x"], "y": (BATCH["y"] * 5) % 16, "others": others}
    state, train_step = make_step(loss, reduce_dtype=jnp.float32)
    if not count_examples:
        with pytest.raises(zerojax.UserError, match=r"^batch/(others(/\d)?|x): .*; pass batch_specs=\[") as error:
            jax.eval_shape(train_step, state, batch)
        assert "\n" not in str(error.value).split("\n-----")[0]
        state, train_step = make_step(loss, reduce_dtype=jnp.float32, batch_specs=[("others", P())])
    _, metrics = train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss(jax.device_get(state.params), batch, None), rtol=2e-6)


def test_leaves_of_unlike_lengths_are_refused_where_each_device_sees_its_own_examples():
    batch = BATCH | {"class_weights": jnp.ones(24), "first_time": jnp.ones(())}
    state, by_device = make_step(reduce_dtype=jnp.float32)
    expected = r"^batch/class_weights: has 24 rows and batch/x has 16, .* pass batch_specs=\[\(\"\^class_weights\$\", "
    with pytest.raises(zerojax.UserError, match=expected):
        jax.eval_shape(by_device, state, batch)
    state, by_compiler = make_step()
    jax.eval_shape(by_compiler, state, batch)


REFUSED = {
    "a spec that does not fit": (
        [("x", P("data", None, None)), ("first", P())],
        r"^batch/x: batch_specs gives .*, with 2 dims for 3 entries",
    ),
    "another mesh's axis": (
        [("x", P("fsdp")), ("first", P())],
        r"^batch/x: batch_specs gives P.*'fsdp'.*, and the mesh has no axis 'fsdp' but",
    ),
    "a length that does not divide": (
        [("^first", P("data"))],
        r"^batch/first_time: dim 0 of \(3, 16\) does not divide by data = 8",
    ),
    "no leaf": (
        [("weights$", P()), ("wieghts", P())],
        r"^batch_specs: 'wieghts' matches no leaf of the batch; .* x, y",
    ),
    "another tree": ({"x": P()}, r"^batch_specs: is a tree of another structure than the batch"),
    "no regex": ([("[", P())], r"^batch_specs: '\[' is not a regex"),
    "no spec": ([("x", "data")], r"^batch_specs: 'x' needs a PartitionSpec, and has 'data'"),
    "no specs": ("data", r"^batch_specs: it must be a PartitionSpec, and is 'data'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specs_that_do_not_fit_are_refused(name):
    batch_specs, message = REFUSED[name]
    with pytest.raises(zerojax.UserError, match=message):
        state, train_step = make_step(batch_specs=batch_specs)
        jax.eval_shape(train_step, state, BATCH)


@pytest.mark.parametrize("context", [2, 4])
def test_where_devices_have_tokens_of_their_own_specs_name_every_leaf_and_one_with_tokens(context):
    mesh, batch = (
        zerojax.make_mesh(context=context),
        {"tokens": jnp.ones((8, 16)), "keys": jax.random.split(jax.random.key(0), 8)},
    )
    rows, tokens = P(("replica", "data")), P(("replica", "data"), "context")
    for batch_specs, message in (
        (
            [("tokens", tokens)],
            f"^batch/keys: the mesh has context={context}, and nothing says which dim of it counts tokens",
        ),
        ([("tokens", tokens), ("keys", rows)], "^batch/keys: has a random key of each example"),
        ([("tokens", rows), ("keys", P())], "^batch_specs: no leaf has a dim of tokens"),
    ):
        with pytest.raises(zerojax.UserError, match=message):
            jax.eval_shape(inputs.Layout(mesh, batch_specs=batch_specs).place, batch)
    jax.eval_shape(inputs.Layout(mesh, batch_specs=[("tokens", tokens), ("keys", P())]).place, batch)


def test_the_number_of_examples_is_that_of_a_pass():
    layout = inputs.Layout(zerojax.make_mesh(), 2, [("weights", P())])
    assert dependence.examples(layout, {"weights": jnp.ones((2, 3)), "x": jnp.ones((2, 8, 4))}) == 8
    assert dependence.examples(inputs.Layout(zerojax.make_mesh()), {"n": jnp.ones(())}) == 1


BY_DEFAULT = inputs.Layout(MESH).cast_batch  # that of the forward pass alone, which takes no such argument


@pytest.mark.parametrize(
    ("which", "cast"), [(True, {"x", "time"}), (BY_DEFAULT, {"x", "time"}), (False, set()), ("^x", {"x"})]
)
def test_the_dtype_of_the_forward_pass_applies_to_the_leaves_that_the_user_chose(which, cast):
    batch = {"x": jnp.ones(8), "time": jnp.ones(8), "y": jnp.ones(8, int)}
    found = inputs.Layout(MESH, cast_batch=which).place(batch, jnp.bfloat16)
    assert {name for name, leaf in found.items() if leaf.dtype == jnp.bfloat16} == cast
    assert found["y"].dtype == batch["y"].dtype
    for wrong in ("[", 1.5):
        with pytest.raises(zerojax.UserError, match=r"^cast_batch: " + re.escape(repr(wrong)) + " is not a regex"):
            inputs.Layout(MESH, cast_batch=wrong)
