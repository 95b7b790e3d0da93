"""States the arithmetic of an optimizer's update. This module is shared by the kernel and its twin; all of it is float32.

    adam    m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
            p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + wd p)      decoupled decay: AdamW, arXiv:1711.05101
            with coupled decay g is g + wd p, and the last term is omitted          Adam with L2, arXiv:1412.6980
    lion    p = p - lr (sign(b1 m + (1 - b1) g) + wd p)      m = b2 m + (1 - b2) g      arXiv:2302.06675, Algorithm 2

where g is the stored gradient times `scale`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import blockwise, rounding


class Scalars(NamedTuple):
    """The inputs of an update beside the arrays: float32 scalars.

    Attributes:
      scale: multiplies gradients: the loss scale's inverse times the clip factor.
      finite: above 0 if the step is taken.
      learning_rate, weight_decay, b1, b2, eps: as in the equations.
      rest1, rest2: 1 - b1 and 1 - b2, computed in higher precision.
      correct1, correct2: 1 / (1 - b1^t) and 1 / (1 - b2^t).
    """

    scale: Any
    finite: Any
    learning_rate: Any
    weight_decay: Any
    b1: Any
    rest1: Any
    b2: Any
    rest2: Any
    eps: Any
    correct1: Any
    correct2: Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """The update, as known when it is traced.

    Attributes:
      name: a key of RULES.
      decoupled: weight decay acts on the weight instead of the gradient.
      stochastic: results that are stored in fewer than 32 bits are rounded stochastically.
      skips: the step is skipped unless `Scalars.finite`.
      changes: the update returns the float32 change of the params instead of the new params.
      copy_dtype: the dtype of a copy of the new params; None writes none.
      native: the update runs inside a compiled kernel, and may use instructions of GPUs that JAX does not expose.
    """

    name: str
    decoupled: bool = True
    stochastic: bool = False
    skips: bool = False
    changes: bool = False
    copy_dtype: Any = None
    native: bool = False


class Operands(NamedTuple):
    """The arrays of one weight, all of one shape. A moment is an array, or (codes, scales): see blockwise. Lion has no nu."""

    grad: Any
    param: Any
    mu: Any
    nu: Any = None


class Updated(NamedTuple):
    """The result of an update for one weight: `param` is the new weight, or its change."""

    param: Any
    mu: Any
    nu: Any = None
    copy: Any = None


def advance(
    rule: Rule,
    scalars: Scalars,
    decays: bool,
    leaf: Operands,
    noise: tuple[jax.Array, ...] | None,
    scales_of: Callable[[jax.Array], jax.Array] = blockwise.scales_of,
) -> Updated:
    """Updates one block of elements.

    Args:
      rule: which update.
      scalars: see `Scalars`.
      decays: whether this weight takes weight decay.
      leaf: arrays [...], or [..., BLOCK] with scales [...] where moments are in 8 bits.
      noise: three draws of 16 bits for each element, if the rule is stochastic.
      scales_of: returns the largest magnitude of each block; a caller that holds parts of blocks combines them here.
    """
    draws = iter(noise if rule.stochastic and noise is not None else ())
    old = leaf.param.astype(jnp.float32)
    moments = [_read(leaf.mu), None if leaf.nu is None else _read(leaf.nu)]
    grad = leaf.grad.astype(jnp.float32) * scalars.scale
    change, mu, nu = RULES[rule.name](scalars, rule.decoupled, decays, grad, old, *moments)
    write = functools.partial(_write, draws, scales_of, _native_sqrt if rule.native else jnp.sqrt)
    updated = Updated(
        _round(draws, old + change, leaf.param.dtype), write(mu, leaf.mu), None if nu is None else write(nu, leaf.nu)
    )
    if rule.skips:
        taken = scalars.finite > 0
        before = Updated(leaf.param, leaf.mu, leaf.nu)
        updated = jax.tree.map(lambda new, old: jnp.where(taken, new, old), updated, before)
        change = jnp.where(taken, change, 0.0)
    if rule.copy_dtype is not None:
        updated = updated._replace(copy=updated.param.astype(rule.copy_dtype))
    if rule.changes:
        rounds = rule.stochastic and leaf.param.dtype == jnp.bfloat16
        updated = updated._replace(param=updated.param.astype(jnp.float32) - old if rounds else change)
    return updated


def _adam(
    s: Scalars, decoupled: bool, decays: bool, g: jax.Array, p: jax.Array, m: jax.Array, v: jax.Array
) -> tuple[Any, Any, Any]:
    if decays and not decoupled:
        g = g + s.weight_decay * p
    m = s.b1 * m + s.rest1 * g
    v = s.b2 * v + s.rest2 * (g * g)
    direction = (m * s.correct1) / (jnp.sqrt(v * s.correct2) + s.eps)
    if decays and decoupled:
        direction = direction + s.weight_decay * p
    return -s.learning_rate * direction, m, v


def _lion(
    s: Scalars, decoupled: bool, decays: bool, g: jax.Array, p: jax.Array, m: jax.Array, _: Any
) -> tuple[Any, Any, None]:
    if decays and not decoupled:
        g = g + s.weight_decay * p
    direction = jnp.sign(s.b1 * m + s.rest1 * g)
    if decays and decoupled:
        direction = direction + s.weight_decay * p
    return -s.learning_rate * direction, s.b2 * m + s.rest2 * g, None


RULES: dict[str, Callable[..., tuple[Any, Any, Any]]] = {"adam": _adam, "lion": _lion}


def _read(stored: Any) -> jax.Array:
    return blockwise.decode(*stored) if isinstance(stored, tuple) else stored.astype(jnp.float32)


def _write(
    draws: Iterator[jax.Array],
    scales_of: Callable[..., jax.Array],
    sqrt: Callable[..., jax.Array],
    x: jax.Array,
    like: Any,
) -> Any:
    if isinstance(like, tuple):
        scales = scales_of(x)
        return blockwise.encode(x, scales, like[0].dtype, next(draws, None), sqrt), scales
    return _round(draws, x, like.dtype)


def _round(draws: Iterator[jax.Array], x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds stochastically if there are draws. Only rounded arrays take one, and draws that are not taken are not computed."""
    bits = next(draws, None) if dtype == jnp.bfloat16 else None
    return x.astype(dtype) if bits is None else rounding.stochastic_round(x, bits)


def _native_sqrt(x: jax.Array) -> jax.Array:
    """Returns square roots of float32 in one instruction, in a compiled kernel alone; numbers below 1.2e-38 count as zero.

    `jnp.sqrt` in a kernel is correct for those too, and takes four instructions.
    """
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pltriton.elementwise_inline_asm(
        "sqrt.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )[0]
