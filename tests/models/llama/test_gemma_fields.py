"""Checks what config.json says of Gemma 3n and 4. This module tests zerojax.models.llama.gemma_fields.

tests/interop/test_pretrained.py compares them with transformers.
"""

import dataclasses

import pytest

from zerojax.errors import UserError
from zerojax.models.llama import config_file, family

NAMES = ("gemma3n_test", "gemma4_test", "gemma4_moe_test")
ALL = {name: dataclasses.replace(family.PRESETS[name], vocab_size=257) for name in NAMES}


@pytest.mark.parametrize("name", ALL)
def test_the_written_config_is_read_back(name):
    found, own = config_file.read(config_file.write(ALL[name]), ()), ALL[name]
    assert dataclasses.replace(found, heads=own.heads) == own
    assert [*map(found.window_of, range(own.num_layers))] == [*map(own.window_of, range(own.num_layers))]
    assert dataclasses.replace(found.heads, windows=own.heads.windows) == own.heads


def test_numbers_of_layers_may_be_padded():
    written = config_file.write(ALL["gemma4_test"])
    padded = {f"{int(layer):02}": own for layer, own in written["per_layer_config"].items()}
    assert padded and config_file.read(written | {"per_layer_config": padded}, ()).sizes == ALL["gemma4_test"].sizes


@pytest.mark.parametrize("preset, field, value", [
    ("gemma3n_test", "num_kv_shared_layers", 99), ("gemma3n_test", "num_kv_shared_layers", True),
    ("gemma3n_test", "altup_active_idx", 9), ("gemma3n_test", "activation_sparsity_pattern", [0.5]),
    ("gemma3n_test", "intermediate_size", [64, -1]), ("gemma4_moe_test", "enable_moe_block", 1),
    ("gemma4_test", "per_layer_config", {"4": {}}), ("gemma4_test", "per_layer_config", {"one": {}}),
    ("gemma4_moe_test", "num_experts", None), ("gemma4_moe_test", "top_k_experts", 5), ("gemma4_moe_test", "moe_intermediate_size", 0),
    ("gemma4_test", "use_bidirectional_attention", "all"), ("gemma4_test", "vocab_size_per_layer_input", 3),
])  # fmt: skip
def test_a_config_that_is_not_computed_is_refused_in_one_line(preset, field, value):
    with pytest.raises(UserError, match=rf"^config.json: {field}: must be .*choose a folder") as caught:
        config_file.read(config_file.write(ALL[preset]) | {field: value}, ())
    assert "\n" not in str(caught.value)
