"""Finds the leaves of a step's arguments among the parameters of its compiled program. This module reads names.

A program's parameters are the flattened arguments in order, less those that the step never reads, and JAX names each after its leaf:
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
    """The leaf that a parameter holds.

    Attributes:
      path: the argument's name in the step, then the leaf's path in it ("state/params/layer_0/kernel").
      shape: the array's.
      part: that of a device's part.
    """

    path: str
    shape: tuple[int, ...]
    part: tuple[int, ...]


def leaves(lowered: jax.stages.Lowered | Any, module: syntax.Module) -> dict[int, ArgumentLeaf]:
    """Returns the leaves by the number of their parameter."""
    flat = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    # A path begins with which of (args, kwargs), and which argument of these.
    waiting = [(tree.path_string(path[2:]), tuple(leaf.shape)) for path, leaf in flat]
    parameters = module.entry.parameters
    found, place = {}, 0
    for number in sorted(parameters):
        name, part = path_of(parameters[number].op_name), parameters[number].arrays[0].dims
        known = next((n for n in range(place, len(waiting)) if _is_named(name, waiting[n][0])), None)
        known = number if len(waiting) == len(parameters) else known
        path, shape = waiting[known] if known is not None else ("", part)
        shape = shape if len(shape) == len(part) else part
        found[number] = ArgumentLeaf(name or path or f"argument {number}", shape, part)
        place = place if known is None else known + 1
    return found


def path_of(op_name: str) -> str:
    """Returns the path that JAX's name of an argument's leaf means.

    >>> path_of("state.opt_state[0].mu['layer_0']['kernel']")
    'state/opt_state/0/mu/layer_0/kernel'
    """
    return "/".join(next(filter(None, parts)) for parts in _KEY.findall(op_name) if any(parts))


def _is_named(name: str, path: str) -> bool:
    return name == path or name.endswith(f"/{path}") or (not path and "/" not in name)
