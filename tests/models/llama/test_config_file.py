"""Checks that configs are read as they are written. This module tests zerojax.models.llama.config_file."""

import dataclasses

import pytest

from zerojax.errors import UserError
from zerojax.models.llama import family as llama
from zerojax.models.llama import gpt2, published
from zerojax.models.llama.model_types import ROWS

SHAPES = published.PRESETS | gpt2.PRESETS | {"qwen2_14b": llama.PRESETS["qwen2_14b"]}


def cut(shape):
    """Returns a shape with few layers, unless those have sizes or mixtures of their own."""
    is_one = not shape.sizes and (shape.mixture is None or max(shape.mixture.dense_layers, default=0) < 8)
    return dataclasses.replace(shape, num_layers=8) if is_one or shape.branches else shape


@pytest.mark.parametrize("name", SHAPES)
def test_the_written_config_of_every_row_is_read_back(name):
    table = (gpt2 if name in gpt2.PRESETS else llama).FAMILY.huggingface
    shape = cut(SHAPES[name])
    found, layers = table.read(table.write(shape), ()), range(shape.num_layers)
    assert [found.window_of(i) for i in layers] == [shape.window_of(i) for i in layers]
    assert [found.chunk_of(i) for i in layers] == [shape.chunk_of(i) for i in layers]
    assert [found.rope_of(i) for i in layers] == [shape.rope_of(i) for i in layers]
    same = found.changed(heads={"windows": shape.heads.windows}, rotation={"layers": shape.rotation.layers})
    for part, field in (("scales", "embed"), ("heads", "scale"), ("scales", "logits")):
        ours = getattr(getattr(shape, part), field)
        assert getattr(getattr(found, part), field) == pytest.approx(ours, rel=1e-9)
        same = same.changed(**{part: {field: ours}})
    assert [found.is_recurrent(i) for i in range(8)] == [shape.is_recurrent(i) for i in range(8)]
    if found.recurrent is not None:
        assert shape.recurrent is not None
        same = same.changed(recurrent={"pattern": shape.recurrent.pattern})
    assert same == shape


def test_fields_that_a_config_lacks_have_the_defaults_of_its_class():
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7}
    sizes |= {"num_attention_heads": 4, "head_dim": 8}
    found = {
        kind: llama.FAMILY.huggingface.read(sizes | {"model_type": kind}, ())
        for kind in ROWS
        if "num_key_value_heads" not in ROWS[kind].defaults or ROWS[kind].defaults["num_key_value_heads"] == 4
    }
    assert found["gemma2"].heads.windows == (4096, 0) * 3 + (4096,)
    assert found["gemma3_text"].heads.windows == (4096,) * 5 + (0, 4096) and found["gemma3_text"].rotation.theta == 1e6
    assert found["smollm3"].rotation.layers == (True, True, True, False) * 1 + (True, True, True)
    assert found["olmo2"].num_kv_heads == 4 and found["smollm3"].tie_embeddings
    assert (found["gemma2"].heads.cap, found["gemma3_text"].heads.cap) == (50.0, 0.0)


def test_names_that_only_one_class_has_are_read_and_told():
    table, shape = llama.FAMILY.huggingface, dataclasses.replace(published.PRESETS["internlm3_8b"], num_layers=2)
    raw = table.write(shape) | {"qkv_bias": True, "bias": True}
    assert table.read(raw, ()) == shape.changed(heads={"qkv_bias": True, "o_bias": True}, mlp={"has_biases": True})
    with pytest.raises(UserError, match=r"^config.json: bias: must be true, as attention's biases are, and is False;"):
        table.read(raw | {"bias": False}, ())


def test_layers_of_exaone_without_a_window_are_not_rotated_where_others_could_have_one():
    table, shape = llama.FAMILY.huggingface, dataclasses.replace(published.PRESETS["exaone4_32b"], num_layers=2)
    raw = table.write(shape) | {"layer_types": ["full_attention"] * 2}
    assert not any(table.read(raw, ()).rope_of(layer) for layer in range(2))
    found = table.read(raw | {"sliding_window": None}, ())
    assert all(found.rope_of(layer) for layer in range(2)) and table.write(found)["sliding_window"] is None


@pytest.mark.parametrize("name", published.PRESETS)
def test_fields_that_a_class_does_not_read_change_nothing(name):
    table, shape = llama.FAMILY.huggingface, cut(published.PRESETS[name])
    raw = table.write(shape)
    others = {"mlp_only_layers": [0], "decoder_sparse_step": 2, "query_pre_attn_scalar": 7, "attention_multiplier": 2.0}
    others |= {
        "residual_multiplier": 2.0,
        "no_rope_layers": [0] * shape.num_layers,
        "swiglu_limit": 3.0,
        "shared_expert_intermediate_size": 5,
        "rope_interleave": False,
    }
    reads = {*ROWS[shape.model_type].reads}
    reads |= {"mlp_only_layers", "decoder_sparse_step"} if "moe_intermediate_size" in reads else set()
    reads |= {"residual_multiplier"} if "attention_multiplier" in reads else set()
    odd = {field: value for field, value in others.items() if field not in reads}
    assert len(odd) >= 5 and table.read(raw | odd, ()) == table.read({k: v for k, v in raw.items() if k not in odd}, ())


@pytest.mark.parametrize("qkv_bias, o_bias", [(True, False), (False, True)])
def test_biases_of_outputs_alone_are_written_as_theirs(qkv_bias, o_bias):
    shape = published.PRESETS["seed_oss_36b"].changed(heads={"qkv_bias": qkv_bias, "o_bias": o_bias})
    assert llama.FAMILY.huggingface.read(llama.FAMILY.huggingface.write(shape), ()) == shape


def test_windows_of_olmo3_have_the_base_of_its_class():
    shape = published.PRESETS["olmo3_7b"]
    table = llama.FAMILY.huggingface
    written = {name: value for name, value in table.write(shape).items() if name != "rope_parameters"}
    found = table.read(written | {"rope_theta": 1e4, "rope_local_base_freq": 300.0}, ())
    assert found.rotation.theta == 1e4 and found.rope_of(0).theta == 5e5
