"""Reads which tokens a tokenizer's files name. This module reads the files beside a tokenizer.json as AutoTokenizer of transformers does.

A tokenizer.json alone is not the tokenizer: tokenizer_config.json and special_tokens_map.json name special tokens, add some, and choose a
class. Of the classes one changes the ids of published files: LlamaTokenizer puts the space of SentencePiece before the first word of a
text alone, where older files put it after each special token too. (Read in transformers 5.24.)
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from zerojax import bounded, errors, files
from zerojax.errors import UserError

MOST_BYTES = 2**28  # of a tokenizer.json; the largest known ones have 2**25
TOKENIZER, CONFIG, TOKENIZER_CONFIG, GENERATION = (
    "tokenizer.json",
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
)
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CLEANS = "clean_up_tokenization_spaces"
_CLEANS_BPE = f"{_CLEANS}_for_bpe_even_though_it_will_corrupt_output"
_SETTINGS = ("add_prefix_space", "legacy", "split_special_tokens", _CLEANS, _CLEANS_BPE)  # that are true or false
_AS_SAVED = ("", "PreTrainedTokenizer", "TokenizersBackend")

LLAMA = "LlamaTokenizer"
_ENDOFTEXT = "<|endoftext|>"
# What a class names where the files do not.
CLASSES: Mapping[str, Mapping[str, str]] = {
    LLAMA: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {"unk_token": _ENDOFTEXT, "bos_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT},
    "Qwen2Tokenizer": {"unk_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT, "pad_token": _ENDOFTEXT},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "BertTokenizer": {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    "RobertaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
        "mask_token": "<mask>",
    },
    "T5Tokenizer": {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"},
}
# The class that transformers keeps for a model type; "" runs the file as it is.
MODELS: Mapping[str, str] = {
    **dict.fromkeys(("mistral", "ministral3", "mixtral", "phi3", "olmo2", "olmo3", "granite", "granitemoe"), ""),
    **dict.fromkeys(
        ("internlm3", "glm4", "glm4_moe", "ernie4_5", "ernie4_5_moe", "minimax_m2", "phimoe", "modernbert"), ""
    ),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("bart", "roberta"), "RobertaTokenizer"),
    **dict.fromkeys(("gpt2", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("bert", "distilbert"), "BertTokenizer"),
    "t5": "T5Tokenizer",
}
_OVERRULED = (
    "qwen2",
    "phi3",
    "internlm3",
    "ernie4_5",
    "ernie4_5_moe",
    "minimax_m2",
    "phimoe",
    "modernbert",
)  # model types whose published tokenizer_class is known to be wrong


@dataclasses.dataclass(frozen=True)
class Beside:
    """What the files beside a tokenizer.json say.

    Attributes:
      named: the text of each special token that is named, such as {"bos_token": "<s>"}.
      source: the file, or the class, that names each.
      flags: the tokens that are added or whose properties change, in order.
      special: those that are special, in order: they are added where they are missing.
      ids: {"bos_token_id": ..., ...} of generation_config.json and config.json.
      settings: tokenizer_config.json.
      kind: the class; "" where the file is run as it is.
      splits_special: whether the letters of special tokens are plain text everywhere.
      cleans: whether texts lose spaces before marks (`tokenizer.cleaned`), which those of BPE do if a setting of its own says so.
    """

    named: Mapping[str, str]
    source: Mapping[str, str]
    flags: tuple[tokenizers.AddedToken, ...]
    special: tuple[tokenizers.AddedToken, ...]
    ids: Mapping[str, Any]
    settings: Mapping[str, Any]
    kind: str
    splits_special: bool
    cleans: bool


def read(path: str | os.PathLike[str], content: Mapping[str, Any]) -> Beside:
    """Returns what the files beside a tokenizer.json say.

    Args:
      path: of the tokenizer.json; the files need not exist.
      content: of the tokenizer.json.

    Raises:
      UserError: one is damaged.
    """
    folder = pathlib.Path(path).parent
    settings = table(folder / TOKENIZER_CONFIG)
    model, generation = table(folder / CONFIG), table(folder / GENERATION)
    wanted = settings.get("tokenizer_class") or model.get("tokenizer_class")
    kind = _kind(str(wanted or "").removesuffix("Fast"), str(model.get("model_type") or ""), content)
    given = dict.fromkeys(CLASSES.get(kind, {}), f"{kind} of transformers")
    values: dict[str, Any] = {**CLASSES.get(kind, {})}
    sources = [(TOKENIZER_CONFIG, settings)]
    has_decoder = "added_tokens_decoder" in settings
    if not has_decoder:  # transformers reads the older files where the newer form is missing
        sources.append((SPECIAL_TOKENS, table(folder / SPECIAL_TOKENS)))
    lists: dict[str, Any] = {}
    for name, found in sources:
        own = {key: found[key] for key in _EXTRA if key in found}
        if name == TOKENIZER_CONFIG and _OLDER in own and not own.get(_NEWER):
            own = {_NEWER: own[_OLDER]}
        newer = own.get(_NEWER)
        roles = {
            key: value for key, value in found.items() if key in NAMED or (key.endswith("_token") and _text(value))
        }
        for key, value in [*roles.items(), *(newer.items() if isinstance(newer, Mapping) else ())]:
            values[key], given[key] = value, name
        if isinstance(newer, Mapping):  # it leaves no list of its name
            del own[_NEWER]
            lists.pop(_NEWER, None)
        elif isinstance(newer, list):
            own[_NEWER] = [*(lists.get(_NEWER) or ()), *newer]
        lists |= own
    listed = lists.get(_NEWER, lists.get(_OLDER))  # that of the older name counts where there is no other
    extra = listed if isinstance(listed, list) else []
    named = {key: text for key, value in values.items() if (text := _text(value))}
    place = folder / TOKENIZER_CONFIG
    flags_of = {name: _flag(settings, name, False, place) for name in _SETTINGS}
    by_id = dict(_items(settings.get("added_tokens_decoder"), place))
    if not has_decoder:
        special = {
            *(text for key, text in named.items() if key in NAMED),
            *(one for one in lists.get(_NEWER) or () if isinstance(one, str)),
        }
        for text, number in table(folder / ADDED_TOKENS).items():
            if type(number) is not int:
                line = f"{folder / ADDED_TOKENS}: the token {text!r} has the id {number!r}, which is no whole number"
                raise UserError(f"{line}; save the tokenizer again")
            by_id[number] = {"content": text, "normalized": text not in special, "special": text in special}
        by_id |= {entry["id"]: entry for entry in content.get("added_tokens") or []}
    flags = [_token(by_id[number], place) for number in sorted(by_id)]
    for token in flags:
        token.special |= token.content in named.values()
    names = [*(values[key] for key in sorted(named, key=_order)), *extra]
    special_of = (_token(value if isinstance(value, Mapping) else {}, place, _text(value)) for value in names)
    return Beside(
        named=named,
        source={key: given[key] for key in named},
        flags=tuple(flags),
        special=tuple({repr(token): token for token in special_of if token.content}.values()),
        ids={**model, **generation},
        settings=settings,
        kind=kind,
        splits_special=flags_of["split_special_tokens"],
        cleans=flags_of[_CLEANS] and (flags_of[_CLEANS_BPE] or not _is_bpe(content.get("model"))),
    )


def named(folder: pathlib.Path) -> Mapping[str, str]:
    """Returns the special tokens that a tokenizer's folder names, by name.

    Raises:
      UserError: a file is damaged.
    """
    path = folder / TOKENIZER
    content: Any = {}
    if os.path.lexists(path):
        with files.reading(path, "fix that", "is not JSON ({}); save the tokenizer again"):
            try:
                content = json.loads(bounded.read_bytes(path, MOST_BYTES))
            except RecursionError as error:
                raise ValueError("it is nested too deeply") from error
    return read(path, content if isinstance(content, Mapping) else {}).named


def table(path: pathlib.Path) -> Mapping[str, Any]:
    """Returns the settings in a JSON file; none if there is no such file.

    Raises:
      UserError: it is no table of settings.
    """
    if not os.path.lexists(path):
        return {}
    with files.reading(path, "fix that", "is not JSON ({}); save the tokenizer again"):
        found = bounded.parse_json(bounded.read_bytes(path))
    if not isinstance(found, Mapping):
        raise UserError(f"{path}: is not a table of settings; save the tokenizer again")
    if near := bounded.half_letter(found):
        raise UserError(
            f"{path}: holds half of a surrogate pair, which is no letter, near {near}; save the tokenizer again"
        )
    return found


def as_run(content: Mapping[str, Any], kind: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the contents of a tokenizer.json as the class `kind` runs it."""
    model = content.get("model")
    if kind != LLAMA or not isinstance(model, Mapping) or model.get("type") != "BPE":
        return content
    begins = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if begins else "never"
    steps: list[Any] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if begins:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        **content,
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {**model, "fuse_unk": True, "byte_fallback": True, "unk_token": None, "dropout": None},
    }


def add(model: tokenizers.Tokenizer, found: Beside) -> None:
    """Adds the tokens that files name to a tokenizer, and the properties that they give to those that it has."""
    model.add_tokens(list(found.flags))
    known = {token.content for token in model.get_added_tokens_decoder().values()}
    model.add_tokens([token for token in found.special if token.content not in known])


_ID = re.compile(r"[0-9]{1,9}")
_EXTRA = _NEWER, _OLDER = "extra_special_tokens", "additional_special_tokens"


def _kind(wanted: str, model_type: str, content: Mapping[str, Any]) -> str:
    """Returns the class that transformers takes for the one that the files name, and for a model's type."""
    known = MODELS.get(model_type)
    if (
        wanted == LLAMA
        and model_type not in _OVERRULED
        and "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    ):
        return ""
    if wanted in _AS_SAVED:
        return (known or "") if not wanted else ""
    if known is not None and known != wanted:
        wanted = known if model_type in _OVERRULED or not known else wanted
    return wanted if wanted in CLASSES else ""


def _is_bpe(model: Any) -> bool:
    """Returns whether the model of a tokenizer.json is BPE, which older files tell by its merges alone."""
    return isinstance(model, Mapping) and model.get("type", "BPE" if "merges" in model else "") == "BPE"


def _order(name: str) -> int:
    """Returns a number by which the names of special tokens are in the order in which missing ones get their ids."""
    return NAMED.index(name) if name in NAMED else len(NAMED)


def _text(value: Any) -> str:
    """Returns a special token's text, which may be in a table of its properties; "" for none."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def _token(value: Any, place: pathlib.Path, text: str = "") -> tokenizers.AddedToken:
    """Returns a token by the table of its properties; one that is named and has none is special and not normalized."""
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: a token of added_tokens_decoder is {errors.shown(value)}; save the tokenizer again")
    flags = {name: _flag(value, name, False, place) for name in _FLAGS if name in value}
    if text:
        flags = {"normalized": False, **flags, "special": True}
    return tokenizers.AddedToken(text or _text(value), **flags)


def _items(value: Any, place: pathlib.Path) -> list[tuple[int, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping) or not all(map(_ID.fullmatch, value)):
        raise UserError(f"{place}: added_tokens_decoder is not a table of tokens by id; save the tokenizer again")
    return [(int(key), token) for key, token in value.items()]


def _flag(settings: Mapping[str, Any], name: str, default: bool, place: pathlib.Path) -> bool:
    value = settings.get(name)
    return errors.truth(f"{place}: {name}", default if value is None else value, "save the tokenizer again")
