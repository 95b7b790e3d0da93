"""Random-access sources of tensorflow-datasets names. This module prepares datasets and opens their splits.

It does not need TensorFlow: the files are array_record, and are read as data sources.
"""

import contextlib
import difflib
import io
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import tensorflow_datasets as tfds

from zerojax import errors
from zerojax.data import python_stdlib  # noqa: F401  importing it registers the builder
from zerojax.errors import UserError


class Source(Protocol):
    """Examples by index. Each maps feature names to values; text is bytes or str."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns example `index`."""


def prepare(name: str, data_dir: str | os.PathLike) -> None:
    """Downloads dataset `name` and writes it below `data_dir`, unless it exists.

    Only the primary process may call it. The others must wait before they open a source. It writes into a directory named
    incomplete.* and renames it at the end, so no run reads the files of a killed one.

    Raises:
      UserError: the name is unknown, `data_dir` is full or not writable, or the dataset cannot be built.
    """
    builder = _builder(name, data_dir)
    if builder.data_path.exists():
        return
    try:
        builder.data_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_cannot_write(name, data_dir, error)) from error
    try:
        with _quiet():
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except UserError:
        raise
    except Exception as error:  # a dataset's own code may raise anything
        if not builder.data_path.exists():  # it exists if another run prepared it in the meantime
            raise UserError(_why_not_prepared(name, data_dir, error)) from error


def open_source(name: str, split: str, data_dir: str | os.PathLike) -> Source:
    """Opens `split` (or a part such as "train[:10%]") of dataset `name`, prepared below `data_dir`.

    Raises:
      UserError: the name or split is unknown, the split is empty, or the dataset is not prepared.
    """
    builder = _builder(name, data_dir)
    path = os.fspath(builder.data_path)
    splits = list(builder.info.splits)
    if not splits and builder.data_path.exists():
        raise UserError(
            f"config.data.dir: the dataset in {path!r} is incomplete: it lists no splits; delete it and run again"
        )
    if not splits:
        raise UserError(
            f"config.data.dir: {os.fspath(data_dir)!r} has no prepared {name!r}; the primary process "
            "prepares it, so choose a directory that every process can read"
        )
    try:
        size = builder.info.splits[split].num_examples
    except (ValueError, KeyError) as error:
        raise UserError(f"config.data: no split {split!r} in {name!r}; {_near(split, splits, 'splits')}") from error
    if size == 0:
        raise UserError(f"config.data: split {split!r} of {name!r} is empty; {_near(split, splits, 'splits')}")
    source = builder.as_data_source(split=split)
    try:
        source[0]
    except Exception as error:  # array_record raises RuntimeError or ValueError, tfds what its features raise
        raise UserError(f"config.data.dir: {path!r} cannot be read: {_line(error)}; delete it and run again") from error
    return source


def _builder(name: str, data_dir: str | os.PathLike) -> tfds.core.DatasetBuilder:
    """Returns the builder of `name`: of tensorflow-datasets, registered by this package, or read from files below `data_dir`."""
    try:
        with _quiet():
            return tfds.builder(name, data_dir=os.fspath(data_dir), file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        raise UserError(
            f"config.data.name: no dataset {name!r}; {_near(name, known, 'datasets', limit=3)} (or 'random')"
        ) from error
    except Exception as error:  # a dataset's own code may raise anything
        raise UserError(
            f"config.data.name: {name!r} cannot be opened in {os.fspath(data_dir)!r}: {_line(error)}; "
            "correct the name or choose another --config.data.dir"
        ) from error


def _why_not_prepared(name: str, data_dir: str | os.PathLike, error: BaseException) -> str:
    """Returns the message for a preparation that failed with `error`."""
    path = repr(os.fspath(data_dir))
    if errors.is_disk_full(error):
        return f"config.data.dir: no space left in {path} for {name!r}; free some or set --config.data.dir"
    if any(isinstance(cause, PermissionError) for cause in errors.causes(error)):
        return _cannot_write(name, data_dir, error)
    return (
        f"config.data.name: {name!r} cannot be downloaded or built: {_line(error)}; prepare it on a machine with "
        f"a network and copy it to {path}, or use 'python_stdlib', which needs none"
    )


def _cannot_write(name: str, data_dir: str | os.PathLike, error: BaseException) -> str:
    """Returns the message for a directory that is not writable."""
    path = repr(os.fspath(data_dir))
    return f"config.data.dir: cannot write {name!r} to {path}: {_line(error)}; set --config.data.dir"


def _near(name: str, known: list[str], what: str, limit: int = 8) -> str:
    """Returns text that lists up to `limit` of `known`, the nearest to `name` first."""
    near = difflib.get_close_matches(name, known, n=limit, cutoff=0.0)
    return f"{'nearest' if len(known) > limit else 'known'} {what}: {', '.join(near)}"


def _line(error: BaseException) -> str:
    """Returns the type and the first line of `error`."""
    kind, line = type(error).__name__, errors.first_line(error)
    return kind if line == kind else f"{kind}: {line}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress bars and the lines that tfds prints to stdout, but not warnings and errors."""
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
