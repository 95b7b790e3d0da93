"""Checks which teachers are refused. This module tests zerojax.trainer.teacher."""

import asking
import pytest
import runs

from zerojax import configs
from zerojax.errors import UserError
from zerojax.trainer import program


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"mesh__pipe": 2, "model__num_layers": 2, "grad_accum": 2},
            "config.mesh.pipe: is 2, and with config.distill.teacher",
        ),
        ({"mesh__context": 2}, "config.mesh.context: is 2"),
        ({"model__by_columns": "head"}, "config.model.by_columns: is 'head'"),
        ({"distill__own": 0.5, "epochs": 1.0}, "config.epochs: is 1.0, and with config.distill.own=0.5"),
        ({"distill__own": 0.5, "mesh__expert": 2}, "config.mesh.expert: is 2"),
        (
            {"distill__own": 0.5, "data__task": "text", "data__train_file": ""},
            "config.distill.own: is 0.5, and windows",
        ),
        ({"distill__own": 0.5, "seq_len": 4}, "config.seq_len: is 4, and the longest prompt"),
        ({"data__task": "dpo"}, "config.distill.teacher: is set, and the task dpo"),
        ({"data__task": "grpo"}, "config.distill.teacher: is set, and the task grpo"),
        ({"model__preset": "t5_test"}, "config.distill.teacher: the student is no decoder"),
        ({"model__vocab_size": 400}, "config.distill.teacher: .* vocabulary of 320 ids, and the student one of 400"),
        ({"distill__teacher": "/none"}, "config.distill.teacher: /none"),
        ({"distill__loss": "kl"}, "config.distill.loss: must be one of"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused_in_one_line(texts_file, teacher_folder, changes, words):
    with pytest.raises(UserError, match=words) as caught, program.setting_names.of_config():
        asking.taught(texts_file, teacher_folder, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", ["embed", "reward"])
def test_a_teacher_without_a_head_of_next_tokens_is_refused(texts_file, tmp_path, task):
    with pytest.raises(UserError, match=r"config.distill.teacher: /.* is no decoder that scores next tokens"):
        asking.taught(texts_file, asking.teachers(tmp_path, data__task=task, data__train_file=texts_file))


def test_a_teacher_with_another_tokenizer_or_with_adapters_alone_is_refused(
    texts_file, teacher_folder, cache_dir, tmp_path
):
    (tmp_path / "one").mkdir()
    for file in teacher_folder.iterdir():
        (tmp_path / "one" / file.name).write_bytes(file.read_bytes())
    own = configs.FOLDER / "short_reviews" / "tokenizer.json"
    (tmp_path / "one" / "tokenizer.json").write_bytes(own.read_bytes())
    with pytest.raises(UserError, match=r"another tokenizer than this run.*--config.data.tokenizer=.*tokenizer.json"):
        asking.taught(texts_file, tmp_path / "one")
    run = runs.run(tmp_path / "run", devices=1, steps=1, lora__r=2)
    with pytest.raises(UserError, match=r"config.distill.teacher: the checkpoints of .* hold adapters alone"):
        asking.taught(texts_file, run)
    run = runs.run(tmp_path / "unsaved", devices=1, steps=1, checkpoint__at_end=False)
    (run / "checkpoints").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=r"config.distill.teacher: .*unsaved holds no checkpoint"):
        asking.taught(texts_file, run)


def test_two_runs_of_one_model_are_two_teachers(texts_file, cache_dir, tmp_path):
    def fingerprint(run):
        return asking.taught(texts_file, run, devices=1)[0].weights.teacher.fingerprint

    runs_made = [runs.run(tmp_path / f"of_{seed}", devices=1, steps=1, seed=seed) for seed in (0, 1)]
    one, other = map(fingerprint, runs_made)
    assert one == fingerprint(runs_made[0]) != other
