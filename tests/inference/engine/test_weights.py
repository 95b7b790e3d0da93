"""Checks the weights that an engine reads. This module tests zerojax.inference.engine.weights."""

import jax
import jax.numpy as jnp
import pytest
from small_engine import CONFIG, DECODER, LENGTH, NEW, engine, model

from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import weights
from zerojax.ops import quantized


@pytest.mark.parametrize(
    "kind", ["int8", pytest.param("fp8", marks=pytest.mark.long), pytest.param("nf4", marks=pytest.mark.long)]
)
def test_a_format_gives_the_tokens_of_its_dequantized_weights(kind):
    plain = model()
    coded = engine_lib.Engine(plain, format=kind, slots=3, max_len=LENGTH, chunk=16)
    kernel = coded._params["layer_0"]["mlp"]["up"]["kernel"]
    assert quantized.is_quantized(kernel) and quantized.is_quantized(coded._params["head"]["kernel"]) == (61 % 2 == 0)

    def back(node):
        return quantized.dequantize(node, jnp.float32) if quantized.is_quantized(node) else node

    params = jax.tree.map(back, coded._params, is_leaf=quantized.is_quantized)
    prompts = [[9, 11, 40], [33, 8, 50, 21]]
    plain_engine = engine()
    kept, plain_engine._params = plain_engine._params, params
    try:
        wanted = plain_engine.generate(prompts, max_tokens=NEW)
    finally:
        plain_engine._params = kept
    found = coded.generate(prompts, max_tokens=NEW)
    assert [request.tokens for request in found] == [request.tokens for request in wanted]


def test_weights_that_are_where_decoding_wants_them_are_not_copied():
    made = model()
    placed = weights.placed(DECODER, CONFIG, made.params, made.partition.mesh, None, "none")
    for leaf, other in zip(jax.tree.leaves(placed), jax.tree.leaves(made.params)):
        assert leaf.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
