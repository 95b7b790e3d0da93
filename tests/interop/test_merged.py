"""Compares merged folders with merged params. This module tests zerojax.interop.merged."""

import math

import arrays
import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, merged, peft
from zerojax.lora import adapters, settings, targets

INPUTS, OUTPUTS, RANK, STACK = 64, (4, 16), 2, 4
ROWS = 20  # that are merged at a time; the last 4 are fewer
ROUNDING = {np.float32: 1e-5, jnp.bfloat16: 2**-7}
# The axes of the mesh that a dim is sharded over, for the first dim and for the last
LAYOUTS = [(None, None), ("x", None), (None, "x"), ("y", "x")]


def test_a_merged_folder_holds_what_merging_the_params_gives(tmp_path):
    source = golden_models.FOLDER / "bart"
    folder = folder_lib.open_folder(source)
    merged.export(folder, peft.open_adapter(source / "rslora", folder.family, folder.model), tmp_path / "one")
    loaded = zerojax.load_huggingface(source, stage=3, min_size=64, adapter=source / "rslora")
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        assert one == two, name


@pytest.mark.parametrize(
    "quantize, stack", [("none", ()), ("none", (STACK,)), ("nf4", ()), ("int8", (STACK,)), ("fp8_block", ())]
)
def test_merged_bytes_are_the_same_whatever_the_sharding(monkeypatch, quantize, stack):
    monkeypatch.setattr(merged, "MOST_WEIGHTS", ROWS * math.prod(OUTPUTS))
    shape = (*stack, INPUTS, *OUTPUTS)
    linear = {"q": targets.LinearModule("q", shape[len(stack) :], 1, stack=stack)}
    chosen = targets.choose(settings.Lora(r=RANK, alpha=3.0, quantize=quantize), linear)
    params = adapters.add({"q": {"kernel": arrays.normal(0, shape)}}, chosen, jax.random.key(0))
    params["q"]["lora_b"] = arrays.normal(1, params["q"]["lora_b"].shape)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    fetch = huggingface.make_fetch(is_primary=True)

    def exported(first, last, dtype):
        def placed(leaf):
            begin, end = (
                axis if size % 2 == 0 else None for axis, size in ((first, leaf.shape[0]), (last, leaf.shape[-1]))
            )
            return jax.device_put(leaf, NamedSharding(mesh, P(begin, *[None] * (leaf.ndim - 2), end)))

        made = merged.of_params(jax.tree.map(placed, params), chosen)["q"]["kernel"]
        return [fetch(made, np.dtype(dtype), part) for part in (None, *range(math.prod(stack) if stack else 0))]

    expected = adapters.merge(params, chosen)["q"]["kernel"]
    for dtype in (np.float32, jnp.bfloat16):
        whole, *parts = one = exported(*LAYOUTS[0], dtype)
        np.testing.assert_allclose(whole.astype(np.float32), expected, rtol=ROUNDING[dtype], atol=ROUNDING[np.float32])
        for found, entry in zip(parts, whole):
            np.testing.assert_allclose(*(x.astype(np.float32) for x in (found, entry)), rtol=ROUNDING[dtype])
        for layout in LAYOUTS[1:]:
            assert b"".join(exported(*layout, dtype)) == b"".join(one), layout
