"""What a Llama or one of its relatives looks like. This module holds the parts of a config, of which a relative is a combination.

A part is a frozen dataclass whose defaults are Llama's. Parts with modules of their own are beside these: `mla.Latent` and `rope.Rotation`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from zerojax.errors import UserError
from zerojax.models import scan_mixer
from zerojax.models.llama import convolution, delta, layer_inputs, mla
from zerojax.models.llama.altup import AltUp
from zerojax.models.rope import Rope, Rotation, Scaling
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention
from zerojax.ops import experts as experts_lib

Recurrent = delta.Delta | scan_mixer.Scan | convolution.Convolution
Branches = Literal["both", "alone", "mlp"]
Keys = Literal["own", "given", "shared"]


@dataclasses.dataclass(frozen=True)
class Heads:
    """What attention has beside its sizes and its rotation.

    Attributes:
      qkv_bias, o_bias: whether these projections have biases.
      is_fused: queries, keys and values are one projection.
      norm: queries and keys are normalised before they are rotated: in "each" head, "joint" over all heads, or "" for not at all. "unit":
        in each head, without a weight, once they are rotated, and not in layers without rotation.
      windows: for each layer, the number of tokens that a query sees, with its own (0: all before it); () for all layers 0. Fewer
        than there are layers are repeated.
      chunks: for each layer, the tokens of a chunk, of which alone a query sees those before it (0: a text is one); as `windows`.
      scale: multiplies the scores; 0: 1 / sqrt(head_dim).
      growth: (b, length): a query at position p of its text is multiplied by 1 + b log(1 + floor(p / length)) once it is rotated; None:
        it is not.
      grows_unrotated: that is so in layers without rotation alone, with p + 1 in place of p.
      cap: bounds the scores by a softcap; 0 for no bound.
      has_value_norm: values are normalised in each head, without a weight.
      values_are_keys: in layers without a window the projection of keys makes the values too.
      has_sinks: whether each head has a sink (`ops.sinks`).
      is_gated: what a head gives is multiplied by a sigmoid of the token's state, dim by dim.
      latent: the shape of latent attention (`mla`); None: attention is grouped. `head_dim` is then that of queries and keys.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    is_fused: bool = False
    norm: Literal["", "each", "joint", "unit"] = ""
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    scale: float = 0.0
    growth: tuple[float, int] | None = None
    grows_unrotated: bool = False
    cap: float = 0.0
    has_value_norm: bool = False
    values_are_keys: bool = False
    has_sinks: bool = False
    is_gated: bool = False
    latent: mla.Latent | None = None


@dataclasses.dataclass(frozen=True)
class Norms:
    """The norms of the residual stream.

    Attributes:
      kind: "rms", "layer" (with biases), or "unbiased" ("layer" without).
      eps: is added to the mean square.
      offset: is added to the scale of each RMSNorm, also of queries and keys.
      places: each residual branch is normalised "before" it, "after" it, or both. "shared": one norm is before both branches of a layer,
        which are parallel: x + attention(norm(x)) + mlp(norm(x)).
    """

    kind: Literal["rms", "layer", "unbiased"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    places: Literal["before", "after", "both", "shared"] = "before"


@dataclasses.dataclass(frozen=True)
class MLPForm:
    """The MLP of a layer.

    Attributes:
      activation: a name in `layers.ACTIVATIONS`; experts have it too.
      is_gated: it is down(activation(gate) * up), and otherwise down(activation(up)).
      is_fused: gate and up are one projection.
      has_biases: whether its projections have biases.
      sparsity: the share of a token's gates that become 0, if they are drawn from a normal distribution: those below its quantile, which
        is subtracted from the others.
    """

    activation: str = "silu"
    is_gated: bool = True
    is_fused: bool = False
    has_biases: bool = False
    sparsity: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a layer that are not those of all; the fields are those of `LlamaConfig` and `MLPForm`."""

    head_dim: int
    num_kv_heads: int
    mlp_dim: int
    sparsity: float = 0.0


@dataclasses.dataclass(frozen=True)
class MixtureForm:
    """The mixture of experts in place of a layer's MLP.

    Attributes:
      experts, per_token: their number, and that of a token's.
      width: of an expert.
      scales_inputs: a token's weight multiplies what its expert reads, and not what it returns.
      shared_dim: the width of an expert that all tokens take; 0 for none.
      is_shared_gated: whether that one has a weight of its own.
      dense_layers: the numbers of layers whose MLP is no mixture.
      is_normalised: whether the weights of a token's experts have a sum of 1.
      score, tolerance, groups, best_of_group, scale: see `ops.experts.route`: the score, its tolerance, the number of groups and those of a
        token, the experts that make a group's score, and what multiplies weights.
      has_choice_bias: whether experts are chosen by scores with a bias, a weight without a gradient.
      counts_choices: whether its gradient is the load of each expert instead (`optim.balance`).
      clamp: (limit, slope) of the activation of gpt-oss's experts (`experts.clamped_gate`), which have biases, as their router has; None:
        they are down(activation(gate) * up) without biases.
      is_fused: gate and up of all experts are one array, as they always are with `clamp`.
      latent_dim: the width of what experts read and return, between a projection before them and one after; 0: that of the embedding.
      is_beside_mlp: the layer's MLP stays, and both are added up, each with norms of its own before and after it. The router reads a third
        norm, and each expert has a weight that multiplies those of its tokens.
      remembers_choices: whether caches hold the experts of each token beside keys and values.
    """

    experts: int
    per_token: int
    width: int
    shared_dim: int = 0
    is_shared_gated: bool = True
    dense_layers: tuple[int, ...] = ()
    is_normalised: bool = True
    score: experts_lib.Score = "softmax"
    tolerance: float = 0.0
    groups: tuple[int, int] = (1, 1)
    best_of_group: int = 2
    scale: float = 1.0
    has_choice_bias: bool = False
    counts_choices: bool = False
    clamp: tuple[float, float] | None = None
    is_fused: bool = False
    latent_dim: int = 0
    scales_inputs: bool = False
    is_beside_mlp: bool = False
    remembers_choices: bool = False


@dataclasses.dataclass(frozen=True)
class Scales:
    """What multiplies and bounds.

    Attributes:
      embed, residual, logits: multiply the embeddings, what each residual branch adds, and the logits.
      logits_cap: bounds the logits by a softcap; 0 for no bound.
    """

    embed: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    logits_cap: float = 0.0


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The model's shape (Llama 3, arXiv:2407.21783, table 3), and its parts.

    Attributes:
      mixture: None: no layer's MLP is a mixture of experts.
      recurrent: layers that have a recurrence in place of attention; None: none has.
      branches: the residual branches of each layer: "both", attention (or a recurrence) "alone", or the "mlp" alone; () for all layers
        both. Fewer than there are layers are repeated.
      sizes: of each layer; () where all layers have those of the config. Fewer than there are layers are repeated.
      sharing_layers: so many of the last layers have no keys and values of their own, but those of the last layer before them that has a
        window, or none, as they.
      inputs: of each layer beside the embedding; None: none has.
      altup: residual streams, of which layers run on one; None: there is one.
      has_layer_scale: a weight without a gradient multiplies the result of each layer.
      output: what the model gives: "tokens", scores of next ones; "value", one of a text, read after its last token (a reward); "states",
        the last ones, without a head.
      has_logits_bias: each token's logit has a bias, once it is scaled and bounded.
      has_positions: each of the `max_seq_len` positions has an embedding, and nothing is rotated.
      way: how devices attend that each hold a part of every sequence; None: a device has all tokens.
      tile_tokens: tokens for which each layer's MLP, with its norm and its residual, runs at a time (`ops.tiles`); 0: all.
      model_type: the name of the row in Hugging Face's config.json.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_seq_len: int = 8192
    rotation: Rotation = dataclasses.field(default_factory=Rotation)
    heads: Heads = Heads()
    norms: Norms = Norms()
    mlp: MLPForm = MLPForm()
    mixture: MixtureForm | None = None
    recurrent: Recurrent | None = None
    branches: tuple[Branches, ...] = ()
    sizes: tuple[Sizes, ...] = ()
    sharing_layers: int = 0
    inputs: layer_inputs.Inputs | None = None
    altup: AltUp | None = None
    has_layer_scale: bool = False
    scales: Scales = Scales()
    tie_embeddings: bool = False
    output: Literal["tokens", "value", "states"] = "tokens"
    has_logits_bias: bool = False
    has_positions: bool = False
    attention: attention_lib.Kernel = "xla"
    way: context_attention.Way | None = None
    tile_tokens: int = 0
    model_type: str = "llama"

    def changed(self, **parts: Mapping[str, Any]) -> "LlamaConfig":
        """Returns the config with other values of fields of its parts, such as `heads={"windows": (8, 0)}`."""
        made = {name: dataclasses.replace(getattr(self, name), **fields) for name, fields in parts.items()}
        return dataclasses.replace(self, **made)

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer's MLP is a mixture of experts."""
        return self.mixture is not None and layer not in self.mixture.dense_layers

    def remembers_choices(self, layer: int) -> bool:
        """Returns whether a layer's cache holds the experts of tokens after keys and values."""
        return self.mixture is not None and self.mixture.remembers_choices and self.has_experts(layer)

    def branches_of(self, layer: int) -> Branches:
        """Returns the residual branches of a layer."""
        return self.branches[layer % len(self.branches)] if self.branches else "both"

    def attends(self, layer: int) -> bool:
        """Returns whether a layer has attention."""
        return self.branches_of(layer) != "mlp" and not self.is_recurrent(layer)

    def of_layer(self, layer: int) -> "LlamaConfig":
        """Returns the config of a layer, whose sizes are its own."""
        if not self.sizes:
            return self
        own = self.sizes[layer % len(self.sizes)]
        mlp = dataclasses.replace(self.mlp, sparsity=own.sparsity)
        found = dataclasses.replace(self, mlp=mlp, mlp_dim=own.mlp_dim, sizes=())
        return dataclasses.replace(found, head_dim=own.head_dim, num_kv_heads=own.num_kv_heads)

    def source_of(self, layer: int) -> int | None:
        """Returns the layer whose keys and values a layer has; None for its own."""
        first = self.num_layers - self.sharing_layers
        if layer < first:
            return None
        has_window = self.window_of(layer) > 0
        found = max((i for i in range(first) if (self.window_of(i) > 0) == has_window), default=None)
        if found is None:
            raise UserError(
                f"num_layers: is {self.num_layers}, and the last {self.sharing_layers} have the keys and values of a layer before them "
                f"{'with' if has_window else 'without'} a window, which is not there; take more layers"
            )
        return found

    def keys_of(self, layer: int) -> Keys:
        """Returns whether a layer has keys and values of its own, and gives them to others, or shares those of another."""
        if self.source_of(layer) is not None:
            return "shared"
        return "given" if layer in map(self.source_of, range(self.num_layers)) else "own"

    def is_recurrent(self, layer: int) -> bool:
        """Returns whether a layer has a recurrence in place of attention."""
        return self.recurrent is not None and self.recurrent.pattern[layer % len(self.recurrent.pattern)]

    def window_of(self, layer: int) -> int:
        """Returns the window of a layer."""
        windows = self.heads.windows
        return windows[layer % len(windows)] if windows else 0

    def chunk_of(self, layer: int) -> int:
        """Returns the tokens of a layer's chunk; 0 if it has none."""
        chunks = self.heads.chunks
        return chunks[layer % len(chunks)] if chunks else 0

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the rotation of a layer's queries and keys; None if they are not rotated."""
        return None if self.has_positions else self.rotation.of(layer, has_window=self.window_of(layer) > 0)

    @property
    def by_length(self) -> list[Scaling]:
        """Returns what stretches positions by the length of a text."""
        found = [self.rope_of(layer) for layer in range(self.num_layers)]
        return [
            one.scaling for one in found if one is not None and one.scaling is not None and one.scaling.reads_length
        ]

    def kind_of(self, layer: int) -> tuple[Any, ...]:
        """Returns what two layers have in common that take equal time."""
        return (
            self.has_experts(layer),
            (self.window_of(layer), self.chunk_of(layer)),
            self.rope_of(layer),
            self.is_recurrent(layer),
            self.branches_of(layer),
            self.sizes[layer % len(self.sizes)] if self.sizes else None,
        )

    @property
    def residual_stddev(self) -> float:
        """Returns the deviation of the initial kernels that write the residual stream.

        Each layer adds two terms to it. This keeps the final variance near that of one term (GPT-2).
        """
        return 0.02 / (2 * self.num_layers) ** 0.5
