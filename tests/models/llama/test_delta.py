"""Checks hybrids of attention and recurrent layers. This module tests zerojax.models.llama.delta.

tests/interop/test_pretrained.py compares them with transformers, and tests/ops/test_recurrence.py the recurrence with its equations.
"""

import dataclasses
import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import texts_of_rows

from zerojax.errors import UserError
from zerojax.models import decoding
from zerojax.models import family as family_lib
from zerojax.models.llama import family, model

ROUNDING = 1e-5  # float32 sums in another order
PRESETS = {"hybrid_test": family.FAMILY, "nemotron_test": family.NEMOTRON, "lfm2_test": family.FAMILY}
STEP = {"model__preset": "hybrid_test", "model__num_layers": 2, "seq_len": 16}


@functools.cache
def config_of(name):
    """Returns a config without experts: the rows of a mixture are sums in another order."""
    return dataclasses.replace(PRESETS[name].presets[name], vocab_size=61, mixture=None)


@functools.cache
def make_params(name):
    random = np.random.default_rng(0)
    shapes = family_lib.abstract_params(model.parts, config_of(name))
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)


@functools.cache
def gradients(name):
    return jax.jit(jax.value_and_grad(lambda params, batch: model.loss(config_of(name), params, batch)))


@pytest.mark.parametrize("name", PRESETS)
def test_texts_of_a_row_are_learned_as_each_alone(name):
    texts_of_rows.assert_learned_as_each_alone(gradients(name), make_params(name), 61)


@pytest.mark.parametrize("name", PRESETS)
def test_a_state_is_that_of_the_text_whatever_pads_it_and_in_whatever_parts_it_is_read(name):
    """A prompt of 5 tokens, read at once with padding, and by 3 tokens and 2; then a token, which a row without one leaves alone."""
    config, params = config_of(name), make_params(name)
    tokens = np.array(arrays.integers(2, (2, 6), 0, 61))
    start = jax.jit(lambda tokens, lengths: model.start(config, params, {}, tokens, lengths, 8))
    extend = jax.jit(lambda caches, step, tokens: model.extend(config, params, caches, step, tokens))
    steps = functools.partial(decoding.row_step, slots=8)
    scores, held = start(np.pad(tokens[:, :5], ((0, 0), (0, 2)), constant_values=9), np.full(2, 5))
    _, part = start(tokens[:, :3], np.full(2, 3))
    counts = jnp.full(2, 2)
    other, part = extend(part, steps(jnp.full(2, 3), counts, 3), np.pad(tokens[:, 3:5], ((0, 0), (0, 1))))
    np.testing.assert_allclose(scores, other, rtol=0, atol=ROUNDING)
    (*state, inputs), (keys, _) = held[0], held[1 if name != "nemotron_test" else 2]
    assert inputs.shape[1] < 4 and all(one.dtype == jnp.float32 for one in state) and keys.shape[1] == 8
    for one, same in zip(held[0], part[0]):
        np.testing.assert_allclose(one, same, rtol=0, atol=ROUNDING)
    scores, after = extend(held, steps(jnp.full(2, 5), jnp.array([1, 0]), 1), tokens[:, 5])
    whole = jax.jit(lambda tokens: model.logits(config, params, {}, tokens))(tokens)
    np.testing.assert_allclose(scores[0], whole[0, 5], rtol=0, atol=ROUNDING)
    for one, before in zip(after[0], held[0]):
        np.testing.assert_array_equal(one[1], before[1])
        assert (np.asarray(one[0]) != np.asarray(before[0])).any()


@pytest.mark.parametrize("field, value", [
    ("layer_types", ["full_attention"]), ("layer_types", ["sliding_attention"] * 48), ("linear_num_value_heads", 24),
    ("full_attention_interval", 0), ("partial_rotary_factor", 1.5),
])  # fmt: skip
def test_a_config_that_is_not_computed_is_refused_in_one_line(field, value):
    table = family.FAMILY.huggingface
    written = table.write(family.PRESETS["qwen3_next_80b_a3b"]) | {field: value}
    if field == "full_attention_interval":
        del written["layer_types"]
    with pytest.raises(UserError, match=rf"^config.json: {field}: must be .*choose a folder") as caught:
        table.read(written, ())
    assert "\n" not in str(caught.value)


def test_layers_that_no_config_names_are_recurrent_but_for_every_fourth():
    shape = family.PRESETS["qwen3_next_80b_a3b"]
    written = family.FAMILY.huggingface.write(shape)
    del written["layer_types"]
    assert family.FAMILY.huggingface.read(written, ()) == shape


NEMOTRON = {"model__preset": "nemotron_test", "model__num_layers": 4}


@pytest.mark.parametrize("changed", [
    {"zero__stage": 3},
    {"zero__stage": 3} | NEMOTRON,
    pytest.param({"zero__stage": 3, "model__preset": "lfm2_test"}, marks=runs.LONG),
    pytest.param({"zero__stage": 3, "mesh__model": 2} | NEMOTRON, marks=runs.LONG),
    pytest.param({"zero__stage": 3, "mesh__expert": 2, "reduce_dtype": "fp32"} | NEMOTRON, marks=runs.LONG),
    pytest.param({"zero__stage": 1, "mesh__pipe": 2, "grad_accum": 2} | NEMOTRON, marks=runs.LONG),
    pytest.param({"zero__stage": 2, "grad_accum": 2}, marks=runs.LONG),
    pytest.param({"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"}, marks=runs.LONG),
    pytest.param({"zero__stage": 1, "mesh__pipe": 2, "grad_accum": 2}, marks=runs.LONG),
    pytest.param({"zero__stage": 3, "mesh__model": 2}, marks=runs.LONG),
    pytest.param({"zero__stage": 3, "mesh__expert": 2, "reduce_dtype": "fp32"}, marks=runs.LONG),
])  # fmt: skip
def test_losses_and_norms_of_gradients_are_those_of_stage_0(changed):
    own = STEP | {name: value for name, value in changed.items() if name.startswith("model__")}
    plain = runs.trained(**own, zero__stage=0)
    for found, wanted in zip(runs.trained(devices=4, **own | changed), plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
