"""Plans the stream of offloaded optimizer state through a device. This module counts its bytes, its device memory and its time.

before the gradients    the first groups arrive, beside the program of the gradients: half of those in flight
after them              the other groups arrive, are updated and leave, both directions at once
in the next step        the last groups leave, beside its gradients

In a step block by block each block's pass is a program of its own (`offload.blockwise`). Params in host memory arrive beside the programs
before their use. All groups in flight may arrive before the last backward pass, and where no norm is waited for, the others arrive and are
updated beside it. It takes two thirds of a pass.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from zerojax.hlo import buffers as buffers_lib
from zerojax.plan import targets
from zerojax.zero.offload import blockwise, streamed


@dataclasses.dataclass(frozen=True)
class Stream:
    """The stream of one step on one device.

    Attributes:
      nbytes: bytes in host memory, or on a disk. As many arrive in each step, and leave.
      groups: the number of groups.
      before: device bytes of groups that arrive before the program of the gradients ends.
      at_once: device bytes of the groups in flight, and of the temporaries of an update.
      peak: device bytes during the updates: the state that stays, the gradients and `at_once`.
      rate: bytes/s in each direction while both are in use; None if unknown, as a disk's is where the user does not give it.
      is_on_disk: whether the bytes are on a disk.
      params_on_disk: whether params are.
      by_block: of a step block by block, whose peak is `peak`; None: the step is one program and its updates.
      is_early: whether the groups of a step block by block are updated beside the backward pass.
      backward: seconds of the last backward pass beside which groups arrive and are updated, at the rate of the matrix units.
    """

    nbytes: int
    groups: int
    before: int
    at_once: int
    peak: int
    rate: float | None
    is_on_disk: bool = False
    params_on_disk: bool = False
    by_block: blockwise.Memory | None = None
    is_early: bool = False
    backward: float = 0.0

    def beside(self, compute: float, passes: int) -> "Stream":
        """Returns the stream beside a step whose matmuls take `compute` seconds in all its passes."""
        return dataclasses.replace(self, backward=compute * 2 / 3 / passes) if self.is_early else self

    @property
    def arriving(self) -> int:
        """Returns the bytes that arrive in a step."""
        return self.nbytes + (self.by_block.fetched if self.by_block else 0)

    @property
    def disk(self) -> int:
        """Returns the bytes on a disk. A step writes as many."""
        params = self.by_block.params if self.by_block and self.params_on_disk else 0
        return params + (self.nbytes if self.is_on_disk else 0)

    @property
    def read(self) -> int:
        """Returns the bytes that a step reads from a disk: params in each pass of a block."""
        params = self.by_block.fetched if self.by_block and self.params_on_disk else 0
        return params + (self.nbytes if self.is_on_disk else 0)

    @property
    def seconds(self) -> float | None:
        """Returns the time of the copies, both directions at once; those of a disk, if it is used."""
        return None if self.rate is None else (self.read or self.arriving) / self.rate

    @property
    def exposed(self) -> float | None:
        """Returns the least part of `seconds` in which the device only waits for copies. The rest may run beside gradients."""
        if self.rate is None:
            return None
        return max(0.0, max(0, self.nbytes - self.before) / self.rate - self.backward)


def plan(
    step: streamed.StreamedStep, gradients: buffers_lib.Buffers, target: targets.Target, state: Any, batch: Any
) -> Stream:
    """Plans the stream of a step whose program of the gradients is compiled. Compiles the programs of the updates, and those of blocks.

    Args:
      step: traced before, so that the gradients' dtypes are known.
      gradients: the memory of the program of the gradients.
      target: the device.
      state, batch: of the step, abstract.
    """
    by_block = step.memory(state, batch) if isinstance(step, blockwise.BlockwiseStep) else None
    groups, at_once = step.updates.groups, bytes_at_once(step)
    held = sum(argument.nbytes for argument in gradients.arguments if argument.space == "device") + gradients.outputs
    counts = [group.nbytes for group in groups]
    rate, is_on_disk = target.host_duplex or target.host_link, step.updates.is_on_disk
    params_on_disk = step.updates.params_on_disk
    if (is_on_disk or params_on_disk) and rate is not None and rate.source != targets.GIVEN:
        rate = None  # that of host memory says nothing of a disk
    return Stream(
        nbytes=sum(counts),
        groups=len(groups),
        before=sum(counts[: step.ahead]),
        at_once=at_once,
        peak=(by_block.passes if by_block else held) + at_once,
        rate=None if rate is None else rate.value,
        is_on_disk=is_on_disk,
        params_on_disk=params_on_disk,
        by_block=by_block,
        is_early=isinstance(step, blockwise.BlockwiseStep) and step.is_early,
    )


def bytes_at_once(step: streamed.StreamedStep) -> int:
    """Returns the device bytes of the groups in flight, of params that leave with them, and of the temporaries of an update.

    Compiles the programs of the updates.
    """
    analyses = [compiled.memory_analysis() for compiled in step.updates.compile()]
    known = [analysis for analysis in analyses if analysis is not None]
    extra = max((a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes for a in known), default=0)
    groups, in_flight = step.updates.groups, step.in_flight
    windows = [groups[n : n + in_flight] for n in range(len(groups))]
    return (
        max((sum(g.nbytes for g in window) + step.updates.param_bytes(window) for window in windows), default=0) + extra
    )


def of(
    train_step: Any, gradients: buffers_lib.Buffers, target: targets.Target, state: Any, args: Sequence[Any]
) -> Stream | None:
    """Returns the stream of a step that has one."""
    return plan(train_step, gradients, target, state, *args) if isinstance(train_step, streamed.StreamedStep) else None


def compiler_options(train_step: Any) -> dict[str, Any]:
    """Returns XLA's options for the program that is planned.

    That of a step block by block never runs and may not fit. XLA would recompute what it can, for minutes.
    """
    return {"xla_disable_hlo_passes": "rematerialization"} if isinstance(train_step, blockwise.BlockwiseStep) else {}


def whole_step(train_step: Any, compiled: jax.stages.Compiled) -> Any:
    """Returns the executable step: the compiled program itself, or a streamed step of which it is the first program."""
    return train_step.with_gradients(compiled) if isinstance(train_step, streamed.StreamedStep) else compiled
