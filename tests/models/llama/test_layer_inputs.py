"""Checks layers with inputs of their own, and with keys and values of others. This module tests zerojax.models.llama.layer_inputs.

tests/interop/test_pretrained.py compares Gemma 3n and 4 with transformers.
"""

import dataclasses

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax.errors import UserError
from zerojax.models import family as family_lib
from zerojax.models.llama import config_file, family, model

STEP = {"seq_len": 16}
ROUNDING = 1e-5  # float32 sums in another order
PRESETS = {"gemma4_test": 4, "gemma4_moe_test": 2, "gemma3n_test": 4, "llama4_test": 2}  # with numbers of layers


@pytest.mark.parametrize("name, changed", [
    ("gemma4_test", {"zero__stage": 3}),
    ("gemma4_moe_test", {"zero__stage": 3}),
    ("gemma3n_test", {"zero__stage": 3}),
    ("llama4_test", {"zero__stage": 3}),
    *(pytest.param(name, changed, marks=runs.LONG) for name in PRESETS for changed in (
        {"zero__stage": 3, "mesh__model": 2},
        {"zero__stage": 3, "reduce_dtype": "fp32", "model__remat": "full"},
        {"zero__stage": 2, "grad_accum": 2},
        {"zero__stage": 1, "mesh__pipe": 2, "grad_accum": 2},
    )),
    *(pytest.param(name, {"zero__stage": 3, "mesh__context": 2}, marks=runs.LONG) for name in PRESETS if name != "llama4_test"),
    *(
        pytest.param(name, {"zero__stage": 3, "model__by_columns": "layer_inputs/embed"}, marks=runs.LONG)
        for name in ("gemma4_test", "gemma3n_test")
    ),
    *(
        pytest.param(name, {"zero__stage": 3, "mesh__expert": 2, "reduce_dtype": "fp32"}, marks=runs.LONG)
        for name in ("llama4_test", "gemma4_moe_test")
    ),
])  # fmt: skip
def test_losses_and_norms_of_gradients_are_those_of_stage_0(name, changed):
    own = STEP | {"model__preset": name, "model__num_layers": PRESETS[name]}
    plain = runs.trained(**own, zero__stage=0)
    for found, wanted in zip(runs.trained(devices=4, **own | changed), plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_parts_of_rows_are_refused_where_layers_attend_in_chunks():
    with pytest.raises(UserError, match=r"^config.mesh.context: is 2, and attention in chunks needs all tokens"):
        runs.trained(devices=2, **STEP, model__preset="llama4_test", model__num_layers=2, mesh__context=2)


@pytest.mark.parametrize("name", PRESETS)
def test_texts_of_a_row_are_read_as_each_alone(name):
    """Positions that grow, chunks and windows begin with each text."""
    config = dataclasses.replace(family.PRESETS[name], vocab_size=61)
    random = np.random.default_rng(0)
    shapes = family_lib.abstract_params(model.parts, config)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)
    tokens = np.array(arrays.integers(1, (1, 24), 0, 61))
    hidden = jax.jit(lambda *given: model.Llama(config).apply({"params": params}, *given, method="hidden"))
    both = hidden(tokens, None, np.repeat([[1, 2]], [13, 11], axis=1))
    alone = hidden(np.pad(tokens[:, 13:], ((0, 0), (0, 13))), None, np.ones((1, 24), np.int32))
    np.testing.assert_allclose(both[:, 13:], alone[:, :11], rtol=0, atol=ROUNDING * float(abs(alone).max()))


@pytest.mark.parametrize("name", PRESETS)
def test_the_written_config_is_read_back(name):
    config = dataclasses.replace(family.PRESETS[name], vocab_size=61)
    found = config_file.read(config_file.write(config), ())
    assert [found.window_of(i) for i in range(4)] == [config.window_of(i) for i in range(4)]
    assert found.changed(heads={"windows": config.heads.windows}) == config


@pytest.mark.parametrize("name, field, value", [
    ("gemma4_test", "num_kv_shared_layers", 4), ("gemma4_test", "num_kv_shared_layers", 3),
    ("gemma4_test", "use_bidirectional_attention", "all"),
    ("gemma4_test", "per_layer_config", {"1": {"head_dim": 32}}), ("gemma4_test", "vocab_size_per_layer_input", 60),
    ("gemma3n_test", "altup_active_idx", 2), ("gemma3n_test", "intermediate_size", [128]),
    ("gemma3n_test", "activation_sparsity_pattern", [1.0] * 4), ("gemma3n_test", "laurel_rank", 0),
    ("llama4_test", "moe_layers", [2]), ("llama4_test", "layer_types", ["chunked_attention"]),
    ("llama4_test", "attention_chunk_size", 0),
])  # fmt: skip
def test_a_config_that_is_not_computed_is_refused_in_one_line(name, field, value):
    config = dataclasses.replace(family.PRESETS[name], vocab_size=61)
    with pytest.raises(UserError, match=rf"^config.json: {field}: must be .*choose a folder") as caught:
        config_file.read(config_file.write(config) | {field: value}, ())
    assert "\n" not in str(caught.value)
