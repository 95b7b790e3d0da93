"""Says which modules of a model are blocks, and what a backward pass keeps of them. This module holds these settings, and checks them."""

import dataclasses
import math
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import errors, signatures, tree
from zerojax.errors import UserError
from zerojax.zero.blocks import hooks as hooks_lib
from zerojax.zero.blocks import remat
from zerojax.zero.weights import placement

PROGRAMS = ONE, KINDS = "one", "kinds"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What a step does with a model's modules: which gather their own weights, which residuals are kept, how results are sharded.

    Values that are unknown or contradict each other raise a UserError.

    Attributes:
      pattern: a regex over paths of modules ("layer_\\d+", "layers/\\d+"); each call to a matching module gathers its own weights and is
        rematerialised on its own. Linen's and NNX's are intercepted, those of others are found in a trace of the loss by the paths of
        their weights. A scan over stacked weights below such a path does so in each step, whoever wrote it.
        Empty: leaves are gathered one by one at the top, and `remat` applies to the whole loss function, or, if it scans over stacks, to
        each of their layers.
      heads: a regex over paths of modules that gather their own weights as blocks do, but are not rematerialised, such as an output
        projection that computes its gradients together with the loss. Empty: none.
      remat: the residuals that the backward pass keeps: "none" (all but weights), "dots" (results of matmuls), "attention" (inputs of
        blocks, and results of fused attention, whose backward pass then does not run it again), "full" (inputs of blocks).
      recompute: a regex over paths of modules inside blocks (r"layer_\\d+/mlp/up"), whose matmuls remat="dots" does not keep. Empty: none.
      offload: a regex over paths of modules inside blocks whose results are kept in pinned host memory until the backward pass, and of
        blocks whose inputs are. They take no device memory and are not computed again. Results that the backward pass does not read, such
        as that of the last matmul of a residual branch, are not kept. With reduce_dtype the copies overlap the arithmetic of neighbouring
        blocks. Without it, a loss that differentiates its own gradient cannot be offloaded. Empty: none.
      activations: for tensor parallelism by `overrides`, in `make_train_step` alone: ordered (regex over full paths of Linen modules,
        PartitionSpec) of what these return, over the axis `model`: P(None, "model") shards the tokens of [batch, tokens, ...], and
        P("model", "model") the examples of a device if the axis divides them, else the tokens. With a second spec, that inside of the
        module, its floating positional arguments are gathered once, and its result is scattered: P("model", "model"), P(). A dim that the
        axis does not divide is left to the compiler. A fourth entry, a regex over paths of weights in the module, says that with these
        alone it treats each example on its own and returns a sum over its matmuls' shards: then examples travel along a ring, beside its
        matmuls (`ring_matmuls`). Needs reduce_dtype, examples that the axis divides, and no fp8.
      programs: "one": the step is one compiled program. "kinds", in `make_train_step` alone: a program for each kind of block, which also
        gathers the next block's weights and reduces the gradients of the one before it. It compiles as fast whatever the depth. Needs
        reduce_dtype, and wires that send weights as they are.
      hooks: what the step itself adds to modules while the loss is traced; `make_train_step` fills it in.
    """

    pattern: str = ""
    heads: str = ""
    remat: str = "dots"
    recompute: str = ""
    offload: str = ""
    activations: Sequence[tuple] = ()
    programs: str = ONE
    hooks: hooks_lib.Hooks = ()

    @classmethod
    def of(cls, value: "str | Blocks", **fields: Any) -> "Blocks":
        """Returns blocks from their short form, a regex, or from themselves, with some fields of other values."""
        return signatures.with_fields(value if isinstance(value, Blocks) else cls(value), **fields)

    def __post_init__(self) -> None:
        signatures.check_fields(self)
        errors.one_of("remat", self.remat, remat.REMAT)
        errors.one_of("programs", self.programs, PROGRAMS)
        if self.programs == KINDS and not self.pattern:
            raise UserError(
                "programs: is 'kinds', which are those of `blocks`, and it is empty; pass blocks, or omit it"
            )
        examples = {
            "blocks": "layer_\\d+",
            "heads": "head",
            **dict.fromkeys(("recompute", "offload"), "layer_\\d+/mlp/up"),
        }
        for name, example in examples.items():
            field = "pattern" if name == "blocks" else name
            check_regex(name, getattr(self, field), example, self.pattern)
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


def unmatched(how: Blocks, *, is_head: bool, paths: Sequence[str] = ()) -> UserError:
    """Returns the error for a loss that calls no module that `blocks`, or `heads`, matches; `paths` are those of its weights."""
    modules = {part for path in paths for part in map(str, pathlib.PurePosixPath(tree.below_params(path)).parents)} - {
        "."
    }
    if is_head:
        return UserError(
            f"heads: {how.heads!r} matches no module called in the loss outside of blocks; it is a regex over full module paths"
            f"{tree.such_as(how.heads, modules)}, or '' for none"
        )
    if any(tree.block_of(path, re.compile(how.pattern)) for path in paths):
        return UserError(
            f"blocks: {how.pattern!r} matches paths of weights, and no call of their modules is found in the loss. It calls no module of "
            "Linen or NNX with them, and its trace is not cut at other modules where recompute, offload, activations or fp8 are set, "
            "where params have NNX variables other than nnx.Param, or where it does not read these weights; omit what is set, or "
            "blocks='' gathers leaf by leaf"
        )
    repeated = {path for path in modules if path[-1].isdigit()} or modules
    return UserError(
        f"blocks: {how.pattern!r} matches no module called in the loss, nor the path of a weight; it is a regex over full module paths"
        f"{tree.such_as(how.pattern, repeated)}, or '' to gather leaf by leaf"
    )


def blocks_of(paths: Sequence[str], pattern: re.Pattern) -> dict[str, str]:
    """Returns the block that a regex matches around each of these weights, by their paths, of those in one.

    A list of modules is no block, since nothing calls it, but each of its elements is.

    >>> blocks_of(["layers/0/kernel", "layers/1/kernel", "head/kernel"], re.compile("layers"))
    {'layers/0/kernel': 'layers/0', 'layers/1/kernel': 'layers/1'}
    """
    found = {path: block for path in paths if (block := tree.block_of(path, pattern)) is not None}
    waiting = {*found.values()}
    while waiting:
        block = waiting.pop()
        below = {path: _below(path, block) for path, own in found.items() if own == block}
        names = {parts[0] for parts in below.values()}
        if len(names) > 1 and all(len(parts) > 1 and parts[0].isdigit() for parts in below.values()):
            found |= {path: f"{block}/{parts[0]}" for path, parts in below.items()}
            waiting |= {f"{block}/{name}" for name in names}
    return found


def _below(path: str, block: str) -> list[str]:
    return tree.below_params(path).removeprefix(f"{block}/").split("/")


def lists(paths: Sequence[str], pattern: re.Pattern) -> set[str]:
    """Returns the lists of modules that a regex matches; see `blocks_of`."""
    called = {block for path in paths if (block := tree.block_of(path, pattern)) is not None}
    return called - {*blocks_of(paths, pattern).values()}


def largest_block(placements: Mapping[str, placement.Placement], blocks: str) -> int:
    """Returns the number of weights in the largest block that a regex matches; 0 if there are none."""
    sizes: dict[str, int] = {}
    for path, block in blocks_of([*placements], re.compile(blocks)).items():
        sizes[block] = sizes.get(block, 0) + math.prod(placements[path].shape or ())
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
