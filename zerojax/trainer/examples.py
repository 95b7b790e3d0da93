"""Opens the examples of a run with answers. This module turns a config and a model into the task, the form of its rows and its splits."""

import dataclasses
import os
import pathlib

from zerojax import mesh as mesh_lib
from zerojax.data import objectives
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import rows, splits, tasks, templates
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import pretrained
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import preferences
from zerojax.trainer import config as config_lib
from zerojax.trainer import rewarded
from zerojax.trainer import settings as settings_lib


def special_tokens(
    family: family_lib.Family,
    source: folder_lib.Folder | None,
    tokenizer: tokenizer_lib.Tokenizer,
    ends: tuple[int, ...] = (),
) -> family_lib.SpecialTokens:
    """Returns the tokens that begin, end and pad an answer: those of an imported model, or else the end that the tokenizer names.

    `ends` are those with which its chat template ends an answer; they come first.

    Raises:
      UserError: neither names one, and the model writes answers.
    """
    found = family_lib.SpecialTokens(start=objectives.START) if source is None else pretrained.special_tokens(source)
    stops = tuple(dict.fromkeys([*ends, *(found.stops or _end(family, tokenizer))]))
    return dataclasses.replace(found, stops=stops)


def _end(family: family_lib.Family, tokenizer: tokenizer_lib.Tokenizer) -> tuple[int, ...]:
    """Returns the token that ends a text of a model that names none."""
    if tokenizer.end_id is not None:
        return (tokenizer.end_id,)
    if family.is_classifier:
        return (tokenizer.bos_id or 0,)  # which stands for a prompt without any token
    raise UserError(
        "tokenizer: names no token that ends an answer: name one as eos_token in a tokenizer_config.json beside tokenizer.json"
    )


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
        bos=_begin(tokenizer) if is_own and not family.is_encoder_decoder else None,
        stops=special.stops,
        classes=classes(config, family, source),
        ends_with_start=source is not None and getattr(source.model, "starts_with_last", False),
    )


def _begin(tokenizer: tokenizer_lib.Tokenizer) -> int | None:
    """Returns the token that begins a text of a model that knows no other tokenizer."""
    return tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.end_id


def classes(
    config: settings_lib.Config, family: family_lib.Family, source: folder_lib.Folder | None
) -> tuple[str, ...]:
    """Returns the classes of a run's model; () if it is no classifier."""
    if not family.is_classifier:
        return ()
    return tuple(config.data.labels) if source is None else source.model.classes


def row(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> objectives.Row:
    """Declares the arrays of a run's rows.

    Raises:
      UserError: an answer has no room.
    """
    data, is_pair = config.data, family.is_encoder_decoder
    positions = family.positions(model)
    if is_pair and positions is not None and data.answer_len > positions:
        raise UserError(
            f"config.data.answer_len: {data.answer_len} is longer than the {positions} positions of the model; set {positions} or less"
        )
    is_read = data.task != tasks.EMBED and not family.is_classifier  # both read whole texts alone
    if not is_pair and is_read and data.answer_len > config.seq_len:
        raise UserError(
            f"config.data.answer_len: is {data.answer_len}, and a row of a decoder has config.seq_len={config.seq_len} tokens for a prompt "
            "and its answer; lower it, or raise config.seq_len"
        )
    known = getattr(model, "classes", ())
    shape = tasks.RowForm(is_pair, config.seq_len, data.answer_len, 0, 0, None, (), known)
    found = rows.lengths(shape, packs=_packs(data))
    if data.task == tasks.GRPO:
        return objectives.integers(rewarded.lengths(config, model, found))
    several = compared(config)
    return objectives.integers(found if several == 1 else rows.of_pair(found, several))


def compared(config: settings_lib.Config) -> int:
    """Returns the answers that a run's row has beside each other."""
    pairs = {
        tasks.DPO: preferences.LOSSES[config.dpo.loss].compares,
        tasks.REWARD: 2,
        tasks.EMBED: 3 if config.embedding.negative else 2,
    }
    return pairs.get(config.data.task, 1)


def has_reference(config: settings_lib.Config) -> bool:
    """Returns whether a run compares log-probabilities of its pairs with those under its first weights."""
    return config.data.task == tasks.DPO and preferences.LOSSES[config.dpo.loss].has_reference


def _packs(data: settings_lib.DataSettings) -> bool:
    """Returns whether a row holds several examples, which those that are compared do not."""
    return data.pack and data.task not in tasks.ANSWERS


def load(
    config: settings_lib.Config,
    family: family_lib.Family,
    source: folder_lib.Folder | None,
    tokenizer: tokenizer_lib.Tokenizer,
    data_dir: str | os.PathLike[str],
    cache: pathlib.Path | None = None,
    now: float | None = None,
) -> splits.Splits:
    """Reads and encodes the examples of a run. All processes must call it.

    `cache` is a folder for what is encoded, None for none, and `now` the time that chat templates are told.

    Raises:
      UserError: see `splits.load`.
    """
    return splits.load(
        config.data.places(data_dir),
        tokenizer,
        dataclasses.replace(task_settings(config, family, source), now=now),
        form(config, family, source, tokenizer),
        packs=_packs(config.data),
        folder=folder_of(config, tokenizer),
        cache=cache,
        compared=compared(config),
    )


def writes_date(config: settings_lib.Config, tokenizer: tokenizer_lib.Tokenizer) -> bool:
    """Returns whether the chat template that a run may read writes the date."""
    folder = folder_of(config, tokenizer)
    return folder is not None and any(templates.DATE in source for source in templates.own_templates(folder).values())


def task_settings(
    config: settings_lib.Config, family: family_lib.Family, source: folder_lib.Folder | None
) -> tasks.TaskSettings:
    """Returns what a run's task reads of an example."""
    data, usual = config.data, settings_lib.DataSettings
    is_usual = (data.prompt, data.answer, data.rejected) == (usual.prompt, usual.answer, usual.rejected)
    has_known_form = data.task in tasks.PAIRED and is_usual
    answer, labels = "" if has_known_form else data.answer, classes(config, family, source) or data.labels
    read = {
        field.name: getattr(data, field.name) for field in dataclasses.fields(tasks.TaskSettings) if field.name != "now"
    }
    wrong = config.embedding.negative if data.task == tasks.EMBED else data.rejected
    return tasks.TaskSettings(**{**read, "answer": answer, "labels": labels, "rejected": wrong})


def folder_of(config: settings_lib.Config, tokenizer: tokenizer_lib.Tokenizer) -> pathlib.Path | None:
    """Returns the folder of a run's tokenizer, where its chat template is; None for none."""
    is_file = isinstance(tokenizer, tokenizer_lib.FileTokenizer)
    return pathlib.Path(config.data.tokenizer).parent if is_file else None


def with_steps(config: settings_lib.Config, examples: splits.Splits) -> settings_lib.Config:
    """Returns the config with the steps that its epochs take, if it has some."""
    if not config.epochs:
        return config
    sizes = config_lib.batch_sizes(config, mesh_lib.ways(config_lib.make_mesh(config)))
    return dataclasses.replace(config, steps=examples.steps(config.epochs, sizes.global_batch_size))
