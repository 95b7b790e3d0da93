"""Checks the weights that an engine reads. This module tests zerojax.inference.engine.weights."""

import dataclasses
import math
import types

import compile_only
import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import CONFIG, DECODER, LENGTH, NEW, engine, model

import zerojax
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import weights
from zerojax.models import families, layers
from zerojax.models import family as family_lib
from zerojax.ops import quantized
from zerojax.zero import stages


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["int8", pytest.param("fp8", marks=pytest.mark.long), pytest.param("nf4", marks=pytest.mark.long)]
)
def test_a_format_gives_the_tokens_of_its_dequantized_weights(kind):
    plain = model()
    coded = engine_lib.Engine(plain, format=kind, slots=3, max_len=LENGTH, chunk=16)
    kernel = coded._params["layer_0"]["mlp"]["up"]["kernel"]
    assert quantized.is_quantized(kernel) and quantized.is_quantized(coded._params["head"]["kernel"]) == (61 % 2 == 0)

    params = dequantized(coded._params)
    prompts = [[9, 11, 40], [33, 8, 50, 21]]
    plain_engine = engine()
    kept, plain_engine._params = plain_engine._params, params
    try:
        wanted = plain_engine.generate(prompts, max_tokens=NEW)
    finally:
        plain_engine._params = kept
    found = coded.generate(prompts, max_tokens=NEW)
    assert [request.tokens for request in found] == [request.tokens for request in wanted]


KINDS, WAYS = ("int8", "fp8", "nf4"), (1, 2, 4)
BY_DEFAULT = {("llama", "fp8")}
# Every model has every format and every number of devices, and some have each pair of them.
CASES = [
    pytest.param(name, kind, WAYS[(row + column) % 3], marks=() if (name, kind) in BY_DEFAULT else pytest.mark.long)
    for row, name in enumerate(golden_models.GENERATORS)
    for column, kind in enumerate(KINDS)
]


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")  # four devices do not divide all heads and positions
@pytest.mark.parametrize("name, kind, ways", CASES)
def test_all_models_give_the_tokens_of_a_generator_of_dequantized_weights(name, kind, ways):
    plain, loaded = golden_models.load(name, 0), golden_models.load(name, 0, ways)
    coded = weights.placed(plain.family, plain.config, plain.params, plain.partition.mesh, None, kind)
    expected, is_pair = golden_models.expected(name), plain.family.is_encoder_decoder
    prompts = expected["input_ids"] if is_pair else expected["input_ids"][:, :9]
    mask = expected["attention_mask"] if is_pair else None
    wanted = plain.generator(max_new_tokens=NEW)(dequantized(coded), prompts, mask)[:, 1 if is_pair else 9 :]
    own = engine_lib.Engine(loaded, format=kind, slots=2, max_len=48, max_inputs=32, chunk=16)
    rows = [row[is_own > 0] for row, is_own in zip(prompts, np.ones_like(prompts) if mask is None else mask)]
    found = own.generate(rows, max_tokens=NEW)
    assert [request.tokens for request in found] == [row[: len(r.tokens)].tolist() for r, row in zip(found, wanted)]
    assert any(map(quantized.is_quantized, jax.tree.leaves(own._params, is_leaf=quantized.is_quantized)))


def dequantized(params):
    """Returns weights with plain kernels."""
    return jax.tree.map(
        lambda node: quantized.dequantize(node, jnp.float32) if quantized.is_quantized(node) else node,
        params,
        is_leaf=quantized.is_quantized,
    )


def test_weights_that_are_where_decoding_wants_them_are_not_copied():
    made = model()
    placed = weights.placed(DECODER, CONFIG, made.params, made.partition.mesh, None, "none")
    for leaf, other in zip(jax.tree.leaves(placed), jax.tree.leaves(made.params)):
        assert leaf.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()


@pytest.mark.parametrize("implementation", [None, "jnp"])
@pytest.mark.parametrize("kind", [None, "int8", "fp8", "nf4", "fp8_block"])
@pytest.mark.parametrize("shape, contracted", [((256, 4, 32), 1), ((2, 128, 128), 2)])
def test_a_matmul_with_a_kernel_of_any_form_is_that_with_its_numbers(kind, implementation, shape, contracted):
    """By the narrow kernel's form in plain jnp and without it, for several rows and, where the kernel is plain, for one."""
    plain = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    stored = plain if kind is None else quantized.quantize(plain.astype(jnp.float32), kind, contracted)
    numbers = plain if kind is None else quantized.dequantize(stored, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, 1 if kind is None else 3, *shape[:contracted]), jnp.bfloat16)
    found = weights.multiply(x, stored, contracted, implementation, keeps_plain=False)
    if found is None:
        assert kind is None and implementation is None and len(shape) == contracted + 1, "its module multiplies as well"
        return
    wanted = np.tensordot(*(np.asarray(array, np.float64) for array in (x, numbers)), contracted)
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")])
def test_a_matmul_with_a_plain_kernel_that_devices_share_gives_what_its_module_does(dtypes):
    """A head's scores are float32 in any dtype of the weights."""
    dtype, of_kernel = map(jnp.dtype, dtypes)
    modules = [
        (layers.Head(64, 128), (2, 3, 64)),
        (layers.Linear((3, 4, 16), use_bias=True), (2, 1, 64)),
        (layers.Linear((64,), contracted=2), (2, 1, 4, 16)),
    ]
    for module, shape in modules:
        x = jax.random.normal(jax.random.key(0), shape).astype(dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(of_kernel), module.init(jax.random.key(1), x))
        wanted = module.apply(params, x)
        with weights.matmuls(None, is_sharded=True):
            found = module.apply(params, x)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted)


def test_kernels_run_on_one_gpu_or_on_several_that_share_the_weights():
    """The compiler does not shard them."""
    on_gpus = [
        zerojax.make_mesh(model=model, devices=compile_only.devices()[:n])
        for n, model in ((1, 1), (2, 1), (2, 2), (4, 2))
    ]
    assert [weights.kernels_of(mesh) for mesh in on_gpus] == ["pallas", None, "pallas", None]
    assert weights.kernels_of(zerojax.make_mesh(devices=jax.devices()[:1])) is None


@pytest.mark.parametrize("fields", [pytest.param({}, marks=pytest.mark.long), {"clamp": (7.0, 1.702), "shared_dim": 0}])
@pytest.mark.parametrize("axes", [{"model": 2, "expert": 2}, pytest.param({"model": 4}, marks=pytest.mark.long)])
def test_mixtures_give_the_tokens_of_one_device_also_beside_an_axis_of_experts(axes, fields):
    """Those of gpt-oss have biases, of which devices that share an expert add one."""
    family, random = families.PRESETS["moe_test"], np.random.default_rng(0)
    config = dataclasses.replace(family.presets["moe_test"].changed(mixture=fields), vocab_size=64, num_layers=2)
    shapes = family_lib.abstract_params(family.parts, config)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.1, leaf.shape), jnp.float32), shapes)
    found = []
    for sizes in ({}, axes):
        mesh = zerojax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        partition = stages.partition_state({"params": shapes}, mesh=mesh, stage=0)
        special = family_lib.SpecialTokens()
        own = types.SimpleNamespace(family=family, config=config, special=special, partition=partition, params=params)
        made = engine_lib.Engine(own, slots=2, max_len=32, chunk=16)
        found.append([request.tokens for request in made.generate([[3, 9, 4], [3, 9, 4, 11, 20]], max_tokens=8)])
    assert found[0] == found[1] and len(set(found[0][0])) > 2


def test_over_devices_kernels_of_parts_keep_their_dims_and_the_others_are_left_to_their_modules():
    random = np.random.default_rng(0)
    x, parts = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in ((3, 8), (8, 2, 6)))
    y = weights.multiply(x, parts, 1, None, keeps_plain=False)
    np.testing.assert_array_equal(y.reshape(3, -1), x @ parts.reshape(8, -1))
    assert y.dtype == x.dtype
    # A head's scores are float32, and what o and down add to the residual travels in 16 bits.
    assert weights.multiply(x, parts[:, 0], 1, None, keeps_plain=False) is None
    assert weights.multiply(x, parts, 1, None) is None
