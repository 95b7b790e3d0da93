"""Asks models for answers, and teaches them those of a teacher. This module holds small tasks, and what makes their batches."""

import jax
import runs

from zerojax.trainer import program, results, teacher
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import lessons, rollouts

LEARNED = {
    "data__task": "seq2seq",
    "data__answer": "{label}",
    "data__answer_len": 4,
    "seq_len": 16,
    "global_batch_size": 8,
}
ANSWERS = {**LEARNED, "data__task": "grpo", "grpo__group": 4}
TASK = {
    **ANSWERS,
    "grpo__reward": "asking:long",
    "grpo__inner_steps": 2,
    "evaluate__answers": 2,
    "checkpoint__every": 2,
}


def long(prompt, answer, label):
    """Returns a reward that differs between random answers."""
    return sum(map(ord, answer)) % 97 / 97


def echo(messages):
    """Returns a message, and a reward of 2."""
    return [{"role": "tool", "content": "#"}], 2.0


def write_prompts(folder, count=5, **more):
    """Writes a file of prompts with answers and more fields, and returns its path."""
    lines = ({"text": "ab"[: i % 2 + 1] + str(i), "label": str(i), **more} for i in range(count))
    return runs.write_lines(folder / "prompts.jsonl", lines)


def opened(prompts_file, devices=8, task=TASK, tell=lambda line: None, **changes):
    """Returns the program of a config, and what makes its batches."""
    built, streams, found = runs.opened(devices, **{**task, "data__train_file": prompts_file, **changes})
    with runs.on_devices(devices):
        return built, rollouts.Rollouts(built, runs.BYTES, found, streams, tell)


def teachers(folder, **changes):
    """Writes the export of a model with two layers, and returns its folder."""
    built = program.build(
        runs.config(model__num_layers=2, seed=5, **changes), tokenizer_vocab=320, devices=jax.devices()[:1]
    )
    results.export(built, state_lib.first(built), folder, runs.BYTES)
    return folder


def taught(texts_file, teacher_folder, devices=4, **changes):
    """Returns a student's program, and what makes its batches."""
    task = {**LEARNED, "data__train_file": texts_file, "distill__teacher": str(teacher_folder)}
    built, streams, found = runs.opened(devices, **{**task, **changes})
    with runs.on_devices(devices):
        teacher.check_tokenizer(built.weights.teacher.tokenized_by, runs.BYTES)
        return built, lessons.Lessons(built, runs.BYTES, found, streams)
