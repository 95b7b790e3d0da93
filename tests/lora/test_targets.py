"""Checks which modules get adapters. This module tests zerojax.lora.targets."""

import re

import pytest

from zerojax.errors import UserError
from zerojax.lora import targets
from zerojax.lora.settings import Lora

LINEAR = {
    "layer_0/q": targets.LinearModule("layers.0.q_proj", (64, 4, 16), 1),
    "layer_0/o": targets.LinearModule("layers.0.o_proj", (4, 16, 64), 2),
    "layer_1/q": targets.LinearModule("layers.1.q_proj", (64, 4, 16), 1),
    "head": targets.LinearModule("lm_head", (64, 100), 1, is_output=True),
}
NAMES = {f"{path}/kernel": found.name for path, found in LINEAR.items()} | {"norm/scale": "norm"}


def chosen(**fields):
    return targets.choose(Lora(**fields), LINEAR, NAMES, NAMES)


@pytest.mark.parametrize(
    ("fields", "adapted"),
    [
        ({"target_modules": "all-linear"}, ("layer_0/q", "layer_0/o", "layer_1/q")),
        ({"target_modules": ("q_proj",)}, ("layer_0/q", "layer_1/q")),
        ({"target_modules": ("q_proj",), "exclude_modules": ("layers.1.q_proj",)}, ("layer_0/q",)),
        ({"target_modules": r"layers\.\d\.o_proj|lm_head"}, ("layer_0/o", "head")),
    ],
)
def test_modules_are_chosen_as_peft_does(fields, adapted):
    assert chosen(**fields).adapted == adapted


def test_experts_have_the_names_of_modules_of_their_own_counted_from_0():
    found = targets.LinearModule(f"layers.0.experts.{targets.EXPERT}.up_proj", (64, 128), 1, stack=(3,))
    assert found.names == tuple(f"layers.0.experts.{number}.up_proj" for number in range(3))
    assert LINEAR["head"].names == ("lm_head",)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_of_no_adapter_is_told(field):
    line = rf"^lora.{field}: 'qproj' has no effect: it means no module with an adapter; known: q_proj, o_proj$"
    with pytest.warns(UserWarning, match=line):
        chosen(**{field: {"qproj": 4, "o_proj": 2}})


@pytest.mark.parametrize("excluded", ["all-linear", ("vision_proj",)])
def test_an_exclusion_without_effect_is_told(excluded):
    with pytest.warns(UserWarning, match="^lora.exclude_modules: .* has no effect: .* known: q_proj, o_proj, lm_head$"):
        assert len(chosen(target_modules=("q_proj",), exclude_modules=excluded).adapted) == 2


def test_an_adapters_shapes_are_those_of_the_flattened_kernel():
    assert chosen(r=2, target_modules=("o_proj",)).shapes("layer_0/o") == {"lora_a": (64, 2), "lora_b": (2, 64)}


def test_adapters_and_modules_to_save_are_trained_and_the_output_stays_unquantized():
    found = chosen(target_modules=("q_proj",), modules_to_save=("norm", "lm_head"), quantize="nf4")
    assert found.quantized == ("layer_0/q", "layer_0/o", "layer_1/q")
    trained = [
        path
        for path in ("layer_0/q/lora_a", "layer_0/q/lora_b", "layer_0/q/kernel", "norm/scale", "head/kernel")
        if re.search(found.trainable, path)
    ]
    assert trained == ["layer_0/q/lora_a", "layer_0/q/lora_b", "norm/scale", "head/kernel"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ("q_prj",)}, "lora.target_modules: 'q_prj' names no linear module.*did you mean 'q_proj'"),
        (
            {"target_modules": "nothing"},
            "lora.target_modules: 'nothing' means no linear module of this model; known: q_p",
        ),
        (
            {"target_modules": "q_proj,o_proj"},
            "lora.target_modules: 'q_proj,o_proj' means.*give several names as a list",
        ),
        (
            {"modules_to_save": ("score",)},
            "lora.modules_to_save: 'score' names no module with weights of its own; known",
        ),
        ({"target_modules": ("lm_head",), "modules_to_save": ("lm_head",)}, "lora.modules_to_save: lm_head is also in"),
    ],
)
def test_a_name_that_means_nothing_is_refused(fields, message):
    with pytest.raises(UserError, match=f"^{message}"):
        chosen(**fields)
