"""Answers examples with a function in place of a model. This module tests zerojax.trainer.tuning.predictions."""

import io
import json
import pathlib
import types

import numpy as np
import pytest
import runs

from zerojax.data.pairs import records, tasks
from zerojax.errors import UserError
from zerojax.models import family
from zerojax.trainer import config as config_lib
from zerojax.trainer import workdir
from zerojax.trainer.tuning import predictions


@pytest.fixture
def tuned(tmp_path):
    """Returns the folder of a run that learnt answers."""
    own = {"data__task": "classification", "data__name": "short_reviews", "data__labels": ("bad", "good")}
    settings = runs.config(**own, data__prompt="Tweet: {text}", data__answer=" {sort}", data__answer_len=4)
    (tmp_path / "run" / "export").mkdir(parents=True)
    workdir.save(tmp_path / "run", config_lib.to_dict(settings))
    return tmp_path / "run"


def test_a_run_asks_by_its_own_templates_and_is_found_above_its_export(tuned, tmp_path):
    settings, seq_len, answer_len = predictions.asking(tuned, None)
    assert (settings.task, settings.prompt, settings.answer) == ("classification", "Tweet: {text}", " {sort}")
    assert (settings.labels, seq_len, answer_len) == (("bad", "good"), 32, 4)
    assert predictions.asking(tuned, "{text}").settings.prompt == "{text}"
    assert predictions.run_of(None, str(tmp_path), str(tuned / "export")) == tuned
    assert predictions.run_of(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"data": 3}', '{"data": {"task": "chat"}, "seq_len": 8}'])
def test_what_is_no_config_of_a_run_is_refused_in_one_line(tmp_path, text):
    (tmp_path / workdir.CONFIG_FILE).write_text(text)
    with pytest.raises(
        UserError, match=r"^--run: .*config\.json is not the config of a run \([^\n]*\); name a --workdir$"
    ):
        predictions.asking(tmp_path, None)


def test_a_run_that_learnt_text_needs_a_template(tmp_path):
    workdir.save(tmp_path, config_lib.to_dict(runs.config()))
    with pytest.raises(UserError, match="learnt text and has no template of prompts"):
        predictions.asking(tmp_path, None)
    assert predictions.asking(tmp_path, "{text}!").settings.prompt == "{text}!"


@pytest.mark.parametrize(("asked", "positions", "most"), [(64, 32, 32), (16, 32, 16), (0, 32, 32), (64, None, 64)])
@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_a_prompt_is_as_long_as_the_run_asks_and_the_models_positions_allow(asked, positions, most, is_encoder_decoder):
    """For a decoder the answer, whose last token is not read, is in the same row."""
    folder = types.SimpleNamespace(
        path=pathlib.Path("model"),
        positions=positions,
        model=types.SimpleNamespace(classes=()),
        family=types.SimpleNamespace(is_encoder_decoder=is_encoder_decoder, is_classifier=False),
    )
    special = family.SpecialTokens(stops=(0,), start=0)
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(predictions.examples, "special_tokens", lambda *_: special)
        patched.setattr(tasks, "ask", lambda source, tokenizer, settings, form, **_: found.append(form))
        how = predictions.asking(None, "{text}")._replace(seq_len=asked)
        predictions.encode(None, "in", how, folder, None, 5)
    assert found[0].seq_len == most - (0 if is_encoder_decoder else 4)


def test_batches_have_few_shapes_and_every_example_gets_its_own_answer(tmp_path):
    lengths = [3, 17, 2, 20, 40]
    prompts = [np.full(length, number, np.int32) for number, length in enumerate(lengths)]
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {number}, "prediction": "old"}}\n' for number in range(5)))
    source, out, shapes = records.Files(str(tmp_path / "in.jsonl"), "--file"), io.StringIO(), []

    def generate(ids, mask):
        shapes.append(ids.shape)
        return np.stack([ids[:, 0], mask.sum(axis=1)], axis=1)

    labels = ["0 3", " 1 17", None, "wrong", None]
    asked = tasks.Asked(prompts, labels, [])
    answered = predictions.in_batches(prompts, generate, most=48, batch_size=2)
    told = predictions.write(source, asked, answered, lambda row: " ".join(map(str, row)), file=out)
    assert told == "5 predictions; 66.7% right (2 of 3 with a label)"
    assert shapes == [(2, 32), (2, 32), (2, 48)]
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["prediction"] for line in found] == [f"{number} {length}" for number, length in enumerate(lengths)]
    assert [line.get("is_right") for line in found] == [True, True, None, False, None]


def test_predictions_do_not_replace_their_examples_by_another_name(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    for out, read in (("in", "link"), ("link", "in"), ("in", "i*")):
        with pytest.raises(UserError, match="the examples are read from it; name another file"):
            predictions.check_out(f"{tmp_path}/{out}.jsonl", f"{tmp_path}/{read}.jsonl")
    predictions.check_out(f"{tmp_path}/out.jsonl", f"{tmp_path}/*.jsonl")


def test_a_file_gets_its_name_when_it_is_complete(tmp_path):
    path = tmp_path / "out.jsonl"
    with predictions.replacing(path) as file:
        file.write("one\n")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), predictions.replacing(path) as file:
        raise KeyboardInterrupt
    assert path.read_text() == "one\n" and list(tmp_path.iterdir()) == [path]
