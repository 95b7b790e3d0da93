"""Finds weights that are stacks of layers. This module reads the trace of an init function: which first dims a scan or a vmap made.

A layer of a stack is gathered alone if the stack is not sharded by its layers, so these dims are no choice for a stage.
"""

from collections.abc import Sequence
from typing import Any

from zerojax import traces, tree
from zerojax.tree import PyTree


def counts(program: traces.Program, state: PyTree) -> dict[str, int]:
    """Returns by path how many first dims of a leaf count layers, of those with any.

    Args:
      program: the trace of the function that makes the state.
      state: what it returns, abstract.
    """
    found = _of_results(program, [0] * len(traces.opened(program)[0].invars))
    return {path: count for (path, _), count in zip(tree.flatten(state), found, strict=True) if count}


def _of_results(program: traces.Program, inputs: Sequence[int]) -> list[int]:
    return traces.run(program, inputs, _of_equation, lambda value, aval: 0)


def _of_equation(eqn: Any, inputs: Sequence[int]) -> list[int]:
    name, shapes = eqn.primitive.name, [atom.aval.shape for atom in eqn.invars]
    if (inner := traces.called(eqn)) is not None:
        return _of_results(inner, inputs)
    if name == "scan":
        body, (constants, carried) = eqn.params["jaxpr"], traces.scan_counts(eqn)
        rows = [max(count - 1, 0) for count in inputs[constants + carried :]]
        found = _of_results(body, [*inputs[: constants + carried], *rows])
        return [*found[:carried], *(count + 1 for count in found[carried:])]
    if name == "random_bits":  # of vmap: a key for each layer
        return [len(shapes[0])]
    if (
        name == "broadcast_in_dim"
        and shapes[0]
        and eqn.params["broadcast_dimensions"] == (*range(1, len(shapes[0]) + 1),)
    ):
        return [inputs[0] + 1]  # of vmap: the same values for each layer
    if name == "stack" and eqn.params["axis"] == 0 and shapes[0]:
        return [max(inputs) + 1]
    # Releases of JAX without that primitive concatenate rows.
    if name == "concatenate" and eqn.params["dimension"] == 0 and all(s[0] == 1 and len(s) > 1 for s in shapes):
        return [1]
    return [
        max((n for n, shape in zip(inputs, shapes) if n and shape[:n] == var.aval.shape[:n]), default=0)
        for var in eqn.outvars
    ]
