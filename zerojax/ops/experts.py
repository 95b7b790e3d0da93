"""A mixture of experts. This module routes tokens, runs each token's experts, and measures and balances their load.

With the router's scores s of a token (float32), its K best experts C and their weights w,

    y = sum over e in C of w[e] expert[e](x)        w[e] = s[e], or s[e] / sum over C of s, times a constant

Rows are sorted by expert, so an expert's tokens are a run of rows, and the three matmuls of all experts are grouped matmuls
(`pallas_kernels.grouped`): on GPUs no row is computed twice and none is padded. No token is dropped unless there is a capacity.
A row's weight multiplies before the last matmul, since down(w h) = w down(h): then the backward pass reads no result of an expert.
Where devices have some of the experts each, tokens travel to them (`expert_parallel`).

Shapes: T tokens, D embed, E experts, K experts of a token, F an expert's width, R = T K rows.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax import traces
from zerojax.errors import UserError
from zerojax.ops import expert_matrices, expert_parallel
from zerojax.ops.expert_matrices import Matrices, multiply

Score = Literal["softmax", "sigmoid", "sparsemixer"]
COUNT = 2.0**-60  # a row in the gradient of a bias that counts: exact, and nothing beside the gradients in a norm


class Routing(NamedTuple):
    """Which experts each token takes."""

    experts_TK: jax.Array  # int32, the experts
    weights_TK: jax.Array  # float32, their weights
    probs_TE: jax.Array  # float32, all scores of each token, with a sum of 1
    logits_TE: jax.Array  # float32, the router's output


def route(
    logits_TE: jax.Array,
    top_k: int,
    *,
    score: Score = "softmax",
    bias_E: jax.Array | None = None,
    counts: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
    normalised: bool = True,
    scale: float = 1.0,
    tolerance: float = 0.0,
    chosen_TK: jax.Array | None = None,
) -> Routing:
    """Returns the experts of each token.

    Args:
      logits_TE: the router's output.
      top_k: experts of a token.
      score: of an expert: "softmax" over all of them, or its own "sigmoid". "sparsemixer" takes the best experts one by one, and gives each
        its softmax over those left that are near it (arXiv:2409.12136, without the draws of training); it has no bias, groups and sums.
      bias_E: added to the scores by which experts are chosen, not to the weights; it has no gradient. None for none.
      counts: whether the gradient of `bias_E` is `COUNT` for each row of an expert, whatever the loss, for `optim.balance`.
      groups: the experts are in groups of equal size, and a token chooses from its best `top_groups` of these alone (arXiv:2412.19437,
        section 2.1.2). A group's score is the sum of its `best_of_group` best.
      top_groups, best_of_group: see `groups`.
      normalised: whether a token's weights have a sum of 1, before `scale`.
      scale: multiplies the weights.
      chosen_TK: the experts, int32[T, K], chosen elsewhere (routing replay, arXiv:2510.11370); their weights are the scores' all the same.
        None: they are chosen here. Not for "sparsemixer".
      tolerance: of "sparsemixer": how far below the best an output s is near, over max(|s|, best).

    Raises:
      UserError: there are fewer experts than a token takes, or they do not divide into the groups.
    """
    tokens, experts = logits_TE.shape
    if experts % groups or not 0 < top_groups <= groups or not 0 < top_k <= experts // groups * top_groups:
        raise UserError(
            f"route: a token takes {top_k} of {experts} experts from {top_groups} of {groups} groups; make the groups equal, and "
            "take as many experts as there are at most"
        )
    logits_TE = logits_TE.astype(jnp.float32)
    if score == "sparsemixer":
        assert chosen_TK is None, "the weights of sparsemixer depend on the order of its choices"
        experts_TK, weights_TK = _mixed(logits_TE, top_k, tolerance)
        return Routing(experts_TK, weights_TK * scale, jax.nn.softmax(logits_TE), logits_TE)
    scores_TE = jax.nn.softmax(logits_TE) if score == "softmax" else jax.nn.sigmoid(logits_TE)
    chosen_by = jax.lax.stop_gradient(scores_TE if bias_E is None else scores_TE + bias_E.astype(jnp.float32))
    if groups > 1:
        by_group = chosen_by.reshape(tokens, groups, -1)
        best = jax.lax.top_k(by_group, min(best_of_group, experts // groups))[0].sum(axis=-1)
        is_best = (
            jnp.zeros(best.shape, bool).at[jnp.arange(tokens)[:, None], jax.lax.top_k(best, top_groups)[1]].set(True)
        )
        chosen_by = jnp.where(is_best[..., None], by_group, -jnp.inf).reshape(tokens, experts)
    experts_TK = jax.lax.top_k(chosen_by, top_k)[1] if chosen_TK is None else chosen_TK
    weights_TK = jnp.take_along_axis(scores_TE, experts_TK, axis=-1)
    if normalised:
        weights_TK /= jnp.sum(weights_TK, axis=-1, keepdims=True) + 1e-20
    if counts and bias_E is not None:
        weights_TK = _counted(weights_TK, bias_E, experts_TK)
    probs_TE = scores_TE if score == "softmax" else scores_TE / (jnp.sum(scores_TE, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts_TK, weights_TK * scale, probs_TE, logits_TE)


def _mixed(logits_TE: jax.Array, top_k: int, tolerance: float) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token and their weights by "sparsemixer"."""
    left_TE, found = logits_TE, []
    for _ in range(top_k):
        expert_T1, best_T1 = jnp.argmax(left_TE, axis=-1, keepdims=True), jnp.max(left_TE, axis=-1, keepdims=True)
        is_far_TE = (best_T1 - logits_TE) / jnp.maximum(jnp.abs(logits_TE), best_T1) > tolerance
        near_TE = jax.nn.softmax(jnp.where(is_far_TE, -jnp.inf, left_TE))
        found.append((expert_T1, jnp.take_along_axis(near_TE, expert_T1, axis=-1)))
        left_TE = jnp.where(jnp.arange(logits_TE.shape[1]) == expert_T1, -jnp.inf, left_TE)
    experts, weights = zip(*found)
    return jnp.concatenate(experts, axis=-1).astype(jnp.int32), jnp.concatenate(weights, axis=-1)


@jax.custom_vjp
def _counted(weights_TK: jax.Array, bias_E: jax.Array, experts_TK: jax.Array) -> jax.Array:
    """Returns the weights; the gradient of the bias is the number of rows that chose each expert, times `COUNT`."""
    return weights_TK


def _counted_backward(saved: tuple[jax.Array, jax.Array], grad_TK: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    experts_TK, like_E = saved
    count_E = jnp.zeros(like_E.shape, jnp.float32).at[experts_TK.reshape(-1)].add(1.0)
    return grad_TK, (COUNT * count_E).astype(like_E.dtype), None


_counted.defvjp(lambda weights, bias, experts: (weights, (experts, jnp.zeros_like(bias))), _counted_backward)


def apply(
    x_TD: jax.Array,
    routing: Routing,
    gate_EDF: Matrices,
    up_EDF: Matrices | None,
    down_EFD: Matrices,
    activation: Callable[..., jax.Array] = jax.nn.silu,
    *,
    capacity: int | None = None,
    biases: tuple[jax.Array, jax.Array] | None = None,
    scales_inputs: bool = False,
) -> jax.Array:
    """Returns the weighted sum of each token's experts, down(activation(gate(x)) * up(x)): float[T, D].

    Args:
      x_TD: the tokens.
      routing: from `route`.
      gate_EDF, up_EDF, down_EFD: the matrices, arrays or `expert_matrices.StoredMatrices`. Without `up_EDF` the first is both,
        [E, D, F, 2], which is one matmul; its entries alternate. Or it is [E, D, F], of experts down(activation(gate(x))).
      activation: of the gate; with one array of both a function of gate and up.
      capacity: the most tokens of an expert; later ones skip it (`kept`). None: no token skips one. Where devices have tokens of their
        own it is that of a device's.
      biases: float[E, F, 2] and [E, D], of both matmuls, without `up_EDF`; None for none.
      scales_inputs: a row's weight multiplies what its expert reads, which is the same as multiplying gate(x) and up(x), and not what it
        returns. Without biases.

    Raises:
      UserError: some of the arrays are sharded over the mesh axis `expert`, and others are not.
    """
    if traces.is_read() and capacity is None:
        return _of_each_token(x_TD, routing, gate_EDF, up_EDF, down_EFD, activation, biases, scales_inputs)
    given = [array for array in (gate_EDF, up_EDF, down_EFD, *(biases or ())) if array is not None]
    taken = list(map(expert_parallel.take, given))
    stacks = [stack for stack in taken if stack is not None]
    if stacks:
        if len(stacks) < len(taken):
            raise UserError(expert_parallel.ALL)
        experts_TK = routing.experts_TK
        if capacity is not None:
            experts_TK = jnp.where(kept(routing, capacity), experts_TK, gate_EDF.shape[0])
        up = None if up_EDF is None else stacks.pop(1)
        gate, down, *own = stacks
        own_biases = (own[0], own[1]) if own else None
        return expert_parallel.apply(
            x_TD,
            experts_TK,
            routing.weights_TK,
            gate,
            up,
            down,
            activation,
            capacity=capacity,
            biases=own_biases,
            scales_inputs=scales_inputs,
        )
    (tokens, top_k), experts = routing.experts_TK.shape, gate_EDF.shape[0]
    expert_R = routing.experts_TK.reshape(-1)
    weights_TK, sizes_E = routing.weights_TK, _counts(routing)
    if capacity is not None:  # rows after the last group are 0, and no matmul computes them
        kept_TK = kept(routing, capacity)
        expert_R = jnp.where(kept_TK.reshape(-1), expert_R, experts)
        weights_TK, sizes_E = weights_TK * kept_TK, jnp.minimum(sizes_E, capacity)
    with jax.named_scope("experts"):
        order_R = jnp.argsort(expert_R, stable=True)
        place_R = jnp.argsort(order_R)
        place_TK = place_R.reshape(tokens, top_k)
        x_RD = expert_parallel.spread(x_TD, order_R, place_TK)
        weight_R1 = expert_parallel.moved(weights_TK.reshape(-1), order_R, place_R)[:, None]
        if scales_inputs:
            x_RD, weight_R1 = (x_RD * weight_R1).astype(x_TD.dtype), jnp.ones((), jnp.float32)
        of_both, of_down = biases or (None, None)
        added = functools.partial(_with_bias, expert_R[order_R])
        if up_EDF is None and len(gate_EDF.shape) == 3:
            hidden_RF = activation(multiply(x_RD, gate_EDF, sizes_E))
        elif up_EDF is None:
            flat_EDG = expert_matrices.flat(gate_EDF)
            both_RF2 = added(multiply(x_RD, flat_EDG, sizes_E).reshape(-1, *gate_EDF.shape[2:]), of_both)
            hidden_RF = activation(both_RF2[..., 0], both_RF2[..., 1])
        else:
            hidden_RF = activation(multiply(x_RD, gate_EDF, sizes_E)) * multiply(x_RD, up_EDF, sizes_E)
        weighted_RF = (hidden_RF * weight_R1).astype(x_TD.dtype)
        y_RD = added(multiply(weighted_RF, down_EFD, sizes_E), of_down, weight_R1)
        return expert_parallel.added_up(y_RD, order_R, place_TK).astype(x_TD.dtype)


def _of_each_token(
    x_TD: jax.Array,
    routing: Routing,
    gate: Matrices,
    up: Matrices | None,
    down: Matrices,
    activation: Callable,
    biases: tuple[jax.Array, jax.Array] | None,
    scales_inputs: bool,
) -> jax.Array:
    """Returns the same of all experts on all tokens, which shows a reader of the trace that no token reads another."""
    gate_EDF, down_EFD = expert_matrices.merged(expert_matrices.flat(gate)), expert_matrices.merged(down)
    gate_EDF = gate_EDF.reshape(gate.shape)
    of_both, of_down = biases or (0, 0)
    chosen_TKE = jax.nn.one_hot(routing.experts_TK, len(gate_EDF), dtype=x_TD.dtype)
    weights_TK, x_TED = routing.weights_TK, jnp.broadcast_to(x_TD[:, None], (len(x_TD), len(gate_EDF), x_TD.shape[1]))
    if scales_inputs:
        x_TED = x_TED * jnp.einsum("tke,tk->te", chosen_TKE, weights_TK)[..., None]
        weights_TK = jnp.ones_like(weights_TK)
    if up is None and gate_EDF.ndim == 3:
        hidden_TEF = activation(jnp.einsum("ted,edf->tef", x_TED, gate_EDF))
    elif up is None:
        both_TEF2 = jnp.einsum("ted,edfn->tefn", x_TED, gate_EDF) + of_both
        hidden_TEF = activation(both_TEF2[..., 0], both_TEF2[..., 1])
    else:
        up_TEF = jnp.einsum("ted,edf->tef", x_TED, expert_matrices.merged(up))
        hidden_TEF = activation(jnp.einsum("ted,edf->tef", x_TED, gate_EDF)) * up_TEF
    y_TED = jnp.einsum("tef,efd->ted", hidden_TEF, down_EFD) + of_down
    return jnp.einsum("ted,tke,tk->td", y_TED, chosen_TKE, weights_TK).astype(x_TD.dtype)


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Returns the most tokens of an expert: `factor` times those of a balanced load, rounded up."""
    return -int(-(factor * tokens * top_k) // experts)


def kept(routing: Routing, capacity: int) -> jax.Array:
    """Returns which of a token's experts have room for it: bool[T, K]. Earlier tokens come first."""
    expert_R = routing.experts_TK.reshape(-1)
    order_R = jnp.argsort(expert_R, stable=True)
    sizes_E = _counts(routing)
    number_R = jnp.arange(expert_R.size) - (jnp.cumsum(sizes_E) - sizes_E)[expert_R[order_R]]
    return (number_R < capacity)[jnp.argsort(order_R)].reshape(routing.experts_TK.shape)


def balance_loss(routing: Routing) -> jax.Array:
    """Returns E sum over experts of f[e] p[e], float32[]: f is the share of tokens that take an expert, p its mean score. Balanced: K.

    It is that of `transformers`, and K times that of arXiv:2101.03961 (eq. 4). f has no gradient. Inside a `jax.shard_map` f is that of the
    tokens of all devices, so the mean of the devices' losses is the loss of all tokens. With accumulation each micro-batch has its own.
    """
    tokens, experts = routing.probs_TE.shape
    axes = _devices()
    count_E, total = _counts(routing).astype(jnp.float32), jnp.float32(tokens)
    share_E = jax.lax.psum(count_E, axes) / jax.lax.psum(total, axes) if axes else count_E / total
    return experts * jnp.sum(jax.lax.stop_gradient(share_E) * jnp.mean(routing.probs_TE, axis=0))


def z_loss(routing: Routing) -> jax.Array:
    """Returns the mean over tokens of (log sum exp of the router's output)^2, float32[] (arXiv:2202.08906, eq. 5)."""
    return jnp.mean(jnp.square(jax.nn.logsumexp(routing.logits_TE, axis=-1)))


def balanced_bias(bias_E: jax.Array, routing: Routing, rate: float = 1e-3) -> jax.Array:
    """Returns the bias of the next step (arXiv:2408.15664): `rate` more for each expert with less than the mean load, less for others.

    Inside a `jax.shard_map` the load is that of all devices.
    """
    count_E, axes = _counts(routing).astype(jnp.float32), _devices()
    count_E = jax.lax.psum(count_E, axes) if axes else count_E
    return bias_E + rate * jnp.sign(jnp.mean(count_E) - count_E)


def metrics(routing: Routing, capacity: int | None = None) -> dict[str, jax.Array]:
    """Returns float32[] each, of this device's tokens: "load" (the largest expert's rows over the mean's), "dropped" (the share of rows
    that skip their expert) and "entropy" (the mean over tokens of the entropy of the scores, in nats)."""
    count_E, probs_TE = _counts(routing).astype(jnp.float32), routing.probs_TE
    dropped = jnp.float32(0) if capacity is None else jnp.mean(~kept(routing, capacity), dtype=jnp.float32)
    entropy_T = -jnp.sum(probs_TE * jnp.log(jnp.maximum(probs_TE, 1e-30)), axis=-1)
    return {"load": jnp.max(count_E) / jnp.mean(count_E), "dropped": dropped, "entropy": jnp.mean(entropy_T)}


def _counts(routing: Routing) -> jax.Array:
    """Returns the rows of each expert: int32[E]."""
    return jnp.zeros(routing.probs_TE.shape[1], jnp.int32).at[routing.experts_TK.reshape(-1)].add(1)


def _devices() -> tuple[str, ...]:
    """Returns the axes of a surrounding `jax.shard_map` along which tokens differ."""
    return mesh_lib.around(mesh_lib.SUMMED)


def _with_bias(
    expert_R: jax.Array, y_RN: jax.Array, bias_EN: jax.Array | None, weight_R1: jax.Array | float = 1.0
) -> jax.Array:
    """Adds the bias of each row's expert, times the row's weight, if there are biases. Its gradient is added up in float32."""
    if bias_EN is None:
        return y_RN
    return (y_RN + bias_EN.astype(jnp.float32)[expert_R] * weight_R1).astype(y_RN.dtype)
