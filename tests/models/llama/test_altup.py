"""Compares alternating updates of streams with their equations. This module tests zerojax.models.llama.altup."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models.llama import altup


def drawn(module, *args, method=None):
    params = module.init(jax.random.key(0), *args, method=method)["params"]
    random = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape), jnp.float32), params)


def test_streams_are_predicted_from_all_and_corrected_by_what_the_active_one_found():
    shape, random = altup.AltUp(streams=3, active=1, rank=2), np.random.default_rng(0)
    module = altup.ResidualStreams(shape, 8, 1e-6)
    h, own = random.normal(size=(1, 2, 3, 8)).astype(np.float32), random.normal(size=(1, 2, 8)).astype(np.float32)
    both = lambda module, h, own: (module.predict(h), *module.correct(h, own))  # noqa: E731
    params = drawn(module, h, own, method=both)
    predicted, corrected, read = module.apply({"params": params}, h, own, method=both)

    p = jax.tree.map(np.asarray, params)

    def routed(x):
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["norm"]["scale"]
        return np.tanh(normed / 8 @ p["router"]["kernel"])

    mixes = np.einsum("btr,rji->btji", routed(h[:, :, 1]), p["predicting"]["kernel"])
    np.testing.assert_allclose(predicted, h + np.einsum("btji,btid->btjd", mixes, h), rtol=1e-4, atol=1e-5)
    shares = 1 + routed(own) @ p["correcting"]["kernel"]
    wanted = h + shares[..., None] * (own - h[:, :, 1])[:, :, None]
    np.testing.assert_allclose(corrected, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(read, wanted[:, :, 1] * p["correct_scale"], rtol=1e-4, atol=1e-5)


def test_streams_have_the_length_of_the_one_that_they_are_made_of_and_their_mean_is_joined():
    x = np.random.default_rng(0).normal(size=(1, 4, 8)).astype(np.float32)
    spread, joined = altup.Spread(3), altup.Joined(3)
    streams = spread.apply({"params": drawn(spread, x)}, x)
    lengths = np.sqrt((np.asarray(streams) ** 2).mean(-1))
    np.testing.assert_allclose(lengths, np.repeat(lengths[:, :, :1], 3, axis=2), rtol=1e-5)
    np.testing.assert_array_equal(streams[:, :, 0], x)
    eye = {f"stream_{i}": {"kernel": jnp.eye(8)} for i in range(2)}
    np.testing.assert_allclose(joined.apply({"params": eye}, streams), np.mean(streams, axis=2), rtol=1e-5, atol=1e-6)
