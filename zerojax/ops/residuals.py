"""Names arrays that a backward pass keeps in place of matmuls. This module is for models whose matmuls' results are read only through them.

Rematerialisation by `dots` keeps the results of matmuls. If the backward pass reads a result only after it was rotated or added to another
array, then the rotated array takes as much memory, and need not be computed again.
"""

# Names that `jax.ad_checkpoint.checkpoint_name` gives.
IN_PLACE = "zerojax: kept in place of a matmul"  # by "dots", which then does not keep the matmul's result unless it is read beside it
ATTENTION = "zerojax: attention that is added up block by block"  # by policies that keep what fused attention returns
