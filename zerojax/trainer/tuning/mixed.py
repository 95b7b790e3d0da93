"""Opens the sources of a run that are read as they are needed. This module turns a config and a program into a mixture.

Those are config.data.sources, and a single one that is elsewhere, larger than STREAMED, or of whose examples the damaged ones are skipped.
"""

import dataclasses
import pathlib

from zerojax.data import batches, blocks, damaged, locations, mixture
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import tasks
from zerojax.errors import UserError
from zerojax.trainer import config as config_lib
from zerojax.trainer import examples, workdir
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib

STREAMED = 2**30  # bytes of files, above which nothing of all documents is made or held before the first step


def is_streamed(config: settings_lib.Config, folder: pathlib.Path) -> bool:
    """Returns whether a run reads its training examples as they are needed.

    A run in `folder` that was started before there were sources goes on with the order of all documents.

    Raises:
      UserError: a file cannot be found.
    """
    data = config.data
    if data.sources:
        return True
    if not data.train_file or config.epochs or data.task in tasks.ANSWERS or workdir.is_older(folder, "data.sources"):
        return False
    if locations.is_remote(data.train_file) or locations.is_remote(data.eval_file):
        return True
    if not blocks.is_known(data.train_file):
        return False
    size = sum(found.size for found in locations.matching(data.train_file, "train_file"))
    return size > STREAMED or (data.task != tasks.TEXT and data.on_bad == damaged.SKIP)


def open_mixture(
    program: program_lib.Program,
    tokenizer: tokenizer_lib.Tokenizer,
    data_dir: pathlib.Path,
    cache: pathlib.Path | None,
    now: float | None = None,
) -> mixture.SourceMixture:
    """Returns the sources of a run, opened.

    Args:
      program: the built program.
      tokenizer: encodes texts.
      data_dir: the folder of prepared datasets.
      cache: a folder for what takes long to make; None for none.
      now: the time that chat templates are told; None for the clock's.

    Raises:
      UserError: see `mixture.SourceMixture`; or the model's rows cannot hold texts and answers side by side.
    """
    config, family = program.config, program.family
    chosen = config_lib.sources(config.data) or (config_lib.SourceSettings("data", ((0, 1.0),), config.data, ""),)
    kinds = {source.data.task for source in chosen}
    if len(kinds) > 1 and (family.is_encoder_decoder or family.is_classifier):
        what = "an encoder-decoder" if family.is_encoder_decoder else "a classifier"
        raise UserError(
            f"config.data.sources: have the tasks {' and '.join(sorted(kinds))}, whose rows have other arrays in {what}; give all the same "
            "task"
        )
    packs = config.data.pack and not family.is_classifier
    form = None if kinds == {tasks.TEXT} else examples.form(config, family, program.weights.source, tokenizer)
    sources = []
    for source in chosen:
        own = dataclasses.replace(config, data=source.data)
        task = None
        if source.data.task != tasks.TEXT:
            task = dataclasses.replace(examples.task_settings(own, family, program.weights.source), now=now)
        places = source.data.places(data_dir)
        where = f"{source.where}." if source.where else ""
        sources.append(mixture.MixedSource(source.title, places, source.weight, source.data.text_key, task, where))
    make = mixture.RowMaker(
        tokenizer,
        program.objective.form(tokenizer, config.seq_len),
        form,
        program.lengths,
        packs,
        examples.folder_of(config, tokenizer),
    )
    by, on_bad = config.data.mix_by, config.data.on_bad
    return mixture.SourceMixture(sources, make, program.sizes.global_batch_size, by=by, on_bad=on_bad, cache=cache)


def names(config: settings_lib.Config) -> list[str]:
    """Returns the names of the datasets that a run reads."""
    groups = [source.data for source in config_lib.sources(config.data)] or [config.data]
    return [group.name for group in groups if not group.train_file and group.name != batches.RANDOM]
