"""Checks bounded scores and logits against plain definitions. This module tests zerojax.ops.softcap."""

import arrays
import jax
import jax.numpy as jnp
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax.ops import attention, context_attention, losses, softcap, tokens

CAP, ROUNDING = 3.0, 2e-5


def test_its_slope_is_its_derivative_and_no_cap_changes_nothing():
    x = jnp.linspace(-20, 20, 41)
    found = jax.vmap(jax.grad(lambda x: softcap.softcap(x, CAP)))(x)
    np.testing.assert_allclose(softcap.slope(softcap.softcap(x, CAP), CAP), found, atol=1e-6)
    assert softcap.softcap(x, 0.0) is x and softcap.slope(x, 0.0) == 1


def test_the_one_pass_loss_and_its_gradients_are_those_of_bounded_logits():
    hidden, kernel = 4 * arrays.normal(0, (2, 11, 8)), arrays.normal(1, (8, 13))
    labels = arrays.integers(2, (2, 11), 0, 13)

    def plain(hidden, kernel):
        return losses.cross_entropy(CAP * jnp.tanh(hidden @ kernel / CAP), labels)

    def one_pass(hidden, kernel):
        return losses.one_pass_cross_entropy(hidden, kernel, labels, cap=CAP, chunk_tokens=8)

    expected, found = (jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, kernel) for f in (plain, one_pass))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=ROUNDING), expected, found)


def test_attention_to_keys_of_other_devices_is_that_of_one_device_with_its_gradients():
    """By blocks, whose backward pass is written out, and by heads."""
    q, k, v = (3 * arrays.normal(seed, (2, 16, heads, 8)) for seed, heads in enumerate((4, 2, 2)))
    mesh = mesh_lib.make_mesh(context=2, devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec(None, "context")

    def one(q, k, v, window):
        return attention.attend(q, k, v, "xla", is_causal=True, window=window, cap=CAP)

    def parts(q, k, v, window):
        return tokens.attend(q, k, v, "xla", way=None, is_causal=True, window=window, cap=CAP)

    def plain(q, k, v, window):
        scores = CAP * jnp.tanh(jnp.einsum("bthn,bshn->bhts", q, jnp.repeat(k, 2, 2)) / np.sqrt(8) / CAP)
        distance = np.arange(16)[:, None] - np.arange(16)
        seen = (distance >= 0) & (distance < (window or 16))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshn->bthn", weights, jnp.repeat(v, 2, 2))

    def sharded(name):
        way = context_attention.Way(name, "contiguous", "")

        def run(q, k, v, window):
            def own(q, k, v):
                return context_attention.attend(
                    q, k, v, "xla", axis="context", way=way, order="contiguous", is_causal=True, window=window, cap=CAP
                )

            return jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(q, k, v)

        return run

    for window in (0, 5):
        found = {}
        for name, f in {
            "plain": plain,
            "one": one,
            "parts": parts,
            "ring": sharded("ring"),
            "ulysses": sharded("ulysses"),
        }.items():
            value = jax.jit(
                jax.value_and_grad(lambda q, k, v, f=f, window=window: (f(q, k, v, window) ** 2).sum(), (0, 1, 2))
            )
            found[name] = value(q, k, v)
        for name in ("one", "parts", "ring", "ulysses"):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-5), found["plain"], found[name]
            )
