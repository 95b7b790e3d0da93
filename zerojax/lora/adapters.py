"""The weights of adapters. This module draws them, adds them to a model's weights, and merges them into the kernels.

An adapter's weights are beside the kernel: `.../q/kernel`, `.../q/lora_a` float[inputs, r], `.../q/lora_b` float[r, outputs], and with DoRA
`.../q/lora_magnitude` float[outputs]. A stack of layers has one adapter for each layer, stacked as its kernels are, and so has a stack of
experts `.../experts/gate`: its adapter is `.../experts/gate_adapter/lora_a` float[experts, inputs, r] and `.../lora_b`. One for two stacks,
gate and up, is `.../experts/gate_and_up_adapter/lora_a` and `.../lora_b` float[experts, r, 2, outputs].
"""

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from zerojax import tree
from zerojax.errors import UserError
from zerojax.lora import targets as targets_lib
from zerojax.lora.targets import MAGNITUDE, A, B
from zerojax.ops import quantized
from zerojax.tree import PyTree


def shapes(targets: targets_lib.Targets) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each adapter's weights, by path."""
    found: dict[str, tuple[int, ...]] = {}
    for path in targets.adapted:
        found |= {f"{targets.adapter(path)}/{end}": shape for end, shape in targets.shapes(path).items()}
    return found


class KernelAdapter(NamedTuple):
    """The adapter of one kernel: float[*stack, inputs, r], float[*stack, r, outputs], its factor, and float[*stack, outputs] with DoRA."""

    a: Any
    b: Any
    scale: float
    magnitude: Any = None


ZEROS, UNIFORM, NORMAL = "zeros", "uniform", "normal"


def beginning(end: str, *, is_embedding: bool) -> str:
    """Returns how A or B begins, as in PEFT: B is 0, or A of an embedding."""
    if is_embedding:
        return NORMAL if end == B else ZEROS
    return ZEROS if end == B else UNIFORM


def draw(key: jax.Array, number: jax.Array | int, shape: tuple[int, ...], how: str) -> jax.Array:
    """Returns the first value of an adapter's weight, float32: 0, normal, or uniform up to 1 / sqrt(inputs).

    `number` (`number_of`) tells adapters apart.
    """
    if how == ZEROS:
        return jnp.zeros(shape, jnp.float32)
    own = jax.random.fold_in(key, number)
    if how == NORMAL:
        return jax.random.normal(own, shape, jnp.float32)
    bound = 1 / math.sqrt(shape[-2])  # kaiming_uniform with a = sqrt(5)
    return jax.random.uniform(own, shape, jnp.float32, -bound, bound)


def magnitude(kernel: Any, shape: tuple[int, ...], dims: int) -> jax.Array:
    """Returns the first magnitude of a kernel [*stack, inputs..., outputs...], plain or quantized: the norms of its columns, float32, in
    `shape`, whose first `dims` dims are the stack's."""
    if quantized.is_quantized(kernel):
        kernel = _dequantized(kernel, dims)
    columns = kernel.astype(jnp.float32).reshape(*shape[:dims], -1, shape[-1])
    return jnp.sqrt(jnp.sum(columns**2, axis=-2))


def _dequantized(kernel: Any, dims: int) -> jax.Array:
    one = functools.partial(quantized.dequantize, dtype=jnp.float32)
    for _ in range(dims):
        one = jax.vmap(one)
    return one(kernel)


def number_of(path: str) -> int:
    """Returns a number of a leaf's path for its random key, the same on all processes."""
    return zlib.crc32(path.encode()) & 0x7FFFFFFF


def add(params: PyTree, targets: targets_lib.Targets, key: jax.Array) -> PyTree:
    """Returns weights with fresh adapters, as nested dicts. Frozen kernels are quantized as the settings say; weights trained in full are
    at least float32."""
    coded = targets.coded
    found: dict[tuple[str, ...], Any] = {}
    names = {}  # of the nodes around each leaf; a name may hold a "/", as nn.WeightNorm's do
    for nodes, leaf in jax.tree_util.tree_leaves_with_path(params):
        path, name = tree.path_string(nodes), tuple(tree.path_string((node,)) for node in nodes)
        names[path] = name
        if path in coded:
            stored = quantize_stack(leaf, targets.lora.quantize, *coded[path])
            found |= {(*name, part): array for part, array in stored.items()}
        else:
            found[name] = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if path in targets.saved else leaf
    for module in targets.adapted:
        (kernel,), one = targets.kernels(module), targets.linear[module]
        above, beside = names[kernel][:-1], targets.adapter(module)
        inside = (beside.rpartition("/")[2],) if one.has_no_module else ()
        for end, shape in targets.shapes(module).items():
            if end == MAGNITUDE:
                own = found.get(names[kernel])
                stored = (
                    {part: found[(*names[kernel], part)] for part in quantized.parts_of(targets.lora.quantize)}
                    if own is None
                    else own
                )
                found[(*above, *inside, end)] = magnitude(stored, shape, len(one.stack))
            else:
                how = beginning(end, is_embedding=one.is_embedding)
                found[(*above, *inside, end)] = draw(key, number_of(f"{beside}/{end}"), shape, how)
    return traverse_util.unflatten_dict(found)


def quantize_stack(kernel: jax.Array, kind: str, dims: int, inputs: int = 1) -> dict[str, jax.Array]:
    """Returns `quantized.quantize` of each layer of a stack, whose first `dims` dims count layers."""
    one = functools.partial(quantized.quantize, kind=kind, inputs=inputs)
    for _ in range(dims):
        one = jax.vmap(one)
    return one(kernel)


@functools.lru_cache(maxsize=512)
def abstract_stack(shape: tuple[int, ...], kind: str, dims: int, inputs: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what `quantize_stack` returns for a stack of this shape. Layers share it: do not change it."""
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(lambda kernel: quantize_stack(kernel, kind, dims, inputs), like)


def merged(kernel: Any, adapter: KernelAdapter) -> Any:
    """Returns kernel + scale * A B in float32, as the kernel's shape; with DoRA each column has the norm that is its magnitude."""
    *stack, inputs, rank = adapter.a.shape
    a, b = adapter.a.astype(jnp.float32), adapter.b.astype(jnp.float32).reshape(*stack, rank, -1)
    low = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    found = kernel.astype(jnp.float32) + adapter.scale * low.reshape(kernel.shape)
    if adapter.magnitude is None:
        return found
    columns = found.reshape(*stack, inputs, -1)
    share = factor(adapter.magnitude, jnp.sum(columns**2, axis=-2))
    return (columns * share[..., None, :]).reshape(kernel.shape)


def factor(magnitude: jax.Array, squares: jax.Array) -> jax.Array:
    """Returns magnitude / norm, float32, of columns with these sums of squares; 0 for a column of zeros. The norm has no gradient."""
    squares = jax.lax.stop_gradient(squares)
    is_any = squares > 0
    return jnp.where(is_any, magnitude.astype(jnp.float32) / jnp.sqrt(jnp.where(is_any, squares, 1)), 0)


def split(params: PyTree, targets: targets_lib.Targets) -> tuple[dict[str, Any], dict[str, KernelAdapter]]:
    """Returns the weights of the model itself by path, quantized kernels as nodes, and the adapters by the path of their kernel.

    Raises:
      UserError: an adapter is missing, or cannot be merged.
    """
    targets_lib.check_merge(targets)
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=quantized.is_quantized)[0]
    for key_path, leaf in nodes:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        module, _, name = path.rpartition("/")
        if name in targets_lib.ENDS:
            parts.setdefault(module, {})[name] = leaf
        else:
            own[path] = leaf
    found: dict[str, KernelAdapter] = {}
    for path in targets.adapted:
        leaves = parts.get(targets.adapter(path), {})
        if leaves.keys() != targets.shapes(path).keys():
            raise UserError(f"params/{path}: has no adapter; pass the params of the model that was given adapters")
        found |= of_kernels(path, leaves, targets)
    return own, found


def of_kernels(path: str, leaves: Mapping[str, Any], targets: targets_lib.Targets) -> dict[str, KernelAdapter]:
    """Returns the adapters of a module's kernels, by path, from its weights."""
    kernels, b = targets.kernels(path), leaves[B]
    parts = [b] if len(kernels) == 1 else [b[:, :, number] for number in range(len(kernels))]
    scale, magnitude = targets.scale(path), leaves.get(MAGNITUDE)
    return {kernel: KernelAdapter(leaves[A], part, scale, magnitude) for kernel, part in zip(kernels, parts)}


def merge(params: PyTree, targets: targets_lib.Targets) -> dict[str, Any]:
    """Returns the weights of a plain model, as nested dicts: each adapter is added to its kernel, in the kernel's dtype.

    Quantized kernels are dequantized to float32.
    """
    own, found = split(params, targets)
    for path, leaf in own.items():
        if quantized.is_quantized(leaf):
            own[path] = quantized.dequantize(leaf, jnp.float32)
    for path, adapter in found.items():
        own[path] = merged(own[path], adapter).astype(own[path].dtype)
    return tree.nested(own)
