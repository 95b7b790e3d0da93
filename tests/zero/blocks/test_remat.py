"""Checks the residuals that policies keep. This module tests zerojax.zero.blocks.remat."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import experts, fp8, residuals
from zerojax.plan import flops
from zerojax.zero.blocks import marks, remat

X, W = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)


def kept(policy, marked=False):
    """Returns the shapes kept of tanh(x w) ** 2, beside the inputs."""

    def f(x, w):
        [y] = marks.not_kept(lambda: [x @ w]) if marked else [x @ w]
        return jnp.sum(jnp.tanh(y) ** 2)

    leaves = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(jax.checkpoint(f, policy=policy), x, w)[1], X, W))
    return [leaf.shape for leaf in leaves if leaf.shape not in (X.shape, W.shape)]


def test_dots_keeps_matmuls_full_nothing_and_none_more():
    assert kept(remat.REMAT["dots"]) == [(3, 5)]
    assert kept(remat.REMAT["full"]) == []
    assert len(kept(remat.REMAT["none"])) > 1


@pytest.mark.parametrize("name", remat.REMAT)
def test_all_but_full_keep_what_fused_attention_returns(name):
    def kept(primitive):
        return bool(remat.REMAT[name](jex.Primitive(primitive), *[jax.typeof(X)] * 2))

    assert kept("dot_product_attention_fwd_wrapper") == kept("pallas_call") == (name != "full")
    assert kept("dot_general") == (name in ("none", "dots"))
    named = remat.REMAT[name](jex.Primitive("name"), jax.typeof(X), name=residuals.ATTENTION)
    assert named == (name != "full")


@pytest.mark.parametrize("name", remat.REMAT)
def test_complex_numbers_are_computed_again_since_jax_keeps_none(name):
    def f(x, w):
        z = jax.lax.complex(x @ w, jnp.ones((3, 5)))
        return jnp.sum(jnp.abs(jnp.fft.rfft(z.real)) ** 2) + jnp.sum(jnp.abs(jnp.exp(z) @ z.T))

    found, plain = (jax.grad(g, argnums=(0, 1))(X, W) for g in (jax.checkpoint(f, policy=remat.REMAT[name]), f))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, plain)


def test_marked_matmuls_are_not_kept():
    assert kept(remat.REMAT["dots"], marked=True) == []


def test_of_an_fp8_matmul_the_scaled_result_and_the_scales_are_kept_unless_it_is_marked():
    def kept_of(policy, marked=False):
        def f(x, w):
            def multiply():
                return [fp8.dot_general(jnp.tanh(x), w, (((1,), (0,)), ((), ())))]

            [y] = marks.not_kept(multiply) if marked else multiply()
            return jnp.sum(jnp.tanh(y) ** 2)

        leaves = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(jax.checkpoint(f, policy=policy), x, w)[1], X, W))
        return sorted(leaf.shape for leaf in leaves if leaf.shape not in (X.shape, W.shape) and leaf.size)

    scales = [(), ()]
    assert kept_of(remat.REMAT["dots"]) == [*scales, (3, 5)]
    assert kept_of(remat.REMAT["dots"], marked=True) == scales
    assert kept_of(remat.REMAT["full"]) == []


@pytest.mark.parametrize("name, products", [("none", 9), ("dots", 9), ("attention", 11), ("full", 11)])
def test_dots_multiplies_no_row_by_an_expert_twice_and_no_policy_by_its_last_matrix(name, products):
    tokens, dim, width, count, top = 16, 8, 4, 4, 2
    shapes = (tokens, dim), (tokens, count), (count, dim, width), (count, dim, width), (count, width, dim)

    def loss(policy, x, logits, *matrices):
        def layer(x, logits, *matrices):
            return x + experts.apply(x, experts.route(logits, top), *matrices)

        return jnp.sum(jnp.tanh(jax.checkpoint(layer, policy=policy)(x, logits, *matrices)))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = jax.grad(loss, argnums=(1, 2, 3, 4, 5))
    counted = flops.count(jax.make_jaxpr(grads, static_argnums=0)(remat.policy(name), *arrays))
    assert sum(counted.values()) == products * 2 * (tokens * top) * dim * width


@pytest.mark.parametrize("precision", [None, "highest", "default"])
def test_a_mark_leaves_the_precision_and_the_compiled_program_as_they_are(precision):
    def matmul(x, w):
        return x @ w

    def marked(x, w):
        return marks.not_kept(lambda: [matmul(x, w)])[0]

    with jax.default_matmul_precision(precision):
        assert (precision or "default").upper() in str(jax.make_jaxpr(marked)(X, W))
        assert kept(remat.REMAT["dots"], marked=True) == []
        texts = [jax.jit(f).lower(X, W).compile().as_text() for f in (marked, matmul)]
    computed = [[line.split("metadata")[0] for line in text.splitlines() if " dot(" in line] for text in texts]
    assert computed[0] == computed[1] and computed[0]


@pytest.mark.parametrize("precision", ["default", jax.lax.Precision.DEFAULT, ("default", "default")])
def test_a_matmul_with_a_precision_of_default_is_kept(precision):
    def f(x, w):
        return jnp.sum(jnp.tanh(jnp.dot(x, w, precision=precision)) ** 2)

    found = jax.eval_shape(lambda x, w: jax.vjp(jax.checkpoint(f, policy=remat.REMAT["dots"]), x, w)[1], X, W)
    assert (3, 5) in [leaf.shape for leaf in jax.tree.leaves(found)]
