"""Reads traced programs. This module lists the equations of a jaxpr."""

import jax


def equations(jaxpr):
    """Yields every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
