"""Counts the matmuls of a compiled step by the dtype of their operands. This module finds those in another dtype than was asked for.

On a GPU a matmul is a call of cuBLASLt, a `dot`, or a fusion with a `dot` inside (Triton). XLA decides late whether one runs in fp8, and
nothing else tells. A matmul of `ops.fp8` has `fp8.SCOPE` in its op_name, also after XLA has merged or moved it.
"""

import dataclasses
import re
from collections.abc import Iterable

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax, traffic
from zerojax.ops import fp8

FP8 = "fp8"
# The bits of the wider operand -> the kind.
_KINDS = {8: "8 bits", 16: "16 bits", 32: "32 bits", 64: "64 bits"}


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matmul of a compiled program.

    Attributes:
      name: the instruction.
      kind: the width of its wider operand: "fp8", "8 bits" (integers), "16 bits", "32 bits" or "64 bits".
      wants_fp8: whether it was asked for in fp8.
      times: how often it runs in a step.
      op_name, source: the operation and the source line that it was traced from.
    """

    name: str
    kind: str
    wants_fp8: bool
    times: int
    op_name: str
    source: str


def matmuls(flow: hlo_flow.Flow) -> tuple[Matmul, ...]:
    """Returns the matmuls of a program that run, without those of attention kernels and convolutions."""
    found = []
    for call in flow.calls.values():
        for instruction in call.computation.instructions:
            for where, inner in traffic.matmuls(flow.module, call.computation, instruction):
                dtypes = [where.by_name[name].arrays[0].dtype for name in inner.operands[:2] if name in where.by_name]
                name = inner.op_name or instruction.op_name
                width = max(map(syntax.bits, dtypes), default=0)
                if width in _KINDS:
                    kind = FP8 if all(re.match(r"f8", dtype) for dtype in dtypes) else _KINDS[width]
                    source = flow.module.source(inner) or flow.module.source(instruction)
                    found.append(Matmul(inner.name, kind, fp8.SCOPE in name.split("/"), call.times, name, source))
    return tuple(found)


def counts(found: Iterable[Matmul]) -> dict[str, int]:
    """Returns how many matmuls run in a step by kind, fp8 first."""
    total = dict.fromkeys((FP8, *_KINDS.values()), 0)
    for matmul in found:
        total[matmul.kind] += matmul.times
    return {kind: count for kind, count in total.items() if count}
