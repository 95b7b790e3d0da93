"""Tests the matrices of experts with adapters and in few bits against one array of them."""

import arrays
import numpy as np
import pytest

from zerojax.lora import adapters
from zerojax.ops import expert_matrices

F32 = 1e-5  # float32 sums of some hundred terms, in another order
SIZES, INPUTS, OUTPUTS, RANK = (3, 0, 5), 32, 64, 4


@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_rows_are_multiplied_by_the_sum_of_a_matrix_and_its_adapter(kind):
    kernel, a, b = (
        arrays.normal(seed, (3, *shape))
        for seed, shape in enumerate(((INPUTS, OUTPUTS), (INPUTS, RANK), (RANK, OUTPUTS)))
    )
    stored = kernel if kind == "none" else adapters.quantize_stack(kernel, kind, 1)
    matrices = expert_matrices.StoredMatrices(stored, a, b, 0.5)
    assert matrices.shape == (3, INPUTS, OUTPUTS)
    merged, x = np.asarray(expert_matrices.merged(matrices)), arrays.normal(3, (10, INPUTS))
    if kind == "none":
        np.testing.assert_allclose(merged, kernel + 0.5 * np.einsum("eir,ero->eio", a, b), atol=F32)
    expected = np.concatenate([x[:3] @ merged[0], x[3:8] @ merged[2], np.zeros((2, OUTPUTS))])
    found = expert_matrices.multiply(x, matrices, np.asarray(SIZES, np.int32))
    np.testing.assert_allclose(found, expected, atol=10 * F32)
