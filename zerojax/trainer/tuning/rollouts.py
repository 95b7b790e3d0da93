"""Asks the model in training, and makes batches of its answers. This module holds what the task `grpo` does between two steps.

The engine reads the weights of the state as they are, sharded as they are: a weight is gathered where it is used, as in a step. A group of
answers to one prompt is rewarded, and `config.grpo.variant` makes advantages of that. Prompts and draws depend on the seed and the step
alone, so a run that resumes asks the same. All processes ask the same; process 0 rewards the answers, and its numbers are those of all.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.data import batches, feed
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import rewards, rows, splits, tasks
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import requests
from zerojax.launch import processes
from zerojax.lora import families as families_lora
from zerojax.models import family as family_lib
from zerojax.ops import ratios
from zerojax.trainer import config as config_lib
from zerojax.trainer import examples, rewarded
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer.tuning import answers
from zerojax.tree import PyTree
from zerojax.zero.blocks import where_used


class _Model(NamedTuple):
    """What the engine reads of a model."""

    family: family_lib.Family
    config: Any
    special: family_lib.SpecialTokens
    partition: Any
    params: PyTree
    adapters: Any


def check(config: settings_lib.Config, pairs: splits.Splits) -> None:
    """Checks that answers to the prompts can be drawn, before a program is built.

    Raises:
      UserError: groups do not divide the batch, a prompt with its answer is longer than a row, or there is no such reward.
    """
    config_lib.batch_sizes(config, mesh_lib.ways(mesh_lib.make_mesh(**vars(config.mesh))))
    rewards.find(config.grpo.reward)
    longest = max(map(len, tasks.prompts(pairs.train.examples, pairs.form)))
    if not pairs.form.is_encoder_decoder and longest > config.seq_len + 1 - config.data.answer_len:
        raise UserError(
            f"config.seq_len: is {config.seq_len}, and the longest prompt has {longest} tokens, after which an answer has "
            f"config.data.answer_len={config.data.answer_len}; set --config.seq_len={longest + config.data.answer_len - 1}"
        )


class Rollouts:
    """Makes the batch of each step from answers of the model."""

    def __init__(
        self,
        program: program_lib.Program,
        tokenizer: tokenizer_lib.Tokenizer,
        pairs: splits.Splits,
        streams: feed.Feed,
    ):
        self._reward = rewards.find(program.config.grpo.reward)
        self._program, self._tokenizer, self._pairs, self._streams = program, tokenizer, pairs, streams
        self._special = examples.special_tokens(program.family, program.weights.source, tokenizer, pairs.stops)
        self._prompts = list(tasks.prompts(pairs.train.examples, pairs.form))
        self._is_pair = program.family.is_encoder_decoder
        self._engine: engine_lib.Engine | None = None
        adapted, bare = program.weights.adapted, program.family
        if adapted is not None:
            bare = families_lora.with_adapters(program.weights.family, adapted.chosen, 0)
        self._log_probs = {
            rewarded.OLD: _log_probs(program, program.family),
            rewarded.REFERENCE: _log_probs(program, bare),
        }
        self._made: tuple[int, feed.Batch] | None = None

    def next(self, step: int, params: PyTree) -> feed.Batch:
        """Returns the batch of a step, counted from 1: answers of `params`, or of the weights some inner steps before."""
        number = (step - 1) // self._program.config.grpo.inner_steps
        if self._made is None or self._made[0] != number:
            self._made = number, self._ask(number, params)
        return self._made[1]

    def _ask(self, number: int, params: PyTree) -> feed.Batch:
        config, sizes = self._program.config, self._program.sizes
        group, count = config.grpo.group, sizes.global_batch_size
        first = number * (count // group)
        picked = [
            batches.shuffled(first + at, size=len(self._prompts), seed=config.seed) for at in range(count // group)
        ]
        numbers = [index for index in picked for _ in range(group)]
        engine = self._renewed(params)
        asked = [
            engine.submit(
                self._prompts[index].tolist(),
                temperature=1.0,
                seed=config.seed,
                stream=(number * count + at) % 2**32,
                max_tokens=config.data.answer_len,
            )
            for at, index in enumerate(numbers)
        ]
        engine.run()
        text = self._tokenizer.decode
        told = [answers.text_of(self._tokenizer, self._special.stops, np.asarray(request.tokens)) for request in asked]
        labels = [self._pairs.train.examples[index].answer.strip() for index in numbers]
        scores = np.zeros(count, np.float32)
        if processes.is_primary():
            for row, (index, answer, label) in enumerate(zip(numbers, told, labels)):
                prompt = text(self._prompts[index])
                scores[row] = rewards.score(self._reward, config.grpo.reward, prompt, answer, label)
        scores = np.asarray(multihost_utils.broadcast_one_to_all(scores))
        made = [self._example(index, request) for index, request in zip(numbers, asked)]
        by_row = rows.Rows(made, self._pairs.form, packs=False)
        arrays = [by_row.arrays(row) for row in range(count)]
        batch = {name: np.stack([one[name] for one in arrays]) for name in arrays[0]}
        batch |= {
            rewarded.REWARD: _bits(scores[:, None]),
            rewarded.ADVANTAGE: _bits(advantages(scores, group, config.grpo.variant)[:, None]),
        }
        return self._with_log_probs(batch, params)

    def _example(self, index: int, request: requests.Request) -> tasks.Example:
        """Returns an answer as a labeled example. Tokens that are always the same are no labels."""
        prompt, new = self._prompts[index], np.asarray(request.tokens, np.int32)
        labeled = np.ones(len(new), bool)
        if self._special.forced_first is not None and (self._is_pair or len(prompt) == 1):
            labeled[0] = False
        if self._special.forced_last is not None and len(new) == request.most:
            labeled[-1] = False
        if self._is_pair:
            return tasks.Example(
                prompt, np.append(np.int32(self._special.start), new), np.append(False, labeled), 0, ""
            )
        tokens = np.concatenate([prompt, new]).astype(np.int32)
        return tasks.Example(tokens, tokens[:0], np.append(np.zeros(len(prompt), bool), labeled), len(prompt), "")

    def _with_log_probs(self, batch: Mapping[str, np.ndarray], params: PyTree) -> feed.Batch:
        """Returns the batch on the devices, with the log-probabilities that its loss reads."""
        names = [name for name in self._log_probs if name in self._program.lengths]
        size = self._program.sizes.rows
        read = [name for name in batch if name not in rewarded.OF_ANSWER]
        found = dict(batch)
        for name in names:
            parts = []
            for at in range(0, self._program.sizes.global_batch_size, size):
                own = generate.sharded_rows({key: batch[key][at : at + size] for key in read}, self._program.mesh)
                parts.append(np.asarray(self._log_probs[name](params, own)))
            found[name] = _bits(np.concatenate(parts))
        return self._streams.placed(found)

    def _renewed(self, params: PyTree) -> engine_lib.Engine:
        """Returns the engine with these weights."""
        if self._engine is not None:
            self._engine.renew(params)
            return self._engine
        program, config = self._program, self._program.config
        ways, group = mesh_lib.size(program.mesh, mesh_lib.SUMMED), config.grpo.group
        is_pair, answer = self._is_pair, config.data.answer_len
        model = _Model(program.family, program.model, self._special, program.partition, params, program.weights.adapted)
        self._engine = engine_lib.Engine(
            model,
            params,
            is_gathered=True,
            dtype=config.policy.compute_dtype,
            slots=program.sizes.global_batch_size,
            max_len=answer + 1 if is_pair else config.seq_len + 1,
            max_inputs=config.seq_len,
            chunk=config.seq_len,
            together=math.lcm(group, ways),
            prefill_tokens=program.sizes.global_batch_size * config.seq_len,
        )
        return self._engine


def advantages(scores: np.ndarray, group: int, variant: str) -> np.ndarray:
    """Returns float32[answers] as a row of `ratios.VARIANTS` makes them of rewards; groups are neighbours."""
    groups = scores.reshape(-1, group).astype(np.float64)  # a square of a large reward has no float32
    return ratios.VARIANTS[variant]().advantages(groups).astype(np.float32).ravel()


def _bits(values: np.ndarray) -> np.ndarray:
    """Returns float32 numbers as the integers that a batch holds; a step would round floats to its dtype."""
    return np.ascontiguousarray(values, np.float32).view(np.int32)


def _log_probs(program: program_lib.Program, family: family_lib.Family) -> Callable[..., jax.Array]:
    """Returns f(params, batch) -> the log-probabilities of labels, float32[rows, tokens]."""
    partition, model = program.partition, program.model
    how: dict[str, Any] = {"blocks": family.blocks, "heads": family_lib.heads(family, model), "remat": "full"}

    def of_rows(params: PyTree, batch: feed.Batch) -> jax.Array:
        return -family.loss(model, params, batch, by_token=True)

    dtype = program.config.policy.compute_dtype
    sharded = where_used.where_used(of_rows, partition.placements, compute_dtype=dtype, **how)
    return jax.jit(sharded, out_shardings=NamedSharding(partition.mesh, P()))
