"""Trains with a tile of tokens at a time, and compares with all tokens at once. This module tests `config.model.tile_tokens`."""

import re

import compile_only
import jax
import numpy as np
import pytest
import runs

from zerojax import configs
from zerojax.errors import UserError
from zerojax.trainer import config as config_lib
from zerojax.trainer import plans, program, setting_names

SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order
EIGHT_BITS = 0.02  # relative: each tile has a scale of its own in 8 bits
LORA = {"lora__r": 4, "lora__target_modules": "all-linear"}
DOTS = {"model__remat": "dots"}
HOST = {"offload__optimizer": "host"}

# name -> (devices, settings)
CASES = {
    "updates beside the backward pass": (1, {**HOST, "offload__late_norm": True, "zero__stage": 2}),
    "params on the host": (2, {**HOST, "offload__params": "host"}),
    "stage 0, passes": (1, {"zero__stage": 0, "grad_accum": 2}),
    "full remat": (2, {"model__remat": "full", "zero__stage": 2}),
    "no remat": (1, {"model__remat": "none"}),
    "recomputed": (1, {**DOTS, "model__recompute": r"layer_\d+/(attention/q|mlp/up)"}),
    "activations on the host": (2, {**DOTS, "model__offload": r"layer_\d+/attention"}),
    "by columns": (2, {"model__by_columns": "embed|head"}),
    "adapters with dropout": (2, {**LORA, "lora__dropout": 0.1}),
    "nf4 with adapters": (1, {**LORA, "lora__quantize": "nf4"}),
    "8 bits": (1, {"precision": "fp8"}),
    "8 bits, gathered": (2, {"precision": "fp8"}),
    "8 bits, rowwise": (1, {"precision": "fp8", "fp8__recipe": "rowwise"}),
}


@pytest.mark.long  # a default case of each of the axes `model` and `context` runs in tiles
@pytest.mark.parametrize("name", CASES)
def test_losses_and_norms_are_those_of_all_tokens_at_once(name):
    devices, settings = CASES[name]
    expected = runs.trained(devices, **settings)
    allowed = EIGHT_BITS if settings.get("precision") == "fp8" else SUM_ORDER
    np.testing.assert_allclose(runs.trained(devices, **settings, model__tile_tokens=10), expected, rtol=allowed)


def test_what_does_not_go_with_tiles_is_refused_before_anything_is_compiled():
    for settings, message in (
        ({"model__preset": "t5_test"}, r"config.model.tile_tokens: is 10, and .* only decoders run in tiles"),
        ({**DOTS, "model__offload": r"layer_\d+/mlp/up"}, r"config.model.offload: layer_0/mlp/up runs in tiles"),
        (
            {"precision": "fp8", "fp8__recipe": "delayed"},
            r"config.fp8.recipe: 'delayed' remembers one magnitude of a matmul",
        ),
    ):
        with pytest.raises(UserError, match=message), setting_names.of_config():
            built = program.build(
                runs.config(**settings, model__tile_tokens=10), tokenizer_vocab=320, devices=jax.devices()[:1]
            )
            built.train_step.lower(built.partition.abstract_state, built.abstract_batch)


@pytest.mark.long
def test_on_an_h200_no_array_has_all_tokens_and_the_width_of_the_mlp_and_the_peak_falls():
    """The plan of a step without tiles says so, and what they would save."""
    tokens = 65536
    settings = {
        "model__preset": "llama3_8b_1m",
        "model__num_layers": 2,
        "model__vocab_size": 4096,
        "precision": "bf16",
        "model__remat": "full",
    }
    plans_of = {}
    for tile in (0, 8192):
        config = runs.config(**settings, seq_len=tokens, global_batch_size=1, model__tile_tokens=tile)
        built = program.build(config, tokenizer_vocab=320, devices=compile_only.gpus(topology="1x1"))
        with compile_only.optimized():
            plans_of[tile] = plans.plan_program(built, "h200", compiler_options=compile_only.FAST)
    without, tiled = plans_of[0], plans_of[8192]
    wide = re.compile(rf"\[(?:\d+,)*{tokens},14336\]")
    assert wide.search(without.buffers.hlo_text)
    assert not wide.search(tiled.buffers.hlo_text)
    (finding,) = without.findings
    assert not tiled.findings
    assert without.peak - tiled.peak > 0.8 * finding.nbytes > 0.2 * without.peak


@pytest.mark.long
def test_8b_at_262144_tokens_fits_an_h200():
    config = config_lib.from_dict(configs.get("llama3_8b_262k_h200"))
    built = program.build(config, tokenizer_vocab=320, devices=compile_only.gpus(topology="1x1"))
    with compile_only.optimized():
        plan = plans.plan_program(built, "h200", compiler_options=compile_only.FAST)
    scratch = 12 << 30  # of cuDNN's backward pass, at most: three arrays of all tokens in float32
    assert plan.peak + scratch < plan.usable
    assert plan.buffers.host == 32 * config.seq_len * built.model.embed_dim * 2
    assert not plan.findings
