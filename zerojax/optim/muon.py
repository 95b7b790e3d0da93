"""Muon: orthogonalizes the momentum of matrices (Jordan et al., 2024). This module is the optimizer, and says which weights are matrices.

Each matrix' momentum becomes the nearest orthogonal matrix, about, by Newton-Schulz iterations. Embeddings, output projections, vectors and
adapters are updated by AdamW. On sharded weights each matrix has an owner that iterates (`owners`), so none is gathered by all devices.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import errors, kinds, tree
from zerojax.errors import UserError
from zerojax.optim import fused, one_pass, owners
from zerojax.tree import Leaf, PyTree

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.
RMS = 0.2  # of an update before the learning rate, about that of AdamW's (arXiv:2502.16982, section 2.2)

# Matrices that are none of a hidden layer, so AdamW updates them
NOT_HIDDEN = (kinds.EMBEDDING, kinds.HEAD, kinds.ADAPTER)
ADAMW = "|".join(pattern for kind, _, pattern in kinds.KINDS if kind in NOT_HIDDEN)

# (path regex, rank, form), the first that matches: which dims of a kernel are rows (r: contracted), columns (c), or count matrices (b).
FORMS: tuple[tuple[str, int, str], ...] = (
    (r"experts/gate_up$", 4, "brcb"),  # [E, D, F, 2], gate and up in turns
    (r"expert", 3, "brc"),  # [E, D, F]
    (r"qkv/kernel$", 4, "rbcc"),  # [D, 3, H, N]
    (r"gate_up/kernel$", 3, "rbc"),  # [D, 2, F]
    (r"(^|/)kv_einsum/w$", 4, "bcrc"),  # [2, K, D, N], of gemma's einsums, and the next three
    (r"(^|/)q_einsum/w$", 3, "crc"),  # [H, D, N]
    (r"(^|/)attn_vec_einsum/w$", 3, "rrc"),  # [H, N, D]
    (r"gating_einsum", 3, "bcr"),  # [2, F, D]
    (r"(^|/)(o|out|o_proj|out_proj|wo)/kernel$", 3, "rrc"),  # [H, N, D]
    (r"(^|/)(q|k|v|query|key|value|[qkv]_proj|w[qkv]|q_b|kv_b)/kernel$", 3, "rcc"),  # [D, H, N]
)


class MuonState(NamedTuple):
    """Updates so far, momenta of all weights (for AdamW the mean of gradients), and for AdamW the mean of squares."""

    count: jax.Array  # type: ignore[assignment]  # a name of tuple's, as in optax
    mu: PyTree
    nu: PyTree


@dataclasses.dataclass(frozen=True)
class _MuonSettings:
    learning_rate: Any
    momentum: float
    weight_decay: Any
    eps: float
    mask: Any
    adamw_on: str
    forms: tuple[tuple[str, int, str], ...]
    coefficients: tuple[float, float, float]
    steps: int
    nesterov: bool
    rms: float | None
    dtype: Any
    adamw: one_pass.OnePass


def muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.0,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    mask: Any = None,
    rates: Any = None,
    adamw_on: str = ADAMW,
    forms: Sequence[tuple[str, int, str]] = (),
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    nesterov: bool = True,
    rms: float | None = RMS,
    dtype: DTypeLike = jnp.bfloat16,
) -> one_pass.OnePass:
    """Returns Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) with decoupled weight decay and updates of one RMS
    (Liu et al., arXiv:2502.16982, Algorithm 1), and AdamW for what is no matrix. It is `optax.contrib.muon` with `consistent_rms`:

        mu = momentum * mu + (1 - momentum) * g       u = mu, corrected for its bias, or Nesterov's look-ahead of it
        X = u / (||u||_F + eps)                       steps times: A = X X^T, X = a X + (b A + c A A) X
        w = w - learning_rate * (scale * X + weight_decay * w)

    with scale = rms * sqrt(max(rows, columns)). Its `apply`, which a step of `make_train_step` uses, takes the weights' shardings and sends
    each device one matrix of as many as there are devices, and the updates back; see `owners`. `update` leaves sharding to the compiler.

    A weight of two dims or more is a matrix, or a batch of them, unless `zerojax.weight_kinds` says that it is a bias, a norm's scale or a
    stack of vectors, or `adamw_on` is found in its path. The table `FORMS` says which dims are rows and which columns: [D, H, N] of a query
    is D x HN, [H, N, D] of an output projection HN x D, [E, D, F] of experts E matrices, and a stack of `nn.scan` ("layers/...") L times as
    many. A kernel that the table does not name has its last dim as columns, all others as rows, as a convolution has.

    Args:
      learning_rate: a number, or a schedule: f(updates before); of AdamW too.
      momentum: decay of a matrix' momentum.
      weight_decay: decoupled, of all weights that `mask` selects, AdamW's too.
      b1, b2: of AdamW.
      eps: added to AdamW's root and to the norm of a matrix.
      mask: which weights decay, as in `optax.adamw`; None decays all.
      rates: what multiplies the learning rate of each weight, as of `fused_adamw`; None: 1.
      adamw_on: a regex over the paths of matrices that AdamW updates; by default embeddings, output projections and adapters.
      forms: (path regex, rank, form), which come before kinds and `FORMS`; a form has a letter for each dim: "r" rows, "c" columns, "b"
        matrices.
      coefficients, steps: a, b, c, and the number of iterations.
      nesterov: whether the gradient is added to the momentum once more.
      rms: of the updates; None scales by sqrt(max(1, columns / rows)), as Jordan et al. do.
      dtype: of the iterations, and of what is sent: bfloat16, or float32, which matmuls then multiply in full.

    Raises:
      UserError: a form or a regex is wrong; from `init`: no weight is a matrix.

    >>> tx = muon(2e-3, weight_decay=0.1, forms=[("adapter/kernel$", 3, "brc")])
    """
    errors.regex("adamw_on", adamw_on, "pass one such as 'embed|head'")
    for pattern, rank, form in forms:
        if len(form) != rank or set(form) - {*"brc"} or not {*"rc"} <= set(form):
            raise UserError(
                f"forms: {form!r} of {pattern!r} is no form of {rank} dims: it has a letter for each, and at least one r (rows) and one c "
                "(columns), beside b (matrices)"
            )
    if not 0 <= momentum < 1:
        raise UserError(f"momentum: must be at least 0 and below 1, and is {momentum}")
    settings = _MuonSettings(
        learning_rate,
        momentum,
        weight_decay,
        eps,
        mask,
        adamw_on,
        tuple(forms),
        coefficients,
        steps,
        nesterov,
        rms,
        jnp.dtype(dtype),
        adamw=fused.fused_adamw(learning_rate, b1, b2, eps, weight_decay, mask=mask, rates=rates),
    )
    made = one_pass.OnePass(functools.partial(_init, settings), functools.partial(_update, settings))
    made.apply = functools.partial(_apply, settings)
    made.kinds = functools.partial(_kinds, settings)
    made.is_elementwise = False
    made.received = lambda params, shardings: sum(
        one.received for one in planned(params, shardings, adamw_on=adamw_on, forms=forms)
    )
    return made


def form(path: str, shape: Sequence[int], adamw_on: str = ADAMW, forms: Sequence[tuple[str, int, str]] = ()) -> str:
    """Returns the form of a weight, a letter for each dim, or "" for one that AdamW updates; arguments as of `muon`.

    >>> form("layer_0/attention/q/kernel", (4096, 32, 128))
    'rcc'
    """
    rank, kind, path = len(shape), kinds.of(path, shape), kinds.without_value(path)
    is_of_adamw = kind in NOT_HIDDEN if adamw_on == ADAMW else adamw_on and re.search(adamw_on, path)
    if rank < 2 or is_of_adamw:
        return ""
    own = _named(path, rank, forms)
    if own or kind in kinds.SPARED:
        return own
    layers = "b" if re.search(kinds.STACKS, path) else ""
    rank -= len(layers)
    return layers + (_named(path, rank, FORMS) or "r" * (rank - 1) + "c") if rank > 1 else ""


def _named(path: str, rank: int, forms: Sequence[tuple[str, int, str]]) -> str:
    return next((found for pattern, dims, found in forms if dims == rank and re.search(pattern, path)), "")


def newton_schulz(
    matrices: jax.Array, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-8
) -> jax.Array:
    """Returns orthogonalized matrices, [..., rows, columns], of the given dtype: with U S V^T a matrix' singular values, about U V^T.

    The iterations run on the shorter side, in the matrices' dtype; norms are float32.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = jnp.swapaxes(matrices, -1, -2) if is_tall else matrices
    wide = x.astype(jnp.float32)
    x = (wide / (jnp.sqrt(jnp.sum(wide**2, axis=(-2, -1), keepdims=True)) + eps)).astype(matrices.dtype)
    multiply = functools.partial(
        jnp.matmul, precision=jax.lax.Precision.HIGHEST if matrices.dtype == jnp.float32 else None
    )
    a, b, c = coefficients

    def iteration(_: Any, x: jax.Array) -> jax.Array:
        square = multiply(x, jnp.swapaxes(x, -1, -2))
        return a * x + multiply(b * square + c * multiply(square, square), x)

    x = jax.lax.fori_loop(0, steps, iteration, x)
    return jnp.swapaxes(x, -1, -2) if is_tall else x


def flops(rows: int, columns: int, steps: int = 5) -> float:
    """Returns the operations of `newton_schulz` of one matrix: three matmuls an iteration."""
    short, long = sorted((rows, columns))
    return steps * (4.0 * short**2 * long + 2.0 * short**3)


def planned(params: PyTree, shardings: PyTree, adamw_on: str = ADAMW, forms: Sequence[Any] = ()) -> list[owners.Round]:
    """Returns the rounds of an update of weights, arrays or ShapeDtypeStructs, with these NamedShardings; see `owners.Round.received`."""
    named = tree.flatten(params)
    of = [form(path, leaf.shape, adamw_on, forms) for path, leaf in named]
    found = {
        number: owners.layout(leaf.shape, own, sharding)
        for number, ((_, leaf), own, sharding) in enumerate(zip(named, of, jax.tree.leaves(shardings)))
        if own
    }
    return owners.rounds(found, flops)


def _forms(settings: _MuonSettings, params: PyTree) -> list[str]:
    return [form(path, jnp.shape(leaf), settings.adamw_on, settings.forms) for path, leaf in tree.flatten(params)]


def _kinds(settings: _MuonSettings, params: PyTree) -> list[Any]:
    return list(zip(settings.adamw.kinds(params), _forms(settings, params)))


def _init(settings: _MuonSettings, params: PyTree) -> MuonState:
    of = _forms(settings, params)
    paths = [path for path, _ in tree.flatten(params)]
    is_own = settings.adamw_on not in ("", ADAMW) and bool(paths) and not fused.is_part()
    if is_own and not any(re.search(settings.adamw_on, path) for path in paths):
        shown = ", ".join(paths[:3])
        raise UserError(f"adamw_on: {settings.adamw_on!r} matches no trained weight's path; paths look like {shown}")
    if of and not any(of) and not fused.is_part():
        raise UserError(
            f"optimizer: muon orthogonalizes matrices, and all trained weights are AdamW's: vectors, or found by "
            f"`adamw_on={settings.adamw_on!r}`; use adamw, or pass another"
        )
    state = settings.adamw.init(params)
    return MuonState(state.count, state.mu, _part(of, state.nu, of_muon=False))


def _part(of: Sequence[str], like: PyTree, *, of_muon: bool) -> PyTree:
    """Returns a tree with `optax.MaskedNode()` in the place of the leaves of the other kind."""
    structure: Any = jax.tree.structure(like)
    leaves = jax.tree.leaves(like)
    return structure.unflatten([leaf if bool(own) == of_muon else optax.MaskedNode() for own, leaf in zip(of, leaves)])


def _update(
    settings: _MuonSettings, grads: PyTree, state: MuonState, params: PyTree = None, **extra: Any
) -> tuple[Any, MuonState]:
    if params is None:
        raise UserError("update: muon needs params; call update(grads, state, params)")
    how = {name: extra[name] for name in ("scale", "finite", "shardings") if name in extra}
    updates, state, _ = _step(settings, grads, state, params, changes=True, **how)
    return updates, state


def _apply(
    settings: _MuonSettings,
    grads: PyTree,
    state: MuonState,
    params: PyTree,
    *,
    copy_dtype: DTypeLike | None = None,
    **how: Any,
) -> tuple[Any, MuonState, Any]:
    own = {name: how[name] for name in ("scale", "finite", "shardings", "shapes") if name in how}
    params, state, _ = _step(settings, grads, state, params, changes=False, **own)
    return params, state, None if copy_dtype is None else jax.tree.map(lambda p: p.astype(copy_dtype), params)


def _step(
    settings: _MuonSettings,
    grads: PyTree,
    state: MuonState,
    params: PyTree,
    *,
    changes: bool,
    scale: jax.Array | float = 1.0,
    finite: jax.Array | None = None,
    shardings: PyTree = None,
    shapes: PyTree = None,
) -> tuple[Any, MuonState, None]:
    """Returns (params, or updates if `changes`; state; None)."""
    of = _forms(settings, params)
    adam = functools.partial(_part, of, of_muon=False)
    run = settings.adamw.update if changes else settings.adamw.apply
    how = {} if shardings is None else {"shardings": adam(shardings)}
    before = optax.ScaleByAdamState(state.count, adam(state.mu), state.nu)
    of_adam, after = run(adam(grads), before, adam(params), scale=scale, finite=finite, **how)[:2]
    rate, decay = (_now(value, state.count) for value in (settings.learning_rate, settings.weight_decay))
    scalars = [jnp.asarray(value, jnp.float32) for value in (scale, rate, decay, optax.safe_increment(state.count))]
    scalars += [] if finite is None else [finite]
    matrices = [jax.tree.leaves(_part(of, part, of_muon=True)) for part in (grads, state.mu, params)]
    placed: list[Any] = [None] * len(of) if shardings is None else jax.tree.leaves(shardings)
    real = jax.tree.leaves(params if shapes is None else shapes)
    weights = [
        _Weight(owners.layout(leaf.shape, own, where), owners.layout(unpadded.shape, own), *kinds)
        for leaf, unpadded, own, where, kinds in zip(
            jax.tree.leaves(params), real, of, placed, settings.adamw.kinds(params)
        )
        if own
    ]
    update = functools.partial(_shards, settings, weights, changes)
    if shardings is not None and weights:
        own_specs = [sharding.spec for sharding, own in zip(placed, of) if own]
        update = jax.shard_map(
            update,
            mesh=placed[0].mesh,
            in_specs=([own_specs] * 3, [P()] * len(scalars)),
            out_specs=[own_specs] * 2,
            check_vma=False,
        )
    news, mus = update(matrices, scalars)
    merged = functools.partial(_merged, of, params)
    return merged(of_adam, news), MuonState(after.count, merged(after.mu, mus), after.nu), None


def _now(value: Any, count: jax.Array) -> Any:
    return value(count) if callable(value) else value


def _merged(of: Sequence[str], like: PyTree, adam: PyTree, matrices: Sequence[Leaf]) -> PyTree:
    """Returns a tree like the params of AdamW's leaves and matrices."""
    given, rest = iter(matrices), iter(jax.tree.leaves(adam))
    structure: Any = jax.tree.structure(like)
    return structure.unflatten([next(given if own else rest) for own in of])


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight of matrices: its layout, that of the same without padding, whether it decays, and the factor of its learning rate."""

    layout: owners.MatrixLayout
    unpadded: owners.MatrixLayout
    decays: bool
    rate: float


def _shards(
    settings: _MuonSettings,
    weights: Sequence[_Weight],
    changes: bool,
    arrays: list[list[jax.Array]],
    scalars: list[Any],
) -> list[list[jax.Array]]:
    """Updates a device's shards of matrices: returns them, or their updates, and their momenta."""
    grads, before, params = arrays
    (scale, rate, decay, count), finite = scalars[:4], scalars[4:]
    beta = settings.momentum
    after: dict[int, jax.Array] = {}

    def read(number: int, wait: Sequence[Any]) -> jax.Array:
        grad, mu = owners.ordered([grads[number], before[number]], wait)
        grad = grad.astype(jnp.float32) * scale
        after[number] = beta * mu + (1 - beta) * grad
        if not settings.nesterov:
            return (after[number] / (1 - beta**count)).astype(settings.dtype)
        ahead = beta * after[number] / (1 - beta ** (count + 1))
        return (ahead + (1 - beta) * grad / (1 - beta**count)).astype(settings.dtype)

    orthogonal = owners.apply(
        functools.partial(newton_schulz, coefficients=settings.coefficients, steps=settings.steps, eps=settings.eps),
        owners.rounds({number: weight.layout for number, weight in enumerate(weights)}, flops),
        read,
    )
    news = []
    for number, weight in enumerate(weights):
        param = params[number]
        update = _factor(settings, weight.unpadded) * orthogonal[number].astype(jnp.float32)
        if weight.decays:
            update += decay * param
        own = rate if weight.rate == 1 else weight.rate * rate
        new = -own * update if changes else (param - own * update).astype(param.dtype)
        if finite:
            new = jnp.where(finite[0], new, jnp.zeros_like(new) if changes else param)
            after[number] = jnp.where(finite[0], after[number], before[number])
        news.append(new)
    return [news, [after[number].astype(before[number].dtype) for number in range(len(weights))]]


def _factor(settings: _MuonSettings, matrix: owners.MatrixLayout) -> float:
    """Returns what multiplies an orthogonal matrix."""
    if settings.rms is None:
        return math.sqrt(max(1.0, matrix.columns / matrix.rows))
    return settings.rms * math.sqrt(max(matrix.rows, matrix.columns))
