"""Opens the examples of a run with answers. This module turns a config and a model into the task, the form of its rows and its splits."""

import dataclasses
import os
import pathlib

from zerojax import mesh as mesh_lib
from zerojax.data import objectives
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import rows, splits, tasks
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import pretrained
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.trainer import config as config_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer.tuning import rewarded


def special_tokens(
    family: family_lib.Family, source: folder_lib.Folder | None, tokenizer: tokenizer_lib.Tokenizer
) -> family_lib.SpecialTokens:
    """Returns the tokens that begin, end and pad an answer: those of an imported model, or else the tokenizer's separator as the end."""
    end = tokenizer.bos_id
    if source is None:
        return family_lib.SpecialTokens(stops=(end,), start=objectives.START)
    found = pretrained.special_tokens(source)
    return found if found.stops else dataclasses.replace(found, stops=(end,))


def form(
    config: settings_lib.Config,
    family: family_lib.Family,
    source: folder_lib.Folder | None,
    tokenizer: tokenizer_lib.Tokenizer,
) -> tasks.RowForm:
    """Returns the form of a run's rows."""
    special = special_tokens(family, source, tokenizer)
    is_own = source is None or isinstance(tokenizer, tokenizer_lib.ByteTokenizer)
    return tasks.RowForm(
        is_encoder_decoder=family.is_encoder_decoder,
        seq_len=config.seq_len,
        answer_len=config.data.answer_len,
        start=special.start if source is None or not family.is_encoder_decoder else pretrained.start_of_labels(source),
        end=special.stops[0],
        bos=tokenizer.bos_id if is_own and not family.is_encoder_decoder else None,
        stops=special.stops,
        classes=classes(config, family, source),
    )


def classes(
    config: settings_lib.Config, family: family_lib.Family, source: folder_lib.Folder | None
) -> tuple[str, ...]:
    """Returns the classes of a run's model; () if it is no classifier."""
    if not family.is_classifier:
        return ()
    return tuple(config.data.labels) if source is None else source.model.classes


def lengths(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> dict[str, int]:
    """Returns the lengths of the arrays of a run's rows, by name.

    Raises:
      UserError: an answer has no room.
    """
    data, is_pair = config.data, family.is_encoder_decoder
    positions = family.positions(model)
    if is_pair and positions is not None and data.answer_len > positions:
        raise UserError(
            f"config.data.answer_len: {data.answer_len} is longer than the {positions} positions of the model; set {positions} or less"
        )
    if not is_pair and not family.is_classifier and data.answer_len > config.seq_len:
        raise UserError(
            f"config.data.answer_len: is {data.answer_len}, and a row of a decoder has config.seq_len={config.seq_len} tokens for a prompt "
            "and its answer; lower it, or raise config.seq_len"
        )
    known = getattr(model, "classes", ())
    shape = tasks.RowForm(is_pair, config.seq_len, data.answer_len, 0, 0, None, (), known)
    found = rows.lengths(shape, packs=data.pack and data.task not in tasks.ANSWERS)
    if data.task == tasks.GRPO:
        return rewarded.lengths(config, found)
    return rows.of_pair(found) if data.task == tasks.DPO else found


def load(
    config: settings_lib.Config,
    family: family_lib.Family,
    source: folder_lib.Folder | None,
    tokenizer: tokenizer_lib.Tokenizer,
    data_dir: str | os.PathLike,
    cache: pathlib.Path | None = None,
) -> splits.Splits:
    """Reads and encodes the examples of a run. All processes must call it. `cache` is a folder for what is encoded; None for none.

    Raises:
      UserError: see `splits.load`.
    """
    data = config.data
    return splits.load(
        config_lib.places(data, data_dir),
        tokenizer,
        task_settings(config, family, source),
        form(config, family, source, tokenizer),
        packs=data.pack and data.task not in tasks.ANSWERS,
        folder=folder_of(config, tokenizer),
        cache=cache,
    )


def task_settings(
    config: settings_lib.Config, family: family_lib.Family, source: folder_lib.Folder | None
) -> tasks.TaskSettings:
    """Returns what a run's task reads of an example."""
    data = config.data
    return tasks.TaskSettings(
        task=data.task,
        prompt=data.prompt,
        answer=data.answer,
        labels=classes(config, family, source) or data.labels,
        messages=data.messages,
        chat_template=data.chat_template,
        rejected=data.rejected,
    )


def folder_of(config: settings_lib.Config, tokenizer: tokenizer_lib.Tokenizer) -> pathlib.Path | None:
    """Returns the folder of the tokenizer's files; None if it has none."""
    is_file = isinstance(tokenizer, tokenizer_lib.FileTokenizer)
    return pathlib.Path(config.data.tokenizer).parent if is_file else None


def with_steps(config: settings_lib.Config, examples: splits.Splits) -> settings_lib.Config:
    """Returns the config with the steps that its epochs take, if it has some."""
    if not config.epochs:
        return config
    mesh = mesh_lib.make_mesh(**vars(config.mesh))
    sizes = config_lib.batch_sizes(config, mesh_lib.ways(mesh))
    return dataclasses.replace(config, steps=examples.steps(config.epochs, sizes.global_batch_size))
