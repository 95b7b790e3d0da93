"""Generates with weights in host memory. This module runs a program for each block, whose weights arrive beside the blocks before.

    prompts    block 0, block 1, ..., the first token
    a token    block 0, block 1, ..., the next one; until all rows have ended

On a device are the weights of about three blocks, and the caches. All weights cross the bus for each token. After each token every process
reads from the same value whether all rows have ended, so none waits for another that has left the loop.
"""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax.inference import choice as choice_lib
from zerojax.models import decoding
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree
from zerojax.zero.offload import fetched_params
from zerojax.zero.weights import partition as partition_lib

Following = tuple[choice_lib.Found, jax.Array, decoding.Step]  # the second says whether it goes on


class Loop:
    """`loop(params, inputs, tokens, lengths, part, seed)` -> the new tokens int32[rows, new_tokens]; see `generate.make_generator`."""

    def __init__(
        self,
        family: family_lib.Family,
        config: ModelConfig,
        partition: partition_lib.Partition,
        choice: choice_lib.Choice,
        compute_dtype: DTypeLike,
    ):
        how = family_lib.gathering(family, config, compute_dtype)

        def start(params: PyTree, inputs: PyTree, tokens: jax.Array, lengths: jax.Array) -> PyTree:
            return family.start(config, params, inputs, tokens, lengths, tokens.shape[1] + choice.new_tokens)

        self.start = fetched_params.by_row(start, partition, **how)
        self.extend = fetched_params.by_row(functools.partial(family.extend, config), partition, **how)
        same, rows = NamedSharding(partition.mesh, P()), mesh_lib.row_sharding(partition.mesh)
        found = choice_lib.Found._make([same, rows, rows, same])
        step: Any = decoding.Step._make([same, rows, rows, rows, None, None, None])

        def following(found: choice_lib.Found, lengths: jax.Array, tokens: jax.Array) -> Following:
            length = tokens.shape[1]
            step = decoding.next_step(lengths, length, found.num_tokens - 1, length + choice.new_tokens)
            return found, choice.goes_on(found), step

        def first(
            scores: jax.Array, lengths: jax.Array, tokens: jax.Array, part: choice_lib.AnswerPart, seed: jax.Array
        ) -> Following:
            return following(choice.first(scores, lengths, part, seed), lengths, tokens)

        def add(
            found: choice_lib.Found,
            scores: jax.Array,
            lengths: jax.Array,
            tokens: jax.Array,
            part: choice_lib.AnswerPart,
            seed: jax.Array,
        ) -> Following:
            return following(choice.add(found, scores, part, seed), lengths, tokens)

        self.first, self.add = (jax.jit(function, out_shardings=(found, same, step)) for function in (first, add))

    def __call__(
        self,
        params: PyTree,
        inputs: PyTree,
        tokens: jax.Array,
        lengths: jax.Array,
        part: choice_lib.AnswerPart,
        seed: jax.Array,
    ) -> jax.Array:
        """Reads the prompts and adds tokens."""
        scores, caches = self.start(params, (inputs, tokens, lengths))
        found, goes_on, step = self.first(scores, lengths, tokens, part, seed)
        while goes_on:
            scores, caches = self.extend(params, (caches, step, found.token))
            found, goes_on, step = self.add(found, scores, lengths, tokens, part, seed)
        return found.tokens
