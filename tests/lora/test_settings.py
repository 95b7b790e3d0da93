"""Checks names and values of settings. This module tests zerojax.lora.settings."""

import math

import pytest

from zerojax.errors import UserError
from zerojax.lora import settings
from zerojax.lora.settings import Lora


@pytest.mark.parametrize(
    ("wanted", "name", "is_meant"),
    [
        (("q_proj",), "model.layers.0.self_attn.q_proj", True),
        (("self_attn.q_proj",), "model.layers.0.self_attn.q_proj", True),
        (("proj",), "model.layers.0.self_attn.q_proj", False),
        (("q",), "decoder.block.0.layer.1.EncDecAttention.q", True),
        (r".*\.[01]\..*q_proj", "model.layers.1.self_attn.q_proj", True),
        (r"layers\.1", "model.layers.1.self_attn.q_proj", False),
        ("", "q_proj", False),
    ],
)
def test_a_name_is_meant_by_its_end_or_by_a_regex_that_matches_it_all(wanted, name, is_meant):
    assert settings.matches(wanted, name) == is_meant


def test_patterns_change_the_rank_and_the_scale_of_the_names_that_they_end():
    lora = Lora(r=8, alpha=16, rank_pattern={"v_proj": 4}, alpha_pattern={r"layers\.1\.v_proj": 2.0})
    assert [lora.rank_of(name) for name in ("a.q_proj", "a.v_proj", "v_proj")] == [8, 4, 4]
    assert [lora.scale_of(name) for name in ("q_proj", "layers.0.v_proj", "a.layers.1.v_proj")] == [2.0, 4.0, 0.5]
    assert Lora(r=4, alpha=16, rslora=True).scale_of("q") == 16 / math.sqrt(4)


def test_the_shortest_ends_mean_the_names_and_no_other():
    names = ["0.attn.q", "1.attn.q"]
    assert settings.shortest_ends(names, ["0.attn.k"]) == ("q",)
    assert settings.shortest_ends(names, ["2.attn.q"]) == tuple(names)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("r", 2**31, "lora.r: must be a whole number from 1 to 65536"),
        ("r", 0, "lora.r: must be a whole number from 1 to 65536, and is 0"),
        ("r", True, "lora.r: must be a whole number"),
        ("alpha", float("nan"), "lora.alpha: must be a number above 0, and is nan"),
        ("alpha", 10**400, "lora.alpha: must be a number above 0, and is 1000000"),
        ("alpha_pattern", {"q_proj": 10**309}, "lora.alpha: must be a number above 0"),
        ("rslora", "False", "lora.rslora: must be True or False, and is 'False'"),
        ("rslora", None, "lora.rslora: must be True or False, and is None"),
        ("dropout", 1.0, "lora.dropout: must be at least 0 and below 1"),
        ("rank_pattern", 3, "lora.rank_pattern: must be a number for each regex, such as .*, and is 3"),
        ("alpha_pattern", ["q_proj"], "lora.alpha_pattern: must be a number for each regex"),
        ("target_modules", "q_proj(", r"lora.target_modules: 'q_proj\(' is not a regex"),
        ("target_modules", 3, "lora.target_modules: must be names of modules"),
        ("modules_to_save", "lm_head", "lora.modules_to_save: must be names of modules"),
        (
            "quantize",
            "nf3",
            "lora.quantize: must be one of none, int8, nf4, mxfp4, fp8_block, and is 'nf3'; did you mean 'nf4'",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(field, value, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Lora(**{field: value})
