"""Checks the loss of a sharded output projection against that of the gathered one. This module tests zerojax.ops.sharded_losses."""

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.ops import columns, losses

WAYS, EMBED, VOCAB = 8, 16, 24
ROUNDING = 1e-6  # the same float32 sums in another order; values are of order 1


@pytest.mark.parametrize("with_terms", [False, True])
@pytest.mark.parametrize("chunk", [5, 4096])
def test_loss_and_gradients_are_those_of_the_gathered_kernel(chunk, with_terms):
    """Also where chunks do not divide a device's tokens, and with the loss of each token beside the mean."""
    hidden = arrays.normal(0, (2 * WAYS, 7, EMBED)) / 4  # logits of order 1, so that their rounding is below the bound
    kernel = arrays.normal(1, (EMBED, VOCAB))
    labels = arrays.integers(2, (2 * WAYS, 7), 0, VOCAB)

    def of_device(hidden, sink, shard, labels):
        with columns.used():
            seen = columns.add("kernel", columns.Columns(shard, "data", WAYS), sink)
            if with_terms:
                loss, terms = losses.one_pass_and_terms(hidden, seen, labels, chunk_tokens=chunk)
            else:
                loss, terms = losses.one_pass_cross_entropy(hidden, seen, labels, chunk_tokens=chunk), 0.0 * labels
        return jax.lax.pmean(loss, "data"), terms

    own, split = P("data"), P(None, "data")
    mesh, specs = zerojax.make_mesh(data=WAYS), {"in_specs": (own, split, split, own), "out_specs": (P(), own)}
    mapped = jax.value_and_grad(jax.shard_map(of_device, mesh=mesh, check_vma=False, **specs), (0, 1), has_aux=True)
    (loss, terms), grads = jax.jit(mapped)(hidden, jnp.zeros(kernel.shape), kernel, labels)
    found = loss, grads
    expected = jax.value_and_grad(lambda h, k: losses.cross_entropy(h @ k, labels), argnums=(0, 1))(hidden, kernel)
    if with_terms:
        each = losses.mean_and_terms(hidden @ kernel, labels)[1]
        np.testing.assert_allclose(terms, each, rtol=ROUNDING, atol=ROUNDING)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=ROUNDING, atol=ROUNDING), found, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "length, vocab, is_trained",
    [
        pytest.param(8, 24, True, marks=pytest.mark.long),
        (7, 22, True),
        pytest.param(7, 3, False, marks=pytest.mark.long),
    ],
)
def test_over_an_axis_of_the_compiler_they_are_too(length, vocab, is_trained):
    """Also where it divides neither the tokens nor the columns, and with a bias and labels that are left out."""
    hidden = 3 * arrays.normal(0, (4, length, EMBED))
    kernel, bias = arrays.normal(1, (EMBED, vocab)), arrays.normal(2, (vocab,))
    labels = arrays.integers(3, (4, length), -2, vocab).at[:, 0].set(1)
    labels = jnp.maximum(labels, -1)  # of devices, the numbers that count differ

    def of_device(hidden, kernel, labels, bias):
        kernel = kernel if is_trained else jax.lax.stop_gradient(kernel)
        how = {"bias": bias, "ignored": -1, "chunk_tokens": 5}
        loss, terms = losses.one_pass_and_terms(hidden, kernel, labels, **how)
        count = jnp.sum(labels >= 0)
        return jax.lax.psum(loss * count, "data") / jax.lax.psum(count, "data"), terms

    def reference(hidden, kernel):
        kernel = kernel if is_trained else jax.lax.stop_gradient(kernel)
        return losses.cross_entropy(hidden @ kernel + bias, labels, ignored=-1)

    own = P("data")
    mapped = jax.shard_map(
        of_device,
        mesh=zerojax.make_mesh(data=2, model=4),
        in_specs=(own, P(), own, P()),
        out_specs=(P(), own),
        axis_names={"replica", "data"},
        check_vma=False,
    )
    in_one = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1), has_aux=True))
    (loss, terms), grads = in_one(hidden, kernel, labels, bias)
    found, each = (loss, grads), losses.mean_and_terms(hidden @ kernel + bias, labels, ignored=-1)[1]
    np.testing.assert_allclose(terms, each, rtol=ROUNDING, atol=ROUNDING)
    expected = jax.value_and_grad(reference, argnums=(0, 1))(hidden, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=ROUNDING, atol=ROUNDING), found, expected)
