"""Optimizers whose update is one pass over memory. This module wraps the kernels of `pallas_kernels` as optax transformations.

`update` is optax's: it returns updates, so these optimizers work inside `optax.chain`, `masked` and `inject_hyperparams`. `apply` does
the rest of a step in the same pass. It unscales and clips gradients, changes nothing if a gradient is not finite, overwrites params and
moments, and writes a 16-bit copy of the params. The state is optax's own: count, mu, nu.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_kernels import rounding, rules, update
from zerojax import errors, traces, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.optim import eight_bit, sharded_kernels
from zerojax.optim.one_pass import OnePass
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree

MOMENTS = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8}


# The meaning of "auto", by kind of device and of update; otherwise it is "jnp". Figures: docs/benchmarks/optimizer.md.
AUTO = {("gpu", "coded"): "pallas", ("gpu", "plain"): "grouped"}
IMPLEMENTATIONS = ("auto", *update.IMPLEMENTATIONS)

_IS_PLAIN = contextvars.ContextVar("_IS_PLAIN", default=False)  # see `in_plain_jnp`
_IS_PART = contextvars.ContextVar("_IS_PART", default=False)  # see `of_a_part`


@dataclasses.dataclass(frozen=True)
class _Settings:
    rule: rules.Rule
    learning_rate: Any
    b1: Any
    b2: Any
    eps: Any
    weight_decay: Any
    mask: Any
    rates: Any
    moments: str
    implementation: str


def fused_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    *,
    mask: Any = None,
    rates: Any = None,
    moments: str = "fp32",
    stochastic_rounding: bool = False,
    decoupled: bool = True,
    implementation: str = "auto",
) -> OnePass:
    """Returns AdamW (Loshchilov and Hutter, arXiv:1711.05101), or Adam with coupled (L2) decay, whose step is one pass.

    Beside optax's `init` and `update` the result has

        apply(grads, state, params, *, scale=1.0, finite=None, copy_dtype=None, shardings=None, key=None, numbers=None)
            -> (params, state, copies)

    `scale` (float32 scalar) multiplies gradients first. If `finite` (bool scalar) is False, params, moments and count do not change.
    `copies` are the new params in `copy_dtype`, or None. `shardings` (NamedShardings like params) are those of params, moments and
    gradients: the update then runs on each device's shard and sends nothing between devices. `key` (a random key) seeds stochastic
    rounding, and so does each leaf's number, in `numbers` (uint32[leaves]; None: its place in the tree). `update` takes `scale`, `finite`,
    `shardings` and `key` too. Inputs that jit donates are overwritten. Without `shardings`, "pallas" runs on one device.

    Args:
      learning_rate: a number, or a schedule: f(steps taken before).
      b1, b2, eps, weight_decay: as in `optax.adamw`. With 1 - b2 below 2**-9, a second moment in bf16 that is rounded to nearest
        stops changing once it has grown: set `stochastic_rounding`.
      mask: which weights decay, a tree of bools or a function of params, as in `optax.adamw`; None decays all.
      rates: what multiplies the learning rate of each weight, a tree of numbers or a function of params; None: 1.
      moments: how mu and nu are stored: "fp32", "bf16", or "int8" (see `eight_bit`); "int8" keeps vectors and small weights in fp32.
      stochastic_rounding: params, mu and nu that are stored in bf16 or int8 are rounded up or down at random, so that small changes
        add up in expectation. The random bits depend on the key, the count, the leaf and the element. They do not depend on the
        sharding, unless it pads the last dims. Copies are rounded to nearest.
      decoupled: False adds weight_decay * params to the gradient (Kingma and Ba, arXiv:1412.6980, with L2).
      implementation: "pallas" (GPUs), "jnp" (plain, fused by XLA), "grouped" (GPUs: the kernel for groups of small leaves, XLA for
        large ones), "interpret" (the kernel on any device, slow) or "auto", see `AUTO`.

    Raises:
      UserError: a name is unknown; from `init`: params are not floating, or stochastic rounding has nothing to round.

    >>> tx = fused_adamw(3e-4, weight_decay=0.1, moments="int8", stochastic_rounding=True)
    >>> params, state, copies = tx.apply(grads, state, params, scale=1 / loss_scale, finite=finite, copy_dtype=jnp.bfloat16)
    """
    rule = rules.Rule("adam", decoupled=decoupled, stochastic=stochastic_rounding)
    return _transformation(
        _Settings(rule, learning_rate, b1, b2, eps, weight_decay, mask, rates, moments, implementation)
    )


def fused_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    weight_decay: jax.typing.ArrayLike = 1e-3,
    *,
    mask: Any = None,
    rates: Any = None,
    moments: str = "fp32",
    stochastic_rounding: bool = False,
    implementation: str = "auto",
) -> OnePass:
    """Returns Lion (Chen et al., arXiv:2302.06675, Algorithm 2) whose step is one pass; see `fused_adamw`. Its state has no nu."""
    rule = rules.Rule("lion", stochastic=stochastic_rounding)
    return _transformation(
        _Settings(rule, learning_rate, b1, b2, 0.0, weight_decay, mask, rates, moments, implementation)
    )


def in_plain_jnp() -> contextlib.AbstractContextManager[None]:
    """Makes updates that are traced inside take the plain form, on all devices, so that a reader of the program finds no kernel."""
    return traces.held(_IS_PLAIN, True)


def of_a_part() -> contextlib.AbstractContextManager[None]:
    """Makes `init` take a part of the weights, in which stochastic rounding may have nothing to round."""
    return traces.held(_IS_PART, True)


def is_part() -> bool:
    """Returns whether `init` runs in `of_a_part`."""
    return _IS_PART.get()


def choose(implementation: str, kind: str, mesh: Mesh | None) -> str:
    """Returns the meaning of "auto" for arrays on a mesh; None: on a single device.

    Raises:
      UserError: a kernel for GPUs is requested on other devices.
    """
    if _IS_PLAIN.get():
        return "jnp"
    platform = mesh_lib.platform(mesh)
    if implementation in ("pallas", "grouped") and platform != "gpu":
        raise UserError(
            f"implementation: {implementation!r} is compiled for GPUs, and this is a {platform}; use 'auto' or 'jnp'"
        )
    if implementation != "auto":
        return implementation
    if mesh is None and jax.device_count() > 1:
        return "jnp"  # the arrays' shardings are unknown here, and XLA does not shard kernels
    return AUTO.get((platform, kind), "jnp")


def _transformation(settings: _Settings) -> OnePass:
    errors.one_of("moments", settings.moments, MOMENTS)
    errors.one_of("implementation", settings.implementation, IMPLEMENTATIONS)
    for name in ("b1", "b2"):
        value = getattr(settings, name)
        if isinstance(value, (int, float)) and not 0 <= value < 1:
            raise UserError(f"{name}: must be at least 0 and below 1, and is {value}")
    fused = OnePass(functools.partial(_init, settings), functools.partial(_update, settings))
    fused.apply = functools.partial(_apply, settings)
    fused.kinds = functools.partial(_kinds, settings)
    return fused


def _init(settings: _Settings, params: PyTree) -> PyTree:
    for path, leaf in tree.flatten(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"{path}: the fused optimizers update floating weights, and it is {leaf.dtype}; use optax.masked"
            )
    has_bf16 = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
    if settings.rule.stochastic and settings.moments == "fp32" and not has_bf16 and not is_part():
        raise UserError(
            "stochastic_rounding: nothing is stored in bf16 or int8: params are not bf16 and moments='fp32'; "
            "set moments='bf16' or 'int8', or stochastic_rounding=False"
        )

    def moment(codes: Any, leaf: Leaf) -> Leaf:
        if settings.moments == "int8" and eight_bit.takes(leaf.shape):
            return eight_bit.zeros(leaf.shape, codes)
        return jnp.zeros(leaf.shape, jnp.bfloat16 if settings.moments == "bf16" else jnp.float32)

    count = jnp.zeros((), jnp.int32)
    mu = jax.tree.map(functools.partial(moment, jnp.int8), params)
    if settings.rule.name == "lion":
        return optax.ScaleByLionState(count, mu)
    return optax.ScaleByAdamState(count, mu, jax.tree.map(functools.partial(moment, jnp.uint8), params))


def _update(
    settings: _Settings,
    grads: PyTree,
    state: State,
    params: PyTree = None,
    *,
    finite: jax.Array | None = None,
    **extra: Any,
) -> tuple[Any, Any]:
    if params is None:
        raise UserError("update: the fused optimizers need params; call update(grads, state, params)")
    rule = dataclasses.replace(settings.rule, changes=True, skips=finite is not None)
    # The rest is for other transformations
    how = {name: extra[name] for name in ("scale", "shardings", "key") if name in extra}
    updates, state, _ = _step(settings, rule, grads, state, params, finite, **how)
    return updates, state


def _apply(
    settings: _Settings,
    grads: PyTree,
    state: State,
    params: PyTree,
    *,
    copy_dtype: DTypeLike | None = None,
    finite: jax.Array | None = None,
    **how: Any,
) -> tuple[Any, Any, Any]:
    rule = dataclasses.replace(settings.rule, skips=finite is not None, copy_dtype=copy_dtype)
    return _step(settings, rule, grads, state, params, finite, **how)


def _step(
    settings: _Settings,
    rule: rules.Rule,
    grads: PyTree,
    state: State,
    params: PyTree,
    finite: jax.Array | None,
    *,
    scale: jax.Array | float = 1.0,
    shardings: PyTree = None,
    key: jax.Array | None = None,
    numbers: jax.Array | None = None,
) -> tuple[Any, Any, Any]:
    """Returns (params or updates, state, copies)."""
    structure: Any = jax.tree.structure(params)
    weights = jax.tree.leaves(params)
    if not weights:  # of a mask or a label that matches nothing, or with all weights offloaded
        count = optax.safe_increment(state.count)
        count = count if finite is None else jnp.where(finite, count, state.count)
        return params, state._replace(count=count), None if rule.copy_dtype is None else params
    moments = [structure.flatten_up_to(moment) for moment in state[1:]]
    given = [[tuple(m) if isinstance(m, eight_bit.Quantized) else m for m in moment] for moment in moments]
    leaves = [rules.Operands(*arrays) for arrays in zip(structure.flatten_up_to(grads), weights, *given)]
    kinds = _kinds(settings, params)
    count = optax.safe_increment(state.count)
    scalars = _scalars(settings, state.count, count, scale, finite)
    seeds = rounding.fold(_seed(key, state.count), jnp.arange(len(leaves)) if numbers is None else numbers)
    kind = "coded" if rule.stochastic or settings.moments == "int8" else "plain"
    sharding_leaves = None if shardings is None else structure.flatten_up_to(shardings)
    chosen = choose(settings.implementation, kind, sharding_leaves and sharded_kernels.mesh_of(sharding_leaves))

    def updated(factor: float) -> list[rules.Updated]:
        """Updates the leaves whose learning rate has this factor."""
        own = [n for n, (_, other) in enumerate(kinds) if other == factor]
        decays, part = [kinds[n][0] for n in own], [leaves[n] for n in own]
        now = scalars if factor == 1 else scalars._replace(learning_rate=factor * scalars.learning_rate)
        if sharding_leaves is None:
            shards, words = [update.Shard(decay) for decay in decays], [seeds[n, None] for n in own]
            return update.update_leaves(rule, part, shards, now, words, implementation=chosen)
        own_seeds = seeds if len(own) == len(leaves) else seeds[np.asarray(own)]
        placed = [sharding_leaves[n] for n in own]
        return sharded_kernels.update_leaves(rule, part, decays, now, own_seeds, placed, chosen)

    by_factor = {factor: iter(updated(factor)) for factor in dict.fromkeys(factor for _, factor in kinds)}
    done = [next(by_factor[factor]) for _, factor in kinds]
    news, *new_moments, copies = (structure.unflatten(list(parts)) for parts in zip(*_from_tuples(done, moments)))
    if finite is not None:
        count = jnp.where(finite, count, state.count)
    new_state = type(state)(count, *new_moments)
    return news, new_state, None if rule.copy_dtype is None else copies


def _from_tuples(done: list[rules.Updated], moments: list[list[Any]]) -> list[tuple]:
    """Returns for each leaf the new weight, its moments in the form of the old ones, and the copy."""
    rows = []
    for updated in done:
        news = [updated.mu, updated.nu][: len(moments)]
        news = [eight_bit.Quantized(*new) if isinstance(new, tuple) else new for new in news]
        rows.append((updated.param, *news, updated.copy))
    return rows


def _kinds(settings: _Settings, params: PyTree) -> list[tuple[bool, float]]:
    """Returns for each leaf whether it decays, and the factor of its learning rate."""
    is_off = isinstance(settings.weight_decay, (int, float)) and not settings.weight_decay
    decays = _by_leaf("mask: must be a tree of bools", False if is_off else settings.mask, True, params)
    rates = _by_leaf("rates: must be a tree of numbers", settings.rates, 1.0, params)
    return list(zip(map(bool, decays), map(float, rates)))


def _by_leaf(rule: str, value: Any, default: Any, params: PyTree) -> list[Any]:
    value = value(params) if callable(value) else value
    try:
        return jax.tree.leaves(jax.tree.broadcast(default if value is None else value, params))
    except ValueError as error:
        raise UserError(
            f"{rule} like the params or a prefix of one, and does not fit them: {errors.first_line(error)}"
        ) from error


def _scalars(
    settings: _Settings, before: jax.Array, count: jax.Array, scale: jax.Array | float, finite: jax.Array | None
) -> rules.Scalars:
    """Returns the scalars of this step. Bias corrections use expm1, since 1 - b2**t loses digits in float32."""
    rate = settings.learning_rate(before) if callable(settings.learning_rate) else settings.learning_rate

    def correct(decay: jax.Array | float) -> jax.Array:
        log = math.log(decay) if isinstance(decay, float) and decay > 0 else jnp.log(decay)
        return -1 / jnp.expm1(count.astype(jnp.float32) * log)

    is_adam = settings.rule.name == "adam"
    return rules.Scalars(
        scale=scale,
        finite=1.0 if finite is None else jnp.asarray(finite).astype(jnp.float32),
        learning_rate=rate,
        weight_decay=settings.weight_decay(before) if callable(settings.weight_decay) else settings.weight_decay,
        b1=settings.b1,
        rest1=1 - settings.b1,
        b2=settings.b2,
        rest2=1 - settings.b2,
        eps=settings.eps,
        correct1=correct(settings.b1) if is_adam else 1.0,
        correct2=correct(settings.b2) if is_adam else 1.0,
    )


def _seed(key: jax.Array | None, count: jax.Array) -> jax.Array:
    seed = jnp.zeros((), jnp.uint32)
    if key is not None:
        for word in jnp.ravel(tree.key_words(key)):
            seed = rounding.fold(seed, word)
    return rounding.fold(seed, count)
