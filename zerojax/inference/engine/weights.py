"""The weights that an engine reads at each token. This module places them, quantizes them, and multiplies with them as they are stored."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pallas_kernels import narrow
from zerojax import mesh as mesh_lib
from zerojax import specs, tree
from zerojax.models import experts, layers
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import attention, quantized
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import intercept as intercept_lib
from zerojax.zero.blocks import tensor_parallel

FORMATS = (quantized.NONE, quantized.INT8, quantized.FP8, quantized.NF4)
KERNEL = "kernel"
LORA = {"lora_a"}  # beside a kernel, of a model that was loaded with an adapter
DOWN_BIAS = "down_bias"  # of experts
MOST_ROWS = narrow.MOST_ROWS  # of a matmul whose kernel is read as it is stored


def placed(
    family: family_lib.Family, config: ModelConfig, params: PyTree, mesh: Mesh, dtype: DTypeLike | None, kind: str
) -> PyTree:
    """Returns the weights for decoding: sharded over the compiler's axes by the family's table, replicated over the others.

    A weight that is there already, in its dtype, is not copied.

    Args:
      family, config: the model.
      params: its weights, in any sharding.
      mesh: the devices.
      dtype: of floating weights; None: as they are.
      kind: "none", or how the kernels of linear modules are quantized.
    """
    rule = _rule(family, config, params, mesh, dtype, kind)

    def place(path: str, leaf: jax.Array) -> PyTree:
        wanted, spec, is_coded = rule(path, leaf)
        if is_coded:
            shardings = _code_shardings(leaf.shape, kind, mesh, spec)
            return _quantize(kind, tuple(shardings.items()))(jax.device_put(leaf, NamedSharding(mesh, spec)))
        return jax.device_put(leaf if leaf.dtype == wanted else leaf.astype(wanted), NamedSharding(mesh, spec))

    return tree.map_with_path(place, params)


def abstract(
    family: family_lib.Family, config: ModelConfig, params: PyTree, mesh: Mesh, dtype: DTypeLike | None, kind: str
) -> PyTree:
    """Returns what `placed` returns, as ShapeDtypeStructs with shardings. Takes abstract weights, and allocates nothing."""
    rule = _rule(family, config, params, mesh, dtype, kind)

    def describe(path: str, leaf: Leaf) -> PyTree:
        wanted, spec, is_coded = rule(path, leaf)
        if is_coded:
            shardings = _code_shardings(leaf.shape, kind, mesh, spec)
            coded = quantized.abstract(leaf.shape, kind)
            return {
                name: jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=shardings[name])
                for name, found in coded.items()
            }
        return jax.ShapeDtypeStruct(leaf.shape, wanted, sharding=NamedSharding(mesh, spec))

    return tree.map_with_path(describe, params)


def for_one_row(
    family: family_lib.Family, config: ModelConfig, params: PyTree, mesh: Mesh, kernels: str | None
) -> PyTree:
    """Returns the weights for an engine of one slot: with transposed scales beside the others, where its kernels read these
    (`Family.transposed`).

    Args:
      family, config: the model.
      params: the weights, of `placed` or `abstract`.
      mesh: the devices. Scales are added on one device alone.
      kernels: see `kernels_of`; None: nothing is added.
    """
    is_alone = kernels == "pallas" and mesh.size == 1
    transpose = family.transposed(config, params, mesh.abstract_mesh.abstract_device) if is_alone else None
    if transpose is None:
        return params
    where = NamedSharding(mesh, P())
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    if is_abstract:
        return jax.tree.map(lambda leaf: leaf.update(sharding=where), jax.eval_shape(transpose, params))
    return transpose(params)


def has_transposed(params: PyTree) -> bool:
    """Returns whether `for_one_row` has added scales to the weights."""
    return any(path.endswith(f"/{quantized.TRANSPOSED}") for path, _ in tree.flatten(params))


def spec_of(family: family_lib.Family, params: PyTree, mesh: Mesh) -> Callable[[str], P]:
    """Returns f(path) -> the spec of a weight, by the family's table."""
    shapes = {path: leaf.shape for path, leaf in tree.flatten(params)}
    rows, _ = tensor_parallel.overrides(family.parallel.weights, shapes, mesh)
    return lambda path: next((P(*entries) for pattern, entries in rows if re.search(pattern, path)), P())


def _rule(
    family: family_lib.Family, config: ModelConfig, params: PyTree, mesh: Mesh, dtype: DTypeLike | None, kind: str
) -> Callable[[str, Leaf], tuple[Any, P, bool]]:
    """Returns f(path, leaf) -> the weight's dtype, its spec, and whether it is quantized."""
    spec = spec_of(family, params, mesh)
    coded = set() if kind == quantized.NONE else linear_modules(family, config, params)

    def rule(path: str, leaf: Leaf) -> tuple[Any, P, bool]:
        wanted = leaf.dtype if dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.dtype(dtype)
        module, _, name = path.rpartition("/")
        return wanted, spec(path), module in coded and name == KERNEL and quantized.takes(tuple(leaf.shape))

    return rule


def _code_shardings(shape: tuple[int, ...], kind: str, mesh: Mesh, spec: P) -> dict[str, NamedSharding]:
    """Returns the shardings of a kernel in a format: as the kernel, where codes and scales divide."""
    shardings = {}
    for name, leaf in quantized.abstract(shape, kind).items():
        entries = list(spec) + [None] * (len(shape) - len(spec))
        if name == quantized.SCALES:  # of a row: over all dims but the first
            entries = [entries[0], next((entry for entry in entries[1:] if entry is not None), None)]
        ways = [math.prod(mesh.shape[axis] for axis in specs.names(entry)) for entry in entries]
        entries = [None if size % way else entry for entry, size, way in zip(entries, leaf.shape, ways)]
        shardings[name] = NamedSharding(mesh, P(*entries))
    return shardings


@functools.lru_cache(maxsize=64)
def _quantize(kind: str, shardings: tuple) -> Callable[[jax.Array], dict[str, jax.Array]]:
    return jax.jit(lambda kernel: quantized.quantize(kernel, kind), out_shardings=dict(shardings))


def linear_modules(family: family_lib.Family, config: ModelConfig, params: PyTree) -> set[str]:
    """Returns the paths of the modules whose kernels a quantized form can replace. Computes nothing."""
    found: set[str] = set()

    def note(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, layers.Linear | layers.Head) and context.method_name == "__call__":
            found.add("/".join(context.module.path))
        return call(*args, **kwargs)

    tokens, lengths = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    inputs = {"inputs": tokens, "mask": jax.ShapeDtypeStruct((1, 1), bool)} if family.is_encoder_decoder else {}
    with nn.intercept_methods(note):
        jax.eval_shape(
            lambda *given: family.start(config, given[0], given[1], given[2], given[3], 2),
            params,
            inputs,
            tokens,
            lengths,
        )
    return found


@contextlib.contextmanager
def matmuls(implementation: str | None, is_sharded: bool = False) -> Iterator[None]:
    """Multiplies with quantized kernels in all modules that are called inside.

    Args:
      implementation: of `pallas_kernels.narrow`, for matmuls of few rows; None: kernels are dequantized before the matmul.
      is_sharded: whether the compiler shards kernels. It gathers one of [inputs, parts, width] whose width devices share if it is made a
        matrix, as a `Linear` does.
    """

    def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module, scope = context.module, context.module.scope
        is_head = isinstance(module, layers.Head)
        if scope is None or not (is_head or isinstance(module, layers.Linear)):
            return call(*args, **kwargs)
        stored = scope.get_variable("params", KERNEL)
        is_coded = quantized.is_quantized(stored)
        if context.method_name == "setup":
            return None if is_coded else call(*args, **kwargs)
        if context.method_name != "__call__" or LORA & scope.variables()["params"].keys():
            return call(*args, **kwargs)  # by what runs the adapter that the model was loaded with
        x = args[0]
        contracted = 1 if is_head else module.contracted
        y = multiply(x, stored, contracted, implementation, keeps_plain=not is_sharded)
        if y is None:
            return call(*args, **kwargs)
        y = y if is_head else y.astype(x.dtype if is_coded else jnp.result_type(x, stored))
        return y + scope.get_variable("params", "bias") if getattr(module, "use_bias", False) else y

    with nn.intercept_methods(intercept):
        yield


@contextlib.contextmanager
def experts_on_shards(family: family_lib.Family, params: PyTree, mesh: Mesh) -> Iterator[None]:
    """Runs mixtures of experts, in all modules that are called inside, on each device's part of the experts' width. Their kernels are
    Pallas calls, before which the compiler would gather all experts.

    Args:
      family, params: the model and its weights, which the family's table shards over the compiler's axes of the mesh.
    """
    ways, axes = mesh_lib.size(mesh, mesh_lib.COMPILER), mesh_lib.COMPILER
    spec = spec_of(family, params, mesh) if ways > 1 else None

    def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        is_own = isinstance(module, experts.Experts) and context.method_name == "__call__"
        # Inside a `jax.shard_map` the weights are others, which a step's hooks have gathered.
        if spec is None or not is_own or jax.sharding.get_abstract_mesh().manual_axes:
            return call(*args, **kwargs)
        params, path = dict(module.variables["params"]), "/".join(module.path)
        own_specs = lambda name, _: specs.only(spec(f"{path}/{name}"), axes)  # noqa: E731
        specs_of = tree.map_with_path(own_specs, params)
        # within groups of 32 inputs, or blocks
        is_cut = any(name.endswith((quantized.EXPONENTS, quantized.BLOCK_SCALES)) for name, _ in tree.flatten(params))
        if is_cut or module.width % ways or not any(specs.axes(own) for own in jax.tree.leaves(specs_of)):
            return call(*args, **kwargs)
        alone = module.clone(parent=None, width=module.width // ways)

        def on_device(own: dict[str, Any], *given: jax.Array) -> Any:
            if DOWN_BIAS in own:  # all devices add to the sum
                own = {**own, DOWN_BIAS: jnp.where(jax.lax.axis_index(axes) == 0, own[DOWN_BIAS], 0)}
            with intercept_lib.bound(alone, module.path, own) as bound:  # adapters find their scale by the path
                found: Any = bound(*given, **kwargs)
            y, *chosen = found if isinstance(found, tuple) else (found,)  # all devices choose the same experts
            y = jax.lax.psum(y.astype(jnp.float32), axes).astype(y.dtype)
            return (y, *chosen) if chosen else y

        how: dict[str, Any] = {"in_specs": (specs_of, *(P() for _ in args)), "out_specs": P(), "check_vma": False}
        run = jax.shard_map(on_device, mesh=mesh, axis_names={*axes}, **how)
        return run(params, *args)

    with nn.intercept_methods(intercept):
        yield


def multiply(
    x: jax.Array, stored: PyTree, contracted: int, implementation: str | None, *, keeps_plain: bool = True
) -> jax.Array | None:
    """Returns the matmul of x and a kernel, float32 or of the dtype of `x @ kernel`; None where a plain matmul is as good.

    Args:
      x: float[..., inputs].
      stored: the kernel or its quantized form.
      contracted: the number of the dims of x that are contracted.
      implementation: see `matmuls`.
      keeps_plain: whether any kernel that is not quantized may be left to the module; otherwise those alone with one dim of results.
    """
    is_coded = quantized.is_quantized(stored)
    shape = quantized.shape_of(stored) if is_coded else stored.shape
    kept, matrix = x.shape[: x.ndim - contracted], (math.prod(shape[:contracted]), math.prod(shape[contracted:]))
    rows = math.prod(kept)
    can_run = implementation is not None and narrow.takes((rows, *matrix)) and x.dtype != jnp.float16
    # Without scales of the weights of a row: a kernel's squares are known by where its inputs end
    if is_coded and quantized.SCALES not in stored:
        squares = stored.get(quantized.BLOCK_SCALES)
        can_run &= squares is not None and squares.shape == quantized.blocks_of(shape, contracted)
    if not is_coded and (not can_run or rows > 1):
        is_matrix = len(shape) == contracted + 1
        return None if keeps_plain or is_matrix else jnp.tensordot(x, stored, contracted)
    x_MK = x.reshape(rows, -1)
    if implementation is None or not can_run:
        kernel = quantized.dequantize(stored, x.dtype)
        return jnp.tensordot(x, kernel, contracted, preferred_element_type=jnp.float32)
    if not is_coded:
        y = narrow.multiply(x_MK, stored.reshape(matrix), None, implementation=implementation)
    else:
        kind, (codes, scales) = quantized.kind_of(stored), quantized.values_of(stored)
        y = narrow.multiply(
            x_MK,
            codes.reshape(matrix[0], -1),
            scales if quantized.BLOCK_SCALES in stored else scales.reshape(matrix[0], -1),
            unit=1 / quantized.TOP.get(kind, 1),
            book=jnp.asarray(quantized.CODE_BOOK) if kind == quantized.NF4 else None,
            implementation=implementation,
        )
    return y.reshape(*kept, *shape[contracted:])


def reader_of(mesh: Mesh, rows: tuple[str, ...]) -> attention.TokenReader | None:
    """Returns the kernel that reads caches on these devices, whose rows are sharded over axes: on GPUs."""
    return attention.TokenReader(mesh, rows) if mesh_lib.platform(mesh) == "gpu" else None


def kernels_of(mesh: Mesh) -> str | None:
    """Returns the implementation of kernels on these devices: Pallas on one GPU, or on several along `model` alone."""
    is_alone = mesh_lib.size(mesh, mesh_lib.COMPILER) == mesh.size
    return "pallas" if is_alone and mesh_lib.platform(mesh) == "gpu" else None
