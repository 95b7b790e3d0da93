"""Lists what an instruction of a compiled program does on a GPU. This module knows the work of kernels, and no rates.

A fusion with a matmul inside (Triton) counts as the matmul and, apart from it, the elementwise work before and after: on the device XLA's
tuning mostly takes the two apart and calls cuBLAS. A program compiled without a device is not tuned.
"""

import dataclasses
import functools
import json
import math
import re

from zerojax import roles
from zerojax.hlo import collectives, replica_groups, syntax, traffic
from zerojax.hlo import flow as hlo_flow

MATMUL, ATTENTION, ELEMENTWISE, COLLECTIVE = "matmul", "attention", "elementwise", "collective"
TO_HOST, FROM_HOST = "to host", "from host"
FORWARD, BACKWARD = "forward", "backward"
FUSED, DEQUANTIZED = "fused", "dequantized"
COPIES = (TO_HOST, FROM_HOST)

# Matmuls of cuDNN's attention. Forward: scores and output. Backward: scores again, and four gradients.
ATTENTION_MATMULS = {FORWARD: 2, BACKWARD: 5}
_MOVES = frozenset("bitcast reshape transpose copy get-tuple-element parameter broadcast constant".split())
_GROUPED = re.compile(r"grouped_(rows|matrices)")
_OF_A_TOKEN = re.compile(r"(one_token_products)|(one_token)_product|(narrow)_matmul|(cached)_attention")
# The dtype of a weight in HLO -> the part of a rate's name. Codes of 4 bits are two in a byte.
_STORED = {"s8": "int8", "f8e4m3fn": "fp8", "u8": "nf4"}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# outputs that overwrite operands, and their numbers
_ALIASES = re.compile(r"output_to_operand_aliasing=\{((?:\{\d*\}: \(\d+, \{\}\)(?:, )?)+)\}")
_ALIASED = re.compile(r"\((\d+),")
_DIMS = re.compile(r'(lhs|rhs)_(contracting|batch)_dim(?:s=\{([\d,]*)\}|ensions":\[([^\]]*)\])')


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """The work of one kernel, collective or copy.

    Attributes:
      kind: MATMUL, ATTENTION, ELEMENTWISE (all that memory bounds), COLLECTIVE, TO_HOST or FROM_HOST.
      form: of a matmul its dtype ("bf16", "fp8", "fp32"), or "grouped_rows", "grouped_rows.fp8", "grouped_rows.mxfp4" or
        "grouped_matrices" of groups of rows, or the kernel that multiplies a few rows with a weight or several and how these are stored
        ("one_token.int8", "one_token_products.int8", "narrow.bf16"); of attention its
        direction, or "cached" of a new token to a cache; of a collective its kind in HLO; of elementwise work FUSED inside a fusion with a
        matmul, DEQUANTIZED where it reads codes; else "".
      flops: floating-point operations; causal attention at half.
      nbytes: bytes of device memory, read and written; of a collective those that each device receives; of a copy those copied.
      dims: of a matmul (batch or groups, m, n, k), of attention (batch, heads, queries, keys, head dim).
      group: of a collective the indices of the devices of its first group.
      op_name: what JAX traced it from.
    """

    kind: str
    form: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    dims: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    op_name: str = ""


def of(
    module: syntax.Module, where: syntax.Computation, instruction: syntax.Instruction, devices: int
) -> tuple[KernelWork, ...]:
    """Returns the kernels of one run of an instruction, in order; () if it does nothing. Loops and calls are their computations'.

    Args:
      module, where: the program, and the computation that holds the instruction.
      devices: the devices that the program runs on.
    """
    opcode = instruction.opcode
    if opcode.removesuffix("-start") in collectives.KINDS:
        return _collective(where, instruction, devices)
    if opcode in ("copy", "copy-start") and (direction := _direction(where, instruction)):
        copied = instruction.arrays[0]
        return (KernelWork(direction, nbytes=copied.nbytes, op_name=instruction.op_name),)
    moved = traffic.moved(module, where, instruction)
    if not moved:
        return ()
    if opcode == "custom-call":
        target = _TARGET.search(instruction.attributes)
        if target and "fmha" in target[1]:
            return (_attention(where, instruction, target[1], moved),)
        if grouped := _GROUPED.search(instruction.op_name):
            return (_grouped(where, instruction, grouped[0], moved),)
        if kernel := _OF_A_TOKEN.search(instruction.op_name):
            return (_of_a_token(where, instruction, kernel[kernel.lastindex or 0], moved),)
    if opcode in ("convolution", "async-start"):
        return ()
    found = traffic.matmuls(module, where, instruction)
    if not found:
        form = DEQUANTIZED if _dequantizes(where, instruction) else ""
        return (KernelWork(ELEMENTWISE, form, nbytes=moved, op_name=instruction.op_name),)
    own = [_matmul(inner, dot, instruction.op_name) for inner, dot in found]
    beside = sum(_beside(inner, dot) for inner, dot in found) if opcode in hlo_flow.FUSIONS else 0
    return (*([KernelWork(ELEMENTWISE, FUSED, nbytes=beside, op_name=instruction.op_name)] if beside else []), *own)


def _direction(where: syntax.Computation, copy: syntax.Instruction) -> str:
    """Returns the direction of a copy between device and host; "" for other copies."""
    source = where.by_name.get(copy.operands[0])
    if source is None or not source.arrays or copy.arrays[0].is_on_host == source.arrays[0].is_on_host:
        return ""
    return TO_HOST if copy.arrays[0].is_on_host else FROM_HOST


def _collective(where: syntax.Computation, start: syntax.Instruction, devices: int) -> tuple[KernelWork, ...]:
    kind = start.opcode.removesuffix("-start")
    groups = replica_groups.groups(start.attributes, devices)
    group = max(groups, key=len, default=())
    ways = len(group)
    if ways < 2:
        return ()
    taken = sum(traffic.nbytes_of(where.by_name[name]) for name in start.operands if name in where.by_name)
    received = {
        "all-gather": taken * (ways - 1),
        "reduce-scatter": taken * (ways - 1) / ways,
        "all-reduce": 2 * taken * (ways - 1) / ways,
        "all-to-all": taken * (ways - 1) / ways,
    }.get(kind, taken)
    return (KernelWork(COLLECTIVE, kind, nbytes=received, group=group, op_name=start.op_name),)


def _attention(where: syntax.Computation, call: syntax.Instruction, target: str, moved: int) -> KernelWork:
    begin = call.attributes.index("backend_config=") + len("backend_config=")
    config = json.JSONDecoder().raw_decode(call.attributes, begin)[0]["cudnn_fmha_backend_config"]
    batch, heads, queries, keys = (int(size) for size in config["intermediate_tensor_shape"]["dimensions"])
    direction = BACKWARD if "Backward" in target else FORWARD
    query = where.by_name[call.operands[0]]
    head_dim = query.elements // (batch * heads * queries)
    seen = keys * (0.5 if "CAUSAL" in config["mask_type"] else 1.0)
    seen = min(seen, config.get("sliding_window_length") or keys)
    flops = ATTENTION_MATMULS[direction] * 2.0 * batch * heads * queries * seen * head_dim
    return KernelWork(ATTENTION, direction, flops, moved, (batch, heads, queries, keys, head_dim), op_name=call.op_name)


def _grouped(where: syntax.Computation, call: syntax.Instruction, form: str, moved: int) -> KernelWork:
    """Returns the work of a product of groups of rows (`pallas_kernels.grouped`), if groups have all rows, or a balanced router's."""
    first, second = (where.by_name[name].arrays[0] for name in call.operands[-2:])
    rows, contracted = first.dims
    form += ".fp8" if first.nbytes == first.elements else ".mxfp4" if second.dtype == "u8" else ""
    rows = round(rows / roles.room(call.op_name))
    columns = call.arrays[0].dims[-1]
    groups = next(own.dims[0] for own in (call.arrays[0], second) if len(own.dims) == 3)
    flops = 2.0 * rows * columns * contracted
    return KernelWork(MATMUL, form, flops, moved, (groups, rows, columns, contracted), op_name=call.op_name)


def _of_a_token(where: syntax.Computation, call: syntax.Instruction, form: str, moved: int) -> KernelWork:
    """Returns the work of a kernel of few rows: the bytes that it reads and writes, without arrays that it changes in place."""
    aliases = _ALIASES.search(call.attributes)
    changed = {call.operands[int(number)] for number in _ALIASED.findall(aliases[1])} if aliases else set()
    nbytes = moved - 2 * sum(where.by_name[name].arrays[0].nbytes for name in changed)
    if form == "cached":
        return KernelWork(ATTENTION, form, nbytes=nbytes, op_name=call.op_name)
    read = [_stored(where, where.by_name[name]).arrays[0] for name in call.operands if name not in changed]
    kind = _STORED.get(max(read, key=lambda array: array.nbytes).dtype, "bf16")
    return KernelWork(MATMUL, f"{form}.{kind}", nbytes=nbytes, op_name=call.op_name)


def _stored(where: syntax.Computation, value: syntax.Instruction) -> syntax.Instruction:
    """Returns the value of which another is a bitcast: codes in fp8 are handed to kernels as bytes."""
    while value.opcode == "bitcast" and value.operands[0] in where.by_name:
        value = where.by_name[value.operands[0]]
    return value


def _dequantizes(where: syntax.Computation, instruction: syntax.Instruction) -> bool:
    """Returns whether a kernel reads codes of 8 or fewer bits and writes each wider."""
    written = max(instruction.arrays, key=lambda array: array.nbytes)
    read = [where.by_name[name].arrays[:1] for name in instruction.operands if name in where.by_name]
    codes = {
        array.elements * (2 if array.dtype == "u8" else 1) for (array,) in filter(None, read) if array.dtype in _STORED
    }
    return written.elements in codes and written.nbytes > written.elements


def _matmul(where: syntax.Computation, dot: syntax.Instruction, op_name: str) -> KernelWork:
    left, right = (where.by_name[name].arrays[0] for name in dot.operands[:2])
    dims = _contracted(dot.attributes)
    k = math.prod(left.dims[d] for d in dims["lhs", "contracting"])
    batch = math.prod(left.dims[d] for d in dims["lhs", "batch"])
    m, n = left.elements // (k * batch), right.elements // (k * batch)
    width = max(syntax.bits(left.dtype), syntax.bits(right.dtype))
    form = "fp8" if width == 8 else "bf16" if width == 16 else "fp32"
    nbytes = left.nbytes + right.nbytes + dot.arrays[0].nbytes
    return KernelWork(MATMUL, form, 2.0 * batch * m * n * k, nbytes, (batch, m, n, k), op_name=op_name)


@functools.lru_cache(maxsize=2**12)
def _contracted(attributes: str) -> dict[tuple[str, str], tuple[int, ...]]:
    """Returns the contracted and the batch dims of both operands of a `dot` or a call of cuBLAS."""
    found: dict[tuple[str, str], tuple[int, ...]] = {
        (side, role): () for side in ("lhs", "rhs") for role in ("contracting", "batch")
    }
    for side, role, plain, quoted in _DIMS.findall(attributes):
        found[side, role] = tuple(int(n) for n in re.findall(r"\d+", plain or quoted))
    return found


def _beside(inner: syntax.Computation, dot: syntax.Instruction) -> int:
    """Returns the bytes of the elementwise work before and after a matmul inside a fusion, as kernels of their own."""
    nbytes = 0
    for name in dot.operands:
        value = inner.by_name[name]
        read, is_computed = _read(inner, value)
        if is_computed:
            nbytes += read + value.arrays[0].nbytes
    before = inner.behind(*dot.operands)
    after = [i for i in inner.instructions if i.name not in before and i.name != dot.name]
    if any(i.opcode not in _MOVES and i.opcode != "convert" for i in after):
        nbytes += sum(i.arrays[0].nbytes for i in after if i.opcode == "parameter")
        outputs = inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)
        nbytes += sum(traffic.nbytes_of(inner.by_name[name]) for name in outputs)
    return nbytes


def _read(inner: syntax.Computation, value: syntax.Instruction) -> tuple[int, bool]:
    """Returns the bytes of the parameters that a value is computed from, and whether it is more than a moved parameter."""
    names = inner.behind(value.name)
    parts = [inner.by_name[name] for name in names]
    read = sum(part.arrays[0].nbytes for part in parts if part.opcode == "parameter")
    return read, any(part.opcode not in _MOVES for part in parts)
