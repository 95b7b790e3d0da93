"""Checks matmuls of few rows against dequantized weights. This module tests pallas_kernels.narrow."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import narrow
from zerojax.ops import quantized

K, N = 320, 192  # squares of 128 are cut at the ends


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["none", "int8", "fp8", "nf4", "fp8_block"])
def test_kernel_and_twin_multiply_with_the_dequantized_weight(kind, rows):
    random = np.random.default_rng(0)
    w_KN = jnp.asarray(random.normal(size=(K, N)), jnp.float32)
    x_MK = jnp.asarray(random.normal(size=(rows, K)), jnp.float32)
    assert narrow.takes((rows, K, N))
    codes, scales, how = w_KN, None, {}
    if kind != "none":
        stored = quantized.quantize(w_KN, kind)
        (codes, scales), w_KN = quantized.values_of(stored), quantized.dequantize(stored, jnp.float32)
        how = {"unit": 1 / quantized.TOP.get(kind, 1)}
        how["book"] = jnp.asarray(quantized.CODE_BOOK) if kind == "nf4" else None
    for implementation in ("jnp", "interpret"):
        found = narrow.multiply(x_MK, codes, scales, **how, implementation=implementation)
        np.testing.assert_allclose(found, np.asarray(x_MK) @ np.asarray(w_KN), atol=1e-3, err_msg=implementation)
