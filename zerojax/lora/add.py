"""Adds adapters to a model of one's own. This module holds `add_lora`, for the weights of Linen models and for NNX models."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from zerojax.errors import UserError
from zerojax.lora import linen, nnx_modules, settings
from zerojax.tree import PyTree


def add_lora(
    model: PyTree | nnx.Module,
    lora: settings.Lora,
    key: jax.Array,
    function: Callable[..., Any] | None = None,
    *args: Any,
) -> Any:
    """Adds fresh adapters beside the kernels of a model's linear modules: Dense and DenseGeneral of Linen, Linear and LinearGeneral of NNX.

    Pass `trainable=lora.trainable` to `shard_train_state`, which freezes the rest. Frozen kernels are quantized as `lora.quantize` says.

    Args:
      model: a Linen model's params, or an NNX module, which is changed in place.
      lora: the settings. Names of modules are their paths with dots.
      key: a random key for the adapters.
      function: for Linen: `function(params, *args)`, which calls the model. It is traced to find the linear modules, and computes nothing.
      *args: its example inputs.

    Returns:
      Linen: the params with adapters, for functions wrapped in `with_lora`. NNX: the module.

    Raises:
      UserError: a name in the settings means no module.

    >>> params = add_lora(params, Lora(r=8), key, lambda params, x: net.apply({"params": params}, x), x)
    """
    if isinstance(model, nnx.Module):
        return nnx_modules.add(model, lora, key)
    if function is None:
        raise UserError(
            "add_lora: the modules of Linen params are found by calling the model; pass function= and its example inputs"
        )
    return linen.add(model, lora, key, function, *args)
