"""Checks that names mean what optax means. This module tests zerojax.optim.registry."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from zerojax import kinds, tree
from zerojax.errors import UserError
from zerojax.optim import fused, registry

OPTIONS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}


def make_params():
    keys = jax.random.split(jax.random.key(0))
    return {"kernel": jax.random.normal(keys[0], (4, 3)), "scale": jax.random.normal(keys[1], (3,))}


def three_steps(tx, params):
    """Returns params after three updates with gradients sin(params)."""
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_weight_decay_shrinks_matrices_and_spares_scales(name):
    plain = three_steps(registry.make_optimizer(name, 1e-2, weight_decay=0.0, **OPTIONS), make_params())
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(plain))
    assert not any(jnp.array_equal(*pair) for pair in zip(jax.tree.leaves(plain), jax.tree.leaves(make_params())))
    if "weight_decay" not in registry.READS[name]:
        with pytest.raises(UserError, match=rf"weight_decay: `optimizer={name}` applies none"):
            registry.make_optimizer(name, 1e-2, weight_decay=0.1, **OPTIONS)
        return
    decayed = three_steps(registry.make_optimizer(name, 1e-2, weight_decay=0.3, **OPTIONS), make_params())
    np.testing.assert_array_equal(decayed["scale"], plain["scale"])
    assert not jnp.allclose(decayed["kernel"], plain["kernel"])


def test_an_optimizer_with_weight_decay_has_a_tenth_if_none_is_given():
    own = {name: registry.own_weight_decay(name) for name in registry.OPTIMIZERS}
    assert own == {"adam": 0, "adamw": 0.1, "adafactor": 0.1, "lamb": 0.1, "lion": 0.1, "sgd": 0, "muon": 0.1}


def test_adamw_is_optax_with_the_given_settings():
    mask = {"kernel": True, "scale": False}
    expected = three_steps(optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask), make_params())
    found = three_steps(registry.make_optimizer("adamw", 1e-2, weight_decay=0.1, **OPTIONS), make_params())
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("moments", [pytest.param("bf16", marks=runs.LONG), "int8"])
@pytest.mark.parametrize("name", runs.cases(registry.FUSED, long=["adam"]))
def test_fewer_bits_give_the_steps_of_optax_but_for_rounding(name, moments):
    keys = jax.random.split(jax.random.key(0))
    params = {"kernel": jax.random.normal(keys[0], (64, 128)), "scale": jax.random.normal(keys[1], (3,))}
    decay = 0.0 if "weight_decay" not in registry.READS[name] else 0.3
    rate = optax.constant_schedule(1e-2)
    plain = registry.make_optimizer(name, rate, weight_decay=decay, **OPTIONS)
    few = registry.make_optimizer(name, rate, weight_decay=decay, moments=moments, **OPTIONS)
    expected, found = three_steps(plain, params), three_steps(few, params)
    # Each step moves a weight by about the rate; moments are off by 2**-8 (bf16), or up to a tenth of a small one (int8).
    wrong = {key: abs(found[key] - expected[key]) for key in params}
    assert max(float(jnp.mean(error)) for error in wrong.values()) < 0.02 * 3e-2
    by_path = {
        path: leaf.shape
        for path, leaf in tree.flatten(few.init(params))
        if "codes" not in path and "scales" not in path
    }
    of_plain = {path: leaf.shape for path, leaf in tree.flatten(plain.init(params))}
    assert by_path.items() <= of_plain.items() and (moments == "int8" or by_path == of_plain)


def test_all_counts_of_a_one_pass_state_advance_together():
    few = registry.make_optimizer("adamw", optax.constant_schedule(1e-2), weight_decay=0.1, moments="bf16", **OPTIONS)
    state = few.init(make_params())
    for finite, count in ((True, 1), (False, 1), (True, 2)):
        _, state, _ = few.apply(make_params(), state, make_params(), scale=1.0, finite=jnp.asarray(finite))
        assert {int(leaf) for path, leaf in tree.flatten(state) if path.endswith("count")} == {count}


KINDS = {"layer": {"kernel": (4, 3), "bias": (3,), "norm": {"scale": (4,)}}, "embed": {"embedding": (5, 4)}}


def by_hand(name, params, **how):
    """Returns params after three updates, each kind by an optimizer of its own."""
    own = {kind: registry.make_optimizer(name, 1e-2 * rate, **how) for kind, rate in (("matrix", 0.5), ("bias", 2.0))}
    rest = registry.make_optimizer(name, 1e-2, **how)
    return three_steps(optax.partition({**own, "norm": rest, "embedding": rest}, kinds.weight_kinds), params)


@pytest.mark.parametrize(
    "name, moments", [*((name, "fp32") for name in registry.OPTIMIZERS), ("adamw", "bf16"), ("lion", "bf16")]
)
def test_rates_by_kind_are_those_of_an_optimizer_for_each(name, moments):
    shapes = jax.tree.leaves(KINDS, is_leaf=lambda node: isinstance(node, tuple))
    leaves = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    params = jax.tree.unflatten(jax.tree.structure(KINDS, is_leaf=lambda node: isinstance(node, tuple)), leaves)
    decay = 0.0 if name in ("adam", "sgd", "adafactor") else 0.3  # adafactor's does not follow the rate
    how = {**OPTIONS, "weight_decay": decay, "in_float32": True}
    tx = registry.make_optimizer(name, 1e-2, rates="matrix=0.5,bias=2", moments=moments, **how)
    plain = registry.make_optimizer(name, 1e-2, moments=moments, **how)
    chex.assert_trees_all_equal_structs(tx.init(params), plain.init(params))
    with fused.of_a_part():  # of muon, whose biases alone are no matrices
        expected = by_hand(name, params, **how)
    # Stochastic rounding of moments to eight bits moves a step of about the rate by so much
    chex.assert_trees_all_close(three_steps(tx, params), expected, rtol=0, atol=1e-6 if moments == "fp32" else 3e-3)


@pytest.mark.parametrize("rates", ["embeddings=0.1", "bias", "bias=x", "bias=-1", "bias=1e3", "bias=nan"])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(UserError, match=rf"^rates: '{rates}' is no kind of weights and a factor from 0 to 100; write"):
        registry.make_optimizer("adamw", 1e-3, weight_decay=0.0, rates=rates, **OPTIONS)


# Each optimizer, and those that round moments and weights.
EVERY = [(name, {}) for name in registry.OPTIMIZERS] + [
    (name, {"moments": moments, "rounds_weights": moments == "bf16"})
    for name, moments in zip(registry.FUSED, ("bf16", "int8", "bf16"))
]


@pytest.mark.parametrize(("name", "how"), EVERY, ids=str)
def test_a_step_takes_the_rate_of_the_steps_before_it_also_after_a_resume(name, how):
    """Step n is that of a constant rate, the schedule's at n, from the same state; a resume has the state's numbers alone."""
    decay = 0.1 if "weight_decay" in registry.READS[name] else 0.0

    @jax.jit
    def step(rates, grads, state, params):
        tx = registry.make_optimizer(name, lambda count: rates[count], weight_decay=decay, **OPTIONS, **how)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = make_params()
    state = registry.make_optimizer(name, lambda count: 0.0, weight_decay=decay, **OPTIONS, **how).init(params)
    rates = np.array([0.5, 0.25, 0.0625, 1.0], np.float32)
    for number in range(3):
        grads = jax.tree.map(jnp.sin, params)
        wanted, found = (step(own, grads, state, params) for own in (np.full_like(rates, rates[number]), rates))
        chex.assert_trees_all_equal(found, wanted)
        assert not any(jnp.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (found[0], params))))
        params, state = jax.tree.map(np.array, found)


def test_few_bits_need_an_optimizer_that_rounds():
    with pytest.raises(UserError, match=r"^moments: int8 needs an optimizer among adam, adamw, lion, and"):
        registry.make_optimizer("lamb", 1e-2, weight_decay=0.0, moments="int8", **OPTIONS)
    with pytest.raises(
        UserError, match=r"^rounds_weights: stochastic rounding needs an optimizer among .* `optimizer` is 'sgd'"
    ):
        registry.make_optimizer("sgd", 1e-2, weight_decay=0.0, rounds_weights=True, **OPTIONS)


def test_unknown_names_list_the_known():
    with pytest.raises(UserError, match=r"^optimizer: must be one of adam, adamw, .* and is 'adamww'"):
        registry.make_optimizer("adamww", 1e-3, weight_decay=0.0, **OPTIONS)
