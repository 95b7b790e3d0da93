"""Checks what is said of model types that are no family. This module tests zerojax.interop.other_types, and the line that tells it."""

import json
import shutil

import golden_models
import pytest

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
    found = refusal(tmp_path, "gemma3", model_type="gemma3", text_config=inner)
    assert found.startswith(", but its text model is 'gemma3_text', which it does: save that alone")
    shutil.rmtree(tmp_path / "gemma3")
    both = inner | {"use_bidirectional_attention": True}
    assert refusal(tmp_path, "gemma3", model_type="gemma3", text_config=both) == ""
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
