"""Random-access sources of tensorflow-datasets names. This module prepares datasets and opens their splits.

It does not need TensorFlow: the files are array_record, and are read as data sources.
"""

import concurrent.futures
import contextlib
import difflib
import io
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import tensorflow_datasets as tfds
from array_record.python import array_record_module

import zerojax.data.python_stdlib
import zerojax.data.short_reviews  # noqa: F401
from zerojax import errors
from zerojax.data import hub_dataset, split_files
from zerojax.errors import UserError


class Source(Protocol):
    """Examples by index. Each maps feature names to values; text is bytes or str."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns example `index`."""


def place_of(source: Source, index: int, what: str) -> str:
    """Returns where an example is, for errors: its file and line where the source knows them, else `what` and its number."""
    place = getattr(source, "place", None)
    return f"{what} {index}" if place is None else place(index)


def prepare(name: str, data_dir: str | os.PathLike[str]) -> None:
    """Downloads dataset `name` and writes it below `data_dir`, unless it exists.

    Only the primary process may call it. The others must wait before they open a source. It writes into a directory named
    incomplete.* and renames it at the end, so no run reads the files of a killed one.

    Raises:
      UserError: the name is unknown, `data_dir` is full or not writable, or the dataset cannot be built.
    """
    builder = _builder(name, data_dir)
    try:
        if builder.data_path.exists():
            return
        builder.data_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_cannot_write(name, data_dir, error)) from error
    try:
        with _quiet():
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        split_files.record(builder.data_path)
    except UserError:
        raise
    except Exception as error:  # a dataset's own code may raise anything
        if not builder.data_path.exists():  # it exists if another run prepared it in the meantime
            raise UserError(_why_not_prepared(name, data_dir, error)) from error


def open_source(name: str, split: str, data_dir: str | os.PathLike[str], key: str = "train_split") -> Source:
    """Opens `split` (or a part such as "train[:10%]") of dataset `name`, prepared below `data_dir`; errors name the argument `key`.

    Raises:
      UserError: the name or split is unknown, the split is empty, or the dataset is not prepared, incomplete or damaged. Reading a damaged
        example raises it later.
    """
    builder = _opened(name, data_dir)
    path = os.fspath(builder.data_path)
    found = _split(builder, name, split, key)
    if found.num_examples <= 0:
        raise UserError(
            f"{key}: split {split!r} of {name!r} is empty; {_near(split, list(builder.info.splits), 'splits')}"
        )
    _check_files(path, found)
    try:
        kept = builder.info.features if name.startswith(hub_dataset.PREFIX) else None
        source = _Named(builder.as_data_source(split=split), path, kept)
    except Exception as error:  # array_record raises RuntimeError or ValueError, tfds what its features raise
        raise UserError(_unreadable(path, error)) from error
    source[0]
    return source


def files(name: str, split: str, data_dir: str | os.PathLike[str], key: str = "train_split") -> list[str]:
    """Returns the files of a prepared dataset that hold a split, or a part of one. Raises as `open_source` does."""
    found = _split(_opened(name, data_dir), name, split, key)
    return [os.fspath(part.filename) for part in found.file_instructions]


def check_held_out(name: str, train_split: str, eval_split: str, data_dir: str | os.PathLike[str]) -> None:
    """Checks that two splits of a prepared dataset have no example in common.

    Raises:
      UserError: they have; or see `open_source`.
    """
    builder = _opened(name, data_dir)
    trained = _split(builder, name, train_split, "train_split").file_instructions
    held_out = _split(builder, name, eval_split, "eval_split").file_instructions
    ranges: dict[str, list[range]] = {}
    for part in trained:
        ranges.setdefault(part.filename, []).append(_range(part))
    shared = sum(
        max(0, min(own.stop, other.stop) - max(own.start, other.start))
        for part in held_out
        for own in [_range(part)]
        for other in ranges.get(part.filename, [])
    )
    if shared:
        raise UserError(
            f"eval_split: {shared} examples of {eval_split!r} are in `train_split={train_split!r}` too, "
            f"so the loss would not be held out; {_near(eval_split, list(builder.info.splits), 'splits')}, or parts such as "
            "'train[:90%]' and 'train[90%:]'"
        )


def class_names(name: str, data_dir: str | os.PathLike[str]) -> dict[str, list[str]]:
    """Returns the names of the classes of each feature of a prepared dataset that has some."""
    features = _opened(name, data_dir).info.features or {}
    return {
        feature: list(kind.names) for feature, kind in features.items() if isinstance(kind, tfds.features.ClassLabel)
    }


class _Named:
    """A source whose errors name the example and the dataset's folder."""

    def __init__(self, source: Source, path: str, features: Mapping[str, Any] | None = None):
        self._source, self._path, self._features = source, path, features  # features: of a dataset of the hub

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            example = self._source[index]
            return example if self._features is None else hub_dataset.decoded(example, self._features)
        except Exception as error:  # array_record raises RuntimeError or ValueError, tfds what its features raise
            if errors.is_host_memory_full(error):
                raise
            raise UserError(_unreadable(f"{self._path}, example {index}", error)) from error


def _opened(name: str, data_dir: str | os.PathLike[str]) -> tfds.core.DatasetBuilder:
    """Returns the builder of a prepared dataset."""
    builder = _builder(name, data_dir)
    path = os.fspath(builder.data_path)
    try:
        splits = list(builder.info.splits)
    except Exception as error:  # the files may hold anything
        raise UserError(_unreadable(path, error)) from error
    if not splits and builder.data_path.exists():
        raise UserError(f"data_dir: the dataset in {path!r} is incomplete: it lists no splits; delete it and run again")
    if not splits:
        raise UserError(
            f"data_dir: {os.fspath(data_dir)!r} has no prepared {name!r}; the primary process "
            "prepares it, so choose a directory that every process can read"
        )
    return builder


def _split(builder: tfds.core.DatasetBuilder, name: str, split: str, key: str) -> Any:
    """Returns the description of a split or of a part of one."""
    try:
        return builder.info.splits[split]
    except Exception as error:  # mostly ValueError and KeyError; its parser takes any text
        known = list(builder.info.splits)
        raise UserError(
            f"{key}: no split {errors.shown(split)} in {name!r}; {_near(split, known, 'splits')}"
        ) from error


def _range(part: Any) -> range:
    """Returns the records of a file that a part reads."""
    return range(part.skip, part.skip + part.take if part.take >= 0 else part.examples_in_shard)


def _check_files(path: str, split: Any) -> None:
    """Raises a UserError if a file of a split is missing or another split's, or if dataset_info.json lists another number of examples."""
    expected = {part.filename: part.examples_in_shard for part in split.file_instructions}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for name, found in zip(expected, pool.map(_count, expected)):
            if isinstance(found, Exception):
                raise UserError(_unreadable(path, found)) from found
            if found != expected[name]:
                raise UserError(
                    f"data_dir: {name!r} holds {found} examples, and dataset_info.json beside it lists {expected[name]}: "
                    f"files were swapped or damaged; delete {path!r} and run again"
                )
    split_files.check(path, expected)


def _count(name: str) -> int | Exception:
    """Returns the number of examples of a file, or the error in opening it."""
    try:
        reader = array_record_module.ArrayRecordReader(os.fspath(name))
        try:
            return reader.num_records()
        finally:
            reader.close()
    except Exception as error:  # array_record raises RuntimeError or ValueError
        return error


def _unreadable(what: str, error: Exception) -> str:
    """Returns the message for files of a prepared dataset that cannot be read."""
    return f"data_dir: {what} cannot be read: {errors.kind_and_line(error)}; delete the dataset and run again"


def _builder(name: str, data_dir: str | os.PathLike[str]) -> tfds.core.DatasetBuilder:
    """Returns the builder of `name`: of tensorflow-datasets, registered by this package, or read from files below `data_dir`."""
    try:
        if name.startswith(hub_dataset.PREFIX):
            return hub_dataset.builder(name, data_dir)
        if found := re.match(r"\w+", name):
            _check_regular(os.path.join(data_dir, found[0]))
        with _quiet():
            return tfds.builder(name, data_dir=os.fspath(data_dir), file_format="array_record")
    except UserError:
        raise
    except tfds.core.DatasetNotFoundError as error:
        known = sorted(set(tfds.list_builders(with_community_datasets=False)))  # one that is loaded is listed twice
        raise UserError(
            f"name: no dataset {name!r}; {_near(name, known, 'datasets', limit=3)} (or 'random')"
        ) from error
    except Exception as error:  # a dataset's own code may raise anything
        raise UserError(
            f"name: {name!r} cannot be opened in {os.fspath(data_dir)!r}: {errors.kind_and_line(error)}; "
            "correct the name or choose another `data_dir`"
        ) from error


def _check_regular(folder: str) -> None:
    """Checks that a dataset's folder holds files and folders alone: a pipe or a device in place of one would be read forever."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.isfile(path) and os.path.lexists(path):
                raise UserError(f"data_dir: {path!r} is not a file that can be read; delete the dataset and run again")


def _why_not_prepared(name: str, data_dir: str | os.PathLike[str], error: BaseException) -> str:
    """Returns the message for a preparation that failed with `error`."""
    path = repr(os.fspath(data_dir))
    if errors.is_disk_full(error):
        return f"data_dir: no space left in {path} for {name!r}; free some or set `data_dir`"
    if any(isinstance(cause, PermissionError) for cause in errors.causes(error)):
        return _cannot_write(name, data_dir, error)
    return (
        f"name: {name!r} cannot be downloaded or built: {errors.kind_and_line(error)}; prepare it on a machine with "
        f"a network and copy it to {path}, or use 'python_stdlib', which needs none"
    )


def _cannot_write(name: str, data_dir: str | os.PathLike[str], error: BaseException) -> str:
    """Returns the message for a directory that is not writable."""
    path = repr(os.fspath(data_dir))
    return f"data_dir: cannot write {name!r} to {path}: {errors.kind_and_line(error)}; set `data_dir`"


def _near(name: str, known: list[str], what: str, limit: int = 8) -> str:
    """Returns text that lists up to `limit` of `known`, the nearest to `name` first."""
    near = difflib.get_close_matches(name, known, n=limit, cutoff=0.0)
    return f"{'nearest' if len(known) > limit else 'known'} {what}: {', '.join(near)}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress bars and the lines that tfds prints to stdout, but not warnings and errors."""
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
