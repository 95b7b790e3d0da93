"""Compares imported models with transformers. This module tests zerojax.interop.pretrained."""

import dataclasses
import json
import shutil

import golden_models
import jax
import numpy as np
import pytest
import runs
import safetensors.numpy

import zerojax
from zerojax import tree
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import layout, pretrained

LOGITS = 2e-5  # float32 sums in another order, in two implementations
LOSS = 1e-5  # relative to losses of about 6


# By default each model runs once, and bart with tensor parallelism.
LOADED = [
    pytest.param(name, 3, model, marks=runs.LONG if (model == 2) != (name == "bart") or name == "qwen2" else ())
    for model in (1, 2)
    for name in golden_models.NAMES
]


@pytest.mark.parametrize("name, stage, model", [*LOADED, pytest.param("llama", 0, 1, marks=runs.LONG)])
def test_logits_loss_and_greedy_tokens_are_those_of_transformers(name, stage, model):
    """Also with tensor parallelism."""
    loaded, expected = golden_models.load(name, stage, model), golden_models.expected(name)
    batch = golden_models.batch(name)

    def forward(params):
        return loaded.apply(params, batch), loaded.loss(params, batch)

    placements = loaded.partition.placements
    sharded = zerojax.where_used(forward, placements, blocks=loaded.blocks, heads=loaded.heads, remat="full")
    logits, loss = jax.jit(sharded)(loaded.params)
    np.testing.assert_allclose(logits, expected["logits"], atol=LOGITS, rtol=0)
    np.testing.assert_allclose(loss, expected["loss"], rtol=LOSS)
    mask = expected["attention_mask"] if loaded.family.is_encoder_decoder else None
    found = loaded.generator(max_new_tokens=12)(loaded.params, expected["input_ids"], mask)
    np.testing.assert_array_equal(found, expected["generated"])


def assert_equal_logits(name, loaded):
    expected, batch = golden_models.expected(name), golden_models.batch(name)
    sharded = zerojax.where_used(
        lambda params: loaded.apply(params, batch),
        loaded.partition.placements,
        blocks=loaded.blocks,
        heads=loaded.heads,
        remat="none",
    )
    logits = jax.jit(sharded)(loaded.params)
    np.testing.assert_allclose(logits, expected["logits"], atol=LOGITS, rtol=0)
    np.testing.assert_allclose(loaded.loss_of(logits, batch["labels"]), expected["loss"], rtol=LOSS)


def test_a_batch_without_what_a_model_reads_is_refused():
    decoder, encoder_decoder = golden_models.load("llama", 0), golden_models.load("t5", 0)
    for call, batch, line in (
        (decoder.apply, None, "batch: must be a dict, and is None"),
        (decoder.loss, {"ids": 1, "labels": 2}, "batch: lacks input_ids, and has ids, labels; add input_ids to it"),
        (encoder_decoder.apply, {"input_ids": np.ones((1, 2), int)}, "batch: lacks labels, and has input_ids; add"),
    ):
        with pytest.raises(UserError, match=rf"^{line}"):
            call({}, batch)
    batch, params = golden_models.batch("llama"), decoder.params
    ids, mask = batch["input_ids"], np.ones_like(batch["input_ids"])
    short = dataclasses.replace(decoder, family=dataclasses.replace(decoder.family, positions=lambda _: 4))
    for call, line in (
        (
            lambda: decoder.apply({"params": params}, batch),
            r"params: must hold embed, .* and are params; pass loaded.params",
        ),
        (
            lambda: decoder.loss(params, batch | {"input_ids": ids / 2}),
            "batch/input_ids: must be integers, and is float",
        ),
        (lambda: decoder.loss(params, batch | {"attention_mask": mask[1:]}), "batch/attention_mask: has shape"),
        (lambda: decoder.loss_of(np.zeros((*ids.shape, 8)), ids[1:]), "batch/labels: has shape"),
        (lambda: short.apply(params, batch), "batch: has texts of .* tokens, and the model has 4 positions"),
        (lambda: decoder.generator(max_new_tokens=1.5), "max_new_tokens: must be a whole number, and is 1.5"),
        (lambda: decoder.generator(max_new_tokens=1)(params, ids, seed=-1), "seed: must be 0 or more"),
        (lambda: jax.jit(decoder.generator(max_new_tokens=1))(params, ids), "state: .* has no values while jit"),
    ):
        with pytest.raises(UserError, match=rf"^{line}"):
            call()
    negative = ids.copy()
    negative[0, 3] = -1
    with jax.numpy_rank_promotion("raise"), pytest.warns(UserWarning, match="^batch: position_ids are not read"):
        found = np.asarray(decoder.apply(params, {"input_ids": negative, "position_ids": ids}))
    assert np.isnan(found[0]).all() and np.isfinite(found[1:]).all()
    assert np.isnan(decoder.loss_of(np.zeros((*ids.shape, 512)), negative))
    with pytest.raises(UserError, match=r"^path: must be .*, and is b'x'"):
        decoder.read_adapter(b"x")


OTHERS = golden_models.DECODERS + golden_models.MIXTURES + golden_models.HYBRIDS + golden_models.ENCODER_DECODERS
# What these do, exaone4, qwen2moe, the norms of qwen3, bart, pegasus, and mbart under tensor parallelism do by default.
AGAIN = ("mixtral", "olmoe", "qwen3moe", "marian", "mbart", "seedoss", "olmo3")
TENSOR = ("gemma2", "deepseekv3")  # the others are long tests


@pytest.mark.parametrize("name", runs.cases(OTHERS, long=AGAIN))
def test_other_families_compute_what_transformers_does_and_are_written_as_they_were(name, tmp_path):
    """At stage 3."""
    loaded = golden_models.load(name, 3)
    assert_equal_logits(name, loaded)
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out")
    files = [folder / "model.safetensors" for folder in (tmp_path / "out", golden_models.FOLDER / name)]
    written, source = map(safetensors.numpy.load_file, files)
    assert written.keys() == source.keys()
    jax.tree.map(np.testing.assert_array_equal, written, source)


# What the caches of those hold is in the caches of others by default; engines give the tokens of gemma3, whose windows gemma2 has too.
CACHED_AGAIN = (
    *AGAIN,
    "pegasus",
    "gemma",
    "gemma3",
    "phi3",
    "olmo2",
    "granite",
    "qwen2moe",
    "gpt2",
    "smollm3",
    "exaone4",
)


@pytest.mark.parametrize("name", runs.cases(OTHERS, long=CACHED_AGAIN))
def test_other_families_give_the_greedy_tokens_of_transformers(name):
    """At stage 3."""
    expected, loaded = golden_models.expected(name), golden_models.load(name, 3)
    prompts = (expected["input_ids"][:, :9],)
    if loaded.family.is_encoder_decoder:
        prompts = expected["input_ids"], expected["attention_mask"]
    found = loaded.generator(max_new_tokens=12)(loaded.params, *prompts)
    np.testing.assert_array_equal(found, expected["generated"])


@pytest.mark.parametrize("name", golden_models.CLASSIFIERS)
def test_classifiers_compute_what_transformers_does_and_are_written_as_they_were(name, tmp_path):
    expected, loaded = golden_models.expected(name), golden_models.load(name, 3)
    batch, folder = golden_models.batch(name), golden_models.FOLDER / name
    scores = loaded.classifier()(loaded.params, batch["input_ids"], batch["attention_mask"])
    np.testing.assert_allclose(scores, expected["logits"], atol=LOGITS, rtol=0)
    np.testing.assert_array_equal(scores.argmax(axis=1), expected["generated"])
    np.testing.assert_allclose(loaded.loss_of(scores, batch["labels"]), expected["loss"], rtol=LOSS)
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out")
    written, source = (safetensors.numpy.load_file(path / "model.safetensors") for path in (tmp_path / "out", folder))
    assert written.keys() == source.keys()
    jax.tree.map(np.testing.assert_array_equal, written, source)
    for refused in (lambda: loaded.generator(max_new_tokens=1), lambda: zerojax.Engine(loaded)):
        with pytest.raises(UserError, match="a classifier, which writes no text"):
            refused()
    with pytest.raises(UserError, match=r"130 tokens, and the model has 12[78] positions"):
        loaded.classifier()(loaded.params, np.ones((1, 130), int))


@pytest.mark.parametrize("name", runs.cases(golden_models.CLASSIFIERS, long=golden_models.CLASSIFIERS))
def test_classifiers_compute_it_under_tensor_parallelism(name):
    assert_equal_logits(name, golden_models.load(name, 0, 2))


def test_an_encoder_without_a_head_gets_one_that_is_drawn_and_old_names_are_read(tmp_path):
    tensors = safetensors.numpy.load_file(golden_models.FOLDER / "bert" / "model.safetensors")
    head = [name for name in tensors if name.startswith(("classifier", "bert.pooler"))]
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    kept = {name: array for name, array in tensors.items() if name not in head}
    for new, before in old.items():
        kept = {name.replace(new, before): array for name, array in kept.items()}
    safetensors.numpy.save_file(
        kept | {"cls.predictions.bias": np.zeros(384, np.float32)}, tmp_path / "model.safetensors"
    )
    config = json.loads((golden_models.FOLDER / "bert" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    with pytest.warns(
        UserWarning, match=r"has no bert.pooler.dense.weight, classifier.weight, so its classes mean nothing"
    ):
        loaded = zerojax.load_huggingface(tmp_path, min_size=64)
    own, whole = loaded.params, golden_models.load("bert", 3).params
    np.testing.assert_array_equal(own["norm"]["scale"], whole["norm"]["scale"])
    drawn = np.asarray(own["head"]["dense"]["kernel"])
    assert abs(drawn.std() - 0.02) < 1e-3 and not np.asarray(own["head"]["out"]["bias"]).any()
    folder = folder_lib.open_folder(tmp_path)
    for classes in (("a", "b"), ("a", "b", "c", "d")):
        other = dataclasses.replace(folder, model=dataclasses.replace(folder.model, classes=classes))
        shape = {tensor.path: tensor.leaf_shape for tensor in layout.tensors(other.family, other.model)}
        assert shape["head/out/kernel"] == (64, len(classes))


@pytest.mark.parametrize("name", runs.cases(OTHERS, long=[name for name in OTHERS if name not in TENSOR]))
def test_other_families_compute_it_under_tensor_parallelism(name):
    assert_equal_logits(name, golden_models.load(name, 0, 2))


def test_weights_are_sharded_by_the_stage():
    for stage, held in ((0, 1.0), (3, 1 / 8)):
        loaded = golden_models.load("llama", stage)
        kernel = loaded.params["layer_0"]["mlp"]["gate"]["kernel"]
        assert kernel.addressable_shards[0].data.size == held * kernel.size
        assert kernel.sharding == loaded.partition.shardings["params"]["layer_0"]["mlp"]["gate"]["kernel"]


def test_weights_are_padded_and_cast_as_asked():
    exact = golden_models.load("qwen2", 0).params
    mesh = zerojax.make_mesh(data=7, devices=jax.devices()[:7])
    loaded = zerojax.load_huggingface(
        golden_models.FOLDER / "qwen2", mesh=mesh, dtype="bf16", min_size=64, indivisible="pad"
    )
    padded = [path for path, leaf in loaded.partition.leaves.items() if leaf.padding]
    assert padded
    own = dict(tree.flatten({"params": loaded.params}))
    for path, leaf in tree.flatten({"params": exact}):
        stored, kept = np.asarray(own[path]), tuple(map(slice, leaf.shape))
        np.testing.assert_array_equal(stored[kept], np.asarray(leaf).astype(stored.dtype))
        stored = stored.copy()
        stored[kept] = 0
        assert stored.dtype.name == "bfloat16" and not stored.any()


@pytest.mark.parametrize(
    "name, max_shard_bytes",
    [
        *(
            pytest.param(name, 2**30, marks=runs.LONG if name in ("qwen2", "t5") else ())
            for name in golden_models.NAMES
        ),
        ("bart", 100_000),
    ],
)
def test_an_export_of_an_import_holds_the_same_bytes_and_its_import_is_the_same(tmp_path, name, max_shard_bytes):
    source, loaded = tmp_path / "source", golden_models.load(name, 3)
    shutil.copytree(golden_models.FOLDER / name, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("mine")
    loaded = zerojax.load_huggingface(source, stage=3, min_size=64)
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    found: dict[str, np.ndarray] = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        found |= safetensors.numpy.load_file(file)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_shard_bytes < 2**20)
    expected = safetensors.numpy.load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert found[key].tobytes() == tensor.tobytes(), key
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / file).read_text().strip() == (source / file).read_text().strip()
    assert not (tmp_path / "out" / "notes.txt").exists()
    again = zerojax.load_huggingface(tmp_path / "out", stage=0)
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    assert again.config == loaded.config


def test_an_untied_bart_is_written_with_the_tables_of_its_encoder_and_decoder(tmp_path):
    shutil.copytree(golden_models.FOLDER / "bart", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(tensors | {"lm_head.weight": tensors["model.shared.weight"] + 1}, file)
    loaded = zerojax.load_huggingface(tmp_path / "in", stage=0)
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out")
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    for side in ("encoder", "decoder"):
        np.testing.assert_array_equal(found[f"model.{side}.embed_tokens.weight"], tensors["model.shared.weight"])
    assert folder_lib.open_folder(tmp_path / "out").model == loaded.config


def test_a_loaded_model_trains_as_a_model_of_ones_own():
    import optax
    from flax.training import train_state

    loaded, batch = golden_models.load("llama", 3), golden_models.batch("llama")
    batch = {key: np.concatenate([array] * 8) for key, array in batch.items()}

    def create(params):
        return train_state.TrainState.create(apply_fn=loaded.apply, params=params, tx=optax.sgd(0.1))

    state, partition = zerojax.shard_train_state(
        create, loaded.params, mesh=loaded.partition.mesh, stage=3, min_size=64
    )
    train_step = zerojax.make_train_step(
        lambda params, batch, state: loaded.loss(params, batch),
        partition,
        blocks=loaded.blocks,
        heads=loaded.heads,
        remat="none",
    )
    state, first = train_step(state, batch)
    state, second = train_step(state, batch)
    np.testing.assert_allclose(first["loss"], golden_models.expected("llama")["loss"], rtol=LOSS)
    assert second["loss"] < first["loss"]


def settings(tmp_path, name="bart", **changes):
    folder = tmp_path / name
    shutil.copytree(golden_models.FOLDER / name, folder, dirs_exist_ok=True)
    path = folder / folder_lib.GENERATION
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder_lib.open_folder(folder)


def test_special_tokens_come_from_the_settings_of_generation_and_else_from_the_config(tmp_path):
    found = pretrained.special_tokens(settings(tmp_path, eos_token_id=[5, 6], forced_bos_token_id=9))
    assert (found.stops, found.pad, found.start) == ((5, 6), 1, 2)
    assert (found.forced_first, found.forced_last) == (9, 2)
    folder = settings(tmp_path, "llama", pad_token_id=None)
    assert pretrained.special_tokens(folder).pad == 0  # of config.json
    assert pretrained.special_tokens(settings(tmp_path, forced_eos_token_id=[7, 3])).forced_last == 3
    for match, change in (
        ("eos_token_id is 384, and ids are from 0 to 383", {"eos_token_id": 384}),
        (
            "decoder_start_token_id is .2, 3., and rows begin with the same; name one",
            {"decoder_start_token_id": [2, 3]},
        ),
    ):
        with pytest.raises(UserError, match=match):
            pretrained.special_tokens(settings(tmp_path, **change))


@pytest.mark.parametrize("of_config", [3, None])
def test_labels_begin_with_the_start_token_of_config_json(tmp_path, of_config):
    folder = settings(tmp_path, decoder_start_token_id=4)
    raw = {name: value for name, value in folder.raw.items() if name != "decoder_start_token_id"}
    (folder.path / folder_lib.CONFIG).write_text(json.dumps(raw | ({"decoder_start_token_id": 3} if of_config else {})))
    loaded = zerojax.load_huggingface(folder.path, mesh=zerojax.make_mesh(), stage=3)
    assert loaded.special.start == 4
    batch = {name: np.asarray([[5, 6, 7]]) for name in ("input_ids", "labels")}
    told = {**batch, "decoder_input_ids": np.asarray([[of_config or 2, 5, 6]])}  # 2: of transformers' BartConfig
    np.testing.assert_array_equal(loaded.apply(loaded.params, batch), loaded.apply(loaded.params, told))


def test_settings_that_are_not_applied_are_named(tmp_path):
    assert pretrained.unread_settings(settings(tmp_path)) == []
    found = pretrained.unread_settings(settings(tmp_path, num_beams=4, no_repeat_ngram_size=3, min_length=0))
    assert found == ["num_beams=4", "no_repeat_ngram_size=3"]
    folder = settings(tmp_path).path
    (folder / folder_lib.GENERATION).unlink()
    config = folder / folder_lib.CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"repetition_penalty": 1.3}))
    assert pretrained.unread_settings(folder_lib.open_folder(folder)) == ["repetition_penalty=1.3"]


@runs.LONG
def test_padded_labels_are_left_out_and_start_after_the_start_token():
    loaded, batch = golden_models.load("bart", 0), golden_models.batch("bart")
    forward = jax.jit(loaded.loss)
    labels = batch["labels"].copy()
    labels[1, 6:] = -100
    shifted = np.concatenate([np.full((3, 1), 2), np.where(labels < 0, 1, labels)[:, :-1]], axis=1)
    logits = np.asarray(jax.jit(loaded.apply)(loaded.params, {**batch, "decoder_input_ids": shifted}), np.float64)
    terms = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    expected = terms[labels != -100].mean()
    np.testing.assert_allclose(forward(loaded.params, {**batch, "labels": labels}), expected, rtol=LOSS)
