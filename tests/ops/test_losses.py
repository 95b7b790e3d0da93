"""Checks losses against autodiff and against each other. This module tests zerojax.ops.losses."""

import functools
import re

import arrays
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import precision
from zerojax.ops import losses, softcap

ROUNDING = 5e-7  # the same float32 sums in another order; values are of order 1
# Each example compiles a program, so failures are not shrunk, which would take minutes.
COMPILES = hypothesis.settings(
    deadline=None, derandomize=True, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
EMBED, VOCAB = 16, 24


def make_inputs(batch=8, length=6, dtype=jnp.float32):
    hidden = arrays.normal(0, (batch, length, EMBED), dtype)
    kernel = arrays.normal(1, (EMBED, VOCAB), dtype) / 4
    return hidden, kernel, arrays.integers(2, (batch, length), 0, VOCAB)


def plain(hidden, kernel, labels):
    return losses.cross_entropy(jnp.dot(hidden, kernel, preferred_element_type=jnp.float32), labels)


def value_and_grads(loss, inputs, scale=1.0):
    hidden, kernel, labels = inputs
    scaled = jax.jit(jax.value_and_grad(lambda h, k: scale * loss(h, k, labels), argnums=(0, 1)))
    return scaled(hidden, kernel)


def assert_close(found, expected, tolerance=ROUNDING):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance), found, expected)


def test_cross_entropy_is_optax_and_the_closed_form_for_equal_logits():
    hidden, kernel, labels = make_inputs()
    logits = hidden @ kernel
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(losses.cross_entropy(logits, labels), expected, rtol=ROUNDING)
    np.testing.assert_allclose(losses.cross_entropy(jnp.ones((2, 3, 50)), labels[:2, :3]), np.log(50), rtol=ROUNDING)


def test_cross_entropy_of_16_bit_logits_is_summed_in_float32():
    logits = jnp.zeros((4, 1000), jnp.bfloat16)
    found = losses.cross_entropy(logits, jnp.zeros(4, jnp.int32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.log(1000), rtol=ROUNDING)


@hypothesis.settings(COMPILES, max_examples=4)
@hypothesis.given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 50), st.sampled_from([1.0, -3.0, 0.25]))
def test_one_pass_is_autodiff_for_any_chunk(batch, length, chunk, scale):
    inputs = make_inputs(batch, length)
    one_pass = functools.partial(losses.one_pass_cross_entropy, chunk_tokens=chunk)
    assert_close(value_and_grads(one_pass, inputs, scale), value_and_grads(plain, inputs, scale), 3 * ROUNDING)


@hypothesis.settings(COMPILES, max_examples=3)
@hypothesis.given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 50), st.sampled_from([0.0, 2.0]))
def test_the_loss_of_each_token_is_autodiff_for_any_chunk(batch, length, chunk, cap):
    inputs, bias = make_inputs(batch, length), arrays.normal(3, (VOCAB,), jnp.float32)
    weights = arrays.normal(4, (batch, length), jnp.float32)
    how = {"bias": bias, "ignored": 3}

    def by_token(hidden, kernel, labels):
        return jnp.sum(weights * losses.token_losses(hidden, kernel, labels, cap=cap, chunk_tokens=chunk, **how))

    def plain(hidden, kernel, labels):
        logits = softcap.softcap(hidden @ kernel, cap) + bias
        terms = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(jnp.where(labels == 3, 0, weights * terms))

    assert_close(value_and_grads(by_token, inputs), value_and_grads(plain, inputs), 20 * ROUNDING)  # sums, no means


def test_tokens_are_drawn_by_the_scores_and_have_the_loss_of_each_token_bit_for_bit():
    hidden, kernel, _ = make_inputs(batch=3, length=5)
    bits, bias = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 5)), arrays.normal(3, (VOCAB,), jnp.float32)
    bits = bits.astype(np.int32)
    how = {"bias": bias, "cap": 2.0, "chunk_tokens": 4}
    drawn, terms = losses.token_draws(hidden, kernel, bits, **how)
    np.testing.assert_array_equal(terms, losses.token_losses(hidden, kernel, drawn, **how))
    scores = softcap.softcap(hidden @ kernel, 2.0) + bias
    wanted = [
        jax.random.categorical(jax.random.key(seed), row)
        for seed, row in zip(bits.view(np.uint32).ravel(), scores.reshape(15, -1))
    ]
    np.testing.assert_array_equal(drawn.ravel(), wanted)
    assert len(set(np.asarray(drawn).ravel().tolist())) > 1


def test_one_pass_keeps_no_more_logits_than_a_chunk():
    hidden, kernel, labels = make_inputs(batch=4, length=32)
    one_pass = functools.partial(losses.one_pass_cross_entropy, chunk_tokens=8)
    grad = jax.make_jaxpr(jax.grad(one_pass, argnums=(0, 1)))(hidden, kernel, labels)
    assert f"{8},{VOCAB}]" in str(grad)
    assert f"{4 * 32},{VOCAB}]" not in str(grad) and f"32,{VOCAB}]" not in str(grad)


def test_one_pass_has_float32_logits_of_a_part_of_a_chunk_and_no_float32_sum_of_a_single_chunk():
    inputs = make_inputs(batch=4, length=8, dtype=jnp.bfloat16)
    for chunk, dtype in ((32, "bf16"), (8, "f32")):
        one_pass = functools.partial(losses.one_pass_cross_entropy, chunk_tokens=chunk)
        grad = str(jax.make_jaxpr(jax.grad(one_pass, argnums=1))(*inputs))
        assert re.findall(rf"(\w+)\[{EMBED},{VOCAB}\] = dot_general", grad) == [dtype]
        assert re.findall(rf"f32\[(\d+),{VOCAB}\] = dot_general", grad)[0] == str(chunk // losses.PARTS)
        assert f"f32[{chunk},{VOCAB}]" not in grad and f"bf16[{chunk},{VOCAB}]" in grad


def test_one_pass_gradients_have_the_dtypes_of_what_they_belong_to():
    inputs = make_inputs(dtype=jnp.bfloat16)
    loss, (d_hidden, d_kernel) = value_and_grads(losses.one_pass_cross_entropy, inputs)
    assert (loss.dtype, d_hidden.dtype, d_kernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    exact = value_and_grads(plain, precision.cast_floating(inputs, jnp.float32))
    np.testing.assert_allclose(loss, exact[0], rtol=1e-5)  # logits are float32 matmuls of the same 16-bit numbers
    for found, expected in zip((d_hidden, d_kernel), exact[1]):
        scale = float(abs(expected).max())
        # softmax - onehot is rounded to 8 bits, and the gradient once more
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=2**-7 * scale)


def test_one_pass_loses_no_gradient_to_float16():
    """A scaled loss has the gradients of float32, although 1 / tokens and the gradient itself underflow in float16."""
    hidden, kernel, labels = make_inputs(batch=8, length=512, dtype=jnp.float16)
    hidden, kernel = hidden * 2**-12, kernel * 2**-4
    scale = 2.0**14
    _, found = value_and_grads(losses.one_pass_cross_entropy, (hidden, kernel, labels), scale)
    _, exact = value_and_grads(plain, precision.cast_floating((hidden, kernel, labels), jnp.float32), scale)
    for got, expected in zip(found, exact):
        assert got.dtype == jnp.float16
        assert float(abs(expected / scale).max()) < 2**-14, "it would be a float16 of full precision without the scale"
        # softmax - onehot is rounded to 11 bits, and the gradient once more
        np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2**-10 * float(abs(expected).max()))


def test_a_prime_number_of_tokens_needs_no_more_chunks_than_another():
    hidden, kernel, labels = jnp.ones((1, 97, 8)), jnp.ones((8, 16)), jnp.zeros((1, 97), jnp.int32)
    one_pass = functools.partial(losses.one_pass_cross_entropy, chunk_tokens=10)
    grad = str(jax.make_jaxpr(jax.grad(one_pass, argnums=1))(hidden, kernel, labels))
    assert "length=10" in grad and "f32[10,4,3,8]" in grad, "10 chunks of 4 parts of 3 tokens"


def test_ignored_labels_are_left_out_of_the_mean():
    hidden, kernel, labels = make_inputs()
    logits = hidden @ kernel
    kept = np.arange(labels.size).reshape(labels.shape) % 3 > 0
    found = losses.cross_entropy(logits, jnp.where(kept, labels, -100), ignored=-100)
    expected = losses.cross_entropy(logits[kept][None], labels[kept][None])
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)
    assert losses.cross_entropy(logits, jnp.full_like(labels, -100), ignored=-100) == 0


def test_one_pass_adds_a_constant_bias_to_the_logits():
    inputs, bias = make_inputs(), jnp.linspace(-1, 1, VOCAB)
    found = value_and_grads(lambda h, k, y: losses.one_pass_cross_entropy(h, k, y, bias=bias, chunk_tokens=7), inputs)
    assert_close(found, value_and_grads(lambda h, k, y: losses.cross_entropy(h @ k + bias, y), inputs))
    assert not jax.grad(lambda b: losses.one_pass_cross_entropy(*inputs, bias=b))(bias).any()


def test_one_pass_leaves_ignored_labels_out_of_loss_and_gradients():
    hidden, kernel, labels = make_inputs()
    labels = jnp.where(np.arange(labels.size).reshape(labels.shape) % 3 > 0, labels, -1)
    found, expected = (
        value_and_grads(lambda h, k, y: loss(h, k, y), (hidden, kernel, labels), 3.0)  # noqa: B023
        for loss in (
            functools.partial(losses.one_pass_cross_entropy, ignored=-1, chunk_tokens=7),
            lambda h, k, y: losses.cross_entropy(h @ k, y, ignored=-1),
        )
    )
    assert_close(found, expected, 3 * ROUNDING)
    none = value_and_grads(
        functools.partial(losses.one_pass_cross_entropy, ignored=-1), (hidden, kernel, jnp.full_like(labels, -1))
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(none))


@hypothesis.settings(COMPILES, max_examples=3)
@hypothesis.given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 50))
def test_one_pass_has_the_loss_of_each_token_beside_the_same_mean_and_gradients(batch, length, chunk):
    hidden, kernel, labels = make_inputs(batch, length)
    how = {"ignored": 3, "chunk_tokens": chunk}
    plain = jax.value_and_grad(functools.partial(losses.one_pass_cross_entropy, **how), (0, 1))
    with_terms = functools.partial(losses.one_pass_and_terms, **how)
    (mean, terms), grads = jax.value_and_grad(with_terms, (0, 1), has_aux=True)(hidden, kernel, labels)
    assert_close((mean, grads), plain(hidden, kernel, labels))
    assert_close(terms, losses.mean_and_terms(hidden @ kernel, labels, ignored=3)[1])
    assert not jax.grad(lambda h: jnp.sum(with_terms(h, kernel, labels)[1]))(hidden).any()
