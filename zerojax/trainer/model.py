"""Chooses the model of a run. This module finds the family and the model of a preset or a folder, and checks that they suit the rest."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from zerojax import configs, errors, files
from zerojax import mesh as mesh_lib
from zerojax.data import mixture, objectives, parts
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import rows, tasks
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.models import decoding, families
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import attention, context_attention
from zerojax.trainer import examples
from zerojax.trainer import settings as settings_lib

_HANDED_ON = "recurrent layers hand their states on from device to device"


def source(config: settings_lib.Config) -> folder_lib.Folder | None:
    """Opens the folder that `config.init_from` names, if it does."""
    if not config.init_from:
        return None
    files.check_path(config.init_from, "config.init_from")
    with errors.below("config.init_from: "):
        _check_trained(pathlib.Path(config.init_from))
        opened = folder_lib.open_folder(config.init_from)
    model = _with_classes(config, opened.family, opened.model, opened)
    return dataclasses.replace(opened, model=model)


def _check_trained(folder: pathlib.Path) -> None:
    """Raises a UserError with the command to run first for a folder that is not there, and is where a run of one of our configs writes."""
    run = folder.parent
    is_ours = folder.name == "export" and run.name in configs.names()
    if is_ours and configs.get(run.name).export.format == "huggingface" and not os.path.isdir(folder):
        raise UserError(
            f"{folder}: is not there yet; write it first: zerojax train --config {run.name} --workdir {run}"
        )


def family_of(config: settings_lib.Config) -> tuple[family_lib.Family, folder_lib.Folder | None]:
    """Returns the family of a config's model and the folder that it is imported from, if it is."""
    opened = source(config)
    return families.PRESETS[config.model.preset] if opened is None else opened.family, opened


def shape(
    config: settings_lib.Config, opened: folder_lib.Folder | None, tokenizer_vocab: int = 0
) -> tuple[family_lib.Family, Any]:
    """Returns the family and the config of the folder's model, or of the preset with its derived fields set."""
    chosen = config.model
    if opened is None:
        family = families.PRESETS[chosen.preset]
        preset = family.presets[chosen.preset]
        vocab = (
            chosen.vocab_size
            or preset.vocab_size
            or tokenizer_vocab
            or tokenizer_lib.load_tokenizer(config.data.tokenizer).vocab_size
        )
        preset = dataclasses.replace(preset, vocab_size=vocab, num_layers=chosen.num_layers or preset.num_layers)
        return family, _with_classes(config, family, preset, None)
    for name in ("vocab_size", "num_layers"):
        if value := getattr(chosen, name):
            raise UserError(
                f"config.model.{name}: is {value}, and config.init_from={config.init_from} has its own model of "
                f"{name}={getattr(opened.model, name)}; set --config.model.{name}=0"
            )
    return opened.family, opened.model


def _with_classes(
    config: settings_lib.Config, family: family_lib.Family, model: ModelConfig, opened: folder_lib.Folder | None
) -> ModelConfig:
    """Returns the model with the classes of the run, if it is a classifier, or with the head that the task learns.

    Raises:
      UserError: the model has no such head, or has that of another task; the run learns no classes, does not name them,
        or has not as many as the folder's head.
    """
    name = config.init_from or f"config.model.preset={config.model.preset}"
    wanted = {tasks.REWARD: family_lib.VALUE, tasks.EMBED: family_lib.STATES}.get(config.data.task, family_lib.TOKENS)
    if wanted != family_lib.TOKENS and "score/kernel" in family.huggingface.tensors(model):
        return dataclasses.replace(model, output=wanted)
    task = f"config.data.task: is {config.data.task}, and {name}"
    if wanted != family_lib.TOKENS:
        raise UserError(
            f"{task} is no decoder that may have another head than that of next tokens; choose another model"
        )
    if (own := family_lib.output(model)) != wanted:
        told = {
            family_lib.VALUE: "gives texts values; set --config.data.task=reward",
            family_lib.STATES: "has no head of next tokens; set --config.data.task=embed",
        }
        raise UserError(f"{task} {told[own]}")
    if not family.is_classifier:
        return model
    labels = tuple(config.data.labels)
    if config.data.task != tasks.CLASSIFICATION:
        raise UserError(
            f"config.data.task: is {config.data.task}, and {name} is a classifier, which answers with one of its classes; set "
            "--config.data.task=classification"
        )
    has_head = opened is not None and not opened.drawn
    if not has_head and len(labels) < 2:
        raise UserError(
            f"config.data.labels: has {len(labels)} classes, and {name} has no head yet; name two or more, in the order of their numbers"
        )
    if has_head and labels and len(labels) != len(model.classes):
        raise UserError(
            f"config.data.labels: names {len(labels)} classes, and the head of {name} has {len(model.classes)} "
            f"({', '.join(model.classes[:8])}); name as many, or omit it; for a new head start from the model without its own, as "
            f'transformers\' AutoModel.from_pretrained("{config.init_from}").save_pretrained(FOLDER) writes it'
        )
    return dataclasses.replace(model, classes=labels or model.classes)


def choose(
    config: settings_lib.Config,
    opened: folder_lib.Folder | None,
    mesh: Mesh,
    compute_dtype: DTypeLike,
    tokenizer_vocab: int,
) -> tuple[family_lib.Family, Any]:
    """Returns the same, with the kernel of attention and the dropout.

    Raises:
      UserError: the model does not suit the tokenizer, the length of the sequences or the devices.
    """
    family, model = shape(config, opened, tokenizer_vocab)
    name = f"config.model.preset={config.model.preset}" if opened is None else str(opened.path)
    if model.vocab_size < tokenizer_vocab:
        way_out = f"set --config.model.vocab_size={tokenizer_vocab}" if opened is None else "choose its own tokenizer"
        raise UserError(
            f"config.model.vocab_size: {model.vocab_size} is smaller than the {tokenizer_vocab} ids of config.data.tokenizer; {way_out}"
        )
    if model.max_seq_len and config.seq_len > model.max_seq_len:
        raise UserError(
            f"config.seq_len: {config.seq_len} is longer than the {model.max_seq_len} positions of {name}; "
            f"set --config.seq_len={model.max_seq_len} or less"
        )
    row(config, family, model)  # refuses one that is too short
    platform = mesh_lib.platform(mesh)
    known = ("xla",) if is_capped(model) else family.attention
    if has_sinks(model):
        known = tuple(kernel for kernel in known if kernel != "splash")  # which returns no log-sum-exps
    chosen = attention.choose_kernel(
        config.model.attention,
        known,
        platform,
        compute_dtype,
        config.seq_len,
        head_dim=family_lib.head_dim(model),
        capability=mesh_lib.capability(mesh),
    )
    asked = {key: value for key in ("dropout", "tile_tokens") if (value := getattr(config.model, key))}
    for key, value in asked.items():
        if not hasattr(model, key):
            what = "has no dropout" if key == "dropout" else "is no decoder, and only decoders run in tiles"
            off = "long_texts=False" if key == "tile_tokens" and config.model.long_texts else f"{key}=0"
            raise UserError(f"config.model.{key}: is {value}, and the model of {name} {what}; set --config.model.{off}")
    return family, dataclasses.replace(model, attention=chosen, **asked)


def is_capped(model: ModelConfig) -> bool:
    """Returns whether scores of attention are bounded, which no fused kernel does."""
    return bool(getattr(getattr(model, "heads", None), "cap", 0.0))


def has_sinks(model: ModelConfig) -> bool:
    """Returns whether heads have sinks."""
    return bool(getattr(getattr(model, "heads", None), "has_sinks", False))


def row(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> objectives.Row:
    """Declares the arrays of a batch's rows, by the run's task."""
    if config.data.task == tasks.TEXT:
        found = objectives.OBJECTIVES[family.objective].row(config.seq_len)
    else:
        found = examples.row(config, family, model)
    if len(config.data.sources) < 2:
        return found
    return {**found, mixture.SOURCES: found["inputs" if "inputs" in found else "tokens"]}


def lengths_of_answer(config: settings_lib.Config, found: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the lengths of the arrays of one answer of a row, which holds all of a pair."""
    count = examples.compared(config)
    return {name: length if name in rows.PROMPT else length // count for name, length in found.items()}


def way(
    config: settings_lib.Config, family: family_lib.Family, model: ModelConfig, mesh: Mesh, rows: int
) -> context_attention.Way | None:
    """Returns how devices attend that each hold a part of `rows` rows in a pass; None if a device has all tokens of its rows.

    Raises:
      UserError: the tokens of a row do not divide.
    """
    ways = mesh_lib.size(mesh, mesh_lib.TOKENS)
    if ways == 1:
        return None
    reasons = (
        (family.is_classifier, "the head of a classifier reads a text's first token and"),
        (has_sinks(model), "attention with sinks"),
        (bool(getattr(getattr(model, "heads", None), "chunks", ())), "attention in chunks"),
    )
    for is_so, reads in reasons:
        if is_so:
            raise UserError(
                f"config.mesh.context: is {ways}, and {reads} needs all tokens of a row on one device; set --config.mesh.context=1"
            )
    found = objectives.lengths(parts.row(row(config, family, model)))
    for name, length in found.items():
        if length % ways:
            raise UserError(
                f"config.mesh.context: {length} {name} of a row do not divide into {ways} parts; {_way_out(config, family, ways)}"
            )
    windows = getattr(getattr(model, "heads", None), "windows", ()) or (0,)
    caches = family.caches(model)
    is_recurrent = decoding.is_recurrent(caches)
    chosen = context_attention.choose(
        heads=model.num_heads,
        kv_heads=getattr(model, "num_kv_heads", model.num_heads),
        head_dim=getattr(model, "head_dim", model.embed_dim // model.num_heads),
        ways=ways,
        length=max(found.values()),
        batch=rows,
        is_causal=not family.is_encoder_decoder,
        window=0 if 0 in windows else max(windows),
        packed="segments" in found,
        has_bias=family.is_encoder_decoder,  # some have one, and attention to an encoder has keys of another length
        model=mesh_lib.size(mesh, mesh_lib.COMPILER),
        order="contiguous" if is_recurrent else None,  # in another, a state would travel to and fro
    )
    if not is_recurrent:
        return chosen
    attends = any(one.positions for one in jax.tree.leaves(caches))
    text = f"{chosen.text}; {_HANDED_ON}" if attends else _HANDED_ON
    return dataclasses.replace(chosen, text=text)


def _way_out(config: settings_lib.Config, family: family_lib.Family, ways: int) -> str:
    """Returns what makes the tokens of rows divide into so many parts."""
    if config.data.task != tasks.TEXT:
        return f"set config.seq_len, and config.data.answer_len if there is one, to multiples of {ways}"
    made = objectives.OBJECTIVES[family.objective].row
    longer = range(config.seq_len, config.seq_len + 100 * ways)
    fitting = (n for n in longer if not any(array.shape[0] % ways for array in parts.row(made(n)).values()))
    found = next(fitting, None)
    return "set --config.mesh.context=1" if found is None else f"set --config.seq_len={found}"
