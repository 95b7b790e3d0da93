"""Which modules of a model get adapters. This module matches a model's linear modules with the settings."""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from zerojax import errors, tree
from zerojax.errors import UserError
from zerojax.lora import settings
from zerojax.models.family import EXPERT
from zerojax.ops import quantized
from zerojax.tree import PyTree

A, B, KERNEL = settings.A, settings.B, "kernel"
BESIDE = "_adapter"  # ends the name of what holds the adapters of experts, beside their matrices


class LinearModule(NamedTuple):
    """A linear module: its name for the user, its kernel's shape, how many leading dims of that are inputs, whether it is the output.

    `stack` has the dims before these in the stored kernel, which count the layers of a stack (`nn.scan`, `nn.vmap`) or experts.
    `is_experts`: it is the matrices of a mixture's experts (`models.experts.Experts`), and its path is that of the stacked weight itself.
    """

    name: str
    shape: tuple[int, ...]
    inputs: int
    is_output: bool = False
    stack: tuple[int, ...] = ()
    is_experts: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names for the user: of experts that are modules of their own elsewhere, one each."""
        if EXPERT not in self.name:
            return (self.name,)
        return tuple(self.name.replace(EXPERT, str(number)) for number in range(self.stack[0]))

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the numbers of inputs and outputs."""
        return math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])


@dataclasses.dataclass(frozen=True)
class Targets:
    """The adapters of one model."""

    lora: settings.Lora  # the settings
    linear: Mapping[str, LinearModule]  # all linear modules of the model, by path
    adapted: tuple[str, ...]  # the paths of those with an adapter
    saved: tuple[str, ...] = ()  # the paths of the weights that are trained in full
    carried: tuple[
        str, ...
    ] = ()  # of frozen ones that a folder of adapters has too, as PEFT saves those of a resized vocabulary

    @property
    def trainable(self) -> str:
        """Returns the regex over paths of weights for `trainable=` of `shard_train_state`."""
        return "|".join([settings.TRAINABLE, *(f"^{re.escape(path)}$" for path in self.saved)])

    @property
    def quantized(self) -> tuple[str, ...]:
        """Returns the paths of the modules whose kernels are quantized: linear ones that are frozen and no output."""
        if self.lora.quantize == quantized.NONE:
            return ()
        return tuple(
            path
            for path, found in self.linear.items()
            if not found.is_output and self.kernel(path) not in self.saved and quantized.takes(found.shape)
        )

    @property
    def coded(self) -> dict[str, int]:
        """Returns the paths of quantized kernels, and how many of a kernel's dims count its stack."""
        return {self.kernel(path): len(self.linear[path].stack) for path in self.quantized}

    def kernel(self, path: str) -> str:
        """Returns the path of a module's kernel."""
        return path if self.linear[path].is_experts else f"{path}/{KERNEL}"

    def adapter(self, path: str) -> str:
        """Returns the path below which a module's adapter has its two weights."""
        return f"{path}{BESIDE}" if self.linear[path].is_experts else path

    def shapes(self, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of an adapter's two weights: A float[inputs, r] and B float[r, outputs]; one for each layer of a stack."""
        inputs, outputs = self.linear[path].sizes
        rank, stack = self.rank(path), self.linear[path].stack
        return (*stack, inputs, rank), (*stack, rank, outputs)

    def rank(self, path: str) -> int:
        """Returns the rank of a module's adapter."""
        return self.lora.rank_of(self.linear[path].names[0])

    def scale(self, path: str) -> float:
        """Returns the factor of a module's adapter."""
        return self.lora.scale_of(self.linear[path].names[0])


def choose(
    lora: settings.Lora,
    linear: Mapping[str, LinearModule],
    weights: Iterable[str] = (),
    name_of: Mapping[str, str] | None = None,
) -> Targets:
    """Matches the settings with a model.

    Args:
      lora: the settings.
      linear: the model's linear modules, by path.
      weights: the paths of all weights of the model, for `modules_to_save`.
      name_of: {path of a weight: the name of its module for the user}; None: its path with dots.

    Raises:
      UserError: a name means no linear module; the line lists those that there are.
    """
    adapted = tuple(path for path, found in linear.items() if _is_meant(lora, found))
    known = dict.fromkeys(found.name.rpartition(".")[2] for found in linear.values())
    wanted = lora.target_modules
    for end in wanted if isinstance(wanted, tuple) else ():
        if not any(settings.ends_with(name, end) for found in linear.values() for name in found.names):
            way_out = errors.choose(end, known)
            raise UserError(f"lora.target_modules: {end!r} names no linear module of this model; {way_out}")
    if not adapted:
        told = (
            f"{errors.shown(wanted)} without {errors.shown(lora.exclude_modules)}"
            if lora.exclude_modules
            else errors.shown(wanted)
        )
        ways = ", ".join(known)
        if isinstance(wanted, str) and "," in wanted:
            ways += "; a text is one regex, so give several names as a list"
        raise UserError(f"lora.target_modules: {told} means no linear module of this model; known: {ways}")
    if lora.exclude_modules and not any(
        settings.matches(lora.exclude_modules, name) for found in linear.values() for name in found.names
    ):
        told, ways = errors.shown(lora.exclude_modules), ", ".join(known)
        warnings.warn(
            f"lora.exclude_modules: {told} has no effect: it means no linear module of this model; known: {ways}",
            stacklevel=2,
        )
    saved: list[str] = []
    for end in lora.modules_to_save:
        found = [path for path in weights if settings.is_within(_module_of(path, name_of), end)]
        if not found:
            names = dict.fromkeys(_module_of(path, name_of).rpartition(".")[2] for path in weights)
            raise UserError(
                f"lora.modules_to_save: {end!r} names no module with weights of its own; {errors.choose(end, names)}"
            )
        saved += [path for path in found if path not in saved]
    chosen = Targets(lora, linear, adapted, tuple(saved))
    for path in adapted:
        if chosen.kernel(path) in saved:
            raise UserError(
                f"lora.modules_to_save: {linear[path].name} is also in lora.target_modules, and a module is trained in full or by an "
                "adapter; name it in one of them, or in exclude_modules"
            )
    check_dropout(chosen)
    return chosen


def check_dropout(chosen: Targets) -> None:
    """Refuses dropout in adapters of experts, which PEFT has not either: its adapters of stacked experts are added to the weights."""
    found = next((chosen.linear[path].name for path in chosen.adapted if chosen.linear[path].is_experts), None)
    if found and chosen.lora.dropout:
        raise UserError(
            f"lora.dropout: is {chosen.lora.dropout}, and {found} is of experts, whose adapters have none, as in PEFT; set lora.dropout to "
            "0, or name the experts in exclude_modules"
        )


def _is_meant(lora: settings.Lora, found: LinearModule) -> bool:
    means = [_means(lora, found, name) for name in found.names]
    if any(means) != all(means):
        given = (
            "exclude_modules"
            if settings.matches(lora.exclude_modules, found.names[means.index(False)])
            else "target_modules"
        )
        raise UserError(
            f"lora.{given}: {errors.shown(getattr(lora, given))} means some experts of {found.name}, and adapters of experts are stacked; "
            "name all of them"
        )
    if any(means) and len({(lora.rank_of(name), lora.scale_of(name)) for name in found.names}) > 1:
        raise UserError(
            f"lora.rank_pattern, lora.alpha_pattern: give experts of {found.name} different numbers, and adapters of experts are stacked; "
            "give all of them the same"
        )
    return any(means)


def _means(lora: settings.Lora, found: LinearModule, name: str) -> bool:
    wanted = lora.target_modules
    is_meant = (
        not found.is_output if wanted is None or wanted == settings.ALL_LINEAR else settings.matches(wanted, name)
    )
    return is_meant and not settings.matches(lora.exclude_modules, name)


def _module_of(path: str, name_of: Mapping[str, str] | None) -> str:
    return path.rpartition("/")[0].replace("/", ".") if name_of is None else name_of.get(path, "")


def flat(params: PyTree) -> dict[str, Any]:
    """Returns a tree as {path: leaf}."""
    return dict(tree.flatten(params))
