"""Traces blocks that are alike once. This module puts the trace of the first one in for each of the others, with its own names.

A model has tens of equal layers, and tracing them, forward and backward, is most of what Python does before a first step. Whether two calls
depend on their weights and arguments alone cannot be seen from outside, so a class of Linen modules says it:

    class Layer(nn.Module):
        calls_are_alike = True  # two modules of equal fields differ in nothing but their weights

Such a class reads neither its name nor what changes between two calls. Like the static arguments of `jax.jit`, its fields are compared by
`==`. What zerojax adds to a block by its name (`recompute`, `offload`, adapters, fp8) is known, and blocks that differ in it are not alike.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source

from zerojax import traces, tree

CLAIM = "calls_are_alike"


# f(path of a block, names of its weights) -> what is equal for blocks in which an interceptor does the same; see `intercepting`
Claim = Callable[[str, Sequence[str]], Hashable]
_claims: contextvars.ContextVar[tuple[Claim, ...]] = contextvars.ContextVar("claims", default=())


@contextlib.contextmanager
def intercepting(interceptor: Callable[..., Any], claim: Claim) -> Iterator[None]:
    """Intercepts calls to Linen modules inside, by what does the same in blocks for which `claim` returns equal values."""
    with traces.held(_claims, (*_claims.get(), claim)), nn.intercept_methods(interceptor):
        yield


def claims() -> tuple[Claim, ...]:
    """Returns the claims of the interceptors around, those that were entered first first."""
    return _claims.get()


@dataclasses.dataclass(eq=False)
class AlikeBlocks:
    """Blocks that are alike. `first` is the path of the first one, and `result` holds what of a block's result is no array."""

    first: str
    result: tree.NonArrays


@dataclasses.dataclass(frozen=True)
class AlikeBlock:
    """What is a block's own: its module's `name`, and the `path` below which its weights are."""

    kind: AlikeBlocks
    name: str
    path: str


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


class FirstBlock:
    """The first of blocks that are alike; `call` is its `overlap.BlockCall`, whose passes are traced once for arrays of equal types."""

    def __init__(self, own: AlikeBlock, call: Any):
        self.own, self.call, self.vjp, self.pulled = own, call, jax.jit(call.vjp), jax.jit(call.pulled)


class SharedPasses:
    """The two passes of a block, see `overlap.BlockCall`: those of the first one, or those of its own `call` if it reads other arrays."""

    def __init__(self, first: FirstBlock, own: AlikeBlock, call: Any):
        self.first, self._own, self._call = first, own, call
        self.reads_others = False
        self._stacks: dict[Any, Any] = {}

    def as_first(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Returns weights of the block, by path, with the paths of the first one."""
        return renamed(weights, self._own, self.first.own)

    def as_own(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Returns weights with the paths of the first block with those of this one."""
        return renamed(weights, self.first.own, self._own)

    def traced(self, run: Any, *args: Any) -> Any:
        """Returns the trace of a compiled function of the first block for these arguments, and notes whether it reads other arrays."""
        found = run.trace(*args)
        jaxpr, consts = traces.opened(found.jaxpr)
        # An array of the trace around the first block; nothing is known of that of the next one.
        self.reads_others = any(isinstance(const, jax.core.Tracer) for const in consts)
        self.reads_others |= len(jaxpr.invars) > len(jax.tree.leaves(args))
        return found

    def vjp(self, stored: Mapping[str, Any], sent: Mapping[str, Any], arrays: tuple) -> tuple[Any, Any]:
        """Returns `vjp` of the block."""
        as_first = self.as_first(stored), self.as_first(sent), arrays
        found = self.traced(self.first.vjp, *as_first)
        return self._call.vjp(stored, sent, arrays) if self.reads_others else self._put_in(found, as_first)

    def pulled(self, pull: Any, cotangents: Any) -> tuple[dict[str, Any], list[Any]]:
        """Returns `pulled` of the block."""
        if self.reads_others:
            return self._call.pulled(pull, cotangents)
        grads, inputs = self._put_in(self.first.pulled.trace(pull, cotangents), (pull, cotangents))
        return self.as_own(grads), inputs

    def _put_in(self, traced: Any, args: Any) -> Any:
        """Puts a trace of the first block into the trace around, with the names of this one."""

        def apply(eqn: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            with traces.scopes(eqn, self._stack(eqn)):
                return traces.bind(eqn, inputs, self._params(eqn))

        return jax.tree.unflatten(traced.out_tree, traces.run(traced.jaxpr, jax.tree.leaves(args), apply))

    def _params(self, eqn: jex.JaxprEqn) -> dict[str, Any]:
        """Returns an equation's parameters, with own names in the program of a checkpoint; that of a `jax.jit` has names of its own."""
        if eqn.primitive.name not in traces.CHECKPOINTS:
            return eqn.params
        program = eqn.params["jaxpr"]
        inside = [
            one.replace(source_info=one.source_info.replace(name_stack=self._stack(one)), params=self._params(one))
            for one in program.eqns
        ]
        return {**eqn.params, "jaxpr": program.replace(eqns=inside)}

    def _stack(self, eqn: jex.JaxprEqn) -> Any:
        """Returns the names of an equation."""
        stack = eqn.source_info.name_stack
        if stack not in self._stacks:
            parts = (part._replace(name=self._name(part.name)) for part in stack.stack)
            self._stacks[stack] = source.NameStack(tuple(parts))
        return self._stacks[stack]

    def _name(self, name: str) -> str:
        first = self.first.own
        if name == first.name:
            return self._own.name
        below = name.removeprefix(f"{first.path}/")
        return name if below == name else f"{self._own.path}/{below}"


class ForwardOnly:
    """Runs blocks that are alike by one nested function, which is traced and lowered once, for a trace that is never differentiated.

    The function around calls a block with what it is called with alone: nothing else that blocks read changes between two calls.

    Args:
      gather_leaf: f(path, stored) -> used.
      placement_of: f(path, stored) -> how a weight is sharded; blocks whose weights are sharded otherwise are not alike.
    """

    def __init__(self, gather_leaf: Callable[[str, Any], Any], placement_of: Callable[[str, Any], Hashable]):
        self.gather_owned, self._placement_of = gather_leaf, placement_of
        self._functions: dict[Hashable, tuple[AlikeBlock, Callable[..., Any]]] = {}

    def __call__(
        self, body: Callable[..., Any], weights: dict[str, Any], arrays: list[Any], policy: Any, own: AlikeBlock | None
    ) -> Any:
        def run(weights: dict[str, Any], arrays: list[Any]) -> Any:
            return body({path: self.gather_owned(path, weight) for path, weight in weights.items()}, *arrays)

        if own is None:
            return run(weights, arrays)
        key = (
            own.kind,
            *(self._placement_of(*weights_of) for weights_of in sorted(weights.items(), key=lambda pair: pair[0])),
        )
        first, shared = self._functions.setdefault(key, (own, jax.jit(run)))
        return shared(renamed(weights, own, first), arrays)

    def restart(self) -> None:
        """Forgets the blocks that ran, because the function is traced again."""
        self._functions.clear()


def renamed(weights: Mapping[str, Any], before: AlikeBlock, after: AlikeBlock) -> dict[str, Any]:
    """Returns weights of a block, by path, with the paths of another."""
    return {after.path + path.removeprefix(before.path): value for path, value in weights.items()}
