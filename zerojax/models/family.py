"""Defines a model family. This module holds the `Family` that the trainer, the plan, the sampler and the export use.

Each family has its own config, a frozen dataclass. The trainer reads or sets six of its fields: `vocab_size` (0 in a preset takes the
tokenizer's), `num_layers`, `attention` (a kernel of `ops.attention`), `max_seq_len` (None for no limit), `tie_embeddings`, and `way` (how
devices attend that hold parts of sequences; None outside of training).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
from jax.typing import DTypeLike

from zerojax.models import decoding, parallel
from zerojax.tree import PyTree

Inputs = tuple[jax.ShapeDtypeStruct, ...]
ModelConfig = Any  # the frozen dataclass that says what a family's models look like; its fields are the family's own
# name in the weight tree -> (module, inputs to initialise it with)
Parts = dict[str, tuple[nn.Module, Inputs]]


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The ids with a meaning for generation."""

    stops: tuple[int, ...] = ()  # each ends a text
    pad: int = 0  # fills a row after its end
    start: int = 0  # begins every text of an encoder-decoder's decoder
    # the second token of a text, whatever its scores: the first new one after a prompt of one token; None for none
    forced_first: int | None = None
    forced_last: int | None = None  # the last of the most new tokens, whatever its scores; None for none


Form = Literal[
    "same", "flat", "row", "pairs", "halves", "stack", "experts_a", "experts_b", "halves_b", "turned_a", "turned_b"
]


class Parameter(NamedTuple):
    """Weights of a mixture that PEFT adapts as one parameter: its name in transformers, our paths, and the forms of our A and B."""

    name: str
    paths: tuple[str, ...]
    a: Form = "experts_a"
    b: Form = "experts_b"


class Tensor(NamedTuple):
    """One tensor of Hugging Face's files, or the same tensor of every layer.

    Attributes:
      name: its name there. "{}" stands for a layer's number. With "{expert}" each entry of our leaf's first dim is a tensor of
        its own there, and the rest describes one of them.
      inputs: the number of leading dims of our leaf that are inputs. A leaf [inputs..., outputs...] is stored as the matrix
        [outputs, inputs]. A leaf with 0 inputs is stored in its own order.
      inputs_first: the matrix is stored as [inputs, outputs], as in GPT-2's files.
      form: of a leaf with 0 inputs: "same" shape, "flat" (one dim), "row" (one dim more, of size 1, before the others), "pairs" (the
        last two dims are one), "halves" (these are, with the last of them first), "stack" (matrices of experts, [experts, inputs,
        outputs...] here and [experts, outputs, inputs] there, with the last of several dims of outputs first), or of PEFT's adapters of
        stacked experts "experts_a" ([experts, inputs, rank] here, [experts rank, inputs] there) and "experts_b" ([experts, rank,
        outputs...] here, [outputs, rank experts] there), "halves_b" (the last of several dims of outputs first), or where PEFT takes
        outputs for inputs "turned_b" (our A is its B) and "turned_a" (our B is its A, halves as in "halves_b")
      is_optional: files may lack it; it is then 0, or drawn.
      drawn: the standard deviation of the numbers that it then has.
    """

    name: str
    inputs: int = 0
    form: Form = "same"
    is_optional: bool = False
    drawn: float = 0.0
    inputs_first: bool = False


EXPERT = "{expert}"  # in a name of a tensor or module: an expert's number


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Hugging Face's names and layouts of the family's weights.

    Attributes:
      architectures: {model_type in config.json: the classes of transformers that are read}.
      tensors: (config) -> {our path: its tensor}. "{}" in a path stands for a layer's number.
      write: (config) -> the contents of config.json, without the dtype and the token ids.
      read: (contents of config.json, names of all tensors in the files) -> the config. Raises UserError for a model that the family
        cannot compute.
      copies: (contents of config.json) -> {regex over names of tensors: name of the tensor that they repeat}. Files may hold such copies of
        tied weights.
      ignored: a regex over names of tensors that hold no weights of the model, "" for none.
      unused: (contents of config.json) -> one over names of weights that no layer of such a model reads, "" for none.
      further: (contents of config.json) -> a regex over names of tensors of modules that predict tokens further ahead, which are not read;
        "" for none.
      renamed: pairs (regex in a name of a tensor, what it is now), for names in old files.
      in_modules: pairs (regex in a name of a tensor, what it is among transformers' modules), where these have other names than files.
      adapted: (config) -> the ends of names of the modules that get adapters by default, as in PEFT.
      refused: the last parts of names of linear modules whose adapters PEFT does not read.
      parameters: (config) -> {path of weights of a mixture that get one adapter: the parameter}. Experts are stacked in transformers and
        the router is no linear module, so PEFT adapts them as `target_parameters`.
      saved: the ends of names of the modules that are trained in full beside adapters, as in PEFT.
      repeated: (config) -> {name of a tensor: name of the one that it repeats}. Files that are written hold both, since transformers draws
        the first one anew where it is missing.
      prefix: begins all names but those in `outside`. Files of a model without its head lack it. "" if it has no such form.
      outside: the names of the head's tensors.
      quantized: pairs (model_type, quant_method of its config.json) of quantized weights that are read.
      starts: {model_type: the token before labels where config.json names none}, of transformers' classes of configs.
    """

    architectures: Mapping[str, tuple[str, ...]]
    tensors: Callable[[Any], Mapping[str, Tensor]]
    write: Callable[[Any], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Collection[str]], Any]
    copies: Callable[[Mapping[str, Any]], Mapping[str, str]]
    adapted: Callable[[Any], tuple[str, ...]]
    parameters: Callable[[Any], Mapping[str, Parameter]] = lambda config: {}
    repeated: Callable[[Any], Mapping[str, str]] = lambda config: {}
    ignored: str = ""
    unused: Callable[[Mapping[str, Any]], str] = lambda raw: ""
    further: Callable[[Mapping[str, Any]], str] = lambda raw: ""
    renamed: tuple[tuple[str, str], ...] = ()
    in_modules: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    prefix: str = ""
    outside: tuple[str, ...] = ()
    quantized: tuple[tuple[str, str], ...] = ()
    starts: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Stretch(NamedTuple):
    """How the positions of a model depend on a text's length.

    Attributes:
      after: the tokens of a text up to which they do not.
      is_read_anew: whether a text that grows beyond that is read anew, since all of its positions then have others; else what was read
        stays as it was.
    """

    after: int
    is_read_anew: bool


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      presets: configs by name.
      parts: (config) -> the modules that make up the weight tree. Equal modules share one compiled initialiser. Compiling one
        initialiser for the full tree takes minutes.
      objective: a name in `data.objectives`. It defines the arrays of a batch.
      loss: (config, params, batch, key=None) -> float32[], the mean over the batch, with dropout by a random key. With `by_token=True` the
        loss of each token, float32[batch, length], 0 where none is learned; a classifier has no such. With `layers.BESIDE` both, in this
        order. With `layers.DRAWS` a token that is drawn after each, and its loss, by "labels" that seed the draws. With `layers.SCORED`
        what scores the tokens. A model with another `output` gives the value of each text,
        float32[batch], or its last states. The arrays of a batch
        are those of the objective. A task's batch
        (`data.pairs`) has more: "labeled", 0 for tokens that are no labels; in a decoder "segments", the number of the text that a token
        belongs to; in an encoder-decoder "mask", 0 for padding of "inputs". All are int32 and of the shape of what they describe.
        Where devices hold parts of a row, arrays are as `data.parts` makes them.
      logits: (config, params, inputs, tokens: int32[batch, length]) -> float32[batch, length, vocab]: the scores of the token after each
        of `tokens`; with another `output` the value of each text, float32[batch, 1], or the last states. `inputs` are the other arrays
        of a prompt, by name.
        "mask", bool[batch, length], is False for padding: of "inputs" in an encoder-decoder, else of `tokens`.
      start: (config, params, inputs, tokens: int32[batch, length], lengths: int32[batch], slots) -> (scores of the token after the
        first `lengths` tokens of each row: float32[batch, vocab], caches of `slots` slots that hold what is remembered of `tokens`).
      caches: (config) -> a tree of `decoding.Held` that declares these caches, with a mask of the inputs.
      extend: (config, params, caches, step, tokens: int32[batch]) -> (scores of the next token, caches); see `decoding.Step`. A decoder
        also takes several tokens a row, int32[batch, length], and returns the scores after the last (`Step.last`).
      positions: (config) -> the most tokens of a text, where each position has weights of its own; None for no limit.
      is_encoder_decoder: whether a prompt has "inputs", and `tokens` begin with a token that starts every text.
      is_classifier: the model has `config.classes`, and `logits` are the scores of these for each text: float32[batch, classes]. Its
        batch has "inputs", "mask", "labels" and "labeled", the last two int32[batch, 1]. It writes no text.
      blocks: a regex over the paths of its repeated modules; see `zerojax.make_train_step`.
      heads: a regex over the paths of its output projections.
      attention: the attention kernels that the family supports.
      flops_per_token: (config, lengths, per_weight=6.0) -> the floating-point operations of training per token; a row has `seq_len` tokens.
        A weight costs `per_weight` of them for each token that it multiplies, 4 if it is frozen. `lengths` are
        the lengths of a row's arrays, by name.
      huggingface: the names and layouts of its weights in Hugging Face's files.
      parallel: which dims of its weights and activations tensor parallelism shards.
      one_row: (config, params, ways) -> `extend` for one row by kernels, on shards of so many devices, or None where there is none.
        Its keywords: `implementation`; `summed`, f(array) -> its sum over the devices, None for one device; `number`, of a device; and
        `processors`, of a device.
      stretch: (config) -> how positions depend on a text's length; None where they do not. A prompt that is longer than `Stretch.after`
        must be read at once.
      transposed: (config, params, device) -> f(params) -> the weights as `one_row` reads them faster on one such device, with scales also
        transposed (`quantized.TRANSPOSED`), or None where it does not.
    """

    presets: Mapping[str, Any]
    parts: Callable[[Any], Parts]
    objective: str
    loss: Callable[..., jax.Array]
    logits: Callable[[Any, Any, Mapping[str, jax.Array], jax.Array], jax.Array]
    start: Callable[[Any, Any, Mapping[str, jax.Array], jax.Array, jax.Array, int], tuple[jax.Array, Any]]
    extend: Callable[[Any, Any, Any, decoding.Step, jax.Array], tuple[jax.Array, Any]]
    positions: Callable[[Any], int | None]
    is_encoder_decoder: bool
    blocks: str
    heads: str
    attention: tuple[str, ...]
    flops_per_token: Callable[..., float]
    huggingface: HuggingFace
    parallel: parallel.Parallel
    is_classifier: bool = False
    caches: Callable[[Any], PyTree] = lambda config: ()
    one_row: Callable[[Any, Any, int], Callable[..., tuple[jax.Array, Any]] | None] = lambda config, params, ways: None
    stretch: Callable[[Any], Stretch | None] = lambda config: None
    transposed: Callable[[Any, Any, Any], Callable[[Any], Any] | None] = lambda config, params, device: None


def heads(family: Family, config: ModelConfig) -> str:
    """Returns the regex over the paths of a config's output projections, "" where the embedding table is the projection.

    That of a classifier never is. A head of one value is small.
    """
    is_tied = config.tie_embeddings and not family.is_classifier
    return "" if is_tied or output(config) != TOKENS else family.heads


def gathering(family: Family, config: ModelConfig, compute_dtype: DTypeLike | None) -> dict[str, Any]:
    """Returns how a program gathers the weights of a model: arguments of `where_used.where_used`, `forward_only` and `make_train_step`."""
    return {"blocks": family.blocks, "heads": heads(family, config), "compute_dtype": compute_dtype}


TOKENS, VALUE, STATES = "tokens", "value", "states"  # what a decoder gives


def output(config: ModelConfig) -> str:
    """Returns whether a decoder scores next TOKENS, gives each text a VALUE, or its last STATES."""
    return str(getattr(config, "output", TOKENS))


def writes_text(family: Family, config: ModelConfig) -> bool:
    """Returns whether a model scores next tokens."""
    return not family.is_classifier and output(config) == TOKENS


def head_dim(config: ModelConfig) -> int:
    """Returns the dims of a head of attention, as kernels get them."""
    latent = getattr(getattr(config, "heads", None), "latent", None)
    own = getattr(config, "head_dim", 0) or config.embed_dim // config.num_heads
    return own if latent is None else max(own, latent.value_dim)


def mixture(config: ModelConfig) -> Any:
    """Returns the shape of a config's mixture of experts, which a decoder may have; None if it has none."""
    return getattr(config, "mixture", None)


def parts_to_initialise(parts: Callable[[Any], Parts], config: ModelConfig) -> Parts:
    """Returns the parts of a config, with which any device can trace their initialisation.

    cuDNN's attention requires GPUs and 16-bit weights. The weights do not depend on the kernel.
    """
    return parts(dataclasses.replace(config, attention="xla"))


def abstract_params(parts: Callable[[Any], Parts], config: ModelConfig) -> dict[str, Any]:
    """Returns the weight tree of a config as ShapeDtypeStructs. This is the only source of a model's shapes.

    Args:
      parts: (config) -> its parts; see `Family`.
      config: the model's.
    """
    found = parts_to_initialise(parts, config)
    return {name: _abstract_part(module, inputs) for name, (module, inputs) in found.items()}


def count_params(parts: Callable[[Any], Parts], config: ModelConfig) -> int:
    """Returns the number of weights of a config."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(parts, config)))


@functools.lru_cache(maxsize=512)
def _abstract_part(module: nn.Module, inputs: Inputs) -> PyTree:
    return jax.eval_shape(lambda *arrays: module.init(jax.random.key(0), *arrays), *inputs)["params"]
