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


@pytest.mark.parametrize(
    "of_weight, a, b",
    [("same", "turned_b", "turned_a"), ("halves", "turned_b", "turned_a"), ("stack", "experts_a", "halves_b")],
)
def test_adapters_of_stacked_experts_are_stored_as_peft_multiplies_them(of_weight, a, b):
    experts, inputs, rank, outputs = 3, 5, 2, (4,) if of_weight == "same" else (4, 2)
    leaves = [
        np.random.default_rng(0).normal(size=shape) for shape in ((experts, inputs, rank), (experts, rank, *outputs))
    ]
    forms = dict(zip((form[-1] for form in (a, b)), zip((a, b), leaves)))
    stored = {
        name: layout.ModelTensor(name, name, leaf.shape, family.Tensor(name, form=form)).to_theirs(leaf)
        for name, (form, leaf) in forms.items()
    }
    # ParamWrapper.get_delta_weight of PEFT 0.21, for matrices that it takes for [experts, outputs, inputs]
    theirs_a = stored["a"].reshape(experts, rank, -1)
    delta = np.einsum("ore,eri->eoi", stored["b"].reshape(-1, rank, experts), theirs_a)
    ours = np.einsum("eir,er...->ei...", *leaves)
    weight = layout.ModelTensor("w", "w", ours.shape, family.Tensor("w", form=of_weight))
    np.testing.assert_allclose(delta, weight.to_theirs(ours))


def test_tensors_outside_layers_come_first_and_each_has_its_own_name():
    chosen = families.PRESETS["test"]
    names = [tensor.name for tensor in layout.tensors(chosen, small(chosen))]
    assert len(set(names)) == len(names)
    groups = [name for name, _ in itertools.groupby("layers" in name for name in names)]
    assert groups == [False, True]
