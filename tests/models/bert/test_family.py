"""Checks presets, configs and rows of classifiers. This module tests zerojax.models.bert.family."""

import dataclasses
import json

import numpy as np
import programs
import pytest
import runs

from zerojax.data import tokenizer
from zerojax.data.pairs import rows, tasks
from zerojax.errors import UserError
from zerojax.models import family
from zerojax.models.bert import family as bert
from zerojax.models.bert import modern
from zerojax.trainer import metrics

# As transformers counts them with two classes.
PUBLISHED = {
    "bert_base": 109_483_778,
    "bert_large": 335_143_938,
    "roberta_base": 124_647_170,
    "roberta_large": 355_361_794,
    "xlm_roberta_base": 278_045_186,
    "xlm_roberta_large": 559_892_482,
    "distilbert_base": 66_955_010,
    "modernbert_base": 149_606_402,
    "modernbert_large": 395_833_346,
}
TABLES = {
    name: own
    for own in (bert.FAMILY, bert.ROBERTA, bert.XLM_ROBERTA, bert.DISTILBERT, bert.MODERNBERT)
    for name in own.presets
}
SHAPES = {name: own.presets[name] for name, own in TABLES.items()}


def test_big_presets_have_their_published_number_of_weights():
    assert {name: family.count_params(TABLES[name].parts, SHAPES[name]) for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_written_config_is_read_back(name):
    config = dataclasses.replace(SHAPES[name], classes=("no", "yes", "perhaps"), activation="relu")
    table = TABLES[name].huggingface
    found = table.read(table.write(config), ())
    if isinstance(config, modern.ModernBertConfig):  # the file names the windows of all layers
        assert [found.window_of(i) for i in range(28)] == [config.window_of(i % config.num_layers) for i in range(28)]
        found = dataclasses.replace(found, windows=config.windows)
    assert found == config


@pytest.mark.parametrize("field, value", [
    ("layer_types", ["full_attention"]), ("rope_scaling", {"rope_type": "yarn"}), ("classifier_pooling", "max"), ("local_attention", 1),
    ("rope_parameters", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
    ("rope_parameters", {"sliding_attention": {"type": "linear", "factor": 2.0}}),
])  # fmt: skip
def test_a_modern_config_that_is_not_computed_is_refused_in_one_line(field, value):
    written = bert.MODERNBERT.huggingface.write(SHAPES["modernbert_base"]) | {field: value}
    with pytest.raises(UserError, match=rf"^config.json: {field}.*: must be .*choose a folder") as caught:
        bert.MODERNBERT.huggingface.read(written, ())
    assert "\n" not in str(caught.value)


def test_a_modern_config_of_the_hub_is_that_of_the_preset():
    """Its file has the fields of earlier versions of the class."""
    raw = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 22,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
    }
    raw |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "classifier_pooling": "cls"}
    found = bert.MODERNBERT.huggingface.read(raw, ())
    shape = SHAPES["modernbert_base"]
    assert found == dataclasses.replace(shape, windows=(shape.windows * 8)[:22])


@pytest.mark.parametrize("field, value", [
    ("is_decoder", True), ("add_cross_attention", True), ("position_embedding_type", "relative_key"), ("num_labels", 1),
    ("problem_type", "regression"), ("id2label", {"0": "a"}), ("id2label", {"0": "a", "2": "b"}), ("hidden_act", "gulu"),
])  # fmt: skip
def test_a_config_that_is_not_computed_is_refused_in_one_line(field, value):
    written = bert.FAMILY.huggingface.write(SHAPES["bert_base"]) | {field: value}
    if field == "num_labels":
        del written["id2label"]
    with pytest.raises(UserError, match=rf"^config.json: (id2label|{field}): must be .*choose a folder") as caught:
        bert.FAMILY.huggingface.read(written, ())
    assert "\n" not in str(caught.value)


def test_a_row_is_a_prompt_with_the_number_of_its_class():
    words = tokenizer.ByteTokenizer()
    form = tasks.RowForm(False, 6, 1, 0, words.bos_id, words.bos_id, (words.bos_id,), ("no", "yes"))
    settings = tasks.TaskSettings("classification", "{q}", " {a}", form.classes, "", "")
    found = tasks.encode([{"q": "ab", "a": 1}, {"q": "abcdefgh", "a": "no"}], words, settings, form, name="x")
    made = rows.Rows(found.examples, form, packs=True)
    first, cut = made.arrays(0), made.arrays(1)
    np.testing.assert_array_equal(first["inputs"], [words.bos_id, ord("a"), ord("b"), 0, 0, 0])
    assert first["mask"].tolist() == [1, 1, 1, 0, 0, 0] and (first["labels"].tolist(), cut["labels"].tolist()) == (
        [1],
        [0],
    )
    assert (
        cut["mask"].all()
        and made.arrays(2)["labeled"].tolist() == [0]
        and "1 of 2 prompts are longer" in found.notes[0]
    )
    with pytest.raises(UserError, match="must be one of the 2 labels"):
        tasks.encode([{"q": "ab", "a": "maybe"}], words, settings, form, name="x")


SETTINGS = {
    "model__preset": "bert_test",
    "data__task": "classification",
    "data__labels": ("waste", "pleasure"),
    "data__prompt": "{q}",
    "data__answer": "{a}",
}


def write_examples(path):
    """Writes texts whose class is that of their only word."""
    made = [{"q": word, "a": word == "up"} for word in ("up", "down") * 8]
    path.write_text("".join(json.dumps(row | {"a": int(row["a"])}) + "\n" for row in made))
    return str(path)


@runs.LONG
def test_a_run_learns_classes_and_tells_its_accuracy(tmp_path, cache_dir):
    file = write_examples(tmp_path / "train.jsonl")
    settings = SETTINGS | {"data__train_file": file, "data__eval_file": file, "seq_len": 8, "steps": 12}
    runs.run(tmp_path / "run", **settings, export__format="huggingface")
    found = metrics.read(tmp_path / "run")
    assert [line["eval_accuracy"] for line in found if "eval_accuracy" in line][-1] == 1.0
    written = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert written["id2label"] == {"0": "waste", "1": "pleasure"}


WRONG = {
    "config.data.task: is seq2seq, and config.model.preset=bert_test is a classifier": {"data__task": "seq2seq"},
    "config.data.labels: has 0 classes, and config.model.preset=bert_test has no head yet": {"data__labels": ()},
    "config.data.labels: names 2 classes, and the head of .* has 3 .*; for a new head start from the model without its own, as": {
        "model__preset": "bert_test",
        "init_from": str(programs.ROOT / "tests/golden/huggingface/bert"),
        "data__tokenizer": "bytes",
    },
    "config.mesh.context: is 2, and the head of a classifier reads a text's first token": {"mesh__context": 2},
}


@pytest.mark.parametrize("line", WRONG)
def test_what_a_classifier_cannot_do_is_refused_before_anything_is_compiled(line, tmp_path):
    changed = SETTINGS | {"data__train_file": write_examples(tmp_path / "train.jsonl")} | WRONG[line]
    with pytest.raises(UserError, match=f"^{line}"):
        runs.trained(devices=2, **changed)


@pytest.mark.long
@pytest.mark.parametrize("changed", [
    {"zero__stage": 0}, {"zero__stage": 2, "grad_accum": 2}, {"zero__stage": 3}, {"mesh__model": 2},
    {"offload__optimizer": "host"}, {"offload__optimizer": "host", "offload__params": "host"},
])  # fmt: skip
def test_losses_of_a_classifier_are_those_of_one_device(changed, tmp_path, cache_dir):
    file = {"data__train_file": write_examples(tmp_path / "train.jsonl"), "seq_len": 8}
    plain = runs.run(tmp_path / "one", devices=1, **SETTINGS | file, zero__stage=0, steps=3)
    other = runs.run(tmp_path / "other", devices=4, **SETTINGS | file | changed, steps=3)
    for step, loss in runs.losses(plain).items():
        assert runs.losses(other)[step] == pytest.approx(loss, rel=1e-5)
