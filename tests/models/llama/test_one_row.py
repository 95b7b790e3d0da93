"""Checks the layers of one row by kernels against the model's own. This module tests zerojax.models.llama.one_row."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine

import zerojax
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import weights
from zerojax.models import decoding, family
from zerojax.models.llama import one_row
from zerojax.models.llama.config import Heads, LlamaConfig, MixtureForm, MLPForm, Norms
from zerojax.models.rope import Rotation, Scaling
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
    step, token = decoding.row_step(at, one, 1, SLOTS), jnp.asarray([5])
    wanted = jax.jit(functools.partial(small_engine.DECODER.extend, config))(own, caches, step, token)
    found = jax.jit(functools.partial(one_row.extend, config, implementation=implementation))(own, caches, step, token)
    assert float(jnp.std(wanted[0])) > 0.1
    for theirs, ours in zip(*(jax.tree.leaves(x) for x in (wanted, found)), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=atol)


LAUNCHED = dataclasses.replace(CONFIG, num_layers=3, embed_dim=256, num_heads=4, num_kv_heads=2, mlp_dim=256)


def test_layers_by_launches_give_what_five_kernels_a_layer_do():
    """By the twins: what the launches multiply on a GPU is tested in pallas_kernels."""
    own, random = params("bfloat16", LAUNCHED, "int8"), np.random.default_rng(1)
    shape = (1, SLOTS, LAUNCHED.num_kv_heads, LAUNCHED.head_dim)
    caches = [tuple(jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(2)) for _ in range(3)]
    at, one = jnp.asarray([POSITION], jnp.int32), jnp.asarray([1], jnp.int32)
    step, token = decoding.row_step(at, one, 1, SLOTS), jnp.asarray([5])
    extend = jax.jit(functools.partial(one_row.extend, LAUNCHED, implementation="jnp", processors=132))
    wanted, found = (extend(weights, caches, step, token) for weights in (own, one_row.with_transposed(own)))
    for theirs, ours in zip(*(jax.tree.leaves(x) for x in (wanted, found)), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=0.02)


def test_transposed_scales_are_those_of_the_matrices_that_a_row_is_multiplied_with():
    own = one_row.with_transposed(params("bfloat16", LAUNCHED, "int8"))
    layer = own["layer_0"]
    for module, rows in ((layer["attention"]["o"], 256), (layer["attention"]["k"], 0), (layer["mlp"]["down"], 0)):
        weight = one_row.weight(module, rows)
        np.testing.assert_array_equal(weight.transposed, weight.scales.T)
    assert quantized.TRANSPOSED not in own["head"]["kernel"]


def test_launches_are_for_int8_on_one_hopper_gpu_and_sizes_that_they_divide():
    def is_read(config=LAUNCHED, kind="int8", device="NVIDIA H200"):
        return one_row.reads_transposed(
            config, params("bfloat16", config, kind), types.SimpleNamespace(device_kind=device, num_cores=132)
        )

    assert is_read() and is_read(device="NVIDIA H100 80GB HBM3")
    assert not any((is_read(kind="none"), is_read(kind="fp8"), is_read(device="NVIDIA A100-SXM4-80GB")))
    assert not is_read(device="NVIDIA B200") and not one_row.reads_transposed(
        LAUNCHED, params("bfloat16", LAUNCHED), None
    )
    for sizes in ({"mlp_dim": 192}, {"embed_dim": 128}, {"num_kv_heads": 1}, {"num_heads": 2, "num_kv_heads": 2}):
        assert not is_read(dataclasses.replace(LAUNCHED, **sizes))


REFUSED = {
    "biases": {"heads": Heads(qkv_bias=True)},
    "normed queries": {"heads": Heads(norm="each")},
    "a window": {"heads": Heads(windows=(8,))},
    "layers that are not rotated": {"rotation": Rotation(layers=(False,))},
    "dims that are not rotated": {"rotation": Rotation(dims=32)},
    "neighbouring dims": {"rotation": Rotation(is_interleaved=True)},
    "queries that grow": {"heads": Heads(growth=(0.1, 8))},
    "parallel branches": {"norms": Norms(places="shared")},
    "a bias of logits": {"has_logits_bias": True},
    "a mixture": {"mixture": MixtureForm(4, 2, 32)},
    "an offset of norms": {"norms": Norms(offset=1.0)},
    "norms after": {"norms": Norms(places="after")},
    "gelu": {"mlp": MLPForm("gelu_new")},
    "heads of 16": {"head_dim": 16},
    "angles that depend on the length": {"rotation": Rotation(scaling=Scaling("dynamic", 2.0))},
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_models_keep_their_own_layers(what):
    assert not one_row.takes(dataclasses.replace(CONFIG, **REFUSED[what]), params("bfloat16"), 1)


def test_one_row_in_bf16_int8_or_fp8_is_taken():
    taken = {kind: one_row.takes(CONFIG, params("bfloat16", kind=kind), 1) for kind in weights.FORMATS}
    assert taken == {"none": True, "int8": True, "fp8": True, "nf4": False}
    assert not one_row.takes(CONFIG, params("bfloat16"), 2) and not one_row.takes(CONFIG, params("float32"), 1)
    own = params("bfloat16")
    mixed = {**own, "head": {"kernel": quantized.quantize(own["head"]["kernel"], "int8")}}
    assert not one_row.takes(CONFIG, mixed, 1)


def model_on(mesh, own, config=CONFIG):
    return types.SimpleNamespace(
        family=small_engine.DECODER,
        config=config,
        special=family.SpecialTokens(),
        partition=stages.partition_state({"params": jax.eval_shape(lambda: own)}, mesh=mesh, stage=0),
        params=own,
    )


def test_an_engine_of_one_slot_answers_by_them_with_the_tokens_of_one_of_two(monkeypatch):
    model = model_on(small_engine.model().partition.mesh, params("bfloat16"))
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


WIDE = dataclasses.replace(CONFIG, vocab_size=256, num_heads=4, num_kv_heads=4, mlp_dim=256)


@pytest.mark.parametrize(
    "kind, ways, implementation",
    [
        ("none", 2, "jnp"),
        *[
            pytest.param(kind, ways, "interpret", marks=pytest.mark.long)
            for kind in ("none", "int8", "fp8")
            for ways in (2, 4)
        ],
    ],
)
def test_devices_that_share_the_weights_answer_with_the_tokens_of_one(kind, ways, implementation, monkeypatch):
    monkeypatch.setattr(weights, "kernels_of", lambda mesh: implementation)
    calls, extend = [], one_row.extend

    def noted(*given, summed=None, **how):
        calls.append(summed is not None)
        return extend(*given, summed=summed, **how)

    monkeypatch.setattr(one_row, "extend", noted)
    found = []
    for count in (1, ways):
        mesh = zerojax.make_mesh(model=count, devices=jax.devices()[:count])
        made = engine_lib.Engine(
            model_on(mesh, params("bfloat16", WIDE), WIDE), format=kind, slots=1, max_len=32, chunk=16
        )
        found.append(made.generate([[3, 9, 4], [3, 9, 4, 11, 20]], max_tokens=8))
    one, several = ([request.tokens for request in asked] for asked in found)
    assert one == several and len(set(one[0])) > 2
    assert calls == [False, True]


@pytest.mark.parametrize("sizes", [{"num_kv_heads": 1}, {"mlp_dim": 192}, {"vocab_size": 320}])
def test_weights_that_a_number_of_devices_does_not_divide_keep_their_own_layers(sizes):
    config = dataclasses.replace(WIDE, **sizes)
    assert [one_row.takes(config, params("bfloat16", config), ways) for ways in (1, 2)] == [True, False]
