"""Checks what config.json says of hybrids. This module tests zerojax.models.llama.hybrid_fields.

tests/interop/test_pretrained.py compares hybrids with transformers.
"""

import dataclasses

import pytest

from zerojax.errors import UserError
from zerojax.models.llama import config_file, family, published

ALL = {**family.PRESETS, **published.NEMOTRON}
ALL["nemotron_test"] = dataclasses.replace(ALL["nemotron_test"], vocab_size=61)


@pytest.mark.parametrize(
    "name",
    [
        "nemotron_test",
        "nemotron_nano_9b_v2",
        "nemotron3_nano_30b_a3b",
        "qwen3_5_9b",
        "qwen3_5_35b_a3b",
        "granite4_h_tiny",
        "lfm2_1.2b",
    ],
)
def test_the_written_config_is_read_back(name):
    assert config_file.read(config_file.write(ALL[name]), ()) == ALL[name]


@pytest.mark.parametrize("preset, field, value", [
    ("qwen3_5_9b", "layer_types", ["sliding_attention"] * 32), ("qwen3_5_9b", "linear_num_value_heads", 24),
    ("granite4_h_tiny", "mamba_n_heads", 32), ("granite4_h_tiny", "mamba_n_groups", 5),
    ("granite4_h_tiny", "layer_types", ["conv"] * 40), ("granite4_h_tiny", "time_step_limit", [0.2, 0.1]),
    ("nemotron3_nano_30b_a3b", "layers_block_type", ["mamba", "sliding_attention"]),
    ("nemotron3_nano_30b_a3b", "n_groups", 3), ("nemotron3_nano_30b_a3b", "tie_word_embeddings", True),
    ("nemotron3_nano_30b_a3b", "time_step_min", -1), ("lfm2_1.2b", "layer_types", ["conv"]),
    ("lfm2_1.2b", "conv_L_cache", 0), ("lfm2_1.2b", "conv_bias", "yes"),
])  # fmt: skip
def test_a_config_that_is_not_computed_is_refused_in_one_line(preset, field, value):
    with pytest.raises(UserError, match=rf"^config.json: {field}: must be .*choose a folder") as caught:
        config_file.read(config_file.write(ALL[preset]) | {field: value}, ())
    assert "\n" not in str(caught.value)


def test_names_and_numbers_of_older_files_are_read():
    """Each line of transformers' classes for them; the width of LFM2's MLP is that of its released 1.2B."""
    nemotron = ALL["nemotron_test"]
    written = config_file.write(nemotron)
    del written["layers_block_type"]
    old = {
        "hybrid_override_pattern": "ME*-",
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "num_hidden_layers": 9,
        "n_groups": 8,
    }
    assert config_file.read(written | old, ()) == nemotron
    written = config_file.write(ALL["lfm2_1.2b"])
    del written["layer_types"]
    old = {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True}
    assert config_file.read(written | old, ()) == ALL["lfm2_1.2b"]
    granite = ALL["granite4_h_tiny"]
    kinds = ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]
    assert config_file.read(config_file.write(granite) | {"layer_types": kinds, "mamba_d_head": "auto"}, ()) == granite


def test_experts_in_one_tensor_are_read_as_they_are():
    """As in the released files of Qwen3.5; transformers writes one of each expert."""
    own = ALL["qwen3_5_35b_a3b"]
    assert own.mixture is not None
    fused = config_file.read(config_file.write(own), ["model.layers.0.mlp.experts.gate_up_proj"])
    assert fused == dataclasses.replace(own, mixture=dataclasses.replace(own.mixture, is_fused=True))
    names = {tensor.name for tensor in family.FAMILY.huggingface.tensors(fused).values()}
    assert "model.layers.{}.mlp.experts.gate_up_proj" in names
