"""The source of the Python standard library as a dataset. This module needs no network, because Python includes the source.

Importing the module registers the builder, so that `tfds.builder("python_stdlib")` finds it by name.
"""

import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator

import tensorflow_datasets as tfds

from zerojax.errors import UserError

SKIPPED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
HELD_OUT_OF = 20  # one file in 20 is validation


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """Builds the splits `train` and `validation`, with one example per file: about 11 MB of text."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}  # noqa: RUF012  the name and type are the base class's

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            description="The .py files of the Python standard library, without its tests.",
            features=tfds.features.FeaturesDict({"text": text(), "path": text()}),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = list_files(root)
        if not paths:
            raise UserError(
                f"name: 'python_stdlib' reads the .py files of this Python, and {root} has none; "
                "install the standard library's source or choose another dataset"
            )
        return {
            "train": self._generate_examples(root, [path for path in paths if not is_held_out(path)]),
            "validation": self._generate_examples(root, [path for path in paths if is_held_out(path)]),
        }

    def _generate_examples(self, root: pathlib.Path, paths: list[str]) -> Iterator[tuple[str, dict]]:
        for path in paths:
            yield path, {"text": (root / path).read_text(encoding="utf-8", errors="replace"), "path": path}


def list_files(root: pathlib.Path) -> list[str]:
    """Lists the .py files below `root`, sorted, relative to it, without installed packages and tests."""
    found: list[str] = []
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_DIRS]  # `walk` enters these alone
        below = pathlib.PurePath(place).relative_to(root)
        found += ((below / name).as_posix() for name in names if name.endswith(".py"))
    return sorted(found)


def is_held_out(path: str) -> bool:
    """Returns whether the file at relative `path` is validation, by a hash of the path: a file never changes its split."""
    return zlib.crc32(path.encode()) % HELD_OUT_OF == 0
