"""Tests experts against a loop over tokens and experts in numpy, and what balances them against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.ops import experts

F32 = 2e-5  # float32 sums of some hundred terms, in another order
TOKENS, DIM, WIDTH, EXPERTS, TOP = 24, 16, 12, 8, 3
ROUTERS = {
    "softmax": {},
    "not normalised": {"normalised": False, "scale": 2.0},
    "sigmoid with a bias": {"score": "sigmoid", "bias_E": np.linspace(-1, 1, EXPERTS).astype(np.float32), "scale": 2.5},
    "groups": {"score": "sigmoid", "groups": 4, "top_groups": 2},
}


def arrays():
    random = np.random.default_rng(0)
    shapes = (TOKENS, DIM), (TOKENS, EXPERTS), (EXPERTS, DIM, WIDTH), (EXPERTS, DIM, WIDTH), (EXPERTS, WIDTH, DIM)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def scores_of(logits, score):
    powers = np.exp(logits)
    return powers / powers.sum() if score == "softmax" else 1 / (1 + 1 / powers)


def chosen_of(logits, score="softmax", bias_E=0.0, groups=1, top_groups=1, **_):
    by = scores_of(logits, score) + bias_E
    ranked = sorted(range(groups), key=lambda group: -sum(sorted(np.split(by, groups)[group])[-2:]))[:top_groups]
    size = EXPERTS // groups
    return sorted((e for e in range(EXPERTS) if e // size in ranked), key=lambda e: -by[e])[:TOP]


def by_loop(x, logits, gate, up, down, capacity=TOKENS, score="softmax", normalised=True, scale=1.0, **router):
    """Returns the result, the rows of each expert, and how many skip theirs."""
    out, load, dropped = np.zeros_like(x), np.zeros(EXPERTS, int), 0
    for t in range(TOKENS):
        chosen, scores = chosen_of(logits[t], score, **router), scores_of(logits[t], score)
        for e in chosen:
            weight = scale * scores[e] / (scores[chosen].sum() if normalised else 1)
            load[e] += 1
            if load[e] > capacity:
                dropped += 1
                continue
            hidden = x[t] @ gate[e]
            out[t] += weight * ((hidden / (1 + np.exp(-hidden)) * (x[t] @ up[e])) @ down[e])
    return out, load, dropped


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_are_those_of_a_loop_over_tokens_and_experts(router):
    for capacity in (None, 7):
        x, logits, *matrices = arrays()

        @jax.jit
        def run(x, logits, *matrices, capacity=capacity):
            routing = experts.route(logits, TOP, **ROUTERS[router])
            return experts.apply(x, routing, *matrices, capacity=capacity), experts.metrics(routing, capacity)

        found, measured = run(x, logits, *matrices)
        expected, load, dropped = by_loop(x, logits, *matrices, capacity=capacity or TOKENS, **ROUTERS[router])
        assert bool(dropped) == (capacity is not None)
        np.testing.assert_allclose(found, expected, atol=F32 * np.abs(expected).max())
        np.testing.assert_allclose(measured["load"], load.max() / load.mean(), rtol=F32)
        np.testing.assert_allclose(measured["dropped"], dropped / (TOKENS * TOP), rtol=F32)


def test_gradients_are_those_of_all_experts_on_all_tokens():
    x, logits, *matrices = arrays()
    logits[:, 0] += 100  # one expert has all tokens, and some have none

    def dense(x, logits, gate, up, down):
        routing = experts.route(logits, TOP)
        weights = (
            jnp.zeros((TOKENS, EXPERTS)).at[jnp.arange(TOKENS)[:, None], routing.experts_TK].set(routing.weights_TK)
        )
        hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
        return jnp.sum(jnp.einsum("tef,efd,te->td", hidden, down, weights) ** 2)

    def sparse(x, logits, *matrices):
        return jnp.sum(experts.apply(x, experts.route(logits, TOP), *matrices) ** 2)

    both = jax.jit(lambda *inputs: [jax.grad(f, argnums=(0, 1, 2, 3, 4))(*inputs) for f in (sparse, dense)])
    for ours, theirs in zip(*both(x, logits, *matrices), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=F32 * np.abs(theirs).max())


def test_balance_of_all_devices_is_that_of_all_tokens():
    logits = arrays()[1]
    logits[:9, 2] += 5  # devices have other loads than all together
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:4])

    def loss(logits):
        routing = experts.route(logits, TOP)
        return experts.balance_loss(routing) + experts.z_loss(routing)

    def mean(logits):
        def on_device(logits):
            return jax.lax.pmean(loss(logits), "data")

        return jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)(logits)

    ours, theirs = (jax.jit(jax.value_and_grad(f))(logits) for f in (mean, loss))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=F32)
    np.testing.assert_allclose(ours[1], theirs[1], atol=F32 * np.abs(theirs[1]).max())


def test_losses_entropy_and_bias_of_a_balanced_router_are_closed_forms():
    even = experts.route(np.log(np.full((TOKENS, EXPERTS), 0.5, np.float32)), EXPERTS)
    np.testing.assert_allclose(experts.balance_loss(even), EXPERTS, rtol=F32)  # K = E
    np.testing.assert_allclose(experts.z_loss(even), np.log(EXPERTS / 2) ** 2, rtol=F32)
    np.testing.assert_allclose(experts.metrics(even)["entropy"], np.log(EXPERTS), rtol=F32)
    assert experts.capacity(TOKENS, TOP, EXPERTS, 1.25) == 12  # 11.25
    one = experts.route(np.eye(1, EXPERTS, 5, dtype=np.float32).repeat(TOKENS, 0), 1)
    bias = experts.balanced_bias(jnp.zeros(EXPERTS), one, 0.5)
    np.testing.assert_array_equal(bias, np.where(np.arange(EXPERTS) == 5, -0.5, 0.5))


def test_sparsemixer_weighs_each_expert_against_those_left_that_are_near_it():
    logits = np.asarray([[2.0, 1.9, -1.0, 1.0], [-1.0, -1.05, -3.0, -1.2], [0.0, -5.0, -0.1, -0.2]], np.float32)
    found = experts.route(logits, 2, score="sparsemixer", tolerance=0.1)
    # 1.9 is near 2, and nothing is near 1.9; -1.05 is near -1, and not -1.2; an output of 0 is near itself alone
    first, tie = 1 / (1 + np.exp(-0.1)), 1 / (1 + np.exp(-0.05))
    np.testing.assert_array_equal(found.experts_TK, [[0, 1], [0, 1], [0, 2]])
    np.testing.assert_allclose(found.weights_TK, [[first, 1], [tie, 1], [1, 1]], rtol=F32)
    grads = jax.grad(lambda given: experts.route(given, 2, score="sparsemixer", tolerance=0.1).weights_TK.sum())(logits)
    assert np.isfinite(grads).all() and (np.abs(grads[:2, :2]) > 0.01).all() and not np.any(grads[2])


def test_a_router_that_cannot_choose_is_refused():
    with pytest.raises(UserError, match="takes 5 of 8 experts from 1 of 2 groups"):
        experts.route(arrays()[1], 5, groups=2)
