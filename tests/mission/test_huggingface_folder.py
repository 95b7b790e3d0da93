"""A folder of transformers is fine-tuned with all its weights, exported as one, and answers."""

import json

import pytest

pytestmark = pytest.mark.slow


def test_a_folder_is_fine_tuned_exported_and_answers_as_in_the_evaluation(tuner):
    flags = ("--config.lora.r=0", "--config.export.format=huggingface", "--config.optimizer.learning_rate=1e-3")
    flags += ("--config.evaluate.answers=24",)
    found = tuner.train("lora_tiny", "runs/all", *flags, "--config.epochs=0.5", "--config.log_every=1")
    assert found["losses"][19] < 0.7 * found["losses"][1]
    export = tuner.folder / "runs" / "all" / "export"
    assert json.loads((export / "config.json").read_text())["architectures"] == ["BartForConditionalGeneration"]
    prompts = [word for answer in found["answers"] for word in ("--prompt", answer["prompt"])]
    said = tuner.zerojax("generate", "runs/all/export", "--max_new_tokens", 4, *prompts).out
    assert [line.strip() for line in said.splitlines()] == [answer["found"] for answer in found["answers"]]
