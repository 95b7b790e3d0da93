"""A model's weights with adapters beside them. This module describes them and reads them into their shardings.

Frozen weights keep the dtype that they have in the folder, or get another. A kernel that is stored quantized is read and quantized on the
device, a few kernels at a time, so that the model never exists in 16 bits.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.interop import folder as folder_lib
from zerojax.interop import layout, mxfp4, peft
from zerojax.lora import adapters, targets
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import quantized
from zerojax.tree import PyTree
from zerojax.zero.host import memory_kind

MOST_BYTES = 2**30  # of kernels that are read at a time, on all devices, to be quantized


def dtypes(folder: folder_lib.Folder) -> dict[str, Any]:
    """Returns the dtype of each weight as it is stored, by path; float64 is read as float32."""
    found = {}
    for tensor in layout.tensors(folder.family, folder.model):
        entry = folder.entries.get(tensor.members[0].name)
        dtype = folder.dtype if entry is None else folder_lib.stored_dtype(entry)
        found[tensor.path] = np.dtype(np.float32) if dtype == np.float64 else dtype
    return found


def abstract(
    family: family_lib.Family,
    model: ModelConfig,
    chosen: targets.Targets,
    frozen: Callable[[str], Any],
    trained: Any = jnp.float32,
) -> dict[str, Any]:
    """Returns the weights of a model with adapters as ShapeDtypeStructs.

    Args:
      family, model: the model.
      chosen: the adapters.
      frozen: f(path) -> the dtype of a frozen weight.
      trained: the dtype of adapters and of weights that are trained in full.
    """
    coded = chosen.coded
    found: dict[str, Any] = {}
    for path, leaf in tree.flatten(family_lib.abstract_params(family.parts, model)):
        if path in coded:
            parts = adapters.abstract_stack(leaf.shape, chosen.lora.quantize, *coded[path])
            found |= {f"{path}/{name}": part for name, part in parts.items()}
        else:
            found[path] = jax.ShapeDtypeStruct(leaf.shape, trained if path in chosen.saved else frozen(path))
    for path, shape in adapters.shapes(chosen).items():
        found[path] = jax.ShapeDtypeStruct(shape, trained)
    return tree.nested(found)


def read(
    abstract: PyTree,
    folder: folder_lib.Folder,
    chosen: targets.Targets,
    *,
    adapter: peft.Adapter | None = None,
    key: jax.Array | None = None,
) -> dict[str, Any]:
    """Reads weights with adapters into their shardings. All processes must call it, and each reads its own shards.

    Args:
      abstract: `abstract` with shardings; parts of it will do, with `optax.MaskedNode()` or nothing in place of the rest.
      folder: the model's.
      chosen: the adapters.
      adapter: the folder that adapters and weights trained in full are read from; None: adapters are drawn.
      key: for adapters that are drawn.
    """
    wanted = dict(tree.flatten(abstract))
    found: dict[str, Any] = {} if adapter is None else peft.read_leaves(adapter, wanted)
    tensors = {tensor.path: tensor for tensor in layout.tensors(folder.family, folder.model)}
    plain = {path: like for path, like in wanted.items() if path in tensors and path not in found}
    found |= folder_lib.read_leaves(folder, tensors, plain)

    stored = dtypes(folder)

    def read_kernels(kernels: Mapping[str, Any]) -> dict[str, jax.Array]:
        likes = {path: jax.ShapeDtypeStruct(k.shape, stored[path], sharding=k.sharding) for path, k in kernels.items()}
        return folder_lib.read_leaves(folder, tensors, likes)

    if chosen.lora.quantize == quantized.FP8_BLOCK:
        paths = [f"{path}/{name}" for path in chosen.coded for name in quantized.parts_of(quantized.FP8_BLOCK)]
        likes = {path: wanted[path] for path in paths if hasattr(wanted.get(path), "sharding")}
        found |= folder_lib.read_blocks(folder, tensors, likes)
    packed = [path for path in chosen.coded if isinstance(folder.entries.get(tensors[path].name), mxfp4.PackedEntry)]
    for path in packed if chosen.lora.quantize == quantized.MXFP4 else ():
        parts = {name: wanted.get(f"{path}/{name}") for name in quantized.parts_of(quantized.MXFP4)}
        parts = {name: like for name, like in parts.items() if hasattr(like, "sharding")}
        as_stored = folder_lib.read_packed(folder, tensors[path], parts)
        found |= {f"{path}/{name}": leaf for name, leaf in as_stored.items()}
    others = {path: like for path, like in wanted.items() if path not in found}
    found |= quantize(others, chosen, read_kernels)
    if adapter is None:
        found |= draw(wanted, chosen, key)
        found |= magnitudes(wanted, chosen, found, lambda likes: read(likes, folder, chosen))
    return tree.map_with_path(lambda path, _: found[path], abstract)


def quantize(
    wanted: Mapping[str, Any], chosen: targets.Targets, make: Callable[[Mapping[str, Any]], Mapping[str, jax.Array]]
) -> dict[str, jax.Array]:
    """Returns the quantized kernels among `wanted`, by path of their parts.

    Args:
      wanted: abstract leaves with shardings, by path.
      chosen: the adapters.
      make: f(abstract kernels by path) -> the kernels, on the device.
    """
    kind = chosen.lora.quantize
    dims, found_at = chosen.coded, {chosen.kernels(path)[0]: chosen.linear[path] for path in chosen.quantized}
    kernels = {path: one for path, one in found_at.items() if f"{path}/{kind}" in wanted}
    likes = {
        path: _kernel_like((*one.stack, *one.shape), wanted[f"{path}/{kind}"], kind) for path, one in kernels.items()
    }
    found: dict[str, jax.Array] = {}
    for run in tree.runs(likes, lambda path: tree.nbytes(likes[path]), MOST_BYTES):
        for path, kernel in make({path: likes[path] for path in run}).items():
            parts = {name: wanted[f"{path}/{name}"] for name in quantized.parts_of(kind)}
            stored = tuple((part.shape, part.sharding) for part in parts.values())
            made = _quantizer(kind, stored, *dims[path])(kernel)
            found |= {f"{path}/{name}": jax.device_put(made[name], part.sharding) for name, part in parts.items()}
        jax.block_until_ready(list(found.values()))
    return found


def draw(wanted: Mapping[str, Any], chosen: targets.Targets, key: jax.Array | None) -> dict[str, jax.Array]:
    """Returns fresh weights of the adapters among the abstract leaves `wanted`, with their shardings, by path."""
    found = {}
    for module in chosen.adapted:
        for end, shape in chosen.shapes(module).items():
            path = f"{chosen.adapter(module)}/{end}"
            if path in wanted and end != targets.MAGNITUDE:
                like = wanted[path]
                how = adapters.beginning(end, is_embedding=chosen.linear[module].is_embedding)
                make = _drawer(shape, like.shape, like.dtype, like.sharding, how)
                found[path] = jax.device_put(make(key, adapters.number_of(path)), like.sharding)
    return found


def magnitudes(
    wanted: Mapping[str, Any], chosen: targets.Targets, found: Mapping[str, jax.Array], make: Callable[[PyTree], PyTree]
) -> dict[str, jax.Array]:
    """Returns the first magnitudes of DoRA among the abstract leaves `wanted`, by path: the norms of the kernels' columns.

    Args:
      wanted: abstract leaves with shardings, by path.
      chosen: the adapters.
      found: kernels that are there, as they are stored, by path.
      make: f(abstract leaves) -> the leaves, for others, of one module at a time.
    """
    made = {}
    for module in chosen.adapted:
        path = f"{chosen.adapter(module)}/{targets.MAGNITUDE}"
        if path in wanted:
            like, one, (kernel,) = wanted[path], chosen.linear[module], chosen.kernels(module)
            kind = chosen.lora.quantize if kernel in chosen.coded else ""
            shape = chosen.shapes(module)[targets.MAGNITUDE]
            own = _Norms((*one.stack, *one.shape), kind, len(one.stack), one.inputs, shape)
            stored = {"": own.likes} if not kind else own.likes
            missing = {
                f"{kernel}/{name}".rstrip("/"): _over_all(part, like.sharding.mesh) for name, part in stored.items()
            }
            missing = {} if missing.keys() <= found.keys() else missing
            leaves = dict(tree.flatten(make(tree.nested(missing)))) if missing else found
            parts = {name: leaves[f"{kernel}/{name}"] for name in stored} if kind else leaves[kernel]
            made[path] = jax.device_put(_norms(own, like.shape, like.dtype, like.sharding)(parts), like.sharding)
    return made


def _over_all(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns an abstract leaf that all devices share, along its first dim that they divide."""
    dim = next((dim for dim, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
    spec = P() if dim is None else P(*[None] * dim, mesh.axis_names)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


class _Norms(NamedTuple):
    """Of which kernel: its shape, how it is quantized ("": not), the dims of its stack and its inputs, and the shape of its magnitude."""

    kernel: tuple[int, ...]
    kind: str
    dims: int
    inputs: int
    shape: tuple[int, ...]

    @property
    def likes(self) -> Any:
        """Returns the kernel as it is stored, abstract."""
        plain = jax.ShapeDtypeStruct(self.kernel, jnp.float32)
        return adapters.abstract_stack(self.kernel, self.kind, self.dims, self.inputs) if self.kind else plain


@functools.lru_cache
def _norms(own: _Norms, padded: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding) -> Callable[..., jax.Array]:
    def run(parts: Any) -> jax.Array:
        # Without what the partition pads
        plain = jax.tree.map(lambda leaf, like: leaf[tuple(map(slice, like.shape))], parts, own.likes)
        return _fit(adapters.magnitude(plain, own.shape, own.dims).astype(dtype), padded)

    return jax.jit(run, out_shardings=memory_kind.on_device(sharding))


def _kernel_like(shape: tuple[int, ...], codes: Any, kind: str) -> jax.ShapeDtypeStruct:
    """Returns a quantized kernel as it is read: sharded as its codes, or replicated where these are padded."""
    is_padded = quantized.shape_of({kind: codes}) != shape
    spec = P() if is_padded else codes.sharding.spec
    if kind == quantized.MXFP4:  # whose codes have other dims, but for the first
        spec = P() if codes.shape[0] != shape[0] else P(*codes.sharding.spec[:1])
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(codes.sharding.mesh, spec))


@functools.lru_cache
def _quantizer(
    kind: str, likes: tuple[tuple[tuple[int, ...], Any], ...], dims: int, inputs: int
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    def run(kernel: jax.Array) -> dict[str, jax.Array]:
        parts = adapters.quantize_stack(kernel, kind, dims, inputs)
        return {name: _fit(parts[name], shape) for name, (shape, _) in zip(names, likes)}

    names = quantized.parts_of(kind)
    return jax.jit(
        run, out_shardings={name: memory_kind.on_device(sharding) for name, (_, sharding) in zip(names, likes)}
    )


@functools.lru_cache
def _drawer(
    shape: tuple[int, ...], padded: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding, how: str
) -> Callable[..., jax.Array]:
    def run(key: jax.Array, number: int | jax.Array) -> jax.Array:
        return _fit(adapters.draw(key, number, shape, how).astype(dtype), padded)

    return jax.jit(run, out_shardings=memory_kind.on_device(sharding))


def _fit(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a leaf with zeros where the partition pads it."""
    return jnp.pad(leaf, [(0, want - have) for want, have in zip(shape, leaf.shape)])
