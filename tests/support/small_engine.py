"""A small decoder for tests of the engine, on one device. This module holds its config, its weights and an engine that tests share."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from zerojax.inference.engine import engine as engine_lib
from zerojax.models import families, family
from zerojax.models.llama.config import Heads, LlamaConfig
from zerojax.zero import stages

DECODER = families.PRESETS["test"]
# Biases, norms of queries and keys, and a window shorter than the texts.
CONFIG = LlamaConfig(
    61,
    1,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=128,
    heads=Heads(qkv_bias=True, norm="each", windows=(24,)),
)
NEW = 12
LENGTH = 64


def model(params=None, vocab_size=CONFIG.vocab_size):
    """Returns a model on one device."""
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size)
    random = np.random.default_rng(0)
    shapes = family.abstract_params(DECODER.parts, config)
    made = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)
    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    partition = stages.partition_state({"params": shapes}, mesh=mesh, stage=0)
    return types.SimpleNamespace(
        family=DECODER,
        config=config,
        special=family.SpecialTokens(stops=(7,)),
        partition=partition,
        params=jax.device_put(params or made, jax.devices()[0]),
    )


def text_of(tokens):
    return " ".join(map(str, tokens))


@functools.cache
def engine():
    return engine_lib.Engine(model(), slots=3, max_len=LENGTH, chunk=16, text_of=text_of)
