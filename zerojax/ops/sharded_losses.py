"""Next-token losses with an output projection that stays sharded. This module gathers hidden states instead of the kernel.

Each device holds a part of the kernel's columns, and computes the logits of all devices' tokens for these (vocabulary-parallel
cross-entropy, Megatron-LM, arXiv:1909.08053, section 3), in one pass as `losses` does. For a chunk of each device's tokens,

    h = all_gather(chunk)     z = h W_own     log sum exp(z) over devices, from each one's maximum and sum
    dz = softmax(z) - onehot(y)     dW_own += h^T dz     dchunk = reduce_scatter(dz W_own^T)

dW_own is then complete: no device holds the gradient of the whole kernel, and none is summed over devices. The gathers and the
reduce-scatters of a chunk run beside the matmuls of its neighbours; the maxima and sums, 12 bytes a token, are waited for.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import roles, specs
from zerojax.ops import chunks, softcap
from zerojax.ops import columns as columns_lib


def cross_entropy(
    hidden: jax.Array,
    kernel: columns_lib.Known,
    labels: jax.Array,
    *,
    cap: float,
    chunk_tokens: int,
    with_terms: bool = False,
) -> Any:
    """Returns the mean cross-entropy of this device's tokens, float32[]; call it on all devices, inside `jax.shard_map`.

    The result's cotangent must be the same on all devices, as it is where the loss of a step is the mean over devices.

    Args:
      hidden: float[batch, length, embed].
      kernel: the projection.
      labels: int32[batch, length].
      cap: bounds the logits (`softcap`); 0 for no bound.
      chunk_tokens: tokens of all devices together in a chunk.
      with_terms: returns (the mean, the cross-entropy of each token: float32[batch, length], through which no gradient flows).
    """
    columns = kernel.columns
    chunk = max(1, chunk_tokens // columns.ways)
    how = (columns.axis, columns.ways, chunk, cap, with_terms)
    with columns_lib.scope():
        return _one_pass(hidden, kernel.sink, columns.shard, labels, None, None, *how)


def over_rest(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    total: jax.Array | None,
    *,
    cap: float,
    chunk_tokens: int,
    with_terms: bool = False,
) -> Any:
    """Returns the mean cross-entropy, float32[], where each device along the axes that the compiler shards has columns of the kernel, and
    some of the tokens: those of some examples or of its part of each (`mesh.dim_of_rest`) if these divide, else those of a part of all.

    Args:
      hidden: float[batch, length, embed].
      kernel: float[embed, vocab]. Columns that do not divide are padded, on each device.
      labels: int32[batch, length].
      bias: float[vocab], a constant; None for none.
      total: the number of labels that are not `chunks.NO_LABEL`, float32[]; None: all count.
      cap: bounds the logits, before the bias; 0 for no bound.
      chunk_tokens: tokens of all devices together in a chunk.
      with_terms: returns (the mean, the cross-entropy of each token: float32[batch, length], through which no gradient flows).
    """
    ways, axis, columns = mesh_lib.ways_of_rest(), specs.entry(mesh_lib.rest()), kernel.shape[1]
    total, shape = jnp.float32(labels.size) if total is None else total, labels.shape
    dim = mesh_lib.dim_of_rest(labels.shape)
    if dim is None:
        hidden, labels = chunks.cut(hidden, labels, ways)
    if extra := -columns % ways:
        lowest = jnp.finfo(jnp.float32).min / 2  # of logits that no sum sees
        bias = jnp.zeros((columns,), jnp.float32) if bias is None else bias.astype(jnp.float32)
        kernel, bias = jnp.pad(kernel, ((0, 0), (0, extra))), jnp.pad(bias, (0, extra), constant_values=lowest)

    def of_own(hidden: jax.Array, shard: jax.Array, labels: jax.Array, bias: jax.Array | None, total: jax.Array) -> Any:
        how = (axis, ways, max(1, chunk_tokens // ways), cap, with_terms)
        own = jax.lax.stop_gradient(shard)
        found = _one_pass(hidden, shard.astype(jnp.float32), own, labels, bias, total / ways, *how)
        if with_terms:
            return jax.lax.pmean(found[0], axis), found[1]
        return jax.lax.pmean(found, axis)

    tokens, own = P(*[None] * (dim or 0), axis), P(None, axis)
    with jax.named_scope(roles.TENSOR_PARALLEL):
        out = (P(), tokens) if with_terms else P()
        run = mesh_lib.manual_over_rest(of_own, (tokens, own, tokens, P(axis), P()), out)
        found = run(hidden, kernel, labels, bias, total)
    if not with_terms or dim is not None:
        return found
    return found[0], found[1].reshape(-1)[: math.prod(shape)].reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9, 10))
def _one_pass(
    hidden: jax.Array,
    sink: jax.Array,
    shard: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    total: jax.Array | None,
    axis: specs.Entry,
    ways: int,
    chunk: int,
    cap: float,
    with_terms: bool,
) -> Any:
    """Returns the sum of this device's terms / `total`, by default its number of tokens. The sink gets the shard's gradient."""
    how = (axis, ways, chunk, cap, with_terms)
    losses, *_ = _chunks(hidden, shard, labels, bias, *how, is_trained=False)
    return _mean(losses, labels, labels.size if total is None else total, with_terms)


def _mean(losses: Any, labels: jax.Array, total: Any, with_terms: bool) -> Any:
    """Returns the sum of the losses of a device's chunks / `total`, and the loss of each token beside it if there are terms."""
    if not with_terms:
        return jnp.sum(losses) / total
    losses, terms = losses
    return jnp.sum(losses) / total, terms.reshape(-1)[: labels.size].reshape(labels.shape)


def _forward(
    hidden: Any,
    sink: Any,
    shard: Any,
    labels: Any,
    bias: Any,
    total: Any,
    axis: Any,
    ways: int,
    chunk: int,
    cap: float,
    with_terms: bool,
) -> tuple[Any, Any]:
    """Its arguments say whether they are differentiated: the gradient of a frozen kernel is not computed."""
    is_trained = sink.perturbed
    hidden, shard, labels, bias, total = jax.tree.map(
        lambda part: part.value, (hidden, shard, labels, bias, total), is_leaf=lambda node: hasattr(node, "perturbed")
    )
    total = labels.size if total is None else total
    how = (axis, ways, chunk, cap, with_terms)
    losses, d_hidden, d_shard = _chunks(hidden, shard, labels, bias, *how, is_trained=is_trained)
    return _mean(losses, labels, total, with_terms), (d_hidden, d_shard, total)


def _backward(
    axis: Any, ways: int, chunk: int, cap: float, with_terms: bool, residuals: tuple[Any, Any, Any], scale: Any
) -> tuple:
    d_hidden, d_shard, total = residuals
    scale = scale[0] if with_terms else scale
    d_hidden = (d_hidden.astype(jnp.float32) * (scale / total)).astype(d_hidden.dtype)
    return d_hidden, None if d_shard is None else d_shard * (scale / total), None, None, None, None


_one_pass.defvjp(_forward, _backward, symbolic_zeros=True)


def _chunks(
    hidden: jax.Array,
    shard: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    axis: specs.Entry,
    ways: int,
    chunk: int,
    cap: float,
    with_terms: bool,
    *,
    is_trained: bool = True,
) -> tuple[Any, Any, Any]:
    """Returns the losses of this device's chunks, with terms also of their tokens, and the gradients of their sum by hidden, and of all
    devices' by a shard that `is_trained`."""
    shape, tokens, vocab = hidden.shape, labels.size, shard.shape[1]
    count = -(-tokens // chunk)
    hidden, labels = chunks.cut(hidden, labels, count)
    size, me = labels.shape[1], jax.lax.axis_index(axis)
    all_labels = columns_lib.sent_to_all(labels, axis, ways).swapaxes(0, 1).reshape(count, -1)

    def one_chunk(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        d_shard, h = carry
        following, y = inputs
        next_h = jax.lax.all_gather(following, axis, tiled=True)
        logits = softcap.softcap(jnp.dot(h, shard, preferred_element_type=jnp.float32), cap)
        slope = softcap.slope(logits, cap) if cap else None
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
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
        own_terms = jax.lax.dynamic_slice(terms, (me * size,), (size,))
        loss = (jnp.sum(own_terms), own_terms) if with_terms else jnp.sum(own_terms)
        hit = column[:, None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        factor = counts[:, None] if slope is None else counts[:, None] * slope
        d_logits = ((jnp.exp(logits - log_sum[:, None]) - hit) * factor).astype(h.dtype)
        d_all = jnp.dot(d_logits, shard.T, preferred_element_type=jnp.float32)
        d_own = jax.lax.psum_scatter(d_all, axis, tiled=True).astype(h.dtype)
        if is_trained:
            d_shard = d_shard + jnp.dot(h.T, d_logits, preferred_element_type=jnp.float32)
        # Without it XLA would move the sum into the next pass of the loop, and copy what it reads.
        d_own, d_shard = jax.lax.optimization_barrier((d_own, d_shard))
        return (d_shard, next_h), (loss, d_own)

    # The last pass of the loop gathers the first chunk again, since all passes have one form.
    following = jnp.roll(hidden, -1, axis=0)
    zeros = jnp.zeros(shard.shape, jnp.float32) if is_trained else None
    first = columns_lib.sent_to_all(hidden[0], axis, ways).reshape(-1, shape[-1])
    (d_shard, _), (losses, d_hidden) = jax.lax.scan(one_chunk, (zeros, first), (following, all_labels))
    d_hidden = d_hidden.reshape(-1, shape[-1])[:tokens].reshape(shape)
    return losses, d_hidden, d_shard
