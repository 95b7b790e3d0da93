"""Adapters of which each request has one or none. This module puts them beside the kernels, and runs each row's own.

The adapters of a linear module are beside each other in two matrices, A float32[inputs, ranks] and B float32[ranks, outputs], and `owner`
int32[ranks] says to which adapter a rank belongs. A row's own ranks are kept and the others set to 0:

    y = W x + B (A x where owner is the row's adapter, else 0)

So one program of two small matmuls serves rows of all adapters, and rows of none.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, tree
from zerojax.errors import UserError
from zerojax.models import layers
from zerojax.ops import quantized
from zerojax.tree import PyTree

A, B, OWNER = "adapters_a", "adapters_b", "adapters_owner"
NONE = 0  # the number of no adapter

# {path of a module: (A float32[inputs, r], B float32[r, outputs])}; B holds the adapter's scale
LowRank = Mapping[str, tuple[np.ndarray, np.ndarray]]


def added(params: PyTree, given: Mapping[str, LowRank], known: set[str], mesh: Mesh) -> PyTree:
    """Returns weights with adapters beside the kernels, replicated. The first of `given` has number 1.

    Args:
      params: the weights.
      given: the adapters by their names.
      known: the paths of the modules that can have one.
      mesh: the devices.

    Raises:
      UserError: an adapter is of a module that is not there, or of another shape.
    """
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=quantized.is_quantized)[0]
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in nodes}
    same = NamedSharding(mesh, P())
    for path in dict.fromkeys(path for adapter in given.values() for path in adapter):
        parts = []
        for number, (name, adapter) in enumerate(given.items(), NONE + 1):
            if path not in adapter:
                continue
            a, b = (np.asarray(part, np.float32) for part in adapter[path])
            kernel = found.get(f"{path}/kernel")
            if path not in known or kernel is None:
                raise UserError(
                    f"adapters: {errors.shown(name, 60)} adapts {path}, which is no linear module that the engine calls; "
                    "merge it (zerojax merge)"
                )
            shape = quantized.shape_of(kernel) if quantized.is_quantized(kernel) else kernel.shape
            if a.shape[-1:] != b.shape[:1] or a.shape[0] * b.shape[-1] != np.prod(shape):
                raise UserError(
                    f"adapters: {errors.shown(name, 60)} has {a.shape} and {b.shape} for {path}, whose kernel is {tuple(shape)}; choose "
                    "the model that it was trained with"
                )
            parts.append((a, b, np.full(a.shape[1], number, np.int32)))
        every_a, every_b, owners = zip(*parts)
        joined = {A: np.concatenate(every_a, axis=1), B: np.concatenate(every_b), OWNER: np.concatenate(owners)}
        found |= {f"{path}/{name}": jax.device_put(part, same) for name, part in joined.items()}
    return tree.nested(found)


@contextlib.contextmanager
def applied(number_R: jax.Array) -> Iterator[None]:
    """Runs adapters in all modules that are called inside and have some.

    Args:
      number_R: int32[rows], each row's adapter; `NONE` for none. Rows are the first dim of what modules are called with.
    """

    def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module, y = context.module, call(*args, **kwargs)
        is_linear = isinstance(module, layers.Linear | layers.Head) and context.method_name == "__call__"
        if not is_linear or module.scope is None or not module.scope.has_variable("params", A):
            return y
        a, b, owner = (module.scope.get_variable("params", name) for name in (A, B, OWNER))
        x = args[0]
        kept = x.shape[: x.ndim - getattr(module, "contracted", 1)]
        assert kept[0] == number_R.shape[0], f"{module.path}: {x.shape}"
        with jax.named_scope("adapters"):
            low = jnp.dot(x.reshape(*kept, -1), a, preferred_element_type=jnp.float32)
            is_own = (owner == number_R[:, None]).reshape(kept[0], *[1] * (len(kept) - 1), -1)
            low = jnp.where(is_own, low, 0)
            return (y + jnp.dot(low, b).reshape(y.shape)).astype(y.dtype)

    with nn.intercept_methods(intercept):
        yield
