"""Traces blocks that are alike once. This module runs the first one's passes for those that follow, each with its own names.

A model has tens of equal layers, and tracing them, forward and backward, is most of what Python does before a first step. Whether two calls
depend on their weights and arguments alone cannot be seen from outside, so a class of Linen modules says it:

    class Layer(nn.Module):
        calls_are_alike = True  # two modules of equal fields differ in nothing but their weights

Such a class reads neither its name nor what changes between two calls. Like the static arguments of `jax.jit`, its fields are compared by
`==`. What zerojax adds to a block by its name (`recompute`, `offload`, adapters, fp8) is known, and blocks that differ in it are not alike.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source

from zerojax import traces, tree

CLAIM = "calls_are_alike"


@dataclasses.dataclass(eq=False)
class AlikeBlocks:
    """Blocks that are alike. `first` is the path of the first one, and `result` holds what of a block's result is no array."""

    first: str
    result: tree.NonArrays


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A block as a function `run(used weights, *arrays)`; `name` is its module's, and its weights are below `path`."""

    run: Callable[..., Any]
    name: str
    path: str
    kind: AlikeBlocks

    def __call__(self, used: Mapping[str, Any], *values: Any) -> Any:
        return self.run(used, *values)


def description(module: nn.Module, method: str, weights: Sequence[str], given: tree.NonArrays) -> Hashable | None:
    """Returns what calls that are alike have in common, or None for a call that is not alike any other.

    Args:
      weights: the paths of the weights in the module.
      given: the arguments that are no arrays.
    """
    if not getattr(type(module), CLAIM, False):
        return None
    fields = [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name")]
    values = tuple((type(value), value) for value in (getattr(module, name) for name in fields))
    found = (type(module), method, values, tuple(weights), given.rest())
    try:
        hash(found)
    except TypeError:
        return None
    return found


class ReadsOthers(Exception):
    """A block reads an array of the trace around it, and nothing is known of that of the next one."""


class SharedPasses:
    """The two passes of blocks that are alike, traced for the first one.

    Args:
      body: that of the first block.
      vjp: `vjp(stored, sent, arrays)` -> (outputs, leaves, arrivals, structure), see `overlap.BlockCall.vjp`.
      pulled: `pulled(structure, leaves, cotangents)` -> (gradients by path, gradients of arrays), see `overlap.BlockCall.pulled`.
    """

    def __init__(self, body: Body, vjp: Callable[..., Any], pulled: Callable[..., Any]):
        self._body, self._vjp, self._pulled = body, vjp, pulled
        self._forward = Once(self._traced_forward)

    def vjp(
        self, own: Body, stored: Mapping[str, Any], sent: Mapping[str, Any], arrays: Iterable[jax.Array]
    ) -> tuple[Any, list[Any], tuple[int | None, ...], Any]:
        """Returns `vjp` of a block; its structure is for `pulled`.

        Raises:
          ReadsOthers: the block must be traced alone.
        """
        paths = [self._body.path + path.removeprefix(own.path) for path in stored]
        args = (dict(zip(paths, stored.values())), dict(zip(paths, sent.values())), tuple(arrays))
        (outputs, kept), (arrivals, backward) = self._forward(args, _Names(self._body, own))
        arrived, rest = jax.tree.leaves(sent), iter(kept)
        return outputs, [next(rest) if number is None else arrived[number] for number in arrivals], arrivals, backward

    def pulled(
        self, own: Body, backward: "Once", leaves: Sequence[Any], cotangents: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        """Returns `pulled` of a block."""
        (grads, inputs), _ = backward((leaves, cotangents), _Names(self._body, own))
        return {own.path + path.removeprefix(self._body.path): grad for path, grad in grads.items()}, inputs

    def _traced_forward(self, stored: Any, sent: Any, arrays: Any) -> tuple[Any, Any]:
        outputs, leaves, arrivals, structure = self._vjp(stored, sent, arrays)
        backward = Once(lambda leaves, cotangents: (self._pulled(structure, leaves, cotangents), None))
        return (outputs, [leaf for leaf, own in zip(leaves, arrivals) if own is None]), (arrivals, backward)


@dataclasses.dataclass(frozen=True)
class _Names:
    """The names of a block in place of those of the first one."""

    first: Body
    own: Body
    _stacks: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def stack(self, stack: Any) -> Any:
        """Returns the names of an equation."""
        if self.first.path == self.own.path:
            return stack
        if stack not in self._stacks:
            self._stacks[stack] = source.NameStack(
                tuple(part._replace(name=self._of(part.name)) for part in stack.stack)
            )
        return self._stacks[stack]

    def _of(self, name: str) -> str:
        if name == self.first.name:
            return self.own.name
        below = name.removeprefix(f"{self.first.path}/")
        return name if below == name else f"{self.own.path}/{below}"

    def inside(self, program: Any) -> Any:
        """Returns a checkpoint's program with these names."""
        return program.replace(eqns=[self._equation(eqn) for eqn in program.eqns])

    def params(self, eqn: jex.JaxprEqn) -> dict[str, Any]:
        """Returns an equation's parameters, with these names in the program of a checkpoint; a nested `jax.jit` has names of its own."""
        if self.first.path == self.own.path or eqn.primitive.name not in traces.CHECKPOINTS:
            return eqn.params
        return {**eqn.params, "jaxpr": self.inside(eqn.params["jaxpr"])}

    def _equation(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        info = eqn.source_info.replace(name_stack=self.stack(eqn.source_info.name_stack))
        return eqn.replace(source_info=info, params=self.params(eqn))


class Once:
    """A function of trees of arrays that returns such a tree and what is none. It is traced once for arrays of equal types, by the rules
    of `jax.jit`, and each call puts the trace into the trace around it."""

    def __init__(self, function: Callable[..., tuple[Any, Any]]):
        self._function, self._jitted = function, jax.jit(self._flat)
        self._structure: Any = None
        self._traced: tuple[Any, Any] = (None, None)  # the structure and the rest of the last trace's result
        self._results: dict[int, tuple[Any, Any]] = {}

    def __call__(self, args: Any, names: _Names) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(args)
        self._structure = structure
        program = self._jitted.trace(*leaves).jaxpr
        jaxpr, consts = traces.opened(program)
        if len(jaxpr.invars) > len(leaves) or any(isinstance(const, jax.core.Tracer) for const in consts):
            raise ReadsOthers
        structure, rest = self._results.setdefault(id(program), self._traced)  # `_jitted` keeps the program

        def apply(eqn: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            with traces.scopes(eqn, names.stack(eqn.source_info.name_stack)):
                return traces.bind(eqn, inputs, names.params(eqn))

        return jax.tree.unflatten(structure, traces.run(program, leaves, apply)), rest

    def _flat(self, *leaves: Any) -> list[Any]:
        result, rest = self._function(*jax.tree.unflatten(self._structure, leaves))
        leaves_of_result, structure = jax.tree.flatten(result)
        self._traced = structure, rest
        return leaves_of_result
