"""Checks texts in rows, padding and dtypes. This module tests zerojax.models.mamba2.model.

tests/interop/test_pretrained.py compares the model with transformers.
"""

import dataclasses
import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts_of_rows

from zerojax.models import family as family_lib
from zerojax.models import scan_mixer
from zerojax.models.mamba2 import family, model

ROUNDING = 1e-5  # float32 sums in another order
CONFIG = dataclasses.replace(
    family.PRESETS["mamba2_test"], vocab_size=61, scan=scan_mixer.Scan(4, 32, 16, 2, steps=(0.01, 0.5), has_bias=True)
)


def make_params(config=CONFIG):
    random = np.random.default_rng(0)
    shapes = family_lib.abstract_params(model.parts, config)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)


@functools.cache
def gradients():
    return jax.jit(jax.value_and_grad(lambda params, batch: model.loss(CONFIG, params, batch)))


def test_texts_of_a_row_are_learned_as_each_alone():
    texts_of_rows.assert_learned_as_each_alone(gradients(), make_params(), CONFIG.vocab_size)


def test_padding_on_either_side_leaves_no_trace():
    params, tokens = make_params(), np.array(arrays.integers(2, (1, 9), 0, CONFIG.vocab_size))
    logits = jax.jit(lambda tokens, mask: model.logits(CONFIG, params, {"mask": mask}, tokens))
    rows = np.concatenate([np.pad(tokens, ((0, 0), (3, 0)), constant_values=5), np.pad(tokens, ((0, 0), (0, 3)))])
    found = logits(rows, np.array([[False] * 3 + [True] * 9, [True] * 9 + [False] * 3]))
    np.testing.assert_allclose(found[0, 3:], found[1, :9], rtol=0, atol=ROUNDING)
    alone = logits(np.concatenate([tokens, tokens[:, :3]], axis=1), np.ones((1, 12), bool))
    np.testing.assert_allclose(found[1, :9], alone[0, :9], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("has_float32_residual", [True, False])
def test_16_bit_weights_multiply_in_16_bits(has_float32_residual):
    config = dataclasses.replace(CONFIG, has_float32_residual=has_float32_residual)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params())
    tokens = np.array(arrays.integers(3, (2, 12), 0, CONFIG.vocab_size))
    found = jax.jit(lambda params: model.logits(config, params, {}, tokens))(params)
    exact = jax.jit(lambda params: model.logits(CONFIG, params, {}, tokens))(make_params())
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=16 * float(jnp.finfo(jnp.bfloat16).eps) * float(abs(exact).max()))
    program = jax.make_jaxpr(lambda params: model.logits(config, params, {}, tokens))(params)
    wide = {
        eqn.invars[0].aval.dtype.name
        for eqn in program.jaxpr.eqns
        if eqn.primitive.name == "dot_general" and CONFIG.embed_dim in eqn.invars[1].aval.shape
    }
    assert wide == {"bfloat16"}
