"""A mixture of experts as a Flax module. This module holds the weights of `ops.experts`: a router, and the experts' matrices, stacked.

Shapes: B batch, T length, D embed, E experts, F an expert's width.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import layers
from zerojax.ops import expert_matrices, experts

# The name under which each call gives its `ops.experts.Routing`, in Linen's collection "intermediates"
ROUTING = "routing"
ROUTER = "router"  # its weight
# An adapter of stacked matrices as one weight, which has another name than that of each expert's own module -> these matrices
JOINED = {"gate_and_up": ("gate", "up"), "down_of_all": ("down",)}


class Experts(nn.Module):
    """Adds up a token's experts, each down(activation(gate(x)) * up(x)).

    For losses and metrics of the router, call the model with `mutable=["intermediates"]`: each call gives its `Routing` there.

    Attributes:
      num_experts, top_k: of the mixture, and of a token.
      width: of an expert.
      activation: a name in `layers.ACTIVATIONS`.
      router: the settings of `ops.experts.route`, as pairs of names and values.
      capacity_factor: the most tokens of an expert, over those of a balanced load; later ones skip it. 0: none does.
      has_bias: whether experts are chosen by scores with a bias. It is the variable "bias" of the collection "router", which is not
        trained; see `ops.experts.balanced_bias`.
      has_fixed_bias: that bias is the weight "choice_bias" instead, as files hold it. It has no gradient.
      counts: whether that weight's gradient is the load of each expert; see `optim.balance`.
      has_router_bias: the router's output has a bias.
      clamp: (limit, slope) of the activation of gpt-oss, `clamped_gate`; gate and up are then one array "gate_up" [E, D, F, 2], and both
        matmuls have biases. None: `activation`, without biases.
      is_fused: gate and up are one array also without `clamp`.
      is_gated: an expert is what is said above; else it is down(activation(up(x))).
      scales_inputs: a token's weight multiplies what its experts read.
      latent_dim: experts read a projection of that width, and their sum is projected back; 0: none is.
      has_expert_scales: each expert has a weight that multiplies those of its tokens.
      stddevs: of the initial router, gate and up, and down.
      form: f(name, matrices) -> the form in which rows are multiplied by them; None: that in which they are stored.
    """

    num_experts: int
    top_k: int
    width: int
    activation: str = "silu"
    router: tuple[tuple[str, Any], ...] = ()
    capacity_factor: float = 0.0
    has_bias: bool = False
    has_fixed_bias: bool = False
    counts: bool = False
    has_router_bias: bool = False
    clamp: tuple[float, float] | None = None
    is_fused: bool = False
    is_gated: bool = True
    latent_dim: int = 0
    scales_inputs: bool = False
    has_expert_scales: bool = False
    stddevs: tuple[float, float, float] = (0.02, 0.02, 0.02)
    form: Callable[[str, expert_matrices.Matrices], expert_matrices.Matrices] | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        chosen_BTK: jax.Array | None = None,
        tells: bool = False,
        routed_BTD: jax.Array | None = None,
    ) -> Any:
        """Returns float[B, T, D], and if it `tells` the experts of each token, int32[B, T, K]. `chosen_BTK`: they are chosen elsewhere.
        `routed_BTD`: what the router reads; None: what experts read."""
        (*kept, dim), (router, inner, out) = x_BTD.shape, map(nn.initializers.normal, self.stddevs)
        router_DE = self.param(ROUTER, router, (dim, self.num_experts))
        count, zeros = self.num_experts, nn.initializers.zeros
        activation: Any = layers.ACTIVATIONS[self.activation]
        biases, read = None, self.latent_dim or dim
        if not self.is_gated:
            gate_EDF, up_EDF = self._matrices("up", inner, (count, read, self.width)), None
        elif self.clamp is None and not self.is_fused:
            gate_EDF, up_EDF = (self._matrices(name, inner, (count, read, self.width)) for name in ("gate", "up"))
        else:
            gate_EDF, up_EDF = self._stored("gate_up", inner, (count, read, self.width, 2)), None
            activation = functools.partial(_gated, activation)
        if self.clamp is not None:
            biases = (
                self.param("gate_up_bias", zeros, (count, self.width, 2)),
                self.param("down_bias", zeros, (count, dim)),
            )
            activation = functools.partial(clamped_gate, *self.clamp)
        down_EFD = self._matrices("down", out, (count, self.width, read))
        x_TD = x_BTD.reshape(-1, dim)
        settings = dict(self.router)
        if self.has_bias:
            settings["bias_E"] = self.variable("router", "bias", jnp.zeros, (count,)).value
        if self.has_fixed_bias:
            settings |= {"bias_E": self.param("choice_bias", zeros, (count,)), "counts": self.counts}
        with jax.named_scope("router"):
            routed_TD = x_TD if routed_BTD is None else routed_BTD.reshape(-1, dim)
            logits_TE = jnp.dot(routed_TD, router_DE, preferred_element_type=jnp.float32)
            if self.has_router_bias:
                logits_TE += self.param("router_bias", zeros, (count,)).astype(jnp.float32)
            chosen_TK = None if chosen_BTK is None else chosen_BTK.reshape(-1, self.top_k)
            routing = experts.route(logits_TE, self.top_k, **settings, chosen_TK=chosen_TK)
            if self.has_expert_scales:
                scale_E = self.param("scales", nn.initializers.ones, (count,)).astype(jnp.float32)
                routing = routing._replace(weights_TK=routing.weights_TK * scale_E[routing.experts_TK])
        self.sow("intermediates", ROUTING, routing)
        room = None
        if self.capacity_factor:
            room = experts.capacity(len(x_TD), self.top_k, count, self.capacity_factor)
        if self.latent_dim:
            x_TD = layers.Linear((read,), name="to_latent")(x_TD)
        given: dict[str, Any] = {"capacity": room, "biases": biases, "scales_inputs": self.scales_inputs}
        y_TD = experts.apply(x_TD, routing, gate_EDF, up_EDF, down_EFD, activation, **given)
        if self.latent_dim:
            y_TD = layers.Linear((dim,), stddev=self.stddevs[2], name="from_latent")(y_TD)
        y_BTD = y_TD.reshape(*kept, dim)
        return (y_BTD, routing.experts_TK.reshape(*kept, self.top_k)) if tells else y_BTD

    def _matrices(self, name: str, init: Any, shape: tuple[int, ...]) -> expert_matrices.Matrices:
        stored = self._stored(name, init, shape)
        return stored if self.form is None else self.form(name, stored)

    def _stored(self, name: str, init: Any, shape: tuple[int, ...]) -> expert_matrices.Matrices:
        found: Any = self.get_variable("params", name)
        return found if isinstance(found, expert_matrices.StoredMatrices) else self.param(name, init, shape)


def _gated(activation: Callable[[jax.Array], jax.Array], gate: jax.Array, up: jax.Array) -> jax.Array:
    return activation(gate) * up


def clamped_gate(limit: float, slope: float, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns (up + 1) gate sigmoid(slope gate), with the gate at most `limit` and up between -limit and limit (gpt-oss,
    arXiv:2508.10925, section 2.2)."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * nn.sigmoid(slope * gate)
