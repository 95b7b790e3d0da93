"""Checks vectors of texts and their loss against plain numpy, on one device and on several. This module tests zerojax.ops.contrastive."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.ops import contrastive

ROUNDING = 1e-5  # float32


def unit(array):
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def plain(queries, texts, counts, temperature):
    """Returns the mean loss, one query after the other, in float64."""
    every = [text for own, count in zip(texts, counts) if count for text in own]
    losses = []
    for query, own, count in zip(queries, texts, counts):
        if count:
            scores = np.array([query @ text / temperature for text in every])
            losses.append(np.log(np.exp(scores).sum()) - query @ own[0] / temperature)
    return np.mean(losses)


@pytest.mark.parametrize("beside", [1, 2], ids=["in-batch negatives", "a hard negative each"])
def test_the_loss_and_its_gradients_over_devices_are_those_of_all_queries_on_one(beside):
    draw = np.random.default_rng(0)
    queries, texts = unit(draw.normal(size=(8, 5))), unit(draw.normal(size=(8, beside, 5)))
    counts = np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32)
    arrays = queries.astype(np.float32), texts.astype(np.float32)

    def own(queries, texts, counts):
        terms, _ = contrastive.info_nce(queries, texts, counts, 0.3)
        return jnp.sum(terms * counts)

    mesh = mesh_lib.make_mesh(data=2, replica=2, devices=jax.devices()[:4])
    rows = P(mesh_lib.SUMMED)

    def over_devices(queries, texts):
        run = jax.shard_map(
            lambda *own_arrays: jax.lax.psum(own(*own_arrays), mesh_lib.SUMMED), mesh=mesh, in_specs=rows, out_specs=P()
        )
        return run(queries, texts, counts) / counts.sum()

    whole = functools.partial(lambda queries, texts: own(queries, texts, counts) / counts.sum())
    (one, grads), (several, others) = (
        jax.value_and_grad(run, (0, 1))(*arrays) for run in (whole, jax.jit(over_devices))
    )
    np.testing.assert_allclose([one, several], plain(queries, texts, counts, 0.3), rtol=ROUNDING)
    for grad, other in zip(grads, others):
        np.testing.assert_allclose(grad, other, rtol=ROUNDING, atol=1e-6)
        assert np.abs(grad).max() > 0.01


def test_a_vector_is_that_of_the_last_the_first_or_all_tokens_of_a_text_padded_at_either_end():
    states = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    mask = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], bool)
    wanted = {
        "last": [states[0, 2], states[1, 4]],
        "cls": [states[0, 0], states[1, 2]],
        "mean": [states[0, :3].mean(0), states[1, 2:].mean(0)],
    }
    assert wanted.keys() == {*contrastive.POOLING}
    for pooling, vectors in wanted.items():
        found = contrastive.pooled(states, mask, pooling)
        np.testing.assert_allclose(found, unit(np.stack(vectors)), rtol=ROUNDING)


def test_the_nearest_text_is_told_and_a_query_alone_loses_nothing():
    queries, texts = np.eye(3, dtype=np.float32)[[0, 2, 2]], np.eye(3, dtype=np.float32)[[0, 1, 2], None]
    _, nearest = contrastive.info_nce(queries, texts, np.ones(3, np.float32), 1.0)
    assert nearest.tolist() == [1, 0, 1]
    counts = np.array([1, 0, 0], np.float32)
    terms, _ = contrastive.info_nce(queries, texts, counts, 1.0)
    grads = jax.grad(lambda q: jnp.sum(contrastive.info_nce(q, texts, counts, 1.0)[0] * counts))(queries)
    assert terms[0] == 0 and np.isfinite(terms).all() and np.isfinite(grads).all()
