"""Checks the layers of one row by kernels against the model's own. This module tests zerojax.models.llama.one_row."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine

from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import weights
from zerojax.models import decoding, family
from zerojax.models.llama import one_row
from zerojax.models.llama.model import LlamaConfig
from zerojax.ops import quantized
from zerojax.zero import stages

SLOTS, POSITION = 24, 17
CONFIG = LlamaConfig(64, 1, embed_dim=128, num_heads=2, num_kv_heads=1, head_dim=64, mlp_dim=128)


@functools.cache
def params(dtype, config=CONFIG, kind="none"):
    """Returns weights; in a format all kernels are quantized."""
    random = np.random.default_rng(0)
    shapes = family.abstract_params(small_engine.DECODER.parts, config)
    made = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.1, leaf.shape), dtype), shapes)
    if kind == "none":
        return made
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: quantized.quantize(leaf, kind) if path[-1].key == "kernel" else leaf, made
    )


@pytest.mark.parametrize(
    "dtype, implementation, layers, atol",
    [
        ("float32", "jnp", 2, 1e-5),
        ("float32", "interpret", 1, 1e-5),
        pytest.param("bfloat16", "jnp", 2, 0.02, marks=pytest.mark.long),
    ],
)
def test_scores_and_cache_are_those_of_the_models_own_layers(dtype, implementation, layers, atol):
    config = dataclasses.replace(CONFIG, num_layers=layers)
    own, random = params(dtype, config), np.random.default_rng(1)
    shape = (1, SLOTS, config.num_kv_heads, config.head_dim)
    caches = [tuple(jnp.asarray(random.normal(size=shape), dtype) for _ in range(2)) for _ in range(layers)]
    at, one = jnp.asarray([POSITION], jnp.int32), jnp.asarray([1], jnp.int32)
    step, token = decoding.row_step(at, one, 1, SLOTS, is_read_by_kernel=False), jnp.asarray([5])
    wanted = jax.jit(functools.partial(small_engine.DECODER.extend, config))(own, caches, step, token)
    found = jax.jit(functools.partial(one_row.extend, config, implementation=implementation))(own, caches, step, token)
    assert float(jnp.std(wanted[0])) > 0.1
    for theirs, ours in zip(*(jax.tree.leaves(x) for x in (wanted, found)), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=atol)


REFUSED = {
    "biases": {"qkv_bias": True},
    "normed queries": {"qk_norm": True},
    "a window": {"windows": (8,)},
    "layers that are not rotated": {"rotated": (False,)},
    "dims that are not rotated": {"rotary_dim": 32},
    "a mixture": {"num_experts": 4},
    "an offset of norms": {"norm_offset": 1.0},
    "norms after": {"norm_places": "after"},
    "gelu": {"activation": "gelu_new"},
    "heads of 16": {"head_dim": 16},
    "angles that depend on the length": {"rope_scaling": "dynamic"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_models_keep_their_own_layers(what):
    changes = dict(REFUSED[what])
    if changes.get("rope_scaling"):
        changes["rope_scaling"] = types.SimpleNamespace(reads_length=True)
    assert not one_row.takes(dataclasses.replace(CONFIG, **changes), params("bfloat16"), 1)


def test_one_row_in_bf16_int8_or_fp8_is_taken():
    taken = {kind: one_row.takes(CONFIG, params("bfloat16", kind=kind), 1) for kind in weights.FORMATS}
    assert taken == {"none": True, "int8": True, "fp8": True, "nf4": False}
    assert not one_row.takes(CONFIG, params("bfloat16"), 2) and not one_row.takes(CONFIG, params("float32"), 1)
    own = params("bfloat16")
    mixed = {**own, "head": {"kernel": quantized.quantize(own["head"]["kernel"], "int8")}}
    assert not one_row.takes(CONFIG, mixed, 1)


def test_an_engine_of_one_slot_answers_by_them_with_the_tokens_of_one_of_two(monkeypatch):
    own = params("bfloat16")
    mesh = small_engine.model().partition.mesh
    model = types.SimpleNamespace(
        family=small_engine.DECODER,
        config=CONFIG,
        special=family.SpecialTokens(),
        partition=stages.partition_state({"params": jax.eval_shape(lambda: own)}, mesh=mesh, stage=0),
        params=own,
    )
    calls, extend = [], one_row.extend

    def counted(*given, **how):
        calls.append(1)
        return extend(*given, **how)

    monkeypatch.setattr(one_row, "extend", counted)
    found = {}
    for slots, kernels in ((2, None), (1, "jnp")):
        monkeypatch.setattr(weights, "kernels_of", lambda mesh, kernels=kernels: kernels)
        made = engine_lib.Engine(model, slots=slots, max_len=32, chunk=16)
        asked = [made.submit(prompt, max_tokens=8) for prompt in ([3, 9, 4], [3, 9, 4, 11, 20])]
        assert not calls
        made.run()
        found[slots] = [request.tokens for request in asked]
    assert calls and found[1] == found[2] and len(set(found[1][0])) > 2
