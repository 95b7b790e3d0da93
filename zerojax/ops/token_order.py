"""Which tokens of a sequence each device has where tokens are sharded over a mesh axis. This module is read by the feed and by attention.

contiguous   device i of n has chunk i of n
zigzag       device i of n has chunks i and 2n - 1 - i of 2n, so that the causal queries of all devices see as many keys
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import errors, specs
from zerojax.errors import UserError

Order = Literal["contiguous", "zigzag"]
CHUNKS: Mapping[str, int] = {"contiguous": 1, "zigzag": 2}  # of a device


def check(length: int, ways: int, order: str) -> None:
    """Refuses a sequence of `length` tokens that `ways` devices cannot share equally.

    Raises:
      UserError: no such order, or the length does not divide.
    """
    errors.one_of("order", order, CHUNKS)
    count = ways * CHUNKS[order]
    if length % count:
        raise UserError(
            f"context: {length} tokens of a sequence do not divide into {count} chunks ({order} over {ways} devices); make the sequence "
            f"{length + -length % count} tokens long"
        )


def permutation(length: int, ways: int, order: Order) -> np.ndarray:
    """Returns int32[length]: the position in its sequence of each token as it is fed. Device i of n has part i of n.

    >>> permutation(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    check(length, ways, order)
    return np.arange(length, dtype=np.int32).reshape(ways * CHUNKS[order], -1)[_chunks(ways, order)].reshape(-1)


def positions(local: int, axis: specs.Entry, order: Order, device: jax.Array | None = None) -> jax.Array:
    """Returns int32[local]: the positions of a device's tokens, by default this one's, inside a `jax.shard_map` over `axis`."""
    ways, count = jax.lax.axis_size(axis), CHUNKS[order]
    own = jnp.asarray(_chunks(ways, order).reshape(ways, count), jnp.int32)[
        jax.lax.axis_index(axis) if device is None else device
    ]
    size = local // count
    return (own[:, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(-1)


def in_sequence(x: jax.Array, dim: int, ways: int, order: Order) -> jax.Array:
    """Returns an array whose `dim` counts all tokens as they are fed, with these in the order of the sequence."""
    return _reordered(x, dim, np.argsort(_chunks(ways, order)))


def as_fed(x: jax.Array, dim: int, ways: int, order: Order) -> jax.Array:
    """Returns the inverse of `in_sequence`."""
    return _reordered(x, dim, _chunks(ways, order))


def _chunks(ways: int, order: Order) -> np.ndarray:
    """Returns the number of each chunk, in the order in which they are fed."""
    first = np.arange(ways)
    return first if order == "contiguous" else np.stack([first, 2 * ways - 1 - first], axis=1).reshape(-1)


def _reordered(x: jax.Array, dim: int, chunks: np.ndarray) -> jax.Array:
    if (chunks == np.arange(len(chunks))).all():
        return x
    shape = x.shape
    cut = x.reshape(*shape[:dim], len(chunks), -1, *shape[dim + 1 :])
    return jnp.concatenate([jax.lax.index_in_dim(cut, i, dim) for i in chunks], axis=dim).reshape(shape)
