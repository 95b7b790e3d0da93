"""Where the weights of a run come from: a model's folder, an adapter's folder, or the run's seed. This module reads or draws them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from zerojax import errors, files, precision, tree
from zerojax.errors import UserError
from zerojax.interop import adapted as adapted_lib
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, peft
from zerojax.lora import adapters, settings, targets
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.trainer import config as config_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import teacher as teacher_lib
from zerojax.tree import PyTree
from zerojax.zero.pipeline import travel
from zerojax.zero.weights import partition as partition_lib


class Adapted(NamedTuple):
    """The adapters of a run, and the opened folder that they start from; None for fresh ones."""

    chosen: targets.Targets
    opened: peft.Adapter | None


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where the weights of a run come from.

    Attributes:
      family, model: the model without adapters.
      source: the folder that its weights are read from; None: they are drawn.
      adapted: the adapters; None for a run that trains all.
      seed: of what is drawn.
      teacher: the model whose probabilities are learned; None where labels are.
    """

    family: family_lib.Family
    model: Any
    source: folder_lib.Folder | None
    adapted: Adapted | None
    seed: int
    teacher: teacher_lib.Teacher | None = None

    @property
    def trainable(self) -> str:
        """Returns the regex over paths of the weights that are trained, "" for all."""
        own = "" if self.adapted is None else self.adapted.chosen.trainable
        return own if self.teacher is None else rf"^(?!{teacher_lib.KEY}/)(?=.*?(?:{own}))"

    def abstract(self, policy: precision.Precision, frozen_dtype: str) -> dict[str, Any]:
        """Returns the weights as ShapeDtypeStructs: float32, or where some are frozen as they are stored."""
        found = self._abstract_of_model(policy, frozen_dtype)
        if self.teacher is None:
            return found
        own = found if self.adapted is not None else tree.of_dtype(found, policy.weight_dtype)
        return {**own, teacher_lib.KEY: self.teacher.head(policy.compute_dtype)}

    def of_model(self, params: PyTree) -> PyTree:
        """Returns the params without those of the teacher's head."""
        return {name: part for name, part in params.items() if self.teacher is None or name != teacher_lib.KEY}

    def _abstract_of_model(self, policy: precision.Precision, frozen_dtype: str) -> dict[str, Any]:
        if self.adapted is None:
            return family_lib.abstract_params(self.family.parts, self.model)
        stored = {} if self.source is None else adapted_lib.dtypes(self.source)
        chosen = huggingface.DTYPES.get(frozen_dtype)

        def frozen(path: str) -> Any:
            return chosen or stored.get(path, policy.compute_dtype)

        return adapted_lib.abstract(self.family, self.model, self.adapted.chosen, frozen, policy.weight_dtype)

    def make(self, abstract: PyTree) -> PyTree:
        """Returns the weights for abstract leaves with shardings, of parts of the model or all. All processes must call it.

        Those on a group of a pipeline that other processes run are made there.
        """
        leaves = dict(tree.flatten(abstract))
        found = {path: travel.absent(like) for path, like in leaves.items() if not travel.is_here(like.sharding.mesh)}
        if self.teacher is not None:
            own = {path: like for path, like in leaves.items() if path.startswith(f"{teacher_lib.KEY}/")}
            head = tree.nested({path.partition("/")[2]: like for path, like in own.items() if path not in found})
            found |= {f"{teacher_lib.KEY}/{path}": leaf for path, leaf in tree.flatten(self.teacher.read(head))}
        here = tree.map_with_path(lambda path, like: optax.MaskedNode() if path in found else like, abstract)
        found |= dict(tree.flatten(self._made_here(here)))
        return tree.map_with_path(lambda path, _: found[path], abstract)

    def _made_here(self, abstract: PyTree) -> PyTree:
        key = jax.random.key(self.seed)
        chosen, opened = (None, None) if self.adapted is None else self.adapted
        if self.source is not None:
            if chosen is None:
                return folder_lib.read_params(self.source, abstract)
            return adapted_lib.read(abstract, self.source, chosen, adapter=opened, key=key)
        wanted = dict(tree.flatten(abstract))
        found = {} if opened is None else peft.read_leaves(opened, wanted)
        found |= self._drawn({path: like for path, like in wanted.items() if path not in found}, key)
        if chosen is not None:
            fresh = {path: like for path, like in wanted.items() if path not in found}
            found |= adapted_lib.draw(fresh, chosen, key)
            found |= adapted_lib.magnitudes(fresh, chosen, found, self._made_here)
        return tree.map_with_path(lambda path, _: found[path], abstract)

    def count_line(self, partition: partition_lib.Partition) -> str:
        """Returns the numbers of trained weights and of all, as PEFT prints them. A weight trained in full counts beside its original."""
        trained = sum(math.prod(found.shape or ()) for found in partition.placements.values() if found.trainable)
        every = family_lib.count_params(self.family.parts, self.model) + trained
        return f"trainable params: {trained:,} || all params: {every:,} || trainable%: {100 * trained / every:.4f}"

    def _drawn(self, wanted: Mapping[str, Any], key: jax.Array) -> dict[str, jax.Array]:
        """Returns the model's own weights among `wanted`, drawn part by part; equal parts share one compiled function."""
        found: dict[str, jax.Array] = {}
        chosen = None if self.adapted is None else self.adapted.chosen
        kind = "" if chosen is None else chosen.lora.quantize
        coded = {} if chosen is None else chosen.coded
        parts = family_lib.parts_to_initialise(self.family.parts, self.model)
        for number, (name, (module, inputs)) in enumerate(parts.items()):
            own = {path.removeprefix(f"{name}/"): like for path, like in wanted.items() if path.startswith(f"{name}/")}
            likes = {path: like for path, like in own.items() if path.rpartition("/")[2] not in targets.ENDS}
            if likes:
                inside = {
                    path.removeprefix(f"{name}/"): dims for path, dims in coded.items() if path.startswith(f"{name}/")
                }
                quantizes = frozenset(inside.items())
                leaves = [(path, like.shape, like.dtype, like.sharding) for path, like in likes.items()]
                for mesh in dict.fromkeys(like.sharding.mesh for like in likes.values()):
                    here = tuple(leaf for leaf in leaves if leaf[3].mesh == mesh)
                    made = _part_maker(module, inputs, here, quantizes, kind)(key, number)
                    found |= {f"{name}/{path}": leaf for path, leaf in made.items()}
        return found


def choose(
    config: settings_lib.Config, family: family_lib.Family, model: ModelConfig, source: folder_lib.Folder | None
) -> Weights:
    """Returns where the weights of a run with this model come from, with the adapters of the group `lora`.

    Raises:
      UserError: a name means no module, or the adapters' folder and the group contradict each other. The line names the config key.
    """
    adapted = _adapted(config.lora, family, model)
    if adapted is not None and (config.export.format == "huggingface" or config.export.deltas_every):
        with errors.below("config."):
            targets.check_merge(adapted.chosen)
    return Weights(family, model, source, adapted, config.seed, teacher_lib.open_teacher(config, family, model))


def _adapted(group: settings_lib.LoraSettings, family: family_lib.Family, model: ModelConfig) -> Adapted | None:
    """Returns the adapters that the group `lora` describes, or None if it is off."""
    if not group.is_on:
        return None
    try:
        if not group.init_from:
            return Adapted(peft.choose(config_lib.make_lora(group), family, model), None)
        files.check_path(group.init_from, "lora.init_from")
        quiet = settings.Lora(dropout=group.dropout, quantize=group.quantize)
        opened, chosen = peft.start(family, model, quiet, group.init_from)
    except UserError as error:
        line = str(error)
        raise UserError(f"config.{line}" if line.startswith("lora.") else f"config.lora.init_from: {line}") from error
    _check_same(group, chosen, family, model)
    return Adapted(chosen, opened)


def _check_same(
    group: settings_lib.LoraSettings, chosen: targets.Targets, family: family_lib.Family, model: ModelConfig
) -> None:
    """Refuses settings that differ from those of the folder. Targets may mean the same modules by other names ("all-linear")."""
    own = chosen.lora
    given = config_lib.make_lora(dataclasses.replace(group, r=group.r or own.r, alpha=group.alpha or own.alpha))
    if given.target_modules:
        with errors.below("config."):
            named = peft.choose(dataclasses.replace(own, target_modules=given.target_modules), family, model)
        if set(named.adapted) == set(chosen.adapted):
            given = dataclasses.replace(given, target_modules=own.target_modules)
    for name in (
        "r",
        "alpha",
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "rslora",
        "dora",
        "modules_to_save",
    ):
        value, known = getattr(given, name), getattr(own, name)
        is_given = bool(getattr(group, name))
        same = (
            set(value or ()) == set(known or ())
            if isinstance(value, tuple) and isinstance(known, tuple)
            else value == known
        )
        if is_given and not same:
            raise UserError(
                f"config.lora.{name}: is {errors.shown(getattr(group, name))}, and config.lora.init_from={group.init_from} has "
                f"{errors.shown(known)}; leave it at its default"
            )


@functools.lru_cache
def _part_maker(
    module: nn.Module,
    inputs: family_lib.Inputs,
    leaves: tuple,
    coded: frozenset[tuple[str, tuple[int, int]]],
    kind: str,
) -> Callable[..., dict[str, jax.Array]]:
    """Returns f(key, number) -> the leaves of a part by path, cast or quantized, with zeros where the partition pads them."""

    stacked = dict(coded)  # {path of a kernel that is quantized: the dims that count its stack, and its inputs}

    def run(key: jax.Array, number: int | jax.Array) -> dict[str, jax.Array]:
        arrays = [jnp.zeros(like.shape, like.dtype) for like in inputs]
        made: dict[str, jax.Array] = {}
        for path, leaf in tree.flatten(module.init(jax.random.fold_in(key, number), *arrays)["params"]):
            parts = adapters.quantize_stack(leaf, kind, *stacked[path]) if path in stacked else {}
            made |= {f"{path}/{name}": part for name, part in parts.items()} or {path: leaf}
        return {
            path: jnp.pad(made[path].astype(dtype), [(0, want - have) for want, have in zip(shape, made[path].shape)])
            for path, shape, dtype, _ in leaves
        }

    return jax.jit(run, out_shardings={path: sharding for path, _, _, sharding in leaves})
