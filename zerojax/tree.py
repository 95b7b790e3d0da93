"""Names the leaves of a pytree. This module turns key paths into strings such as `params/layer_0/mlp/up/kernel`, and takes the arrays out
of a value.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import traverse_util

from zerojax import errors

PyTree = Any  # nodes that JAX knows, around leaves of one kind: arrays, abstract arrays, shardings or specs
Leaf = Any  # an array, its shape and dtype, or what stands for one
T = TypeVar("T")
_OF_NO_NUMBERS = "OSUMm"  # kinds of numpy's dtypes: objects, bytes, texts, dates, times


def path_string(path: tuple) -> str:
    """Returns a key path as text, its parts joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


IsLeaf = Callable[[Any], bool] | None


def flatten(tree: PyTree, is_leaf: IsLeaf = None) -> list[tuple[str, Any]]:
    """Returns (path, leaf) pairs in the order of `jax.tree.leaves`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    return list(zip(_paths(tree, structure, is_leaf), leaves))


def _paths(tree: PyTree, structure: jax.tree_util.PyTreeDef, is_leaf: IsLeaf) -> tuple[str, ...]:
    """Returns the path of each leaf. A model's few trees are named thousands of times, so their paths are kept by structure."""
    try:
        return _paths_of(structure)
    except Exception:  # a node that cannot be hashed, or cannot be made of numbers
        return tuple(path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf))


@functools.lru_cache(maxsize=64)
def _paths_of(structure: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths = tuple(path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(numbered))
    assert len(paths) == structure.num_leaves
    return paths


def nested(leaves: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Returns {path: leaf} as nested dicts.

    >>> nested({"a/b": 1, "a/c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    return traverse_util.unflatten_dict(dict(leaves), sep=separator)


def below_params(path: str) -> str:
    """Returns a weight's path below `params`, which is its path in the model.

    >>> below_params("params/layer_0/kernel")
    'layer_0/kernel'
    """
    return path.removeprefix("params/")


def block_of(leaf_path: str, pattern: re.Pattern) -> str | None:
    """Returns the full path of the outermost module around a leaf that a pattern matches, or None."""
    parts = below_params(leaf_path).split("/")
    prefixes = ("/".join(parts[:end]) for end in range(1, len(parts)))
    return next((prefix for prefix in prefixes if pattern.fullmatch(prefix)), None)


def such_as(pattern: str, paths: Iterable[str]) -> str:
    r"""Returns " such as" with a regex over `paths` that is like one that matches none of them; "" if there are no paths.

    >>> such_as("mlp/upp", ["layer_0/mlp/up", "layer_1/mlp/up", "head"])
    " such as 'layer_\\d+/mlp/up'"
    """
    regexes = sorted({re.sub(r"(?<=[_/])\d+(?=/|$)", r"\\d+", re.escape(path)) for path in paths})
    near = difflib.get_close_matches(pattern, regexes, 1, 0.0)
    return f" such as '{near[0]}'" if near else ""


def map_with_path(function: Callable[..., Any], tree: PyTree, *rest: Any, is_leaf: IsLeaf = None) -> PyTree:
    """Maps `function(path, leaf, *others)` over trees of one structure."""

    structure: Any
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    others = [structure.flatten_up_to(other) for other in rest]
    return structure.unflatten(map(function, _paths(tree, structure, is_leaf), leaves, *others))


def where(condition: Any, new: PyTree, old: PyTree) -> PyTree:
    """Returns the tree `new` where `condition`, bool[], holds, else `old`; None holds."""
    return new if condition is None else jax.tree.map(lambda n, o: jax.numpy.where(condition, n, o), new, old)


def abstract(tree: PyTree) -> PyTree:
    """Returns the tree with each leaf as a ShapeDtypeStruct that keeps its sharding.

    Raises:
      UserError: a leaf is no array, such as the functions in modules of Equinox.
    """

    def describe(leaf: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), dtype_of(leaf), sharding=getattr(leaf, "sharding", None))

    return jax.tree.map(describe, with_arrays_alone(tree))


def of_dtype(tree: PyTree, dtype: Any) -> PyTree:
    """Returns ShapeDtypeStructs of the shapes of a tree's leaves and of this dtype, without shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def with_arrays_alone(tree: PyTree) -> PyTree:
    """Returns the tree. Raises UserError if a leaf is no array, such as the functions in modules of Equinox."""
    for path, leaf in flatten(tree):
        if not is_array(leaf):
            raise errors.UserError(
                f"{path or 'state'}: is {errors.shown(leaf)}, and every leaf of a state must be an array or a number; keep the arrays "
                "alone in it (equinox.partition(model, equinox.is_array)), and combine them with the rest in the loss function"
            )
    return tree


def undeleted(tree: PyTree) -> PyTree:
    """Returns the tree. Raises UserError if a buffer was deleted, as a step that donates deletes those of its input."""
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "is_deleted") and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():  # on a disk too
            path = next(path for path, other in flatten(tree) if other is leaf)
            raise errors.UserError(
                f"state: {path} was deleted, since the step that took this state reused its memory; use the state that the step "
                "returned, or build the step with donate=False"
            )
    return tree


def untraced(tree: PyTree) -> PyTree:
    """Returns the tree. Raises UserError if an array has no values, since a function is traced."""
    for path, leaf in flatten(tree):
        if isinstance(leaf, jax.core.Tracer):
            raise errors.UserError(
                f"state: {path} has no values while jit, grad, vmap or scan traces a function; call this outside of it"
            )
    return tree


def is_array(leaf: Any) -> bool:
    """Returns whether JAX takes a leaf: an array, abstract array or random key, or a number. Arrays of texts or of objects are none."""
    try:
        dtype = dtype_of(leaf)
        if isinstance(leaf, int):
            np.array(leaf, dtype)  # raises if it has more bits
    except (TypeError, ValueError, OverflowError):
        return False
    is_text = isinstance(leaf, str | np.dtype) or (isinstance(dtype, np.dtype) and dtype.kind in _OF_NO_NUMBERS)
    return not is_text and not callable(leaf)


def dtype_of(leaf: Leaf) -> Any:
    """Returns the dtype of an array, abstract array, random key or Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)


def is_key(leaf: Leaf) -> bool:
    """Returns whether a leaf holds random keys by its dtype."""
    return jax.dtypes.issubdtype(dtype_of(leaf), jax.dtypes.prng_key)


def key_impl(leaf: Leaf) -> Any:
    """Returns the generator of random keys; None for other leaves."""
    return jax.random.key_impl(leaf) if is_key(leaf) else None


def key_words(leaf: Any) -> Any:
    """Returns random keys as the numbers that they hold, and other leaves as they are."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def keys_again(words: Any, impl: Any) -> Any:
    """Returns the random keys of `key_words` and `key_impl`, and other leaves as they are."""
    return words if impl is None else jax.random.wrap_key_data(words, impl=impl)


def bare(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array or a number, without its sharding."""
    return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), dtype_of(leaf))


def size(leaf: Leaf) -> int:
    """Returns the number of elements."""
    return math.prod(leaf.shape)


def nbytes(leaf: Leaf, shape: Iterable[int] | None = None) -> int:
    """Returns the bytes of a leaf, or of a shard with the given shape."""
    itemsize = 8 if is_key(leaf) else jax.numpy.dtype(dtype_of(leaf)).itemsize  # a threefry key is two words
    return math.prod(leaf.shape if shape is None else shape) * itemsize


def shard_bytes(leaf: Leaf) -> int:
    """Returns the bytes of an abstract leaf on each device, or in host memory for each device."""
    return nbytes(leaf, leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)


def runs(items: Iterable[T], nbytes_of: Callable[[T], int], most: int) -> list[list[T]]:
    """Returns items in order, in runs of at most `most` bytes, or of one item.

    >>> runs([3, 3, 9, 1], int, 6)
    [[3, 3], [9], [1]]
    """
    found: list[list[T]] = []
    held = 0
    for item in items:
        size = nbytes_of(item)
        if not found or held + size > most:
            found.append([])
            held = 0
        found[-1].append(item)
        held += size
    return found


def suffix_index(paths: Iterable[str]) -> dict[str, str]:
    """Returns {suffix: path} for every suffix of every path; if several paths share a suffix, it maps to the one of fewest parts.

    So `kernel` maps to `params/kernel`, and never to `params/layer_0/kernel`. The empty path, of params that are
    one array, maps to `params`.
    """
    index: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: path.count("/")):
        parts = path.split("/")
        for start in range(len(parts) + 1):
            index.setdefault("/".join(parts[start:]), path)
    return index


def longest_suffix(index: dict[str, str], path: str) -> str | None:
    """Returns the indexed path that shares the longest suffix with `path`, or None if they do not even share the last part.

    `opt_state/0/mu/layer_0/kernel` finds `params/layer_0/kernel`.
    """
    parts = path.split("/")
    for start in range(len(parts)):
        if (found := index.get("/".join(parts[start:]))) is not None:
            return found
    return None


class NonArrays:
    """What of a value is no array (a flag, a name). JAX's transformations would trace or refuse it, so it stays beside them."""

    def take(self, value: object) -> list[Any]:
        """Returns the arrays of a value, and keeps the rest."""
        leaves, self._structure = jax.tree.flatten(value)
        # A numpy scalar may be a static argument
        self._is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
        self._rest = [leaf for array, leaf in zip(self._is_array, leaves) if not array]
        return [leaf for array, leaf in zip(self._is_array, leaves) if array]

    def give(self, arrays: Iterable[Any]) -> PyTree:
        """Returns the value that was taken, with other arrays."""
        own, rest = iter(arrays), iter(self._rest)
        return jax.tree.unflatten(self._structure, [next(own if array else rest) for array in self._is_array])

    def rest(self) -> tuple[Any, ...]:
        """Returns all that is kept, which may be compared."""
        return self._structure, *self._is_array, *((type(value), value) for value in self._rest)
