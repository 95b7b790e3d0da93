"""Saves leaves that are not in memory. This module has Orbax read them one at a time, when it writes them.

Orbax takes a tree of arrays and copies them to the host before it writes in the background. A state that lives on a disk may be larger than
the host's memory. So its leaves are handed over as `InFile`, which Orbax's handler of numpy arrays reads when their turn comes. This relies
on one private function of that handler; a test counts the leaves in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import DTypeLike


class InFile:
    """A leaf that is read when it is written.

    Attributes:
      read: returns the leaf's array.
      shape, dtype: the array's.
    """

    def __init__(self, read: Callable[[], np.ndarray], shape: Sequence[int], dtype: DTypeLike):
        self.read, self.shape, self.dtype = read, tuple(shape), np.dtype(dtype)

    size = property(lambda self: int(np.prod(self.shape, dtype=np.int64)))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    ndim = property(lambda self: len(self.shape))

    def __deepcopy__(self, memo: Any) -> "InFile":
        del memo
        return self

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.read(), dtype)


def handlers() -> ocp.type_handlers.TypeHandlerRegistry:
    """Returns Orbax's handlers of leaves, of which that of numpy arrays takes `InFile` too."""
    found = {kind: ocp.type_handlers.get_type_handler(kind) for kind in ocp.type_handlers.supported_types()}
    found[InFile] = found[np.ndarray] = _OneByOne()
    return ocp.type_handlers.create_type_handler_registry(*found.items())


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Writes leaves in files each after the one before, and arrays before them."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Hands the leaves to the background."""
        return await super().serialize([_wrapped(value) for value in values], infos, args)

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None) -> None:
        every = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values)))
        arrays = [row for row in every if row[0].dtype != object]
        if arrays:
            await super()._background_serialize(*map(list, zip(*arrays)))
        for value, info, arg in every:
            if value.dtype == object:
                await super()._background_serialize([value[0].read()], [info], [arg])


def _wrapped(value: Any) -> np.ndarray:
    """Returns a leaf in a file as an array of one object, which passes Orbax's checks and could not be written by itself."""
    if not isinstance(value, InFile):
        return value
    wrapped = np.empty(1, object)
    wrapped[0] = value
    return wrapped
