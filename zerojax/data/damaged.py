"""Documents that cannot be read. This module lets a run skip and count them, or ends it with the line of one."""

import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.data import source as source_lib
from zerojax.errors import UserError

HERE = "⟨here⟩"  # stands for the place of an example, which takes a read to tell
STOP, SKIP = "stop", "skip"
ON_BAD = (STOP, SKIP)  # what follows from a document that cannot be read


class Absent(str):
    """The text of a document that is skipped."""


class Damaged:
    """Counts the documents that a run skips, each once, or raises.

    Args:
      on_bad: one of ON_BAD.
    """

    def __init__(self, on_bad: str = STOP):
        self.skips, self._lock = on_bad == SKIP, threading.Lock()
        self._known, self._first = set[Any](), ""

    def refusal(self, source: source_lib.Source | None, index: int, error: UserError) -> UserError:
        """Returns the error about a document, with its place and the ways out; without a source, that about a part of a file."""
        line = str(error)
        if HERE in line and source is not None:
            line = line.replace(HERE, source_lib.place_of(source, index, "example"))
        return UserError(f"{line}; or set `on_bad=skip` to go on without what cannot be read")

    def add(self, name: Any, source: source_lib.Source | None, index: int, error: UserError) -> None:
        """Counts a document, or a part of a file, which `name` tells from others.

        Raises:
          UserError: the error, with the document's place, if none is skipped.
        """
        if not self.skips:
            raise self.refusal(source, index, error) from error
        with self._lock:
            is_first = not self._known
            self._known.add(name)
        if is_first:
            self._first = str(self.refusal(source, index, error)).partition("; ")[0]

    def summary(self) -> list[str]:
        """Returns a line about what was skipped. All processes must call it."""
        if not self.skips:
            return []
        total = len(self._known)
        if jax.process_count() > 1:
            total = int(multihost_utils.process_allgather(np.array(total)).sum())
        first = f"; the first of process 0: {self._first}" if self._first else ""
        return [f"documents that could not be read and were skipped since the start: {total}{first}"] if total else []


class Readable:
    """A source of texts, of which those that cannot be read are `Absent` if they are skipped."""

    def __init__(self, source: source_lib.Source, text_key: str, damaged: Damaged):
        self._source, self._text_key, self._damaged = source, text_key, damaged

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            return self._source[index]
        except UserError as error:
            self._damaged.add((id(self._source), index), self._source, index, error)
            return {self._text_key: Absent()}

    def place(self, index: int) -> str:
        """Returns where a document is."""
        return source_lib.place_of(self._source, index, "document")
