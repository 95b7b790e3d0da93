"""Checks latent attention and its cache. This module tests zerojax.models.llama.mla."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax.lora import linen
from zerojax.models import decoding, families, family
from zerojax.models.llama import mla
from zerojax.ops import quantized

FAMILY = families.PRESETS["moe_test"]
LATENT = mla.Latent(rank=8, query_rank=12, plain_dim=8, rotary_dim=4, value_dim=16)
CONFIG = dataclasses.replace(
    FAMILY.presets["moe_test"],
    vocab_size=61,
    head_dim=12,
    num_kv_heads=4,
).changed(
    heads={"latent": LATENT, "norm": ""},
    mixture={
        "score": "sigmoid",
        "groups": (2, 1),
        "has_choice_bias": True,
        "is_shared_gated": False,
        "dense_layers": (0,),
    },
)
ROUNDING = 1e-5  # float32 sums in another order: a matrix is multiplied with queries, and not with latents
LENGTH = 9


def drawn():
    random = np.random.default_rng(0)
    shapes = family.abstract_params(FAMILY.parts, CONFIG)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)
    return params, jnp.asarray(random.integers(0, 61, (2, LENGTH)), jnp.int32)


def by_cache(params, tokens, prompt):
    """Returns the scores after each token from the last of a prompt on, each token added to the cache, and the caches."""
    lengths = jnp.full(2, prompt)
    scores, caches = FAMILY.start(CONFIG, params, {}, tokens[:, :prompt], lengths, LENGTH)
    found = [scores]
    for count in range(LENGTH - prompt):
        step = decoding.next_step(lengths, prompt, jnp.int32(count), LENGTH)
        scores, caches = FAMILY.extend(CONFIG, params, caches, step, tokens[:, prompt + count])
        found.append(scores)
    return jnp.stack(found, axis=1), caches


@runs.LONG
@pytest.mark.parametrize("kind", runs.cases(("plain", "adapted"), long=("plain",)))
def test_tokens_that_are_added_see_what_all_at_once_see(kind):
    """Also where the matrix of keys and values has an adapter."""
    params, tokens = drawn()
    whole = lambda params, tokens: FAMILY.logits(CONFIG, params, {}, tokens)  # noqa: E731
    if kind == "adapted":
        random = np.random.default_rng(1)
        for layer in ("layer_0", "layer_1"):
            matrix = params[layer]["attention"]["kv_b"]
            matrix["lora_a"] = jnp.asarray(random.normal(size=(8, 2)), jnp.float32)
            matrix["lora_b"] = jnp.asarray(random.normal(size=(2, 4 * 24)), jnp.float32)
    with linen.applied(lambda path: 0.5) if kind == "adapted" else contextlib.nullcontext():
        expected = jax.jit(whole)(params, tokens)
        found, caches = jax.jit(by_cache, static_argnums=2)(params, tokens, 4)
    np.testing.assert_allclose(found, expected[:, 3:], atol=ROUNDING)
    assert [cache.shape for cache in jax.tree.leaves(caches)] == [(2, LENGTH, 1, 12)] * 2


def test_a_quantized_matrix_is_that_of_its_numbers():
    random, made = np.random.default_rng(0), mla.KeysAndValues((4, 32))
    coded = quantized.quantize(jnp.asarray(random.normal(size=(64, 4, 32)), jnp.float32), "int8")
    kernels = coded, quantized.dequantize(coded, jnp.float32)
    for method, shape, *rest in (("absorbed", (2, 1, 4, 16)), ("values", (2, 1, 4, 64), 16)):
        x = jnp.asarray(random.normal(size=shape), jnp.float32)
        own, expected = (made.apply({"params": {"kernel": kernel}}, x, *rest, method=method) for kernel in kernels)
        np.testing.assert_allclose(own, expected, rtol=ROUNDING)


def test_the_bias_of_the_choice_chooses_and_has_no_gradient():
    params, tokens = drawn()
    grads = jax.jit(jax.grad(lambda params: FAMILY.loss(CONFIG, params, {"tokens": tokens})))(params)
    experts = grads["layer_1"]["mlp"]["experts"]
    assert not np.any(experts["choice_bias"]) and np.any(experts["router"])
    logits = jax.jit(lambda params: FAMILY.logits(CONFIG, params, {}, tokens))
    before = logits(params)
    params["layer_1"]["mlp"]["experts"]["choice_bias"] = jnp.asarray([0.0, 9.0, 0.0, 9.0])
    assert np.abs(logits(params) - before).max() > 1e-3


def test_operations_are_those_of_both_widths():
    lengths = {"tokens": 17}
    wide = CONFIG.changed(heads={"latent": dataclasses.replace(LATENT, value_dim=24)})
    extra = 8 * 4 * (8 + 64)  # weights of a layer's values: heads x (rank + embed)
    scores = 6.0 / 2 * 8 * 4 * 16  # heads, tokens seen
    found = FAMILY.flops_per_token(wide, lengths) - FAMILY.flops_per_token(CONFIG, lengths)
    assert found == 2 * (6 * extra + scores)
