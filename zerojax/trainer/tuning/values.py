"""Rewards by a reward model. This module values the answers of a model in training by a folder's, on their tokens.

The folder is that of a class of transformers with one label, such as a run of the task `reward` exports. Its weights are sharded as the
stage says, and gathered block by block, in a program without a backward pass.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import rewards
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.interop import folder as folder_lib
from zerojax.models import family as family_lib
from zerojax.trainer import beside, teacher
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree

PLACE = "config.grpo.reward"


def fingerprint(reward: str) -> dict[str, str]:
    """Returns what tells a reward's folder apart from another (`resume.FINGERPRINTS`); {} where the reward is none."""
    return {"reward": folder_lib.fingerprint(folder_lib.open_folder(reward))} if rewards.is_folder(reward) else {}


def open_model(
    program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer, tell: Callable[[str], object]
) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]:
    """Returns f(a batch's arrays) -> the value of each answer with its prompt: float32[answers]. All processes must call it.

    It reads the weights at its first call.

    Raises:
      UserError: the folder's model gives texts no values, has another tokenizer than the run, or reads shorter texts alone.
    """
    path = program.config.grpo.reward
    with errors.below(f"{PLACE}: "):
        opened = folder_lib.open_folder(path)
    if family_lib.output(opened.model) != family_lib.VALUE or program.family.is_encoder_decoder:
        raise UserError(
            f"{PLACE}: {path} gives texts no values, or this run's model is no decoder; name a reward model, and train a decoder"
        )
    teacher.check_tokenizer(opened, tokenizer, PLACE)
    most = opened.model.max_seq_len
    if most and program.config.seq_len > most:
        raise UserError(
            f"{PLACE}: {path} reads texts of up to {most} tokens, and config.seq_len is {program.config.seq_len}; lower "
            "it, or name another model"
        )
    mesh = program.rollouts.mesh

    def of_rows(params: PyTree, batch: Mapping[str, jax.Array]) -> jax.Array:
        return opened.family.loss(opened.model, params, batch)

    @functools.cache
    def valued() -> Callable[[PyTree], jax.Array]:
        abstract = beside.abstract_of(program, opened)
        how: dict[str, Any] = {"function": of_rows, "tell": lambda line: tell(f"the reward model {line}")}
        how["read"] = functools.partial(folder_lib.read_params, opened)
        run, params = beside.opened(program, opened.family, abstract, **how, mesh=mesh)
        replicated = NamedSharding(mesh, P())
        same = jax.jit(lambda params, batch: run(params, (batch,)), out_shardings=replicated)
        return functools.partial(same, params)

    def values(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        size, found = program.sizes.rows, list[np.ndarray]()
        for at in range(0, len(arrays["tokens"]), size):
            part = {name: arrays[name][at : at + size] for name in ("tokens", "labeled")}
            found.append(np.asarray(valued()(generate.sharded_rows(part, mesh)))[:size])
        return np.concatenate(found).astype(np.float32)

    return values
