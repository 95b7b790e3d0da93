"""Binds answers to JSON schemas and to calls of tools. This module tells the engine, by llguidance, which tokens may come next."""

import functools
import importlib.util
import pathlib
from typing import Any

import numpy as np

from zerojax import errors
from zerojax.errors import UserError

LIBRARY = "llguidance"


class Schemas:
    """The schemas that answers of a tokenizer are bound to.

    Args:
      path: of tokenizer.json.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._vocabulary = functools.lru_cache(maxsize=4)(self._read)  # takes some 0.1 s

    def __call__(self, schema: str, size: int, stops: tuple[int, ...]) -> "BoundText":
        """Returns what a text of a schema may have next.

        Args:
          schema: a JSON schema, as a text of JSON, or a grammar of llguidance (`tools.grammar`).
          size: of the model's vocabulary.
          stops: tokens that end a text.

        Raises:
          UserError: the library is not installed, or does not apply the schema.
        """
        if importlib.util.find_spec(LIBRARY) is None:
            raise UserError(f"grammar: needs {LIBRARY}, which the server lacks (pip install 'zerojax[serve]')")
        import llguidance

        try:
            of = llguidance.LLMatcher
            grammar = (
                of.grammar_from_lark(schema) if schema.startswith("start:") else of.grammar_from_json_schema(schema)
            )
            matcher = llguidance.LLMatcher(self._vocabulary(size, stops), grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except ValueError as error:
            line = f"grammar: the schema is not applied ({errors.one_line(error, 200)}); change it"
            raise UserError(line) from error
        return BoundText(matcher, size)

    def _read(self, size: int, stops: tuple[int, ...]) -> Any:
        import llguidance

        return llguidance.LLTokenizer(str(self._path), n_vocab=size, eos_token=list(stops) or None)


class BoundText:
    """A text that is bound to a schema; see `inference.engine.requests.Grammar`.

    Args:
      matcher: of llguidance, at the beginning of the text.
      size: of the model's vocabulary.

    Attributes:
      failure: why llguidance gave up, in one line, after which it only ends the text; "" while it goes on. A schema may reach its limits,
        or have no finite text.
    """

    def __init__(self, matcher: Any, size: int):
        self._matcher, self._size, self.failure = matcher, size, ""

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next: uint32[vocabulary / 32], a bit for each."""
        mask = np.zeros(-(-self._size // 32), np.uint32)
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        mask[: len(found)] = found[: len(mask)]
        self._see()
        return mask

    def add(self, token: int) -> bool:
        """Notes a token that came, and returns whether the text is over."""
        self._matcher.consume_token(token)
        self._see()
        return bool(self._matcher.is_stopped())

    def _see(self) -> None:
        if not self.failure and self._matcher.is_error():
            reason = errors.shown(self._matcher.get_error().partition("\n")[0], 160)
            self.failure = f"grammar: no text of the schema can be continued ({reason}); simplify it"
