"""Checks the model against its definition. This module tests zerojax.models.llama.model."""

import dataclasses
import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax.models import rope
from zerojax.models.llama import family as presets
from zerojax.models.llama import model as llama
from zerojax.ops import losses

ROUNDING = 2e-5  # float32 sums of some hundred terms in another order
CONFIG = dataclasses.replace(presets.PRESETS["test"], vocab_size=61)


def shapes_of(config):
    return jax.eval_shape(llama.Llama(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def make_params(config=CONFIG):
    """Draws weights in numpy, since compiling the initialisers takes longer than all other work here."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.1, leaf.shape), leaf.dtype), shapes_of(config))


@functools.cache
def compiled(config):
    return jax.jit(llama.Llama(config).apply)


def logits(config, params, tokens):
    return compiled(config)({"params": params}, tokens)


def make_tokens(batch=2, length=12):
    return arrays.integers(1, (batch, length), 0, CONFIG.vocab_size)


def reference(c, params, tokens):
    """The equations in numpy, one sequence and one head at a time."""

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norms.eps) * scale

    def rotated(x):
        return np.asarray(rope.rotate(jnp.asarray(x)[None, :, None], rope.frequencies(c.head_dim, c.rotation.theta)))[
            0, :, 0
        ]

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = p["embed"]["embedding"][tokens]
    for i in range(c.num_layers):
        layer = p[f"layer_{i}"]
        h, out = norm(x, layer["attention_norm"]["scale"]), 0
        for head in range(c.num_heads):
            group = head * c.num_kv_heads // c.num_heads
            q, k = h @ layer["attention"]["q"]["kernel"][:, head], h @ layer["attention"]["k"]["kernel"][:, group]
            scores = rotated(q) @ rotated(k).T / np.sqrt(c.head_dim)
            scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            value = h @ layer["attention"]["v"]["kernel"][:, group]
            out = out + weights @ value @ layer["attention"]["o"]["kernel"][head]
        x = x + out
        h = norm(x, layer["mlp_norm"]["scale"])
        gate, up = h @ layer["mlp"]["gate"]["kernel"], h @ layer["mlp"]["up"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["kernel"]
    return norm(x, p["norm"]["scale"]) @ p["head"]["kernel"]


def test_the_model_computes_its_equations():
    params, tokens = make_params(), make_tokens(batch=1)
    expected = reference(CONFIG, params, np.asarray(tokens[0]))
    np.testing.assert_allclose(logits(CONFIG, params, tokens)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_parts_make_up_the_models_own_tree(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    made = {
        name: jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
        for name, (module, inputs) in llama.parts(config).items()
    }
    params = shapes_of(config)
    describe = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree)  # noqa: E731
    assert describe(made) == describe(params)
    assert ("head" in params) == (not tied)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == llama.count_params(config)


def test_equal_layers_are_equal_modules():
    parts = llama.parts(CONFIG)
    assert parts["layer_0"] == parts["layer_1"]


def test_tied_embeddings_read_the_table_transposed():
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = make_params(config)
    untied = {**params, "head": {"kernel": params["embed"]["embedding"].T}}
    tokens = make_tokens()
    np.testing.assert_allclose(logits(config, params, tokens), logits(CONFIG, untied, tokens), atol=ROUNDING)


@runs.LONG
@pytest.mark.parametrize("tied", runs.cases([False, True], long=[True]))  # whose logits are tested above
def test_the_loss_is_the_cross_entropy_of_the_next_tokens(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params, tokens = make_params(config), make_tokens()
    loss = jax.jit(functools.partial(llama.Llama(config).apply, method="loss"))
    found = loss({"params": params}, tokens)
    expected = losses.cross_entropy(logits(config, params, tokens[:, :-1]), tokens[:, 1:])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=runs.LONG)])
def test_16_bit_weights_compute_in_16_bits_and_logits_are_float32(dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), make_params())
    shape = jax.eval_shape(lambda p: llama.Llama(CONFIG).apply({"params": p}, make_tokens(), method="hidden"), params)
    assert shape.dtype == dtype
    found, exact = logits(CONFIG, params, make_tokens()), logits(CONFIG, make_params(), make_tokens())
    assert found.dtype == jnp.float32
    rounding = 8 * float(jnp.finfo(dtype).eps)  # several successive roundings to 16 bits
    np.testing.assert_allclose(found, exact, atol=rounding * float(abs(exact).max()))


def test_flops_of_the_8b_shape_are_those_of_the_formula():
    """8.03 B weights, less the 128256 x 4096 table that is looked up; scores and their use: 2 * 2 * 3 / 2 T * 4096."""
    multiplied = 8_030_261_248 - 128_256 * 4096
    attention = 32 * 6 * 32 * 128 * 8192
    assert llama.flops_per_token(presets.PRESETS["llama3_8b"], 8192) == 6 * multiplied + attention
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    assert llama.flops_per_token(tied, 16) == llama.flops_per_token(CONFIG, 16)


def test_the_loss_of_packed_and_padded_texts_is_that_of_each_text_alone():
    params, tokens = make_params(), np.asarray(make_tokens(1, 14))[0]
    texts = [tokens[:6], tokens[6:11], tokens[11:]]
    labeled = [np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 0]), np.array([0, 1, 1])]

    def loss(tokens, segments, labeled):
        arrays = (jnp.asarray(array, jnp.int32)[None] for array in (tokens, segments, labeled))
        return llama.Llama(CONFIG).apply({"params": params}, *arrays, method="loss")

    def expected_loss(tokens, labeled):
        scores = reference(CONFIG, params, tokens)[:-1]
        terms = np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(tokens) - 1), tokens[1:]]
        return np.average(terms, weights=labeled[1:])

    loss = jax.jit(loss)
    alone = [expected_loss(text, marks) for text, marks in zip(texts, labeled)]
    counts = [marks[1:].sum() for marks in labeled]
    segments = np.repeat([1, 2, 3, 0], [6, 5, 3, 4])
    row, marks = np.pad(np.concatenate(texts), (0, 4)), np.pad(np.concatenate(labeled), (0, 4))
    np.testing.assert_allclose(loss(row, segments, marks), np.average(alone, weights=counts), rtol=ROUNDING)
    other = loss(np.where(segments == 2, row, (row + 1) % CONFIG.vocab_size), segments, marks * (segments == 2))
    np.testing.assert_allclose(other, alone[1], rtol=ROUNDING)
