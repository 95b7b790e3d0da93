"""Counts the bytes that the instructions of a compiled program read and write. This module also finds the matmuls inside of fusions.

Each instruction reads its operands and writes its output once. If it reads a slice of an array, or updates a slice in place, only the slice
counts. Caches make the true traffic smaller. Tiles that are read again make it larger.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax

# Instructions that move no bytes themselves. The bytes of a loop or a branch are those of its body, and those of a -done are its -start's.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id opt-barrier "
    "optimization-barrier domain add-dependency".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")  # read as many bytes of their first operand as they return


class KernelBytes(NamedTuple):
    """An instruction that moves bytes of the device's memory: how many in one run, how often it runs, and where it is."""

    nbytes: int
    times: int
    where: syntax.Computation
    instruction: syntax.Instruction


def memory_traffic(flow: hlo_flow.Flow) -> int:
    """Returns the bytes that one device reads and writes in a step of the compiled program. A loop counts times its length."""
    return sum(kernel.nbytes * kernel.times for kernel in kernels(flow))


def kernels(flow: hlo_flow.Flow) -> Iterator[KernelBytes]:
    """Yields the instructions of a program that move bytes."""
    for call in counted(flow):
        for instruction in call.computation.instructions:
            nbytes = moved(flow.module, call.computation, instruction)
            if nbytes:
                yield KernelBytes(nbytes, call.times, call.computation, instruction)


def counted(flow: hlo_flow.Flow) -> list[hlo_flow.Call]:
    """Returns the calls of computations, without those whose -start instruction is counted."""
    return [call for call in flow.calls.values() if not (call.site is not None and call.site.opcode.endswith("-start"))]


def moved(module: syntax.Module, where: syntax.Computation, instruction: syntax.Instruction) -> int:
    """Returns the bytes that one run of an instruction reads and writes. Programs in a row that are equal are read once."""
    if instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
        return 0
    module, where, instruction = module.origin(where, instruction)
    key = moved, where.name, instruction.name
    if key not in module.known:
        module.known[key] = _moved(module, where, instruction)
    return module.known[key]


def _moved(module: syntax.Module, where: syntax.Computation, instruction: syntax.Instruction) -> int:
    opcode = instruction.opcode
    written = nbytes_of(instruction)
    if opcode == "custom-call" and len(instruction.arrays) > 1 and is_library_call(instruction):
        written -= sum(array.nbytes for array in instruction.arrays[1:] if array.dtype in ("s8", "u8"))  # workspace
    read = [nbytes_of(where.by_name[operand]) if operand in where.by_name else 0 for operand in instruction.operands]
    if opcode.removesuffix("-start") == "fusion" and instruction.called:
        inside = module.computation(instruction.called[-1])
        used = [_used(inside, number, nbytes) for number, nbytes in enumerate(read)]
        return sum(used) + _written(inside)
    if opcode in _SLICES:
        return 2 * written
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(read[1:])
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        return written  # a tuple of the inputs and the outputs
    return sum(read) + written


def is_library_call(instruction: syntax.Instruction) -> bool:
    """Returns whether an instruction calls cuBLAS or cuDNN."""
    return re.search(r'custom_call_target="__cu(blas|dnn)', instruction.attributes) is not None


def matmuls(
    module: syntax.Module, where: syntax.Computation, instruction: syntax.Instruction
) -> list[tuple[syntax.Computation, syntax.Instruction]]:
    """Returns the matmuls that an instruction is, or holds if it is a fusion, each with its computation."""
    if instruction.opcode == "dot":
        return [(where, instruction)]
    if instruction.opcode == "custom-call":
        is_call = re.search(r'custom_call_target="__cublas', instruction.attributes)
        return [(where, instruction)] if is_call else []
    if instruction.opcode.removesuffix("-start") not in ("fusion", "async"):
        return []
    found = []
    for called in instruction.called:
        if module.mentions(called, "dot", "fusion", "custom-call"):
            inner = module.computation(called)
            found += [pair for part in inner.instructions for pair in matmuls(module, inner, part)]
    return found


def _used(inside: syntax.Computation, number: int, nbytes: int) -> int:
    """Returns the bytes that a fusion reads of an operand. It converts only the elements that it uses."""
    parameter = inside.parameters.get(number)
    if parameter is None:
        return nbytes
    whole, users = parameter.elements, inside.users.get(parameter.name, ())
    is_converted = False
    while len(users) == 1 and users[0].opcode in ("bitcast", "convert"):
        is_converted |= users[0].opcode == "convert"
        parameter, users = users[0], inside.users.get(users[0].name, ())
    if users and all(u.opcode in _SLICES and u.operands[0] == parameter.name for u in users):
        return min(nbytes, nbytes * sum(user.elements for user in users) // max(1, whole))
    in_place = ("dynamic-update-slice", "scatter")  # of the operand itself: what is converted is read whole
    if users and not is_converted and all(u.opcode in in_place and u.operands[0] == parameter.name for u in users):
        return 0
    return nbytes


def _written(inside: syntax.Computation) -> int:
    """Returns the bytes that a fusion writes: for an array updated in place, those of the update."""
    root = inside.root
    outputs = [inside.by_name[o] for o in root.operands if o in inside.by_name] if root.opcode == "tuple" else [root]
    total = 0
    for output in outputs:
        while output.opcode == "bitcast" and output.operands[0] in inside.by_name:
            output = inside.by_name[output.operands[0]]
        update = {"dynamic-update-slice": 1, "scatter": -1}.get(output.opcode)
        total += nbytes_of(output if update is None else inside.by_name[output.operands[update]])
    return total


def nbytes_of(instruction: syntax.Instruction) -> int:
    """Returns the bytes of an instruction's output in device memory."""
    return sum(array.nbytes for array in instruction.arrays if not array.is_on_host)
