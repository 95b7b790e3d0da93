"""Reads the text of a compiled program: `compiled.as_text()` for GPUs, TPUs and CPUs. This module knows only HLO's grammar.

    HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, ...
    FileNames / FunctionNames / FileLocations / StackFrames       numbered tables, for `stack_frame_id`
    %body (...) -> ... {                                          computations, in order of their first use
      %name = dtype[dims]{layout} opcode(%operands), attribute=value, metadata={op_name="..."}, backend_config={...}
    }
    ENTRY %main (...) -> ... { ... }                              instructions are in execution order

The text of a 70B model is tens of megabytes. It is cut into computations once, and each computation is parsed at its first use.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", re.MULTILINE)
_CONTINUED = re.compile(r'\n(?="|\}[^\n])')  # the attributes of a Pallas kernel for TPUs take several lines
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_REFERENCE = re.compile(r"(?:^|[\s,*/(])%?([A-Za-z_][\w.\-]*)(?=\s*(?:,|$))")
CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_roles = functools.lru_cache(maxsize=2**16)(CALLED.findall)  # asked for several times
_FIELD = re.compile(r"(\w+)=(\d+)")
_HOST_MEMORY = "S(5)"

# Libraries whose frames are not the user's source of an operation.
LIBRARIES = re.compile(r"-packages/(jax|jaxlib|flax|optax|chex|haiku|equinox)/")


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """The type of one array: its dtype in HLO (bf16, f32, s32, pred), and its dims on one device."""

    dtype: str
    dims: tuple[int, ...]
    is_on_host: bool = False

    @property
    def elements(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Returns the bytes, without the padding of tiled layouts."""
        return -(-self.elements * bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line. `arrays` are the arrays of its output, with tuples flattened. `attributes` is the text after the operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    argument: str = ""  # the text between the parentheses: a parameter's number, a constant's value

    @property
    def op_name(self) -> str:
        """Returns the named scopes and the primitive that JAX traced it from, or ""."""
        found = OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Returns the names of the computations that it runs."""
        branches = BRANCHES.search(self.attributes) if "branch" in self.attributes else None
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return (*self.computation_roles.values(), *names)

    @property
    def computation_roles(self) -> dict[str, str]:
        """Returns {"body": name, "condition": name}, {"calls": name} and the like."""
        return dict(_roles(self.attributes))

    @property
    def known_trip_count(self) -> int | None:
        """Returns how often a `while` runs, or None if the text does not contain it."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def elements(self) -> int:
        """Returns the elements of all its arrays."""
        return sum(array.elements for array in self.arrays)

    def number(self, key: str) -> int | None:
        """Returns an attribute `key=7` as a number."""
        found = re.search(rf"\b{key}=(\d+)", self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, in execution order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Returns the instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        """Returns each instruction's position in the order."""
        return {instruction.name: index for index, instruction in enumerate(self.instructions)}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Returns the instructions that read a value, by the value's name."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    def behind(self, *names: str) -> set[str]:
        """Returns the names of these instructions, and of all that they read."""
        pending, found = [*names], set[str]()
        while pending:
            name = pending.pop()
            if name not in found and name in self.by_name:
                found.add(name)
                pending.extend(self.by_name[name].operands)
        return found

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Returns the parameters by number."""
        return {int(i.argument): i for i in self.instructions if i.opcode == "parameter"}

    @functools.cached_property
    def elements(self) -> Mapping[int, tuple[str, ...]]:
        """Returns the names of the first parameter's elements (it is a tuple), by index."""
        tuple_name = self.parameters[0].name if 0 in self.parameters else ""
        found: dict[int, list[str]] = {}
        for user in self.users.get(tuple_name, ()):
            if user.opcode == "get-tuple-element":
                found.setdefault(user.number("index") or 0, []).append(user.name)
        return {index: tuple(names) for index, names in found.items()}

    @property
    def root(self) -> Instruction:
        """Returns the instruction whose value the computation returns. It is the last one."""
        return self.instructions[-1]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its text, its header, each computation's span of the text, and the entry's name."""

    text: str
    header: str
    spans: Mapping[str, tuple[int, int]]
    entry_name: str
    _read: dict[str, Computation] = dataclasses.field(default_factory=dict, compare=False)
    # What readers have found out about it
    known: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    def origin(self, where: Computation, instruction: Instruction) -> "tuple[Module, Computation, Instruction]":
        """Returns the program that an instruction was compiled in, with its computation and its text there."""
        return self, where, instruction

    def computation(self, name: str) -> Computation:
        """Returns one computation. Parses it at the first call."""
        if name not in self._read:
            start, end = self.spans[name]
            self._read[name] = Computation(name, tuple(_instructions(self.text[start:end])))
        return self._read[name]

    def mentions(self, name: str, *opcodes: str) -> bool:
        """Returns whether a computation's own text contains one of the opcodes, without parsing it."""
        start, end = self.spans.get(name, (0, 0))
        return any(self.text.find(f" {opcode}(", start, end) >= 0 for opcode in opcodes)

    @property
    def entry(self) -> Computation:
        """Returns the computation that the program starts with."""
        return self.computation(self.entry_name)

    @property
    def name(self) -> str:
        """Returns the program's name, such as "jit_train_step"."""
        return self.header.removeprefix("HloModule ").partition(",")[0].strip()

    @functools.cached_property
    def aliases(self) -> Mapping[int, int]:
        """Returns {first index of an output: parameter whose memory it reuses}: the donated parameters."""
        start = self.header.find("input_output_alias={")
        end = self.header.find(" }", start)
        found = _ALIAS.findall(self.header[start:end]) if start >= 0 else []
        return {int(output.split(",")[0] or 0): int(parameter) for output, parameter in found}

    @functools.cached_property
    def _tables(self) -> Mapping[str, Mapping[int, str]]:
        head = self.text[: min((start for start, _ in self.spans.values()), default=0)]
        found = re.findall(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", head, re.MULTILINE)
        return {name: {int(n): value for n, value in re.findall(r"^(\d+) (.*)$", lines, re.M)} for name, lines in found}

    def source(self, instruction: Instruction, skip: re.Pattern = LIBRARIES) -> str:
        """Returns "file:line in function" of the innermost frame outside the libraries, or ""."""
        frame = instruction.number("stack_frame_id")
        if not frame:
            old = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
            return f"{old[1]}:{old[2]}" if old else ""
        frames = self._tables.get("StackFrames", {})
        # The printer adds 1 to a parent's number: 1 is no parent, and a parent never equals its child.
        shift = 1 if _fields(frames.get(1, "")).get("parent_frame_id") == 1 else 0
        innermost = ""
        while frame in frames:
            fields = _fields(frames[frame])
            location = self._location(fields.get("file_location_id", 0))
            innermost = innermost or location
            if location and not skip.search(location):
                return location
            frame = fields.get("parent_frame_id", 0) - shift
        return innermost

    def _location(self, number: int) -> str:
        fields = _fields(self._tables.get("FileLocations", {}).get(number, ""))
        name = self._tables.get("FileNames", {}).get(fields.get("file_name_id", 0), "").strip('"')
        function = self._tables.get("FunctionNames", {}).get(fields.get("function_name_id", 0), "").strip('"')
        return f"{name}:{fields.get('line', 0)} in {function}" if name else ""


@functools.lru_cache(maxsize=1)  # buffers and collectives are read from the same text
def parse(text: str) -> Module:
    """Reads a program's text. Raises ValueError if it is not HLO."""
    text = _CONTINUED.sub(" ", text)
    spans, entry = {}, ""
    for found in _COMPUTATION.finditer(text):
        end = text.find("\n}", found.end())
        spans[found[2]] = (found.end() + 1, len(text) if end < 0 else end)
        entry = found[2] if found[1] else entry
    if not entry:
        raise ValueError("hlo: the text has no ENTRY computation; pass the text of compiled.as_text()")
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    return Module(text, header[0] if header else "", spans, entry)


def bits(dtype: str) -> int:
    """Returns the bits of one element.

    >>> bits("bf16"), bits("f8e4m3fn"), bits("pred")
    (16, 8, 8)
    """
    number = re.match(r"[a-z]+?(\d+)", dtype)
    return 8 if dtype == "pred" else int(number[1]) if number else 0


@functools.lru_cache(maxsize=2**16)  # a program has few types
def arrays(text: str) -> tuple[Array, ...]:
    """Returns the arrays of a type, with tuples flattened."""
    return tuple(
        Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), _HOST_MEMORY in layout)
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def op_names(op_name: str) -> tuple[str, ...]:
    """Returns the names that XLA joined when it combined operations.

    >>> op_names("jit(f)/(layer_0/mul:layer_1/mul)")
    ('jit(f)/layer_0/mul', 'jit(f)/layer_1/mul')
    """
    for found in re.finditer(r"(?:^|/)\(", op_name):
        parts, end = _split_group(op_name, found.end())
        if len(parts) > 1:
            before, after = op_name[: found.end() - 1], op_name[end:]
            return tuple(name for part in parts for name in op_names(before + part + after))
    return (op_name,)


def _split_group(text: str, start: int) -> tuple[list[str], int]:
    """Splits "a:b)rest" at the colons outside inner parentheses. Returns the parts and the position of the rest."""
    parts, depth, begin = [], 0, start
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")" and depth:
            depth -= 1
        elif text[position] == ")" or (text[position] == ":" and not depth):
            parts.append(text[begin:position])
            begin = position + 1
            if text[position] == ")":
                return parts, begin
    return [], len(text)


def _instructions(block: str) -> Iterator[Instruction]:
    """Yields the instructions with the root last: parameters that nothing reads may stand after it."""
    root = None
    for line in block.split("\n"):
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        is_root, name, type_text, opcode, rest = found.groups()
        argument, attributes = _split_operands(rest)
        operands = () if opcode in ("constant", "parameter", "iota") else tuple(_REFERENCE.findall(argument))
        own = Instruction(name, opcode, arrays(type_text), operands, attributes, argument)
        if is_root:
            root = own
        else:
            yield own
    if root is not None:
        yield root


def _split_operands(rest: str) -> tuple[str, str]:
    """Splits "%a, %b), attributes" at the parenthesis that ends the operands."""
    end = rest.find(")")
    while end >= 0 and rest.count("(", 0, end) != rest.count(")", 0, end):
        end = rest.find(")", end + 1)
    return (rest[:end], rest[end + 1 :]) if end >= 0 else (rest, "")


def _fields(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in _FIELD.findall(text)}
