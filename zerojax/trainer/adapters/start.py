"""The weights of a run with adapters. This module chooses the adapters, and makes their first state, or one from a checkpoint.

Frozen weights are in no checkpoint. They are read from the model's folder again, or drawn again from the run's seed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax import errors, files, precision, tree
from zerojax.errors import UserError
from zerojax.interop import adapted as adapted_lib
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, peft
from zerojax.lora import settings, targets
from zerojax.models import family as family_lib
from zerojax.ops import quantized
from zerojax.trainer import config as config_lib
from zerojax.zero import placement, shard_state
from zerojax.zero.offload import create as offload_create
from zerojax.zero.offload import kept, layout


class Adapted(NamedTuple):
    """The adapters of a run, and the opened folder that they start from; None for fresh ones."""

    chosen: targets.Targets
    opened: peft.Adapter | None


def choose(group: config_lib.LoraSettings, family: family_lib.Family, model: Any) -> Adapted | None:
    """Returns the adapters that the group `lora` describes, or None if it is off.

    Raises:
      UserError: a name means no module, or the folder and the group contradict each other. The line names the config key.
    """
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
    _check_same(group, chosen.lora)
    return Adapted(chosen, opened)


def _check_same(group: config_lib.LoraSettings, own: settings.Lora) -> None:
    """Refuses settings that differ from those of the folder."""
    given = config_lib.make_lora(dataclasses.replace(group, r=group.r or own.r, alpha=group.alpha or own.alpha))
    for name in ("r", "alpha", "target_modules", "exclude_modules", "rslora", "modules_to_save"):
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


def abstract_params(
    group: config_lib.LoraSettings,
    adapted: Adapted,
    family: family_lib.Family,
    model: Any,
    source: folder_lib.Folder | None,
    policy: precision.Precision,
) -> dict[str, Any]:
    """Returns the weights of a run with adapters as ShapeDtypeStructs."""
    stored = {} if source is None else adapted_lib.dtypes(source)
    chosen = huggingface.DTYPES.get(group.frozen_dtype)

    def frozen(path: str) -> Any:
        return chosen or stored.get(path, policy.compute_dtype)

    return adapted_lib.abstract(family, model, adapted.chosen, frozen, policy.weight_dtype)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where the weights of a run come from.

    Attributes:
      adapted: the adapters.
      family, model: the model.
      source: the model's folder; None: its weights are drawn.
      seed: of what is drawn.
    """

    adapted: Adapted
    family: family_lib.Family
    model: Any
    source: folder_lib.Folder | None
    seed: int

    @property
    def trainable(self) -> str:
        """Returns the regex over paths of the weights that are trained."""
        return self.adapted.chosen.trainable

    def first_state(self, create: Callable[[Any], Any], partition: placement.Partition) -> Any:
        """Returns the initial state.

        Args:
          create: (params, of which frozen ones may be `optax.MaskedNode()`) -> a state.
          partition: the state's.
        """
        on_device = partition.on_device
        trained = self._make(on_device.trainable_part(on_device.abstract_state.params))

        def create_part(part: Any) -> Any:
            state = create(shard_state.unpad({"params": part}, on_device)["params"])
            return shard_state.pad(state, on_device)

        wanted, keep = trained_part(partition, partition.abstract_state), offload_create.begin(partition)
        if partition.offload:
            leaves = offload_create.from_init(create_part, [trained], wanted, keep)
            state = jax.tree.unflatten(jax.tree.structure(wanted), leaves)
        else:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
            state = jax.jit(create_part, out_shardings=shardings, donate_argnums=0)(trained)
        return self.with_frozen(state, partition, keep)

    def with_frozen(self, state: Any, partition: placement.Partition, keep: kept.Keep) -> Any:
        """Returns a state of the trained part with the frozen weights, which are read or drawn part by part on the device.

        Args:
          state: of the trained part.
          partition: the state's.
          keep: brings a weight that is offloaded to where it lives, before the next part is made; see `kept.keeper`.
        """
        own, wanted = dict(tree.flatten(state.params)), dict(tree.flatten(partition.abstract_state.params))
        for name, part in partition.on_device.abstract_state.params.items():
            frozen = tree.map_with_path(lambda path, leaf: optax.MaskedNode() if path in own else leaf, {name: part})
            for path, leaf in tree.flatten(self._make(frozen)):
                own[path] = jax.block_until_ready(keep(leaf, wanted[path])) if layout.is_on_host(wanted[path]) else leaf
        return state.replace(params=tree.map_with_path(lambda path, _: own[path], partition.abstract_state.params))

    def count_line(self, partition: placement.Partition) -> str:
        """Returns the numbers of trained weights and of all, as PEFT prints them. A weight trained in full counts beside its original."""
        trained = sum(math.prod(found.shape or ()) for found in partition.placements.values() if found.trainable)
        every = family_lib.count_params(self.family.parts, self.model) + trained
        return f"trainable params: {trained:,} || all params: {every:,} || trainable%: {100 * trained / every:.4f}"

    def _make(self, abstract: Any) -> Any:
        """Returns weights for abstract leaves."""
        key, (chosen, opened) = jax.random.key(self.seed), self.adapted
        if self.source is not None:
            return adapted_lib.read(abstract, self.source, chosen, adapter=opened, key=key)
        wanted = dict(tree.flatten(abstract))
        found = {} if opened is None else peft.read_leaves(opened, wanted)
        found |= self._drawn({path: like for path, like in wanted.items() if path not in found}, key)
        found |= adapted_lib.draw({path: like for path, like in wanted.items() if path not in found}, chosen, key)
        return tree.map_with_path(lambda path, _: found[path], abstract)

    def _drawn(self, wanted: Mapping[str, Any], key: jax.Array) -> dict[str, jax.Array]:
        """Returns the model's own weights among `wanted`, drawn part by part; equal parts share one compiled function."""
        found: dict[str, jax.Array] = {}
        kind = self.adapted.chosen.lora.quantize
        coded = {f"{path}/{targets.KERNEL}" for path in self.adapted.chosen.quantized}
        parts = family_lib.parts_to_initialise(self.family.parts, self.model)
        for number, (name, (module, inputs)) in enumerate(parts.items()):
            likes = {
                path.removeprefix(f"{name}/"): like for path, like in wanted.items() if path.startswith(f"{name}/")
            }
            likes = {
                path: like for path, like in likes.items() if path.rpartition("/")[2] not in (targets.A, targets.B)
            }
            if likes:
                own = frozenset(path.removeprefix(f"{name}/") for path in coded if path.startswith(f"{name}/"))
                leaves = tuple((path, like.shape, like.dtype, like.sharding) for path, like in likes.items())
                made = _part_maker(module, inputs, leaves, own, kind)(key, number)
                found |= {f"{name}/{path}": leaf for path, leaf in made.items()}
        return found


@functools.lru_cache
def _part_maker(
    module: Any, inputs: family_lib.Inputs, leaves: tuple, coded: frozenset[str], kind: str
) -> Callable[..., dict[str, jax.Array]]:
    """Returns f(key, number) -> the leaves of a part by path, cast or quantized, with zeros where the partition pads them."""

    def run(key: jax.Array, number: Any) -> dict[str, jax.Array]:
        arrays = [jnp.zeros(like.shape, like.dtype) for like in inputs]
        made: dict[str, jax.Array] = {}
        for path, leaf in tree.flatten(module.init(jax.random.fold_in(key, number), *arrays)["params"]):
            parts = quantized.quantize(leaf, kind) if path in coded else {}
            made |= {f"{path}/{name}": part for name, part in parts.items()} or {path: leaf}
        return {
            path: jnp.pad(made[path].astype(dtype), [(0, want - have) for want, have in zip(shape, made[path].shape)])
            for path, shape, dtype, _ in leaves
        }

    return jax.jit(run, out_shardings={path: sharding for path, _, _, sharding in leaves})


def trained_part(partition: placement.Partition, state: Any) -> Any:
    """Returns a state without its frozen weights: what a checkpoint holds."""
    return state.replace(params=partition.trainable_part(state.params))
