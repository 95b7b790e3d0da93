"""Names arrays that a backward pass keeps in place of matmuls. This module is for models whose matmuls' results are read only through them.

Rematerialisation by `dots` keeps the results of matmuls. If the backward pass reads a result only after it was rotated or added to another
array, then the rotated array takes as much memory, and need not be computed again.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "zerojax: attention that is added up block by block"
IN_PLACE = "zerojax: kept in place of a matmul"


def in_place(x: jax.Array) -> jax.Array:
    """Returns `x`, which remat="dots" keeps for the backward pass. A matmul's result that is not read beside it is then not kept."""
    return checkpoint_name(x, IN_PLACE)


def of_attention(x: jax.Array) -> jax.Array:
    """Returns `x`, what attention made of several kernels returns. Policies that keep what fused attention returns keep it."""
    return checkpoint_name(x, ATTENTION)
