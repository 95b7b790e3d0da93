"""The second branch of a layer: an MLP, or a mixture of experts. This module holds both.

Shapes: B batch, T length, D embed, F the MLP's width.
"""

import dataclasses
import statistics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import experts, layers
from zerojax.models.llama.config import LlamaConfig


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202), with the config's activation; or down(activation(up(x)))."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        down = layers.Linear((c.embed_dim,), stddev=c.residual_stddev, use_bias=c.mlp.has_biases, name="down")
        activation = layers.ACTIVATIONS[c.mlp.activation]
        if not c.mlp.is_gated:
            return down(activation(layers.Linear((c.mlp_dim,), use_bias=c.mlp.has_biases, name="up")(x_BTD)))
        if c.mlp.is_fused:
            both_BTXF = layers.Linear((2, c.mlp_dim), use_bias=c.mlp.has_biases, name="gate_up")(x_BTD)
            return down(activation(both_BTXF[:, :, 0]) * both_BTXF[:, :, 1])
        gate_BTF = layers.Linear((c.mlp_dim,), use_bias=c.mlp.has_biases, name="gate")(x_BTD)
        if c.mlp.sparsity:
            gate_BTF = _largest(gate_BTF, c.mlp.sparsity)
        up_BTF = layers.Linear((c.mlp_dim,), use_bias=c.mlp.has_biases, name="up")(x_BTD)
        return down(activation(gate_BTF) * up_BTF)


def _largest(gate_BTF: jax.Array, sparsity: float) -> jax.Array:
    """Returns the gates less the quantile of a normal distribution with their mean and deviation, and 0 for those below it."""
    mean_BT1, deviation_BT1 = (f(gate_BTF, axis=-1, keepdims=True) for f in (jnp.mean, jnp.std))
    quantile = jnp.asarray(statistics.NormalDist().inv_cdf(sparsity), gate_BTF.dtype)
    return nn.relu(gate_BTF - (mean_BT1 + deviation_BT1 * quantile))


class Mixture(nn.Module):
    """A mixture of experts, with the expert that all tokens take if there is one: its weight is sigmoid(shared_gate(x)).

    Beside an MLP (`MixtureForm.is_beside_mlp`) x is the residual stream, and with the norms of this module

        router(norm(x) / sqrt(D)),   norm(mlp(norm(x))) + norm(experts(norm(x))).
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, chosen_BTK: jax.Array | None = None, tells: bool = False) -> Any:
        """Returns float[B, T, D], and if it `tells` the experts of each token; see `experts.Experts`."""
        c, m = self.config, self.config.mixture
        assert m is not None
        groups, top_groups = m.groups
        router = (
            ("normalised", m.is_normalised),
            ("score", m.score),
            ("groups", groups),
            ("top_groups", top_groups),
            ("best_of_group", m.best_of_group),
            ("scale", m.scale),
            ("tolerance", m.tolerance),
        )
        stddevs = (0.02, 0.02, c.residual_stddev)
        given: dict[str, Any] = {} if chosen_BTK is None else {"chosen_BTK": chosen_BTK}
        given |= {"tells": True} if tells else {}
        norm = lambda name: layers.norm(c.norms.kind, c.norms.eps, c.norms.offset, name)  # noqa: E731
        read_BTD = norm("experts_norm")(x_BTD) if m.is_beside_mlp else x_BTD
        if m.is_beside_mlp:
            given["routed_BTD"] = norm("router_norm")(x_BTD) * jnp.asarray(c.embed_dim**-0.5, x_BTD.dtype)
        found = experts.Experts(
            m.experts,
            m.per_token,
            m.width,
            c.mlp.activation,
            router,
            has_fixed_bias=m.has_choice_bias,
            counts=m.counts_choices,
            has_router_bias=m.clamp is not None,
            clamp=m.clamp,
            is_fused=m.is_fused,
            is_gated=c.mlp.is_gated,
            latent_dim=m.latent_dim,
            scales_inputs=m.scales_inputs,
            has_expert_scales=m.is_beside_mlp,
            stddevs=stddevs,
            name="experts",
        )(read_BTD, **given)
        y_BTD = found[0] if tells else found
        if m.is_beside_mlp:
            dense_BTD = MLP(c, name="shared")(norm("shared_norm")(x_BTD))
            y_BTD = norm("experts_post_norm")(y_BTD) + norm("shared_post_norm")(dense_BTD)
        if m.shared_dim:
            shared_BTD = MLP(dataclasses.replace(c, mlp_dim=m.shared_dim), name="shared")(x_BTD)
            if m.is_shared_gated:
                shared_BTD = nn.sigmoid(layers.Linear((1,), name="shared_gate")(x_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return (y_BTD, found[1]) if tells else y_BTD
