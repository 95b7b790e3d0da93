"""Names arrays that a backward pass keeps in place of matmuls. This module is for models whose matmuls' results are read only through them.

Rematerialisation by `dots` keeps the results of matmuls. If the backward pass reads a result only after it was rotated or added to another
array, then the rotated array takes as much memory, and need not be computed again.
"""

import functools

from jax.ad_checkpoint import checkpoint_name

ATTENTION = "zerojax: attention that is added up block by block"
PRODUCT = "zerojax: a matmul by kernels of its own"
IN_PLACE = "zerojax: kept in place of a matmul"

# f(x) -> x. remat="dots" keeps it for the backward pass; a matmul's result that is not read beside it is then not kept.
in_place = functools.partial(checkpoint_name, name=IN_PLACE)
# f(x) -> x, the product of a matmul that is no `dot_general`, or is scaled after it. Policies that keep matmuls keep it.
of_matmul = functools.partial(checkpoint_name, name=PRODUCT)
# f(x) -> x, what attention made of several kernels returns. Policies that keep what fused attention returns keep it.
of_attention = functools.partial(checkpoint_name, name=ATTENTION)
