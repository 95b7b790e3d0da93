"""BERT and its relatives as families. This module holds their presets, the names of their tensors at Hugging Face, and their `Family`s."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import jax

from zerojax.errors import UserError
from zerojax.models import config_json, family, layers, parallel
from zerojax.models.bert import model, modern
from zerojax.models.bert.model import BertConfig
from zerojax.models.family import Tensor
from zerojax.tree import PyTree

_roberta = functools.partial(
    BertConfig, 50265, num_positions=514, pad=1, num_kinds=1, norm_eps=1e-5, model_type="roberta"
)
_xlm_roberta = functools.partial(_roberta, model_type="xlm-roberta")

# arXiv:1810.04805, section 3
PRESETS: dict[str, BertConfig] = {
    "bert_test": BertConfig(0, 2, embed_dim=64, num_heads=4, mlp_dim=128),
    "bert_base": BertConfig(30522, 12, embed_dim=768, num_heads=12, mlp_dim=3072),
    "bert_large": BertConfig(30522, 24, embed_dim=1024, num_heads=16, mlp_dim=4096),
}
# arXiv:1907.11692, section 4
ROBERTA_PRESETS: dict[str, BertConfig] = {
    "roberta_base": _roberta(12, embed_dim=768, num_heads=12, mlp_dim=3072),
    "roberta_large": _roberta(24, embed_dim=1024, num_heads=16, mlp_dim=4096),
}

# arXiv:1911.02116, section 4
XLM_ROBERTA_PRESETS: dict[str, BertConfig] = {
    "xlm_roberta_base": dataclasses.replace(
        _xlm_roberta(12, embed_dim=768, num_heads=12, mlp_dim=3072), vocab_size=250002
    ),
    "xlm_roberta_large": dataclasses.replace(
        _xlm_roberta(24, embed_dim=1024, num_heads=16, mlp_dim=4096), vocab_size=250002
    ),
}
# arXiv:1910.01108, section 3
DISTILBERT_PRESETS: dict[str, BertConfig] = {
    "distilbert_base": BertConfig(
        30522, 6, 768, 12, 3072, num_kinds=0, head_activation="relu", model_type="distilbert"
    ),
}

# arXiv:2412.13663, table 4
MODERN_PRESETS: dict[str, BertConfig] = {
    "modernbert_base": modern.ModernBertConfig(50368, 22, 768, 12, 1152),
    "modernbert_large": modern.ModernBertConfig(50368, 28, 1024, 16, 2624),
}


class _BertKind(NamedTuple):
    """What differs at Hugging Face.

    Attributes:
      name: begins the names of its classes.
      prefix: begins the names of its tensors.
      head: the names of the head's two linear modules.
      saved: see `family.HuggingFace`.
      ignored: a regex over names of tensors of other heads.
      vocab_size, pad: of a config.json that tells none; None: texts' positions begin with 0.
      others: further classes that are read.
    """

    name: str
    prefix: str
    head: tuple[str, str]
    saved: tuple[str, ...]
    ignored: str
    vocab_size: int = 30522
    pad: int | None = None
    others: tuple[str, ...] = ()


_ROBERTA = _BertKind(
    "Roberta",
    "roberta",
    ("classifier.dense", "classifier.out_proj"),
    ("classifier",),
    r"lm_head\..*|roberta\.pooler\..*",
    vocab_size=50265,
    pad=1,
)
_KINDS = {
    "bert": _BertKind(
        "Bert",
        "bert",
        ("bert.pooler.dense", "classifier"),
        ("classifier", "pooler.dense"),
        r"cls\..*",
        others=("BertForPreTraining",),
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA._replace(name="XLMRoberta", vocab_size=30522),
    "modernbert": _BertKind("ModernBert", "model", ("head.dense", "classifier"), ("classifier", "head.dense"), ""),
    "distilbert": _BertKind(
        "DistilBert",
        "distilbert",
        ("pre_classifier", "classifier"),
        ("classifier", "pre_classifier"),
        r"vocab_(transform|layer_norm|projector)\..*",
    ),
}
_LAYER = {
    "attention/q": ("attention.self.query", 1),
    "attention/k": ("attention.self.key", 1),
    "attention/v": ("attention.self.value", 1),
    "attention/o": ("attention.output.dense", 2),
    "mlp/up": ("intermediate.dense", 1),
    "mlp/down": ("output.dense", 1),
}
_NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
# DistilBERT's names of these, and of fields of its config.json
_DISTILBERT = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "attention.output.LayerNorm": "sa_layer_norm",
    "output.LayerNorm": "output_layer_norm",
}
_DISTILBERT_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


def _fields(kind: str) -> Mapping[str, str]:
    """Returns {the usual name of a field of config.json: this class's}."""
    return _DISTILBERT_FIELDS if kind == "distilbert" else {}


def _tensors(config: BertConfig) -> dict[str, Tensor]:
    kind, own = _KINDS[config.model_type], _DISTILBERT if config.model_type == "distilbert" else {}
    embeddings = f"{kind.prefix}.embeddings"
    layer = f"{kind.prefix}.{'transformer' if own else 'encoder'}.layer.{{}}"
    tables = {"embed": "word", "positions": "position", "kinds": "token_type"}
    found = {f"{ours}/embedding": Tensor(f"{embeddings}.{theirs}_embeddings.weight") for ours, theirs in tables.items()}
    norms = {"norm": f"{embeddings}.LayerNorm"}
    norms |= {f"layer_{{}}/{ours}": f"{layer}.{own.get(theirs, theirs)}" for ours, theirs in _NORMS.items()}
    for ours, theirs in norms.items():
        found |= {f"{ours}/scale": Tensor(f"{theirs}.weight"), f"{ours}/bias": Tensor(f"{theirs}.bias")}
    for ours, (theirs, inputs) in _LAYER.items():
        name = f"{layer}.{own.get(theirs, theirs)}"
        found[f"layer_{{}}/{ours}/kernel"] = Tensor(f"{name}.weight", inputs)
        found[f"layer_{{}}/{ours}/bias"] = Tensor(f"{name}.bias", form="flat")
    for ours, theirs in zip(("dense", "out"), kind.head):
        found[f"head/{ours}/kernel"] = Tensor(f"{theirs}.weight", 1, is_optional=True, drawn=config.stddev)
        found[f"head/{ours}/bias"] = Tensor(f"{theirs}.bias", is_optional=True)
    return found


def _write(config: BertConfig) -> dict[str, Any]:
    c, fields = config, _fields(config.model_type)
    found = {
        "architectures": [f"{_KINDS[c.model_type].name}ForSequenceClassification"],
        "model_type": c.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp_dim,
        "hidden_act": c.activation,
        "max_position_embeddings": c.num_positions,
        "type_vocab_size": c.num_kinds,
        "initializer_range": c.stddev,
        "layer_norm_eps": c.norm_eps,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0 if c.pad is None else c.pad,
        "id2label": {str(number): name for number, name in enumerate(c.classes)},
        "label2id": {name: number for number, name in enumerate(c.classes)},
        "problem_type": "single_label_classification",
    }
    if c.model_type == "distilbert":
        found |= {"seq_classif_dropout": c.dropout}
        del found["type_vocab_size"], found["layer_norm_eps"]
    return {fields.get(name, name): value for name, value in found.items()}


def _read(raw: Mapping[str, Any], names: Collection[str]) -> BertConfig:
    kind = config_json.Fields(raw).choice("model_type", _KINDS, "bert")
    f, own = config_json.Fields(raw, names=_fields(kind)), _KINDS[kind]
    is_distilbert = kind == "distilbert"
    f.heads("hidden_size", "num_attention_heads")
    for name, reason in (
        ("is_decoder", "the model is an encoder"),
        ("add_cross_attention", "the model is an encoder"),
        ("sinusoidal_pos_embds", "positions are learned"),
    ):
        if f.flag(name, False):
            raise f.refuse(name, f"false, since {reason}")
    f.choice("position_embedding_type", ("absolute",), "absolute")
    f.choice("problem_type", ("single_label_classification",), "single_label_classification")
    found = BertConfig(
        f.count("vocab_size", own.vocab_size),
        f.depth("num_hidden_layers", 6 if is_distilbert else 12),
        embed_dim=f.count("hidden_size", 768),
        num_heads=f.count("num_attention_heads", 12),
        mlp_dim=f.count("intermediate_size", 3072),
        classes=_classes(f),
        num_positions=f.count("max_position_embeddings", 512),
        pad=None if own.pad is None else _pad(f, own),
        num_kinds=0 if is_distilbert else f.count("type_vocab_size", 2),
        activation=f.activation("hidden_act", "gelu"),
        norm_eps=1e-12 if is_distilbert else f.number("layer_norm_eps", 1e-12),
        stddev=f.number("initializer_range", 0.02),
        head_activation="relu" if is_distilbert else "tanh",
        model_type=kind,
    )
    if found.max_seq_len < 1:
        raise f.refuse("max_position_embeddings", f"above pad_token_id + 1 = {found.num_positions - found.max_seq_len}")
    return found


def _pad(f: config_json.Fields, kind: _BertKind) -> int:
    """Returns the id whose tokens have no position."""
    found = f.raw.get("pad_token_id", kind.pad)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < f.count("vocab_size", kind.vocab_size):
        raise f.refuse("pad_token_id", "an id of the vocabulary, since positions are counted from it")
    return found


def _classes(f: config_json.Fields) -> tuple[str, ...]:
    """Returns the names of the classes in the order of their numbers."""
    told, count = f.group("id2label").raw, f.count("num_labels", 2)
    if not told:
        told = {str(number): f"LABEL_{number}" for number in range(count)}
    by_number = {str(number): name for number, name in told.items()}
    names = [by_number.get(str(number)) for number in range(len(told))]
    if len(names) < 2 or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise f.refuse("id2label", "a name of its own for each of two or more classes, numbered from 0")
    return tuple(cast(str, name) for name in names)


def _loss(
    config: BertConfig,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    by_token: bool | str = False,
) -> Any:
    """Returns the mean loss of the classes of texts, with that of each `by_token`."""
    arrays = (batch["inputs"], batch["labels"], batch.get("mask"), batch.get("labeled"), by_token)
    rngs = None if key is None else {layers.DROPOUT: key}
    return _net(config).apply({"params": params}, *arrays, method="loss", rngs=rngs)


def _logits(config: BertConfig, params: PyTree, inputs: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    found = _net(config).apply({"params": params}, tokens, inputs.get("mask"), inputs.get("kinds"))
    return cast(jax.Array, found)


def _net(config: BertConfig) -> model.Bert:
    return modern.ModernBert(config) if isinstance(config, modern.ModernBertConfig) else model.Bert(config)


def _writes_no_text(*_: Any) -> NoReturn:
    raise UserError("generation: the model is a classifier, which writes no text; ask for its scores of the classes")


def _flops_per_token(config: BertConfig, lengths: Mapping[str, int], per_weight: float = 6.0) -> float:
    return model.flops_per_token(config, lengths["inputs"], per_weight)


def _table(model_type: str) -> family.HuggingFace:
    kind = _KINDS[model_type]
    forms = ("ForSequenceClassification", "Model", "ForMaskedLM")
    return family.HuggingFace(
        architectures={model_type: (*(f"{kind.name}{form}" for form in forms), *kind.others)},
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=lambda config: ("q_lin", "v_lin") if config.model_type == "distilbert" else ("query", "value"),
        saved=kind.saved,
        copies=lambda raw: {},
        ignored=rf"{kind.prefix}\.embeddings\.position_ids|{kind.ignored}",
        renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        prefix=f"{kind.prefix}.",
        outside=tuple(
            f"{name}.{end}"
            for name in kind.head
            if not name.startswith(f"{kind.prefix}.")
            for end in ("weight", "bias")
        ),
    )


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    objective="next_token",  # not read: a classifier learns labeled texts alone
    loss=_loss,
    logits=_logits,
    start=_writes_no_text,
    extend=_writes_no_text,
    positions=lambda config: config.max_seq_len,
    is_encoder_decoder=False,
    is_classifier=True,
    blocks=r"layer_\d+",
    heads="head",
    attention=("xla", "cudnn"),
    flops_per_token=_flops_per_token,
    huggingface=_table("bert"),
    parallel=parallel.Parallel(
        weights=(
            *parallel.WEIGHTS,
            (r"positions/embedding", ("model",)),
            (r"kinds/embedding", (None,)),
            (r"head/dense/kernel", (None, "model")),
            (r"head/(dense/bias|out/kernel)", ("model",)),
        ),
        activations=(
            *parallel.HEADS,
            *parallel.WIDTH,
            (r"layer_\d+/(attention|mlp)", parallel.TOKENS, parallel.ALL_TOKENS),
            (r"embed|positions|kinds|norm|layer_\d+/(attention|mlp)_norm", parallel.TOKENS),
            (r"head/dense", (None, "model")),  # [batch, width]
            (r"head/out", (None, None)),
        ),
    ),
)
ROBERTA = dataclasses.replace(FAMILY, presets=ROBERTA_PRESETS, huggingface=_table("roberta"))
XLM_ROBERTA = dataclasses.replace(FAMILY, presets=XLM_ROBERTA_PRESETS, huggingface=_table("xlm-roberta"))
DISTILBERT = dataclasses.replace(FAMILY, presets=DISTILBERT_PRESETS, huggingface=_table("distilbert"))


_MODERN_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")


def _modern_tensors(config: modern.ModernBertConfig) -> dict[str, Tensor]:
    layer = "model.layers.{}"
    norms = {"norm": "model.embeddings.norm", "final_norm": "model.final_norm", "head/norm": "head.norm"}
    norms |= {"layer_{}/attention_norm": f"{layer}.attn_norm", "layer_{}/mlp_norm": f"{layer}.mlp_norm"}
    linear = {"attention/qkv": "attn.Wqkv", "attention/o": "attn.Wo", "mlp/gate_up": "mlp.Wi", "mlp/down": "mlp.Wo"}
    found = {"embed/embedding": Tensor("model.embeddings.tok_embeddings.weight")}
    for ours, theirs in norms.items():
        found |= {f"{ours}/scale": Tensor(f"{theirs}.weight"), f"{ours}/bias": Tensor(f"{theirs}.bias")}
    for ours, theirs in linear.items():
        inputs = 2 if ours.endswith("/o") else 1
        found[f"layer_{{}}/{ours}/kernel"] = Tensor(f"{layer}.{theirs}.weight", inputs)
        found[f"layer_{{}}/{ours}/bias"] = Tensor(f"{layer}.{theirs}.bias", form="flat")
    found |= {"head/dense/kernel": Tensor("head.dense.weight", 1), "head/dense/bias": Tensor("head.dense.bias")}
    found["head/out/kernel"] = Tensor("classifier.weight", 1, is_optional=True, drawn=config.stddev)
    return found | {"head/out/bias": Tensor("classifier.bias", is_optional=True)}


def _write_modern(config: modern.ModernBertConfig) -> dict[str, Any]:
    c, windows = config, [config.window_of(layer) for layer in range(config.num_layers)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    usual = _write(c)
    return {
        **{name: usual[name] for name in usual if not name.startswith(("type_vocab", "layer_norm", "hidden_act"))},
        "hidden_activation": c.activation,
        "norm_eps": c.norm_eps,
        **dict(zip(_MODERN_BIASES, (c.norm_bias, c.attention_bias, c.mlp_bias, c.head_bias))),
        "classifier_activation": c.head_activation,
        "classifier_pooling": c.pooling,
        "local_attention": 2 * max(windows) or 128,
        "layer_types": kinds,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in zip(("full_attention", "sliding_attention"), c.thetas)
        },
    }


def _read_modern(raw: Mapping[str, Any], names: Collection[str]) -> modern.ModernBertConfig:
    f = config_json.Fields(raw)
    f.choice("problem_type", ("single_label_classification",), "single_label_classification")
    f.heads("hidden_size", "num_attention_heads")
    layers_of = f.depth("num_hidden_layers", 22)
    if f.count("local_attention", 128) < 2:
        raise f.refuse("local_attention", "2 or more, as a token sees others")
    # The former sets the latter in transformers
    window = f.count("sliding_window", f.count("local_attention", 128) // 2)
    known = {"full_attention": 0, "sliding_attention": window}
    if raw.get("layer_types") is None:
        every = f.count("global_attn_every_n_layers", 3)
        windows = [window if layer % every else 0 for layer in range(layers_of)]
    else:
        windows = f.kinds("layer_types", known, layers_of)
    if raw.get("rope_scaling"):
        raise f.refuse("rope_scaling", "absent, since rotations are not stretched")
    rotations, thetas = f.group("rope_parameters"), []
    for kind, told, usual in zip(known, ("global_rope_theta", "local_rope_theta"), (160000.0, 10000.0)):
        group = rotations.group(kind)
        group.choice("rope_type" if "rope_type" in group.raw else "type", ("default",), "default")
        thetas.append(group.number("rope_theta", f.number(told, usual)))
    biases = [f.flag(name, False) for name in _MODERN_BIASES]
    return modern.ModernBertConfig(
        f.count("vocab_size", 50368),
        layers_of,
        f.count("hidden_size", 768),
        f.count("num_attention_heads", 12),
        f.count("intermediate_size", 1152),
        classes=_classes(f),
        num_positions=f.count("max_position_embeddings", 8192),
        activation=f.activation("hidden_activation", "gelu"),
        head_activation=f.activation("classifier_activation", "gelu"),
        norm_eps=f.number("norm_eps", 1e-5),
        stddev=f.number("initializer_range", 0.02),
        windows=tuple(windows),
        thetas=(thetas[0], thetas[1]),
        norm_bias=biases[0],
        attention_bias=biases[1],
        mlp_bias=biases[2],
        head_bias=biases[3],
        pooling="mean" if f.choice("classifier_pooling", ("cls", "mean"), "cls") == "mean" else "cls",
    )


def _modern_flops_per_token(config: Any, lengths: Mapping[str, int], per_weight: float = 6.0) -> float:
    seq_len, windows = lengths["inputs"], [config.window_of(layer) for layer in range(config.num_layers)]
    seen = sum(min(2 * window + 1, seq_len) if window else seq_len for window in windows)
    return model.flops_per_token(config, seq_len, per_weight, parts=modern.parts, seen=seen)


MODERNBERT = dataclasses.replace(
    FAMILY,
    presets=MODERN_PRESETS,
    parts=modern.parts,
    flops_per_token=_modern_flops_per_token,
    huggingface=dataclasses.replace(
        FAMILY.huggingface,
        architectures={"modernbert": ("ModernBertForSequenceClassification", "ModernBertForMaskedLM")},
        tensors=_modern_tensors,
        write=_write_modern,
        read=_read_modern,
        adapted=lambda config: ("Wqkv",),
        saved=("classifier", "head.dense"),
        ignored=r"decoder\.(weight|bias)",
        renamed=(),
        prefix="model.",
        outside=(
            "head.dense.weight",
            "head.dense.bias",
            "head.norm.weight",
            "head.norm.bias",
            "classifier.weight",
            "classifier.bias",
        ),
    ),
    parallel=FAMILY.parallel._replace(
        activations=(
            (r"final_norm", parallel.TOKENS),
            (r"head/norm", (None, None)),
            *parallel.FUSED,
            *FAMILY.parallel.activations,
        )
    ),
)
