"""The weights of adapters. This module draws them, adds them to a model's weights, and merges them into the kernels.

An adapter's two weights are beside the kernel: `.../q/kernel`, `.../q/lora_a` float[inputs, r], `.../q/lora_b` float[r, outputs].
A stack of layers has one pair for each layer, stacked as its kernels are, and so has a stack of experts `.../experts/gate`: its pair is
`.../experts/gate_adapter/lora_a` float[experts, inputs, r] and `.../lora_b`.
"""

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from zerojax import tree
from zerojax.errors import UserError
from zerojax.lora import targets as targets_lib
from zerojax.lora.targets import A, B
from zerojax.ops import quantized
from zerojax.tree import PyTree


def shapes(targets: targets_lib.Targets) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each adapter's weights, by path."""
    found = {}
    for path in targets.adapted:
        module = targets.adapter(path)
        found[f"{module}/{A}"], found[f"{module}/{B}"] = targets.shapes(path)
    return found


def draw(key: jax.Array, number: jax.Array | int, shape: tuple[int, ...], *, is_b: bool) -> jax.Array:
    """Returns the first value of an adapter's weight, float32: B is 0, and A uniform up to 1 / sqrt(inputs), as in PEFT.

    `number` (`number_of`) tells adapters apart.
    """
    if is_b:
        return jnp.zeros(shape, jnp.float32)
    bound = 1 / math.sqrt(shape[-2])  # kaiming_uniform with a = sqrt(5)
    return jax.random.uniform(jax.random.fold_in(key, number), shape, jnp.float32, -bound, bound)


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
            stored = quantize_stack(leaf, targets.lora.quantize, coded[path])
            found |= {(*name, part): array for part, array in stored.items()}
        else:
            found[name] = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if path in targets.saved else leaf
    for module in targets.adapted:
        above, beside = names[targets.kernel(module)][:-1], targets.adapter(module)
        inside = (beside.rpartition("/")[2],) if targets.linear[module].is_experts else ()
        for end, shape in zip((A, B), targets.shapes(module)):
            number = number_of(f"{beside}/{end}")
            found[(*above, *inside, end)] = draw(key, number, shape, is_b=end == B)
    return traverse_util.unflatten_dict(found)


def quantize_stack(kernel: jax.Array, kind: str, dims: int) -> dict[str, jax.Array]:
    """Returns `quantized.quantize` of each layer of a stack, whose first `dims` dims count layers."""
    one = functools.partial(quantized.quantize, kind=kind)
    for _ in range(dims):
        one = jax.vmap(one)
    return one(kernel)


@functools.lru_cache(maxsize=512)
def abstract_stack(shape: tuple[int, ...], kind: str, dims: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what `quantize_stack` returns for a stack of this shape. Layers share it: do not change it."""
    return jax.eval_shape(lambda kernel: quantize_stack(kernel, kind, dims), jax.ShapeDtypeStruct(shape, jnp.float32))


def merged(kernel: Any, a: Any, b: Any, scale: float) -> Any:
    """Returns kernel + scale * A B in float32, as the kernel's shape."""
    low = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return kernel.astype(jnp.float32) + scale * low.reshape(kernel.shape)


def split(params: PyTree, targets: targets_lib.Targets) -> tuple[dict[str, Any], dict[str, tuple[str, Any, Any]]]:
    """Returns the weights of the model itself by path, quantized kernels as nodes, and its module's path, A and B by path of a kernel."""
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=quantized.is_quantized)[0]
    for key_path, leaf in nodes:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        module, _, name = path.rpartition("/")
        if name in (A, B):
            parts.setdefault(module, {})[name] = leaf
        else:
            own[path] = leaf
    pairs = {path: parts.get(targets.adapter(path), {}) for path in targets.adapted}
    if bare := [path for path, pair in pairs.items() if len(pair) < 2]:
        raise UserError(f"params/{bare[0]}: has no adapter; pass the params of the model that was given adapters")
    return own, {targets.kernel(path): (path, found[A], found[B]) for path, found in pairs.items()}


def merge(params: PyTree, targets: targets_lib.Targets) -> dict[str, Any]:
    """Returns the weights of a plain model, as nested dicts: each adapter is added to its kernel, in the kernel's dtype.

    Quantized kernels are dequantized to float32.
    """
    own, found = split(params, targets)
    for path, leaf in own.items():
        if quantized.is_quantized(leaf):
            own[path] = quantized.dequantize(leaf, jnp.float32)
    for path, (module, a, b) in found.items():
        own[path] = merged(own[path], a, b, targets.scale(module)).astype(own[path].dtype)
    return tree.nested(own)
