"""Maps a model's weights to Hugging Face's tensors. This module lists them, and converts slices from one layout to the other."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zerojax import tree
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig

_LAYER = re.compile(r"_(\d+)/")  # the layer number in a path


class ModelTensor(NamedTuple):
    """One tensor: its name at Hugging Face, its path and shape in our params, and how its layout differs.

    Where experts are stacked in our leaf, it stands for the tensors of all experts; `members` are those in files, each with its `part` of
    the leaf.
    """

    name: str
    path: str
    leaf_shape: tuple[int, ...]
    entry: family_lib.Tensor
    part: int | None = None

    @property
    def members(self) -> list["ModelTensor"]:
        """Returns the tensors in files."""
        if family_lib.EXPERT not in self.name:
            return [self]
        count, *shape = self.leaf_shape
        names = (self.name.replace(family_lib.EXPERT, str(part)) for part in range(count))
        return [ModelTensor(name, self.path, tuple(shape), self.entry, part) for part, name in enumerate(names)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape at Hugging Face."""
        ours, inputs = self.leaf_shape, self.entry.inputs
        if inputs:
            matrix = math.prod(ours[:inputs]), math.prod(ours[inputs:])
            return matrix if self.entry.inputs_first else matrix[::-1]
        forms = {
            "same": ours,
            "flat": (math.prod(ours),),
            "row": (1, *ours),
            **dict.fromkeys(("pairs", "halves"), (*ours[:-2], math.prod(ours[-2:]))),
            "stack": (ours[0], math.prod(ours[2:]), *ours[1:2]),
            "experts_a": (ours[0] * ours[-1], *ours[1:2]),
            "experts_b": (math.prod(ours[2:]), math.prod(ours[:2])),
        }
        return forms[self.entry.form]

    @property
    def _moved(self) -> int:
        """Returns the number of leading dims of our leaf that come last at Hugging Face."""
        return 0 if self.entry.inputs_first else self.entry.inputs

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the dims of our leaf as dims of `view`."""
        ndim, inputs = len(self.leaf_shape), self._moved
        if self.entry.form == "stack":
            return 0, *range(ndim - 1, 0, -1)
        if self.entry.form == "experts_a":
            return 0, 2, 1
        if self.entry.form == "experts_b":
            return ndim - 1, ndim - 2, *range(ndim - 2)
        if self.entry.form == "halves":
            return *range(ndim - 2), ndim - 1, ndim - 2
        return tuple((dim - inputs) % ndim for dim in range(ndim))

    @property
    def view(self) -> tuple[int, ...]:
        """Returns Hugging Face's shape with the dims of our leaf: outputs, then inputs."""
        if self.entry.form == "stack":
            return self.leaf_shape[0], *self.leaf_shape[:0:-1]
        if self.entry.form in ("experts_a", "experts_b"):
            return tuple(self.source_index(self.leaf_shape))
        if self.entry.form == "halves":
            return *self.leaf_shape[:-2], *self.leaf_shape[:-3:-1]
        return (*self.leaf_shape[self._moved :], *self.leaf_shape[: self._moved])

    def source_index(self, index: Sequence[Any]) -> list[Any]:
        """Returns a slice of our leaf as a slice of `view`."""
        if self.entry.form == "stack":
            return [index[0], *index[:0:-1]]
        if self.entry.form == "experts_a":
            return [index[0], index[2], index[1]]
        if self.entry.form == "experts_b":
            return [*index[2:], index[1], index[0]]
        if self.entry.form == "halves":
            return [*index[:-2], *index[:-3:-1]]
        return [*index[self._moved :], *index[: self._moved]]

    def to_theirs(self, leaf: np.ndarray) -> np.ndarray:
        """Returns a leaf as Hugging Face's tensor."""
        order = np.argsort(np.asarray(self.order, int))
        return np.ascontiguousarray(leaf.transpose(order)).reshape(self.shape)


def tensors(family: family_lib.Family, model: ModelConfig) -> list[ModelTensor]:
    """Returns the model's tensors: first those outside layers, then layer by layer. Each group is in the order of the family's table."""
    table = family.huggingface.tensors(model)
    order = list(table)
    found = []
    for path, leaf in tree.flatten(family_lib.abstract_params(family.parts, model)):
        layer = _LAYER.search(path)
        place = _LAYER.sub("_{}/", path)
        entry = table[place]
        number = layer[1] if layer else -1
        found.append(
            (
                int(number),
                order.index(place),
                ModelTensor(entry.name.format(number, expert=family_lib.EXPERT), path, leaf.shape, entry),
            )
        )
    return [tensor for *_, tensor in sorted(found, key=lambda item: item[:2])]


def written(family: family_lib.Family, model: ModelConfig) -> list[ModelTensor]:
    """Returns the tensors of files that are written: `tensors`, and those that repeat one."""
    found = tensors(family, model)
    by_name = {tensor.name: tensor for tensor in found}
    repeated = family.huggingface.repeated(model)
    return found + [by_name[original]._replace(name=name) for name, original in repeated.items()]
