"""Checks a layer's products for one row against dequantized weights. This module tests pallas_kernels.one_token."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import one_token
from zerojax.ops import quantized

D, HEADS, KV_HEADS, DIMS, MLP, SLOTS = 512, 4, 1, 64, 128, 4
# The default form, and a candidate of scripts/bench_token.py.
FORMS: tuple[dict[str, int], ...] = ({}, {"width": 256, "ahead": 2, "warps": 4, "programs": 1056})

ONE_BIT = 2**-7  # of bfloat16: the squares are summed in another order


def weight(random, shape, kind):
    """Returns a weight as it is stored."""
    wide = jnp.asarray(random.normal(0, 0.1, shape), jnp.float32)
    if kind not in quantized.TOP:
        return one_token.Weight(wide.astype(kind))
    stored = quantized.quantize(wide, kind)
    return one_token.Weight(stored[kind], stored[quantized.SCALES], 1 / quantized.TOP[kind])


def vector(random, size=D):
    return jnp.asarray(random.normal(size=size), jnp.float32)


@pytest.mark.parametrize(
    "kind", [pytest.param("bfloat16", marks=pytest.mark.long), pytest.param("int8", marks=pytest.mark.long), "fp8"]
)
def test_kernel_and_twin_multiply_with_the_dequantized_weights(kind):
    random = np.random.default_rng(0)
    inputs = 2 * D
    weights, x = [weight(random, (inputs, columns), kind) for columns in (128, 64)], vector(random, inputs)
    norm, squares = one_token.Norm(vector(random, inputs), 1e-5), one_token.squares_of(x, 4)
    normed = x / np.sqrt(np.mean(np.square(x)) + 1e-5) * norm.scale
    wanted = np.concatenate([np.asarray(normed) @ (w.unit * np.asarray(w.wide())) for w in weights])
    given = {"norm": norm, "squares": squares, "counts": one_token.counters()}
    twin, _ = one_token.multiply(x, weights, **given, implementation="jnp")
    np.testing.assert_allclose(twin, wanted, atol=1e-4)
    for form in FORMS:
        how = one_token.form(inputs, [128, 64], weights[0].codes.dtype.itemsize, **{**form, "programs": 6})
        assert how.parts > 1 and inputs > how.parts * how.tile * how.ahead, "there is no sum of parts, or no loop"
        found, counts = one_token.multiply(x, weights, **given, implementation="interpret", how=how)
        np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=str(how))
        assert not counts.any()


@pytest.mark.long
def test_kernels_of_a_layer_do_what_their_twins_do():
    random = np.random.default_rng(0)
    x, norm = vector(random), one_token.Norm(vector(random), 1e-5)
    squares, turn = one_token.squares_of(x, 1), vector(random, DIMS)
    keys = tuple(vector(random, (SLOTS, KV_HEADS, DIMS)) for _ in range(2))
    three = [weight(random, (D, heads * DIMS), "int8") for heads in (HEADS, KV_HEADS, KV_HEADS)]
    o, gates = weight(random, (HEADS * DIMS, D), "int8"), [weight(random, (D, MLP), "int8") for _ in range(2)]
    found = []
    for implementation in ("jnp", "interpret"):
        run = {"implementation": implementation}
        normed, counts = {"norm": norm, "squares": squares}, one_token.counters()
        at, beyond = jnp.asarray([2]), jnp.asarray([SLOTS])
        same_x, q, after, counts = one_token.project(x, three, keys, turn, at, **normed, counts=counts, **run)
        assert same_x is x
        _, _, same, counts = one_token.project(x, three, keys, turn, beyond, **normed, counts=counts, **run)
        added, squares_after, counts = one_token.add(x, q, o, counts=counts, **run)
        _, h, counts = one_token.gate(x, gates, **normed, counts=counts, **run)
        assert not counts.any()
        for old, new, kept in zip(keys, after, same):
            np.testing.assert_array_equal(kept, old, err_msg="a token that is dropped is written")
            assert [bool(np.any(new[slot] != old[slot])) for slot in range(SLOTS)] == [False, False, True, False]
        found.append((q, *after, added, jnp.sum(squares_after), h))
    for wanted, own in zip(*found):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("has_delta", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
def test_a_kernel_adds_a_delta_and_sums_squares_as_if_both_were_given(implementation, has_delta, monkeypatch):
    """The sum is rounded as the residual is on one device, and written once; the squares are summed in several steps."""
    monkeypatch.setattr(one_token, "SQUARED", D // 4)
    random = np.random.default_rng(0)
    x, norm = vector(random).astype(jnp.bfloat16), one_token.Norm(vector(random).astype(jnp.bfloat16), 1e-5)
    delta = vector(random) if has_delta else None
    whole = x + delta.astype(jnp.bfloat16) if has_delta else x
    turn, slot = vector(random, DIMS), jnp.asarray([2])
    keys = tuple(vector(random, (SLOTS, KV_HEADS, DIMS)) for _ in range(2))
    three = [weight(random, (D, heads * DIMS), "bfloat16") for heads in (HEADS, KV_HEADS, KV_HEADS)]
    gates = [weight(random, (D, MLP), "bfloat16") for _ in range(2)]
    found = []
    for given, of_norm in ((whole, {"squares": one_token.squares_of(whole, 1)}), (x, {"delta": delta})):
        run = {"norm": norm, **of_norm, "implementation": implementation}
        after, q, cache, counts = one_token.project(given, three, keys, turn, slot, counts=one_token.counters(), **run)
        again, h, counts = one_token.gate(given, gates, counts=counts, **run)
        scores, counts = one_token.multiply(given, gates, counts=counts, **run)
        assert not counts.any()
        np.testing.assert_array_equal(after, whole)
        np.testing.assert_array_equal(again, whole)
        found.append((q, *cache, h, scores))
    for wanted, own in zip(*found):
        np.testing.assert_allclose(own.astype(jnp.float32), wanted.astype(jnp.float32), rtol=ONE_BIT, atol=1e-3)


def test_every_form_divides_its_rows_and_columns():
    for itemsize in (1, 2):
        for inputs, columns in (
            (4096, (14336,) * 2),
            (14336, (4096,)),
            (64, (64,)),
            (192, (320, 64)),
            (4096, (128256,)),
        ):
            for how in FORMS:
                form = one_token.form(inputs, columns, itemsize, **how)
                assert inputs % (form.tile * form.ahead * form.parts) == 0
                assert all(n % form.columns == 0 for n in columns)
