"""Gives the library's errors and warnings the names that a command line uses. This module maps arguments to config keys and flags.

The library's lines begin with the name of an argument ("recompute: ...") and mention others in backticks ("set `stage=3`"). A user of a
config does not know these.
"""

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from zerojax.errors import UserError

# group of settings -> arguments of the same names
_ALIKE = {
    "": "mesh wire data profile reduce_dtype accum_dtype grad_accum seq_len steps",
    "mesh.": "pipe context expert",
    "zero.": "stage overrides indivisible min_size",
    "model.": "remat recompute offload by_columns programs attention",
    "optimizer.": "schedule warmup weight_decay moments momentum adamw_on rates clip_norm",
    "data.": "name tokenizer task prompt answer rejected labels messages chat_template sources on_bad pack train_split eval_split "
    "train_file eval_file text_key",
}
# argument -> the key or flag that sets it
KEYS = {
    **{name: f"config.{group}{name}" for group, names in _ALIKE.items() for name in names.split()},
    "expert_load": "config.experts.load",
    "expert_parts": "config.experts.parts",
    "activations": "config.model.ring",
    "host_devices": "config.wire.host_devices",
    "chunks": "config.pipeline.chunks",
    "optimizer": "config.optimizer.name",
    "rounds_weights": "config.precision",
    "eval_batches": "config.evaluate.batches",
    "text": "config.sample.prompt",
    "data_dir": "config.data.dir",
    "reward": "config.grpo.reward",
    "environment": "config.grpo.environment",
    "first": "config.profile.start",
    "count": "config.profile.steps",
    "target": "--target",
    "topology": "--topology",
}

_EMULATES = re.compile(r'`jax\.config\.update\("jax_num_cpu_devices", (\d+)\)` before JAX starts')


@contextlib.contextmanager
def of_config() -> Iterator[None]:
    """Puts the config key or the flag in front of a UserError or a warning of the block that begins with the name of an argument.

    Such a warning is printed as one line on stderr, once.
    """
    with errors_of_config(), warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            warned = list(caught)
    for one in warned:
        line = in_config(str(one.message))
        if line == str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        else:
            tell(line)


@contextlib.contextmanager
def errors_of_config() -> Iterator[None]:
    """Does the same to a UserError alone, so that the block may take long."""
    try:
        yield
    except UserError as error:
        line = in_config(str(error))
        if line == str(error):
            raise
        raise UserError(line) from error


def in_config(line: str, keys: Mapping[str, str] = KEYS) -> str:
    """Returns a line of the library with the names of config keys or flags."""

    def key(found: re.Match) -> str:
        verb, name, value = found[1] or "", found[2], found[3] or ""
        if name not in keys:
            return found[0]
        is_set = verb and value and not keys[name].startswith("--")
        return f"{verb}{'--' if is_set else ''}{keys[name]}{value}"

    line = _EMULATES.sub(r"--config.emulate_devices=\1", line)
    line = re.sub(r"(set )?`(\w+)(=[^`]*)?`", key, line)
    if (argument := re.match(r"\w+(?=[:=])|target(?= )", line)) is not None and argument[0] in keys:
        return keys[argument[0]] + line[argument.end() :]
    # A field of `Offload`; the argument of a train step is a regex.
    return f"config.{line}" if line.startswith(("offload.", "fp8", "lora.", "pipeline.", "wire.")) else line


@functools.cache  # a search builds many programs
def tell(line: str) -> None:
    """Prints a line on stderr, once."""
    print(f"zerojax: {line}", file=sys.stderr, flush=True)


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted place: {"mesh.data": -1, ...}."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
