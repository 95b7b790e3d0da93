"""The tensor-parallel plan of a family. This module holds its form, the rows that families share, and makes overrides of it for one model.

Attention is sharded by heads and the MLP by its width: the matmuls that read the residual stream by columns, those that write it by rows.
The embedding and the output projection are sharded by vocabulary. Between matmuls activations are sharded over tokens (sequence
parallelism). Megatron-LM: arXiv:1909.08053 and arXiv:2205.05198.
"""

import operator
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import specs, tree

Table = tuple[tuple[str, tuple], ...]  # (regex, (mesh axis or None for each dim)), ordered

WEIGHTS: Table = (
    (r"embed/embedding", ("model",)),
    (r"head/kernel", (None, "model")),
    (r"/(q|k|v|gate|up)/(kernel|lora_b)", (None, "model")),
    (r"/(q|k|v|gate|up)/bias", ("model",)),
    (r"/(o|down)/(kernel|lora_a)", ("model",)),
)
HEADS: Table = ((r".*/(q|k|v|q_norm|k_norm)", (None, None, "model")),)  # [batch, tokens, heads, width]
WIDTH: Table = ((r".*/(gate|up)", (None, None, "model")),)  # [batch, tokens, width]
TOKENS = (None, "model")  # [batch, tokens, ...]
ALL_TOKENS = (None, None)


class Parallel(NamedTuple):
    """The plan.

    Attributes:
      weights: regexes over paths of weights, as of `zero.overrides`.
      activations: regexes over full paths of modules, for what these read and return; see `make_train_step`.
    """

    weights: Table = ()
    activations: tuple[tuple, ...] = ()


def overrides(
    table: Table, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, but: Collection[str] = ()
) -> tuple[Table, str]:
    """Returns the rows of a table of weights that hold for a model on a mesh, and a text of the weights that do not divide, "" for none.

    These stay replicated over the axis.

    Args:
      table: of weights.
      shapes: of the weights, by path.
      mesh: the devices; along an axis of size 1 nothing is sharded.
      but: regexes over paths of weights that are not this table's.
    """
    found: list[tuple[str, tuple]] = []
    whole: dict[str, dict[str, None]] = {}
    left = {path: shape for path, shape in shapes.items() if not any(re.search(pattern, path) for pattern in but)}
    for pattern, entries in table:
        own = {path: left.pop(path) for path in [*left] if re.search(pattern, path)}
        ways = [mesh_lib.size(mesh, specs.names(entry)) for entry in entries]
        sharded = [path for path, shape in own.items() if not any(map(operator.mod, shape, ways))]
        if max(ways) > 1 and sharded:
            all_divide = len(sharded) == len(own)
            found += [(pattern, entries)] if all_divide else [(f"{re.escape(path)}$", entries) for path in sharded]
        for path in own.keys() - {*sharded}:
            size = next(size for size, number in zip(own[path], ways) if size % number)
            text = f"{mesh_lib.text(mesh, sorted(specs.axes(P(*entries))))} does not divide {size}"
            whole.setdefault(text, {})[re.sub(r"\d+", "*", tree.below_params(path))] = None
    return tuple(found), "; ".join(
        f"{', '.join(sorted(paths))} stay replicated, because {text}" for text, paths in whole.items()
    )
