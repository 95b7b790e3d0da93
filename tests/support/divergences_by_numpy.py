"""Divergences of a student from a teacher in float64, one token after the other. This module is the plain form of
`zerojax.ops.divergences`."""

import numpy as np


def divergence(kind, student, teacher, share=0.5, temperature=1.0):
    """Returns the divergence of each token, from float[..., vocab] each."""
    shape, found = student.shape[:-1], []
    for own, other in zip(*(array.reshape(-1, array.shape[-1]) for array in (student, teacher))):
        q, p = (_softmax(np.asarray(logits, np.float64) / temperature) for logits in (own, other))
        m = share * p + (1 - share) * q
        found.append(
            {
                "forward_kl": _kl(p, q),
                "reverse_kl": _kl(q, p),
                "jsd": share * _kl(p, m) + (1 - share) * _kl(q, m),
            }[kind]
        )
    return np.array(found).reshape(shape)


def _softmax(logits):
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def _kl(p, q):
    return sum(a * np.log(a / b) for a, b in zip(p, q))
