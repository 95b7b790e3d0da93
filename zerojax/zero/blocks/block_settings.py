"""Says which modules of a model are blocks, and what a backward pass keeps of them. This module holds these settings, and checks them."""

import dataclasses
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from zerojax import errors, tree
from zerojax.errors import UserError
from zerojax.zero.blocks import hooks as hooks_lib
from zerojax.zero.blocks import remat
from zerojax.zero.weights import placement


@dataclasses.dataclass(frozen=True)
class How:
    """How a loss is run: where weights are gathered, which residuals are kept, and what hooks add to its modules.

    The regexes and `remat` are those of `where_used.where_used`. Values that are unknown or contradict each other raise a UserError.
    """

    blocks: str = ""
    heads: str = ""
    remat: str = "dots"
    recompute: str = ""
    offload: str = ""
    hooks: hooks_lib.Hooks = ()

    def __post_init__(self) -> None:
        errors.one_of("remat", self.remat, remat.REMAT)
        examples = {
            "blocks": "layer_\\d+",
            "heads": "head",
            **dict.fromkeys(("recompute", "offload"), "layer_\\d+/mlp/up"),
        }
        for name, example in examples.items():
            check_regex(name, getattr(self, name), example, self.blocks)
        if self.recompute and self.remat != "dots":
            raise UserError(
                f"recompute: {self.recompute!r} names matmuls that remat='dots' does not keep, and remat is {self.remat!r}; "
                "set recompute to '', or remat to 'dots'"
            )
        if self.offload and self.remat == "none":
            raise UserError(
                f"offload: {self.offload!r} names modules whose results are kept in host memory, and remat='none' keeps all on the device; "
                "set offload to '', or remat to 'dots', 'attention' or 'full'"
            )


def check_regex(name: str, pattern: object, example: str, blocks: str) -> None:
    """Raises a UserError if an argument is no regex over module paths, or needs `blocks` and there are none."""
    errors.regex(name, pattern, f"pass one over module paths, such as '{example}', or '' for none")
    if pattern and not blocks:
        raise UserError(f"{name}: {pattern!r} needs `blocks`, and it is empty; name the model's repeated modules there")


def unmatched(how: How, *, is_head: bool) -> UserError:
    """Returns the error for a loss that calls no module that `blocks`, or `heads`, matches."""
    if is_head:
        return UserError(
            f"heads: {how.heads!r} matches no module of Linen or NNX called in the loss outside of blocks; it is a regex over full "
            "module paths such as 'head', or '' for none"
        )
    return UserError(
        f"blocks: {how.blocks!r} matches no module of Linen or NNX called in the loss; it is a regex over module paths such as "
        "'layer_0' or 'layers/3', or '' to gather leaf by leaf; modules of NNX are found where params are their variables "
        "(nnx.State), not plain arrays, and not in stacks of nnx.scan or nnx.vmap (hold their layers in an nnx.List) or inside nnx.remat "
        "(remat= does what it does)"
    )


def largest_block(placements: Mapping[str, placement.Placement], blocks: str) -> int:
    """Returns the number of weights in the largest block that a regex matches; 0 if there are none."""
    sizes: dict[str, int] = {}
    for path, weight in placements.items():
        block = tree.block_of(path, re.compile(blocks))
        if block is not None:
            sizes[block] = sizes.get(block, 0) + math.prod(weight.shape or ())
    return max(sizes.values(), default=0)


def missed_blocks(placements: Mapping[str, placement.Placement], blocks: str) -> tuple[str, ...]:
    """Returns the modules that a regex does not match, though one that it matches differs in the digits of its name alone.

    Modules have the same weights if they have leaves of the same names and shapes.

    >>> missed_blocks(placements, r"block_\\d")
    ('block_10', 'block_11')
    """
    pattern = re.compile(blocks)
    leaves_of: dict[str, set[tuple[str, Any]]] = {}
    matched: set[str] = set()
    for path, weight in placements.items():
        below = tree.below_params(path)
        block = tree.block_of(path, pattern)
        if block is not None:
            matched.add(block)
        parts = below.split("/")
        for count in range(1, len(parts)):
            if block is None or len(block.split("/")) == count:
                leaves_of.setdefault("/".join(parts[:count]), set()).add(("/".join(parts[count:]), weight.shape))
    kinds = {(_without_digits(name), frozenset(leaves_of[name])) for name in matched & leaves_of.keys()}
    missed = [
        name for name in leaves_of.keys() - matched if (_without_digits(name), frozenset(leaves_of[name])) in kinds
    ]
    return tuple(sorted(missed, key=lambda name: (len(name), name)))


def warn_of_missed(placements: Mapping[str, placement.Placement], blocks: str) -> None:
    """Warns the caller's caller of modules that `blocks` seems to mean and misses."""
    missed = missed_blocks(placements, blocks) if blocks else ()
    if missed:
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        warnings.warn(
            f"blocks: {blocks!r} does not match {', '.join(missed[:3])}{more}, though it matches modules of the same weights; theirs "
            "are gathered for the whole loss. The regex must match a module's full path, all digits included: end it with \\d+",
            stacklevel=3,
        )


def _without_digits(path: str) -> str:
    return re.sub(r"\d+", "0", path)
