"""Holds what a train step is told, as values, and reads their short forms. This module says what each needs of a step."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax.typing import DTypeLike

from zerojax import errors, precision, signatures
from zerojax.errors import UserError
from zerojax.zero.blocks import block_settings
from zerojax.zero.fp8 import modules as fp8_modules
from zerojax.zero.gradients import accumulate
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.weights import placement
from zerojax.zero.wires import columns, experts, packed


@dataclasses.dataclass(frozen=True)
class Sums:
    """How gradients are added up, over devices and over passes.

    Attributes:
      reduce_dtype: the dtype in which gradients are summed over devices. The loss function then sees one device's examples, and its
        means are averaged, as in DDP, FSDP and DeepSpeed; `zerojax.compare_sums` tells whether a loss stays exact. Devices draw
        different random numbers. None: it sees the global batch, and the compiler sums in the matmuls' dtype.
      accum_dtype: the dtype in which the gradients of several passes add up: float32 (None), or bfloat16, which takes half the memory. Each
        sum is then rounded up or down at random, so that its expected value is exact.
      grad_accum: forward and backward passes a step; above 1 the batch's leaves are [grad_accum, examples, ...].
    """

    reduce_dtype: DTypeLike | None = None
    accum_dtype: DTypeLike | None = None
    grad_accum: int = 1

    def __post_init__(self) -> None:
        """Raises UserError for a value of another type."""
        signatures.check_fields(self)
        object.__setattr__(self, "reduce_dtype", precision.floating("reduce_dtype", self.reduce_dtype))

    @classmethod
    def of(cls, value: "DTypeLike | Sums | None") -> "Sums":
        """Returns sums from their short form, a reduce_dtype, or from themselves."""
        return value if isinstance(value, Sums) else cls(value)

    @property
    def in_16_bits(self) -> bool:
        """Returns whether the gradients of several passes add up in bf16; warns where there is one pass."""
        return accumulate.checked_dtype(self.accum_dtype, self.grad_accum)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How a batch is sharded and cast.

    Attributes:
      batch_specs: specs of batch leaves whose first dim does not count examples: ordered (path regex, PartitionSpec), or a tree like
        the batch. `PartitionSpec()`: the leaf is replicated and the same in all passes (class weights, a random key). On a mesh with
        `context` they name every leaf; `PartitionSpec(("replica", "data"), "context")` shards the tokens of [examples, tokens, ...].
      cast_batch: whether `compute_dtype` applies to floating leaves of the batch, or a regex over the paths of those that it casts.
      check_context: whether a loss is read on a mesh with `context`, and refused, with the line of code, if a token reads others of its
        device alone, is counted from 0 there, or a result is no sum or mean over tokens. A sum or mean is then right whether what it
        reads has tokens or not. What the loss does over the axis `context` itself is not checked.
    """

    batch_specs: Any = ()
    cast_batch: bool | str = True
    check_context: bool = True

    def __post_init__(self) -> None:
        """Raises UserError for a value of another type."""
        signatures.check_fields(self)


class WireChoice(Protocol):
    """How some weights are sent: the second entry of a row of `wires`, such as `PackedWires`. A new one is a class in `wires`."""

    @property
    def sends_rest(self) -> bool:
        """Returns whether it leaves weights that another wire sends as they are; then it is asked after the others."""

    def one_program(self, pattern: str) -> placement.OneProgram | None:
        """Returns why a step with it is one program, or None."""

    def marked(
        self, partition: partition_lib.Partition, pattern: str, blocks: str, reduce_dtype: DTypeLike | None
    ) -> partition_lib.Partition:
        """Returns a partition in which the weights that `pattern` means are sent so, or raises UserError."""


Wires = Sequence[tuple[str, Any]] | packed.PackedWires | None


@dataclasses.dataclass(frozen=True)
class Values:
    """What a step is told."""

    compute_dtype: Any
    fp8: fp8_modules.Fp8 | None
    blocks: block_settings.Blocks
    sums: Sums
    batch: BatchLayout
    wires: Sequence[tuple[str, WireChoice]]

    @property
    def one_program(self) -> placement.OneProgram | None:
        """Returns why this step cannot be several programs, or None. What needs one says so itself."""
        needs = [choice.one_program(pattern) for pattern, choice in self.wires]
        return next(filter(None, [self.fp8.one_program() if self.fp8 else None, *needs]), None)

    def marked(self, partition: partition_lib.Partition, *, rest: bool) -> partition_lib.Partition:
        """Returns a partition whose weights have these wires: of weights by name, or of the rest."""
        for pattern, choice in self.wires:
            if choice.sends_rest == rest:
                partition = choice.marked(partition, pattern, self.blocks.pattern, self.sums.reduce_dtype)
        return partition


@dataclasses.dataclass(frozen=True)
class SingleWires:
    """Rows of `wires`, and a recipe beside `compute_dtype`, by names of their own; see `step.make_train_step`."""

    by_columns: str = ""
    expert_load: float = experts.TO_EXPERTS.load
    expert_parts: int = experts.TO_EXPERTS.parts
    fp8: fp8_modules.Fp8 | None = None

    def __post_init__(self) -> None:
        """Raises UserError for a value of another type."""
        signatures.check_fields(self)

    def rows(self) -> list[tuple[str, Any]]:
        """Returns them as rows of `wires`."""
        of_columns = [(self.by_columns, columns.ByColumns())] if self.by_columns else []
        return [("", experts.ToExperts(load=self.expert_load, parts=self.expert_parts)), *of_columns]


# Fields that `make_train_step` takes by their own names, and the value that each belongs to.
SHORT_FORMS: Mapping[str, type] = {
    field.name: cls
    for cls in (block_settings.Blocks, Sums, BatchLayout, SingleWires)
    for field in dataclasses.fields(cls)
    if field.name not in ("pattern", "hooks")
}


ARGUMENTS = ("clip_norm", "loss_scale", "compute_dtype", "blocks", "sums", "batch", "wires", "donate")


def of_batch(partition: partition_lib.Partition, arguments: Mapping[str, Any]) -> Values:
    """Returns what arguments of `step.make_train_step`, by name, say of the batch: its layout, its passes, and its dtype."""
    fields = {name: value for name, value in arguments.items() if SHORT_FORMS.get(name) in (Sums, BatchLayout)}
    return read(partition, arguments.get("compute_dtype"), None, arguments.get("sums"), BatchLayout(), None, fields)


def read(
    partition: partition_lib.Partition,
    compute_dtype: DTypeLike | fp8_modules.Fp8 | None,
    blocks: str | block_settings.Blocks | None,
    sums: DTypeLike | Sums | None,
    batch: BatchLayout,
    wires: Wires,
    fields: Mapping[str, Any],
) -> Values:
    """Returns the arguments of `step.make_train_step` as values.

    Raises:
      UserError: a value is not of its type.
      TypeError: `fields` has a name that is none.
    """
    if unknown := [name for name in fields if name not in SHORT_FORMS]:
        near = errors.choose(unknown[0], [*ARGUMENTS, *SHORT_FORMS])
        hint = f"; {near}" if near.startswith("did") else ""
        raise TypeError(f"make_train_step() got an unexpected keyword argument {unknown[0]!r}{hint}")

    def of(cls: type) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if SHORT_FORMS[name] is cls}

    if partition.pipeline:
        said = partition.pipeline.pipeline
        blocks = said.chosen if blocks is None else blocks
        batch = batch if batch.batch_specs != () else dataclasses.replace(batch, batch_specs=said.batch_specs)
        compute_dtype = said.compute_dtype if compute_dtype is None else compute_dtype
    chosen = block_settings.Blocks.of("" if blocks is None else blocks, **of(block_settings.Blocks))
    summed = signatures.with_fields(Sums.of(sums), **of(Sums))
    layout = signatures.with_fields(batch, **of(BatchLayout))
    single = SingleWires(**of(SingleWires))
    rows: list[tuple[str, Any]] = [("", wires)] if isinstance(wires, packed.PackedWires) else [*(wires or ())]
    for pattern, choice in rows:
        errors.regex("wires", pattern, "pass rows (regex, choice), such as ('', zerojax.PackedWires())")
        if isinstance(choice, type) or not hasattr(choice, "sends_rest"):
            raise UserError(
                f"wires: {pattern!r} needs a choice such as zerojax.PackedWires(), and has {errors.shown(choice)}"
            )
        if isinstance(choice, packed.PackedWires) and not choice.is_on and choice is not wires:
            raise UserError(
                f"wires: PackedWires() of {pattern!r} sends weights as they are; omit the row, or say what it packs"
            )
    dtype = compute_dtype
    if isinstance(dtype, fp8_modules.Fp8):
        single, dtype = signatures.with_fields(single, fp8=dtype), dtype.dtype
    elif single.fp8 is not None and single.fp8.dtype is not None:
        dtype = signatures.with_fields(single.fp8, **({} if dtype is None else {"dtype": dtype})).dtype
    fp8, dtype = single.fp8, precision.floating("compute_dtype", dtype)
    idle = [name for name in ("expert_load", "expert_parts") if name in fields]
    if idle and not any(weight.is_experts for weight in partition.placements.values()):
        warnings.warn(
            f"{', '.join(idle)}: {'have' if idle[1:] else 'has'} no effect, because no weight is sharded over `expert`; name the axis in "
            'overrides, as in overrides=[("experts/(gate|up|down)$", PartitionSpec("expert"))], or omit this',
            stacklevel=3,
        )
    if dtype is None and layout.cast_batch is not True:
        warnings.warn("cast_batch: has no effect, because nothing is cast without compute_dtype; omit it", stacklevel=3)
    return Values(dtype, fp8, chosen, summed, layout, [*single.rows(), *rows])
