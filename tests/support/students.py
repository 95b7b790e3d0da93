"""Makes a teacher's folder, texts, and students of it. This module holds what tests of distillation share."""

import json

import jax
import runs

from zerojax.data import tokenizer
from zerojax.trainer import examples, program, results, teacher
from zerojax.trainer import model as model_lib
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import lessons

BYTES = tokenizer.load_tokenizer("bytes")
TASK = {
    "data__task": "seq2seq",
    "data__answer": "{label}",
    "data__answer_len": 4,
    "seq_len": 16,
    "global_batch_size": 8,
}


def texts(folder):
    """Returns a file of 20 prompts with answers."""
    path = folder / "texts.jsonl"
    lines = [{"text": "ab"[: i % 2 + 1] + str(i), "label": str(i)} for i in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def teachers(folder, **changes):
    """Writes the export of a model with two layers, and returns its folder."""
    built = program.build(
        runs.config(model__num_layers=2, seed=5, **changes), tokenizer_vocab=320, devices=jax.devices()[:1]
    )
    results.export(built, state_lib.first(built), folder, BYTES)
    return folder


def opened(texts_file, teacher_folder, devices=4, **changes):
    """Returns a student's program, and what makes its batches."""
    with runs.on_devices(devices):
        task = {**TASK, "data__train_file": texts_file, "distill__teacher": str(teacher_folder)}
        config = runs.config(**{**task, **changes})
        found = examples.load(config, *model_lib.family_of(config), BYTES, "")
        built = program.build(config, tokenizer_vocab=BYTES.vocab_size)
        teacher.check_tokenizer(built.weights.teacher.tokenized_by, BYTES)
        streams = program.open_feed(built, BYTES, "", found)
        return built, lessons.Lessons(built, BYTES, found, streams)
