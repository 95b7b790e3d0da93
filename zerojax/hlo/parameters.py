"""Maps the parameters of a compiled program to the leaves of the step's arguments. This module matches their names.

A program's parameters are the flattened arguments in order, without those that the step never reads. JAX names each after its leaf:
"state.params['layer_0']['kernel']".
"""

import dataclasses
import re
from typing import Any

import jax

from zerojax import tree
from zerojax.hlo import syntax

_KEY = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\w+)\]|([^.\[\]]+)")


@dataclasses.dataclass(frozen=True)
class ArgumentLeaf:
    """The leaf that a parameter holds."""

    path: str  # the argument's name in the step, then the leaf's path in it ("state/params/layer_0/kernel")
    shape: tuple[int, ...]  # the global shape
    part: tuple[int, ...]  # the shape of a device's shard


def leaves(lowered: jax.stages.Lowered | Any, module: syntax.Module) -> dict[int, ArgumentLeaf]:
    """Returns the leaves by the number of their parameter."""
    flat = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    # A path begins with the index in (args, kwargs) and the argument's own key.
    arguments = [(tree.path_string(path[2:]), tuple(leaf.shape)) for path, leaf in flat]
    parameters = module.entry.parameters
    found, first = {}, 0
    for number in sorted(parameters):
        name, shard = path_of(parameters[number].op_name), parameters[number].arrays[0].dims
        match = next((n for n in range(first, len(arguments)) if _is_named(name, arguments[n][0])), None)
        match = number if len(arguments) == len(parameters) else match
        path, shape = arguments[match] if match is not None else ("", shard)
        shape = shape if len(shape) == len(shard) else shard
        found[number] = ArgumentLeaf(name or path or f"argument {number}", shape, shard)
        first = first if match is None else match + 1
    return found


def path_of(op_name: str) -> str:
    """Returns the path of an argument's leaf from the name that JAX gives it.

    >>> path_of("state.opt_state[0].mu['layer_0']['kernel']")
    'state/opt_state/0/mu/layer_0/kernel'
    """
    return "/".join(next(filter(None, parts)) for parts in _KEY.findall(op_name) if any(parts))


def _is_named(name: str, path: str) -> bool:
    return name == path or name.endswith(f"/{path}") or (not path and "/" not in name)
