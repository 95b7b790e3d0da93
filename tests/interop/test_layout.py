"""Checks that slices and whole leaves agree in both layouts. This module tests zerojax.interop.layout."""

import dataclasses
import itertools

import numpy as np
import pytest

from zerojax.interop import layout
from zerojax.models import families, family


def small(chosen):
    return dataclasses.replace(next(iter(chosen.presets.values())), vocab_size=48, num_layers=2)


@pytest.mark.parametrize("chosen", families.FAMILIES, ids=lambda chosen: next(iter(chosen.presets)))
def test_a_leaf_is_found_again_in_its_tensor(chosen):
    for tensor in layout.tensors(chosen, small(chosen)):
        leaf = np.arange(np.prod(tensor.leaf_shape)).reshape(tensor.leaf_shape)
        theirs = tensor.to_theirs(leaf)
        assert theirs.shape == tensor.shape and theirs.flags.c_contiguous
        np.testing.assert_array_equal(theirs.reshape(tensor.view).transpose(tensor.order), leaf)
        index = tuple(slice(size // 4, max(size // 2, 1)) for size in tensor.leaf_shape)
        cut = theirs.reshape(tensor.view)[tuple(tensor.source_index(index))].transpose(tensor.order)
        np.testing.assert_array_equal(cut, leaf[index])


def test_a_kernel_is_stored_as_outputs_by_inputs():
    kernel = layout.ModelTensor("q", "q/kernel", (3, 2, 5), family.Tensor("q", 1))
    leaf = np.random.default_rng(0).normal(size=(3, 2, 5))
    np.testing.assert_array_equal(kernel.to_theirs(leaf), np.einsum("dhn->hnd", leaf).reshape(10, 3))
    shapes = {"same": (2, 5), "flat": (10,), "row": (1, 2, 5)}
    for form, shape in shapes.items():
        assert layout.ModelTensor("b", "b", (2, 5), family.Tensor("b", form=form)).shape == shape


def test_tensors_outside_layers_come_first_and_each_has_its_own_name():
    chosen = families.PRESETS["test"]
    names = [tensor.name for tensor in layout.tensors(chosen, small(chosen))]
    assert len(set(names)) == len(names)
    groups = [name for name, _ in itertools.groupby("layers" in name for name in names)]
    assert groups == [False, True]
