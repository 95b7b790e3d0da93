"""Model types of transformers that are no family here. This module says which compute what a known type does, and which hold a known text
model.

A config's fields and tensors alone prove nothing: those of Ernie 4.5 and Helium are Llama's, and they rotate other pairs of dims. So the
types are named, and each was compared with its class in transformers 5.24.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from zerojax.errors import UserError

# model_type -> the known one whose class computes the same of these tensors
SAME: Mapping[str, str] = {
    "camembert": "roberta",
    "iquestcoder": "llama",
}
# Types that read images too, whose config.json may have the text model's fields among its own, and types of text models inside of others.
# Their text model computes the same of a text alone: positions of three axes are then equal.
TEXT_MODELS: Mapping[str, str] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
}
# Those whose folders are read for their text model -> what its config.json may lack. The head is in files where it is its own.
READ_FOR_TEXT: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"tie_word_embeddings": True, "vocab_size": 262208, "num_attention_heads": 8},
    "mistral3": {"tie_word_embeddings": True},
    "gemma3n": {"tie_word_embeddings": True},
    "gemma4": {"tie_word_embeddings": True},
    "llama4": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}
# fmt: off
# model_types: {another name of a field: its own}, the `attribute_map` of their classes in transformers
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "bart marian mbart pegasus":
        {"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model", "num_hidden_layers": "encoder_layers"},
    "t5 mt5": {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers", "head_dim": "d_kv"},
    "gpt2": {
        "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    },
    "distilbert": {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3 glm4_moe": {"num_local_experts": "n_routed_experts"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "gpt_oss minimax_m2 mixtral qwen3_moe": {"num_experts": "num_local_experts"},
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "olmoe": {"num_local_experts": "num_experts"},
}
# fmt: on
_OF_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector|visual|vision_model|audio_tower|embed_vision|embed_audio|vision_embedder)\..*"
_OF_ALL = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
_SEES_LATER = ("paligemma",)  # types whose text model sees later tokens, and whose config.json need not say so
# Fields of a config.json that change no logits: names, tokens, and what is for training or for generation.
_WITHOUT_EFFECT = {
    "_attn_implementation",
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "classifier_dropout",
    "dtype",
    "eos_token_id",
    "gradient_checkpointing",
    "initializer_range",
    "is_decoder",
    "num_nextn_predict_layers",
    "output_past",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "quantization_config",
    "residual_dropout",
    "router_aux_loss_coef",
    "tie_word_embeddings",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Fields with the values that a known class has, whatever its config.json says, or that tensors tell too
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "attention_out_bias": (False, True),
    "aux_loss_alpha": (0.001,),
    "ep_size": (1,),
    "moe_layer_freq": (1,),
    "output_router_logits": (False,),
    "position_embedding_type": ("absolute",),
    "scoring_func": ("sigmoid",),
    "seq_aux": (True,),
    "topk_method": ("noaux_tc",),
}
_ODD = ["?"]  # what no field may be


def unread(
    raw: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any], write: Callable[[Any], Mapping[str, Any]]
) -> list[str]:
    """Returns the fields of a config.json that may change what a model computes, and that a known type does not read.

    Args:
      raw: the contents.
      read: (contents) -> the config of the known type. Raises UserError for a value that it does not know.
      write: (config) -> contents as a folder of the known type has them.
    """
    config = read(raw)
    written = write(config)

    def is_read(changed: Mapping[str, Any]) -> bool:
        try:
            return read(changed) != config
        except UserError:
            return True

    found = []
    for name, value in raw.items():
        is_known = (
            name in _WITHOUT_EFFECT or name in written or value in (None, [], {}) or value in _USUAL.get(name, ())
        )
        if isinstance(value, Mapping) and name.startswith("rope_"):
            found += [f"{name}.{inner}" for inner in value if not is_read({**raw, name: {**value, inner: _ODD}})]
        elif not is_known and not is_read({**raw, name: _ODD}):
            found.append(name)
    return found


def text_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the contents of a config.json of the text model inside of a type that reads more than texts; {} for none."""
    inner = raw.get("text_config")
    fields = inner if isinstance(inner, Mapping) else raw
    kind = fields.get("model_type")
    if not isinstance(kind, str) or (fields is raw and kind not in TEXT_MODELS) or raw.get("model_type") in _SEES_LATER:
        return {}
    axes = {name for name in ("rope_scaling", "rope_parameters") if "mrope_section" in (fields.get(name) or ())}
    own = {name: value for name, value in fields.items() if kind not in TEXT_MODELS or name not in axes}
    return {**own, "model_type": TEXT_MODELS.get(kind) or SAME.get(kind, kind)}


def by_own_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of a config.json with each field under its own name. Another name of it wins, as transformers sets it last."""
    aliases = next((names for kinds, names in _ALIASES.items() if raw.get("model_type") in kinds.split()), {})
    told = {own: raw[name] for name, own in aliases.items() if raw.get(name) is not None}
    return {**{name: value for name, value in raw.items() if name not in aliases}, **told}


def read_for_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the contents of a config.json of the text model of a type in `READ_FOR_TEXT`; {} for another."""
    kind, inner = str(raw.get("model_type")), text_model(raw)
    if kind not in READ_FOR_TEXT or not inner:
        return {}
    outer = {name: raw[name] for name in (*_OF_ALL, "quantization_config") if raw.get(name) is not None}
    return {**READ_FOR_TEXT[kind], **outer, **{name: value for name, value in inner.items() if value is not None}}


def names_of_text(name: str) -> str:
    """Returns the name in the text model of a tensor of a folder in `READ_FOR_TEXT`; "" for one of the parts that see images."""
    if re.fullmatch(_OF_IMAGES, name):
        return ""
    name = name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name
    return re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name)
