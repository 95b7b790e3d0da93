"""Compares a run with its tokenizer. This module refuses, before anything is compiled, what would fail at the first batch or the sample."""

import math

from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import tasks
from zerojax.errors import UserError
from zerojax.trainer import program as program_lib
from zerojax.trainer import setting_names, settings

SAMPLED = 160  # tokens of a sample whose length is not set


@setting_names.errors_of_config()
def check(program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Checks that a program's sequences, its prompt and its sample suit its tokenizer and its model.

    Raises:
      UserError: the tokenizer lacks sentinels, the prompt has too many gaps, or the sample is longer than the model's positions.
    """
    config = program.config
    if config.data.task != tasks.TEXT:
        return  # the examples are checked when they are encoded, and no sample is drawn
    program.objective.form(tokenizer, config.seq_len)
    if not config.sample.length:
        return
    prompt, room = _room(program, tokenizer)
    if config.sample.length > room:
        way_out = f"set --config.sample.length={room} or less" if room > 0 else "shorten config.sample.prompt"
        raise UserError(
            f"config.sample.length: the prompt's {prompt} tokens and {config.sample.length} more are over the "
            f"{program.model.max_seq_len} positions of config.model.preset={config.model.preset}; {way_out}"
        )


@setting_names.errors_of_config()
def sample_length(program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer) -> int:
    """Returns the tokens of a run's sample: those of its config, or else SAMPLED, or as many as the model has positions for."""
    config = program.config
    if config.data.task != tasks.TEXT:
        return 0
    if config.sample.length != settings.OWN:
        return config.sample.length
    _, room = _room(program, tokenizer)
    return int(max(0, min(SAMPLED, room)))


def _room(program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer) -> tuple[int, float]:
    """Returns the tokens of the prompt, and how many tokens the model has positions for after it."""
    inputs, start = program.objective.prompt(tokenizer, program.config.sample.prompt)
    longest = program.model.max_seq_len or math.inf
    read = max((len(array) for array in inputs.values()), default=0)
    return max(len(start), read), max(0, longest - len(start)) if read <= longest else 0
