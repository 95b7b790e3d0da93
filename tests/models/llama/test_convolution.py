"""Compares a gated convolution with its sum. This module tests zerojax.models.llama.convolution."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models.llama import convolution


def test_a_branch_is_its_sum_and_padding_leaves_no_trace():
    module = convolution.GatedConvolution(convolution.Convolution(4, 3, has_bias=True), 6, 0.02)
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    mask = np.array([[True] * 5, [False, False, True, True, True]])
    params = module.init(jax.random.key(0), x)["params"]
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape), jnp.float32), params)
    found, _ = module.apply({"params": params}, x, mask)
    alone, _ = module.apply({"params": params}, x[1:, 2:])
    np.testing.assert_allclose(found[1:, 2:], alone, rtol=1e-5, atol=1e-6)

    b, c, v = np.einsum("td,dpc->ptc", x[0], params["in_proj"]["kernel"]) + params["in_proj"]["bias"][:, None]
    weight = np.asarray(params["conv"]["weight"])
    weight = weight.reshape(4, 3) if weight.shape[0] == 4 else weight.T
    padded = np.concatenate([np.zeros((2, 4)), b * v])
    summed = sum(padded[i : i + 5] * weight[:, i] for i in range(3)) + params["conv"]["bias"]
    wanted = (c * summed) @ params["out_proj"]["kernel"] + params["out_proj"]["bias"]
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5)
