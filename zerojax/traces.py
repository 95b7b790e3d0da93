"""Reads traced programs (jaxprs). This module walks their equations and the programs inside these, and tells primitives apart.

Who reads a trace asks one question of its own; how an equation is run, where a call's program is, and which primitives move data is here.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax
import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source

Atom = jex.Var | jex.Literal
Program = jex.ClosedJaxpr | jex.Jaxpr

CAST = "convert_element_type"
# The elements of the result are those of the operand: all in another order, or some, or some several times.
PERMUTATIONS = frozenset("reshape squeeze expand_dims transpose rev copy copy_p".split())
MOVES = PERMUTATIONS | {"slice", "broadcast_in_dim"}
MARKS = frozenset("name stop_gradient sharding_constraint pvary".split())  # the operand itself
ELEMENTWISE = MARKS | frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp "
    "clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma "
    "population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta".split()
)
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
MATMULS = frozenset("dot_general conv_general_dilated ragged_dot ragged_dot_general".split())
CHECKPOINTS = frozenset("checkpoint remat remat2".split())
INLINED = frozenset(
    "jit pjit closed_call core_call".split()
)  # calls that say nothing of how their program is differentiated
# Their arguments are those of a program inside, one to one.
CALLS = CHECKPOINTS | INLINED | frozenset("custom_jvp_call custom_vjp_call".split())


EXCHANGE = "zerojax_exchange"  # the name of a call that reads other devices' tokens, in a trace that is only read
_is_read: contextvars.ContextVar[bool] = contextvars.ContextVar("is_read", default=False)


@contextlib.contextmanager
def held(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Gives a context variable a value inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Says that what is traced inside is only read: attention over sharded tokens is a call named EXCHANGE, and no function is in parts."""
    with held(_is_read, True), _traced(True):
        yield


def is_read() -> bool:
    """Returns whether what is traced here is only read."""
    return _is_read.get()


_traced = jax.make_user_context(False)  # a jitted function is traced anew


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants. Newer JAX has one class for jaxprs with constants and without."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def is_program(value: object) -> bool:
    """Returns whether a value is a jaxpr, closed or not."""
    return isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))


def is_var(atom: object) -> bool:
    """Returns whether an atom is a variable and no literal."""
    return isinstance(atom, jex.Var)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among variables and literals, each once."""
    return list(dict.fromkeys(atom for atom in atoms if is_var(atom)))


def programs(eqn: jex.JaxprEqn) -> Iterator[Any]:
    """Yields the programs among an equation's parameters; those of a `cond` are in a tuple."""
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if is_program(part):
                yield part


def equations(program: Program) -> Iterator[jex.JaxprEqn]:
    """Yields each equation of a program, and of those inside it."""
    for eqn in opened(program)[0].eqns:
        yield eqn
        for inner in programs(eqn):
            yield from equations(inner)


def constants(program: Program) -> Iterator[Any]:
    """Yields the constants of a program and of those inside it, which its text does not show."""
    yield from opened(program)[1]
    for eqn in opened(program)[0].eqns:
        for inner in programs(eqn):
            yield from constants(inner)


def called(eqn: jex.JaxprEqn) -> Any:
    """Returns the program that a call runs, or None for another equation."""
    return next(programs(eqn), None) if eqn.primitive.name in CALLS else None


def bodies(eqn: jex.JaxprEqn) -> list[tuple[Any, Sequence[Any]]]:
    """Returns the programs of a call, a loop or a branch, each with the atoms that it is first given."""
    params, given = eqn.params, eqn.invars
    if (inner := called(eqn)) is not None:
        return [(inner, given)]
    if eqn.primitive.name in ("scan", "shard_map"):
        return [(params["jaxpr"], given)]
    if eqn.primitive.name == "cond":
        return [(branch, given[1:]) for branch in params["branches"]]
    if eqn.primitive.name == "while":
        own, rest = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return [(params["cond_jaxpr"], [*given[:own], *given[rest:]]), (params["body_jaxpr"], given[own:])]
    return []


def scan_counts(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Returns how many constants and how many carried values a scan is first given, in this order; rows follow.

    Rows have a dim less inside. JAX releases name the counts differently.
    """
    body = opened(eqn.params["jaxpr"])[0]

    def plain(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(len(one.aval.shape) == len(other.aval.shape) for one, other in zip(outside, inside))

    carried = plain(eqn.outvars, body.outvars)
    return plain(eqn.invars, body.invars) - carried, carried


def _value(value: object, aval: Any) -> Any:
    return value


def run(
    program: Program,
    inputs: Sequence[Any],
    apply: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = _value,
) -> list[Any]:
    """Returns the results of a program, whatever its values are.

    Args:
      program: a jaxpr, closed or not.
      inputs: one for each argument.
      apply: `apply(equation, inputs)` returns the results of an equation.
      constant: `constant(value, type)` returns what stands for a constant or a literal.
    """
    jaxpr, consts = opened(program)
    known = dict(zip(jaxpr.invars, inputs))
    for var, const in zip(jaxpr.constvars, consts):
        known[var] = constant(const, var.aval)

    def read(atom: Atom) -> Any:
        return constant(atom.val, atom.aval) if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, apply(eqn, [read(atom) for atom in eqn.invars])))
    return [read(atom) for atom in jaxpr.outvars]


def replaced(program: Program, change: Callable[[jex.JaxprEqn], jex.JaxprEqn]) -> Any:
    """Returns a program with `change(equation)` in place of each equation, also of those inside it."""

    def of_value(value: Any) -> Any:
        if type(value) is tuple:  # branches of a cond
            return tuple(map(of_value, value))
        return replaced(value, change) if is_program(value) else value

    def of_equation(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        return change(eqn.replace(params={name: of_value(value) for name, value in eqn.params.items()}))

    if not isinstance(program, jex.Jaxpr):
        return program.replace(jaxpr=replaced(program.jaxpr, change))
    return program.replace(eqns=[of_equation(eqn) for eqn in program.eqns])


def bind(eqn: jex.JaxprEqn, inputs: Sequence[Any], params: Mapping[str, Any] | None = None) -> Sequence[Any]:
    """Returns the results of an equation for these arrays; `params` are in place of its own."""
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params if params is None else params))
    return results if eqn.primitive.multiple_results else [results]


def acts(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an operation does something beside its results, such as printing. Collectives have an effect in name only."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def live(eqns: Iterable[jex.JaxprEqn], needed: Iterable[Any]) -> list[jex.JaxprEqn]:
    """Returns the operations whose results are read, directly or by others."""
    needed, kept = set(variables(needed)), []
    for eqn in reversed(list(eqns)):
        if acts(eqn) or any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(variables(eqn.invars))
    return kept[::-1]


def trimmed(closed: jex.ClosedJaxpr, results: Sequence[Any]) -> jex.ClosedJaxpr:
    """Returns a trace that makes some of its variables, or literals, without operations and arguments that they do not need."""
    jaxpr = closed.jaxpr
    eqns = live(jaxpr.eqns, results)
    read = set(variables([*results, *(atom for eqn in eqns for atom in eqn.invars)]))
    invars = [var for var in jaxpr.invars if var in read]
    return part(invars, list(results), eqns, dict(zip(jaxpr.constvars, closed.consts, strict=True)))


def part(
    reads: Sequence[Any],
    writes: Sequence[Atom],
    eqns: Sequence[jex.JaxprEqn],
    consts: Mapping[Any, Any] = MappingProxyType({}),
) -> jex.ClosedJaxpr:
    """Returns a program of some operations that reads and writes these variables; `consts` has the values of others."""
    info = jex.DebugInfo("zerojax", "part", None, None)  # JAX deprecates programs without one
    return jex.ClosedJaxpr(jex.Jaxpr(list(consts), reads, writes, eqns, debug_info=info), list(consts.values()))


def needs(jaxpr: jex.Jaxpr) -> list[set[int]]:
    """Returns for each result of a trace the numbers of the arguments that `trimmed` leaves."""
    found: dict[Any, set[int]] = {var: {number} for number, var in enumerate(jaxpr.invars)}
    acting: set[int] = set()
    for eqn in jaxpr.eqns:
        own = set().union(*(found.get(var, ()) for var in variables(eqn.invars)))
        found.update(dict.fromkeys(eqn.outvars, own))
        acting |= own if acts(eqn) else set()
    return [acting.union(*(found.get(var, ()) for var in variables([atom]))) for atom in jaxpr.outvars]


@contextlib.contextmanager
def scopes(eqn: jex.JaxprEqn, names: Any = None) -> Iterator[None]:
    """Gives what is traced inside the line of code, the context and the names of an equation, or these `names` in their place."""
    stack = source.current_name_stack() + (eqn.source_info.name_stack if names is None else names)
    with source.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def line(eqn: jex.JaxprEqn) -> str:
    """Returns the line of code that an equation comes from, as `file:line (function)`; "" if none is known.

    It is the innermost one outside of this library and of installed ones, such as a call of a Flax module, if there is any.
    """
    frames: Sequence[Any] = eqn.source_info.traceback.frames if eqn.source_info.traceback is not None else ()
    own = next((frame for frame in frames if not frame.file_name.startswith((*_LIBRARIES, "<"))), None)
    if own is None:
        return source.summarize(eqn.source_info)
    return f"{own.file_name}:{own.line_num} ({own.function_name})"


_LIBRARIES = tuple(
    {os.path.dirname(__file__), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
    | {os.path.dirname(str(module.__file__)) for module in (jax, flax)}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A program, or a call or a body in it; one program that is called twice has two frames."""

    program: Any  # a jaxpr, closed or not
    caller: "Frame | None" = None  # the frame of the equation that runs it
    call: Any = None  # that equation
    given: Sequence[Any] = ()  # the caller's atoms that its arguments are, in a loop those of the first round
    like: "Frame | None" = None  # the frame of the same function traced for other shapes

    @property
    def jaxpr(self) -> jex.Jaxpr:
        """Returns the program without its constants."""
        return opened(self.program)[0]

    @functools.cached_property
    def makers(self) -> dict[Any, Any]:
        """Returns the equation that makes each variable."""
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    @functools.cached_property
    def inputs(self) -> dict[Any, int]:
        """Returns the number of each argument."""
        return {var: number for number, var in enumerate(self.jaxpr.invars)}

    @functools.cached_property
    def constants(self) -> dict[Any, Any]:
        """Returns the value of each constant."""
        return dict(zip(self.jaxpr.constvars, opened(self.program)[1]))

    @functools.cached_property
    def _inside(self) -> "dict[int, list[Frame]]":
        return {}

    @functools.cached_property
    def _twins(self) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Returns the equations of `like` by the ids of those of this program, and its variables by those of this program."""
        if self.like is None:
            return {}, {}
        own, other = self.jaxpr, self.like.jaxpr
        if [eqn.primitive for eqn in own.eqns] != [eqn.primitive for eqn in other.eqns]:
            return {}, {}
        pairs = [*zip(own.invars, other.invars)]
        for eqn, twin in zip(own.eqns, other.eqns):
            pairs += zip(eqn.outvars, twin.outvars)
        return dict(zip(map(id, own.eqns), other.eqns)), dict(pairs)

    def inside(self, eqn: jex.JaxprEqn) -> "list[Frame]":
        """Returns the frames of what a call, a loop or a branch runs."""
        if id(eqn) not in self._inside:
            twin, found = self._twins[0].get(id(eqn)), bodies(eqn)
            likes: Sequence[Frame | None] = [None] * len(found)
            if twin is not None and self.like is not None:
                likes = self.like.inside(twin)
            self._inside[id(eqn)] = [Frame(body, self, eqn, given, like) for (body, given), like in zip(found, likes)]
        return self._inside[id(eqn)]

    def equations(self) -> "Iterator[tuple[Frame, Any]]":
        """Yields each equation, with its frame, of the program and of all that it runs; those inside an equation come before it."""
        for eqn in self.jaxpr.eqns:
            for inner in self.inside(eqn):
                yield from inner.equations()
            yield self, eqn

    def origin(self, atom: Atom, through: Collection[str] = ()) -> "tuple[Frame, Any]":
        """Returns where a value comes from: a literal, a constant, an argument of the outermost program, or a variable that no call makes.

        Goes back through calls and, by their first operand, through equations of the primitives `through`.
        """
        frame = self
        while is_var(atom):
            eqn = frame.makers.get(atom)
            if atom in frame.inputs and frame.caller is not None:
                frame, atom = frame.caller, frame.given[frame.inputs[atom]]
            elif eqn is not None and called(eqn) is not None:
                (inner,), number = frame.inside(eqn), eqn.outvars.index(atom)
                frame, atom = inner, inner.jaxpr.outvars[number]
            elif eqn is not None and eqn.primitive.name in through:
                atom = eqn.invars[0]
            else:
                break
        return frame, atom

    def lengths(self, atom: Any) -> list[tuple[int, int]] | None:
        """Returns the lengths of each dim of a variable, here and in `like`; None if that is not the same program but for shapes."""
        twin = self._twins[1].get(atom)
        if twin is None or len(twin.aval.shape) != len(atom.aval.shape):
            return None
        return [*zip(atom.aval.shape, twin.aval.shape)]

    def line(self, eqn: jex.JaxprEqn) -> str:
        """Returns the innermost line of the user's code that an equation comes from, as `file:line (function)`."""
        frame, text = self, line(eqn)
        while not text and frame.caller is not None:
            frame, text = frame.caller, line(frame.call)
        return text or "an unknown line"
