"""Checks generated answers. This module tests zerojax.trainer.tuning.answers."""

import io
import re
import types

import numpy as np
import pytest
import rich.console
import runs

from zerojax.data import source, tokenizer
from zerojax.inference import generate
from zerojax.trainer import examples, program
from zerojax.trainer import model as model_lib
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import answers

BYTES = tokenizer.load_tokenizer("bytes")
TASK = {
    "data__name": "short_reviews",
    "data__task": "classification",
    "data__eval_split": "validation",
    "data__answer_len": 5,
    "seq_len": 80,
    "evaluate__answers": 11,
    "zero__stage": 3,
}


def score(*pairs, classes=("no", "yes")):
    return answers.Score([answers.Answer(f"q{i}", *pair) for i, pair in enumerate(pairs)], "accuracy", classes)


def test_a_score_counts_right_answers_and_those_of_no_class():
    found = score(("yes", "yes"), ("no", "yes"), ("maybe", "no"), ("no", "no"))
    assert found.share == 0.5
    assert found.line == "accuracy 50.0% (2 of 4 held-out answers); 1 answers are none of the 2 classes"
    assert score(("free", "text"), classes=()).line == "accuracy 0.0% (0 of 1 held-out answers)"
    out = io.StringIO()
    rich.console.Console(file=out, width=80).print(found.table)
    shown = out.getvalue()
    assert re.search(r"q0 +│ yes +│ yes +│ right", shown) and re.search(r"q2 +│ maybe +│ no +│ wrong", shown)
    assert found.records[1] == {"prompt": "q1", "found": "no", "label": "yes", "is_right": False}
    assert answers.as_rows(found.records).splitlines()[2] == "q0 | yes | yes | True"


@pytest.mark.parametrize("preset", runs.cases(["test", "bart_test"], long=["bart_test"]))
def test_answers_are_what_the_generator_gives_for_each_prompt_alone(tmp_path, cache_dir, preset):
    source.prepare("short_reviews", tmp_path)
    config = runs.config(**TASK, model__preset=preset)
    pairs = examples.load(config, *model_lib.family_of(config), BYTES, tmp_path)
    built = program.build(config, tokenizer_vocab=BYTES.vocab_size)
    params = state_lib.first(built).params
    found = answers.make(built, BYTES, pairs)(params)
    chosen = pairs.held_out.examples[:11]
    assert [answer.label for answer in found.answers] == [example.answer for example in chosen]
    assert sorted(found.classes) == ["negative", "positive"]
    special = examples.special_tokens(built.family, None, BYTES)
    alone = generate.make_generator(built.family, built.model, built.partition, new_tokens=5, special=special)
    number = 10  # of the second batch, which is not full
    prompt = chosen[number].inputs[: chosen[number].prompt or None]
    tokens = alone(params, prompt[None])[0, 1 if built.family.is_encoder_decoder else len(prompt) :]
    assert found.answers[number].found == BYTES.decode(tokens[: [*tokens, 256].index(256)]).strip()
    assert found.answers[number].prompt == BYTES.decode(prompt)


@pytest.mark.parametrize("preset, is_pair", [("test", False), ("bart_test", True)])
def test_an_answer_begins_after_the_prompt_or_the_start_token(monkeypatch, preset, is_pair):
    def generated(params, ids, mask):
        return np.concatenate([np.zeros((len(ids), 1), int) if is_pair else ids, [[*b"yes", 256]] * len(ids)], axis=1)

    monkeypatch.setattr(generate, "make_generator", lambda *given, **how: generated)
    built = program.build(runs.config(model__preset=preset), tokenizer_vocab=BYTES.vocab_size)
    pairs = types.SimpleNamespace(stops=(), form=types.SimpleNamespace(is_encoder_decoder=is_pair))
    assert answers._texts(built, BYTES, pairs)(None, np.ones((2, 3), int), None) == ["yes", "yes"]


def test_nothing_is_answered_without_held_out_examples_or_wish(tmp_path):
    source.prepare("short_reviews", tmp_path)
    for changes in ({"data__eval_split": ""}, {"evaluate__answers": 0}):
        config = runs.config(**{**TASK, **changes})
        pairs = examples.load(config, *model_lib.family_of(config), BYTES, tmp_path)
        assert answers.make(program.build(config, tokenizer_vocab=BYTES.vocab_size), BYTES, pairs) is None


def test_an_answer_ends_before_the_token_that_ends_it():
    assert answers.text_of(BYTES, (256,), np.array([*b" yes", 256, *b"no"])) == "yes"
    assert answers.text_of(BYTES, (256,), np.array([*b"yes "])) == "yes"
    assert answers.text_of(BYTES, (256,), np.array([256, *b"no"])) == ""
