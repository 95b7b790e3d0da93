"""Matrices in FP8 with a scale for each block, as DeepSeek-V3's files hold them. This module finds their two tensors, and reads slices of
them as floats.

NAME, float8_e4m3fn[outputs, inputs], is multiplied by NAME_scale_inv, float32[outputs / rows, inputs / columns] rounded up, which has one
number for each block of rows x columns, 128 x 128 (arXiv:2412.19437, section 3.3).
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from zerojax import errors
from zerojax.errors import UserError
from zerojax.interop import layout, tensor_files
from zerojax.models import family as family_lib
from zerojax.ops import quantized

METHOD, DTYPE = "fp8", "FP8 in blocks"  # in a config's quantization_config, and in an entry
SCALES = "_scale_inv"
FORMS = ("e4m3", "float8_e4m3fn")  # of values, as DeepSeek-V3's and MiniMax-M2's configs tell it


class ScaledEntry(NamedTuple):
    """One matrix in files, in place of an `Entry`: its values, the scales, and the rows and columns of a block."""

    values: tensor_files.Entry
    scales: tensor_files.Entry
    block: tuple[int, int]

    @property
    def file(self) -> pathlib.Path:
        """Returns the file of the values."""
        return self.values.file

    @property
    def dtype(self) -> str:
        """Returns what stands for the two dtypes."""
        return DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the matrix's shape."""
        return self.values.shape

    @property
    def start(self) -> int:
        """Returns the first byte of the values."""
        return self.values.start

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the values."""
        return math.prod(self.shape)


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the rows and columns of a block, from a config's quantization_config.

    Raises:
      UserError: it tells no block, or values in another form; the line begins with "config.json:".
    """
    block, form = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and 0 < size < 1 << 31 for size in block)
        or form not in FORMS
    ):
        raise UserError(
            f"config.json: quantization_config has weight_block_size={errors.shown(block)} and fmt={errors.shown(form)}, and matrices in "
            "fp8 are read in e4m3 with a scale for each block of two sizes; name a folder of float weights"
        )
    return block[0], block[1]


def joined(entries: Mapping[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """Returns tensors in which one `ScaledEntry` takes the place of each pair of values and scales.

    Raises:
      UserError: a tensor of scales has no values, or they do not fit together.
    """
    found = dict(entries)
    for name in [name for name in entries if name.endswith(SCALES)]:
        matrix = name.removesuffix(SCALES)
        values, scales = entries.get(matrix), entries[name]
        if values is None or (values.dtype, scales.dtype) != ("F8_E4M3", "F32") or len(values.shape) != 2:
            raise UserError(
                f"{scales.file}: tensor {name} holds F32 scales of a matrix in F8_E4M3, and {matrix} is missing or another; copy the "
                "folder again"
            )
        if scales.shape != tuple(-(-size // own) for size, own in zip(values.shape, block)):
            raise UserError(
                f"{scales.file}: tensor {name} has shape {scales.shape}, which does not fit {values.shape} in blocks of {block}; copy the "
                "folder again"
            )
        del found[name]
        found[matrix] = ScaledEntry(values, scales, block)
    return found


def as_stored(entries: Mapping[str, Any]) -> dict[str, tensor_files.Entry]:
    """Returns the two tensors of each matrix whose blocks are those of `ops.quantized`, as integers of the same bits."""
    found: dict[str, tensor_files.Entry] = {}
    for name, entry in entries.items():
        if isinstance(entry, ScaledEntry) and entry.block == (quantized.SIDE, quantized.SIDE):
            found[name] = entry.values._replace(dtype="U8")
            found[name + SCALES] = entry.scales._replace(dtype="U32")
    return found


def part_of(tensor: layout.ModelTensor, name: str) -> layout.ModelTensor:
    """Returns where the values or the scales of a leaf are, by their name in `ops.quantized`: a tensor of `as_stored`, or one an expert."""
    if name != quantized.BLOCK_SCALES:
        return tensor
    stack = int(family_lib.EXPERT in tensor.name)
    shape = quantized.blocks_of(tensor.leaf_shape[stack:], tensor.entry.inputs)
    entry = tensor.entry._replace(inputs=1)
    return tensor._replace(name=tensor.name + SCALES, leaf_shape=(*tensor.leaf_shape[:stack], *shape), entry=entry)


def read(
    scaled: ScaledEntry, view: Sequence[int], index: Sequence[slice], order: Sequence[int], dtype: DTypeLike
) -> np.ndarray:
    """Reads a slice of a matrix as floats; the arguments are those of `tensor_files.read`. It multiplies in float32."""
    values = tensor_files.read(scaled.values, view, index, order, np.float32)
    scales = tensor_files.read(
        scaled.scales, scaled.scales.shape, [slice(0, n) for n in scaled.scales.shape], (0, 1), np.float32
    )
    # The first dims of the view are rows of the matrix, and the rest columns.
    cut = next(
        n
        for n in range(len(view) + 1)
        if math.prod(view[:n]) == scaled.shape[0] and math.prod(view[n:]) == scaled.shape[1]
    )
    rows, columns = (_flat(sizes, parts) for sizes, parts in ((view[:cut], index[:cut]), (view[cut:], index[cut:])))
    own = scales[np.ix_(rows // scaled.block[0], columns // scaled.block[1])]
    own = own.reshape([part.stop - part.start for part in index]).transpose(order)
    return (values * own).astype(dtype)


def _flat(sizes: Sequence[int], parts: Sequence[slice]) -> np.ndarray:
    """Returns the numbers of a slice's elements in the flat array."""
    return np.arange(math.prod(sizes)).reshape(sizes)[tuple(parts)].reshape(-1)
