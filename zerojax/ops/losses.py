"""Next-token losses. This module holds the plain cross-entropy and a one-pass form that never stores all logits.

The one-pass form computes loss and gradients together in the forward pass, chunk by chunk. Only one chunk's logits exist at a time, and
they are computed once. With p = softmax(z), z = h W and label y, a token's gradient is dz = p - onehot(y), so

    dh = dz W^T        dW = sum over tokens of h^T dz

z is float32 and dz has the dtype of h, so a chunk's z is computed and dropped in PARTS, and its dz is kept for two large matmuls. dW adds
up over chunks in float32; of a single chunk it is one matmul, without a sum beside it.

The backward pass only scales the residuals dh and dW. A frozen W has no dW. It multiplies them by 1 / tokens and the loss's cotangent
together, since 1 / tokens alone is too small for float16. For the same reason dW is stored in float32 if the weights are float16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import traces
from zerojax.errors import UserError
from zerojax.ops import chunks, columns, sharded_losses, softcap

PARTS = 4  # of a chunk's logits. Without a gradient of the kernel a part is a chunk: nothing is added up over chunks


def cross_entropy(logits: jax.Array, labels: jax.Array, *, ignored: int | None = None) -> jax.Array:
    """Returns the mean over tokens of -log softmax(logits)[label], in float32.

    Args:
      logits: float[..., vocab].
      labels: int32[...].
      ignored: the label of tokens that the mean leaves out; None: it has all tokens. Without any other label the mean is 0.
    """
    return mean_and_terms(logits, labels, ignored=ignored)[0]


def mean_and_terms(logits: jax.Array, labels: jax.Array, *, ignored: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns `cross_entropy`, and the loss of each label, 0 where it is ignored: float32[...]."""
    logits = logits.astype(jnp.float32)
    counts = jnp.ones(labels.shape, bool) if ignored is None else labels != ignored
    label_logits = jnp.take_along_axis(logits, jnp.where(counts, labels, 0)[..., None], axis=-1)[..., 0]
    terms = jax.nn.logsumexp(logits, axis=-1) - label_logits
    if ignored is None:
        return jnp.mean(terms), terms
    return jnp.sum(terms * counts) / jnp.maximum(jnp.sum(counts), 1), terms * counts


def token_losses(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    ignored: int | None = None,
    cap: float = 0.0,
    chunk_tokens: int = 1024,
) -> jax.Array:
    """Returns -log softmax(z)[label] of each token, z = softcap(hidden @ kernel, cap) + bias: float32[batch, length], 0 where ignored.

    For losses that are no mean over tokens. It takes the arguments of `one_pass_cross_entropy`, and any gradient: each chunk's logits are
    dropped, and computed again in the backward pass.
    """
    if columns.take(kernel) is not None:
        raise UserError("by_columns: a loss that reads each token's own needs the gathered kernel; omit by_columns")

    @jax.checkpoint
    def one_chunk(h: jax.Array, y: jax.Array) -> jax.Array:
        return terms_of(logits_of(h, kernel, bias, cap), y)

    h, y = chunks.cut(hidden, labels, -(-labels.size // chunk_tokens))
    terms = jax.lax.map(lambda part: one_chunk(*part), (h, y)).reshape(-1)[: labels.size].reshape(labels.shape)
    return terms if ignored is None else jnp.where(labels == ignored, 0, terms)


def token_draws(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    ignored: int | None = None,
    cap: float = 0.0,
    chunk_tokens: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Returns a token drawn after each, int32[batch, length], and what `token_losses` is of it, float32[batch, length], by the same logits.

    It takes the arguments of `token_losses`, but `labels` are bits that seed each draw, and none is ignored.
    """

    def one_chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits, seeds = logits_of(part[0], kernel, bias, cap), jax.lax.bitcast_convert_type(part[1], jnp.uint32)
        drawn = jax.vmap(lambda seed, row: jax.random.categorical(jax.random.key(seed), row))(seeds, logits)
        return drawn, terms_of(logits, drawn)

    found = jax.lax.map(one_chunk, chunks.cut(hidden, labels, -(-labels.size // chunk_tokens)))
    drawn, terms = (part.reshape(-1)[: labels.size].reshape(labels.shape) for part in found)
    return drawn.astype(jnp.int32), terms


def logits_of(h: jax.Array, kernel: jax.Array, bias: jax.Array | None, cap: float) -> jax.Array:
    """Returns softcap(h @ kernel, cap) + bias, float32[tokens, vocab]."""
    logits = softcap.softcap(jnp.dot(h, kernel, preferred_element_type=jnp.float32), cap)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def terms_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log softmax(logits)[label], float32[tokens]."""
    hit = labels[:, None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)  # no look-up: columns may be sharded
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(hit, logits, 0), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _one_pass(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    total: jax.Array,
    chunk: int,
    cap: float,
    with_terms: bool,
) -> Any:
    return _chunks(hidden, kernel, labels, bias, total, chunk, cap, with_grads=False, with_terms=with_terms)[0]


def one_pass_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    ignored: int | None = None,
    cap: float = 0.0,
    chunk_tokens: int = 4096,
) -> jax.Array:
    """Returns `cross_entropy(softcap(hidden @ kernel, cap) + bias, labels, ignored=ignored)`.

    It never stores more than one chunk of the logits.

    Takes one device's tokens: call it in a loss function under `make_train_step` with `reduce_dtype`.

    Args:
      hidden: float[batch, length, embed].
      kernel: float[embed, vocab], not sharded, but for axes that the compiler shards: over those each device computes with its columns. Or
        a matrix that devices use by columns (`columns`).
      labels: int32[batch, length].
      bias: float[vocab], a constant: its gradient is 0. None for none.
      ignored: the label of tokens that the mean leaves out; None: it has all tokens. Without any other label loss and gradients are 0.
      cap: bounds the logits (`softcap`); 0 for no bound.
      chunk_tokens: tokens per chunk; see PARTS.

    Returns:
      The mean over the tokens, float32[].
    """
    found: jax.Array = _of_any(hidden, kernel, labels, bias, ignored, cap, chunk_tokens, with_terms=False)
    return found


def one_pass_and_terms(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    ignored: int | None = None,
    cap: float = 0.0,
    chunk_tokens: int = 4096,
) -> tuple[jax.Array, jax.Array]:
    """Returns `one_pass_cross_entropy`, and the loss of each token, which is computed anyway: float32[batch, length], 0 where ignored.

    No gradient flows through the second.
    """
    mean, terms = _of_any(hidden, kernel, labels, bias, ignored, cap, chunk_tokens, with_terms=True)
    return mean, jax.lax.stop_gradient(terms)


def _of_any(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    ignored: int | None,
    cap: float,
    chunk_tokens: int,
    *,
    with_terms: bool,
) -> Any:
    """Returns the mean, with terms also the loss of each token, for a kernel that a device has, or of which devices have columns."""
    if traces.is_read():
        logits = hidden @ kernel
        found = mean_and_terms(logits if bias is None else logits + bias, labels, ignored=ignored)
        return found if with_terms else found[0]
    by_columns = columns.take(kernel)
    if by_columns is not None:
        if bias is not None or ignored is not None:
            raise UserError(
                f"by_columns: the loss of {by_columns.path} has a bias or ignores labels, and needs the gathered kernel; omit it from "
                "by_columns"
            )
        how: dict[str, Any] = {"cap": cap, "chunk_tokens": 2 * chunk_tokens, "with_terms": with_terms}
        return sharded_losses.cross_entropy(hidden, by_columns, labels, **how)
    total = None
    if ignored is not None:
        counts = labels != ignored
        total = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
        labels = jnp.where(counts, labels, chunks.NO_LABEL)
    if mesh_lib.rest():
        how = {"cap": cap, "chunk_tokens": 2 * chunk_tokens, "with_terms": with_terms}
        return sharded_losses.over_rest(hidden, kernel, labels, bias, total, **how)
    return _one_pass(hidden, kernel, labels, bias, total, chunk_tokens, cap, with_terms)


def _one_pass_forward(
    hidden: Any, kernel: Any, labels: Any, bias: Any, total: Any, chunk: int, cap: float, with_terms: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Its arguments say whether they are differentiated: the gradient of a frozen kernel is not computed."""
    is_trained = kernel.perturbed
    hidden, kernel, labels, bias, total = jax.tree.map(
        lambda part: part.value, (hidden, kernel, labels, bias, total), is_leaf=lambda node: hasattr(node, "perturbed")
    )
    loss, (d_hidden, d_kernel) = _chunks(
        hidden, kernel, labels, bias, total, chunk, cap, with_grads=True, is_trained=is_trained, with_terms=with_terms
    )
    return loss, (d_hidden, d_kernel, jnp.zeros((0,), kernel.dtype), total)


def _one_pass_backward(chunk: int, cap: float, with_terms: bool, residuals: tuple[Any, ...], scale: Any) -> tuple:
    d_hidden, d_kernel, like, total = residuals
    scale = scale[0] if with_terms else scale
    tokens = d_hidden.size // d_hidden.shape[-1] if total is None else total
    d_hidden = (d_hidden.astype(jnp.float32) * (scale / tokens)).astype(d_hidden.dtype)
    if d_kernel is not None:
        d_kernel = (d_kernel.astype(jnp.float32) * (scale / tokens)).astype(like.dtype)
    return d_hidden, d_kernel, None, None, None


_one_pass.defvjp(_one_pass_forward, _one_pass_backward, symbolic_zeros=True)


def _chunks(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    total: jax.Array,
    chunk: int,
    cap: float,
    *,
    with_grads: bool,
    is_trained: bool = True,
    with_terms: bool = False,
) -> tuple[Any, Any]:
    """Returns the mean loss, and the gradients of the summed loss by hidden, and by kernel if it `is_trained`.

    With terms the first is (the mean, the loss of each token). `total` is the number of labels that are not `chunks.NO_LABEL`; None: all
    count.
    """
    shape, is_masked, total = hidden.shape, total is not None, labels.size if total is None else total
    tokens, has_sum = labels.size, with_grads and is_trained
    part = -(-chunk // PARTS)
    count = -(-tokens // (chunk if has_sum else part))
    parts = -(-tokens // (count * part))
    hidden, labels = chunks.cut(hidden, labels, count, parts)
    has_padding = labels.size > tokens
    sum_dtype = jnp.float32 if count > 1 else _residual_dtype(kernel)

    def one_part(d_logits: jax.Array, inputs: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, Any]:
        number, h, y = inputs
        logits, slope = jnp.dot(h, kernel, preferred_element_type=jnp.float32), None
        if cap:
            logits = softcap.softcap(logits, cap)
            slope = softcap.slope(logits, cap)
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
        log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        counts = (y != chunks.NO_LABEL)[:, None] if has_padding or is_masked else 1.0
        label_logits = jnp.take_along_axis(logits, jnp.maximum(y, 0)[:, None], axis=-1)
        if with_grads:
            hit = y[:, None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            own = ((jnp.exp(logits - log_sum) - hit) * (counts if slope is None else counts * slope)).astype(h.dtype)
            d_logits = jax.lax.dynamic_update_index_in_dim(d_logits, own, number, 0)
        terms = counts * (log_sum - label_logits)
        mean = jnp.sum(terms) / total
        return d_logits, ((mean, terms[:, 0]) if with_terms else mean)

    def one_chunk(carry: tuple[Any, Any], inputs: tuple[jax.Array, jax.Array]) -> tuple[Any, tuple[jax.Array, Any]]:
        d_kernel, d_logits = carry
        d_logits, losses = jax.lax.scan(one_part, d_logits, (jnp.arange(parts), *inputs))
        if not with_grads:
            return carry, (losses, None)
        h, dz = inputs[0].reshape(-1, shape[-1]), d_logits.reshape(-1, kernel.shape[1])
        if is_trained:
            d_kernel = d_kernel + jnp.dot(h.T, dz, preferred_element_type=sum_dtype)
        return (d_kernel, d_logits), (losses, jnp.dot(dz, kernel.T).astype(h.dtype))

    # A chunk's dz is written over that of the chunk before. If each began with zeros, these would be written first.
    start: tuple[Any, Any] = (
        jnp.zeros(kernel.shape, sum_dtype) if has_sum else None,
        jnp.zeros((*labels.shape[1:], kernel.shape[1]), hidden.dtype) if with_grads else None,
    )
    (d_kernel, _), (losses, d_hidden) = jax.lax.scan(one_chunk, start, (hidden, labels))
    loss: Any
    if with_terms:
        losses, terms = losses
        loss = jnp.sum(losses), terms.reshape(-1)[:tokens].reshape(shape[:-1])
    else:
        loss = jnp.sum(losses)
    if not with_grads:
        return loss, None
    d_hidden = d_hidden.reshape(-1, shape[-1])[:tokens].reshape(shape)
    return loss, (d_hidden, d_kernel.astype(_residual_dtype(kernel)) if is_trained else None)


def _residual_dtype(kernel: jax.Array) -> DTypeLike:
    """Returns the dtype in which the kernel's gradient is stored until the backward pass scales it."""
    return jnp.float32 if kernel.dtype == jnp.float16 else kernel.dtype
