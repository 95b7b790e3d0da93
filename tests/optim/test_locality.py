"""Compares what the traced update says with what the numbers do. This module tests zerojax.optim.locality."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import zerojax
from zerojax.optim import locality, registry

ROWS, COLUMNS, STEPS = 8, 4, 3
HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
ROUNDING = 1e-6  # the same float32 operations on arrays of another shape


def of_matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def labels(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim >= 2 else "vector", params)


def times_root_of_size(updates, params):
    return jax.tree.map(lambda u: u * u.size**0.5, updates)


def add_place(updates, params):
    return jax.tree.map(lambda u: u + jnp.arange(u.size, dtype=u.dtype).reshape(u.shape), updates)


def by_largest(updates, params):
    return jax.tree.map(lambda u: jax.lax.cond(jnp.max(jnp.abs(u)) > 0.5, lambda x: -x, lambda x: x, u), updates)


def doubled_until_long(updates, params):
    def double(u):
        return jax.lax.while_loop(lambda x: jnp.sum(x * x) < 1e3, lambda x: x * 2, u)

    return jax.tree.map(double, updates)


def squared_twice(updates, params):
    return jax.tree.map(lambda u: jax.lax.fori_loop(0, 2, lambda _, x: jnp.abs(x) * x, u), updates)


def running_sum(updates, params):
    return jax.tree.map(lambda u: jax.lax.scan(lambda carry, row: (carry + row, carry), 0 * u[0], u)[1], updates)


RATE = 0.1
ELEMENTWISE = {
    **{
        name: getattr(optax, name)(RATE)
        for name in (
            "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw optimistic_adam_v2 "
            "optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum yogi"
        ).split()
    },
    **{
        name: getattr(contrib, name)(RATE)
        for name in "acprop ademamix adopt cocob madgrad schedule_free_adamw simplified_ademamix".split()
    },
    "momentum": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "clip": optax.chain(optax.clip(0.1), optax.adam(RATE)),
    "a schedule": optax.adamw(optax.cosine_decay_schedule(RATE, 10), weight_decay=0.1, mask=of_matrices),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(RATE, 0.0, 10)),
    "masked": optax.masked(optax.adam(RATE), of_matrices),
    "by label": optax.multi_transform({"matrix": optax.adam(RATE), "vector": optax.sgd(RATE)}, labels),
    "several passes": optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "now and then": optax.conditionally_transform(optax.adam(RATE), lambda step: step % 2 == 0),
    "master weights": zerojax.with_master_weights(optax.adamw(RATE)),
    "one pass": zerojax.fused_adamw(RATE, implementation="jnp"),
    "one pass in 16 bits": zerojax.fused_lion(RATE, moments="bf16"),
    "a loop": optax.stateless(squared_twice),
    **{name: registry.make_optimizer(name, RATE, **HYPER) for name in ("adamw", "lion")},
}
PER_LEAF = {
    **{name: getattr(optax, name)(RATE) for name in "adafactor fromage lamb lars novograd sm3".split()},
    **{name: getattr(contrib, name)(RATE) for name in "muon galore".split()},
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=4),
    "clip by rms": optax.chain(optax.clip_by_block_rms(1e9), optax.adam(RATE)),  # a limit that is never reached
    "adaptive clip": optax.adaptive_grad_clip(0.1),
    "centralize": optax.chain(optax.centralize(), optax.adam(RATE)),
    "a table of NaNs": optax.zero_nans(),
    "its size": optax.stateless(times_root_of_size),
    "its place": optax.stateless(add_place),
    "a branch": optax.stateless(by_largest),
    "a loop until": optax.stateless(doubled_until_long),
    "a scan over rows": optax.stateless(running_sum),
    "stochastic rounding": zerojax.fused_adamw(RATE, moments="bf16", stochastic_rounding=True),
    "a state of its size": optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.full_like(p, p.size), params),
        lambda updates, state, params=None: (jax.tree.map(jnp.multiply, updates, state), state),
    ),
    "a constant array": optax.stateless(lambda u, p: {**u, "bias": u["bias"] * np.arange(u["bias"].size)}),
}
GLOBAL = {
    **{name: getattr(contrib, name)(RATE) for name in "dadapt_adamw dog dowg prodigy".split()},
    "global norm": optax.chain(optax.clip_by_global_norm(1e9), optax.adam(RATE)),
    "normalised": optax.normalize_by_update_norm(),
    "finite or not": optax.apply_if_finite(optax.adam(RATE), 3),
    "flatten": optax.flatten(optax.adam(RATE)),
    "mechanic": contrib.mechanize(optax.adam(RATE)),
    "the other's update": optax.stateless(lambda u, p: {**u, "bias": u["bias"] + u["kernel"][0]}),
    "needs the loss": contrib.momo(RATE),
    "noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),  # one key, split into as many as there are leaves
    "noise that is off": optax.noisy_sgd(RATE, eta=0.0, gamma=0.0, key=0),
}


def make_params(rows=ROWS):
    return {"kernel": jnp.ones((rows, COLUMNS)), "bias": jnp.ones((COLUMNS,))}


@pytest.mark.parametrize("kind, cases", [("elementwise", ELEMENTWISE), ("per_leaf", PER_LEAF), ("global", GLOBAL)])
def test_each_transformation_is_as_local_as_it_is(kind, cases):
    found = {name: locality.of(tx, make_params()) for name, tx in cases.items()}
    assert {name: local.kind for name, local in found.items()} == dict.fromkeys(cases, kind)
    assert all(bool(local.why) == (kind != locality.ELEMENTWISE) for local in found.values())


def three_steps(tx, params, grads):
    state = tx.init(params)
    for step in range(STEPS):
        updates, state = tx.update(grads if step else optax.tree.scale(-0.5, grads), state, params)
        params = optax.apply_updates(params, updates)
    return params["kernel"]


def rows(tree, start, stop, padding=0):
    return {**tree, "kernel": jnp.pad(tree["kernel"][start:stop], [(0, padding), (0, 0)])}


def test_elementwise_transformations_update_pieces_and_padded_leaves_as_the_leaf():
    """Also those by name: what is called elementwise is judged by three steps of numbers."""
    params, grads = (
        {"kernel": jax.random.normal(key, (ROWS, COLUMNS)), "bias": jnp.ones((COLUMNS,))}
        for key in jax.random.split(jax.random.key(0))
    )
    half = ROWS // 2
    run = jax.jit(lambda *trees: {name: three_steps(tx, *trees) for name, tx in ELEMENTWISE.items()})
    whole = run(params, grads)
    pieces = [run(*(rows(tree, *ends) for tree in (params, grads))) for ends in ((0, half), (half, ROWS))]
    padded = run(*(rows(tree, 0, half, padding=half) for tree in (params, grads)))
    for name in ELEMENTWISE:
        first, second = (piece[name] for piece in pieces)
        joined = jnp.concatenate([first, second])
        np.testing.assert_allclose(joined, whole[name], rtol=ROUNDING, atol=ROUNDING, err_msg=name)
        np.testing.assert_allclose(padded[name][:half], first, rtol=ROUNDING, atol=ROUNDING, err_msg=name)


def test_the_reason_names_the_weight_and_the_operation():
    assert locality.of(PER_LEAF["centralize"], make_params()).why == (
        "the update of kernel depends on the whole of kernel (reduce_sum)"
    )
    assert locality.of(GLOBAL["global norm"], make_params()).why == "the update of bias depends on kernel too"
    assert locality.of(PER_LEAF["its size"], make_params()).why == "the update depends on the shapes of the weights"
    assert "momo" in locality.of(GLOBAL["needs the loss"], make_params()).why


@pytest.mark.parametrize("name", ["prodigy", "dadapt_adamw", "dog"])
def test_a_state_that_belongs_to_no_weight_reaches_beyond_a_single_one(name):
    """It has no second weight to depend on: the others are masked, or there are none."""
    tx = getattr(contrib, name)(RATE)
    for found in (
        locality.of(tx, {"kernel": jnp.ones((ROWS, COLUMNS))}),
        locality.of(optax.masked(tx, of_matrices), make_params()),
    ):
        assert found.kind == locality.GLOBAL and found.why.endswith(" depends on kernel and belongs to no weight")
    assert locality.of(optax.adam(RATE), jnp.ones((ROWS, COLUMNS))).kind == locality.ELEMENTWISE  # params without names


def test_shapes_decide_where_the_transformation_looks_at_them():
    """Factored moments begin at 128 rows and columns; abstract weights are enough to see it."""
    tx = optax.scale_by_factored_rms()
    small, large = ({"kernel": jax.ShapeDtypeStruct((n, n), jnp.float32)} for n in (100, 256))
    assert locality.of(tx, small).kind == locality.ELEMENTWISE
    assert locality.of(tx, large).kind == locality.PER_LEAF
    assert locality.of(tx, small, pieces=large).kind == locality.PER_LEAF


def test_a_state_that_changes_its_structure_is_not_read():
    tx = optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (grads, (jnp.zeros(()),)))
    assert locality.of(tx, make_params()) == locality.Locality(
        locality.GLOBAL, "its update cannot be traced (its state changes its structure)"
    )


def test_weights_of_one_element_are_pieces_themselves():
    params = {"scale": jnp.ones(()), "one": jnp.ones((1, 1))}
    assert locality.of(optax.lamb(RATE), params).kind == locality.ELEMENTWISE
    assert locality.of(optax.clip_by_global_norm(1.0), params).kind == locality.GLOBAL


def test_8_bit_moments_share_scales_within_a_leaf():
    params = {"kernel": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    assert locality.of(zerojax.fused_adamw(RATE, moments="int8"), params).kind == locality.PER_LEAF


def test_kernels_are_read_in_their_plain_form():
    """An implementation for GPUs can be classified on any device, and is traced as itself afterwards."""
    tx = zerojax.fused_adamw(RATE, implementation="pallas")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert locality.of(optax.chain(optax.scale(1.0), tx), make_params()).kind == locality.ELEMENTWISE
    with pytest.raises(zerojax.UserError, match=r"^implementation: 'pallas' is compiled for GPUs"):
        three_steps(tx, make_params(), make_params())


def test_frozen_and_missing_weights_are_left_out():
    params = {"kernel": optax.MaskedNode(), "bias": jnp.ones((COLUMNS,))}
    assert locality.of(optax.adam(RATE), params).kind == locality.ELEMENTWISE
    assert locality.of(optax.adam(RATE), {"kernel": optax.MaskedNode()}).kind == locality.ELEMENTWISE


def test_weights_have_one_kind_where_the_same_operations_update_them():
    params = {name: {"w": jnp.ones((ROWS, COLUMNS)), "b": jnp.ones(COLUMNS)} for name in ("first", "second", "third")}

    def is_first(params):
        return {name: jax.tree.map(lambda _, own=name == "first": own, layer) for name, layer in params.items()}

    adam = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1, of_matrices))
    for told_apart in (None, optax.masked(optax.scale(0.5), is_first), optax.masked(optax.trace(0.9), is_first)):
        found = locality.of(optax.chain(adam, told_apart or optax.identity(), optax.scale(-1e-2)), params).alike
        of = dict(zip([(layer, name) for layer in params for name in ("b", "w")], found, strict=True))
        assert of["second", "w"] == of["third", "w"] != of["third", "b"] == of["second", "b"]
        assert (
            (of["first", "w"] == of["second", "w"]) == (of["first", "b"] == of["second", "b"]) == (told_apart is None)
        )
