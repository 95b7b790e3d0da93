"""Finds the role of a step's memory: of arguments by their path, of temporaries by their instruction. This module reads no file.

A temporary is a gathered weight if it is a moved or cast copy of weights among the arguments. It is a gradient if a collective reduced it,
or if it has a weight's shape and the backward pass computes it. Otherwise it is an activation or the gradient of one, by JAX's names `jvp`
and `transpose`. An array that a matmul reads is no gradient of a weight, whatever its shape. Named scopes are not needed: the scopes
`loss`, `clip` and `update` only add detail.
"""

import re
from collections.abc import Iterable, Mapping

from zerojax import roles as roles_lib
from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax
from zerojax.hlo.buffer_dump import Value

# The first regex found in an argument's path, which begins with its name in the step, decides its role.
PATH_ROLES: tuple[tuple[str, str], ...] = (
    (r"(^|/)opt_state/(.*/)?master(/|$)", roles_lib.MASTER),
    (r"(^|/)(opt_state|optimizer)(/|$)", roles_lib.MOMENTS),
    (r"(^|/)(params|model)(/|$)", roles_lib.PARAMS),
    (r"", roles_lib.REST),
)

_GATHERS = ("all-gather",)
_REDUCTIONS = ("reduce-scatter", "all-reduce")
_EXCHANGES = ("all-to-all", "collective-permute", "ragged-all-to-all", "collective-broadcast", "send", "recv")
_MATMULS = ("dot", "convolution")
_LIBRARY_MATMULS = re.compile(r'custom_call_target="[^"]*(cublas|gemm|matmul|cudnn|fmha|onednn|triton)')
_SMALL = 4096  # elements; a smaller sum over devices is a loss, a norm or a statistic
_NAMELESS_STEPS = 8  # operands to follow back in search of an op_name, if an instruction has none

# The first regex found in the op_name of a temporary that is no weight and no gradient decides its role.
_SCOPES: tuple[tuple[str, str], ...] = (
    (r"/(jvp\()?loss\)?(/|$)", roles_lib.LOSS),
    (r"/transpose\((?!.*rematted)", roles_lib.ACTIVATION_GRADIENTS),
    (r"/(jvp\(|rematted|checkpoint)", roles_lib.ACTIVATIONS),
    (r"/(clip|update)(/|$)", roles_lib.UPDATE),
)


def argument_role(path: str) -> str:
    """Returns the role of an argument.

    >>> argument_role("state/opt_state/0/mu/layer_0/kernel")
    'moments'
    """
    return next((role for pattern, role in PATH_ROLES if re.search(pattern, path)), roles_lib.REST)


class Reader:
    """Finds the role of the values of one program."""

    def __init__(
        self,
        flow: hlo_flow.Flow,
        started: Mapping[str, str],
        weight_numbers: Iterable[int],
        weight_shapes: Iterable[tuple[int, ...]],
    ):
        """Prepares to read a program.

        Args:
          flow: the program.
          started: see `Dump.started`.
          weight_numbers: the numbers of the parameters that are weights.
          weight_shapes: shapes that gradients may have.
        """
        self._flow, self._started = flow, started
        self._multiplied: dict[str, set[str]] = {}
        entry = flow.module.entry.parameters
        self._weights = {entry[number].name for number in weight_numbers if number in entry}
        self._shapes = frozenset(form for shape in set(weight_shapes) for form in _forms(shape))
        self._where = {i.name: call.computation for call in flow.calls.values() for i in call.computation.instructions}

    def find(self, value: Value) -> tuple[syntax.Computation, syntax.Instruction] | None:
        """Returns the computation and the instruction that compute a value."""
        name = self._started.get(value.name, value.name)
        where = self._where.get(name)
        return (where, where.by_name[name]) if where is not None else None

    def op_name(self, value: Value) -> str:
        """Returns the scopes and the operation that a value was traced from. An instruction that XLA adds takes those of its operand."""
        found = self.find(value)
        return self._op_name(*found, value.index) if found is not None else ""

    def _op_name(self, where: syntax.Computation, instruction: syntax.Instruction, index: str) -> str:
        for _ in range(_NAMELESS_STEPS):
            names = syntax.op_names(instruction.op_name)
            element = int(index.split(",")[0] or 0) if index else 0
            if names[0]:
                return names[element] if element < len(names) else names[0]
            call = self._flow.calls.get(where.name)
            if instruction.opcode == "parameter" and call is not None and call.site and call.caller:
                where, instruction = call.caller, call.site  # the parameter of a loop's body is the loop's tuple
                continue
            named = [where.by_name[operand] for operand in instruction.operands if operand in where.by_name]
            if not named:
                return ""
            instruction = named[element] if element < len(named) else named[0]
        return ""

    def role(self, value: Value) -> str:
        """Returns one of `roles.TEMPORARY`."""
        found = self.find(value)
        if found is None:
            return roles_lib.OTHER
        where, instruction = found
        name = self._op_name(where, instruction, value.index)
        arrays = syntax.arrays(value.type)
        elements = sum(array.elements for array in arrays)
        if role := self._collective(where, instruction, elements):
            return role
        scope = next((role for pattern, role in _SCOPES if re.search(pattern, name)), roles_lib.OTHER)
        is_carried = instruction.opcode in ("while", "parameter")  # a loop's copy of an array that it changes
        if not is_carried and scope != roles_lib.UPDATE and self._is_weight(where, instruction):
            return roles_lib.GATHERED
        # What a model's own nn.remat computes again is an activation, though the backward pass does it.
        is_backward = "transpose(" in name and "rematted_computation" not in name
        may_be_gradient = is_backward or "/clip" in name or scope == roles_lib.LOSS or is_carried
        if may_be_gradient and any(_key(array.dims) in self._shapes for array in arrays):
            # An activation may have a weight's shape by chance. But a later matmul depends on it, and on a gradient none does.
            is_gradient = is_carried or not self._is_multiplied(where, instruction, value.index)
            return roles_lib.GRADIENTS if is_gradient else scope
        return scope

    def _is_multiplied(self, where: syntax.Computation, instruction: syntax.Instruction, index: str) -> bool:
        """Returns whether a matmul or an attention in the same computation depends on a value."""
        if where.name not in self._multiplied:
            found: set[str] = set()
            for earlier in reversed(where.instructions):
                if any(user.name in found or self._is_matmul(user) for user in where.users.get(earlier.name, ())):
                    found.add(earlier.name)
            self._multiplied[where.name] = found
        known = self._multiplied[where.name]
        users = where.users.get(instruction.name, ())
        own = [
            u
            for u in users
            if not index or u.opcode != "get-tuple-element" or u.number("index") == int(index.split(",")[0])
        ]
        return any(user.name in known or self._is_matmul(user) for user in own)

    def _is_matmul(self, instruction: syntax.Instruction) -> bool:
        if instruction.opcode == "fusion":
            return any(self._flow.module.mentions(called, *_MATMULS) for called in instruction.called)
        return instruction.opcode in _MATMULS or (
            instruction.opcode == "custom-call" and _LIBRARY_MATMULS.search(instruction.attributes) is not None
        )

    def _collective(self, where: syntax.Computation, instruction: syntax.Instruction, elements: int) -> str:
        kind = self._kind(instruction)
        if kind in _GATHERS:
            return roles_lib.GATHERED if self._is_weight(where, instruction) else roles_lib.COLLECTIVE_BUFFERS
        if kind in _REDUCTIONS:
            return roles_lib.GRADIENTS if elements >= _SMALL else roles_lib.OTHER
        return roles_lib.COLLECTIVE_BUFFERS if kind in _EXCHANGES else ""

    def _kind(self, instruction: syntax.Instruction) -> str:
        """Returns an opcode without -start and -done. For a wrapper, returns the collective that it wraps."""
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if kind in ("async", "fusion"):
            wrapped = (*_GATHERS, *_REDUCTIONS, *_EXCHANGES)
            inside = (k for k in wrapped if any(self._flow.module.mentions(c, k) for c in instruction.called))
            return next(inside, kind)
        return kind

    def _is_weight(self, where: syntax.Computation, instruction: syntax.Instruction) -> bool:
        origins = hlo_flow.origins(self._flow, where, instruction.name)
        return bool(origins) and all(origin.name in self._weights for origin in origins)


def shapes(arguments: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> Mapping[tuple[int, ...], None]:
    """Returns the shapes that gradients may have: those of weights and moments.

    Args:
      arguments: (role, global shape, shape of a device's shard) of each argument.
    """
    found: dict[tuple[int, ...], None] = {}
    for role, shape, shard in arguments:
        if role in (roles_lib.PARAMS, roles_lib.MASTER, roles_lib.MOMENTS) and len(shape) > 1:
            sharded = [dim for dim, (n, m) in enumerate(zip(shape, shard)) if n != m]
            found |= dict.fromkeys((shape, shard, *((shape[d] // shard[d], *shard) for d in sharded)))
    return found


def _forms(shape: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Returns a shape, and those with neighbouring dims merged, each sorted."""
    joined: set[tuple[int, ...]] = {shape[:1]}
    for size in shape[1:]:
        joined = {(*form, size) for form in joined} | {(*form[:-1], form[-1] * size) for form in joined}
    return {_key(form) for form in joined if len(form) > 1}


def _key(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size != 1))
