"""Checks the weights of adapters. This module tests zerojax.lora.adapters."""

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.lora import adapters, targets
from zerojax.lora.settings import Lora
from zerojax.ops import quantized

PARAMS = {
    "q": {"kernel": arrays.normal(0, (32, 4, 16), jnp.bfloat16), "bias": jnp.ones((4, 16))},
    "norm": {"scale": jnp.ones(8, jnp.bfloat16)},
}
LINEAR = {"q": targets.LinearModule("q", (32, 4, 16), 1)}


def chosen(**fields):
    lora = Lora(r=4, alpha=8, modules_to_save=("norm",), **fields)
    return targets.choose(lora, LINEAR, ["q/kernel", "q/bias", "norm/scale"])


def test_fresh_adapters_change_nothing_and_trained_weights_are_float32():
    params = adapters.add(PARAMS, chosen(), jax.random.key(1))
    assert params["norm"]["scale"].dtype == jnp.float32 and params["q"]["kernel"].dtype == jnp.bfloat16
    assert not params["q"]["lora_b"].any() and params["q"]["lora_b"].shape == (4, 64)
    bound = 1 / np.sqrt(32)
    assert 0.8 * bound < jnp.abs(params["q"]["lora_a"]).max() <= bound
    merged = adapters.merge(params, chosen())
    np.testing.assert_array_equal(merged["q"]["kernel"], PARAMS["q"]["kernel"])


def test_merging_adds_the_scaled_product_to_the_kernel():
    params = adapters.add(PARAMS, chosen(), jax.random.key(1))
    params["q"]["lora_b"] = arrays.normal(2, (4, 64))
    merged = adapters.merge(params, chosen())["q"]["kernel"]
    expected = PARAMS["q"]["kernel"].astype(jnp.float32) + 2.0 * (
        params["q"]["lora_a"] @ params["q"]["lora_b"]
    ).reshape(32, 4, 16)
    np.testing.assert_array_equal(merged, expected.astype(jnp.bfloat16))


def test_quantized_kernels_are_merged_from_what_is_stored():
    params = adapters.add(PARAMS, chosen(quantize="nf4"), jax.random.key(1))
    assert quantized.is_quantized(params["q"]["kernel"])
    merged = adapters.merge(params, chosen(quantize="nf4"))["q"]["kernel"]
    np.testing.assert_array_equal(merged, quantized.dequantize(params["q"]["kernel"], jnp.float32))


def test_params_without_an_adapter_or_with_half_of_one_cannot_be_merged():
    half = adapters.add(PARAMS, chosen(), jax.random.key(1))
    del half["q"]["lora_b"]
    for params in (PARAMS, half):
        with pytest.raises(UserError, match=r"^params/q: has no adapter; pass the params of the model that was given"):
            adapters.merge(params, chosen())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_stack_is_quantized_layer_by_layer(kind):
    stack = arrays.normal(3, (2, 3, 24, 128)) * jnp.array([1.0, 100.0])[:, None, None, None]
    found = adapters.quantize_stack(stack, kind, 2)
    for layer in ((0, 0), (1, 2)):
        alone = quantized.quantize(stack[layer], kind=kind)
        assert found.keys() == alone.keys()
        for name, array in alone.items():
            np.testing.assert_array_equal(found[name][layer], array)
