"""Compares adapters with PEFT's. This module tests zerojax.interop.peft."""

import errno
import json
import os
import re
import shutil

import golden_models
import jax
import numpy as np
import optax
import pytest
import runs
import safetensors.numpy
from flax.training import train_state

import zerojax
from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import merged, peft, regexes, tensor_files
from zerojax.models import families
from zerojax.zero.blocks import tensor_parallel

LOGITS, LOSS = 2e-5, 1e-5  # as in tests/interop/test_pretrained.py
# (model, adapter, stage): every model and both kinds of scale at a stage, and both stages of two models
GOLDEN = [
    ("llama", "lora", 3),
    ("llama", "rslora", 0),
    pytest.param("qwen2", "rslora", 3, marks=runs.LONG),
    pytest.param("t5", "lora", 0, marks=runs.LONG),
    pytest.param("qwen3moe", "lora", 3, marks=runs.LONG),
    pytest.param("mixtral", "lora", 0, marks=runs.LONG),
    pytest.param("t5", "rslora", 3, marks=runs.LONG),
    pytest.param("bart", "lora", 3, marks=runs.LONG),
    ("llama", "dora_head", 3),
    ("mixtral", "fused", 3),
    ("gptoss", "fused", 0),
    ("llama4", "fused", 3),
    pytest.param("granitemoe", "fused", 3, marks=runs.LONG),
    pytest.param("phimoe", "fused", 3, marks=runs.LONG),
    pytest.param("qwen3moe", "fused", 0, marks=runs.LONG),
    pytest.param("qwen2moe", "fused", 3, marks=runs.LONG),
    pytest.param("deepseekv3", "fused", 3, marks=runs.LONG),
    pytest.param("gptoss", "down", 3, marks=runs.LONG),
    pytest.param("llama", "dora", 0, marks=runs.LONG),
    pytest.param("llama", "embedding", 3, marks=runs.LONG),
    pytest.param("qwen2", "dora", 3, marks=runs.LONG),
    pytest.param("gpt2", "dora", 0, marks=runs.LONG),
]
NEWER = (
    "mixtral/fused",
    "qwen3moe/fused",
    "qwen2moe/fused",
    "deepseekv3/fused",
    "gptoss/fused",
    "llama4/fused",
    "gptoss/down",
    "llama/dora",
)
NEWER += ("llama/embedding", "llama/dora_head", "qwen2/dora", "gpt2/dora")


def expected(name, kind):
    return dict(np.load(golden_models.FOLDER / name / kind / "expected.npz"))


def load(name, kind, stage, **options):
    folder = golden_models.FOLDER / name
    return zerojax.load_huggingface(folder, stage=stage, min_size=64, adapter=folder / kind, **options)


@pytest.mark.parametrize("name, kind, stage", GOLDEN)
def test_logits_loss_and_greedy_tokens_are_those_of_peft(name, kind, stage):
    loaded, known = load(name, kind, stage), expected(name, kind)
    batch = {key: known[key] for key in ("input_ids", "attention_mask", "labels")}
    is_seq2seq = loaded.family.is_encoder_decoder
    if not is_seq2seq:
        batch["labels"] = np.where(known["attention_mask"] > 0, known["input_ids"], -100)

    def forward(params):
        return loaded.apply(params, batch)

    placements = loaded.partition.placements
    sharded = zerojax.where_used(forward, placements, blocks=loaded.blocks, heads=loaded.heads, remat="full")
    logits = jax.jit(sharded)(loaded.params)
    np.testing.assert_allclose(logits, known["logits"], atol=LOGITS, rtol=0)
    np.testing.assert_allclose(loaded.loss_of(logits, batch["labels"]), known["loss"], rtol=LOSS)
    if stage:
        mask = known["attention_mask"] if is_seq2seq else None
        found = loaded.generator(max_new_tokens=12)(loaded.params, known["input_ids"], mask)
        np.testing.assert_array_equal(found, known["generated"])


@pytest.mark.parametrize(
    "name, kind",
    [("llama", "lora"), ("t5", "rslora"), ("bart", "lora"), ("qwen3moe", "lora"), *(one.split("/") for one in NEWER)],
)
def test_an_export_of_an_import_holds_the_same_bytes_and_settings(tmp_path, name, kind):
    loaded, source = load(name, kind, 3), golden_models.FOLDER / name / kind
    zerojax.export_adapter(loaded.params, loaded, tmp_path / "out")
    written, known = (safetensors.numpy.load_file(folder / peft.WEIGHTS) for folder in (tmp_path / "out", source))
    assert written.keys() == known.keys()
    for key, tensor in known.items():
        assert written[key].dtype == tensor.dtype and written[key].tobytes() == tensor.tobytes(), key
    config, theirs = (json.loads((folder / peft.CONFIG).read_text()) for folder in (tmp_path / "out", source))
    assert config.pop("base_model_name_or_path") == str(golden_models.FOLDER / name)
    ends = {name.rpartition(".")[2] for name in theirs["target_modules"]}
    assert set(config.pop("target_modules")) in (set(theirs["target_modules"]), ends)
    parameters = set(config.pop("target_parameters", ()))
    assert parameters == {name.removeprefix("experts.") for name in theirs.get("target_parameters") or ()}
    assert config == {key: theirs[key] for key in config}
    with open(tmp_path / "out" / peft.WEIGHTS, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        assert json.loads(file.read(length))["__metadata__"] == {"format": "pt"}


def test_an_end_between_the_files_of_an_adapter_leaves_none_of_new_weights_and_old_settings(tmp_path, monkeypatch):
    loaded, out = load("llama", "lora", 3), tmp_path / "out"
    zerojax.export_adapter(loaded.params, loaded, out)
    replace = os.replace

    def fail(source, target):
        if target.name == peft.CONFIG:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="out: export failed: no space left on the disk"):
        zerojax.export_adapter(loaded.params, loaded, out)
    assert sorted(path.name for path in out.iterdir()) == [peft.WEIGHTS, tensor_files.CHECKSUMS]
    assert [out] == list(tmp_path.iterdir())


def test_fresh_adapters_change_no_logit_and_only_they_and_modules_to_save_are_trained_and_saved(tmp_path):
    lora = zerojax.Lora(r=4, target_modules="all-linear", modules_to_save=("lm_head",))
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=3, min_size=64, lora=lora)
    batch = golden_models.batch("llama")
    np.testing.assert_allclose(
        jax.jit(loaded.apply)(loaded.params, batch), golden_models.expected("llama")["logits"], atol=LOGITS
    )
    trained = {path for path, weight in loaded.partition.placements.items() if weight.trainable}
    names = {path.rpartition("/")[2] for path in trained}
    assert names == {"lora_a", "lora_b", "kernel"} and "params/head/kernel" in trained
    assert len(trained) == 2 * 7 * 2 + 1
    zerojax.export_adapter(loaded.params, loaded, tmp_path)
    saved = safetensors.numpy.load_file(tmp_path / peft.WEIGHTS)
    assert len(saved) == len(trained) and "base_model.model.lm_head.weight" in saved
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert config["modules_to_save"] == ["lm_head"] and config["task_type"] == "CAUSAL_LM"
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    again = zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, adapter=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    assert again.adapters.saved == loaded.adapters.saved


def test_a_module_that_is_trained_in_full_is_saved_with_its_bias(tmp_path):
    lora = zerojax.Lora(r=2, modules_to_save=("final_layer_norm",))
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "bart", stage=0, lora=lora)
    zerojax.export_adapter(loaded.params, loaded, tmp_path)
    saved = {name for name in safetensors.numpy.load_file(tmp_path / peft.WEIGHTS) if "lora_" not in name}
    norm = "base_model.model.model.encoder.layers.0.final_layer_norm"
    assert {f"{norm}.weight", f"{norm}.bias"} <= saved and len(saved) == len(loaded.adapters.saved)
    again = zerojax.load_huggingface(golden_models.FOLDER / "bart", stage=0, adapter=tmp_path)
    assert again.adapters.saved == loaded.adapters.saved


def test_a_tied_embedding_that_is_trained_in_full_stays_tied_or_is_refused(tmp_path):
    lora = zerojax.Lora(r=2, modules_to_save=("shared",))
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "bart", stage=0, lora=lora)
    assert loaded.config.tie_embeddings
    zerojax.export_adapter(loaded.params, loaded, tmp_path)
    config = tmp_path / peft.CONFIG
    saved, raw = safetensors.numpy.load_file(tmp_path / peft.WEIGHTS), json.loads(config.read_text())
    assert raw.pop(peft.TYING) is True
    copy = saved["base_model.model.lm_head.weight"]  # as PEFT saves it
    np.testing.assert_array_equal(copy, saved["base_model.model.model.shared.weight"])
    again = zerojax.load_huggingface(golden_models.FOLDER / "bart", stage=0, adapter=tmp_path)
    assert again.adapters.saved == loaded.adapters.saved == ("embed/embedding",)
    config.write_text(json.dumps(raw))
    for apart in ("base_model.model.model.shared.weight", "base_model.model.lm_head.weight"):
        own = {name: array for name, array in saved.items() if "lora" in name or name == apart}
        safetensors.numpy.save_file(own, tmp_path / peft.WEIGHTS)
        with pytest.raises(UserError, match="the embedding or the output projection of a model in which one repeats"):
            zerojax.load_huggingface(golden_models.FOLDER / "bart", stage=0, adapter=tmp_path)


RESIZED = golden_models.GOLDEN / "peft"
EMBEDDING, HEAD = "embed/embedding", "head/kernel"
# folder -> the weights that are trained in full, and those that it carries
OF_RESIZED = {
    "untied/full": ({EMBEDDING, HEAD}, set()),
    "untied/embedding": ({EMBEDDING}, {HEAD}),
    "untied/frozen": (set(), {EMBEDDING, HEAD}),
    "untied/head": (set(), {HEAD}),
    "tied/full": ({EMBEDDING}, set()),
    "tied/frozen": (set(), {EMBEDDING}),
}


def load_resized(name, model=None, **options):
    return zerojax.load_huggingface(model or RESIZED / name.split("/")[0], stage=0, adapter=RESIZED / name, **options)


def resized_logits(loaded):
    known = np.load(RESIZED / "untied" / "full" / "expected.npz")
    return loaded.apply(loaded.params, {"input_ids": known["input_ids"]})


@pytest.mark.parametrize("name", OF_RESIZED)
def test_an_adapter_of_a_resized_vocabulary_gives_the_logits_of_peft_and_trains_what_peft_trains(name):
    loaded, known = load_resized(name), np.load(RESIZED / name / "expected.npz")
    np.testing.assert_allclose(resized_logits(loaded), known["logits"], atol=LOGITS, rtol=0)
    saved, carried = OF_RESIZED[name]
    assert (set(loaded.adapters.saved), set(loaded.adapters.carried)) == (saved, carried)
    trained = {path for path, weight in loaded.partition.placements.items() if weight.trainable and "lora" not in path}
    assert trained == {f"params/{path}" for path in saved}


@pytest.mark.parametrize("name", OF_RESIZED)
def test_weights_that_an_adapter_carries_take_the_place_of_the_models_own_and_are_exported_and_merged(tmp_path, name):
    own, model = RESIZED / name.split("/")[0], tmp_path / "model"
    shutil.copytree(own, model)
    tensors = safetensors.numpy.load_file(own / "model.safetensors")
    others = {key: tensor + ("layers" not in key and "norm" not in key) for key, tensor in tensors.items()}
    safetensors.numpy.save_file(others, model / "model.safetensors", {"format": "pt"})
    loaded, known = load_resized(name, model), np.load(RESIZED / name / "expected.npz")["logits"]
    if name != "untied/head":  # which carries no embedding
        np.testing.assert_allclose(resized_logits(loaded), known, atol=LOGITS, rtol=0)
    zerojax.export_adapter(loaded.params, loaded, tmp_path / "out")
    written, theirs = (safetensors.numpy.load_file(at / peft.WEIGHTS) for at in (tmp_path / "out", RESIZED / name))
    assert {key: tensor.tobytes() for key, tensor in written.items()} == {key: theirs[key].tobytes() for key in written}
    again = zerojax.load_huggingface(own, stage=0, adapter=tmp_path / "out")
    np.testing.assert_allclose(resized_logits(again), known, atol=LOGITS, rtol=0)
    folder = folder_lib.open_folder(own)
    adapter = peft.open_adapter(RESIZED / name, folder.family, folder.model)
    merged.export(folder, adapter, tmp_path / "merged")
    np.testing.assert_allclose(
        resized_logits(zerojax.load_huggingface(tmp_path / "merged", stage=0)), known, atol=LOGITS, rtol=0
    )


@pytest.mark.parametrize("name", ["untied/full", "untied/frozen", "untied/head", "tied/full", "tied/frozen"])
def test_a_model_of_another_vocabulary_than_the_adapters_is_told_how_to_resize(tmp_path, name):
    own = RESIZED / name.split("/")[0]
    tensors = safetensors.numpy.load_file(own / "model.safetensors")
    cut = {key: tensor[:20] if tensor.shape[0] == 22 else tensor for key, tensor in tensors.items()}
    safetensors.numpy.save_file(cut, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((own / "config.json").read_text()) | {"vocab_size": 20})
    )
    line = r"the adapter is of a vocabulary of 22 \(base_model\.\S+\.weight\), and the model has 20; resize it .*_embeddings\(22\)"
    with pytest.raises(UserError, match=line):
        load_resized(name, tmp_path)


def test_an_adapter_beside_others_may_carry_the_models_own_weights_and_no_others(tmp_path):
    loaded = zerojax.load_huggingface(RESIZED / "untied", stage=0)
    assert [*loaded.read_adapter(RESIZED / "untied" / "frozen")] == ["layer_0/attention/q"]
    shutil.copytree(RESIZED / "untied" / "frozen", tmp_path / "other")
    tensors = safetensors.numpy.load_file(tmp_path / "other" / peft.WEIGHTS)
    tensors["base_model.model.lm_head.weight"][3] += 1
    safetensors.numpy.save_file(tensors, tmp_path / "other" / peft.WEIGHTS)
    for folder in (tmp_path / "other", RESIZED / "untied" / "full"):
        with pytest.raises(
            UserError, match="has head/kernel in full, and one beside others has only low ranks; merge it"
        ):
            loaded.read_adapter(folder)


def test_what_peft_would_not_read_or_we_do_not_compute_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"trainable_token_indices is \[3, 21\], which zerojax does not compute"):
        load_resized("tied/tokens")
    with pytest.raises(UserError, match="ensure_weight_tying is not true, so PEFT trained a copy"):
        load_resized("tied/apart")
    shutil.copytree(RESIZED / "untied" / "full", tmp_path / "lost")
    tensors = safetensors.numpy.load_file(tmp_path / "lost" / peft.WEIGHTS)
    del tensors["base_model.model.lm_head.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "lost" / peft.WEIGHTS)
    with pytest.raises(UserError, match=r"has no base_model\.model\.lm_head\.weight beside it, which PEFT reads; save"):
        zerojax.load_huggingface(RESIZED / "untied", stage=0, adapter=tmp_path / "lost")


@pytest.mark.parametrize("kind", ["llama/dora_head", "gptoss/fused", "mixtral/fused"])
def test_merged_weights_give_the_logits_of_the_adapters(tmp_path, kind):
    known, folder = dict(np.load(golden_models.FOLDER / kind / "expected.npz")), golden_models.FOLDER / kind
    source = folder_lib.open_folder(folder.parent)
    adapter = peft.open_adapter(folder, source.family, source.model)
    merged.export(source, adapter, tmp_path / "merged")
    loaded = zerojax.load_huggingface(folder.parent, stage=3, min_size=64, adapter=folder)
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "of_params")
    of_folders, of_params = (
        safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("merged", "of_params")
    )
    assert all(of_folders[name].tobytes() == of_params[name].tobytes() for name in of_folders)
    plain = zerojax.load_huggingface(tmp_path / "merged", stage=0)
    batch = {name: known[name] for name in ("input_ids", "attention_mask")}
    np.testing.assert_allclose(plain.apply(plain.params, batch), known["logits"], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("named", ["model", "backbone"])  # as PEFT writes them, and as the files of the model have them
def test_an_adapter_of_nemotron_is_read_by_the_names_of_its_modules(tmp_path, named):
    source, module = folder_lib.open_folder(golden_models.FOLDER / "nemotronh"), "layers.2.mixer.v_proj"
    one = peft.linear(source.family, source.model)["layer_2/attention/v"]
    assert one.name == f"model.{module}"
    shapes = {"lora_A": (3, one.shape[0]), "lora_B": (int(np.prod(one.shape[1:])), 3)}
    arrays = {
        f"base_model.model.{named}.{module}.{end}.weight": np.ones(shape, np.float32) for end, shape in shapes.items()
    }
    safetensors.numpy.save_file(arrays, tmp_path / peft.WEIGHTS)
    raw = {"peft_type": "LORA", "r": 3, "target_modules": rf".*model\.{module}", "rank_pattern": {"k_proj": 5}}
    (tmp_path / peft.CONFIG).write_text(json.dumps(raw))
    opened = peft.open_adapter(tmp_path, source.family, source.model)
    assert opened.chosen.adapted == ("layer_2/attention/v",)


@pytest.mark.parametrize("tensor", ["lora_A.weight", "lora_B.weight", "base_layer.weight"])
def test_an_adapter_of_an_output_projection_that_is_the_embedding_is_refused_as_such(tmp_path, tensor):
    source = folder_lib.open_folder(golden_models.FOLDER / "qwen2")
    safetensors.numpy.save_file(
        {f"base_model.model.lm_head.{tensor}": np.ones((2, 64), np.float32)}, tmp_path / peft.WEIGHTS
    )
    (tmp_path / peft.CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["lm_head"]}))
    with pytest.raises(UserError, match=r"lm_head.* whose weight is the embedding's too.*exclude_modules"):
        peft.open_adapter(tmp_path, source.family, source.model)


# name -> the ends of names that get adapters by default
USUAL = {
    "qwen3next": ("in_proj_qkvz", "out_proj", "q_proj", "v_proj"),
    "qwen35": ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "v_proj"),
    "granitehybrid": ("in_proj", "out_proj", "q_proj", "v_proj"),
    "nemotronh": ("in_proj", "k_proj", "o_proj", "q_proj", "v_proj"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "v_proj"),
    "llama4": ("q_proj", "v_proj"),
    "gemma3n": ("q_proj", "v_proj"),
    "gemma4": ("q_proj", "v_proj"),
    "gemma4moe": ("q_proj", "v_proj"),
    "mamba2": ("in_proj",),
}


@pytest.mark.filterwarnings("ignore:lora.target_modules. mean out_proj, whose adapters PEFT refuses:UserWarning")
@pytest.mark.parametrize(
    "name, wanted",
    [pytest.param(name, None, marks=() if name in ("lfm2", "mamba2") else runs.LONG) for name in USUAL]
    + [pytest.param(name, "all-linear", marks=runs.LONG) for name in USUAL],
)
def test_adapters_of_newer_families_are_named_as_transformers_modules_and_merge(tmp_path, name, wanted):
    """What was compared with PEFT 0.21 itself, apart from the numbers: it reads such a folder, and computes these logits."""
    folder, random = golden_models.FOLDER / name, np.random.default_rng(0)
    lora = zerojax.Lora(r=2, alpha=8, target_modules=wanted)
    loaded = zerojax.load_huggingface(folder, stage=3, min_size=64, lora=lora)

    def drawn(path, leaf):
        is_b = jax.tree_util.keystr(path).endswith("lora_b']")
        return jax.device_put(random.normal(0, 0.1, leaf.shape).astype(leaf.dtype), leaf.sharding) if is_b else leaf

    params = jax.tree_util.tree_map_with_path(drawn, loaded.params)
    zerojax.export_adapter(params, loaded, tmp_path / "adapter")
    source, header = folder_lib.open_folder(folder), tensor_files.read_header(tmp_path / "adapter" / peft.WEIGHTS)
    known = {name.removesuffix(".weight") for name in source.entries if name.endswith(".weight")}
    if name == "nemotronh":  # whose files have other names
        known = {known_as.replace("backbone.", "model.", 1) for known_as in known}
    modules = {re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)[1] for name in header}
    assert modules <= known
    told = json.loads((tmp_path / "adapter" / peft.CONFIG).read_text())["target_modules"]
    assert wanted or tuple(told) == USUAL[name]
    around = {name[: match.start()] for name in known for match in re.finditer(r"\.", name)}
    meant = {name for name in known | around if any(name == end or name.endswith(f".{end}") for end in told)}
    assert meant == modules
    adapter = peft.open_adapter(tmp_path / "adapter", source.family, source.model)
    merged.export(source, adapter, tmp_path / "merged")
    plain, batch = zerojax.load_huggingface(tmp_path / "merged", stage=0), golden_models.batch(name)
    logits = [np.asarray(jax.jit(one.apply)(own, batch)) for one, own in ((plain, plain.params), (loaded, params))]
    seen = batch["attention_mask"] > 0
    np.testing.assert_allclose(logits[0][seen], logits[1][seen], atol=LOGITS, rtol=0)
    assert np.abs(logits[1] - golden_models.expected(name)["logits"])[seen].max() > 100 * LOGITS


def test_adapters_that_peft_refuses_are_told():
    loaded = golden_models.load("mamba2", 0)
    with pytest.warns(UserWarning, match=r"^lora.target_modules: mean out_proj, .* set lora.exclude_modules=out_proj"):
        peft.choose(zerojax.Lora(target_modules="all-linear"), loaded.family, loaded.config)


def test_an_adapter_of_a_tied_embedding_is_read_where_it_is_looked_up_and_cannot_be_merged(tmp_path):
    folder = golden_models.FOLDER / "qwen2" / "dora"
    source = folder_lib.open_folder(folder.parent)
    adapter = peft.open_adapter(folder, source.family, source.model)
    with pytest.raises(UserError, match=r"model.embed_tokens has an adapter, and is the output projection too"):
        merged.export(source, adapter, tmp_path / "merged")
    shutil.copytree(folder, tmp_path / "tied")
    raw = json.loads((tmp_path / "tied" / peft.CONFIG).read_text())
    (tmp_path / "tied" / peft.CONFIG).write_text(json.dumps(raw | {peft.TYING: True}))
    with pytest.raises(UserError, match="ensure_weight_tying is true, and the embedding has an adapter"):
        peft.open_adapter(tmp_path / "tied", source.family, source.model)


def test_fresh_adapters_of_stacked_experts_change_no_logit_and_are_written_as_peft_names_them(tmp_path):
    lora = zerojax.Lora(r=2, target_modules=(), target_parameters=("gate_up_proj", "down_proj", "gate.weight"))
    folder = golden_models.FOLDER / "mixtral"
    loaded = zerojax.load_huggingface(folder, stage=3, min_size=64, lora=lora)
    np.testing.assert_allclose(
        jax.jit(loaded.apply)(loaded.params, golden_models.batch("mixtral")),
        golden_models.expected("mixtral")["logits"],
        atol=LOGITS,
    )
    zerojax.export_adapter(loaded.params, loaded, tmp_path)
    theirs = safetensors.numpy.load_file(folder / "fused" / peft.WEIGHTS)
    assert safetensors.numpy.load_file(tmp_path / peft.WEIGHTS).keys() == {key for key in theirs if ".mlp." in key}
    assert json.loads((tmp_path / peft.CONFIG).read_text())["target_parameters"] == [*sorted(lora.target_parameters)]


@pytest.mark.parametrize(
    "options, line",
    [
        ({"target_parameters": ("up_proj",)}, "'up_proj' names no weight of a mixture of this model; .*gate_up_proj"),
        (
            {"target_modules": ("w1",), "target_parameters": ("gate_up_proj",)},
            "have the same weights, and these get one",
        ),
        (
            {"target_parameters": ("down_proj",), "dropout": 0.1},
            "lora.dropout: is 0.1, and .*experts.down_proj is of exp",
        ),
        ({"target_modules": ("w2",), "dora": True}, "lora.dora: is True, and .* is of experts"),
    ],
)
def test_settings_that_experts_do_not_take_are_refused(options, line):
    loaded = golden_models.load("mixtral", 3)
    with pytest.raises(UserError, match=line):
        peft.choose(zerojax.Lora(**options), loaded.family, loaded.config)


@pytest.mark.parametrize(
    "kind, what", [("llama/dora", "magnitudes"), ("mixtral/fused", "an adapter of model.layers.0")]
)
def test_an_adapter_beside_others_has_low_ranks_of_linear_modules_alone(kind, what):
    loaded = golden_models.load(kind.split("/")[0], 3)
    with pytest.raises(UserError, match=f"has {what}.*, and one beside others has only low ranks of linear modules"):
        loaded.read_adapter(golden_models.FOLDER / kind)


def test_patterns_of_rank_and_alpha_are_read_and_applied(tmp_path):
    lora = zerojax.Lora(r=4, alpha=8, rank_pattern={"v_proj": 2}, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 2})
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, lora=lora)
    zerojax.export_adapter(loaded.params, loaded, tmp_path)
    again = zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, adapter=tmp_path).adapters
    scales = {path: again.scale(path) for path in again.adapted}
    attention = "layer_{}/attention/{}".format
    assert scales == {attention(0, "q"): 2, attention(0, "v"): 4, attention(1, "q"): 0.5, attention(1, "v"): 4}


def changed(tmp_path, **fields):
    """Returns a copy of a folder with other fields in its config; None removes one."""
    folder = tmp_path / "adapter"
    shutil.copytree(golden_models.FOLDER / "llama" / "lora", folder)
    raw = json.loads((folder / peft.CONFIG).read_text()) | fields
    (folder / peft.CONFIG).write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    return folder


MIXED = {
    "lora.dropout: is 0.1, and .*experts.*0.gate_proj is of experts": {"dropout": 0.1},
    "lora.target_modules: .* means some experts of ": {"target_modules": r".*experts\.[12]\.gate_proj"},
    "lora.exclude_modules: .* means some experts of ": {"exclude_modules": r".*experts\.1\..*"},
    "lora.rank_pattern, lora.alpha_pattern: give experts of ": {"rank_pattern": {r"experts\.1\.gate_proj": 2}},
}


@pytest.mark.parametrize("line", MIXED)
def test_adapters_of_some_experts_of_a_mixture_are_refused(line):
    lora = zerojax.Lora(**{"target_modules": ("gate_proj",)} | MIXED[line])
    family, model = golden_models.load("qwen3moe", 3).family, golden_models.load("qwen3moe", 3).config
    with pytest.raises(UserError, match=line.replace("0.gate", r".*gate")):
        peft.choose(lora, family, model)


@pytest.mark.parametrize("preset, inputs_first", [("gpt2", True), ("llama3_8b", False)])
def test_a_model_that_stores_inputs_first_is_said_to(preset, inputs_first):
    family = families.PRESETS[preset]
    chosen = peft.choose(zerojax.Lora(r=2, alpha=2, target_modules="all-linear"), family, family.presets[preset])
    assert peft.config_of(chosen, family, family.presets[preset], None)["fan_in_fan_out"] is inputs_first


def test_rslora_of_experts_is_written_as_the_same_scale_without_it_and_refused_where_peft_reads_another(tmp_path):
    folder = golden_models.load("mixtral", 3)
    family, model = folder.family, folder.config
    lora = zerojax.Lora(
        r=3, alpha=8, rslora=True, target_modules=("v_proj", "w1", "w2", "w3"), rank_pattern={"v_proj": 2}
    )
    chosen = peft.choose(lora, family, model)
    written = peft.read_settings(tmp_path, peft.config_of(chosen, family, model, None))
    for module in chosen.adapted:
        name = chosen.linear[module].names[0]
        assert written.rank_of(name) == lora.rank_of(name) and written.scale_of(name) == pytest.approx(
            lora.scale_of(name)
        )
    assert not written.rslora
    shutil.copytree(golden_models.FOLDER / "mixtral" / "lora", tmp_path / "lora")
    raw = json.loads((tmp_path / "lora" / peft.CONFIG).read_text())
    (tmp_path / "lora" / peft.CONFIG).write_text(json.dumps({**raw, "use_rslora": True}))
    with pytest.raises(
        UserError, match=r"use_rslora is true for .* set use_rslora to false and lora_alpha to 13\.8564 "
    ):
        peft.open_adapter(tmp_path / "lora", family, model)


def test_what_a_config_leaves_out_has_the_default_of_peft(tmp_path):
    lora = peft.read_settings(tmp_path, {"peft_type": "LORA", "target_modules": ["q_proj"]})
    assert lora == zerojax.Lora(r=8, alpha=8, dropout=0.0, target_modules=("q_proj",), rslora=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, r".*adapter_config.json: peft_type must be 'LORA', and is 'IA3'"),
        ({"use_dora": True}, r".*tensor base_model\S*q_proj.lora_magnitude_vector is missing"),
        ({"bias": "all"}, r".*adapter_config.json: bias is 'all', which zerojax does not compute"),
        (
            {"r": 4},
            r".*tensor base_model.*lora_A.weight has shape \(8, 64\), and adapter_config.json and the model give \(4, 64\)",
        ),
        (
            {"init_lora_weights": "pissa_niter_4"},
            r".*init_lora_weights is 'pissa_niter_4', which changes the model's own",
        ),
        (
            {"target_modules": ["v_proj"]},
            r".*holds an adapter of model.layers.0.self_attn.q_proj, .*target_modules is \('v_proj',\)",
        ),
        ({"target_modules": r".*\.1\..*(q|v)_proj"}, r".*holds an adapter of model.layers.0\S*, .*target_modules is "),
        ({"exclude_modules": ["q_proj"]}, r".*holds an adapter of \S*q_proj, .*exclude_modules is \('q_proj',\)"),
        ({"layers_to_transform": [1]}, r".*holds an adapter of model.layers.0\S*, .*layers_to_transform is \[1\]"),
        ({"layers_to_transform": 0}, r".*holds an adapter of model.layers.1\S*, .*layers_to_transform is 0"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "blo(cks"}, r".*layers_to_transform is \[0, 1\]"),
        (
            {"use_rslora": "no"},
            r".*adapter_config.json: use_rslora: must be true or false, and is 'no'; save the adapter",
        ),
        (
            {"lora_alpha": 10**400},
            r".*adapter_config.json: is not JSON \(1000\S* has 401 digits, and a float has at most 308",
        ),
        ({"lora_dropout": 2.0}, r".*adapter_config.json: lora.dropout: must be at least 0 and below 1"),
    ],
)
def test_a_folder_of_another_kind_is_refused_in_one_line(tmp_path, fields, message):
    folder = golden_models.FOLDER / "llama"
    with pytest.raises(UserError, match=f"^{message}"):
        zerojax.load_huggingface(folder, stage=0, adapter=changed(tmp_path, **fields))


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_regex_that_would_take_minutes_is_refused_before_it_is_matched(tmp_path, monkeypatch, field):
    monkeypatch.setattr(regexes, "SECONDS", 0.3)
    slow = "(.*)*(.*)*x"
    folder = changed(tmp_path, **{field: {"k_proj": 4, slow: 4} if "pattern" in field else slow})
    with pytest.raises(UserError, match=rf"adapter_config.json: {field}: '{re.escape(slow)}' takes more than 0.3 s to"):
        zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, adapter=folder)


@pytest.mark.parametrize(
    "fields", [{"layers_to_transform": [0, 1, 2], "layers_pattern": ["h", "layers"]}, {"layers_to_transform": []}]
)
def test_layers_that_a_config_names_beside_tensors_of_them_all_are_read(tmp_path, fields):
    loaded = golden_models.load("llama", 0)
    peft.open_adapter(changed(tmp_path, **fields), loaded.family, loaded.config)


@pytest.mark.parametrize(
    "fields, layers, meant",
    [
        ({"target_modules": "all-linear"}, "01", ("q_proj", "v_proj")),
        ({"layers_to_transform": [1]}, "1", tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qv")),
    ],
)
def test_the_targets_that_are_read_mean_the_modules_whose_tensors_the_folder_holds(tmp_path, fields, layers, meant):
    loaded, folder = golden_models.load("llama", 0), changed(tmp_path, **fields)
    tensors = safetensors.numpy.load_file(folder / peft.WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if re.search(rf"layers\.[{layers}]", name)}
    safetensors.numpy.save_file(kept, folder / peft.WEIGHTS)
    read = peft.open_adapter(folder, loaded.family, loaded.config).chosen
    assert read.lora.target_modules == meant and len(read.adapted) == 2 * len(layers)
    assert peft.choose(read.lora, loaded.family, loaded.config).adapted == read.adapted


def test_an_adapter_of_another_model_or_one_with_settings_beside_it_is_refused(tmp_path):
    folder = golden_models.FOLDER / "llama"
    with pytest.raises(UserError, match=r"tensor base_model.model.decoder.*belongs to no linear module of this model"):
        zerojax.load_huggingface(folder, stage=0, adapter=golden_models.FOLDER / "t5" / "lora")
    with pytest.raises(UserError, match=r"^lora.r: is 16, and .*lora has 8; leave it out"):
        zerojax.load_huggingface(folder, stage=0, adapter=folder / "lora", lora=zerojax.Lora(r=16))
    with pytest.raises(UserError, match=r"holds no adapter_config.json"):
        zerojax.load_huggingface(folder, stage=0, adapter=tmp_path)
    with pytest.raises(UserError, match=r"^export_adapter: the model was loaded without adapters"):
        loaded = golden_models.load("llama", 0)
        zerojax.export_adapter(loaded.params, loaded, tmp_path)


def test_an_export_with_another_bit_is_refused_by_its_checksum_and_read_without(tmp_path):
    loaded, out = load("llama", "lora", 0), tmp_path / "out"
    zerojax.export_adapter(loaded.params, loaded, out)
    content = bytearray((out / peft.WEIGHTS).read_bytes())
    content[-2] ^= 1
    (out / peft.WEIGHTS).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{out / peft.WEIGHTS}: is not what was written: its checksum is another"):
        zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, adapter=out)
    (out / tensor_files.CHECKSUMS).unlink()
    zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, adapter=out)


def test_a_changed_config_of_an_export_is_told(tmp_path):
    loaded, out = load("llama", "lora", 0), tmp_path / "out"
    zerojax.export_adapter(loaded.params, loaded, out)
    text = (out / peft.CONFIG).read_text()
    assert '"lora_alpha": 32' in text
    (out / peft.CONFIG).write_text(text.replace('"lora_alpha": 32', '"lora_alpha": 33'))
    with pytest.warns(
        UserWarning, match=rf"^{out / peft.CONFIG}: is not what was written: .* if it was changed on purpose$"
    ):
        zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, adapter=out)
    (out / "tokenizer.json").touch()
    tensor_files.write_checksums(out)
    (out / "tokenizer.json").unlink()
    with pytest.warns(UserWarning, match=rf"^{out / 'tokenizer.json'}: is missing, and was written with the weights"):
        tensor_files.check([out / peft.WEIGHTS])
    (out / tensor_files.CHECKSUMS).unlink()
    zerojax.load_huggingface(golden_models.FOLDER / "llama", stage=0, adapter=out)


def test_an_interrupted_or_repeated_export_leaves_a_whole_folder(tmp_path):
    loaded = load("llama", "lora", 0)
    for _ in range(2):
        zerojax.export_adapter(loaded.params, loaded, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [peft.CONFIG, peft.WEIGHTS, tensor_files.CHECKSUMS]
    assert not list(tmp_path.glob(".*"))
    assert dict(tree.flatten(loaded.params))


def two_steps(kind, stage, **mesh):
    """Returns losses and norms of two steps, and the adapters after them."""
    made = zerojax.make_mesh(**mesh) if mesh else zerojax.make_mesh(devices=jax.devices()[:1])
    folder = golden_models.FOLDER / kind
    loaded = zerojax.load_huggingface(folder.parent, stage=stage, min_size=64, adapter=folder, mesh=made)
    tokens = np.random.default_rng(0).integers(3, 384, (8, 24))  # all of which are labels, so each device has as many
    batch = {"input_ids": tokens, "labels": tokens}
    shapes = {path: leaf.shape for path, leaf in tree.flatten({"params": loaded.params})}
    rows, _ = tensor_parallel.overrides(loaded.family.parallel.weights, shapes, mesh_lib.completed(made))
    tx = optax.sgd(0.5)
    init = lambda _: train_state.TrainState.create(apply_fn=None, params=loaded.params, tx=tx)  # noqa: E731
    options = {"stage": stage, "min_size": 64, "trainable": loaded.trainable, "overrides": rows}
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=made, **options)
    how = {"reduce_dtype": np.float32, "blocks": loaded.blocks} if stage else {}
    step = zerojax.make_train_step(lambda params, batch, *_: loaded.loss(params, batch), partition, **how)
    found = []
    for _ in range(2):
        state, metrics = step(state, batch)
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    after = {path: np.asarray(leaf) for path, leaf in tree.flatten(state.params) if "lora" in path}
    return found, after


@pytest.mark.parametrize(
    "kind, mesh",
    [
        ("mixtral/fused", {"expert": 4}),
        pytest.param("gptoss/fused", {"expert": 2, "model": 2}, marks=runs.LONG),
        pytest.param("mixtral/fused", {"expert": 2, "model": 2}, marks=runs.LONG),
        pytest.param("llama/dora_head", {"model": 2}, marks=runs.LONG),
    ],
)
def test_adapters_train_over_devices_as_on_one(kind, mesh):
    expected, found = two_steps(kind, 0), two_steps(kind, 3, **mesh)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    for path, leaf in expected[1].items():
        np.testing.assert_allclose(found[1][path], leaf, atol=2e-5, err_msg=path)
