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
    def _joined(self) -> list[tuple[int, ...]]:
        """Returns for each dim at Hugging Face the dims of our leaf that it joins."""
        dims, inputs = tuple(range(len(self.leaf_shape))), self.entry.inputs
        if inputs:
            matrix = dims[:inputs], dims[inputs:]
            return [*matrix] if self.entry.inputs_first else [*matrix[::-1]]
        alone: list[tuple[int, ...]] = [(dim,) for dim in dims]
        forms: dict[str, list[tuple[int, ...]]] = {
            "same": alone,
            "flat": [dims],
            "row": [(), *alone],
            "pairs": [*alone[:-2], dims[-2:]],
            "halves": [*alone[:-2], dims[:-3:-1]],
            "stack": [*alone[:1], dims[:1:-1], *alone[1:2]],
            "experts_a": [(*dims[:1], *dims[2:]), *alone[1:2]],
            "experts_b": [dims[2:], dims[1::-1]],
            "halves_b": [dims[:1:-1], dims[1::-1]],
            "turned_a": [dims[:2], dims[:1:-1]],
            "turned_b": [*alone[1:2], dims[::-2]],
        }
        return forms[self.entry.form]

    @property
    def _dims(self) -> list[int]:
        """Returns the dims of our leaf in the order of Hugging Face's."""
        return [dim for joined in self._joined for dim in joined]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape at Hugging Face."""
        return tuple(math.prod(self.leaf_shape[dim] for dim in joined) for joined in self._joined)

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the dims of our leaf as dims of `view`."""
        return tuple(map(self._dims.index, range(len(self.leaf_shape))))

    @property
    def view(self) -> tuple[int, ...]:
        """Returns Hugging Face's shape with the dims of our leaf: outputs, then inputs."""
        return tuple(self.source_index(self.leaf_shape))

    def source_index(self, index: Sequence[Any]) -> list[Any]:
        """Returns a slice of our leaf as a slice of `view`."""
        return [index[dim] for dim in self._dims]

    def to_theirs(self, leaf: np.ndarray) -> np.ndarray:
        """Returns a leaf as Hugging Face's tensor."""
        return np.ascontiguousarray(leaf.transpose(self._dims)).reshape(self.shape)


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
