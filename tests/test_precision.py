"""Checks casts and policies. This module tests zerojax.precision."""

import jax.numpy as jnp

from zerojax import precision


def test_casts_change_only_floating_leaves():
    values = {"x": jnp.ones(2), "n": jnp.arange(2), "b": jnp.array([True]), "h": jnp.ones(2, jnp.float16)}
    cast = precision.cast_floating(values, jnp.bfloat16)
    assert {key: leaf.dtype.name for key, leaf in cast.items()} == {
        "x": "bfloat16",
        "n": "int32",
        "b": "bool",
        "h": "bfloat16",
    }
    assert precision.cast_floating(values, None)["x"] is values["x"]


def test_every_precision_computes_in_the_dtype_of_its_name():
    dtypes = {name: jnp.dtype(entry.compute_dtype).name for name, entry in precision.PRECISIONS.items()}
    assert dtypes == {
        "fp32": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "fp8": "bfloat16",
        "bf16_sr": "bfloat16",
    }
    scaled = [name for name, entry in precision.PRECISIONS.items() if entry.scales_loss]
    assert scaled == [
        name for name, dtype in dtypes.items() if dtype == "float16"
    ]  # the only dtype with few exponent bits
