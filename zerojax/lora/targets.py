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

A, B, MAGNITUDE, KERNEL = settings.A, settings.B, settings.MAGNITUDE, "kernel"
ENDS = (A, B, MAGNITUDE)
BESIDE = "_adapter"  # ends the name of what holds the adapters of experts, beside their matrices


class LinearModule(NamedTuple):
    """A linear module: its name for the user, its kernel's shape, how many leading dims of that are inputs, whether it is the output.

    `stack` has the dims before these in the stored kernel, which count the layers of a stack (`nn.scan`, `nn.vmap`) or experts.
    `is_experts`: it is the matrices of a mixture's experts (`models.experts.Experts`), and its path is that of the stacked weight itself.
    `is_embedding`: it is a table of which rows are read, float[inputs, outputs]; with `is_output` it is the output projection too.
    `parameters`: the paths of the weights of a mixture that it is, where `target_parameters` mean it; two have one A. Its own path ends
    with a name of `models.experts.JOINED`, or is that of the weight. `forms`: of the A and B of a stack of these in files
    (`family.Tensor.form`).
    """

    name: str
    shape: tuple[int, ...]
    inputs: int
    is_output: bool = False
    stack: tuple[int, ...] = ()
    is_experts: bool = False
    is_embedding: bool = False
    parameters: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()

    @property
    def has_no_module(self) -> bool:
        """Returns whether its weight is an array of a mixture, so that its adapter is added to the weight."""
        return self.is_experts or bool(self.parameters)

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
    # those of frozen ones that a folder of adapters has too, as PEFT saves those of a resized vocabulary
    carried: tuple[str, ...] = ()

    @property
    def trainable(self) -> str:
        """Returns the regex over paths of weights for `trainable=` of `shard_train_state`."""
        return "|".join([settings.TRAINABLE, *(f"^{re.escape(path)}$" for path in self.saved)])

    @property
    def quantized(self) -> tuple[str, ...]:
        """Returns the paths of the modules whose kernels are quantized: linear ones that are frozen and no output; in mxfp4 gpt-oss's
        experts."""
        if self.lora.quantize == quantized.NONE:
            return ()
        if self.lora.quantize == quantized.MXFP4:
            # Other files' experts that are one weight have adapters of other forms
            own = {
                path: one for path, one in self.linear.items() if one.parameters == (path,) and "experts_b" in one.forms
            }
            frozen = {path: found for path, found in own.items() if path not in self.saved}
            return tuple(path for path, found in frozen.items() if found.shape[0] % quantized.GROUP == 0)
        return tuple(
            path
            for path, found in self.linear.items()
            if not (found.is_output or found.is_embedding or found.parameters)
            and self.kernels(path)[0] not in self.saved
            and quantized.takes(found.shape, self.lora.quantize)
        )

    @property
    def coded(self) -> dict[str, tuple[int, int]]:
        """Returns the paths of quantized kernels, how many of a kernel's dims count its stack, and how many after these are inputs."""
        is_stack = self.lora.quantize == quantized.MXFP4  # which quantizes all of a stack at once
        own = {self.kernels(path)[0]: self.linear[path] for path in self.quantized}
        return {path: (0 if is_stack else len(found.stack), found.inputs) for path, found in own.items()}

    def kernels(self, path: str) -> tuple[str, ...]:
        """Returns the paths of a module's kernel; an adapter of `parameters` may have two."""
        found = self.linear[path]
        if found.has_no_module:
            return found.parameters or (path,)
        return (f"{path}/{'embedding' if found.is_embedding else KERNEL}",)

    def adapter(self, path: str) -> str:
        """Returns the path below which a module's adapter has its weights."""
        return f"{path}{BESIDE}" if self.linear[path].has_no_module else path

    def shapes(self, path: str) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of an adapter's weights, one for each layer of a stack: A float[inputs, r], B float[r, outputs] and with DoRA
        the magnitude float[outputs]. The outputs of `parameters` keep their dims."""
        found, rank = self.linear[path], self.rank(path)
        inputs, outputs = found.sizes
        ends = found.shape[found.inputs :] if found.parameters else (outputs,)
        shapes = {A: (*found.stack, inputs, rank), B: (*found.stack, rank, *ends)}
        return shapes | ({MAGNITUDE: (*found.stack, outputs)} if self.lora.dora else {})

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
    adapted = tuple(path for path, found in linear.items() if is_meant(lora, found))
    own = modules(linear)
    known = dict.fromkeys(found.name.rpartition(".")[2] for found in own.values())
    wanted = lora.target_modules
    for end in wanted if isinstance(wanted, tuple) else ():
        if not any(settings.ends_with(name, end) for found in own.values() for name in found.names):
            way_out = errors.choose(end, known)
            raise UserError(f"lora.target_modules: {end!r} names no linear module of this model; {way_out}")
    check_parameters(lora, linear)
    _check_apart(linear, adapted)
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
        settings.matches(lora.exclude_modules, name) for found in own.values() for name in found.names
    ):
        told, ways = errors.shown(lora.exclude_modules), ", ".join(known)
        warnings.warn(
            f"lora.exclude_modules: {told} has no effect: it means no linear module of this model; known: {ways}",
            stacklevel=2,
        )
    _warn_of_patterns(lora, linear, adapted)
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
        if any(kernel in saved for kernel in chosen.kernels(path)):
            raise UserError(
                f"lora.modules_to_save: {linear[path].name} is also in lora.target_modules, and a module is trained in full or by an "
                "adapter; name it in one of them, or in exclude_modules"
            )
    check_experts(chosen)
    check_quantized(chosen)
    return chosen


def _warn_of_patterns(lora: settings.Lora, linear: Mapping[str, LinearModule], adapted: Iterable[str]) -> None:
    names = [name for path in adapted for name in linear[path].names]
    known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern, _ in getattr(lora, field):
            if not any(settings.is_at_end(pattern, name) for name in names):
                warnings.warn(
                    f"lora.{field}: {pattern!r} has no effect: it means no module with an adapter; known: {known}",
                    stacklevel=3,
                )


def check_quantized(chosen: Targets) -> None:
    """Refuses mxfp4 for a model without frozen experts that it takes."""
    if chosen.lora.quantize == quantized.MXFP4 and not chosen.quantized:
        if dataclasses.replace(chosen, saved=()).quantized:
            raise UserError(
                "lora.quantize: 'mxfp4' is of frozen experts, and lora.modules_to_save trains all of them in full; omit one of the two"
            )
        raise UserError(
            "lora.quantize: 'mxfp4' is the form of gpt-oss's experts, and this model has none of theirs; choose 'nf4' or 'int8'"
        )


def modules(linear: Mapping[str, LinearModule]) -> dict[str, LinearModule]:
    """Returns those that `target_modules` can mean."""
    return {path: found for path, found in linear.items() if not found.parameters}


def check_experts(chosen: Targets) -> None:
    """Refuses dropout and magnitudes in adapters of experts, which PEFT has not either: its adapters of them are added to the weights."""
    found = next((chosen.linear[path].name for path in chosen.adapted if chosen.linear[path].has_no_module), None)
    for name, value, off in (("dropout", chosen.lora.dropout, "0"), ("dora", chosen.lora.dora, "False")):
        if found and value:
            raise UserError(
                f"lora.{name}: is {value}, and {found} is of experts, whose adapters have none, as in PEFT; set lora.{name} to "
                f"{off}, or name no experts, or name them in exclude_modules"
            )


def check_parameters(lora: settings.Lora, linear: Mapping[str, LinearModule]) -> None:
    """Refuses a name in `target_parameters` that means no weight."""
    known = [found.name for found in linear.values() if found.parameters]
    for end in lora.target_parameters:
        if not any(settings.ends_with(name, end) for name in known):
            names = dict.fromkeys(_last(name) for name in known)
            way_out = (
                errors.choose(end, names)
                if known
                else "leave it out: the model has no mixture that takes such adapters"
            )
            raise UserError(f"lora.target_parameters: {end!r} names no weight of a mixture of this model; {way_out}")


def ends(names: Iterable[str], linear: Mapping[str, LinearModule]) -> tuple[str, ...]:
    """Returns the shortest `target_parameters` that mean these names and no others."""
    names = list(names)
    others = [found.name for found in linear.values() if found.parameters and found.name not in names]
    short = dict.fromkeys(map(_last, names))
    return tuple(sorted(names if any(settings.matches(tuple(short), other) for other in others) else short))


def _check_apart(linear: Mapping[str, LinearModule], adapted: Iterable[str]) -> None:
    """Refuses an adapter of experts beside one of each expert's modules."""
    owner: dict[str, str] = {}
    for path in adapted:
        for weight in linear[path].parameters or (path,):
            if weight in owner:
                raise UserError(
                    f"lora.target_parameters: {linear[owner[weight]].name} and {linear[path].name} have the same weights, and these get "
                    "one adapter; name the experts in target_modules, or in target_parameters and exclude_modules"
                )
            owner[weight] = path


def _last(name: str) -> str:
    """Returns the shortest end of a weight's name that PEFT's users give."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1] == "weight" else parts[-1:])


def check_merge(chosen: Targets) -> None:
    """Refuses to merge an adapter into an embedding that is the output projection too, which it would change."""
    for path in chosen.adapted:
        if chosen.linear[path].is_embedding and chosen.linear[path].is_output:
            raise UserError(
                f"lora.target_modules: {chosen.linear[path].name} has an adapter, and is the output projection too, which has none, so no "
                "merged weight is both; write the adapter alone, as a folder of PEFT, or train it in full (modules_to_save)"
            )


def is_meant(lora: settings.Lora, found: LinearModule) -> bool:
    """Returns whether the settings mean a module. Refuses those that mean some experts of a stack."""
    if found.parameters:
        return settings.matches(lora.target_parameters, found.name)
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
    if wanted is None or wanted == settings.ALL_LINEAR:
        is_meant = not (found.is_output or found.is_embedding)
    else:
        is_meant = settings.matches(wanted, name)
    return is_meant and not settings.matches(lora.exclude_modules, name)


def _module_of(path: str, name_of: Mapping[str, str] | None) -> str:
    return path.rpartition("/")[0].replace("/", ".") if name_of is None else name_of.get(path, "")


def flat(params: PyTree) -> dict[str, Any]:
    """Returns a tree as {path: leaf}."""
    return dict(tree.flatten(params))
