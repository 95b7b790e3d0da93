"""What a user chooses of LoRA, under PEFT's meaning. This module holds the settings and matches the names of modules."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerojax import errors
from zerojax.errors import UserError
from zerojax.ops import quantized

MOST_RANK = 2**16
ALL_LINEAR = "all-linear"
A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"  # the names of an adapter's weights
TRAINABLE = rf"(^|/)({A}|{B}|{MAGNITUDE})(/|$)"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters: y = W x + scale * B A dropout(x), with W frozen (LoRA, arXiv:2106.09685). Fields have PEFT's meaning.

    Attributes:
      r: the rank, the length of the dim between A and B.
      alpha: scale is alpha / r.
      dropout: the share of an adapter's input that is set to 0 in training.
      target_modules: the linear modules that get an adapter: the ends of their names ("q_proj"), a regex that matches a full name,
        or "all-linear" (all but the output projection). None: the family's usual ones; in other models all. A module's name is its
        path with dots, or in a model family its name in transformers.
      exclude_modules: those that get none, in the same form.
      target_parameters: ends of names of weights that are no module's kernel: of a model family's mixture the experts' stacked matrices,
        "gate_up_proj" and "down_proj", and the router, "gate.weight". An adapter of gate and up has one A for both. `target_modules` means
        each expert's own modules instead.
      rslora: scale is alpha / sqrt(r) (arXiv:2312.03732).
      dora: each output of W x + scale * B A x is multiplied by magnitude / norm of its row of W + scale * B A (DoRA, arXiv:2402.09353).
        The magnitude is trained; the norm has no gradient (section 4.3).
      modules_to_save: ends of names of modules that are trained in full.
      rank_pattern, alpha_pattern: {regex for the end of a name: value}, or pairs: another r or alpha for these modules.
      quantize: how the kernels of frozen linear modules are stored: "none" (as they are), "int8" or "nf4" (QLoRA, arXiv:2305.14314); or
        "mxfp4": gpt-oss's experts alone, as its files hold them; or "fp8_block": e4m3 with a scale for each 128 x 128, as files of
        DeepSeek-V3, Kimi K2 and MiniMax-M2 hold theirs.
    """

    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    target_modules: str | Sequence[str] | None = None
    exclude_modules: str | Sequence[str] = ()
    target_parameters: Sequence[str] = ()
    rslora: bool = False
    dora: bool = False
    modules_to_save: Sequence[str] = ()
    rank_pattern: Any = ()
    alpha_pattern: Any = ()
    quantize: str = quantized.NONE

    def __post_init__(self) -> None:
        """Raises UserError for a value that is not allowed."""
        for name in ("target_modules", "exclude_modules", "target_parameters", "modules_to_save"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name in ("rank_pattern", "alpha_pattern"):
            object.__setattr__(self, name, _pairs(name, getattr(self, name)))
            for pattern, _ in getattr(self, name):
                errors.regex(f"lora.{name}", pattern)
        for rank in (self.r, *(rank for _, rank in self.rank_pattern)):
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= MOST_RANK:
                raise UserError(f"lora.r: must be a whole number from 1 to {MOST_RANK}, and is {errors.shown(rank)}")
        for alpha in (self.alpha, *(alpha for _, alpha in self.alpha_pattern)):
            if not _is_number(alpha) or not 0 < alpha <= sys.float_info.max:
                raise UserError(f"lora.alpha: must be a number above 0, and is {errors.shown(alpha)}")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout: must be at least 0 and below 1, and is {errors.shown(self.dropout)}")
        for name in ("rslora", "dora"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"lora.{name}: must be True or False, and is {errors.shown(getattr(self, name))}")
        errors.one_of("lora.quantize", self.quantize, quantized.KINDS)

    @property
    def trainable(self) -> str:
        """Returns the regex over paths of weights for `trainable=` of `shard_train_state`: adapters and `modules_to_save`."""
        saved = (f"(^|/){re.escape(name.replace('.', '/'))}/[^/]+(/value)?$" for name in self.modules_to_save)
        return "|".join([TRAINABLE, *saved])

    def rank_of(self, name: str) -> int:
        """Returns the rank of the module of a name."""
        return next((rank for pattern, rank in self.rank_pattern if is_at_end(pattern, name)), self.r)

    def scale_of(self, name: str) -> float:
        """Returns the factor of the output of the adapter of a name."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if is_at_end(pattern, name)), self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def matches(wanted: str | Sequence[str], name: str) -> bool:
    """Returns whether a module's name is meant, as PEFT decides it: by its end, or by a regex that matches it all."""
    if isinstance(wanted, str):
        return bool(wanted) and re.fullmatch(wanted, name) is not None
    return any(ends_with(name, end) for end in wanted)


def ends_with(name: str, end: str) -> bool:
    """Returns whether a dotted name ends with whole parts.

    >>> ends_with("layers.0.q_proj", "proj")
    False
    """
    return name == end or name.endswith(f".{end}")


def is_within(name: str, end: str) -> bool:
    """Returns whether a dotted name, or that of a module around it, ends with whole parts.

    >>> is_within("classifier.dense", "classifier")
    True
    """
    return ends_with(name, end) or f".{end}." in f".{name}"


def shortest_ends(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Returns ends that mean all of `names` and none of `others`: last parts, or full names where these are not enough."""
    names, others = list(names), list(others)
    last = dict.fromkeys(name.rpartition(".")[2] for name in names)
    if not any(matches(tuple(last), other) for other in others):
        return tuple(sorted(last))
    return tuple(sorted(names))


def at_end(pattern: str) -> str:
    """Returns the regex over full names of a regex for their ends."""
    return rf"(.*\.)?({pattern})$"


def is_at_end(pattern: str, name: str) -> bool:
    """Returns whether a regex matches the end of a name, from a dot on."""
    return re.match(at_end(pattern), name) is not None


def _names(field: str, value: Any) -> Any:
    """Returns names as a tuple, and a regex as it is; refuses other values."""
    if value is None and field == "target_modules":
        return None
    if isinstance(value, str) and field not in ("target_parameters", "modules_to_save"):
        if value != ALL_LINEAR:
            errors.regex(f"lora.{field}", value)
        return value
    is_list = isinstance(value, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(name, str) and name for name in value):
        raise UserError(
            f"lora.{field}: must be names of modules, such as ('q_proj', 'v_proj'), and is {errors.shown(value)}"
        )
    return tuple(value) if isinstance(value, (list, tuple)) else tuple(sorted(value))


def _pairs(field: str, value: Any) -> tuple[tuple[Any, Any], ...]:
    """Returns a table as pairs; refuses other values."""
    try:
        return tuple((pattern, number) for pattern, number in (value.items() if isinstance(value, Mapping) else value))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"lora.{field}: must be a number for each regex, such as {{'q_proj': 16}}, and is {errors.shown(value)}"
        ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
