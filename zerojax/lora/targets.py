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
from zerojax.ops import quantized
from zerojax.tree import PyTree

A, B, KERNEL = settings.A, settings.B, "kernel"


class LinearModule(NamedTuple):
    """A linear module: its name for the user, its kernel's shape, how many leading dims of that are inputs, whether it is the output.

    `stack` has the dims before these in the stored kernel, which count the layers of a stack (`nn.scan`, `nn.vmap`).
    """

    name: str
    shape: tuple[int, ...]
    inputs: int
    is_output: bool = False
    stack: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the numbers of inputs and outputs."""
        return math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])


@dataclasses.dataclass(frozen=True)
class Targets:
    """The adapters of one model.

    Attributes:
      lora: the settings.
      linear: all linear modules of the model, by path.
      adapted: the paths of those with an adapter.
      saved: the paths of the weights that are trained in full.
    """

    lora: settings.Lora
    linear: Mapping[str, LinearModule]
    adapted: tuple[str, ...]
    saved: tuple[str, ...] = ()

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
            if not found.is_output and f"{path}/{KERNEL}" not in self.saved and quantized.takes(found.shape)
        )

    def shapes(self, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of an adapter's two weights: A float[inputs, r] and B float[r, outputs]; one for each layer of a stack."""
        inputs, outputs = self.linear[path].sizes
        rank, stack = self.rank(path), self.linear[path].stack
        return (*stack, inputs, rank), (*stack, rank, outputs)

    def rank(self, path: str) -> int:
        """Returns the rank of a module's adapter."""
        return self.lora.rank_of(self.linear[path].name)

    def scale(self, path: str) -> float:
        """Returns the factor of a module's adapter."""
        return self.lora.scale_of(self.linear[path].name)


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
        if not any(settings.ends_with(found.name, end) for found in linear.values()):
            way_out = errors.choose(end, known)
            raise UserError(f"lora.target_modules: {end!r} names no linear module of this model; {way_out}")
    if not adapted:
        told = (
            f"{errors.shown(wanted)} without {errors.shown(lora.exclude_modules)}"
            if lora.exclude_modules
            else errors.shown(wanted)
        )
        raise UserError(f"lora.target_modules: {told} means no linear module of this model; known: {', '.join(known)}")
    if lora.exclude_modules and not any(
        settings.matches(lora.exclude_modules, found.name) for found in linear.values()
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
    for path in adapted:
        if f"{path}/{KERNEL}" in saved:
            raise UserError(
                f"lora.modules_to_save: {linear[path].name} is also in lora.target_modules, and a module is trained in full or by an "
                "adapter; name it in one of them, or in exclude_modules"
            )
    return Targets(lora, linear, adapted, tuple(saved))


def _is_meant(lora: settings.Lora, found: LinearModule) -> bool:
    wanted = lora.target_modules
    is_meant = (
        not found.is_output if wanted is None or wanted == settings.ALL_LINEAR else settings.matches(wanted, found.name)
    )
    if not is_meant:
        return False
    return not settings.matches(lora.exclude_modules, found.name)


def _module_of(path: str, name_of: Mapping[str, str] | None) -> str:
    return path.rpartition("/")[0].replace("/", ".") if name_of is None else name_of.get(path, "")


def flat(params: PyTree) -> dict[str, Any]:
    """Returns a tree as {path: leaf}."""
    return dict(tree.flatten(params))
