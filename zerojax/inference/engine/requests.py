"""What is asked of an engine, and what it answers. This module holds a request's settings and its state."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from zerojax import signatures
from zerojax.errors import UserError
from zerojax.inference.engine import detokenizer

MOST_LOGPROBS = 20  # likeliest tokens whose logarithms are told
STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
      max_tokens: the most new tokens; None: as many as fit.
      temperature: divides the scores before a token is drawn; 0 takes the likeliest token.
      top_k: draws among the k likeliest tokens; 0: among all.
      top_p: draws among the likeliest tokens that together have this probability; 1: among all.
      min_p: draws among tokens of at least this share of the likeliest one's probability; 0: among all.
      repetition_penalty: divides positive scores of tokens that the text has, and multiplies negative ones (arXiv:1909.05858); 1: none.
      seed: of the draws. The draw of a token depends on the seed, the stream and the token's number alone.
      stream: tells requests with one seed apart.
      stop_ids: tokens that end the text, beside the model's own.
      stop_strings: texts that end the text; they are not part of it.
      ignores_end: whether the model's own tokens of an end do not end the text.
      adapter: the name of the adapter; "" for none.
      logprobs: how many of the likeliest tokens are told with their logarithms, beside the token's own; None: nothing is told.
      grammar: what the text is bound to, as the engine's `grammar_of` reads it; "" for nothing.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stream: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignores_end: bool = False
    logprobs: int | None = None
    adapter: str = ""
    grammar: str = ""

    def __post_init__(self) -> None:
        """Raises UserError for a value that is out of range or of another type."""
        signatures.check_fields(self)
        for name, is_right, rule in (
            ("max_tokens", self.max_tokens is None or 0 < self.max_tokens < 2**31, "1 or more"),
            ("temperature", 0 <= self.temperature <= 1e6, "0 (the likeliest token) or more"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 1e6, "above 0 (1: none)"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
            ("stream", 0 <= self.stream < 2**32, "from 0 to 2**32 - 1"),
            ("stop_strings", all(self.stop_strings), "texts of at least one letter"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
                f"from 0 to {MOST_LOGPROBS}",
            ),
        ):
            if not is_right:
                raise UserError(f"{name}: must be {rule}, and is {getattr(self, name)}")

    @property
    def is_plain(self) -> bool:
        """Returns whether the likeliest token is taken and nothing else is told."""
        return not self.temperature and self.repetition_penalty == 1 and self.logprobs is None


class Grammar(Protocol):
    """What a text is bound to."""

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next: uint32[vocabulary / 32], a bit for each."""

    def add(self, token: int) -> bool:
        """Notes a token that came, and returns whether the text is over."""


@dataclasses.dataclass
class LogProb:
    """The logarithms of a token's probability and of the likeliest tokens', of the model's own scores."""

    own: float
    likeliest: dict[int, float]


@dataclasses.dataclass(eq=False)
class Request:
    """A request and its answer so far.

    Attributes:
      prompt: int32[length].
      settings: how its tokens are chosen.
      most: the most new tokens.
      on_change: called after tokens were added and at the end, by whoever runs the engine.
      tokens: the new ones, with the one that ended the text.
      logprobs: of each new token, if they were asked for.
      text: the new text without what ended it, where the engine has `text_of`; None elsewhere. Letters that are not complete come later.
      finish: why it ended: "stop", "length" or "cancelled"; "" before.
      reused: the tokens of the prompt whose keys and values were found in a cache.
      so_far: the text that `text` is taken from.
      grammar: what its text is bound to; None for nothing.
      begun: when it got a slot, by the monotonic clock; None before.
      slot: the number of that slot; -1 before.
    """

    prompt: np.ndarray
    settings: RequestSettings
    most: int
    on_change: Callable[["Request"], Any] | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[LogProb] = dataclasses.field(default_factory=list)
    text: str | None = None
    finish: str = ""
    reused: int = 0
    so_far: detokenizer.Growing | None = None
    grammar: Grammar | None = None
    begun: float | None = None
    slot: int = -1

    @property
    def settled(self) -> str:
        """Returns the part of the text that later tokens do not take back: not what may be the beginning of a stop string."""
        is_over, text = bool(self.finish), self.text or ""
        if is_over:
            return text
        stops = self.settings.stop_strings
        kept = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - kept]

    def add(self, token: int, logprob: LogProb | None, stops: tuple[int, ...]) -> None:
        """Adds a token, and ends the request where it ends."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        own = self.settings.stop_ids if self.settings.ignores_end else (*stops, *self.settings.stop_ids)
        is_stop = token in own
        is_over = self.grammar is not None and not is_stop and self.grammar.add(token)
        finish = STOP if is_stop or is_over else LENGTH if len(self.tokens) >= self.most else ""
        if self.so_far is not None:
            new = self.so_far.add(self.tokens[:-1] if is_stop else self.tokens, is_end=bool(finish))
            text = self.so_far.text
            found = [
                at
                for stop in self.settings.stop_strings
                if (at := text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))) >= 0
            ]
            if found and not is_stop:
                text, finish = text[: min(found)], STOP
            self.text = text
        self.finish = finish  # last, so that another thread that sees it sees the rest
