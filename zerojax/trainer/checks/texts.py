"""Compares a run with its tokenizer. This module refuses, before anything is compiled, what would fail at the first batch or the sample."""

from typing import Any

from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import tasks
from zerojax.errors import UserError


def check(program: Any, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Checks that a `Program`'s sequences, its prompt and its sample suit its tokenizer and its model.

    Raises:
      UserError: the tokenizer lacks sentinels, the prompt has too many gaps, or the sample is longer than the model's positions.
    """
    config = program.config
    if config.data.task != tasks.TEXT:
        return  # the examples are checked when they are encoded, and no sample is drawn
    program.objective.form(tokenizer, config.seq_len)
    if not config.sample.length:
        return
    inputs, start = program.objective.prompt(tokenizer, config.sample.prompt)
    longest = program.model.max_seq_len
    text = max(len(start) + config.sample.length, *(len(array) for array in inputs.values()), 0)
    if longest and text > longest:
        prompt = max(len(start), *(len(array) for array in inputs.values()), 0)
        way_out = (
            f"set --config.sample.length={longest - prompt} or less"
            if prompt < longest
            else "shorten config.sample.prompt"
        )
        raise UserError(
            f"config.sample.length: the prompt's {prompt} tokens and {config.sample.length} more are over the {longest} positions of "
            f"config.model.preset={config.model.preset}; {way_out}"
        )
