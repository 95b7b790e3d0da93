"""Matrices in MXFP4, as gpt-oss's files hold its experts. This module finds their two tensors, and reads slices of them as floats.

32 neighbours of a matrix share a scale, a power of two (OCP Microscaling Formats v1.0, section 5.2). NAME_blocks, uint8[experts,
outputs..., inputs / 32, 16], holds two 4-bit floats a byte, the lower half first. NAME_scales, uint8[experts, outputs..., inputs / 32],
holds exponents with a bias of 127. The matrix NAME is [experts, inputs, outputs...].
"""

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from zerojax.errors import UserError
from zerojax.interop import tensor_files
from zerojax.ops import quantized

METHOD, DTYPE = "mxfp4", "MXFP4"  # in a config's quantization_config, and in an entry
GROUP = quantized.GROUP  # neighbours that share a scale
_VALUES = quantized.MXFP4_VALUES
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=1)  # of each byte: float32[256, 2]


class PackedEntry(NamedTuple):
    """One matrix in files, in place of an `Entry`: its shape is that of the floats, and `start` the first byte of its blocks."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    scales: tensor_files.Entry

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the blocks."""
        return math.prod(self.shape) // 2


def joined(entries: Mapping[str, tensor_files.Entry]) -> dict[str, tensor_files.Entry | PackedEntry]:
    """Returns tensors in which one `PackedEntry` takes the place of each pair of blocks and scales.

    Raises:
      UserError: a tensor of blocks has no scales, or they do not fit together.
    """
    found: dict[str, tensor_files.Entry | PackedEntry] = dict(entries)
    for name in [name for name in entries if name.endswith("_blocks")]:
        matrix = re.sub("_blocks$", "", name)
        blocks, scales = entries[name], entries.get(f"{matrix}_scales")
        if scales is None or {blocks.dtype, scales.dtype} != {"U8"} or len(scales.shape) != 3:
            raise UserError(
                f"{blocks.file}: tensor {name} holds blocks of MXFP4, and {matrix}_scales, which has three dims of U8 beside it, is "
                "missing or another; copy the folder again"
            )
        count, outputs, groups = scales.shape
        if math.prod(blocks.shape) != count * outputs * groups * GROUP // 2 or blocks.shape[:2] != scales.shape[:2]:
            raise UserError(
                f"{blocks.file}: tensor {name} has shape {blocks.shape}, which does not fit scales of shape {scales.shape}; copy the "
                "folder again"
            )
        del found[name], found[f"{matrix}_scales"]
        found[matrix] = PackedEntry(blocks.file, DTYPE, (count, groups * GROUP, outputs), blocks.start, scales)
    return found


def read_packed(packed: PackedEntry, name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
    """Reads a slice of the codes or the exponents, as `ops.quantized` has them: uint8. What lies beyond them is 0.

    Args:
      packed: the matrix.
      name: "mxfp4" or "exponents".
      shape: that of the leaf of floats, [experts, inputs, outputs...].
      index: a slice with start and stop for each dim of the codes or the exponents.
    """
    count, inputs, *outputs = shape
    entry, width = (packed.scales, inputs // GROUP) if name == quantized.EXPONENTS else (packed, inputs // 2)
    found = np.zeros([part.stop - part.start for part in index], np.uint8)
    size = math.prod(outputs) * width
    for place, expert in enumerate(range(index[0].start, min(index[0].stop, count))):
        with tensor_files.mapped(entry.file, entry.start + expert * size, size) as content:
            whole = np.frombuffer(content, np.uint8).reshape(*outputs, width)
            own = whole[tuple(index[1:])].copy()
            del whole  # a map in use cannot be closed
        found[place][tuple(map(slice, own.shape))] = own
    return found


def read(packed: PackedEntry, shape: Sequence[int], index: Sequence[slice], dtype: DTypeLike) -> np.ndarray:
    """Reads a slice of a matrix, an expert at a time.

    Args:
      packed: the matrix.
      shape: that of the leaf, [experts, inputs, outputs...].
      index: a slice with start and stop for each dim of `shape`.
      dtype: of the result.
    """
    _, inputs, *outputs = shape
    first, last = index[1].start // GROUP, -(-index[1].stop // GROUP)
    per_row, rows = inputs // GROUP, math.prod(outputs)
    own = slice(index[1].start - first * GROUP, index[1].stop - first * GROUP)
    found = np.empty([part.stop - part.start for part in index], dtype)
    if not found.size:
        return found
    for place, expert in enumerate(range(index[0].start, index[0].stop)):
        of_all = []
        for entry, width in ((packed, GROUP // 2), (packed.scales, 1)):
            size = rows * per_row * width
            with tensor_files.mapped(entry.file, entry.start + expert * size, size) as content:
                whole = np.frombuffer(content, np.uint8).reshape(*outputs, per_row, width)
                of_all.append(whole[(*index[2:], slice(first, last))].copy())
                del whole  # a map in use cannot be closed
        blocks, scales = of_all
        # Values have two bits, so the product is exact; a scale of 255 is NaN in the format, and infinity here, which is warned of.
        with np.errstate(over="ignore"):
            values = np.ldexp(_PAIRS[blocks].reshape(*blocks.shape[:-1], GROUP), scales.astype(np.int32) - 127)
        values = values.reshape(*blocks.shape[:-2], -1)[..., own]
        found[place] = np.moveaxis(values, -1, 0)
    return found
