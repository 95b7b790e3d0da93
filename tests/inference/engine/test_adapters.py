"""Checks adapters of each request against those of one model each. This module tests zerojax.inference.engine.adapters."""

import golden_models
import jax
import numpy as np
import pytest
import runs
import small_engine

import zerojax
from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import weights
from zerojax.ops import quantized


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")
@pytest.mark.parametrize("ways", [1, pytest.param(2, marks=pytest.mark.long)])
def test_rows_of_one_batch_get_the_tokens_of_pefts_models_with_their_own_adapters(ways):
    """Slots change hands, and beginnings of prompts are those of other adapters' texts. Expected: transformers' and PEFT's tokens."""
    loaded = golden_models.load("llama", 0, ways)
    names = ("", "lora", "rslora")
    given = {name: loaded.read_adapter(golden_models.FOLDER / "llama" / name) for name in names if name}
    expected = {name: dict(np.load(golden_models.FOLDER / "llama" / name / "expected.npz")) for name in names}
    own = engine_lib.Engine(loaded, slots=2, max_len=48, chunk=16, adapters=given)
    asked, length = [], expected[""]["input_ids"].shape[1]
    for row in range(3):
        for name in names:
            prompt = expected[name]["input_ids"][row].tolist()
            asked.append((own.submit(prompt, max_tokens=12, adapter=name), expected[name]["generated"][row, length:]))
    again = own.submit(expected["lora"]["input_ids"][2].tolist(), max_tokens=12, adapter="lora")
    own.run()
    for request, wanted in [*asked, (again, asked[-2][1])]:
        assert request.tokens and request.tokens == wanted[: len(request.tokens)].tolist()
    assert not any(request.reused for request, _ in asked) and len({tuple(r.tokens) for r, _ in asked}) > 3


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")
@pytest.mark.parametrize("kind", runs.cases(["llama/lora", "llama/dora", "mixtral/fused"], long=["llama/dora"]))
def test_a_model_that_was_loaded_with_an_adapter_gives_pefts_tokens_over_devices_that_share_kernels(kind):
    folder = golden_models.FOLDER / kind
    expected = dict(np.load(folder / "expected.npz"))
    mesh, (prompts, wanted) = zerojax.make_mesh(model=2), (expected["input_ids"], expected["generated"])
    loaded = zerojax.load_huggingface(folder.parent, mesh=mesh, stage=0, adapter=folder)
    own = engine_lib.Engine(loaded, slots=2, max_len=48, chunk=16)
    asked = [own.submit(prompt.tolist(), max_tokens=12) for prompt in prompts]
    own.run()
    for request, answer in zip(asked, wanted[:, prompts.shape[1] :].tolist()):
        assert request.tokens and request.tokens == answer[: len(request.tokens)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2", "t5", "bart"])
def test_other_families_have_adapters_of_each_request_too(name):
    loaded, folder = golden_models.load(name, 0), golden_models.FOLDER / name / "lora"
    is_pair = loaded.family.is_encoder_decoder
    own = engine_lib.Engine(loaded, slots=2, max_len=48, max_inputs=32, adapters={"lora": loaded.read_adapter(folder)})
    asked = []
    for adapter in ("lora", ""):
        found = golden_models.expected(f"{name}/{adapter}")
        mask = found["attention_mask"] > 0 if is_pair else np.ones_like(found["input_ids"], bool)
        for row, is_own, wanted in zip(found["input_ids"], mask, found["generated"]):
            request = own.submit(row[is_own].tolist(), max_tokens=12, adapter=adapter)
            asked.append((request, wanted[1 if is_pair else len(row) :].tolist()))
    own.run()
    for request, wanted in asked:
        assert request.tokens and request.tokens == wanted[: len(request.tokens)]


def drawn(random, path, inputs, outputs, rank):
    return {path: (random.normal(0, 0.2, (inputs, rank)), random.normal(0, 0.2, (rank, outputs)))}


@pytest.mark.long
def test_an_adapter_gives_the_tokens_of_merged_weights_beside_quantized_kernels_too():
    """Ranks differ, the output projection has one, and a module has one of two adapters."""
    random, plain = np.random.default_rng(3), small_engine.model()
    given = {
        "one": drawn(random, "layer_0/mlp/up", 64, 128, 3) | drawn(random, "head", 64, 61, 2),
        "two": drawn(random, "layer_0/mlp/up", 64, 128, 5),
    }
    made = engine_lib.Engine(plain, format="int8", slots=3, max_len=64, chunk=16, adapters=given)
    params = jax.tree.map(
        lambda leaf: quantized.dequantize(leaf, np.float32) if quantized.is_quantized(leaf) else leaf,
        weights.placed(plain.family, plain.config, plain.params, plain.partition.mesh, None, "int8"),
        is_leaf=quantized.is_quantized,
    )
    prompts, wanted, shared = [[9, 11, 40], [33, 8, 50]], [], small_engine.engine()
    kept = shared._params
    for name in ("one", "two"):
        merged = jax.tree.map(lambda leaf: leaf, params)
        for path, (a, b) in given[name].items():
            node = merged
            for part in path.split("/"):
                node = node[part]
            node["kernel"] = node["kernel"] + np.float32(a @ b).reshape(node["kernel"].shape)
        try:
            shared._params, shared._reuses = merged, False
            wanted += [request.tokens for request in shared.generate(prompts, max_tokens=8)]
        finally:
            shared._params, shared._reuses = kept, True
    found = [made.submit(prompt, max_tokens=8, adapter=name) for name in ("one", "two") for prompt in prompts]
    made.run()
    assert [request.tokens for request in found] == wanted and wanted[:2] != wanted[2:]


def test_what_does_not_fit_is_refused_in_one_line():
    random, plain = np.random.default_rng(3), small_engine.model()
    with pytest.raises(UserError, match="adapters: 'one' adapts layer_9/mlp/up, which is no linear module"):
        engine_lib.Engine(plain, adapters={"one": drawn(random, "layer_9/mlp/up", 64, 128, 3)})
    with pytest.raises(UserError, match=r"adapters: 'one' has \(64, 3\) and \(3, 64\) for layer_0/mlp/up"):
        engine_lib.Engine(plain, adapters={"one": drawn(random, "layer_0/mlp/up", 64, 64, 3)})
    with pytest.raises(UserError, match=r"adapters: are for plain weights .*omit is_gathered"):
        engine_lib.Engine(plain, is_gathered=True, adapters={"one": drawn(random, "head", 64, 61, 3)})
    with pytest.raises(UserError, match="adapter: 'two' is not there"):
        small_engine.engine().submit([9], adapter="two")
