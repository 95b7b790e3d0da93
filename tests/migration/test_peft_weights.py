"""Checks the names of a model that PEFT wraps. This module tests zerojax.migration.peft_weights."""

import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.migration import peft_weights

PREFIX = "base_model.model."
ADAPTER = {  # name in the model -> name in PEFT's folder
    "a.q_proj.lora_A.default.weight": "a.q_proj.lora_A.weight",
    "a.q_proj.lora_B.default.weight": "a.q_proj.lora_B.weight",
    "a.q_proj.lora_magnitude_vector.default.weight": "a.q_proj.lora_magnitude_vector",
    "embed.lora_embedding_A.default": "embed.lora_embedding_A",
    "norm.modules_to_save.default.weight": "norm.weight",
    "experts.base_layer.lora_A.default.weight": "experts.base_layer.lora_A.weight",
}
MODEL = {  # name in the model -> name in the model's folder
    "a.q_proj.base_layer.weight": "a.q_proj.weight",
    "norm.original_module.weight": "norm.weight",
    "a.k_proj.weight": "a.k_proj.weight",
    "experts.base_layer.base_layer.down_proj": "experts.down_proj",
}


def test_names_are_those_of_pefts_folder_and_of_the_models():
    found = peft_weights.divide(dict.fromkeys((PREFIX + name for name in (*ADAPTER, *MODEL)), np.zeros(1)))
    assert found.adapter == {PREFIX + theirs: PREFIX + own for own, theirs in ADAPTER.items()}
    assert found.model == {theirs: PREFIX + own for own, theirs in MODEL.items()}


def test_other_models_are_not_divided():
    assert peft_weights.divide({"a.q_proj.weight": np.zeros(1), "a.lora_A.default.weight": np.zeros(1)}) is None


def test_several_adapters_are_refused_by_name():
    names = [f"{PREFIX}q.lora_A.{adapter}.weight" for adapter in ("default", "other")]
    with pytest.raises(UserError, match=r"holds 2 adapters \(default, other\)"):
        peft_weights.divide(dict.fromkeys(names, np.zeros(1)))
