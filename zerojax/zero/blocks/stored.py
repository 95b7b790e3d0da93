"""Says how a loss takes stored weights. This module holds what the ways to gather them share."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from zerojax.zero.blocks import block_settings, marks, remat


@dataclasses.dataclass(frozen=True)
class Stored:
    """How stored weights are gathered.

    Attributes:
      gather_leaf: f(path, stored weight or a layer of it) -> gathered.
      how: which modules are blocks, and what a backward pass keeps.
      moves: whether any weight is gathered: its stored and its used sharding differ.
      run: see `intercept.Interceptor`; its `restart` is called where the loss must be traced again.
      is_weight: returns whether a node of the params is one stored weight, if stored weights are not arrays.
      shard_leaf: f(path, stored weight) -> (a shard, the axes over which a sum of shards adds up), or None if it has none that could be
        summed alone. The sum's gradient is the weight's.
      has_stacks: whether to look for scans over stacks of layers, each step of which gathers its own layer.
    """

    gather_leaf: Callable[[str, Any], Any]
    how: block_settings.Blocks
    moves: bool
    run: Any = None
    is_weight: Callable[[Any], bool] = lambda leaf: False
    has_stacks: bool = False
    shard_leaf: Callable[[str, Any], tuple[Any, tuple[str, ...]] | None] = lambda path, weight: None

    @functools.cached_property
    def policy(self) -> remat.Policy:
        """Returns the policy of a `jax.checkpoint`; None for no rematerialisation."""
        policy = remat.policy(self.how.remat, in_place=not (self.how.recompute or self.how.offload), moves=self.moves)
        return marks.Offloads(policy) if policy and self.how.offload else policy


def pattern(how: block_settings.Blocks) -> re.Pattern:
    """Returns the regex of blocks and heads."""
    return re.compile(f"(?:{how.pattern})|(?:{how.heads})" if how.heads else how.pattern)


def is_head(how: block_settings.Blocks, path: str | None) -> bool:
    """Returns whether a module is a head."""
    return path is not None and bool(how.heads) and re.fullmatch(how.heads, path) is not None
