"""Datasets of the Hugging Face hub, by names such as hf:ought/raft/twitter_complaints. This module writes them as tensorflow-datasets does.

What is prepared once is opened without a network and without the hub's library. Texts stay texts and class labels class labels; any other
column (numbers, lists, conversations) is kept as JSON, and columns that JSON cannot hold (images, audio) are left out.
"""

import importlib.util
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow_datasets as tfds

from zerojax import errors
from zerojax.errors import UserError

PREFIX = "hf:"
JSON = "JSON"  # the description of a column that is kept so
VERSION = "1.0.0"
_INSTALL = 'pip install "zerojax[hub]"'


def builder(name: str, data_dir: str | os.PathLike[str]) -> tfds.core.DatasetBuilder:
    """Returns the builder of hf:USER/DATASET or hf:USER/DATASET/CONFIG; of a prepared one without asking the hub.

    Raises:
      UserError: the name has another form.
    """
    if not re.fullmatch(rf"{PREFIX}[\w.-]+(/[\w.-]+){{0,2}}", name):
        raise UserError(f"name: {errors.shown(name)} must be hf:USER/DATASET or hf:USER/DATASET/CONFIG")
    plain = name.removeprefix(PREFIX)
    own = f"hf_{re.sub(r'[^a-z0-9]+', '_', plain.lower()).strip('_')}_{zlib.crc32(plain.encode()):08x}"
    path = pathlib.Path(data_dir, own, VERSION)
    return tfds.builder_from_directory(path) if path.is_dir() else _HubDataset(name, own, data_dir)


def decoded(example: Mapping[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an example with the columns that are kept as JSON decoded."""
    return {key: json.loads(value) if features[key].doc.desc == JSON else value for key, value in example.items()}


class _HubDataset(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Writes all splits of a dataset of the hub."""

    VERSION = tfds.core.Version(VERSION)
    RELEASE_NOTES = {"1.0.0": "First version."}  # noqa: RUF012  the name and type are the base class's

    def __init__(self, name: str, own: str, data_dir: str | os.PathLike[str]):
        self.name, self._shown, self._loaded = own, name, _load(name)
        super().__init__(data_dir=os.fspath(data_dir), file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        columns = next(iter(self._loaded.values())).features
        made = {key: feature for key, kind in columns.items() if (feature := _feature(kind)) is not None}
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"{self._shown} of the Hugging Face hub.",
            features=tfds.features.FeaturesDict(made),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {re.sub(r"\W", "_", split): self._generate_examples(rows) for split, rows in self._loaded.items()}

    def _generate_examples(self, rows: Any) -> Iterator[tuple[int, dict]]:
        features = self.info.features
        for index, row in enumerate(rows.select_columns(list(features))):
            written = {key: _written(value, rows.features[key]) for key, value in row.items()}
            yield index, {key: _encoded(features[key], value) for key, value in written.items()}


def _load(name: str) -> Mapping[str, Any]:
    """Returns {split: rows} of a dataset, from the cache of the hub's library or the hub.

    Raises:
      UserError: it cannot be had. The line holds the command that downloads it.
    """
    *user, last = name.removeprefix(PREFIX).split("/")
    arguments = ("/".join(user), last) if len(user) == 2 else ("/".join([*user, last]),)
    code = f"import datasets; datasets.load_dataset({', '.join(map(repr, arguments))})"
    way_out = f'with a network: python -c "{code}", and copy its cache (HF_HOME) here'
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"name: {name!r} needs the hub's library; {_INSTALL}")
    import datasets

    try:
        return datasets.load_dataset(*arguments)
    except Exception as error:  # of the network, the disk, the hub or the dataset
        why = errors.kind_and_line(error)
        raise UserError(
            f"name: {name!r} is not in the hub's cache and cannot be downloaded ({why}); {way_out}"
        ) from error


def _feature(kind: Any) -> Any:
    """Returns the feature of tensorflow-datasets for a column of the hub's library, or None if there is none."""
    import datasets

    if isinstance(kind, datasets.ClassLabel):
        return tfds.features.ClassLabel(names=kind.names)
    if isinstance(kind, datasets.Value) and kind.dtype in ("string", "large_string"):
        return tfds.features.Text()
    return tfds.features.Text(doc=JSON) if _fits_json(kind) else None


def _fits_json(kind: Any) -> bool:
    """Returns whether JSON can hold a column: values, and lists and groups of them."""
    import datasets

    if isinstance(kind, getattr(datasets, "Json", ())):  # since datasets 4.7
        return True
    if isinstance(kind, datasets.Value):
        return not re.match(r"(large_)?binary|time|date|duration|decimal", kind.dtype)
    inner = (
        kind.values()
        if isinstance(kind, dict)
        else kind
        if isinstance(kind, list)
        else [getattr(kind, "feature", None)]
    )
    return all(item is not None and _fits_json(item) for item in inner)


def _written(value: Any, kind: Any) -> Any:
    """Returns a value of a column without the fields of groups that are null: all groups have the fields that any of them has."""
    if isinstance(kind, dict) and value is not None:
        return {name: _written(value[name], own) for name, own in kind.items() if value[name] is not None}
    inner = kind[0] if isinstance(kind, list) else getattr(kind, "feature", None)
    return [_written(entry, inner) for entry in value] if isinstance(value, list) and inner is not None else value


def _encoded(feature: Any, value: object) -> Any:
    """Returns a value as its feature keeps it. A missing text is empty, and a missing label -1."""
    if isinstance(feature, tfds.features.ClassLabel):
        return -1 if value is None else value
    return json.dumps(value) if feature.doc.desc == JSON else value or ""
