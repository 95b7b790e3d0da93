"""Divergences of a model's next tokens from a teacher's. This module holds a table of them, and takes them without storing all logits.

With the teacher's probabilities p and the student's q, and m = b p + (1 - b) q (generalized knowledge distillation, arXiv:2306.13649,
section 3), a token's divergence is

    forward_kl    KL(p | q)
    reverse_kl    KL(q | p)
    jsd           b KL(p | m) + (1 - b) KL(q | m)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.errors import UserError
from zerojax.ops import chunks, columns, losses

JSD = "jsd"
Kind = Callable[[jax.Array, jax.Array, float], jax.Array]  # (log p, log q, b) -> float32[...], of float32[..., vocab]


class Scored(NamedTuple):
    """What scores next tokens: the arguments of a loss such as `losses.token_losses`."""

    hidden: jax.Array  # float[batch, length, embed]
    kernel: jax.Array  # float[embed, vocab]
    labels: Any = None  # int32[batch, length]
    bias: jax.Array | None = None  # float[vocab]
    ignored: int | None = None
    cap: float = 0.0


def _kl(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(first) * (first - second), axis=-1)


def _jsd(teacher: jax.Array, student: jax.Array, share: float) -> jax.Array:
    mixed = jnp.logaddexp(teacher + math.log(share), student + math.log1p(-share))
    return share * _kl(teacher, mixed) + (1 - share) * _kl(student, mixed)


KINDS: Mapping[str, Kind] = {
    "forward_kl": lambda teacher, student, share: _kl(teacher, student),
    "reverse_kl": lambda teacher, student, share: _kl(student, teacher),
    JSD: _jsd,
}


class TokenTerms(NamedTuple):
    """Of each token: the divergence, and the cross-entropies of its label, through which no gradient flows. All float32[batch, length]."""

    divergence: jax.Array
    student: jax.Array
    teacher: jax.Array


def by_token(
    student: Scored, teacher: Scored, kind: str, *, share: float, temperature: float, chunk_tokens: int = 1024
) -> TokenTerms:
    """Returns the terms of each token. Both models' logits are divided by the temperature for the divergence.

    The logits of one chunk exist at a time, and are computed again in the backward pass. The kernel's gradient adds up in float32.

    Args:
      student: of the model that learns.
      teacher: of the other, whose labels are not read; no gradient flows to it.
      kind: a name of KINDS.
      share: b.
      temperature: above 0.
      chunk_tokens: tokens in a chunk.
    """
    if columns.take(student.kernel) is not None:
        raise UserError(
            "by_columns: a divergence reads all logits of a token, and needs the gathered kernel; omit by_columns"
        )
    kernel, diverge = student.kernel.astype(jnp.float32), KINDS[kind]
    shape, fixed, bias = student.labels.shape, jax.lax.stop_gradient(teacher.kernel), teacher.bias

    @jax.checkpoint
    def one_chunk(kernel: jax.Array, h: jax.Array, y: jax.Array, other: jax.Array) -> tuple[jax.Array, ...]:
        own = losses.logits_of(h, kernel.astype(h.dtype), student.bias, student.cap)
        wanted = losses.logits_of(other, fixed, bias, teacher.cap)
        of_teacher, of_student = (jax.nn.log_softmax(logits / temperature) for logits in (wanted, own))
        entropies = (jax.lax.stop_gradient(losses.terms_of(logits, y)) for logits in (own, wanted))
        return diverge(of_teacher, of_student, share), *entropies

    count = -(-student.labels.size // chunk_tokens)
    h, y = chunks.cut(student.hidden, student.labels, count)
    other, _ = chunks.cut(jax.lax.stop_gradient(teacher.hidden), student.labels, count)
    found = jax.lax.map(lambda part: one_chunk(kernel, *part), (h, y, other))
    return TokenTerms(*(terms.reshape(-1)[: student.labels.size].reshape(shape) for terms in found))
