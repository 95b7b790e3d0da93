"""Lifts blocks by Linen's own transformations. This module runs those that are not plain: they change variables, read arrays or modules
from elsewhere, or are layers of a stack, which `nn.scan` or `nn.vmap` runs.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.errors import UserError
from zerojax.tree import PyTree
from zerojax.zero.blocks import remat
from zerojax.zero.weights.placement import Placement

# {path in the module: (path in the params, stored weight), or None if it is unknown}
Known = Mapping[str, tuple[str, Any] | None]


class StackFound(Exception):
    """A block with this path is a layer of a stack, as of `nn.scan`. The loss is to be traced again, by an `Interceptor` that knows it."""

    def __init__(self, path: str):
        super().__init__(path)
        self.path = path


def run(
    module: nn.Module,
    method: str,
    args: tuple,
    kwargs: dict,
    known: Known,
    gather_leaf: Callable[[str, Any], Any],
    inputs: Callable[[Sequence[Any]], Sequence[Any]],
    policy: remat.Policy,
    *,
    is_leaf: tree.IsLeaf,
    is_made: bool,
) -> Any:
    """Runs a block that gathers its known weights inside.

    Args:
      inputs: f(arrays of the arguments) -> those that the block is called with.
      is_made: whether the module's weights are arrays that were made from stored ones, which take their place here.
    """
    called, arrays, result = _of_arrays(method, args, kwargs, inputs)

    def gather_block(variables: PyTree) -> PyTree:
        gather = lambda node: gather_leaf(node.path, node.weight) if isinstance(node, _Own) else node  # noqa: E731
        return jax.tree.map(gather, variables, is_leaf=lambda node: isinstance(node, _Own))

    def as_own(leaf: str, value: object) -> PyTree:
        path, stored = known[leaf]  # type: ignore[misc]
        return _Own(path, stored if is_made else value)

    block = nn.map_variables(called, "params", trans_in_fn=gather_block)
    if policy is not None:
        block = nn.remat(block, policy=policy)
    found = {leaf for leaf, weight in known.items() if weight}
    block = nn.map_variables(block, "params", trans_in_fn=_replacing(module, found, as_own, is_leaf))
    return result.give(block(module, *arrays))


def is_layer(params: PyTree, stacks: Collection[tuple[int, ...] | None], *, is_leaf: tree.IsLeaf) -> bool:
    """Returns whether a block with unknown weights is a layer of a stack: each weight lacks the first dim of the one at its path."""
    leaves = jax.tree.leaves(params, is_leaf=is_leaf)
    return all(stack and stack[1:] == leaf.shape for stack, leaf in zip(stacks, leaves))


def of_layer(path: str, stack: Placement) -> Placement:
    """Returns the placement of one layer of a stack of `nn.scan` or `nn.vmap`, whose first dim counts layers."""
    assert stack.shape is not None
    if any(sharding.spec and sharding.spec[0] for sharding in (stack.stored, stack.grad, stack.update)):
        raise sharded_by_layers(path, stack.shape)
    assert not any(stack.padding[:1])  # a padded dim is sharded
    shardings = {
        name: NamedSharding(
            getattr(stack, name).mesh, P(*getattr(stack, name).spec[1:]), memory_kind=getattr(stack, name).memory_kind
        )
        for name in ("stored", "used", "grad", "opt_state", "update")
    }
    return dataclasses.replace(stack, padding=stack.padding[1:], shape=stack.shape[1:], **shardings)  # type: ignore[arg-type]


def sharded_by_layers(path: str, shape: Sequence[int]) -> UserError:
    """Returns the error for a stack of layers no layer of which can be gathered alone."""
    return UserError(
        f"blocks: {path} of shape {tuple(shape)} is sharded on its first dim, which counts the layers of a scan or vmap, so no layer can "
        f'be gathered alone, and each device would hold all {shape[0]} at a time; pass overrides=[("{stack_of(path)}", PartitionSpec(None, '
        '"data"))] to shard_train_state, which is for all leaves of the stack'
    )


def stack_of(path: str) -> str:
    """Returns a regex that matches the path of each leaf of a stack.

    >>> stack_of("params/decoder/layers/mlp/kernel")
    'decoder/layers/'
    """
    parts = tree.below_params(path).split("/")
    names = (end for end, name in enumerate(parts[:-1], 1) if re.search("layer|block|stack|^h$", name.lower()))
    return "/".join(parts[: next(names, 1)]) + "/"


class Stacks:
    """The stacks that `nn.scan` or `nn.vmap` cuts. A model runs with them as they are stored, so that each layer gathers its own slice.

    Args:
      blocks: their paths, as `StackFound` told.
    """

    def __init__(self, blocks: Collection[str]):
        self._blocks = re.compile("|".join(map(re.escape, blocks)))
        self._path_of: dict[str, str] = {}  # the path in the params of a weight in a stack, by its path in the model
        self._runs = False  # whether a model runs with its stacks

    def check(self, params: PyTree, shapes: Mapping[str, tuple[int, ...]], *, is_leaf: tree.IsLeaf) -> None:
        """Raises a UserError for a stack that is sharded by its layers, whose number `nn.vmap` compares before it runs one.

        Args:
          params: stored weights.
          shapes: of the gathered ones, by path.
        """
        for path, leaf in tree.flatten(params, is_leaf=is_leaf):
            if tree.block_of(path, self._blocks) and leaf.stored.shape[0] != shapes[path][0]:
                raise sharded_by_layers(path, shapes[path])

    def begin_with(self, module: nn.Module, method: str) -> bool:
        """Returns whether a call is that of a model whose stacks are not as stored yet."""
        return not self._runs and method != "setup" and hasattr(type(module), method)

    def run(
        self, module: nn.Module, method: str, args: tuple, kwargs: dict, known: Known, *, is_leaf: tree.IsLeaf
    ) -> Any:
        """Runs a model with its stacks as they are stored."""
        path = "/".join(module.path)
        stacks = {leaf: weight for leaf, weight in known.items() if weight and tree.block_of(weight[0], self._blocks)}
        self._path_of |= {f"{path}/{leaf}".lstrip("/"): weight[0] for leaf, weight in stacks.items() if weight}
        called, arrays, result = _of_arrays(method, args, kwargs, lambda values: values)
        as_stored = _replacing(module, stacks, lambda leaf, _: stacks[leaf][1], is_leaf)
        self._runs = True
        try:
            return result.give(nn.map_variables(called, "params", trans_in_fn=as_stored)(module, *arrays))
        finally:
            self._runs = False

    def layer(self, path: str, value: object, is_leaf: tree.IsLeaf) -> tuple[str, Any] | None:
        """Returns the path in the params of a weight with this path in the model, and its slice, if it is one of a stack."""
        return (self._path_of[path], value) if is_leaf is not None and is_leaf(value) else None


def by_gathers(gather_leaf: Callable[[str, Any], Any]) -> Callable[..., Any]:
    """Returns an `intercept.Run` of blocks that gather their weights one by one. Its results can be differentiated twice."""

    def run(
        body: Callable[..., Any], weights: Mapping[str, Any], arrays: list[Any], policy: remat.Policy, own: Any = None
    ) -> Any:
        def gathered(stored: Mapping[str, Any], *values: Any) -> Any:
            return body({name: gather_leaf(name, weight) for name, weight in stored.items()}, *values)

        return (gathered if policy is None else jax.checkpoint(gathered, policy=policy))(weights, *arrays)

    return run


def _of_arrays(
    method: str, args: tuple, kwargs: dict, inputs: Callable[[Sequence[Any]], Sequence[Any]]
) -> tuple[Callable[..., list[Any]], list[Any], tree.NonArrays]:
    """Returns a call as a function of a module and arrays, these arrays, and what of its result is none."""
    given, result = tree.NonArrays(), tree.NonArrays()
    arrays = given.take((args, kwargs))

    def called(bound: nn.Module, *values: Any) -> list[Any]:
        inner_args, inner_kwargs = given.give(inputs(values))
        return result.take(getattr(bound, method)(*inner_args, **inner_kwargs))

    return called, arrays, result


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["path"])
@dataclasses.dataclass(frozen=True)
class _Own:
    """A weight of a block, by its path in the params. Modules elsewhere that it reads have weights of the same names."""

    path: str
    weight: Any


def _replacing(
    module: nn.Module, leaves: Collection[str], replace: Callable[[str, Any], PyTree], is_leaf: tree.IsLeaf
) -> Callable[[PyTree], PyTree]:
    """Returns f(variables) -> these with `replace(path in the module, array)` for some of the module's own weights.

    Linen calls it for each module that a lifted one reads, with paths in that one, so own weights are known by their identity.
    """
    own = dict(tree.flatten(module.variables.get("params", {}), is_leaf=is_leaf))

    def replaced(path: str, value: object) -> PyTree:
        leaf = tree.below_params(path)
        return replace(leaf, value) if leaf in leaves and own[leaf] is value else value

    return lambda variables: tree.map_with_path(replaced, variables, is_leaf=is_leaf)
