"""Checks divergences from a teacher against their equations and TRL. This module tests zerojax.ops.divergences."""

import pathlib

import divergences_by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.ops import columns, divergences, losses

ROUNDING = 2e-6  # float32
SUMS = 2e-5  # of gradients: chunks add up in another order
TRL = {"forward_kl": {"jsd_0": 0.5}, "reverse_kl": {"jsd_1": 0.5}, "jsd": {"jsd_0.3": 0.3, "jsd_0.5": 0.5}}


@pytest.fixture(scope="module")
def given():
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "trl" / "losses.npz") as found:
        return dict(found)


def scored(logits, **fields):
    """Returns what scores tokens by these logits."""
    return divergences.Scored(
        logits, np.eye(logits.shape[-1], dtype=np.float32), np.zeros(logits.shape[:-1], int), **fields
    )


@pytest.mark.parametrize("kind", divergences.KINDS)
def test_a_divergence_is_its_equation_and_trls(given, kind):
    student, teacher, counts = given["student"], given["teacher"], given["counts"]
    for name, share in TRL[kind].items():
        how = {"share": share, "temperature": 1.0, "chunk_tokens": 10}
        found = np.asarray(divergences.by_token(scored(student), scored(teacher), kind, **how).divergence)
        wanted = divergences_by_numpy.divergence(kind, student, teacher, share)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        np.testing.assert_allclose(np.sum(found * counts) / counts.sum(), given[f"trl/{name}"], rtol=ROUNDING)


@pytest.mark.parametrize("kind", divergences.KINDS)
def test_chunks_have_the_value_and_the_gradients_of_all_logits(kind):
    """With a bias, a cap, a temperature and another width of the teacher; no gradient reaches the teacher."""
    draw = np.random.default_rng(0)
    hidden, other = (draw.normal(size=(2, 5, width)).astype(np.float32) for width in (3, 4))
    kernel, fixed = (draw.normal(size=(width, 7)).astype(np.float32) for width in (3, 4))
    bias, labels = draw.normal(size=7).astype(np.float32), draw.integers(0, 7, (2, 5))
    counts, how = draw.random((2, 5)) < 0.7, {"share": 0.3, "temperature": 1.7}

    def in_chunks(hidden, kernel, other, fixed):
        student, teacher = divergences.Scored(hidden, kernel, labels, bias, cap=2.0), divergences.Scored(other, fixed)
        terms = divergences.by_token(student, teacher, kind, **how, chunk_tokens=4)
        return jnp.sum(terms.divergence * counts), terms

    def plain(hidden, kernel, other, fixed):
        own, wanted = 2 * jnp.tanh(hidden @ kernel / 2) + bias, other @ fixed
        logs = [jax.nn.log_softmax(logits / how["temperature"]) for logits in (wanted, own)]
        return jnp.sum(divergences.KINDS[kind](*logs, how["share"]) * counts), (own, wanted)

    arrays = hidden, kernel, other, fixed
    (found, terms), grads = jax.value_and_grad(in_chunks, (0, 1, 2, 3), has_aux=True)(*arrays)
    (wanted, logits), wanted_grads = jax.value_and_grad(plain, (0, 1), has_aux=True)(*arrays)
    np.testing.assert_allclose(found, wanted, rtol=SUMS)
    for grad, plain_grad in zip(grads, wanted_grads):
        np.testing.assert_allclose(grad, plain_grad, rtol=SUMS, atol=SUMS)
    assert not np.any(grads[2]) and not np.any(grads[3])
    for term, own in zip(terms[1:], logits):
        np.testing.assert_allclose(term, losses.mean_and_terms(own, labels)[1], rtol=SUMS)


def test_all_logits_never_exist_at_once():
    def loss(hidden, kernel):
        student = divergences.Scored(hidden, kernel, np.zeros((1, 64), np.int32))
        how = {"share": 0.5, "temperature": 1.0, "chunk_tokens": 16}
        return divergences.by_token(student, divergences.Scored(hidden, kernel), "jsd", **how).divergence.sum()

    traced = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.zeros((1, 64, 8)), jnp.zeros((8, 99))))
    assert "[16,99]" in traced and "[64,99]" not in traced and "[4,16,99]" not in traced


def test_a_kernel_by_columns_is_refused(monkeypatch):
    monkeypatch.setattr(columns, "take", lambda array: array)
    student = divergences.Scored(jnp.zeros((1, 1, 2)), jnp.zeros((2, 4)), np.zeros((1, 1), int))
    with pytest.raises(UserError, match="by_columns: a divergence"):
        divergences.by_token(student, student, "jsd", share=0.5, temperature=1.0)
