"""Says in which form a leaf lies in a checkpoint. This module turns leaves into plain arrays by path, and back."""

from typing import Any

import jax
import numpy as np

from zerojax import tree


def to_stored(state: Any) -> dict[str, Any]:
    """Returns {path: array}: keys as their data, numbers and process-local arrays as copies in numpy."""

    def convert(leaf: Any) -> Any:
        array = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        is_local = jax.process_count() > 1 and getattr(array, "is_fully_addressable", False)
        if isinstance(array, jax.Array) and not is_local:
            return array
        return np.array(array, dtype=tree.dtype_of(array))

    leaves = tree.flatten(state)
    stored = {name: convert(leaf) for name, leaf in leaves}
    assert len(stored) == len(leaves), "two leaves of the state have one path"
    return stored


def form(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract array in which a leaf is stored, with the sharding wanted."""
    wanted = tree.abstract(leaf)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(wanted.shape, wanted.dtype))
        wanted = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=wanted.sharding)
    if wanted.sharding is not None:
        wanted.sharding.shard_shape(wanted.shape)  # raises here, where it cannot pass for a damaged file
    return wanted


def from_stored(array: Any, leaf: Any) -> Any:
    """Returns a restored array in the form of the abstract leaf."""
    if not _is_key(leaf):
        return array
    aval = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    impls: list = []  # only a traced key tells its implementation
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(array, impl=impls[0])


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(tree.dtype_of(leaf), jax.dtypes.prng_key)
