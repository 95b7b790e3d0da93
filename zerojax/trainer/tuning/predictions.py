"""Answers the examples of a file, and writes the answers beside the labels. This module holds what `zerojax generate --file` does.

The prompts are those that the run's own evaluation asks: its templates, its tokenizer, cut to its lengths. They are answered in batches of
one shape or a few, and each row gets what it would get alone.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

from zerojax import bounded, errors, files
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import records, tasks
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.trainer import examples, workdir
from zerojax.trainer.tuning import answers

SHORTEST = 16  # tokens of a batch's prompts; longer ones are padded to a power of two, so that few shapes are compiled
FIELDS = ("prediction", "expected", "is_right")  # that are added to an example


class Asking(NamedTuple):
    """How examples become prompts."""

    settings: tasks.TaskSettings  # the task and its templates
    # the most tokens of a prompt (with its answer, for a decoder); 0: as many as the model has positions for
    seq_len: int
    answer_len: int  # the tokens of an answer; 0: not known


def asking(run: pathlib.Path | None, template: str | None) -> Asking:
    """Returns how a run asks its examples, read from its config.json, with another template of the prompt if one is given.

    Raises:
      UserError: there is neither a run that learns answers nor a template, or the run's config cannot be read.
    """
    if run is None:
        if template is None:
            raise UserError(
                "--file: the prompts need a template; name the run that trained the model with --run WORKDIR, or give "
                "--template 'Tweet: {text} Label: '"
            )
        return Asking(tasks.TaskSettings(tasks.SEQ2SEQ, template, "{label}", (), "messages", "auto"), 0, 0)
    path = run / workdir.CONFIG_FILE
    try:
        saved = bounded.parse_json(bounded.read_bytes(path))
        data, seq_len = saved["data"], int(saved["seq_len"])
        names = [field.name for field in dataclasses.fields(tasks.TaskSettings)]
        settings = tasks.TaskSettings(**{name: data[name] for name in names if name in data})  # older runs lack some
        answer_len = int(data["answer_len"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--run: {path} is not the config of a run ({errors.one_line(error)}); name a --workdir"
        ) from error
    settings = dataclasses.replace(settings, labels=tuple(settings.labels))
    if settings.task == tasks.TEXT:
        if template is None:
            raise UserError(f"--run: {run} learnt text and has no template of prompts; give --template '{{text}}'")
        return asking(None, template)
    return Asking(settings if template is None else dataclasses.replace(settings, prompt=template), seq_len, answer_len)


def run_of(*folders: str | None) -> pathlib.Path | None:
    """Returns the first run with answers whose export one of these folders is, or None."""
    for folder in filter(None, folders):
        parent = pathlib.Path(os.path.realpath(folder)).parent
        with contextlib.suppress(UserError):
            asking(parent, None)
            return parent
    return None


def encode(
    source: records.Files,
    name: str,
    how: Asking,
    folder: folder_lib.Folder,
    tokenizer: tokenizer_lib.Tokenizer,
    new_tokens: int,
) -> tasks.Asked:
    """Returns the prompts of all examples and their labels.

    Raises:
      UserError: an example is damaged or lacks a field of the prompt's template; the line names its place.
    """
    special = examples.special_tokens(folder.family, folder, tokenizer)
    positions = folder.positions or 1 << 20
    seq_len = min(how.seq_len or positions, positions)
    classes = folder.model.classes if folder.family.is_classifier else ()
    if not folder.family.is_encoder_decoder and not classes:  # prompt and answer are one row
        seq_len = max(1, seq_len + 1 - new_tokens)
    form = tasks.RowForm(
        is_encoder_decoder=folder.family.is_encoder_decoder,
        seq_len=seq_len,
        answer_len=new_tokens,
        start=special.start,
        end=special.stops[0],
        bos=None,
        stops=special.stops,
        classes=classes,
    )
    settings = dataclasses.replace(how.settings, labels=classes or how.settings.labels)
    return tasks.ask(source, tokenizer, settings, form, name=name, folder=folder.path)


def write(
    source: records.Files,
    asked: tasks.Asked,
    answered: Iterable[np.ndarray],
    text: Callable[[np.ndarray], str],
    *,
    file: TextIO | None,
) -> str:
    """Writes a line of JSON for each example: its own fields, the prediction, and the label if it has one.

    Args:
      source, asked: the examples and their prompts.
      answered: the new tokens of each example, in order. What one has is written before the next is asked for.
      text: (new tokens) -> the answer.
      file: to write to; None on processes that do not write.

    Returns:
      A line with the number of predictions, and the share that is right where there are labels.
    """
    right = labeled = 0
    for index, tokens in enumerate(answered):
        label, found = asked.labels[index], text(tokens)
        added: dict[str, Any] = {"prediction": found}
        if label is not None:
            labeled, right = labeled + 1, right + (found == label.strip())
            added |= {"expected": label.strip(), "is_right": found == label.strip()}
        if file is not None:
            example = {key: value for key, value in source[index].items() if key not in FIELDS}
            file.write(json.dumps(example | added, ensure_ascii=False, default=_plain) + "\n")
            file.flush()
    told = f"{len(asked.prompts)} predictions"
    return told + (f"; {right / labeled:.1%} right ({right} of {labeled} with a label)" if labeled else "")


def in_batches(
    prompts: Sequence[np.ndarray],
    generate: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    most: int,
    batch_size: int,
) -> Iterator[np.ndarray]:
    """Yields what a function of batches gives for each prompt.

    Args:
      prompts: of all examples.
      generate: (ids int[rows, length], mask) -> the new tokens, int[rows, new], or a class of each row.
      most: the most tokens of a batch's prompts.
      batch_size: examples that are answered together.
    """
    for at in range(0, len(prompts), batch_size):
        chosen = prompts[at : at + batch_size]
        longest = max(map(len, chosen))
        length = max(longest, min(most, max(SHORTEST, 1 << (longest - 1).bit_length())))
        yield from generate(*answers.padded(chosen, batch_size, length))[: len(chosen)]


def check_out(path: str, read: str) -> None:
    """Raises a UserError if `path` is a file of the examples, which the pattern `read` names, or can be no file."""
    files.check_file(path, "--out")
    if os.path.realpath(path) in {os.path.realpath(found) for found in records.matching(read)}:
        raise UserError(f"--out {path}: the examples are read from it; name another file")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[TextIO]:
    """Gives a file that gets the name `path` at the end of the block, and is removed if the block fails.

    Raises:
      UserError: it cannot be written.
    """
    with (
        files.writing(path, "name another file with --out"),
        files.replacing(path) as new,
        open(new, "w", encoding="utf-8") as file,
    ):
        yield file


def _plain(value: object) -> object:
    """Returns what JSON can hold of a value that a parquet file may have."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
