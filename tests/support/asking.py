"""Asks models in training for answers. This module holds a small task with rewards, and what makes its batches."""

import json

import runs

from zerojax.data import tokenizer
from zerojax.trainer import examples, program
from zerojax.trainer import model as model_lib
from zerojax.trainer.tuning import rollouts

BYTES = tokenizer.load_tokenizer("bytes")
ANSWERS = {
    "data__task": "grpo",
    "data__answer": "{label}",
    "data__answer_len": 4,
    "seq_len": 16,
    "global_batch_size": 8,
    "grpo__group": 4,
}
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


def write_prompts(folder, **more):
    """Writes a file of examples with more fields, and returns its path."""
    path = folder / "prompts.jsonl"
    lines = [{"text": "ab"[: i % 2 + 1] + str(i), "label": str(i), **more} for i in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def opened(prompts_file, devices=8, task=TASK, **changes):
    """Returns the program of a config, and what makes its batches."""
    with runs.on_devices(devices):
        config = runs.config(**{**task, "data__train_file": prompts_file, **changes})
        found = examples.load(config, *model_lib.family_of(config), BYTES, "")
        rollouts.check(config, found)
        built = program.build(config, tokenizer_vocab=BYTES.vocab_size)
        streams = program.open_feed(built, BYTES, "", found)
        return built, rollouts.Rollouts(built, BYTES, found, streams)
