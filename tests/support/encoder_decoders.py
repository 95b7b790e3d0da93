"""Small encoder-decoders with random weights. This module serves the tests of zerojax.models."""

import dataclasses

import jax
import numpy as np

from zerojax.models import families, family

VOCAB = 61
T5 = dataclasses.replace(families.PRESETS["t5_test"].presets["t5_test"], vocab_size=VOCAB)
BART = dataclasses.replace(
    families.PRESETS["bart_test"].presets["bart_test"],
    vocab_size=VOCAB,
    num_layers=1,
    decoder_layers=2,
    decoder_heads=2,
    decoder_mlp_dim=96,
    scale_embeddings=True,
)


def make_params(parts, config):
    """Returns a weight tree of normal numbers."""
    random = np.random.default_rng(0)
    shapes = family.abstract_params(parts, config)
    return jax.tree.map(lambda leaf: jax.device_put(random.normal(0, 0.1, leaf.shape).astype(leaf.dtype)), shapes)


def make_batch(inputs=14, targets=9):
    """Returns (inputs, targets) of two rows."""
    draw = np.random.default_rng(1).integers
    return tuple(jax.device_put(draw(VOCAB, size=(2, size)).astype(np.int32)) for size in (inputs, targets))
