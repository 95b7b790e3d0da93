"""Links programs that run one after the other into one module. This module makes what `syntax.parse` would return for a single program.

    ENTRY      the arguments, and a loop over the passes
    pass       the instructions of all programs in order; a program's parameters are the values that the programs before it returned

So what reads a program (collectives, attribution, matmuls, traffic) reads the programs of a step as if they were one.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.hlo import parameters, syntax

_LABEL = re.compile(r"\blinked_from=(\w+)")
_PASS, _UNTIL = "pass", "until"
_HERE, _WORD = "\0", "\1"  # marks, which no text of a program has


@dataclasses.dataclass(frozen=True)
class LinkedProgram:
    """One program in a row of programs."""

    module: syntax.Module  # the program; equal programs share one
    reads: Sequence[int]  # the numbers of the values that are its parameters
    writes: Sequence[int]  # the numbers of the values that it returns
    scope: str = ""  # a name to put before its operations' names
    # words of its operations' names -> what they are here. Programs that share a module have the names of the first.
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # the numbers of parameters by the path of their argument (`parameters.path_of`), where `reads` does not count them
    named: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def op_name(self, found: re.Match) -> str:
        """Returns the attribute `op_name` for a match of it."""
        name = re.sub(r"[\w.\-]+", lambda word: self.names.get(word[0], word[0]), found[1]) if self.names else found[1]
        return f'op_name="{self.scope}{name}"'


def link(
    programs: Sequence[LinkedProgram],
    arguments: Mapping[int, tuple[str, syntax.Array]],
    passes: int,
    *,
    kept: Collection[str] = (),
    after: Sequence[LinkedProgram] = (),
) -> syntax.Module:
    """Returns the programs as one module.

    Args:
      programs: in the order of execution.
      arguments: the path and the type of the values that no program returns, by number. Values of one path are one parameter, of the
        first one's type. A program that returns such a value replaces it for those that follow.
      passes: how often the programs run.
      kept: the paths whose memory is not reused.
      after: programs that run once, after all passes.
    """
    types: dict[str, syntax.Array] = {}
    for path, array in arguments.values():
        types.setdefault(path, array)
    index = {path: number for number, path in enumerate(types)}
    every, names = tuple(types.values()), tuple(f"argument.{number}" for number in index.values())
    entry = [
        syntax.Instruction(name, "parameter", (array,), (), _named(path), str(number))
        for number, (name, (path, array)) in enumerate(zip(names, types.items()))
    ]
    loop = f'condition=%{_UNTIL}, body=%{_PASS}, backend_config={{"known_trip_count":{{"n":"{passes}"}}}}'
    entry.append(syntax.Instruction("arguments", "tuple", every, names, ""))
    entry.append(syntax.Instruction("passes", "while", every, ("arguments",), loop))
    body = [syntax.Instruction("values", "parameter", every, (), "", "0")]
    values = {number: f"value.{place}" for place, number in enumerate(arguments)}
    for number, (path, array) in arguments.items():
        body.append(_element(values[number], array, "values", index[path]))
    forms: dict[Any, _Form] = {}
    for place, program in enumerate(programs):
        body += _instructions(program, f"p{place}", values, forms)
    body.append(syntax.Instruction("again", "tuple", every, (), ""))
    last = {number: f"last.{place}" for place, number in enumerate(arguments)}
    if after:
        entry += [_element(last[number], array, "passes", index[path]) for number, (path, array) in arguments.items()]
    for place, program in enumerate(after, len(programs)):
        entry += _instructions(program, f"p{place}", last, forms)
    made = {"main": entry, _PASS: body, _UNTIL: []}
    owners = {f"p{place}": program for place, program in enumerate((*programs, *after))}
    names_of_all = [*made, *(f"{label}.{name}" for label, program in owners.items() for name in program.module.spans)]
    reused = {number: number for path, number in index.items() if path not in kept}
    found = _Linked("", "", dict.fromkeys(names_of_all, (0, 0)), "main", owners=owners, reused=reused)
    found._read.update({name: syntax.Computation(name, tuple(instructions)) for name, instructions in made.items()})
    return found


@dataclasses.dataclass(frozen=True)
class _Linked(syntax.Module):
    """A module whose computations are those of programs; the label of a program is before their own name."""

    owners: Mapping[str, LinkedProgram] = dataclasses.field(default_factory=dict)  # the programs by label
    reused: Mapping[int, int] = dataclasses.field(default_factory=dict)  # the parameters whose memory is reused

    def computation(self, name: str) -> syntax.Computation:
        if name not in self._read:
            label, _, own = name.partition(".")
            inner = self.owners[label].module.computation(own)
            linked = tuple(_linked(instruction, self.owners[label], label) for instruction in inner.instructions)
            self._read[name] = syntax.Computation(name, linked)
        return self._read[name]

    def origin(
        self, where: syntax.Computation, instruction: syntax.Instruction
    ) -> tuple[syntax.Module, syntax.Computation, syntax.Instruction]:
        if not (label := label_of(instruction)):
            return self, where, instruction
        module = self.owners[label].module
        own = where.name.removeprefix(f"{label}.")
        found = module.entry if own == where.name else module.computation(own)
        return module, found, found.by_name[instruction.name.removeprefix(f"{label}.")]

    def mentions(self, name: str, *opcodes: str) -> bool:
        label, _, own = name.partition(".")
        if label in self.owners:
            return self.owners[label].module.mentions(own, *opcodes)
        return any(instruction.opcode in opcodes for instruction in self._read[name].instructions)

    @functools.cached_property
    def aliases(self) -> Mapping[int, int]:
        """Returns the parameters whose memory is reused: a step of several programs deletes its arguments as they are replaced."""
        return self.reused

    def source(self, instruction: syntax.Instruction, skip: re.Pattern = syntax.LIBRARIES) -> str:
        label = label_of(instruction)
        return self.owners[label].module.source(instruction, skip) if label else ""


def label_of(instruction: syntax.Instruction) -> str:
    """Returns the label of the program in a row that an instruction is of ("p0", "p1", ...); "" if it is of none."""
    found = _LABEL.search(instruction.attributes)
    return found[1] if found else ""


def modules(module: syntax.Module) -> dict[str, syntax.Module]:
    """Returns the programs of a row by label, in their order; {} of a module that is none."""
    return {label: own.module for label, own in module.owners.items()} if isinstance(module, _Linked) else {}


def program_of(module: syntax.Module, instruction: syntax.Instruction) -> tuple[str, str]:
    """Returns the name of the program that an instruction of a module is of, and the instruction's name there.

    Programs that share a module have its name.
    """
    label = label_of(instruction)
    if not label or not isinstance(module, _Linked):
        return module.name, instruction.name
    return module.owners[label].module.name, instruction.name.removeprefix(f"{label}.")


class _Form(NamedTuple):
    """What programs of one module have in common, whatever their label and the names of their operations."""

    # Their names, the paths of their arguments, and their numbers in `LinkedProgram.reads`
    parameters: list[tuple[str, str, int]]
    # The others, with a mark in place of the label, and marks around words that have names
    instructions: list[syntax.Instruction]

    @classmethod
    def of(cls, program: LinkedProgram) -> "_Form":
        """Returns the form of a program."""
        marked = dataclasses.replace(program, names={word: f"{_WORD}{word}{_WORD}" for word in program.names})
        found = []
        for number, parameter in program.module.entry.parameters.items():
            path = parameters.path_of(parameter.op_name)
            argument = re.search(r"/(\d+)$", path)  # values[3]: unread ones are dropped
            found.append((parameter.name, path, int(argument[1]) if argument else number))
        own = [one for one in program.module.entry.instructions if one.opcode != "parameter"]
        return cls(found, [_linked(one, marked, _HERE) for one in own])


def _instructions(
    program: LinkedProgram, label: str, values: dict[int, str], forms: dict[Any, _Form]
) -> list[syntax.Instruction]:
    """Returns the instructions of a program in a row, and adds what it returns to `values`, by number."""
    key = id(program.module), program.scope, frozenset(program.names)
    form = forms[key] if key in forms else forms.setdefault(key, _Form.of(program))
    entry, names, found = program.module.entry, {}, []
    for name, path, number in form.parameters:
        own = program.named.get(path)
        names[name] = values[program.reads[number] if own is None else own]
    for one in form.instructions:
        names[one.name] = f"{label}.{one.name}"
        operands = tuple(names.get(operand, operand) for operand in one.operands)
        attributes = one.attributes.replace(_HERE, label)
        for word, own_name in program.names.items():
            attributes = attributes.replace(f"{_WORD}{word}{_WORD}", own_name)
        found.append(syntax.Instruction(names[one.name], one.opcode, one.arrays, operands, attributes, one.argument))
    root = entry.root
    if root.opcode == "tuple":
        values.update(zip(program.writes, (names[operand] for operand in root.operands)))
    elif len(program.writes) == 1:
        values[program.writes[0]] = names[root.name]
    else:
        for index, (number, array) in enumerate(zip(program.writes, root.arrays)):
            values[number] = f"{label}.output.{index}"
            found.append(_element(values[number], array, names[root.name], index))
    return found


def _linked(instruction: syntax.Instruction, program: LinkedProgram, label: str) -> syntax.Instruction:
    """Returns an instruction that calls linked computations, with its name in the row and the label of its program."""
    attributes = syntax.OP_NAME.sub(program.op_name, instruction.attributes)
    if instruction.called:
        attributes = syntax.CALLED.sub(lambda found: f"{found[1]}=%{label}.{found[2]}", attributes)
        attributes = syntax.BRANCHES.sub(
            lambda found: f"branch_computations={{{_labelled(found[1], label)}}}", attributes
        )
    return dataclasses.replace(instruction, attributes=f"{attributes}, linked_from={label}")


def _labelled(names: str, label: str) -> str:
    return re.sub(r"%?([\w.\-]+)", rf"%{label}.\1", names)


def _element(name: str, array: syntax.Array, of: str, index: int) -> syntax.Instruction:
    return syntax.Instruction(name, "get-tuple-element", (array,), (of,), f", index={index}")


def _named(path: str) -> str:
    """Returns the attributes of a parameter for a leaf, in the form that JAX gives it."""
    first, *rest = path.split("/")
    keys = "".join(f"[\\'{key}\\']" for key in rest)
    return f', metadata={{op_name="{first}{keys}"}}'
