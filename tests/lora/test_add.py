"""Checks what one's own model must be given with. This module tests zerojax.lora.add."""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.errors import UserError


def test_linen_params_need_the_function_that_calls_the_model():
    with pytest.raises(UserError, match=r"^add_lora: the modules of Linen params are found by calling the model"):
        zerojax.add_lora({"kernel": jnp.ones((2, 2))}, zerojax.Lora(), jax.random.key(0))
