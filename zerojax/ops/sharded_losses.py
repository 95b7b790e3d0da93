"""Next-token losses with an output projection that stays sharded. This module gathers hidden states instead of the kernel.

Each device holds a part of the kernel's columns, and computes the logits of all devices' tokens for these (vocabulary-parallel
cross-entropy, Megatron-LM, arXiv:1909.08053, section 3), in one pass as `losses` does. For a chunk of each device's tokens,

    h = all_gather(chunk)     z = h W_own     log sum exp(z) over devices, from each one's maximum and sum
    dz = softmax(z) - onehot(y)     dW_own += h^T dz     dchunk = reduce_scatter(dz W_own^T)

dW_own is then complete: no device holds the gradient of the whole kernel, and none is summed over devices. The gathers and the
reduce-scatters of a chunk run beside the matmuls of its neighbours; the maxima and sums, 12 bytes a token, are waited for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.ops import chunks
from zerojax.ops import columns as columns_lib


def cross_entropy(hidden: jax.Array, kernel: columns_lib.Known, labels: jax.Array, *, chunk_tokens: int) -> jax.Array:
    """Returns the mean cross-entropy of this device's tokens, float32[]; call it on all devices, inside `jax.shard_map`.

    The result's cotangent must be the same on all devices, as it is where the loss of a step is the mean over devices.

    Args:
      hidden: float[batch, length, embed].
      kernel: the projection.
      labels: int32[batch, length].
      chunk_tokens: tokens of all devices together in a chunk.
    """
    columns = kernel.columns
    chunk = max(1, chunk_tokens // columns.ways)
    with columns_lib.scope():
        return _one_pass(hidden, kernel.sink, columns.shard, labels, columns.axis, columns.ways, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _one_pass(
    hidden: jax.Array, sink: jax.Array, shard: jax.Array, labels: jax.Array, axis: str, ways: int, chunk: int
) -> jax.Array:
    return _chunks(hidden, shard, labels, axis, ways, chunk)[0]


def _forward(
    hidden: jax.Array, sink: jax.Array, shard: jax.Array, labels: jax.Array, axis: str, ways: int, chunk: int
) -> tuple[Any, Any]:
    loss, d_hidden, d_shard = _chunks(hidden, shard, labels, axis, ways, chunk)
    return loss, (d_hidden, d_shard)


def _backward(axis: str, ways: int, chunk: int, residuals: tuple[Any, Any], scale: jax.Array) -> tuple:
    d_hidden, d_shard = residuals
    tokens = d_hidden.size // d_hidden.shape[-1]
    d_hidden = (d_hidden.astype(jnp.float32) * (scale / tokens)).astype(d_hidden.dtype)
    return d_hidden, d_shard * (scale / tokens), None, None


_one_pass.defvjp(_forward, _backward)


def _chunks(
    hidden: jax.Array, shard: jax.Array, labels: jax.Array, axis: str, ways: int, chunk: int
) -> tuple[Any, Any, Any]:
    """Returns the mean loss of this device's tokens, and the gradients of its sum by hidden, and of all devices' sum by the shard."""
    shape, tokens, vocab = hidden.shape, labels.size, shard.shape[1]
    count = -(-tokens // chunk)
    hidden, labels = chunks.cut(hidden, labels, count)
    size, me = labels.shape[1], jax.lax.axis_index(axis)
    all_labels = columns_lib.sent_to_all(labels, axis, ways).swapaxes(0, 1).reshape(count, -1)

    def one_chunk(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        d_shard, h = carry
        following, y = inputs
        next_h = jax.lax.all_gather(following, axis, tiled=True)
        logits = jnp.dot(h, shard, preferred_element_type=jnp.float32)
        top = jnp.max(logits, axis=-1)
        total = jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)
        column = y - me * vocab
        label_logit = jnp.take_along_axis(logits, jnp.clip(column, 0, vocab - 1)[:, None], axis=-1)[:, 0]
        own = jnp.stack([top, total, jnp.where((column >= 0) & (column < vocab), label_logit, 0.0)])
        # XLA would merge the two gathers, and the second would wait for the first one's bytes.
        own, next_h = jax.lax.optimization_barrier((own, next_h))
        tops, totals, label_logits = jnp.moveaxis(jax.lax.all_gather(own, axis), 1, 0)
        most = jnp.max(tops, axis=0)
        log_sum = jnp.log(jnp.sum(totals * jnp.exp(tops - most), axis=0)) + most
        counts = y != chunks.NO_LABEL
        terms = counts * (log_sum - jnp.sum(label_logits, axis=0))
        loss = jnp.sum(jax.lax.dynamic_slice(terms, (me * size,), (size,)))
        hit = column[:, None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        d_logits = ((jnp.exp(logits - log_sum[:, None]) - hit) * counts[:, None]).astype(h.dtype)
        d_all = jnp.dot(d_logits, shard.T, preferred_element_type=jnp.float32)
        d_own = jax.lax.psum_scatter(d_all, axis, tiled=True).astype(h.dtype)
        d_shard = d_shard + jnp.dot(h.T, d_logits, preferred_element_type=jnp.float32)
        # Without it XLA would move the sum into the next pass of the loop, and copy what it reads.
        d_own, d_shard = jax.lax.optimization_barrier((d_own, d_shard))
        return (d_shard, next_h), (loss, d_own)

    # The last pass of the loop gathers the first chunk again, since all passes have one form.
    following = jnp.roll(hidden, -1, axis=0)
    start = jnp.zeros(shard.shape, jnp.float32), columns_lib.sent_to_all(hidden[0], axis, ways).reshape(-1, shape[-1])
    (d_shard, _), (losses, d_hidden) = jax.lax.scan(one_chunk, start, (following, all_labels))
    d_hidden = d_hidden.reshape(-1, shape[-1])[:tokens].reshape(shape)
    return jnp.sum(losses) / tokens, d_hidden, d_shard
