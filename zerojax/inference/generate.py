"""Continues a prompt. This module samples token by token from a model whose weights stay sharded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def make_sampler(
    logits_fn: Callable[[Any, dict[str, jax.Array], jax.Array], jax.Array], length: int, temperature: float, rows: int
) -> Callable[[Any, dict[str, Any], jax.typing.ArrayLike, jax.Array], jax.Array]:
    """Builds `sample(params, inputs, prompt: int32[prompt_length], key) -> int32[prompt_length + length]`, compiled.

    `inputs` are further arrays that the model reads, such as an encoder's: {name: int32[length]}.

    Each new token runs the model over the full window, without a cache. Use it to inspect a model, not to serve it.

    Args:
      logits_fn: (params, inputs: {name: int32[rows, length]}, tokens: int32[rows, window]) -> float[rows, window, vocab].
      length: tokens to add.
      temperature: divides the logits before a token is drawn; 0 takes the likeliest token.
      rows: the number of copies of the prompt in the batch, which is sharded over devices. The first is returned.
    """

    def sample(params: Any, inputs: dict[str, jax.Array], prompt: jax.Array, key: jax.Array) -> jax.Array:
        start = prompt.shape[0]
        inputs = {name: jnp.broadcast_to(array, (rows, array.size)) for name, array in inputs.items()}
        window = jnp.zeros((start + length,), jnp.int32).at[:start].set(prompt)

        def extend(window: jax.Array, position: jax.Array) -> tuple[jax.Array, None]:
            tokens = jnp.broadcast_to(window, (rows, window.size))
            logits = logits_fn(params, inputs, tokens)[0, position - 1]
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / max(temperature, 1e-6))
            token = drawn if temperature else jnp.argmax(logits)
            return window.at[position].set(token.astype(jnp.int32)), None

        return jax.lax.scan(extend, window, start + jnp.arange(length))[0]

    return jax.jit(sample)
