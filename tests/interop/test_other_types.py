"""Checks what is said of model types that are no family. This module tests zerojax.interop.other_types, and the line that tells it."""

import json
import shutil

import golden_models
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import other_types


def refusal(tmp_path, name, **changes):
    """Returns the line for a golden folder with changes to its config.json, of which None leaves a field out."""
    folder = tmp_path / name
    shutil.copytree(golden_models.FOLDER / name, folder, ignore=shutil.ignore_patterns("*lora", "*.npz"))
    raw = json.loads((folder / "config.json").read_text()) | {"max_window_layers": None} | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    with pytest.raises(UserError, match="is not an architecture that zerojax computes") as caught:
        folder_lib.open_folder(folder)
    return str(caught.value).partition(" computes")[2].partition("; known: llama, ")[0]


@pytest.mark.parametrize(
    "name, kind, architecture, known",
    [
        ("llama", "iquestcoder", "LlamaForCausalLM", "LlamaForCausalLM"),
        ("roberta", "camembert", "CamembertForSequenceClassification", "RobertaForSequenceClassification"),
    ],
)
def test_a_type_that_computes_the_same_is_named_with_its_class(tmp_path, name, kind, architecture, known):
    found = refusal(tmp_path, name, model_type=kind, architectures=[architecture])
    same = other_types.SAME[kind]
    assert found == f", but computes what {same!r} does: set model_type to {same!r} and architectures to [{known!r}]"


@pytest.mark.parametrize("kind", ["helium", "llamb"])
def test_the_fields_and_tensors_of_a_known_type_prove_nothing(tmp_path, kind):
    assert refusal(tmp_path, "llama", model_type=kind, architectures=["AForCausalLM"]) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_gate": True},
        {"head_bias": "maybe"},
        {"architectures": ["IQuestCoderForTokenClassification"]},
        {"architectures": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
        {"hidden_size": 65},
    ],
)
def test_a_type_with_a_field_that_is_not_read_or_other_tensors_is_not_named(tmp_path, changes):
    assert (
        refusal(tmp_path, "llama", **{"model_type": "iquestcoder", "architectures": ["AForCausalLM"], **changes}) == ""
    )


def test_a_type_that_reads_images_too_names_its_text_model(tmp_path):
    inner = json.loads((golden_models.FOLDER / "gemma3" / "config.json").read_text())
    found = refusal(tmp_path, "gemma3", model_type="internvl", text_config=inner)
    assert found.startswith(", but its text model is 'gemma3_text', which it does: save that alone")
    shutil.rmtree(tmp_path / "gemma3")
    both = inner | {"use_bidirectional_attention": True}
    assert refusal(tmp_path, "gemma3", model_type="internvl", text_config=both) == ""
    for raw, known in (
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "qwen2"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}, "qwen3"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, "mistral"),
        ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}, "ministral3"),
        ({"model_type": "gemma3n", "text_config": {"model_type": ["a"]}}, None),
        ({"model_type": "llamb"}, None),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, None),
    ):
        assert other_types.text_model(raw).get("model_type") == known
    axes = {"type": "mrope", "mrope_section": [1, 2, 3]}
    assert "rope_scaling" not in other_types.text_model({"model_type": "qwen2_vl", "rope_scaling": axes})


@pytest.mark.parametrize(
    "name, kind, prefix, head",
    [
        ("gemma3", "gemma3", "model.language_model.", ""),
        ("ministral3", "mistral3", "language_model.model.", "language_model.lm_head.weight"),
        ("ministral3", "mistral3", "model.language_model.", "lm_head.weight"),
        ("qwen35", "qwen3_5", "model.language_model.", "lm_head.weight"),
    ],
)
def test_of_a_folder_that_reads_images_too_the_text_model_is_taken_in_one_line(tmp_path, name, kind, prefix, head):
    source = golden_models.FOLDER / name
    raw = json.loads((source / "config.json").read_text())
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    inner = {field: value for field, value in raw.items() if field not in ("tie_word_embeddings", "eos_token_id")}
    whole = {"model_type": kind, "text_config": inner, "vision_config": {"model_type": "siglip"}, "eos_token_id": 2}
    whole |= {"tie_word_embeddings": raw["tie_word_embeddings"], "architectures": ["AForConditionalGeneration"]}
    own = {head if at == "lm_head.weight" else at.replace("model.", prefix, 1): array for at, array in tensors.items()}
    own |= {"vision_tower.a.weight": np.ones(3, np.float32), "model.multi_modal_projector.b": np.ones(2, np.float32)}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(whole))
    safetensors.numpy.save_file(own, tmp_path / "in" / "model.safetensors")
    with pytest.warns(
        UserWarning, match=r"^config.json: 2 tensors such as \S+ are of parts that see images, and are not"
    ):
        loaded = zerojax.load_huggingface(tmp_path / "in", stage=0)
    assert loaded.config == folder_lib.open_folder(source).model and loaded.special.stops == (2,)
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out")
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys() and all((written[at] == tensors[at]).all() for at in tensors)
    again = folder_lib.open_folder(tmp_path / "out")
    assert again.model == loaded.config and "vision_config" not in again.raw and again.raw["eos_token_id"] == 2
    (tmp_path / "in" / "config.json").write_text(json.dumps(whole | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match=f"weights of {inner['model_type']} that are quantized by 'fp8' are not read"):
        folder_lib.open_folder(tmp_path / "in")


def test_what_a_published_config_of_gemma_3_lacks_has_the_values_of_its_class():
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    found = other_types.read_for_text({"model_type": "gemma3", "text_config": inner, "boi_token_index": 255999})
    assert (found["vocab_size"], found["num_attention_heads"], found["tie_word_embeddings"]) == (262208, 8, True)
    assert "boi_token_index" not in found and not other_types.read_for_text({"model_type": "gemma3"})


def model_of(tmp_path, name, raw):
    """Returns the model that a golden folder's tensors and another config.json describe."""
    folder = tmp_path / name
    shutil.copytree(
        golden_models.FOLDER / name, folder, ignore=shutil.ignore_patterns("*lora", "*.npz"), dirs_exist_ok=True
    )
    (folder / "config.json").write_text(json.dumps(raw))
    return folder_lib.open_folder(folder).model


@pytest.mark.parametrize("kinds", other_types._ALIASES)
def test_a_field_under_another_name_is_read_as_transformers_does(tmp_path, kinds):
    kind, names = kinds.split()[0], other_types._ALIASES[kinds]
    name = (
        kind.replace("4_5", "45")
        .replace("_", "")
        .replace("graniteemoe", "granitemoe")
        .replace("granitemoeh", "graniteh")
    )
    raw = json.loads((golden_models.FOLDER / name / "config.json").read_text())
    model = folder_lib.open_folder(golden_models.FOLDER / name).model
    for other, own in names.items():
        assert model_of(tmp_path, name, {key: v for key, v in raw.items() if key != own} | {other: raw[own]}) == model
        assert model_of(tmp_path, name, raw | {own: 1, other: raw[own]}) == model, "the other name wins"
        assert model_of(tmp_path, name, raw | {other: None}) == model


def test_the_heads_of_a_file_are_those_under_their_other_name(tmp_path):
    for name, field in (
        ("bart", "num_attention_heads"),
        ("gpt2", "num_attention_heads"),
        ("distilbert", "num_attention_heads"),
    ):
        raw = json.loads((golden_models.FOLDER / name / "config.json").read_text())
        assert model_of(tmp_path, name, raw | {field: 8}).num_heads == 8


def test_the_window_of_modernbert_is_half_of_its_attention_or_told(tmp_path):
    raw = json.loads((golden_models.FOLDER / "modernbert" / "config.json").read_text())
    for told in (4, 9):
        found = model_of(tmp_path, "modernbert", raw | {"sliding_window": told})
        assert found == model_of(tmp_path, "modernbert", raw | {"local_attention": 2 * told})
        assert told in found.windows


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "exaone4"])
@pytest.mark.parametrize("value", [False, None])
def test_a_decoder_whose_tokens_see_later_ones_is_refused(tmp_path, name, value):
    raw = json.loads((golden_models.FOLDER / name / "config.json").read_text())
    with pytest.raises(UserError, match="is_causal must be true, since a decoder's tokens see no later ones"):
        model_of(tmp_path, name, raw | {"is_causal": value})


def test_an_encoder_may_say_that_it_is_not_causal(tmp_path):
    raw = json.loads((golden_models.FOLDER / "bert" / "config.json").read_text())
    assert model_of(tmp_path, "bert", raw | {"is_causal": False}) == model_of(tmp_path, "bert", raw)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_yarn_of_one_kind_of_layers_blends_between_whole_pairs(tmp_path, kind):
    raw = json.loads((golden_models.FOLDER / "olmo3" / "config.json").read_text())
    usual = {"rope_type": "default", "rope_theta": 1e5}
    ropes = {"full_attention": usual, "sliding_attention": usual}
    own = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 64}
    model_of(tmp_path, "olmo3", raw | {"rope_parameters": ropes | {kind: own | {"truncate": True}}})
    with pytest.raises(UserError, match=f"{kind}: truncate: must be true"):
        model_of(tmp_path, "olmo3", raw | {"rope_parameters": ropes | {kind: own | {"truncate": False}}})
