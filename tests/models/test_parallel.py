"""Checks the families' tables against their weights and modules. This module tests zerojax.models.parallel."""

import dataclasses
import re

import pytest

from zerojax import tree
from zerojax.models import families, family
from zerojax.models.llama import mla

GPT_OSS = {"heads": {"has_sinks": True}, "mixture": {"clamp": (7.0, 1.702)}}
DEEPSEEK = {
    "heads": {"latent": mla.Latent(rank=8, query_rank=12, plain_dim=8, rotary_dim=8, value_dim=16)},
    "mixture": {"has_choice_bias": True, "is_shared_gated": False},
}
# name -> a preset of another name, and what is changed beside the fields of `paths_and_shapes`
# Weights of a family without a table are replicated.
KINDS = {name: ("", {}) for name, own in families.PRESETS.items() if name.endswith("test") and own.parallel.weights} | {
    "gpt_oss": ("moe_test", GPT_OSS),
    "deepseek_v3": ("moe_test", DEEPSEEK),
    "qwen3_5": ("hybrid_test", {"recurrent": {"is_fused": False}}),
}


def paths_and_shapes(name):
    """Returns a family, and the paths and shapes of a model of it that has all weights."""
    preset, changed = KINDS[name]
    own = families.PRESETS[preset or name]
    config = dataclasses.replace(own.presets[preset or name], vocab_size=320, tie_embeddings=False)
    if hasattr(config, "heads"):
        config = config.changed(heads={"qkv_bias": True, "o_bias": True, "norm": "each"}, mlp={"has_biases": True})
        config = config.changed(**changed)
    leaves = tree.flatten({"params": family.abstract_params(own.parts, config)})
    return own, {tree.below_params(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("name", KINDS)
def test_every_matrix_has_one_row_and_every_vector_of_a_norm_and_every_router_none(name):
    own, shapes = paths_and_shapes(name)
    for path, shape in shapes.items():
        found = [entries for pattern, entries in own.parallel.weights if re.search(pattern, path)]
        is_small = ("norm" in path and not re.search("/(mamba|mixer)/norm", path)) or path.endswith(
            (
                "o/bias",
                "down/bias",
                "out/bias",
                "experts/router",
                "experts/scales",
                "router_bias",
                "choice_bias",
                "shared_gate/kernel",
            )
        )
        assert len(found) == (0 if is_small else 1), path
        assert all(len(entries) <= len(shape) for entries in found), path
        scales = [entries for pattern, entries in own.parallel.weights if re.search(pattern, f"{path}/scales")]
        assert not path.endswith("/kernel") or all(len(entries) <= 2 for entries in scales), path


@pytest.mark.parametrize("name", KINDS)
def test_every_module_of_a_block_has_a_row_of_activations(name):
    """So the compiler is never left to choose between a weight's gather and that of tokens."""
    own, paths = paths_and_shapes(name)
    modules = {"/".join(path.split("/")[:end]) for path in paths for end in range(2, path.count("/") + 1)}
    modules |= {path.rpartition("/")[0] for path in paths if path.startswith(("embed", "norm"))}
    inside = (r".*/(o|down|delta/out|out_proj)",)  # their results leave the module around them
    for module in modules:
        found = [pattern for pattern, *_ in own.parallel.activations if re.fullmatch(pattern, module)]
        assert len(found) == (0 if any(re.fullmatch(pattern, module) for pattern in inside) else 1), module
