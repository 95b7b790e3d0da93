"""Tests the matrices of experts with adapters and in few bits against one array of them."""

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.lora import adapters
from zerojax.ops import expert_matrices, fp8

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


ROWS = 12
SPREAD = 50.0  # the sizes of rows and of matrices differ by as much


def rounded(array):
    """Returns what an array stands for in e4m3 with one scale, float32."""
    values, scale, _ = fp8.quantized(jnp.asarray(array), fp8.FORWARD, fp8.scale_of(jnp.asarray(array), fp8.FORWARD))
    return np.asarray(values, np.float32) / np.asarray(scale)


@pytest.mark.parametrize("is_known", [False, True])
def test_products_in_fp8_are_those_of_rounded_operands_and_gradients_of_matrices_are_exact(is_known):
    x, kernel, dy = (
        arrays.normal(seed, shape) * np.geomspace(1, SPREAD, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        for seed, shape in enumerate(((ROWS, INPUTS), (4, INPUTS, OUTPUTS), (ROWS, OUTPUTS)))
    )
    known = fp8.quantized(jnp.asarray(kernel), fp8.FORWARD, fp8.scale_of(jnp.asarray(kernel), fp8.FORWARD))

    @jax.jit
    def both(x, kernel, dy, sizes):
        given = jnp.full_like(kernel, jnp.nan) if is_known else kernel  # known values are read alone

        def of(x, kernel):
            return expert_matrices.multiply(x, expert_matrices.in_fp8(kernel, known if is_known else None), sizes)

        y, pull = jax.vjp(of, x, given)
        return y, *pull(dy)

    for sizes in ((3, 0, 5, 2), (0, 0, ROWS, 0), (0, 0, 0, 0), (ROWS - 1, 0, 0, 1)):
        expert_R = np.repeat(np.arange(5), (*sizes, ROWS - sum(sizes)))
        is_own_E = (expert_R[:, None] == np.arange(4)).astype(np.float32)
        expected = (
            np.einsum("ri,eio,re->ro", rounded(x), rounded(kernel), is_own_E),
            np.einsum("ro,eio,re->ri", rounded(dy), rounded(kernel), is_own_E),
            np.einsum("ri,ro,re->eio", x, dy, is_own_E),
        )
        for ours, theirs in zip(both(x, kernel, dy, np.asarray(sizes, np.int32)), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=F32 * np.abs(theirs).max())


def test_one_expert_multiplies_as_a_dense_matmul_in_fp8_does():
    x, kernel = arrays.normal(0, (ROWS, INPUTS)), arrays.normal(1, (1, INPUTS, OUTPUTS))
    found = expert_matrices.multiply(x, expert_matrices.in_fp8(kernel, None), np.asarray([ROWS], np.int32))
    dense = fp8.dot_general(x, kernel[0], (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(found, dense, atol=F32 * np.abs(dense).max())
    a, b = arrays.normal(2, (1, INPUTS, RANK)), arrays.normal(3, (1, RANK, OUTPUTS))
    adapted = expert_matrices.in_fp8(expert_matrices.StoredMatrices(kernel, a, b, 0.5), None)
    beside = expert_matrices.multiply(x, adapted, np.asarray([ROWS], np.int32)) - found  # an adapter stays as it is
    np.testing.assert_allclose(beside, 0.5 * x @ a[0] @ b[0], atol=10 * F32 * np.abs(dense).max())
