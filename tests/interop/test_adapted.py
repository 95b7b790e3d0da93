"""Checks weights that are read beside adapters. This module tests zerojax.interop.adapted."""

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.interop import adapted, peft
from zerojax.lora import targets
from zerojax.ops import quantized


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_frozen_kernels_are_quantized_and_sharded_in_that_form_and_the_rest_is_as_stored(kind):
    exact = golden_models.load("llama", 0)
    lora = zerojax.Lora(r=4, target_modules=("q_proj",), quantize=kind)
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=3, min_size=64, lora=lora)
    leaves, known = targets.flat(loaded.params), targets.flat(exact.params)
    for path in known:
        if path in leaves:
            np.testing.assert_array_equal(leaves[path], known[path])
    assert {path.rpartition("/")[2] for path in leaves} == {
        kind,
        "scales",
        "scale",
        "embedding",
        "kernel",
        "lora_a",
        "lora_b",
    }
    for path in loaded.adapters.quantized:
        codes = leaves[f"{path}/kernel/{kind}"]
        assert codes.addressable_shards[0].data.size == codes.size / 8
        own = jax.jit(quantized.quantize, static_argnums=1)(known[f"{path}/kernel"], kind)
        np.testing.assert_array_equal(codes, own[kind])
    assert "head/kernel" in leaves


def test_kernels_are_quantized_before_the_next_are_read(monkeypatch):
    lora, order, ready = zerojax.Lora(r=4, quantize="int8"), [], jax.block_until_ready
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, lora=lora)
    monkeypatch.setattr(adapted, "MOST_BYTES", 1)
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: order.append("wait") or ready(arrays))

    def read(likes):
        order.append("read")
        return {path: jnp.ones(like.shape, like.dtype, device=like.sharding) for path, like in likes.items()}

    found = adapted.quantize(targets.flat(loaded.params), loaded.adapters, read)
    assert len(found) == 2 * len(loaded.adapters.quantized) and order == ["read", "wait"] * (len(found) // 2)


def test_padded_shards_hold_the_same_adapters_and_codes():
    lora, mesh = zerojax.Lora(r=4, quantize="nf4"), zerojax.make_mesh(data=7, devices=jax.devices()[:7])
    folder = golden_models.FOLDER / "llama"
    loaded = zerojax.load_huggingface(folder, mesh=mesh, stage=3, min_size=64, indivisible="pad", lora=lora)
    plain = zerojax.load_huggingface(folder, stage=0, lora=lora)
    assert any(leaf.padding for leaf in loaded.partition.leaves.values())
    unpadded = zerojax.unpad({"params": loaded.params}, loaded.partition)["params"]
    jax.tree.map(np.testing.assert_array_equal, unpadded, plain.params)


def test_frozen_weights_keep_the_dtype_of_the_folder_or_get_another(tmp_path):
    loaded = golden_models.load("llama", 0)
    zerojax.export_huggingface(loaded.params, loaded, tmp_path, dtype=jnp.float16)
    lora = zerojax.Lora(r=4)
    for dtype, expected in ((None, jnp.float16), ("bf16", jnp.bfloat16)):
        params = zerojax.load_huggingface(tmp_path, stage=0, lora=lora, dtype=dtype).params["layer_0"]["attention"]["q"]
        assert params["kernel"].dtype == expected and params["lora_a"].dtype == jnp.float32


def test_shapes_are_told_without_reading():
    loaded = golden_models.load("llama", 0)
    chosen = peft.choose(zerojax.Lora(r=4, quantize="int8"), loaded.family, loaded.config)
    abstract = adapted.abstract(loaded.family, loaded.config, chosen, lambda path: jnp.bfloat16)
    q = abstract["layer_0"]["attention"]["q"]
    assert (q["kernel"]["int8"].shape, q["lora_a"].shape) == ((64, 4, 16), (64, 4))
