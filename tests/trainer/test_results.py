"""Checks the results of a run. This module tests zerojax.trainer.results; test_loop.py has full runs."""

import json
import shutil

import golden_models
import jax
import numpy as np
import pytest
import runs
import tokenizers

import zerojax
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import templates
from zerojax.lora import adapters
from zerojax.trainer import examples, metrics, program, results
from zerojax.trainer import state as state_lib

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture(scope="module")
def built(cache_dir):
    return program.build(runs.config(), tokenizer_vocab=320)


def test_a_sample_begins_with_its_prompt_and_depends_on_the_seed(built):
    params = state_lib.first(built).params
    sample = {"prompt": "def ", "length": 6, "temperature": 1.0}
    first, again, other = (
        results.sample(built, tokenizer_lib.load_tokenizer("bytes"), params, **sample, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again != other and first.startswith("def ")


def test_an_export_and_the_curves_are_in_the_folder(built, tmp_path):
    results.export(built, state_lib.first(built), tmp_path / "export", tokenizer_lib.load_tokenizer("bytes"))
    with metrics.MetricsLog(tmp_path, enabled=True) as log:
        log.write(1, {"loss": 2.0})
    results.draw(tmp_path)
    assert (tmp_path / "losses.png").stat().st_size > 1000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "export").iterdir()
    }
    said, config = (
        json.loads((tmp_path / "export" / name).read_text()) for name in ("tokenizer_config.json", "config.json")
    )
    named = {
        t["id"]: t["content"] for t in json.loads((tmp_path / "export/tokenizer.json").read_text())["added_tokens"]
    }
    assert (
        said["tokenizer_class"] == "PreTrainedTokenizerFast"
    )  # not the class of the family, which adds tokens of its own
    assert said["eos_token"] == named[config["eos_token_id"]]


def test_a_failing_result_does_not_lose_the_others(capsys):
    done = []
    actions = [lambda: done.append(1), lambda: 1 / 0, lambda: done.append(2), lambda: [][1]]
    with pytest.raises(ZeroDivisionError):
        results.try_each(actions)
    assert done == [1, 2] and capsys.readouterr().err == "zerojax: IndexError: list index out of range\n"
    results.try_each([])


def test_an_export_of_adapters_is_a_folder_of_peft_or_a_merged_model(tmp_path):
    base, tokenizer = golden_models.FOLDER / "t5", tokenizer_lib.load_tokenizer("bytes")
    settings = {"init_from": str(base), "model__num_layers": 0, "data__tokenizer": "auto", "sample__length": 0}
    settings |= {"lora__init_from": str(base / "rslora"), "zero__stage": 0, "seq_len": 64}
    for format in ("peft", "huggingface"):
        built = program.build(runs.config(**settings, export__format=format))
        state = state_lib.first(built)
        results.export(built, state, tmp_path / format, tokenizer)
    again = zerojax.load_huggingface(base, stage=0, adapter=tmp_path / "peft")
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
    merged = zerojax.load_huggingface(tmp_path / "huggingface", stage=0)
    expected = adapters.merge(state.params, built.weights.adapted.chosen)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged.params, expected)


@pytest.mark.parametrize("is_own", [True, False])
def test_an_export_carries_the_tokenizer_of_the_run_and_that_of_the_models_folder_where_they_are_the_same(
    tmp_path, is_own
):
    base, of_run = tmp_path / "base", tmp_path / "tokenizer.json"
    shutil.copytree(golden_models.FOLDER / "llama", base, ignore=shutil.ignore_patterns("lora", "rslora"))
    for path, begins in ((of_run, True), (base / "tokenizer.json", is_own)):
        path.write_text(json.dumps(tokenizer_lib.load_tokenizer("bytes").file(begins=begins)))
    settings = {"init_from": str(base), "model__num_layers": 0, "data__tokenizer": str(of_run), "sample__length": 0}
    settings |= {"data__name": "python_stdlib", "export__format": "huggingface"}
    built = program.build(runs.config(**settings, zero__stage=0, seq_len=64))
    tokenizer = tokenizer_lib.load_tokenizer(str(of_run))
    results.export(built, state_lib.first(built), tmp_path / "export", tokenizer)
    config, generation, written = (
        json.loads((tmp_path / "export" / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer.json")
    )
    assert written == tokenizer.file(begins=True)
    adapted = program.build(runs.config(**settings | {"export__format": "peft"}, lora__r=2, zero__stage=0, seq_len=64))
    results.export(adapted, state_lib.first(adapted), tmp_path / "adapter", tokenizer)
    of_adapter = tmp_path / "adapter" / "tokenizer.json"
    assert not of_adapter.exists() if is_own else json.loads(of_adapter.read_text()) == written
    end = 2 if is_own else tokenizer.bos_id
    assert config["eos_token_id"] == generation["eos_token_id"] == end and config["hidden_size"] == 64


CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", ["own", "plain"])
def test_an_export_says_how_conversations_were_learned_and_what_ends_their_answers(tmp_path, template):
    base = tmp_path / "base"
    shutil.copytree(golden_models.FOLDER / "llama", base, ignore=shutil.ignore_patterns("lora", "rslora"))
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate("? a b c".split())}, "?")
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<|endoftext|>", "<|start|>", "<|end|>"])
    model.save(str(base / "tokenizer.json"))
    named = {
        "eos_token": "<|endoftext|>",
        "chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "x"}],
    }
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 4, "temperature": 0.5}))
    talk = [{"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b c"))]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 16))
    settings = {"init_from": str(base), "model__num_layers": 0, "sample__length": 0, "export__format": "huggingface"}
    settings |= {"data__task": "chat", "data__train_file": str(tmp_path / "chats.jsonl"), "data__tokenizer": "auto"}
    built = program.build(
        runs.config(**settings, data__chat_template=template, zero__stage=0, seq_len=64, data__answer_len=8)
    )
    tokenizer = tokenizer_lib.load_tokenizer(built.config.data.tokenizer)
    family, source = built.weights.family, built.weights.source
    pairs = examples.load(built.config, family, source, tokenizer, tmp_path)
    results.export(built, state_lib.first(built), tmp_path / "export", tokenizer, pairs)
    config, generation, of_tokenizer = (
        json.loads((tmp_path / "export" / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    )
    read = templates.chat_of(tmp_path / "export", "own")[0]
    assert generation["temperature"] == 0.5 and of_tokenizer["chat_template"] == named["chat_template"]
    first = pairs.train.examples[0]
    if template == "own":
        assert (config["eos_token_id"], generation["eos_token_id"]) == (
            [6, 2],
            [6, 4],
        )  # the model's own, as before, too
        assert of_tokenizer["eos_token"] == "<|end|>" and not (tmp_path / "export" / "chat_template.jinja").exists()
        assert tokenizer.encode_special(read(talk, False)).tolist() == first.inputs.tolist()
    else:
        assert generation["eos_token_id"] == 4 and of_tokenizer["eos_token"] == "<|endoftext|>"
        assert read(talk, False) == "### user\na\n\n### assistant\nb c<|endoftext|>\n\n"
        assert tokenizer.encode_special(read(talk, False)).tolist() == first.inputs.tolist()
