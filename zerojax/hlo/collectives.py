"""Lists the collectives of a compiled program. This module separates combined collectives and counts the work scheduled beside each.

XLA sends many arrays in one collective: as a tuple, or concatenated in one flat buffer. Each array is listed separately. An asynchronous
collective is two instructions, `-start` and `-done`, or a wrapper around a computation. Its output is counted once.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jax.sharding import Mesh

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import replica_groups, syntax

KINDS = frozenset(
    "all-gather reduce-scatter all-reduce all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
REDUCTIONS = frozenset(("reduce-scatter", "all-reduce"))
# Instructions that count as work beside a collective. The others move no data, or are collectives themselves.
_WORK = frozenset(
    "fusion fusion-start dot convolution custom-call while conditional call sort scatter gather reduce reduce-window copy transpose "
    "dynamic-update-slice concatenate select-and-scatter rng".split()
)
_NAMELESS_STEPS = 8  # operands to follow back in search of an op_name
_GROUPED = re.compile(r"grouped_(rows|matrices)")  # kernels of `pallas_kernels.grouped`
_LAYOUT = frozenset("bitcast reshape copy convert transpose".split())


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a collective."""

    number: int | None  # its index in the output tuple; None in a flat buffer
    taken: syntax.Array  # the type of the operand
    given: syntax.Array  # the type of the output
    value: str  # the name of the operand, before it is copied to a flat buffer
    op_name: str  # the scopes and the operation that it was traced from


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      kind: one of KINDS.
      start: the instruction, or the -start of an asynchronous one.
      call: the call of the computation that holds it.
      axes, ways, group: the mesh axes that it runs over, the number of devices, and the indices of those of its first group.
      where, result: the computation and the name in which its output is read: those of the -done of an asynchronous one.
      is_async, overlaps: whether it is asynchronous, and the number of instructions by kind that run beside it.
      parts: its arrays.
    """

    kind: str
    start: syntax.Instruction
    call: hlo_flow.Call
    axes: tuple[str, ...]
    ways: int
    where: syntax.Computation
    result: str
    is_async: bool
    overlaps: Mapping[str, int]
    parts: tuple[Part, ...]
    group: tuple[int, ...] = ()

    @property
    def computation(self) -> syntax.Computation:
        """Returns the computation that holds it."""
        return self.call.computation


def collectives(flow: hlo_flow.Flow, mesh: Mesh) -> Iterator[Collective]:
    """Yields a program's collectives over two devices or more, by computation, in execution order."""
    for call in flow.calls.values():
        for start in call.computation.instructions:
            kind = _kind(flow.module, start)
            if kind:
                found = _read(flow, mesh, call, start, kind)
                if found.ways > 1:
                    yield found


def work_kind(module: syntax.Module, instruction: syntax.Instruction) -> str:
    """Returns an instruction's kind of work: matmul, attention, loop, scatter, copy, elementwise, ..."""
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        name = target[1].lower() if target else ""
        is_matmul = "gemm" in name or "blas" in name or _GROUPED.search(instruction.op_name)
        return "attention" if "fmha" in name else "matmul" if is_matmul else "custom-call"
    if instruction.opcode in ("dot", "convolution"):
        return "matmul"
    if instruction.opcode not in hlo_flow.FUSIONS:
        return {"while": "loop", "call": "loop"}.get(instruction.opcode, instruction.opcode)
    if any(module.mentions(called, "dot", "convolution") for called in instruction.called):
        return "matmul"
    return "scatter" if any(module.mentions(called, "scatter") for called in instruction.called) else "elementwise"


def _kind(module: syntax.Module, start: syntax.Instruction) -> str:
    kind = start.opcode.removesuffix("-start")
    if kind in KINDS:
        return kind
    # In TPU programs a reduce-scatter is a fusion: an all-reduce, then a slice on each device.
    if start.opcode == "fusion" and any(module.mentions(called, "all-reduce") for called in start.called):
        return "reduce-scatter"
    return ""


def _read(flow: hlo_flow.Flow, mesh: Mesh, call: hlo_flow.Call, start: syntax.Instruction, kind: str) -> Collective:
    attributes = start.attributes
    if start.opcode == "fusion":
        attributes = _fused_sum(flow.module, start).attributes
    groups = replica_groups.groups(attributes, mesh.size)
    first = max(groups, key=len, default=())
    where, begin, done = _span(call, start)
    is_async = done is not None and '"is_sync":true' not in start.attributes
    return Collective(
        kind=kind,
        start=start,
        call=call,
        axes=replica_groups.axes(groups, mesh),
        ways=max(1, len(first)),
        group=first,
        where=where,
        result=(done or begin).name,
        is_async=is_async,
        overlaps=_between(flow.module, where, begin, done) if is_async and done is not None else {},
        parts=tuple(_parts(flow.module, call.computation, start, done if where is call.computation else None)),
    )


def _span(
    call: hlo_flow.Call, start: syntax.Instruction
) -> tuple[syntax.Computation, syntax.Instruction, syntax.Instruction | None]:
    """Returns the computation that waits for a collective, its start there, and its -done: None if it is not asynchronous."""
    where, begin = call.computation, start
    if call.site is not None and call.caller is not None and call.site.opcode.endswith("-start"):
        where, begin = call.caller, call.site
    elif not start.opcode.endswith("-start"):
        return where, begin, None
    waiting = [user for user in where.users.get(begin.name, ()) if user.opcode.endswith(("-done", "-update"))]
    while waiting and waiting[0].opcode.endswith("-update"):
        waiting = list(where.users.get(waiting[0].name, ()))
    return where, begin, waiting[0] if waiting else None


def _between(
    module: syntax.Module, where: syntax.Computation, start: syntax.Instruction, done: syntax.Instruction
) -> dict[str, int]:
    """Counts the work scheduled between two instructions, by kind."""
    found: dict[str, int] = {}
    for other in where.instructions[where.position[start.name] + 1 : where.position[done.name]]:
        if other.opcode in _WORK:
            kind = work_kind(module, other)
            found[kind] = found.get(kind, 0) + 1
    return found


def _parts(
    module: syntax.Module, where: syntax.Computation, start: syntax.Instruction, done: syntax.Instruction | None
) -> Iterator[Part]:
    outputs = (done or start).arrays
    inputs = [(name, array) for name in start.operands if name in where.by_name for array in where.by_name[name].arrays]
    for number, given in enumerate(outputs):
        name, taken = inputs[number] if len(inputs) == len(outputs) else (start.operands[0], given)
        joined = _joined(module, where, name)
        if len(joined) > 1 and sum(where.by_name[value].elements for value in joined) == taken.elements:
            names = syntax.op_names(start.op_name)
            for index, value in enumerate(joined):
                array = dataclasses.replace(where.by_name[value].arrays[0], dtype=given.dtype)
                own = where.by_name[value].op_name or start.op_name
                yield Part(None, array, array, value, names[index] if len(names) == len(joined) else own)
        else:
            yield Part(number, taken, given, name, _op_name(module, where, start, done or start, number, len(outputs)))


def _op_name(
    module: syntax.Module,
    where: syntax.Computation,
    start: syntax.Instruction,
    result: syntax.Instruction,
    number: int,
    count: int,
) -> str:
    """Returns the op_name of one output: its part of the combined name, else the name of its reader or of its operand.

    XLA also gives a collective of several outputs the name of one of them. Then an output has its own name where it has one: that of
    its reader, or of what a reduction sums, or of an update that a gather's operand is made by.
    """
    joined = syntax.op_names(start.op_name)
    if start.op_name and (len(joined) == count or count == 1):
        return joined[number] if len(joined) == count else start.op_name
    if own := _name_of_sum(module, start):
        return own
    users = [
        u for u in where.users.get(result.name, ()) if u.opcode == "get-tuple-element" and u.number("index") == number
    ]
    if named := next((user.op_name for user in users if user.op_name), ""):
        return named
    operand = where.by_name.get(start.operands[number]) if number < len(start.operands) else None
    before = _name_before(module, where, operand)
    is_shared = bool(start.op_name) and len(joined) == 1
    if is_shared and _kind(module, start) not in REDUCTIONS and not _is_updated(where, operand, before):
        return start.op_name
    return before or joined[0]


def _is_updated(where: syntax.Computation, value: syntax.Instruction | None, op_name: str) -> bool:
    """Returns whether a value is made after the backward pass began, and by neither pass."""
    first = next((i for i in where.instructions if "transpose(jvp" in i.op_name), None)
    is_later = value is not None and first is not None and where.position[value.name] > where.position[first.name]
    return is_later and op_name.startswith("jit(") and "jvp(" not in op_name


def _name_of_sum(module: syntax.Module, start: syntax.Instruction) -> str:
    """Returns the name of a TPU's fused reduce-scatter, "" for other instructions. Only the function that adds two numbers has a name."""
    if _kind(module, start) != "reduce-scatter" or start.opcode != "fusion":
        return ""
    summed = module.computation(_fused_sum(module, start).computation_roles["to_apply"]).root.op_name
    scope, _, _ = summed.rpartition("/")
    return f"{scope}/reduce_scatter" if scope else ""


def _fused_sum(module: syntax.Module, fusion: syntax.Instruction) -> syntax.Instruction:
    inner = module.computation(fusion.called[0])
    return next(i for i in inner.instructions if i.opcode == "all-reduce")


def _name_before(module: syntax.Module, where: syntax.Computation, value: syntax.Instruction | None) -> str:
    """Returns the op_name of a value, or of the first operand before it that has one; XLA names no instruction that it adds."""
    for _ in range(_NAMELESS_STEPS):
        if value is None or value.op_name:
            break
        if own := _name_of_sum(module, value):
            return own
        value = next((where.by_name[operand] for operand in value.operands if operand in where.by_name), None)
    return syntax.op_names(value.op_name)[0] if value is not None else ""


def _joined(module: syntax.Module, where: syntax.Computation, name: str) -> tuple[str, ...]:
    """Returns the values that a flat buffer concatenates, before they were flattened."""
    value = where.by_name[_unflattened(where, name)]
    if value.opcode == "concatenate":
        return tuple(_unflattened(where, operand) for operand in value.operands)
    if value.opcode != "fusion" or not module.mentions(value.called[0], "concatenate"):
        return ()
    inner = module.computation(value.called[0])
    joins = [i for i in inner.instructions if i.opcode == "concatenate"]
    taken = [inner.by_name[_unflattened(inner, operand)] for operand in joins[0].operands]
    if len(joins) != 1 or any(i.opcode != "parameter" for i in taken):
        return ()
    return tuple(_unflattened(where, value.operands[int(i.argument)]) for i in taken)


def _unflattened(where: syntax.Computation, name: str) -> str:
    value = where.by_name[name]
    while value.opcode in _LAYOUT and value.operands[0] in where.by_name:
        if value.elements != where.by_name[value.operands[0]].elements:
            break
        value = where.by_name[value.operands[0]]
    return value.name
